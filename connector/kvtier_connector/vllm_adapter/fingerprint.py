# SPDX-License-Identifier: Apache-2.0
"""Identifies the blocks of an engine by its resolved settings, its model files, its KV layout and its weights.

`engine_facts` becomes part of the identity that ``tier.json`` holds. The operator's digest covers what the user wrote;
the engine resolves the rest (types, groups, sizes), and two engines with the same flags can still differ there. The
list of facts is explicit: a new field in vLLM's config changes no cache. An unknown fact is None, and None differs from
everything else.

`LoadedWeights` tells whether the weights of a worker are still those of its start.
"""

from __future__ import annotations

import hashlib
import json
import operator
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from vllm import envs
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata
from vllm.logger import init_logger

from kvtier_connector.store.header import FORMAT_VERSION

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadingSpec

logger = init_logger("vllm.kvtier.fingerprints")

PREFIX: Final = "engine."
"""Begins the name of each fact in ``tier.json``."""
_WEIGHT_SUFFIXES: Final = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf"})
_DESCRIPTIONS: Final = ("config.json", "adapter_config.json", "params.json", "quantize_config.json")
_FILE_SAMPLES: Final = 16
"""Places of a file that are read. Training changes weights everywhere, so few places show it. A change of one tensor
in a hundred may go unseen, so the documentation tells users to write a model's directory once."""
_FILE_SAMPLE_BYTES: Final = 4096
_LAYOUT_ENV: Final = ("VLLM_KV_CACHE_LAYOUT", "VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT", "VLLM_SSM_CONV_STATE_LAYOUT")
"""Variables by which backends lay KV or state out in another way."""
_PIECE_WORDS: Final = 1 << 22
"""Words of a tensor that are summed at once: 32 MiB."""
_SAMPLE_WORDS: Final = 16
"""Words of 8 bytes that a check reads of each tensor."""


@dataclass(frozen=True)
class Declared(KVConnectorHandshakeMetadata):
    """The facts that a worker tells the scheduler's side before the first request."""

    backends: tuple[str, ...]
    """Kinds of layers, with the backend and the instruction set of each."""
    layout: str
    """Digest of the KV layout."""
    weights: str | None
    """Digest of the loaded weights; None if a part of them is unreadable."""


def engine_facts(
    spec: OffloadingSpec, declared: Sequence[Declared], *, bytes_per_chunk: int, revision: str = "main"
) -> dict[str, Any]:
    """Return the facts by name, each name with `PREFIX`; JSON values only.

    Args:
        spec: vLLM's settings of the engine; `KVTierSpec` also has vLLM's whole config.
        declared: Declarations of the workers, in the order of their ranks.
        bytes_per_chunk: Size of the payload of a block file.
        revision: Branch, tag or commit of the model that the user asked for.
    """
    config = spec.config
    parallel = config.parallel
    # Rows of the direct layout hold the ranks side by side, so they fit one topology. Only the canonical layout, which
    # vLLM certifies layer by layer, is free of it.
    is_topology_free = bool(config.canonical_layout and parallel.is_parallelism_agnostic)
    topology = {
        "world_size": parallel.world_size,
        "tensor_parallel": parallel.tp_size,
        "pipeline_parallel": parallel.pp_size,
        "prefill_context_parallel": parallel.pcp_size,
        "decode_context_parallel": parallel.dcp_size,
    }
    facts = {
        "model_name": config.model.name,
        "weights": fingerprint_files(config.model.name, revision) or _loaded(declared),
        "kv_dtype": config.model.dtype,
        "kv_layout": config.kv_cache_layout,
        "backends": sorted({backend for each in declared for backend in each.backends}),
        "layout_env": {name: str(value) for name in _LAYOUT_ENV if (value := getattr(envs, name, None))},
        # Canonical rows are the same whatever the ranks hold.
        "layout": "canonical" if is_topology_free else sorted({each.layout for each in declared}),
        "is_layout_canonical": bool(config.canonical_layout),
        "is_layout_replicated": bool(config.replicated_layout),
        "groups": [
            {"tokens_per_block": group.tokens_per_block, "layers": list(group.layer_names)} for group in config.groups
        ],
        "tokens_per_hash": config.cache.tokens_per_hash,
        "blocks_per_chunk": config.cache.blocks_per_chunk,
        "bytes_per_chunk": bytes_per_chunk,
        "topology": "any" if is_topology_free else topology,
        "hash_seed": os.environ.get("PYTHONHASHSEED"),
        "block_format": FORMAT_VERSION,
        **_resolved(getattr(spec, "engine_config", None)),
    }
    return {f"{PREFIX}{name}": value for name, value in facts.items()}


