# SPDX-License-Identifier: Apache-2.0
"""Asks the volume for each request which of its chunks it has, and what was found.

A lookup begins when the request arrives. When its turn comes and the answer has not, the request waits for no longer
than computing its prompt would take. The memory of blocks answers first. The scheduler's thread only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from vllm.v1.kv_offload.base import OffloadKey, get_offload_group_idx

from kvtier_connector.cascade.attach import Attachment
from kvtier_connector.cascade.memory import Presence
from kvtier_connector.cascade.requests import TierRequest
from kvtier_connector.io_workers.lookups import MOST_CALLS, BlockQuery, Found
from kvtier_connector.store.layout import BlockKey

MOST_WAIT_SECONDS = 2.0
"""A request waits for a lookup no longer than this, also where it is not known yet how long computing takes."""
LEAST_WAIT_SECONDS = 0.02
IDLE_WAIT_SECONDS = 0.002
"""An idle engine waits so long for the answer about its only request: steps that do nothing take longer."""
STALE_SECONDS = 10.0
"""An older answer that a chunk is absent is not believed when the request's turn comes."""


class _Lookup(NamedTuple):
    request: TierRequest
    keys: tuple[OffloadKey, ...]
    names: tuple[BlockKey, ...]
    is_prefix: bool


class Lookups:
    """See the module."""

    def __init__(self, attachment: Attachment, *, is_exact: bool, seconds_to_compute: Callable[[int], float]) -> None:
        """Store the parts.

        Args:
            attachment: Has the worker that asks the volume, and the memory.
            is_exact: Whether each chunk of a prefix is looked at, as for models with several KV groups. Where one chunk
                of such a load does not come, vLLM computes the whole prompt again.
            seconds_to_compute: Says how long so many chunks take to compute; infinite where that is not known.
        """
        self._attachment, self._memory = attachment, attachment.memory
        self._is_exact = is_exact
        self._seconds_to_compute = seconds_to_compute
        self._open: dict[int, _Lookup] = {}
        self._wanted: dict[tuple[TierRequest, int], list[OffloadKey]] = {}
        """Chunks that are no prefix, and are asked for with this step."""
        self._next = 0

    @property
    def is_open(self) -> bool:
        """Whether an answer is still to come."""
        return bool(self._open or self._wanted)

    def presence(self, key: OffloadKey, request: TierRequest) -> Presence:
        """Say whether the volume has a chunk, as far as that is known for this request."""
        if key in request.found and not self._memory.has_asides:
            # A prompt has thousands of chunks, and the name of each takes as long as all the rest.
            return Presence.PRESENT
        known = self._memory.state(request.block_key(key))
        if known is not Presence.UNKNOWN:
            return known
        if key in request.found:
            return Presence.PRESENT
        return Presence.ABSENT if key in request.absent else Presence.UNKNOWN

    def refresh(self, request: TierRequest) -> None:
        """Forget an old answer of a request whose turn comes: other engines may have stored what was absent."""
        if request.absent and not request.lookups and time.monotonic() - request.looked_at > STALE_SECONDS:
            request.forget_lookups()

    def ask_prefix(self, keys: Sequence[OffloadKey], request: TierRequest) -> None:
        """Ask which of the chunks of one KV group, in the order of the prompt, are there."""
        if keys and not request.is_asking(keys[0]):
            self._submit(request, tuple(keys), is_prefix=True)

    def ask(self, key: OffloadKey, request: TierRequest) -> None:
        """Ask with this step for a chunk of a window or a state, unless enough of its KV group are asked for."""
        wanted = self._wanted.setdefault((request, get_offload_group_idx(key)), [])
        if len(wanted) < MOST_CALLS and not request.is_asking(key):
            wanted.append(key)

    def send(self) -> None:
        """Hand over what `ask` collected in this step."""
        wanted, self._wanted = self._wanted, {}
        for (request, _), keys in wanted.items():
            if keys:
                self._submit(request, tuple(keys), is_prefix=False)

    def wait(self) -> bool:
        """Wait a moment for an answer, where the engine has nothing else to do; say whether one has come."""
        return self._attachment.lookups.wait(IDLE_WAIT_SECONDS)

    def must_wait(self, request: TierRequest) -> bool:
        """Say whether a request whose turn has come waits on for an answer; the time begins with the first call."""
        if not request.lookups:
            return False
        now = time.monotonic()
        if request.waits_since is None:
            request.waits_since = now
        chunks = max(len(self._open[number].keys) for number in request.lookups)
        computing = self._seconds_to_compute(chunks)
        if now - request.waits_since < min(MOST_WAIT_SECONDS, max(LEAST_WAIT_SECONDS, computing)):
            return True
        for number in list(request.lookups):
            self._note_found(self._open[number], number, None)
        return False

    def collect(self) -> Iterator[TierRequest]:
        """Take in the answers that have come; yield the requests whose lookup ended without one."""
        for answer in self._attachment.lookups.collect():
            lookup = self._open.pop(answer.number, None)
            if lookup is None:
                continue
            found = answer.found if isinstance(answer.found, Found) else None
            if found is not None:
                for number in found.seen:
                    self._memory.see(lookup.names[number])
            # A request that waits no longer goes on without the answer.
            if answer.number in lookup.request.lookups:
                self._note_found(lookup, answer.number, found)
                if found is None:
                    yield lookup.request

    def _submit(self, request: TierRequest, keys: tuple[OffloadKey, ...], *, is_prefix: bool) -> None:
        self._next += 1
        names = tuple(map(request.block_key, keys))
        self._open[self._next] = _Lookup(request, keys, names, is_prefix)
        request.lookups[self._next] = keys
        self._attachment.note_use()
        self._attachment.lookups.submit(self._next, BlockQuery(names, is_prefix, self._is_exact))

    def _note_found(self, lookup: _Lookup, number: int, found: Found | None) -> None:
        """Note what was found for the request; without an answer its chunks count as absent."""
        request, keys = lookup.request, lookup.keys
        del request.lookups[number]
        request.looked_at = time.monotonic()
        if not request.lookups:
            request.waits_since = None
        if found is None:
            there: Sequence[OffloadKey] = ()
        elif lookup.is_prefix:
            there = keys[: found.present]
        else:
            there = [keys[place] for place in found.seen]
        request.found.update(there)
        request.absent.update(keys)
        request.absent.difference_update(there)
