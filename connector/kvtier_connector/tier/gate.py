# SPDX-License-Identifier: Apache-2.0
"""Decides for each request whether what the volume has of its prompt is loaded or, where that is quicker, computed.

Loading wins where the volume gives blocks faster than the engine computes them, and that depends on both, on the model
and on the length of the prompt. So both are measured while serving. A request takes all of its hit or nothing: vLLM
computes nothing of a request while it loads.

Loading is timed from vLLM's order to the last block's landing, and what was ordered before counts as part of the work.
Computing is timed from the step that schedules a request to the arrival of its blocks in the CPU tier; what else the
engine computes meanwhile slows it, as it would slow the next one. Waiting to be scheduled counts on neither side.

What was never measured is loaded. Where loading loses, one request in `PROBE_EVERY` loads all the same once the last
measurement is old, so a volume that became faster is noticed, and likewise the other way round.
"""

from __future__ import annotations

import enum
import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from kvtier_connector.tier.pace import SIZES, Pace, size_of

HYSTERESIS = 1.15
"""By this factor one way must be quicker than the other before requests of that size change over."""
PROBE_EVERY = 16
"""Of the requests of one size that are refused, at most one in so many loads to measure."""
LOAD_PROBE_SECONDS = 60.0
"""Only after no load of about that size was measured for so long."""
COMPUTE_PROBE_EVERY = 64
COMPUTE_PROBE_SECONDS = 600.0
"""As above for the other way. It is rare: nearly every request computes some of its prompt anyway."""
MOST_PREFILLS = 1024
"""Requests whose prompts are timed at once; the oldest go."""


class Choice(enum.Enum):
    """What a request does about a block that the volume has."""

    LOAD = "load"
    WAIT = "wait"
    """The length of the hit decides, and vLLM tells it key by key: ask again in the next step."""
    SLOWER = "cost"
    """Compute: loading would take longer."""
    SHORT = "min_tokens"
    """Compute: the hit is shorter than the configured least."""


class Verdict(enum.Enum):
    """How a request was decided, for the metrics."""

    LOAD = "load"
    LOAD_PROBE = "load_probe"
    COMPUTE = "compute"
    COMPUTE_PROBE = "compute_probe"
    SHORT = "short"


_CHOICES = {
    Verdict.LOAD: Choice.LOAD,
    Verdict.LOAD_PROBE: Choice.LOAD,
    Verdict.COMPUTE: Choice.SLOWER,
    Verdict.COMPUTE_PROBE: Choice.SLOWER,
    Verdict.SHORT: Choice.SHORT,
}


@dataclass(slots=True)
class _Count:
    """The keys of one request that the volume has, as far as vLLM asked for them in this step."""

    blocks: int = 0
    first_end: int | None = None
    last_end: int = 0


@dataclass(slots=True)
class _Prefill:
    """A request whose prompt is being computed."""

    began: float
    step: int
    start: int | None = None
    """Token from which on it is computed; known once the first block arrives."""


@dataclass(frozen=True, slots=True)
class _Load:
    began: float
    blocks: int
    """Of this job and of those ordered before it that had not landed."""


