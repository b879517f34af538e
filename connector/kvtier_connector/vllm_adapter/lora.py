# SPDX-License-Identifier: Apache-2.0
"""Tells LoRA adapters apart by their contents: vLLM's block hashes cover an adapter's name and path only.

An adapter that is written anew at its path would otherwise find blocks of the old one for ever, on every replica. So
the hash of a block on the volume covers a digest of the weights in the workers' memory. Files do not identify them:
vLLM reads an adapter again after it had to make room, or when it is told to load the adapter in place.

`Adapters`, on the scheduler's side, has a request wait for one step while the workers load and digest its adapter. A
load names the digest of its chunks; the workers compare, and keep those weights until the request was computed once.
An adapter that held two contents in one engine stays off the volume and the CPU tier until the engine restarts: vLLM's
keys in the CPU tier do not tell the two apart.

`LoadedAdapters`, in a worker, stands between vLLM and its loading of adapters. It copies the weights away from a file
that may be mapped into memory and written over, and digests the copy, with which vLLM computes.

A path that ends in ``@`` and the SHA-256 of the files tells contents apart in vLLM's own prefix cache as well.
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from vllm.logger import init_logger
from vllm.lora.request import LoRARequest

from kvtier_connector.store.layout import ADAPTER_CHARACTERS, adapter_name_label

logger = init_logger("vllm.kvtier.adapters")

MOST_KEPT: Final = 8
"""Adapters that workers keep at a time for requests that were loaded and not computed yet."""
_CONTENTS: Final = re.compile(r"@([0-9a-f]{64})/*$")
"""Ends a path that names its contents: the SHA-256 of adapter_config.json and the weight file, one after the other."""
_PIECE_BYTES: Final = 1 << 20
_WEIGHT_FILES: Final = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
"""Names of an adapter's weight file, in the order of vLLM's preference."""
_MOST_AHEAD: Final = 4
"""Adapters that were loaded because of a question and that vLLM has not asked for yet."""


@dataclass(frozen=True, slots=True)
class Lora:
    """The adapter of a request, as vLLM names it."""

    request: LoRARequest


class AdapterIdentity(NamedTuple):
    """What tells the blocks of an adapter from those of the model and of other adapters."""

    label: str
    """Stands in the header of its blocks: whose they are, for people and the janitor."""
    mark: bytes
    """Goes into the hash of its blocks: name, path and contents."""

    def hash_of(self, block_hash: bytes) -> bytes:
        """Return the hash under which the volume has a block of the adapter."""
        return hashlib.sha256(b"kvtier adapter block\0" + self.mark + block_hash).digest()


class Told(NamedTuple):
    """What a worker tells of an adapter: that it has loaded it, or what it was asked."""

    question: int
    """Number of the question; 0 where it was not asked."""
    number: int
    """By which the worker knows the adapter."""
    name: str
    path: str
    digest: str | None
    """Of its weights; None if the worker cannot tell."""


@dataclass(frozen=True, slots=True)
class Orders:
    """What a step tells the workers of adapters."""

    asked: Mapping[int, LoRARequest]
    """By number of the question, adapters that are to be told of."""
    begun: Mapping[str, tuple[LoRARequest | None, Mapping[int, str]]]
    """By request whose load begins, its adapter, with the digest by rank; None for the model itself."""
    ended: Collection[str]
    """Requests that have been computed with their adapter once, or never will be."""


@dataclass(slots=True)
class Adapter:
    """One adapter, as the workers have told of it. The scheduler's thread only."""

    name: str
    path: str
    digests: dict[int, str] = field(default_factory=dict)
    """Of its weights, by rank."""
    is_mixed: bool = False
    """Whether it was ever seen to hold something else."""
    question: int = 0
    """That is to be answered; 0 if nobody was asked."""
    missing: set[int] = field(default_factory=set)
    """Ranks that have not answered."""
    identity: AdapterIdentity | None = None
    """None where it is not known."""

    def note(self, rank: int, digest: str | None, workers: int) -> None:
        """Take in what a worker has loaded."""
        held = self.digests.get(rank, digest)
        if digest is None or held != digest:
            if not self.is_mixed:
                logger.warning(
                    "Requests with the LoRA adapter %s are neither stored nor loaded from here on: %s; give changed "
                    "weights a new path, or restart the engine",
                    self.name,
                    "what it holds cannot be told"
                    if digest is None
                    else "it was loaded with other contents than before",
                )
            self.is_mixed = True
        else:
            self.digests[rank] = digest
        is_known = len(self.digests) == workers and not self.is_mixed
        self.identity = _identify(self.name, self.path, self.digests) if is_known else None


@dataclass(frozen=True, slots=True)
class Reading:
    """What a request knows of its adapter."""

    adapter: Adapter
    question: int
    """That was asked for it; 0 if there was none to ask."""
    is_in_place: bool = False
    """Whether vLLM reads the files anew for it, in each of its steps."""

    @property
    def identity(self) -> AdapterIdentity | None:
        """Return what tells its blocks apart; None where that is not known."""
        return None if self.is_in_place else self.adapter.identity

    def is_pending(self) -> bool:
        """Say whether it is worth waiting for: the workers answer with the step that asks them."""
        return self.question != 0 and self.adapter.question == self.question


