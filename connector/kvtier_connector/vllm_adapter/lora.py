# SPDX-License-Identifier: Apache-2.0
"""Tells LoRA adapters apart by their weights: vLLM's block hashes cover only the name and the path of an adapter.

The hash of a block on the volume also covers a digest of the weights in the workers' memory. The scheduler has
`Adapters`, which asks the workers about an adapter; the request waits for one step. Each worker has `LoadedAdapters`,
which loads and digests the adapter, and compares it again after each step.

An adapter that had two contents stays off the volume and the CPU tier until the engine restarts, because vLLM's own
keys do not differ. Paths that end in ``@`` and the SHA-256 of the files do.
"""

from __future__ import annotations

import hashlib
import json
import re
import uuid
import weakref
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from vllm.logger import init_logger
from vllm.lora.request import LoRARequest

from kvtier_connector.store.layout import ADAPTER_CHARACTERS, adapter_name_label
from kvtier_connector.vllm_adapter.fingerprint import add_value

logger = init_logger("vllm.kvtier.lora")

_CONTENTS: Final = re.compile(r"@[0-9a-f]{64}/*$")
"""Ends a path that names its contents: the SHA-256 of adapter_config.json and the weight file, concatenated."""


class AdapterIdentity(NamedTuple):
    """Distinguishes the blocks of an adapter from those of the model and of other adapters."""

    label: str
    """Stands in the header of each block, for people and the janitor."""
    mark: bytes
    """Part of the hash of each block: covers name, path and contents."""

    def hash_of(self, block_hash: bytes) -> bytes:
        """Return the hash under which the volume has a block of the adapter."""
        return hashlib.sha256(b"kvtier adapter block\0" + self.mark + block_hash).digest()


class AdapterReport(NamedTuple):
    """A worker's answer about an adapter, or its report that the weights in memory changed."""

    number: int
    """vLLM's number of the adapter."""
    digest: str | None
    """Digest of the weights; None if vLLM cannot load them."""


@dataclass(frozen=True, slots=True)
class AdapterOrders:
    """Orders to the workers for one step."""

    asked: Mapping[int, LoRARequest]
    """By number, adapters to load, digest and watch."""
    begun: Mapping[str, tuple[int, Mapping[int, str]] | None]
    """By request whose load begins, its adapter's number and the digests by rank; None for the model itself."""
    computed: Collection[str]
    """Requests that this step computes for the first time since their load."""
    ended: Collection[str]
    """Requests that ended before that."""


@dataclass(slots=True, eq=False)
class Adapter:
    """One name and path of an adapter. The scheduler's thread only."""

    name: str
    path: str
    digests: dict[int, str] = field(default_factory=dict)
    """By rank, the digest of the weights."""
    is_mixed: bool = False
    """True once blocks of the same key may have come from different weights."""
    numbers: set[int] = field(default_factory=set)
    """vLLM's numbers under which the workers were asked about it: each time that it is loaded it gets another."""
    missing: set[tuple[int, int]] = field(default_factory=set)
    """Numbers and ranks that were asked about it and have not answered."""
    identity: AdapterIdentity | None = None
    """None while the weights are unknown, and for a mixed adapter."""

    @property
    def is_pending(self) -> bool:
        """True while an answer is missing; workers answer with the step that asks them."""
        return bool(self.missing)

    def note(self, rank: int, digest: str, workers: int) -> None:
        """Record the digest that one rank reports."""
        if self.digests.setdefault(rank, digest) != digest:
            self.mix("its weights were replaced")
        if len(self.digests) == workers and not self.is_mixed:
            self.identity = _identify(self.name, self.path, self.digests)

    def mix(self, reason: str) -> None:
        """Keep all requests with the adapter off the volume from now on."""
        self.identity = None
        if not self.is_mixed:
            self.is_mixed = True
            logger.warning(
                "Requests with the LoRA adapter %s (%s) are neither stored nor loaded from now on: %s. Serve it from a "
                "path that ends in @ and the SHA-256 of its files",
                self.name,
                self.path,
                reason,
            )


