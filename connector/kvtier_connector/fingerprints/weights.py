# SPDX-License-Identifier: Apache-2.0
"""Which weights a running engine has: a digest of every one of them, and what follows when they may have been replaced.

vLLM tells a connector no more than that all caches are reset, before the weights are replaced: in an update, a reload,
or a sleep. So after a reset nothing is read from the volume or written to it until the workers have looked which
weights there are, in the first step that computes anything or that holds a request back which would read. The ones that
the engine started with take it back to the generation's own directory; others to one that their digest names, which
engines with the same update share; and where nobody can look, to one of this engine alone. A restart loads the model's
own weights and reads the generation's blocks.
"""

from __future__ import annotations

import hashlib
import inspect
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
from vllm.config import VllmConfig
from vllm.logger import init_logger

from kvtier_connector.store.layout import MAX_EPOCH_CHARACTERS

logger = init_logger("vllm.kvtier.weights")

_PIECE_WORDS: Final = 1 << 22
"""Of a tensor that are summed at once: 32 MiB."""
_ROWS: Final = 512
"""Of the identity that are multiplied at once."""
MOST_OPERATIONS: Final = 1e12
"""For one model: seconds on a few cores."""


class Weights:
    """Which directory the weights of an engine belong to. The scheduler's thread only."""

    def __init__(self, original: str | None, *, is_shared: bool) -> None:
        """Store what the engine started with.

        Args:
            original: The digest of its weights; None where nobody could look.
            is_shared: False if they may be replaced without a reset of the caches: others must never read its blocks.
        """
        self._original = original
        self._is_shared = is_shared
        self.epoch = "" if is_shared else _alone()
        """Names the weights; empty for those that the model came with."""
        self.is_doubted = False
        """Whether they may be others than the epoch says."""
        self.is_mixed = False
        """Whether the GPU may hold blocks of others, under the names of blocks of these."""
        self.is_clean = True
        """Whether the GPU held nothing when they were doubted last."""
        self._now = original

    def doubt(self, *, is_clean: bool) -> None:
        """Note that they may be replaced; `is_clean` is whether nothing of before is left on the GPU."""
        self.is_doubted = True
        self.is_clean = is_clean
        self.is_mixed = self.is_mixed and not is_clean

    def settle(self, found: str | None) -> None:
        """Take in what the workers have found; None if they could not look."""
        self.is_doubted = False
        self.is_mixed = self.is_mixed or (not self.is_clean and found != self._now)
        self._now = found
        if self.is_mixed:
            logger.error(
                "The weights were replaced while requests ran on with blocks of others: nothing is read from the "
                "volume or written to it until the caches are reset with reset_running_requests=True"
            )
            self.epoch = _alone()
        elif found is None or self._original is None or not self._is_shared:
            self.epoch = _alone()
        else:
            self.epoch = "" if found == self._original else f"w{found}"[:MAX_EPOCH_CHARACTERS]


def can_change_unseen(config: VllmConfig | None) -> bool:
    """Say whether an engine is set up to have its weights replaced by others, with or without a reset of the caches."""
    if config is None:
        return False
    is_receiver = getattr(config, "weight_transfer_config", None) is not None
    return is_receiver or bool(getattr(config.parallel_config, "worker_extension_cls", ""))


class LoadedModel:
    """The model of a worker, which vLLM does not show to its connector. The worker's thread only."""

    def __init__(self) -> None:
        """Look for the caller that has the model: who registers KV caches does."""
        self.holder: Any = None
        """The caller; None if there is none."""
        frame = inspect.currentframe()
        while frame is not None and self.holder is None:
            caller = frame.f_locals.get("self")
            if callable(getattr(caller, "get_model", None)):
                self.holder = caller
            frame = frame.f_back

    def digest(self) -> str | None:
        """Return a digest of all weights as they are now, also of a draft model; None if one cannot be looked at."""
        if self.holder is None:
            return None
        try:
            total = hashlib.sha256()
            for model in self._models():
                packed = PackedWeights(model)
                for name, tensor in model.named_parameters():
                    total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
                    found = [tensor] if tensor.numel() else packed.unpack(name, tensor)
                    if found is None:
                        # A kernel has packed it elsewhere, where a change would not show.
                        return None
                    for each in found:
                        total.update(_sums(each))
        except Exception:
            # A tensor of a kind that cannot be summed costs sharing, and no request.
            logger.exception(
                "The weights of this engine cannot be looked at: what follows a reset is shared with nobody"
            )
            return None
        return total.hexdigest()

    def _models(self) -> Iterator[torch.nn.Module]:
        drafter = next(
            (found for name in ("drafter", "speculator") if (found := getattr(self.holder, name, None)) is not None),
            None,
        )
        models = [self.holder.get_model(), getattr(drafter, "model", None)]
        return (model for model in models if isinstance(model, torch.nn.Module))


def join(digests: Sequence[str | None]) -> str | None:
    """Return one digest for those of all workers in their order; None if one is missing."""
    known = [each for each in digests if each is not None]
    if len(known) < len(digests) or not known:
        return None
    return hashlib.sha256(" ".join(known).encode()).hexdigest()


def _sums(tensor: torch.Tensor) -> bytes:
    """Return sums over the words of a tensor that show a change of any, computed where it lies.

    The second one weighs each word with an odd number of its own, so that words which change places show, too.
    """
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
    return b"" if not sums else torch.stack(sums).cpu().numpy().tobytes()


def _alone() -> str:
    """Return the name of an epoch that nobody else has."""
    return f"p{uuid.uuid4().hex}"[:MAX_EPOCH_CHARACTERS]


class PackedWeights:
    """Those that a kernel has packed: vLLM's CPU build keeps them in a layer's ``cpu_linear``, in no tensor.

    Where the packed tensor can be reached, it is looked at itself. Where the library hides it, the layer multiplies the
    rows of the identity, one after the other: each product is a column of the weights, and exact in every type. That is
    as much work as a prompt as long as the layer is wide, so it is done as long as that is little.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        """Store the model."""
        self._model = model
        self._left = MOST_OPERATIONS

    def unpack(self, name: str, weight: torch.Tensor) -> Iterator[torch.Tensor] | None:
        """Return what shows every change of a weight that lies elsewhere; None if nothing does.

        Args:
            name: Of the parameter, in the model.
            weight: What is left of it: nothing but its type.
        """
        layer = self._model.get_submodule(name.rpartition(".")[0])
        linear = getattr(layer, "cpu_linear", None)
        held = _held_by(linear)
        tensors = [each for each in held.values() if isinstance(each, torch.Tensor) and each.numel()]
        if tensors:
            return iter(tensors)
        handler = held.get("handler")
        width, height = getattr(handler, "k", None), getattr(handler, "n", None)
        if not callable(linear) or not isinstance(width, int) or not isinstance(height, int):
            return None
        self._left -= 2.0 * width * width * height
        if self._left < 0:
            return None
        return _multiply(linear, weight, width)


def _held_by(function: Any) -> dict[str, Any]:
    """Return what a function that was made within another one keeps of that."""
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    cells = getattr(function, "__closure__", None) or ()
    return {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}


def _multiply(linear: Callable[..., torch.Tensor], weight: torch.Tensor, width: int) -> Iterator[torch.Tensor]:
    for first in range(0, width, _ROWS):
        rows = torch.zeros(min(_ROWS, width - first), width, dtype=weight.dtype)
        rows[torch.arange(len(rows)), torch.arange(first, first + len(rows))] = 1
        with torch.inference_mode():
            yield linear(rows, weight, None)
