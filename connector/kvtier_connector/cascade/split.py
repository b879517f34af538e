# SPDX-License-Identifier: Apache-2.0
"""Splits a hit: the engine computes its head while the volume is read from its end.

A split hit is ordered from its last chunk backwards, and its head is computed in small chunks of prefill. Where both
head, the request joins: it takes the tail from the CPU tier and goes on behind it. Two measured rates, of the volume
and of prefill, decide how many tokens of the head are computed next. The scheduler's thread only.
"""

from __future__ import annotations

import enum
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from vllm.v1.kv_offload.base import OffloadKey, ReqContext

HEAD_TOKENS = 2048
"""Most tokens of a head in one step: a join waits for the end of the step under way."""
LEAST_HEAD_TOKENS = 256
"""Fewer are computed at the end of a hit only: a step costs some milliseconds, however short it is."""
JOIN_SECONDS = 0.03
"""Price of a join: the step under way, and the step that notices that the tail is on the GPU."""
WINDOW_SECONDS = 0.15
"""Chunks are ordered ahead for so long: two steps. Those behind the join are read for nothing."""
FIRST_WINDOW_CHUNKS = 64
"""Ordered ahead as long as the volume's rate is not known."""
LEAST_WINDOW_CHUNKS = 16
STALLED_SECONDS = 0.5
"""A volume that gives nothing for so long is waited for no more."""
NEW_SHARE = 0.3
"""Weight of a new measurement of a rate."""
KNOWN_SECONDS = 60.0
"""After so long without a measurement, the volume is tried again."""
LEAST_WINDOW_SECONDS = 0.03
"""Shortest time over which the volume's rate is measured."""


class Way(enum.Enum):
    """How a request gets a hit whose chunks lie on the volume."""

    LOAD = "load"
    """All of it is read."""
    SPLIT = "split"
    COMPUTE = "compute"
    """None of it: computing is over before a split would be."""


class Rate:
    """Units a second; new measurements count most."""

    def __init__(self) -> None:
        """Start without a measurement."""
        self.value = 0.0
        """0 before the first measurement."""

    def observe(self, units: float, seconds: float) -> None:
        """Take in that `seconds` were taken by `units`."""
        if seconds > 0:
            new = units / seconds
            self.value = self.value + NEW_SHARE * (new - self.value) if self.value else new

    def seconds(self, units: float) -> float:
        """Return how long so many units take; infinite before the first measurement."""
        return units / self.value if self.value else math.inf


@dataclass(slots=True, eq=False)
class Split:
    """A hit that is read from its end. Positions are tokens from the beginning of the prompt."""

    context: ReqContext
    keys: Sequence[OffloadKey]
    """Chunks of the hit that the GPU did not have, in the order of the prompt."""
    begin: int
    """Where the first of them begins, a multiple of `chunk_tokens`."""
    chunk_tokens: int
    local_tokens: int
    """Tokens that the GPU had when the split began."""
    began_at: float = 0.0
    ordered: int = 0
    """Chunks that were ordered, counted from the end."""
    ready: int = 0
    """Chunks that lie in the CPU tier, counted from the end without a gap."""
    moved_at: float = 0.0
    """When `ready` grew last."""
    computed: int = 0
    """Tokens that were scheduled, with those that the GPU had."""
    is_over: bool = False
    """Whether the request has joined, or goes on without the rest of the hit."""

    @property
    def end(self) -> int:
        """Where the hit ends."""
        return self.begin + len(self.keys) * self.chunk_tokens

    @property
    def ready_from(self) -> int:
        """Where the part of the hit begins that lies in the CPU tier."""
        return self.end - self.ready * self.chunk_tokens

    @property
    def has_met(self) -> bool:
        """Whether the head reaches what was read."""
        return self.ready > 0 and self.computed // self.chunk_tokens * self.chunk_tokens >= self.ready_from

    @property
    def is_overtaken(self) -> bool:
        """Whether the head was computed to the end of the hit."""
        return self.computed >= self.end