class Adapters:
    """All adapters of an engine, and the requests between their load and their first step. The scheduler's thread."""

    def __init__(self, workers: int, *, groups: int = 1) -> None:
        """Store the numbers of workers and of KV groups."""
        self._workers = workers
        self._needs_contents = groups > 1
        """True with several groups: vLLM cannot compute a request anew whose adapter was replaced after its load."""
        self._of_number: dict[int, dict[tuple[str, str], Adapter]] = {}
        """All names and paths that had vLLM's number of an adapter: vLLM may load another path in place."""
        self._known: dict[tuple[str, str], Adapter] = {}
        """By name and path, which are what vLLM's key covers of an adapter."""
        self._loaded: set[str] = set()
        """Requests that were not computed since their load."""
        self._asked: dict[int, LoRARequest] = {}
        self._begun: dict[str, tuple[int, Mapping[int, str]] | None] = {}
        self._ended: list[str] = []

    def read(self, request: LoRARequest) -> Adapter:
        """Return the record of a request's adapter, and ask the workers about it if it is unknown."""
        adapter = self._of(request)
        if request.load_inplace:
            for each in self._of_number[request.lora_int_id].values():
                each.mix("vLLM loads it in place, which reads its files in each step")
        elif self._needs_contents and not _CONTENTS.search(request.lora_path):
            adapter.mix("this model has several KV groups, and the path does not name the contents")
        elif not adapter.is_mixed and (number := request.lora_int_id) not in adapter.numbers:
            adapter.numbers.add(number)
            adapter.missing |= {(number, rank) for rank in range(self._workers)}
            self._asked[number] = request
        return adapter

    def begin(self, name: str, request: LoRARequest | None) -> None:
        """Have the workers compare the adapter of a load that begins with this step."""
        self._begun[name] = None if request is None else (request.lora_int_id, dict(self._of(request).digests))
        self._loaded.add(name)

    def end(self, name: str) -> None:
        """Note that a request ended."""
        if name in self._loaded:
            self._loaded.remove(name)
            self._ended.append(name)

    def give_orders(self, scheduled: Collection[str]) -> AdapterOrders | None:
        """Return the orders for a step that computes these requests; None without any."""
        computed = [name for name in self._loaded if name in scheduled and name not in self._begun]
        self._loaded.difference_update(computed)
        if not (computed or self.has_orders):
            return None
        orders = AdapterOrders(self._asked, self._begun, computed, self._ended)
        self._asked, self._begun, self._ended = {}, {}, []
        return orders

    def take(self, reports: Mapping[int, Iterable[AdapterReport]]) -> None:
        """Record the reports of the workers, by rank."""
        for rank, each in ((rank, each) for rank, several in reports.items() for each in several):
            for adapter in self._of_number[each.number].values():
                adapter.missing.discard((each.number, rank))
                if each.digest is not None:
                    adapter.note(rank, each.digest, self._workers)
                    continue
                adapter.identity = None
                adapter.numbers.discard(each.number)

    @property
    def has_orders(self) -> bool:
        """True while the workers have orders to get."""
        return bool(self._asked or self._begun or self._ended)

    def _of(self, request: LoRARequest) -> Adapter:
        key = (request.lora_name, request.lora_path)
        adapter = self._known.setdefault(key, Adapter(*key))
        return self._of_number.setdefault(request.lora_int_id, {}).setdefault(key, adapter)


def _identify(name: str, path: str, digests: Mapping[int, str]) -> AdapterIdentity:
    # Each rank loads the whole adapter, so another number of ranks finds the same. With expert parallelism each rank
    # has its own experts.
    contents = [digests[rank] for rank in sorted(digests)]
    text = json.dumps([name, path, contents[:1] if len({*contents}) == 1 else contents], separators=(",", ":"))
    mark = hashlib.sha256(text.encode()).digest()
    return AdapterIdentity(adapter_name_label(name) + mark.hex()[: ADAPTER_CHARACTERS // 2], mark)


@dataclass(slots=True)
class _Watched:
    digest: str | None = None
    model: weakref.ref[Any] | None = None
    """vLLM's object that was digested last: vLLM makes a new one each time it reads the files."""


class LoadedAdapters:
    """The adapters of one worker. The worker's thread only."""

    def __init__(self, runner: Any) -> None:
        """Store the model runner, which may be None."""
        self._runner = runner
        self._watched: dict[int, _Watched] = {}
        self._asked: dict[int, LoRARequest] = {}
        self._reports: list[AdapterReport] = []

    def obey(self, orders: AdapterOrders) -> None:
        """Take up the orders of a step."""
        self._asked.update(orders.asked)

    def look(self) -> None:
        """Load and digest what was asked, and compare what vLLM has in memory. Called after a step has computed."""
        if self._watched:
            self._compare()
        asked, self._asked = self._asked, {}
        for number, request in asked.items():
            try:
                # A waiting request needs the adapter in the next step, so vLLM would load it there.
                self._runner.add_lora(request)
            except Exception:  # noqa: BLE001 - errors of vLLM and of any file format
                # vLLM says more when it fails to load the adapter for the request itself.
                logger.warning("The LoRA adapter %s cannot be loaded", request.lora_name)
            else:
                self._watched.setdefault(number, _Watched())
                # One that is loaded next may take its place, as this one took that of an adapter of this step.
                self._compare()
        self._reports += [AdapterReport(number, self._digest_of(number)) for number in asked]

    def take_reports(self) -> list[AdapterReport]:
        """Return the reports since the last call."""
        taken, self._reports = self._reports, []
        return taken

    def is_replaced(self, number: int, digest: str | None) -> bool:
        """True unless the adapter of this number has the weights of this digest now."""
        return digest is None or self._digest_of(number) != digest

    def _digest_of(self, number: int) -> str | None:
        return self._watched[number].digest if number in self._watched else None

    def _compare(self) -> None:
        in_memory = self._runner.get_model().lora_manager.list_adapters()
        for number, watched in self._watched.items():
            model = in_memory.get(number)
            if model is None or (watched.model is not None and watched.model() is model):
                continue
            digest = digest_of(model)
            watched.model = weakref.ref(model)
            if watched.digest is not None and digest != watched.digest:
                self._reports.append(AdapterReport(number, digest))
            watched.digest = digest


def digest_of(model: Any) -> str:
    """Return a digest of an adapter in memory; one that no other engine has if a part of it cannot be read."""
    total = hashlib.sha256(f"{model.rank} {getattr(model, 'is_3d_lora_weight', False)}".encode())
    try:
        for name, layer in sorted([*model.loras.items(), *getattr(model, "modules_to_save", {}).items()]):
            for field_name, value in sorted(vars(layer).items()):
                add_value(total, f"{name} {field_name}", value)
    except (TypeError, RuntimeError):
        logger.exception("The weights of a LoRA adapter cannot be read: no other engine shares its blocks")
        return f"unreadable {uuid.uuid4()}"
    return total.hexdigest()
