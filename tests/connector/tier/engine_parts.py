# SPDX-License-Identifier: Apache-2.0
"""What a simulated engine is made of: its shape, its model's settings, its copies, and what its memory must hold."""

from __future__ import annotations

import functools
import json
import tempfile
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from engine_process import transfer_config
from typing_extensions import override
from vllm.config import CacheConfig, DeviceConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights
from vllm.lora.model_manager import LRUCacheLoRAModelManager
from vllm.lora.request import LoRARequest
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager
from vllm.multimodal.inputs import (
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    MultiModalSharedField,
    PlaceholderRange,
)
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec
from vllm.v1.kv_offload.base import GPULoadStoreSpec, LoadStoreSpec, OffloadingWorker, TransferResult

from kvtier_connector.cascade.rates import PrefillRate

BLOCK_TOKENS = 16
LANES = 32
PAGE_BYTES = BLOCK_TOKENS * LANES * 8
VOCABULARY = 1000
WINDOW_TOKENS = 4 * BLOCK_TOKENS
IMAGE_TOKENS = 20
RUBBISH = 0xDEAD_BEEF_DEAD_BEEF
Words = npt.NDArray[np.uint64]


def attention(window: int | None) -> KVCacheSpec:
    shape: dict[str, Any] = {"block_size": BLOCK_TOKENS, "num_kv_heads": 1, "head_size": LANES, "dtype": torch.float32}
    return FullAttentionSpec(**shape) if window is None else SlidingWindowSpec(**shape, sliding_window=window)


@functools.cache
def model_config() -> ModelConfig:
    with tempfile.TemporaryDirectory() as directory:
        shape = {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": VOCABULARY,
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 1 << 16,
        }
        (Path(directory) / "config.json").write_text(json.dumps(shape))
        init_none_hash(sha256)
        return ModelConfig(
            model=directory,
            skip_tokenizer_init=True,
            dtype="float32",
            seed=0,
            max_model_len=1 << 15,
            enforce_eager=True,
        )


@dataclass(frozen=True)
class Shape:
    gpu_blocks: int = 256
    cpu_chunks: int = 64
    blocks_per_chunk: int = 1
    windows: tuple[int | None, ...] = (None,)
    """The sliding window of each group of layers, None for full attention."""
    most_loras: int = 4
    is_sharing_adapters: bool = True
    """Whether a request with an adapter finds what the GPU has, which vLLM does not forget when the adapter changes."""
    most_running: int = 16
    most_tokens: int = 4096
    prompt_only: bool = True
    load_failure_policy: str = "recompute"
    log_stats: bool = False
    is_chunking: bool = True
    is_splitting: bool = False
    """Whether every hit that can be split is: heads of a few chunks at a time, tails of any rate."""
    is_async: bool = False
    """Whether a step is scheduled before the output of the one before it is there."""
    is_zeroing: bool = False
    """Whether new blocks are zeroed, which vLLM's runner does before the connector hears of the step."""


class FixedRate(PrefillRate):
    """A rate that is not measured."""

    @override
    def observe(self, units: float, seconds: float, pairs: float = 0) -> None:
        """Measure nothing."""


class SlowCopies(OffloadingWorker):
    """Copies in the order of submission as a GPU does: some steps after it was told to, or when it is waited for."""

    def __init__(self, worker: OffloadingWorker) -> None:
        self.lag: float = 0
        """Steps that pass before a copy is made; infinite to hold them back."""
        self._worker = worker
        self._queue: list[tuple[int, int, Callable[[], bool]]] = []
        self._step = 0

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @override
    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        self._queue.append((self._step, job_id, lambda: self._worker.submit_store(job_id, src_spec, dst_spec)))
        return True

    @override
    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        self._queue.append((self._step, job_id, lambda: self._worker.submit_load(job_id, src_spec, dst_spec)))
        return True

    @override
    def get_finished(self) -> list[TransferResult]:
        self._copy(sum(began + self.lag <= self._step for began, _, _ in self._queue))
        self._step += 1
        return self._worker.get_finished()

    @override
    def wait(self, job_ids: set[int]) -> None:
        self._copy(max((place + 1 for place, (_, job_id, _) in enumerate(self._queue) if job_id in job_ids), default=0))

    @override
    def shutdown(self) -> None:
        self._queue.clear()
        self._worker.shutdown()

    def _copy(self, count: int) -> None:
        for _, _, copy in self._queue[:count]:
            assert copy()
        del self._queue[:count]


def values_of(tokens: Iterable[int], salt: str | None = None) -> Words:
    """Return a value for each token, which all before it and the salt decide."""
    return values_after(hash(salt) & 0xFFFF if salt else 1, tokens)


def values_after(value: int, tokens: Iterable[int]) -> Words:
    """Return the values of tokens that come after one of this value."""
    found = []
    for token in tokens:
        value = (value * 6364136223846793005 + token + 1442695040888963407) & 0xFFFF_FFFF_FFFF_FFFF
        found.append(value)
    return np.asarray(found, dtype=np.uint64)


def images_of(image: tuple[str, int] | tuple[str, int, str] | None) -> list[MultiModalFeatureSpec]:
    """Return an image of this content where a token is, by a client's name for it if there is one, as vLLM does."""
    if image is None:
        return []
    content, token, *name = image
    pixels = torch.frombuffer(bytearray(content.encode()), dtype=torch.uint8)
    return [
        MultiModalFeatureSpec(
            data=MultiModalKwargsItem({"pixels": MultiModalFieldElem(pixels, MultiModalSharedField(batch_size=1))}),
            modality="image",
            identifier=name[0] if name else content,
            mm_position=PlaceholderRange(token, IMAGE_TOKENS),
        )
    ]