def _loaded(declared: Sequence[Declared]) -> str | None:
    """Return a name for the loaded weights of all workers; None if one digest is missing."""
    digests = [each.weights for each in declared]
    if not digests or None in digests:
        return None
    return f"loaded:{hashlib.sha256(' '.join(map(str, digests)).encode()).hexdigest()[:32]}"


def _resolved(config: VllmConfig | None) -> dict[str, Any]:
    """Return the user's settings as vLLM resolved them."""
    names = ("revision", "dtype", "quantization", "rope", "hf_overrides", "kv_cache_dtype", "hash_algorithm")
    if config is None:
        return dict.fromkeys(names)
    model, cache = config.model_config, config.cache_config
    rope = {
        name: getattr(model.hf_text_config, name, None) for name in ("rope_parameters", "rope_scaling", "rope_theta")
    }
    values = (
        model.revision,
        str(model.dtype).removeprefix("torch."),
        None if model.quantization is None else str(model.quantization),
        _plain(rope),
        _plain(model.hf_overrides),
        str(cache.cache_dtype),
        str(cache.prefix_caching_hash_algo),
    )
    return dict(zip(names, values, strict=True))


def _plain(value: Any) -> Any:
    """Return a JSON copy of the value; a function is represented by its name."""
    return json.loads(
        json.dumps(value, sort_keys=True, default=lambda other: getattr(other, "__qualname__", str(other)))
    )


def fingerprint_files(model: str, revision: str) -> str | None:
    """Return the commit of a hub model, or a digest of a directory; None if neither can be read.

    A branch moves and a directory may be written anew, so the model's name does not identify its weights.

    Args:
        model: Name on the hub, or a directory.
        revision: Branch, tag or commit that the user asked for.
    """
    # The import reads the environment, and takes a while.
    from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415 - takes a while
    from huggingface_hub.errors import HFValidationError  # noqa: PLC0415 - takes a while

    try:
        directory = Path(model)
        if directory.is_dir():
            return _sample_files(directory)
        files = [try_to_load_from_cache(model, file, revision=revision) for file in _DESCRIPTIONS]
    except HFValidationError:
        return None
    except OSError as error:
        logger.warning("The files of %s do not identify its weights: %s", model, error)
        return None
    return next((Path(file).parent.name for file in files if isinstance(file, str)), None)


