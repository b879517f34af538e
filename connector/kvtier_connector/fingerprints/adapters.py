# SPDX-License-Identifier: Apache-2.0
"""Tells LoRA adapters apart by what they hold: vLLM's block hashes cover an adapter's name and path, not its contents.

An adapter that was written anew at its path would otherwise find blocks of the old one for ever, on every replica. So
the hash of a block on the volume covers a digest of the weights as the workers have them in memory (`loaded_adapters`).
A look at the files would not do: vLLM reads them at a time of its own, again after it had to make room, and whenever it
is told to load an adapter in place.

A request whose adapter is not known waits for one step, in which the workers load it if they have not yet, and tell its
digest. A load from the CPU tier or the volume tells the workers which digest its chunks belong to; they check that, and
keep to those weights until the request has been computed with them once. An adapter that was ever seen to hold two
things in this engine stays off the volume and the CPU tier until it is started again: below vLLM's keys, blocks of both
may lie in the CPU tier.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from vllm.logger import init_logger
from vllm.lora.request import LoRARequest

from kvtier_connector.store.layout import ADAPTER_CHARACTERS, adapter_name_label

logger = init_logger("vllm.kvtier.adapters")

MOST_KEPT: Final = 8
"""Adapters that workers keep at a time for requests that were loaded and not computed yet."""


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
    begun: Mapping[str, tuple[LoRARequest, Mapping[int, str]]]
    """By request, what the load that begins belongs to: its adapter, with the digest by rank."""
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
        self._begun: dict[str, tuple[LoRARequest, Mapping[int, str]]] = {}
        self._loaded: dict[str, tuple[str, str]] = {}
        """By request that was not computed since it was loaded, its adapter."""
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
        kept = set(self._loaded.values())
        is_kept = len(kept) < MOST_KEPT or (request.lora_name, request.lora_path) in kept
        return is_kept and name not in self._failed

    def note_failed(self, names: Iterable[str]) -> None:
        """Note that loads failed: with an adapter that the workers cannot load now the next one would fail, too."""
        self._failed.update(name for name in names if name in self._loaded)

    def begin(self, name: str, request: LoRARequest) -> None:
        """Have the workers check the adapter of a load that begins with this step."""
        adapter = self._of(request)
        # Of one that has changed since the look-up no digest is right.
        self._begun[name] = (request, dict(adapter.digests) if adapter.identity else {})
        self._loaded[name] = (adapter.name, adapter.path)

    def end(self, name: str) -> None:
        """Note that a request ended."""
        self._failed.discard(name)
        if self._loaded.pop(name, None) is not None:
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