class Splits:
    """The split hits of an engine."""

    def __init__(self, order: Callable[[Split], None], *, now: Callable[[], float] = time.monotonic) -> None:
        """Store the parts.

        Args:
            order: Orders more chunks of a split, and notes which lie in the CPU tier.
            now: Seconds that never go back.
        """
        self._order = order
        self._now = now
        self.head_tokens, self.least_head_tokens = HEAD_TOKENS, LEAST_HEAD_TOKENS
        """Most and fewest tokens of a head in one step."""
        self._splits: dict[str, Split] = {}
        self.prefill = Rate()
        """Tokens a second, as the engine computes prompts."""
        self.volume = Rate()
        """Tokens a second that the volume gives, to all requests."""
        self._window_began = 0.0
        self._window_landed = 0
        self._measured_at = -math.inf

    def __len__(self) -> int:
        """Return how many hits are split at present."""
        return len(self._splits)

    def get(self, name: str) -> Split | None:
        """Return the split of a request, if it has one."""
        return self._splits.get(name)

    def window_chunks(self, split: Split) -> int:
        """Return how many chunks of a split may be ordered and not there yet."""
        if not self._is_volume_known:
            return FIRST_WINDOW_CHUNKS
        return max(LEAST_WINDOW_CHUNKS, math.ceil(self._share_of_volume.value * WINDOW_SECONDS / split.chunk_tokens))

    def choose(self, tokens: int, *, queued: int) -> Way:
        """Say how a hit is there soonest. A volume whose rate is not known is measured by a split.

        Args:
            tokens: Tokens that must be read.
            queued: Tokens that were ordered before and are not there yet.
        """
        if not self._is_volume_known or not self.prefill.value:
            return Way.SPLIT
        seconds = {
            Way.LOAD: self.volume.seconds(queued + tokens),
            Way.COMPUTE: self.prefill.seconds(tokens),
            Way.SPLIT: (tokens + queued) / (self.prefill.value + self.volume.value) + JOIN_SECONDS,
        }
        return min(seconds, key=seconds.__getitem__)

    def begin(self, name: str, split: Split) -> None:
        """Begin to read a hit from its end."""
        split.began_at = split.moved_at = self._now()
        split.computed = split.local_tokens
        self._splits[name] = split
        self._order(split)

    def end(self, name: str) -> Split | None:
        """Forget the split of a request, and return it."""
        split = self._splits.pop(name, None)
        if split is not None:
            split.is_over = True
        return split

    def clear(self) -> None:
        """Forget all splits."""
        for name in list(self._splits):
            self.end(name)

    def advance(self) -> None:
        """Order more chunks, and note which have come."""
        now = self._now()
        for split in self._splits.values():
            before = split.ready
            self._order(split)
            if split.ready > before:
                split.moved_at = now

    def note_landed(self, tokens: int, *, is_reading: bool) -> None:
        """Take in how many tokens have come from the volume since the last call.

        Args:
            tokens: Tokens of the chunks that have landed.
            is_reading: Whether chunks are still being read; where none are, the time until the next order says nothing.
        """
        now = self._now()
        self._window_landed += tokens
        seconds = now - self._window_began
        if self._window_began and self._window_landed and (seconds >= LEAST_WINDOW_SECONDS or not is_reading):
            # Reading that ended before this call was faster than it seems.
            if is_reading or self._window_landed > self.volume.value * seconds:
                self.volume.observe(self._window_landed, max(seconds, 1e-3))
            self._measured_at = now
            self._window_began, self._window_landed = now, 0
        if not is_reading:
            self._window_began, self._window_landed = 0.0, 0
        elif not self._window_began:
            self._window_began = now

    def next_tokens(self, split: Split, *, computed: int, in_flight: int = 0) -> int:
        """Return how many tokens of the head to compute next; 0 to wait for the volume.

        The end is a multiple of the chunk, for a load begins with one. No more is computed than up to where both meet.

        Args:
            split: The hit.
            computed: Tokens that are computed, with those of the step under way.
            in_flight: Tokens of the step under way: until it ends, the volume is read as well.
        """
        split.computed = computed
        missing = split.ready_from - computed
        if missing <= 0 or not self._is_volume_known:
            return split.end - computed
        size = split.chunk_tokens
        if self._is_moving(split):
            volume, prefill = self._share_of_volume.value, self.prefill.value
            left = missing - volume * self.prefill.seconds(in_flight) if prefill else missing
            head = math.ceil(max(0.0, left) * prefill / (prefill + volume)) if prefill else missing
            if head < self.least_head_tokens and missing > head and volume >= prefill * head / max(1, missing - head):
                return 0
        else:
            head = missing
        target = computed + min(self.head_tokens, max(self.least_head_tokens, head))
        return min(split.end, -(-target // size) * size) - computed

    def is_patient(self, split: Split) -> bool:
        """Say whether the head may be held back for requests that must compute.

        It is held back no longer than computing the whole hit takes, and not for a volume that gives nothing.
        """
        waited = self._now() - split.began_at
        return self._is_moving(split) and waited < self.prefill.seconds(split.end - split.local_tokens)

    def reading_first(self, keys: Iterable[OffloadKey]) -> Split | None:
        """Return the split that reads or computes the first of these chunks."""
        first = next(iter(keys), None)
        if first is None:
            return None
        return next((split for split in self._splits.values() if first in split.keys), None)

    def _is_moving(self, split: Split) -> bool:
        return self._now() - split.moved_at < STALLED_SECONDS

    @property
    def _is_volume_known(self) -> bool:
        return self._now() - self._measured_at < KNOWN_SECONDS

    @property
    def _share_of_volume(self) -> Rate:
        """The rate at which one of the splits is read."""
        share = Rate()
        share.value = self.volume.value / max(1, len(self._splits))
        return share