class Gate:
    """The decisions of one tier. Every method is the scheduler's; not thread-safe."""

    def __init__(  # noqa: PLR0913 - keywords
        self,
        *,
        is_cost_aware: bool,
        min_tokens: int,
        tokens_per_chunk: int,
        is_prompt_only: bool,
        on_verdict: Callable[[Verdict], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Store the settings.

        Args:
            is_cost_aware: Whether to compare at all.
            min_tokens: Hits of fewer tokens are computed, however quick the volume is; 0 is no such limit.
            tokens_per_chunk: Of one block.
            is_prompt_only: Whether vLLM offloads prompts only. Otherwise blocks of the answer arrive too, at the pace
                of decoding, and only the first ones of a request measure.
            on_verdict: Told of each decision.
            clock: Seconds that never go back.
        """
        self._is_cost_aware = is_cost_aware
        self._min_chunks = -(-min_tokens // tokens_per_chunk)
        self._tokens_per_chunk = tokens_per_chunk
        self._is_prompt_only = is_prompt_only
        self._on_verdict = on_verdict
        self._clock = clock
        self._loading = Pace()
        self._computing = Pace()
        self._is_losing = [False] * SIZES
        """For each size in chunks, whether computing is known to be quicker."""
        self._decided: dict[str, Choice] = {}
        self._counts: dict[str, _Count] = {}
        self._loads: dict[int, _Load] = {}
        self._queued_blocks = 0
        self._step = 0
        self._prefills: dict[str, _Prefill] = {}
        self._last_chunks = 1
        self._blocks_per_chunk = 1.0
        """More than one for models with several groups of layers."""
        self._refused = [0] * SIZES
        """For each size in chunks, since the last load of that size that measured."""
        self._loaded = 0
        """Since the last prompt that measured."""

    def ask(self, request: str, end_token: int | None, *, is_certain: bool = True) -> Choice:
        """Say what the request does about a block that the volume has.

        Args:
            request: The name of the request.
            end_token: Where in the prompt the block ends, if that is known.
            is_certain: Whether the volume need not be asked about any block. Otherwise requests that load the heads of
                their prompts while their tails are being asked about could fill the CPU tier with heads, each waiting
                for room for its tail; so the whole hit is found out first.
        """
        if decided := self._decided.get(request):
            return decided
        if is_certain and not self._has_doubt():
            self._decide(request, Verdict.LOAD, 1)
            return Choice.LOAD
        count = self._counts.setdefault(request, _Count())
        count.blocks += 1
        end = end_token or count.blocks * self._tokens_per_chunk
        count.first_end = end if count.first_end is None else min(count.first_end, end)
        count.last_end = max(count.last_end, end)
        return Choice.WAIT

    def end_step(self, undecided: Collection[str]) -> None:
        """Decide the requests whose hit was counted to its end; those in `undecided` are counted anew."""
        self._step += 1
        counts, self._counts = self._counts, {}
        for request, count in counts.items():
            if request not in undecided:
                chunks = self._chunks(count.last_end - (count.first_end or 0)) + 1
                self._last_chunks = chunks
                self._blocks_per_chunk = count.blocks / chunks
                self._decide(request, self._find_verdict(chunks), chunks)

    def begin_load(self, job_id: int, blocks: int) -> None:
        """Note that vLLM ordered blocks."""
        self._queued_blocks += blocks
        self._loads[job_id] = _Load(self._clock(), self._queued_blocks)
        self._last_chunks = max(1, round(blocks / self._blocks_per_chunk))

    def end_load(self, job_id: int, blocks: int, *, landed: int) -> None:
        """Note that so many of the job's blocks have landed; 0 says nothing about the pace of the volume."""
        load = self._loads.pop(job_id)
        self._queued_blocks -= blocks
        if landed:
            now = self._clock()
            amount = load.blocks - blocks + landed
            self._loading.observe(amount, now - load.began, now)
            self._refused[size_of(max(1, round(amount / self._blocks_per_chunk)))] = 0
            self._compare()

    def begin_compute(self, request: str) -> None:
        """Note that vLLM schedules the request for the first time in this step."""
        self._prefills[request] = _Prefill(self._clock(), self._step)
        if len(self._prefills) > MOST_PREFILLS:
            del self._prefills[next(iter(self._prefills))]

    def end_compute(self, request: str, end_tokens: Sequence[int | None], *, measures: bool = True) -> None:
        """Note that computed blocks arrived in the CPU tier; `measures` False drops the request's measurement."""
        prefill = self._prefills.get(request)
        ends = [end for end in end_tokens if end is not None]
        if prefill is None or not ends:
            return
        if not measures or prefill.step == self._step:
            # Nothing is computed before the step that schedules it ends: these were there.
            del self._prefills[request]
            return
        if prefill.start is None:
            prefill.start = min(ends) - self._tokens_per_chunk
        if not self._is_prompt_only:
            del self._prefills[request]
        chunks = self._chunks(max(ends) - prefill.start)
        if chunks > 0:
            now = self._clock()
            self._computing.observe(chunks, now - prefill.began, now)
            self._loaded = 0
            self._compare()

    def forget(self, request: str) -> None:
        """Drop what was kept for a request that has ended."""
        self._decided.pop(request, None)
        self._counts.pop(request, None)
        # Not the prefill: the blocks of a short answer's prompt arrive after the request has ended.

    def interrupt(self, request: str) -> None:
        """Note that the request was preempted: the time until its next block says nothing."""
        self._prefills.pop(request, None)

    @property
    def load_tokens_per_second(self) -> float:
        """How fast a hit as long as the last one would be loaded; 0 before the first measurement."""
        return self._tokens_per_second(self._loading.seconds(self._blocks(self._last_chunks)))

    @property
    def compute_tokens_per_second(self) -> float:
        """How fast it would be computed; 0 before the first measurement."""
        return self._tokens_per_second(self._computing.seconds(self._last_chunks))

    @property
    def break_even_tokens(self) -> int:
        """Tokens from which on hits are loaded; 0 if all are, -1 if none of a length that was measured is."""
        if not any(self._is_losing):
            return self._min_chunks * self._tokens_per_chunk
        first_winning = SIZES - self._is_losing[::-1].index(True)
        above = range(first_winning, SIZES)
        if all(self._loading.measured_at(self._blocks(1 << size), reach=0) == -math.inf for size in above):
            return -1
        return max(1 << first_winning, self._min_chunks) * self._tokens_per_chunk

    def _decide(self, request: str, verdict: Verdict, chunks: int) -> None:
        self._decided[request] = _CHOICES[verdict]
        self._loaded += _CHOICES[verdict] is Choice.LOAD
        if verdict is Verdict.COMPUTE:
            self._refused[size_of(chunks)] += 1
        elif verdict is Verdict.COMPUTE_PROBE:
            self._loaded = 0
        elif verdict is Verdict.LOAD_PROBE:
            self._refused[size_of(chunks)] = 0
        self._on_verdict(verdict)

    def _has_doubt(self) -> bool:
        return self._min_chunks > 1 or any(self._is_losing) or self._is_compute_probe_due(self._clock())

    def _find_verdict(self, chunks: int) -> Verdict:
        if chunks < self._min_chunks:
            return Verdict.SHORT
        now = self._clock()
        if self._is_losing[size_of(chunks)]:
            return Verdict.LOAD_PROBE if self._is_load_probe_due(chunks, now) else Verdict.COMPUTE
        return Verdict.COMPUTE_PROBE if self._is_compute_probe_due(now) else Verdict.LOAD

    def _is_load_probe_due(self, chunks: int, now: float) -> bool:
        age = now - self._loading.measured_at(self._blocks(chunks))
        return self._refused[size_of(chunks)] + 1 >= PROBE_EVERY and age >= LOAD_PROBE_SECONDS

    def _is_compute_probe_due(self, now: float) -> bool:
        if not self._is_cost_aware or self._loaded + 1 < COMPUTE_PROBE_EVERY:
            return False
        return now - self._computing.measured_at(1, reach=SIZES) >= COMPUTE_PROBE_SECONDS

    def _compare(self) -> None:
        if not self._is_cost_aware:
            return
        for size, was_losing in enumerate(self._is_losing):
            chunks = 3 << size >> 1
            load, compute = self._loading.seconds(self._blocks(chunks)), self._computing.seconds(chunks)
            # Only where loads of about that size were seen: what was never tried is tried.
            is_known = self._loading.measured_at(self._blocks(chunks)) > -math.inf
            self._is_losing[size] = (
                is_known
                and load is not None
                and compute is not None
                and load > compute * (1 / HYSTERESIS if was_losing else HYSTERESIS)
            )

    def _blocks(self, chunks: int) -> int:
        return max(1, round(chunks * self._blocks_per_chunk))

    def _chunks(self, tokens: int) -> int:
        return tokens // self._tokens_per_chunk

    def _tokens_per_second(self, seconds: float | None) -> float:
        return self._last_chunks * self._tokens_per_chunk / seconds if seconds else 0.0
