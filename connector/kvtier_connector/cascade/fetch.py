# SPDX-License-Identifier: Apache-2.0
"""Chunks on their way to the GPU: from the volume into rows of the CPU tier, and from there, request by request.

Rows are given in the order in which chunks were asked for, so a prefix that is longer than the CPU tier streams through
it: chunks that were copied to the GPU make room for those that follow. A chunk that is fetched ahead of a request's
turn is leased: it stays for that request, within a share of the CPU tier, and yields to the loads of requests that have
theirs. The scheduler's thread only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile
from typing import NamedTuple

from vllm.v1.kv_offload.base import GPULoadStoreSpec, OffloadKey, ReqContext
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from kvtier_connector.cascade.requests import TierRequest
from kvtier_connector.cascade.transfers import Landed
from kvtier_connector.vllm_adapter.cpu_tier import CpuTier

NO_ROW = -1
LEASED_SHARE = 0.5
"""Of the CPU tier, for what is fetched for requests whose turn has not come."""


class Piece(NamedTuple):
    """Chunks that go to the GPU together."""

    keys: set[OffloadKey]
    source: CPULoadStoreSpec
    target: GPULoadStoreSpec


@dataclass(slots=True)
class _Part:
    """The chunks of one group of layers."""

    first: int
    """Number of its first chunk in the load."""
    count: int
    blocks: list[int]
    """GPU blocks."""
    index: int
    """Of the first of them, among the blocks of the request."""
    skipped: int
    """Blocks of the first chunk that come before it, and that the GPU has."""
    handed: int = 0
    """Chunks that were handed to the worker."""


class Load:
    """The chunks of a request in the order of its prompt, group by group: where they lie, and which come.

    A chunk is *ready* once it lies in a row of the CPU tier, pinned and verified. Chunks go to the GPU in their order,
    so that a load that ends early leaves a prefix.
    """

    def __init__(self, context: ReqContext, keys: Sequence[OffloadKey]) -> None:
        """Start with nothing ready."""
        self.context = context
        self.keys = tuple(keys)
        self.rows = [NO_ROW] * len(self.keys)
        """Rows of the CPU tier; `NO_ROW` for a chunk that is not ready."""
        self.failed: set[int] = set()
        """Numbers of the chunks that do not come."""
        self.is_over = False
        """Whether the request goes on with what was loaded."""
        self.began_at = 0.0
        """When it was ordered, on the clock of the rates."""
        self._parts: list[_Part] = []
        self._blocks_per_chunk = 1

    def aim(self, target: GPULoadStoreSpec, blocks_per_chunk: int) -> None:
        """Say where on the GPU the chunks go."""
        self._blocks_per_chunk = blocks_per_chunk
        block_ids = target.block_ids.tolist()
        first_block = first_chunk = 0
        for size, index in zip(target.group_sizes, target.block_indices, strict=True):
            skipped = index % blocks_per_chunk
            count = -(-(size + skipped) // blocks_per_chunk) if size else 0
            blocks = block_ids[first_block : first_block + size]
            self._parts.append(_Part(first_chunk, count, blocks, index, skipped))
            first_block += size
            first_chunk += count

    @property
    def has_piece(self) -> bool:
        """Whether anything is ready that follows what was handed over."""
        return any(self._next_row(part) != NO_ROW for part in self._parts)

    @property
    def is_handed_over(self) -> bool:
        """Whether nothing more is handed over: all of it was, or what follows does not come."""
        if self.failed and len(self._parts) > 1:
            # vLLM computes all of a request with several groups, if any of it is missing.
            return True
        return all(part.handed == part.count or part.first + part.handed in self.failed for part in self._parts)

    @property
    def handed(self) -> set[int]:
        """Numbers of the chunks that were handed over."""
        return {number for part in self._parts for number in range(part.first, part.first + part.handed)}

    def take_piece(self) -> Piece:
        """Return what is ready and follows what was handed over before; call it if `has_piece`."""
        rows: list[int] = []
        blocks: list[int] = []
        keys: set[OffloadKey] = set()
        sizes, indices = [], []
        for part in self._parts:
            begin = part.handed
            low = self._blocks_before(part, begin)
            while self._next_row(part) != NO_ROW:
                part.handed += 1
            high = self._blocks_before(part, part.handed)
            chunks = slice(part.first + begin, part.first + part.handed)
            rows += self.rows[chunks]
            keys.update(self.keys[chunks])
            blocks += part.blocks[low:high]
            sizes.append(high - low)
            indices.append(part.index + low)
        return Piece(keys, CPULoadStoreSpec(rows), GPULoadStoreSpec(blocks, group_sizes=sizes, block_indices=indices))

    @property
    def unwritten(self) -> list[int]:
        """The GPU blocks that nothing was handed over for."""
        return [block for part in self._parts for block in part.blocks[self._blocks_before(part, part.handed) :]]

    @property
    def reached(self) -> list[int]:
        """For each group, how many chunks of the request are on the GPU once all pieces are."""
        return [part.index // self._blocks_per_chunk + part.handed for part in self._parts]

    def _next_row(self, part: _Part) -> int:
        return self.rows[part.first + part.handed] if part.handed < part.count else NO_ROW

    def _blocks_before(self, part: _Part, chunk: int) -> int:
        return min(len(part.blocks), max(0, chunk * self._blocks_per_chunk - part.skipped))


@dataclass(slots=True)
class _Fetch:
    context: ReqContext
    """Of the request that asked first."""
    has_row: bool = False
    is_urgent: bool = False
    """Whether it goes before what is read ahead."""
    loads: list[tuple[Load, int]] = field(default_factory=list)
    """Who waits for it, with the chunk's number there."""
    lessee: ReqContext | None = None
    """For whom it is fetched ahead."""


