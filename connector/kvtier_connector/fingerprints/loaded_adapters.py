# SPDX-License-Identifier: Apache-2.0
"""What the LoRA adapters of a worker hold: a digest of the weights that vLLM has loaded, taken from memory.

Stands between vLLM and its loading of adapters. What comes out of that is copied away from the file, which may be
mapped into memory and be written over, and digested; vLLM computes with this copy and no other. So a digest is never
one of other weights than those in use, whatever happens to the files, and whenever vLLM loads an adapter again.

For a request that was loaded and not computed yet the weights must stay what they are, though vLLM may make room and
load the adapter again in between. The worker keeps them for that long and gives vLLM the same ones, unless the adapter
is to be replaced: then the request is computed as a whole.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from vllm.logger import init_logger
from vllm.lora.request import LoRARequest

from kvtier_connector.fingerprints.adapters import Orders, Told

logger = init_logger("vllm.kvtier.adapters")

_MOST_AHEAD: Final = 4
"""Adapters that were loaded because of a question and that vLLM has not asked for yet."""


@dataclass(slots=True)
class _Held:
    """What an adapter holds."""

    path: str
    digest: str
    model: Any
    """As it was loaded, apart from what vLLM makes of it."""
    is_ahead: bool = False
    """Whether vLLM has not asked for it yet."""
    needed_by: set[str] = field(default_factory=set)
    """Requests that were loaded and not computed yet."""


class LoadedAdapters:
    """The adapters of one worker. The worker's thread only."""

    def __init__(self, holder: Any, rank: int) -> None:
        """Store, and stand before vLLM's loading of adapters if this engine has any.

        Args:
            holder: What has the model: vLLM's worker or its model runner; None if it was not found.
            rank: Number of this worker.
        """
        self._rank = rank
        self._manager = getattr(getattr(holder, "model_runner", holder), "lora_manager", None)
        self._load_from_files: Any = getattr(self._manager, "_load_adapter", None)
        self._held: dict[int, _Held] = {}
        self._told: list[Told] = []
        self._told_unknown: set[Told] = set()
        self.refused: set[str] = set()
        """Requests whose chunks are of other weights than those that vLLM would compute with."""
        if self._manager is not None:
            self._manager._load_adapter = self._load  # noqa: SLF001 - vLLM has no other place to stand in

    def obey(self, orders: Orders) -> None:
        """Do what a step tells."""
        self.refused.difference_update(orders.ended)
        for held in self._held.values():
            held.needed_by.difference_update(orders.ended)
        for question, request in orders.asked.items():
            digest = self._digest_of(request)
            self._told.append(Told(question, request.lora_int_id, request.lora_name, request.lora_path, digest))
        for name, (request, digests) in orders.begun.items():
            digest = self._digest_of(request)
            if digest is None or digest != digests.get(self._rank):
                self.refused.add(name)
            else:
                self._held[request.lora_int_id].needed_by.add(name)
        self._forget()

    def take_told(self) -> list[Told]:
        """Return what is to be told."""
        told, self._told = self._told, []
        return told

    def _load(self, request: LoRARequest) -> Any:
        """Stand in for vLLM's loading: return what a request needs to stay, or what the files hold now."""
        held = self._held.get(request.lora_int_id)
        is_wanted = held is not None and held.path == request.lora_path and not request.load_inplace
        if held is not None and is_wanted and (held.needed_by or held.is_ahead):
            held.is_ahead = False
            return _copy_of(held.model)
        return self._read(request)

    def _read(self, request: LoRARequest) -> Any:
        """Return what the files hold, and keep that too, unless what it holds cannot be told.

        Raises:
            Exception: vLLM cannot load it; what was there stays.
        """
        model = self._load_from_files(request)
        replaced = self._held.pop(request.lora_int_id, None)
        if replaced is not None and replaced.needed_by:
            # They must not be computed with these weights upon blocks of the others: they are computed as a whole.
            logger.info("The LoRA adapter %s is replaced; requests that wait are computed again", request.lora_name)
            self.refused |= replaced.needed_by
        if request.load_inplace:
            # vLLM does so in each step with such a request: a copy and a digest of all weights would cost too much.
            self._tell_unknown(request)
            return model
        try:
            digest, kept = _take_away(model), _copy_of(model)
        except Exception:
            # Of a kind that this release of vLLM has and we do not know.
            logger.exception("What the LoRA adapter %s holds cannot be told", request.lora_name)
            self._tell_unknown(request)
            return model
        self._held[request.lora_int_id] = _Held(request.lora_path, digest, kept)
        self._told.append(Told(0, request.lora_int_id, request.lora_name, request.lora_path, digest))
        return model

    def _tell_unknown(self, request: LoRARequest) -> None:
        """Tell once that it cannot be told what an adapter holds: that stays so until the engine is started again."""
        told = Told(0, request.lora_int_id, request.lora_name, request.lora_path, None)
        if told not in self._told_unknown:
            self._told_unknown.add(told)
            self._told.append(told)

    def _digest_of(self, request: LoRARequest) -> str | None:
        """Return the digest of the weights that vLLM computes with, or would; None if that cannot be told."""
        number = request.lora_int_id
        if self._manager is None:
            return None
        held = self._held.get(number)
        is_in_use = number in self._manager.list_adapters()
        if held is not None and (is_in_use or held.needed_by or (held.is_ahead and held.path == request.lora_path)):
            return held.digest
        if is_in_use:
            # Blocks of this request will be of weights that nobody knows.
            self._tell_unknown(request)
            return None
        try:
            self._read(request)
        except Exception:  # noqa: BLE001 - vLLM's own errors and any of a file's; it raises them again itself
            # vLLM says what is wrong with it when it loads it itself.
            logger.warning("The LoRA adapter %s cannot be loaded", request.lora_name)
            return None
        held = self._held.get(number)
        if held is None:
            return None
        held.is_ahead = True
        return held.digest

    def _forget(self) -> None:
        """Forget what neither vLLM nor a request has."""
        if not self._held or self._manager is None:
            return
        in_use = self._manager.list_adapters()
        ahead = [number for number, held in self._held.items() if held.is_ahead]
        wanted = {*in_use, *ahead[-_MOST_AHEAD:]}
        self._held = {number: held for number, held in self._held.items() if number in wanted or held.needed_by}


