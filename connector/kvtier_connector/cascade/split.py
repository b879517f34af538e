# SPDX-License-Identifier: Apache-2.0
"""Splits a hit: the engine computes its head while the volume is read from its end.

A split hit is ordered from its last chunk backwards, and its head is computed in small chunks of prefill. Where both
meet, the request joins: it goes on behind the tail, which was copied to the GPU meanwhile. The rates of the volume and
of prefill decide how many tokens of the head are computed next. The scheduler's thread only.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import RequestGroupState
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.kv_offload.base import OffloadKey, ReqContext
from vllm.v1.request import Request

from kvtier_connector.cascade.rates import JOIN_SECONDS, LEAST_PATIENCE_SECONDS, STALLED_SECONDS, Rates
from kvtier_connector.cascade.requests import TierRequest
from kvtier_connector.vllm_adapter import metrics
from kvtier_connector.vllm_adapter.cpu_tier import CpuTier

HEAD_TOKENS = 2048
"""Most tokens of a head in one step: a join waits for the end of the step under way. It may be longer where all other
requests wait for the head."""
LEAST_HEAD_TOKENS = 256
"""Fewer are computed at the end of a hit only: a step costs several milliseconds, however short it is."""
WINDOW_SECONDS = 0.15
"""Chunks are ordered ahead for so long, two steps or two reads. Those being read at the join are read for nothing."""
FIRST_WINDOW_CHUNKS = 64
"""Ordered ahead as long as the volume's rate is not known."""
LEAST_WINDOW_CHUNKS = 4
MARGIN = 1.5
"""Of the tokens that the volume is expected to give until both meet, so many are ordered."""


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
    """Chunks that have come, counted from the end without a gap."""
    handed: int = 0
    """Chunks that workers copy to the GPU, or have copied, counted from the end."""
    blocks: list[KVCacheBlock] = field(default_factory=list)
    """Blocks of the GPU for `handed`, from the end of the hit."""
    copied_at: float = 0.0
    """When these copies are expected to end."""
    moved_at: float = 0.0
    """When `ready` grew last."""
    computed: int = 0
    """Tokens that were scheduled, with those that the GPU had."""
    meeting: int = 0
    """Where the head is expected to reach what was read; chunks before it are not ordered yet."""
    lacks_room: bool = False
    """Whether its request waits for room on the GPU: then none waits for it."""
    is_over: bool = False
    """Whether the request has joined, or goes on without the rest of the hit."""

    @property
    def end(self) -> int:
        """Where the hit ends."""
        return self.begin + len(self.keys) * self.chunk_tokens

    @property
    def ready_from(self) -> int:
        """Where the part of the hit begins that has come."""
        return self.end - self.ready * self.chunk_tokens

    @property
    def missing(self) -> int:
        """Tokens that are neither computed nor have come."""
        return max(0, self.ready_from - self.computed)

    @property
    def uncopied(self) -> int:
        """Chunks behind the head that have come, and that no worker copies yet."""
        return min(self.ready, -(-(self.end - self.computed) // self.chunk_tokens)) - self.handed

    @property
    def has_met(self) -> bool:
        """Whether the head reaches the chunks that were read, and all of them are handed to workers."""
        return (
            self.ready > 0
            and self.uncopied <= 0
            and self.computed // self.chunk_tokens * self.chunk_tokens >= self.ready_from
        )

    def offer(self, state: RequestGroupState, primary: CpuTier, request: TierRequest) -> None:
        """Offer the hit to the CPU tier like anything that was computed, unless it would take most of its rows."""
        # Where chunks could not be read, it may take all of them.
        is_offered = len(self.keys) <= (primary.room if request.missing else primary.room // 2)
        # vLLM 0.33 takes nothing for offered of a request that was preempted.
        done = max(state.next_stored_chunk_idx, self.end // self.chunk_tokens)
        state.next_stored_chunk_idx = self.local_tokens // self.chunk_tokens if is_offered else done

    def count(self, stats: metrics.Stats, *, has_joined: bool) -> None:
        """Count how it ended: one that joins loads the chunks that were read, another computes them."""
        # Another request may have computed past its end before it began.
        computed = max(0, min(self.computed, self.end) - self.local_tokens)
        loaded = self.end - self.computed if has_joined else 0
        discarded = max(0, self.computed - self.ready_from) if has_joined else self.ready * self.chunk_tokens
        stats.count(metrics.SPLIT_JOINS, int(has_joined))
        stats.count(metrics.SPLIT_TOKENS, computed, cause=metrics.COMPUTED)
        stats.count(metrics.SPLIT_TOKENS, loaded, cause=metrics.LOADED)
        stats.count(metrics.SPLIT_TOKENS, discarded, cause=metrics.DISCARDED)


def may_be_split(request: Request) -> bool:
    """Say whether a request is of those whose hits may be split."""
    params = request.sampling_params
    if params is None or params.prompt_logprobs is not None:
        return False
    # A session that waits for its client's next part would hold up those that wait for its head.
    return not (request.num_preemptions or request.resumable or request.lora_request is not None or request.mm_features)


class Splits:
    """The split hits of an engine."""

    join_seconds = JOIN_SECONDS
    """A hit whose computing takes no longer does not join."""

    def __init__(self, rates: Rates, order: Callable[[Split], None]) -> None:
        """Store the parts; `order` orders more chunks of a split, and notes which have come."""
        self.rates = rates
        self._order = order
        self.head_tokens, self.least_head_tokens = HEAD_TOKENS, LEAST_HEAD_TOKENS
        """Most and fewest tokens of a head in one step, see `HEAD_TOKENS` and `LEAST_HEAD_TOKENS`."""
        self._splits: dict[str, Split] = {}
        self._first_of: dict[OffloadKey, Split] = {}
        """By chunk, the split that began to read it first."""

    def __len__(self) -> int:
        """Return how many hits are split at present."""
        return len(self._splits)

    def count_blocks(self) -> int:
        """Return how many blocks of the GPU were taken for their tails."""
        return sum(len(split.blocks) for split in self._splits.values())

    def get(self, name: str) -> Split | None:
        """Return the split of a request, if it has one."""
        return self._splits.get(name)

    def window_chunks(self, split: Split, ordered: int = 0) -> int:
        """Return how many chunks of a split may be ordered and not there yet, with those ordered for all requests."""
        # With less, a volume that waits for the next step seems slower than it is, and is given even less to read.
        ahead = max(WINDOW_SECONDS, 2 * self.rates.step_seconds, 2 * self.rates.latency_seconds)
        tokens = self.rates.volume.value * ahead
        window = max(LEAST_WINDOW_CHUNKS, math.ceil(tokens / split.chunk_tokens) or FIRST_WINDOW_CHUNKS)
        # Hits are read one after the other, as their heads are computed.
        own = split.ordered - split.ready
        return own + max(0, window - max(ordered, own))

    def expect_meeting(self, split: Split, ordered: int = 0) -> int:
        """Return where a head is expected to reach what was read, with a margin for the volume; see `window_chunks`."""
        volume = self.rates.volume.value
        if not (volume and self.rates.prefill.value):
            return split.computed
        prefill = self.rates.prefill.head_rate(split.computed, split.missing, volume)
        share = volume / (prefill + volume)
        # The head begins behind the heads before it, and the tail behind what was ordered.
        earlier = itertools.takewhile(lambda each: each is not split, self._splits.values())
        heads = (1 - share) * sum(each.missing for each in earlier)
        others = max(0, ordered - (split.ordered - split.ready)) * split.chunk_tokens
        tail = MARGIN * share * (split.missing + heads - others * prefill / volume)
        tail = max(tail, 2 * volume * max(self.rates.step_seconds, self.rates.least_seconds)) if tail > 0 else 0.0
        return int(max(split.computed, split.ready_from - tail))

    @property
    def work(self) -> tuple[float, float]:
        """Return the seconds that computing the heads of all hits takes, and the tokens that are yet to be ordered."""
        prefill, volume, seconds, tails = self.rates.prefill, self.rates.volume.value, 0.0, 0.0
        for split in self._splits.values() if prefill.value and volume else ():
            head = prefill.head(split.computed, split.missing, volume)
            seconds += prefill.seconds(head, split.computed)
            tails += split.missing - head - (split.ordered - split.ready) * split.chunk_tokens
        return seconds, max(0.0, tails)

    def begin(self, name: str, split: Split) -> None:
        """Begin to read a hit from its end."""
        split.began_at = split.moved_at = self.rates.now()
        split.computed = split.local_tokens
        self._splits[name] = split
        for key in split.keys:
            self._first_of.setdefault(key, split)
        self._order(split)

    def end(self, name: str) -> Split | None:
        """Forget the split of a request, and return it."""
        split = self._splits.pop(name, None)
        if split is not None:
            split.is_over = True
            for key in split.keys:
                if self._first_of.get(key) is split:
                    del self._first_of[key]
        return split

    def clear(self) -> list[Split]:
        """Forget all splits, and return them."""
        return [split for name in list(self._splits) if (split := self.end(name)) is not None]

    def advance(self, running: Container[str] | None = None) -> None:
        """Order more chunks, and note which have come, and which requests are not among those that run."""
        now = self.rates.now()
        for name, split in self._splits.items():
            split.lacks_room = running is not None and name not in running
            before = split.ready
            self._order(split)
            if split.ready > before:
                split.moved_at = now

    def next_tokens(self, split: Split, *, in_flight: int = 0, is_awaited: bool = False) -> int:
        """Return how many tokens of the head to compute next; 0 to wait for the volume.

        The end is a multiple of the chunk, for a load begins with one. No more is computed than up to where both meet.

        Args:
            split: The hit.
            in_flight: Tokens of the step under way: until it ends, the volume is read as well.
            is_awaited: Whether all other requests wait for this hit, so that a long step holds up none of them.
        """
        computed, missing = split.computed, split.missing
        if not missing:
            return split.end - computed
        size, head = split.chunk_tokens, missing
        volume, prefill = self.rates.volume.value, self.rates.prefill
        if not (volume and prefill.value):
            # A volume that was never measured may have given all of it by the end of the next step.
            head = computed - split.local_tokens
        elif self._is_moving(split, since=split.moved_at):
            left = missing - volume * min(prefill.seconds(in_flight, computed - in_flight), self.rates.busy_seconds)
            head = math.ceil(prefill.head(computed, left, volume))
            rate = prefill.head_rate(computed, left, volume) if head < self.least_head_tokens else math.inf
            # A step would not have earlier what the volume gives during the shortest one.
            is_near = not in_flight and missing * len(self._splits) <= volume * self.rates.least_seconds
            if is_near or volume * (missing - head) >= rate * head:
                # That takes a moment. A read that takes longer is not waited for much longer than computing takes.
                patience = max(self.join_seconds, missing / volume, prefill.seconds(missing, computed))
                if in_flight or self.rates.now() - split.moved_at < patience:
                    return 0
        most = max(self.head_tokens, head // 2) if is_awaited else self.head_tokens
        target = computed + min(most, max(self.least_head_tokens, head))
        return min(split.end, -(-target // size) * size) - computed

    def is_worth_joining(self, split: Split) -> bool:
        """Say whether computing what the volume may give of a hit takes longer than a join."""
        # Of a volume that hung, only what has come counts: the small steps of a head would cost more than it gives.
        begin = split.ready_from if self.rates.has_hung else split.computed
        return self.rates.prefill.seconds(split.end - begin, begin) > self.join_seconds

    def is_patient(self, split: Split) -> bool:
        """Say whether the head may be held back for requests that must compute.

        It is held back no longer than computing the whole hit takes, and not for a volume that gives nothing.
        """
        computing = self.rates.prefill.seconds(split.end - split.local_tokens, split.local_tokens)
        return self._is_moving(split, since=split.moved_at) and self.rates.now() - split.began_at < computing

    def wait_for(self, keys: Sequence[OffloadKey], context: ReqContext) -> Callable[[], bool] | None:
        """Return what says that another split has computed or loaded the first of these chunks that it has.

        None if it has by now: vLLM takes no block with the last token of a prompt from the GPU, so that chunk is asked
        for all the same.
        """
        split = self._first_of.get(keys[0]) if keys else None
        if split is None or split.context is context or split.lacks_room:
            return None
        first = split.keys.index(keys[0])
        shared = next(
            (number for number, (key, other) in enumerate(zip(keys, split.keys[first:], strict=False)) if key != other),
            min(len(keys), len(split.keys) - first),
        )
        end = split.begin + (first + shared) * split.chunk_tokens
        return (lambda: split.is_over or split.lacks_room or split.computed >= end) if split.computed < end else None

    def _is_moving(self, split: Split, *, since: float) -> bool:
        """Say whether the chunks that are ordered may still come, though nothing has since some time."""
        ordered = (split.ordered - split.ready) * split.chunk_tokens
        expected = 2 * (self.rates.latency_seconds + self.rates.volume.seconds(ordered))
        return self.rates.now() - since < min(STALLED_SECONDS, max(LEAST_PATIENCE_SECONDS, expected))