def _sample_files(directory: Path) -> str | None:
    """Return a digest of the description, and of sizes and samples of the weight files; None without weight files."""
    digest = hashlib.sha256()
    paths = [each for each in directory.iterdir() if each.suffix in _WEIGHT_SUFFIXES or each.name in _DESCRIPTIONS]
    for path in sorted(paths):
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb", buffering=0) as file:
            for turn in range(_FILE_SAMPLES):
                file.seek(max(0, size - _FILE_SAMPLE_BYTES) * turn // (_FILE_SAMPLES - 1))
                digest.update(file.read(_FILE_SAMPLE_BYTES))
    return f"sha256:{digest.hexdigest()[:32]}" if any(each.suffix in _WEIGHT_SUFFIXES for each in paths) else None


def describe_layout(config: VllmConfig, kv_caches: Mapping[str, Any], blocks: int) -> tuple[tuple[str, ...], str]:
    """Return the kinds of layers, and a digest of how they lay KV out.

    Args:
        config: vLLM's, with its layers.
        kv_caches: By layer, its tensor or tensors.
        blocks: How many blocks the tensors have.
    """
    layers = config.compilation_config.static_forward_context
    found = []
    for name in sorted(kv_caches):
        held = kv_caches[name]
        tensors = [held] if isinstance(held, torch.Tensor) else list(held)
        shapes = [_shape(tensor, blocks) for tensor in tensors]
        found.append((name, _backend(layers.get(name)), shapes))
    text = json.dumps(found, separators=(",", ":"))
    return tuple(sorted({backend for _, backend, _ in found})), hashlib.sha256(text.encode()).hexdigest()[:32]


def _backend(layer: Any) -> str:
    """Return what a layer is, by whom it is computed, and with which instructions."""
    made: Any = getattr(layer, "attn_backend", None) or getattr(layer, "impl", None)
    name = made.get_name() if hasattr(made, "get_name") else type(made).__name__
    parts = [type(layer).__name__, "" if made is None else name, str(getattr(layer, "isa", ""))]
    return "/".join(part for part in parts if part)


def _shape(tensor: torch.Tensor, blocks: int) -> list[Any]:
    """Return type, shape and order of the dimensions; how many blocks there are depends on the room only."""
    # The first dimension that can number the blocks, which a backend may cut into smaller ones.
    place = next((number for number, size in enumerate(tensor.shape) if size and size % blocks == 0), 0)
    sizes = [-1 if number == place else size for number, size in enumerate(tensor.shape)]
    return [str(tensor.dtype), sizes, [stride if stride < tensor.stride(place) else -1 for stride in tensor.stride()]]


def add_value(total: hashlib._Hash, name: str, value: Any) -> None:
    """Add a name with tensors, numbers or texts, also in nested lists, to a digest.

    Raises:
        TypeError: The value is of another type.
    """
    if isinstance(value, torch.Tensor):
        total.update(f"{name}\0{value.dtype} {tuple(value.shape)}\0".encode())
        total.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    elif isinstance(value, list | tuple):
        total.update(f"{name}\0list {len(value)}\0".encode())
        for each in value:
            add_value(total, name, each)
    elif value is None or isinstance(value, bool | int | float | str):
        text = repr(value).encode()
        total.update(f"{name}\0{type(value).__name__} {len(text)}\0".encode() + text)
    else:
        raise TypeError(f"{name} is {type(value).__name__}")


class LoadedWeights:
    """The weights of one worker's model, compared with those of its start. The worker's thread only.

    A change in place shows in the tensors' version counters or addresses, or in a sample of their contents: writes
    through ``.data`` count no version. Buffers that are saved with a model count as weights: scales of quantized KV,
    scalars of layers. Experts that vLLM moves between ranks (EPLB) do not count.
    """

    def __init__(self, runner: Any, *, has_moving_experts: bool = False) -> None:
        """Note the weights of the runner's model.

        Args:
            runner: vLLM's model runner; None if it was not found, which counts as a change.
            has_moving_experts: True if vLLM moves experts between ranks.
        """
        self._runner = runner
        self._has_moving_experts = has_moving_experts
        self._trace: _Trace | None = None
        """The state that was compared last; None while the weights are not those of the start."""
        self._first: str | None = None
        self._first, self._trace = self._read()
        self._has_packed = self._trace is not None and self._trace.has_packed

    @property
    def digest(self) -> str | None:
        """The digest of all weights of the start; None if a part is unreadable or packed by a kernel."""
        return None if self._has_packed else self._first

    @property
    def has_changed(self) -> bool:
        """True while the weights are not those of the start; waits for the device's answer to the last check."""
        if self._trace is not None and not self._trace.is_same_sample():
            self.check_all()
        return self._trace is None

    def check(self) -> None:
        """Compare versions, addresses and a sample; `has_changed` has the result. Takes no device time to wait for."""
        if self._trace is None:
            return
        if self._trace.is_in_place():
            self._trace.sample()
        else:
            self.check_all()

    def check_all(self) -> None:
        """Compare all weights, which reads each once; afterwards `has_changed` may be False again."""
        total, trace = self._read()
        self._trace = trace if total == self._first else None

    def _read(self) -> tuple[str, _Trace] | tuple[None, None]:
        """Return a digest of all weights and their trace; None for both if a part is unreadable."""
        total = hashlib.sha256()
        try:
            places = list(self._places())
            for name, owner, key in places:
                value = owner[key]
                if not isinstance(value, torch.Tensor):
                    # Identifies the packed weights in this process. The trace keeps the function.
                    total.update(f"{name} {id(value)} ".encode())
                    continue
                total.update(f"{name} {value.dtype} {tuple(value.shape)} ".encode())
                for part in _parts(value):
                    total.update(_sums(part))
            return total.hexdigest(), _Trace([(owner, key) for _, owner, key in places])
        except Exception:
            # A tensor of an unknown kind costs sharing, and no request.
            logger.exception("The weights cannot be read, so this engine serves without the volume")
            return None, None

    def _places(self) -> Iterator[tuple[str, Mapping[str, Any], str]]:
        """Return names of weights, also of a draft model, with the dictionary and the key of each.

        By the dictionaries themselves, so that a check sees a tensor that was replaced.
        """
        drafters = [getattr(self._runner, name, None) for name in ("drafter", "speculator")]
        for model in (self._runner.get_model(), *(getattr(each, "model", None) for each in drafters)):
            if not isinstance(model, torch.nn.Module):
                continue
            for prefix, module in model.named_modules():
                if self._has_moving_experts and hasattr(module, "get_expert_weights"):
                    continue
                passing = module._non_persistent_buffers_set  # noqa: SLF001 - torch has no public view
                owners: list[dict[str, Any]] = [module._parameters, module._buffers]  # noqa: SLF001 - see above
                found: list[tuple[dict[str, Any], str]] = [
                    (owner, key)
                    for owner in owners
                    for key, tensor in owner.items()
                    if tensor is not None and key not in passing
                ]
                # vLLM's CPU build packs a layer's weights into a function of the layer, and leaves an empty tensor.
                if "cpu_linear" in vars(module) and not all(owner[key].numel() for owner, key in found):
                    found.append((vars(module), "cpu_linear"))
                for owner, key in found:
                    yield f"{prefix}.{key}", owner, key


class _Trace:
    """Versions, addresses and a sample of tensors at one time."""

    def __init__(self, places: Sequence[tuple[Mapping[str, Any], str]]) -> None:
        """Note them; raise what torch raises of a tensor that cannot be read."""
        self._places = places
        # Referenced, so that no other object can take the place of one that was freed. Storage that a trainer replaces
        # is freed with the next check.
        self._values = [owner[key] for owner, key in places]
        tensors = [each for each in self._values if isinstance(each, torch.Tensor)]
        self.has_packed = len(tensors) < len(places)
        """True if a function holds weights of a layer."""
        # A tensor that was made in inference mode counts no versions.
        self._counted = [each for each in tensors if not each.is_inference()]
        self._versions = list(map(_VERSION, self._counted))
        self._parts = [part for each in tensors for part in _parts(each)]
        self._addresses = list(map(torch.Tensor.data_ptr, self._parts))
        views: dict[tuple[torch.device, int], list[torch.Tensor]] = {}
        for part in self._parts:
            if part.numel():
                spread = _spread(part)
                views.setdefault((part.device, spread.shape[1]), []).append(spread)
        self._views = list(views.values())
        self._sample = [torch.cat(each) for each in self._views]
        self._differences: list[tuple[torch.Tensor, torch.Event | None]] = []

    def is_in_place(self) -> bool:
        """Compare objects, versions and addresses, without a look at contents."""
        now = [owner.get(key) for owner, key in self._places]
        return (
            all(map(operator.is_, now, self._values))
            and list(map(_VERSION, self._counted)) == self._versions
            and list(map(torch.Tensor.data_ptr, self._parts)) == self._addresses
        )

    def sample(self) -> None:
        """Begin to compare the contents."""
        self._differences = []
        for views, before in zip(self._views, self._sample, strict=True):
            difference = (torch.cat(views) != before).any()
            event = None
            if difference.device.type != "cpu":
                # Later work on the device must not hold the answer up.
                difference = difference.to("cpu", non_blocking=True)
                event = torch.Event(before.device)
                event.record()
            self._differences.append((difference, event))

    def is_same_sample(self) -> bool:
        """Wait for the last comparison and return its result."""
        differences, self._differences = self._differences, []
        for _, event in differences:
            if event is not None:
                event.synchronize()
        return not any(bool(difference) for difference, _ in differences)


_VERSION: Final = operator.attrgetter("_version")


def _parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Return the tensors that hold the memory of a tensor: itself, or those that a subclass of torchao wraps."""
    if not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from _parts(getattr(tensor, name))


def _spread(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of words of 8 bytes, evenly spread over the memory of a tensor; of all bytes of a small tensor."""
    size = tensor.element_size()
    begin = tensor.storage_offset() * size
    last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    extent = (1 + last) * size
    storage = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    if extent < 8 * _SAMPLE_WORDS:
        return storage[begin : begin + extent].view(-1, 1)
    return storage.as_strided((_SAMPLE_WORDS, 8), ((extent - 8) // (_SAMPLE_WORDS - 1), 1), begin)


def _sums(tensor: torch.Tensor) -> bytes:
    """Return two sums over the words of a tensor that show a change of any word, computed on the tensor's device.

    The second sum weighs each word with an odd number of its own, so that words that change places show, too.
    """
    if not tensor.numel():
        return b""
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if rest := -data.numel() % 8:
        data = torch.cat([data, data.new_zeros(rest)])
    words = data.view(torch.int64)
    places = torch.arange(1, 2 * min(len(words), _PIECE_WORDS), 2, dtype=torch.int64, device=words.device)
    places = places * 0x9E3779B97F4A7C1 + 2
    sums = []
    for first in range(0, len(words), _PIECE_WORDS):
        piece = words[first : first + _PIECE_WORDS]
        sums += [piece.sum(), (piece * (places[: len(piece)] | 1)).sum()]
    found: bytes = torch.stack(sums).cpu().numpy().tobytes()
    return found