class Fetches:
    """Who waits for which chunk of the volume, and who waits for a row."""

    def __init__(
        self,
        primary: CpuTier,
        request_of: Callable[[ReqContext], TierRequest],
        start: Callable[[ReqContext, Sequence[OffloadKey], CPULoadStoreSpec, bool], bool],
        stop: Callable[[Sequence[OffloadKey]], Iterable[OffloadKey]],
    ) -> None:
        """Store the parts.

        Args:
            primary: The CPU tier.
            request_of: Returns what the tier keeps of a request.
            start: Has chunks of a request read into rows; told whether a load waits for any, returns whether they are
                urgent now.
            stop: Has chunks not read; returns those that no I/O worker had begun with. `take` tells when they ended.
        """
        self._primary = primary
        self._request_of = request_of
        self._start_reading, self._stop_reading = start, stop
        self.under_way: dict[OffloadKey, _Fetch] = {}
        """The chunks on their way."""
        self._line: OrderedDict[OffloadKey, None] = OrderedDict()
        """Those that wait for a row."""
        self.unread: dict[OffloadKey, ReqContext] = {}
        """Those that were given up, while their rows are not free yet, with the request that asked first."""
        self._lessees: OrderedDict[str, ReqContext] = OrderedDict()
        self.most_leased = int(primary.chunks * LEASED_SHARE)
        self.is_held = False
        """Whether no row is given: the worker may still read rows that the CPU tier does not know of any more."""

    @property
    def waiting(self) -> int:
        """How many chunks wait for a row."""
        return len(self._line)

    @property
    def room(self) -> int:
        """How many more could be fetched ahead."""
        if self._line or self.is_held:
            return 0
        leased = sum(len(self._request_of(lessee).leased) for lessee in self._lessees.values())
        return max(0, min(self.most_leased - leased, self._primary.room))

    def count_waiting_requests(self) -> int:
        """Return how many requests wait for rows."""
        return len({self.under_way[key].context.req_id for key in self._line})

    def ask(self, key: OffloadKey, load: Load, number: int) -> bool:
        """Have a load told when the chunk is there; True if it was being fetched ahead, and is urgent from now on."""
        fetch = self.under_way.get(key) or self._begin(key, load.context)
        was_ahead = fetch.has_row and not fetch.is_urgent
        fetch.is_urgent = True
        fetch.loads.append((load, number))
        return was_ahead

    def leave(self, key: OffloadKey, load: Load) -> None:
        """Take a load out of those that wait for a chunk; a chunk that is being read lands for later requests."""
        fetch = self.under_way.get(key)
        if fetch is not None:
            fetch.loads = [waiting for waiting in fetch.loads if waiting[0] is not load]
            self._hand_on(key, fetch)

    def lease(self, keys: Iterable[OffloadKey], context: ReqContext) -> list[OffloadKey]:
        """Fetch chunks ahead, as far as there is room for such; return them."""
        unknown = (key for key in keys if key not in self.under_way)
        leased = list(islice(takewhile(lambda key: key not in self.unread, unknown), self.room))
        for key in leased:
            self._begin(key, context).lessee = context
        if leased:
            self._request_of(context).leased.update(leased)
            self._lessees[context.req_id] = context
            self.serve()
        return leased

    def end_lease(self, context: ReqContext) -> None:
        """Unpin the chunks that were fetched ahead for a request; do not read those that no other waits for."""
        if coming := self._unpin(context):
            self.unread.update((key, self.under_way.pop(key).context) for key in self._stop_reading(coming))

    def _unpin(self, context: ReqContext) -> list[OffloadKey]:
        """End the lease of a request; return the chunks that are being read, and that no request waits for."""
        if self._lessees.pop(context.req_id, None) is None:
            return []
        request = self._request_of(context)
        arrived, coming = [], []
        for key in request.leased:
            fetch = self.under_way.get(key)
            if fetch is None or fetch.lessee is not context:
                arrived.append(key)
            else:
                fetch.lessee = None
                if fetch.has_row and not fetch.loads:
                    coming.append(key)
                self._hand_on(key, fetch)
        request.leased.clear()
        if arrived:
            self._primary.complete_read(arrived, context)
        return coming

    def end_leases(self) -> None:
        """Unpin all chunks that were fetched ahead."""
        for context in list(self._lessees.values()):
            self._unpin(context)

    def serve(self) -> None:
        """Give rows to those that wait for one, as many as can be had."""
        while not self.is_held:
            room = self._primary.room
            # The row of a chunk that was given up is free in a moment, or has it after all.
            batch = list(islice((key for key in self._line if key not in self.unread), max(1, room)))
            if not batch:
                break
            if room and self._start(batch):
                continue
            if not self._lessees:
                break
            # Chunks that are fetched ahead yield to loads, those that came last first.
            self._unpin(self._lessees[next(reversed(self._lessees))])

    def take(self, landed: Iterable[Landed]) -> None:
        """Take in which chunks were read, and which could not be."""
        for key, cause, _ in landed:
            if (context := self.unread.pop(key, None)) is not None:
                self._primary.complete_write([key], context, success=cause is None)
                continue
            fetch = self.under_way.get(key)
            if fetch is None or not fetch.has_row:
                continue
            del self.under_way[key]
            if cause is not None:
                self._primary.complete_write([key], fetch.context, success=False)
                self._fail(key, fetch, cause)
            else:
                self._primary.complete_write([key], fetch.context)
                self._arrive(key, fetch)

    def give_up_first(self, cause: str) -> None:
        """Have the first in the line do without its chunk."""
        key, _ = self._line.popitem(last=False)
        self._fail(key, self.under_way.pop(key), cause)

    def clear(self) -> None:
        """Forget everything: the CPU tier was emptied, every load and lease has ended."""
        self.under_way.clear()
        self._line.clear()
        self.unread.clear()

    def _begin(self, key: OffloadKey, context: ReqContext) -> _Fetch:
        fetch = self.under_way[key] = _Fetch(context)
        self._line[key] = None
        return fetch

    def _start(self, batch: Sequence[OffloadKey]) -> bool:
        """Have chunks read that wait for a row; False if none of them got one."""
        by_request: dict[str, list[OffloadKey]] = {}
        for key in batch:
            by_request.setdefault(self.under_way[key].context.req_id, []).append(key)
        is_any = False
        for keys in by_request.values():
            context = self.under_way[keys[0]].context
            prepared = self._primary.prepare_write(keys, context)
            if prepared is None:
                break
            wanted = prepared.keys_to_store
            if len(wanted) < len(keys):
                is_any |= self._take_stored(frozenset(keys).difference(wanted))
            if wanted:
                is_any = True
                for key in wanted:
                    self.under_way[key].has_row = True
                    del self._line[key]
                spec = prepared.store_spec
                assert isinstance(spec, CPULoadStoreSpec)
                is_urgent = self._start_reading(context, wanted, spec, any(self.under_way[key].loads for key in wanted))
                for key in wanted:
                    self.under_way[key].is_urgent = is_urgent
        return is_any

    def _take_stored(self, keys: Iterable[OffloadKey]) -> bool:
        """Give those that wait what the GPU has stored meanwhile; False if it is still being stored."""
        is_any = False
        for key in keys:
            chunk = self._primary.find(key)
            if chunk is not None and chunk.is_ready:
                is_any = True
                del self._line[key]
                self._arrive(key, self.under_way.pop(key))
            else:
                self._line.move_to_end(key)
        return is_any

    def _arrive(self, key: OffloadKey, fetch: _Fetch) -> None:
        """Pin a chunk for everybody who waits for it."""
        chunk = self._primary.find(key)
        assert chunk is not None
        for load, number in fetch.loads:
            self._primary.prepare_read([key], load.context)
            load.rows[number] = chunk.chunk_id
        if fetch.lessee is not None:
            self._primary.prepare_read([key], fetch.lessee)

    def _fail(self, key: OffloadKey, fetch: _Fetch, cause: str) -> None:
        """Tell everybody who waits for a chunk that it does not come, nor when they ask again."""
        for load, number in fetch.loads:
            load.failed.add(number)
            self._request_of(load.context).missing[key] = cause
        if fetch.lessee is not None:
            request = self._request_of(fetch.lessee)
            request.missing[key] = cause
            request.leased.discard(key)

    def _hand_on(self, key: OffloadKey, fetch: _Fetch) -> None:
        """Leave a chunk without a row to the next load that waits for it; forget one that nothing waits for."""
        if fetch.has_row:
            return
        if fetch.loads:
            # vLLM gives no row to a request that has ended.
            fetch.context = fetch.loads[0][0].context
        elif fetch.lessee is None:
            del self.under_way[key]
            del self._line[key]