def seen_by_model(tokens: Sequence[int], images: Sequence[MultiModalFeatureSpec]) -> list[int]:
    """Return what a model sees: the content of images in the place of the tokens that stand for them."""
    seen = list(tokens)
    for image in images:
        pixels = image.data["pixels"].data
        assert isinstance(pixels, torch.Tensor)
        begin = image.mm_position.offset
        for number in range(begin, begin + image.mm_position.length):
            seen[number] += VOCABULARY * (1 + int(pixels.sum()))
    return seen


def page_of(values: Words, group: int) -> npt.NDArray[np.uint64]:
    return values[:, None] + np.arange(LANES, dtype=np.uint64) + np.uint64(group << 32)


def token_after(value: int) -> int:
    return (value >> 33) % VOCABULARY


def answer_of(prompt: Sequence[int], count: int, salt: str | None = None) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(token_after(int(values_of(tokens, salt)[-1])))
    return tokens[len(prompt) :]


def prompt_of(chunks: int, seed: int = 0, *, more: int = 5) -> list[int]:
    """Return a prompt of so many blocks and a few tokens more; those of one seed share their beginning."""
    generator = np.random.default_rng(seed)
    return [int(token) for token in generator.integers(0, VOCABULARY, chunks * BLOCK_TOKENS + 64)][
        : chunks * BLOCK_TOKENS + more
    ]


def engine_config(shape: Shape, config_file: Path) -> VllmConfig:
    """Return what vLLM knows of an engine of this shape, whose tier has the settings of a file."""
    cache = CacheConfig(block_size=BLOCK_TOKENS, enable_prefix_caching=True)
    cache.num_gpu_blocks = shape.gpu_blocks
    model = model_config()
    return VllmConfig(
        model_config=model,
        cache_config=cache,
        device_config=DeviceConfig("cpu"),
        scheduler_config=SchedulerConfig(
            max_num_seqs=shape.most_running,
            max_num_batched_tokens=shape.most_tokens,
            max_model_len=model.max_model_len,
            enable_chunked_prefill=shape.is_chunking,
            is_encoder_decoder=False,
            async_scheduling=False,
        ),
        kv_transfer_config=KVTransferConfig(
            kv_load_failure_policy=shape.load_failure_policy,
            engine_id=f"test-{uuid.uuid4().hex}",
            **transfer_config(
                config_file,
                tier="TierUnderTest",
                module="engine_rig",
                cpu_bytes_to_use=shape.cpu_chunks * shape.blocks_per_chunk * PAGE_BYTES,
                blocks_per_chunk=shape.blocks_per_chunk,
                offload_prompt_only=shape.prompt_only,
            ),
        ),
    )


WEIGHTS = "adapter_model.safetensors"


class _Registered(LRUCacheLoRAModelManager):
    """Adapters in memory, the least recently used first."""

    capacity: Any = 0
    lora_slots: Any = 0

    def __init__(self, capacity: int) -> None:
        self.capacity = self.lora_slots = capacity
        self._models: OrderedDict[int, LoRAModel] = OrderedDict()

    @override
    def __len__(self) -> int:
        return len(self._models)

    @override
    def list_adapters(self) -> dict[int, LoRAModel]:
        return dict(self._models)

    @override
    def get_adapter(self, adapter_id: int) -> LoRAModel | None:
        return self._models.get(adapter_id)

    @override
    def add_adapter(self, lora: LoRAModel) -> bool:
        is_new = lora.id not in self._models
        self._models.setdefault(lora.id, lora)
        self._models.move_to_end(lora.id)
        return is_new

    @override
    def activate_adapter(self, lora_id: int) -> bool:
        self._models.move_to_end(lora_id)
        return True

    @override
    def remove_adapter(self, adapter_id: int) -> bool:
        return self._models.pop(adapter_id, None) is not None

    @override
    def remove_oldest_adapter(self) -> bool:
        self._models.popitem(last=False)
        return True


class SimulatedLoras(LRUCacheWorkerLoRAManager):
    """The adapters of an engine; files are read when, and as often as, vLLM reads them."""

    _adapter_manager: Any

    def __init__(self, capacity: int, model: Any) -> None:
        """Start with none; so many stay loaded. The model gets its `lora_manager`, as vLLM's has."""
        self._adapter_manager = model.lora_manager = _Registered(capacity)
        self.reads = 0

    @override
    def _load_adapter(self, lora_request: LoRARequest) -> LoRAModel:
        self.reads += 1
        weights = torch.frombuffer(bytearray((Path(lora_request.lora_path) / WEIGHTS).read_bytes()), dtype=torch.uint8)
        layer = LoRALayerWeights("layer", 1, 1, weights, torch.zeros(1))
        return LoRAModel(lora_request.lora_int_id, 1, {"layer": layer})

    @override
    def set_active_adapters(self, requests: set[Any], mapping: Any | None = None) -> None:
        # In any order, so that the test decides on one.
        for each in sorted(requests, key=lambda each: each.lora_int_id):
            self.add_adapter(each)

    def contents(self, request: LoRARequest) -> str:
        """Return what the adapter of a request holds that would be computed with now."""
        if request.lora_int_id not in self.list_adapters():
            return "nothing yet"
        return bytes(self._adapter_manager.get_adapter(request.lora_int_id).loras["layer"].lora_a.tolist()).decode()