def _copy_of(model: Any) -> Any:
    """Return an adapter that shares the weights: vLLM takes the one that it gets apart."""
    made = model.clone(model.id)
    made.loras = {name: copy.copy(layer) for name, layer in model.loras.items()}
    made.modules_to_save = {name: copy.copy(layer) for name, layer in getattr(model, "modules_to_save", {}).items()}
    return made


def _take_away(model: Any) -> str:
    """Have an adapter share no memory with a file, and return a digest of all that it holds."""
    total = hashlib.sha256(f"{model.rank} {getattr(model, 'is_3d_lora_weight', False)}".encode())
    for name, layer in sorted([*model.loras.items(), *getattr(model, "modules_to_save", {}).items()]):
        held = vars(layer)
        for field_name, value in held.items():
            if isinstance(value, torch.Tensor) and not value.is_pinned():
                held[field_name] = value.clone()
        if hasattr(layer, "optimize"):
            # As vLLM does later, in place: afterwards nothing changes these weights any more.
            layer.optimize()
        for field_name in sorted(held):
            for each in _words(f"{name} {field_name}", held[field_name]):
                total.update(each)
    return total.hexdigest()


def _words(name: str, value: Any) -> Iterator[Any]:
    if isinstance(value, torch.Tensor):
        yield f"{name} {value.dtype} {tuple(value.shape)} ".encode()
        yield value.contiguous().view(-1).view(torch.uint8).numpy()
    elif value is None or isinstance(value, (bool, int, float, str)):
        yield f"{name} {value!r} ".encode()
    else:
        raise TypeError(f"{name} of an adapter is {type(value).__name__}")