class Adapters:
    """All adapters of an engine, and the requests that are between a load and their first step. Scheduler's thread."""

    def __init__(self, workers: int) -> None:
        """Store how many workers there are."""
        self._workers = workers
        self._adapters: dict[tuple[str, str], Adapter] = {}
        self._of_number: dict[int, set[tuple[str, str]]] = {}
        """The adapters that vLLM has given a number: one loaded in place may come from another path."""
        self._last_question = 0
        self._asked: dict[int, LoRARequest] = {}
        self._waiting: dict[int, Adapter] = {}
        """Adapters by the question about them that is not answered."""
        self._begun: dict[str, tuple[LoRARequest | None, Mapping[int, str]]] = {}
        self._loaded: dict[str, tuple[str, str] | None] = {}
        """By request that was not computed since it was loaded, its adapter; None for the model itself."""
        self._failed: set[str] = set()
        """Requests that are not loaded again."""
        self._computed: list[str] = []
        self._ended: list[str] = []

    def read(self, lora: Lora) -> Reading:
        """Return what is known of an adapter, and have the workers asked if that is nothing."""
        adapter = self._of(lora.request)
        if lora.request.load_inplace:
            return Reading(adapter, 0, is_in_place=True)
        if adapter.identity is None and not adapter.is_mixed and not adapter.question:
            self._last_question += 1
            adapter.question = self._last_question
            adapter.missing = set(range(self._workers))
            self._asked[adapter.question] = lora.request
            self._waiting[adapter.question] = adapter
        return Reading(adapter, adapter.question)

    def may_load(self, name: str, request: LoRARequest | None) -> bool:
        """Say whether a request may be loaded: workers keep few adapters for such, and refuse a request once."""
        if request is None:
            return True
        kept = {adapter for adapter in self._loaded.values() if adapter is not None}
        is_kept = len(kept) < MOST_KEPT or (request.lora_name, request.lora_path) in kept
        return is_kept and name not in self._failed

    def note_failed(self, names: Iterable[str]) -> None:
        """Note that loads failed: with an adapter that the workers cannot load now the next one would fail, too."""
        self._failed.update(name for name in names if self._loaded.get(name) is not None)

    def begin(self, name: str, request: LoRARequest | None) -> None:
        """Have the workers check the adapter of a load that begins with this step."""
        if request is None:
            self._begun[name], self._loaded[name] = (None, {}), None
            return
        adapter = self._of(request)
        # Of one that has changed since the look-up no digest is right.
        self._begun[name] = (request, dict(adapter.digests) if adapter.identity else {})
        self._loaded[name] = (adapter.name, adapter.path)

    def end(self, name: str) -> None:
        """Note that a request ended."""
        self._failed.discard(name)
        if name in self._loaded:
            del self._loaded[name]
            self._ended.append(name)

    def give_orders(self, scheduled: Collection[str]) -> Orders | None:
        """Return what the workers are told with a step that computes these requests; None if that is nothing."""
        # Computed with the step before: in which order a worker takes up orders and adapters does not matter so.
        ended, self._ended = [*self._ended, *self._computed], []
        self._computed = [name for name in self._loaded if name in scheduled and name not in self._begun]
        for name in self._computed:
            del self._loaded[name]
        if not (self._asked or self._begun or ended):
            return None
        orders = Orders(self._asked, self._begun, ended)
        self._asked, self._begun = {}, {}
        return orders

    def take(self, told: Mapping[int, Iterable[Told]]) -> None:
        """Take in what workers have told, by rank."""
        for rank, each in ((rank, each) for rank, several in told.items() for each in several):
            # A worker that was asked and could not load it has computed nothing with it.
            if each.digest is not None or not each.question:
                known = self._of_number.setdefault(each.number, set())
                known.add((each.name, each.path))
                for key in known:
                    self._adapters.setdefault(key, Adapter(*key)).note(rank, each.digest, self._workers)
            if (adapter := self._waiting.get(each.question)) is not None:
                adapter.missing.discard(rank)
                if not adapter.missing:
                    adapter.question = 0
                    del self._waiting[each.question]

    @property
    def is_waiting(self) -> bool:
        """Whether the workers are to be told something."""
        return bool(self._asked or self._begun or self._ended or self._computed)

    def _of(self, request: LoRARequest) -> Adapter:
        key = (request.lora_name, request.lora_path)
        self._of_number.setdefault(request.lora_int_id, set()).add(key)
        return self._adapters.setdefault(key, Adapter(*key))


def _identify(name: str, path: str, digests: Mapping[int, str]) -> AdapterIdentity:
    # Each rank loads all of an adapter, so other numbers of ranks find the same; with experts apart, each has its own.
    contents = [digests[rank] for rank in sorted(digests)]
    text = json.dumps([name, path, contents[:1] if len({*contents}) == 1 else contents], separators=(",", ":"))
    mark = hashlib.sha256(text.encode()).digest()
    return AdapterIdentity(adapter_name_label(name) + mark.hex()[: ADAPTER_CHARACTERS // 2], mark)


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
            if request is None:
                continue
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
        if not _holds_named_contents(request.lora_path):
            logger.error(
                "The files of the LoRA adapter %s are not those that its path %s names: its requests use no volume. "
                "Give the files a path with their own digest",
                request.lora_name,
                request.lora_path,
            )
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


def _holds_named_contents(path: str) -> bool:
    """Compare the files in a directory with the SHA-256 in its name; True where the name has none."""
    named = _CONTENTS.search(path)
    if named is None:
        return True
    weights = [file for name in _WEIGHT_FILES if (file := Path(path, name)).is_file()]
    total = hashlib.sha256()
    try:
        for file in (Path(path, "adapter_config.json"), *weights[:1]):
            with file.open("rb") as opened:
                while piece := opened.read(_PIECE_BYTES):
                    total.update(piece)
    except OSError:
        return False
    return total.hexdigest() == named[1]


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
