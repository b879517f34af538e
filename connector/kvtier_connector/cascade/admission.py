# SPDX-License-Identifier: Apache-2.0
"""Decides what is read from the volume; whatever is left out has a cause, which is counted.

A request that finds chunks on the volume gets one `Verdict`: all of its hit is loaded, or all of it is computed.
Loading wins where the volume gives chunks faster than the engine computes them, and that depends on both, on the model
and on the length of the prompt. So both are measured while serving.

Loading is timed from the order to the last chunk's landing, and what was ordered before counts as part of the work.
Computing is timed from the step that schedules a request to the arrival of its chunks in the CPU tier. Other requests
that the engine computes meanwhile slow it, as they would slow the next one. Waiting to be scheduled counts on neither
side.

Both also have a queue: blocks that were ordered from the volume and are not there yet, and requests that were left to
the engine and are not scheduled yet. Where one is behind, a hit goes the other way, so that a volume need not give as
much as requests ask for. A queue that is longer than any before takes as long for each block as the longest measured.

With no queue, a size that was never measured is loaded. Where loading loses, one request in `PROBE_EVERY` loads all the
same once the last measurement is old. So a volume that became faster is noticed, and likewise the other way round.

Only memory is read here, so the scheduler may ask in each of its steps; the time comes in from outside.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvtier_connector.vllm_adapter import metrics

SIZES = 20
"""Powers of two that are told apart; larger amounts count as the last."""
SMALLEST_WEIGHT = 0.3
"""Of a new measurement against the old ones, when they follow each other at once."""
MEMORY_SECONDS = 20.0
"""After so long without a measurement, the next one counts for two thirds; after much longer, it replaces the old."""
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


class Verdict(enum.Enum):
    """The decision about the chunks of a request on the volume."""

    LOAD = "load"
    LOAD_PROBE = "load_probe"
    """Load, although it is measured to be slower: to measure it again."""
    COMPUTE = "compute"
    """Compute: loading would take longer."""
    COMPUTE_PROBE = "compute_probe"
    SHORT = "short"
    """Compute: the hit is shorter than the configured least."""

    @property
    def may_load(self) -> bool:
        """Whether the chunks are loaded."""
        return self in {Verdict.LOAD, Verdict.LOAD_PROBE}

    @property
    def cause(self) -> str:
        """Why chunks are not loaded, for the metrics."""
        return metrics.SHORT if self is Verdict.SHORT else metrics.SLOWER


@dataclass(slots=True)
class _Prefill:
    """A request whose prompt is being computed."""

    began: float
    step: int
    start: int | None = None
    """Token from which on it is computed; known once the first chunk arrives."""


@dataclass(frozen=True, slots=True)
class _Load:
    began: float
    queued: int
    """Blocks of this load and of those ordered before it that had not landed."""


def size_of(amount: int) -> int:
    """Return the number of the power of two that an amount, 1 or more, belongs to."""
    return min(SIZES, amount.bit_length()) - 1


class Pace:
    """Seconds for one unit of work, by how much of it is done at once; newer measurements count more."""

    def __init__(self) -> None:
        """Start without a measurement."""
        self._rates: list[float | None] = [None] * SIZES
        self._times = [-math.inf] * SIZES
        self._nearest: list[int] = []
        """By size, the nearest one that was measured; empty before the first measurement."""

    def observe(self, amount: int, seconds: float, now: float) -> None:
        """Take in that `amount` units, done together, took so long."""
        size = size_of(amount)
        old, new = self._rates[size], seconds / amount
        weight = max(SMALLEST_WEIGHT, 1.0 - math.exp(-(now - self._times[size]) / MEMORY_SECONDS))
        self._rates[size] = new if old is None else old + weight * (new - old)
        self._times[size] = now
        if old is None:
            self._find_nearest()

    def seconds_in_bulk(self, amount: int) -> float:
        """Say how long `amount` units take among many others, by the largest size measured; 0 before the first."""
        rate = self._rates[self._nearest[-1]] if self._nearest else None
        return 0.0 if rate is None else rate * amount

    def seconds(self, amount: int) -> float | None:
        """Say how long `amount` units would take together, by the nearest size measured; None before the first."""
        if not self._nearest:
            return None
        rate = self._rates[self._nearest[size_of(amount)]]
        return None if rate is None else rate * amount

    def _find_nearest(self) -> None:
        measured = [number for number, rate in enumerate(self._rates) if rate is not None]
        # Of two sizes equally near, the larger: overheads weigh less there.
        self._nearest = [min(measured, key=lambda number: (abs(number - size), -number)) for size in range(SIZES)]

    def measured_at(self, amount: int, *, reach: int = 1) -> float:
        """Return when an amount of about this size was measured last; minus infinity if never.

        Args:
            amount: Units of work.
            reach: How many powers of two away still counts as about this size.
        """
        size = size_of(amount)
        return max(self._times[max(0, size - reach) : size + reach + 1])


class Admission:
    """The verdicts of one tier, and what they are made from. Every method is the scheduler's; not thread-safe."""

    def __init__(  # noqa: PLR0913 - keywords
        self,
        *,
        is_cost_aware: bool,
        min_tokens: int,
        tokens_per_chunk: int,
        is_prompt_only: bool,
        on_verdict: Callable[[Verdict], None],
        clock: Callable[[], float],
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
        self.is_cost_aware = is_cost_aware
        """Whether hits are weighed at all; not where they are split."""
        self._min_chunks = -(-min_tokens // tokens_per_chunk)
        self._tokens_per_chunk = tokens_per_chunk
        self._is_prompt_only = is_prompt_only
        self._on_verdict = on_verdict
        self._clock = clock
        self._loading = Pace()
        self._computing = Pace()
        self._is_losing = [False] * SIZES
        """For each size in chunks, whether computing is known to be quicker."""
        self._loads: dict[int, _Load] = {}
        self._waiting: dict[str, int] = {}
        """Chunks of each request that was left to the engine and has not been scheduled."""
        self._step = 0
        self._prefills: dict[str, _Prefill] = {}
        self._last_chunks = 1
        self._blocks_per_chunk = 1.0
        """More than one for models with several groups of layers."""
        self._refused = [0] * SIZES
        """For each size in chunks, since the last load of that size that measured."""
        self._loaded = 0
        """Since the last prompt that measured."""

    def decide(self, request: str, chunks: int, blocks: int, *, to_read: int, queued: int) -> Verdict:
        """Decide what a request does that found a hit.

        Args:
            request: Name of the request.
            chunks: How long the hit is, in chunks of the first group.
            blocks: How many files it is; more than chunks for models with several groups of layers.
            to_read: How many of them no other request has ordered yet.
            queued: Blocks that were ordered and are not there yet.
        """
        self._last_chunks = chunks
        self._blocks_per_chunk = blocks / chunks
        # Where a queue is in the way, what is to be known is how long it takes as a whole.
        is_losing = self._is_losing[size_of(chunks)]
        tried = size_of(chunks if is_losing else max(1, round((queued + to_read) / self._blocks_per_chunk)))
        verdict = self._find_verdict(chunks, to_read, queued, tried)
        self._loaded += verdict.may_load
        if verdict is Verdict.COMPUTE:
            self._waiting[request] = chunks
            if len(self._waiting) > MOST_PREFILLS:
                del self._waiting[next(iter(self._waiting))]
            self._refused[tried] += 1
        elif verdict is Verdict.COMPUTE_PROBE:
            self._loaded = 0
        elif verdict is Verdict.LOAD_PROBE:
            self._refused[tried] = 0
        self._on_verdict(verdict)
        return verdict

    def is_queue_in_the_way(self, chunks: int, *, to_read: int, queued: int) -> bool:
        """Say whether a hit would be computed now for no other reason; when its turn comes that may not be so."""
        if chunks < self._min_chunks or self._is_losing[size_of(chunks)]:
            return False
        return self._is_computing_sooner(chunks, to_read, queued)

    def end_step(self) -> None:
        """Note that a step of the scheduler has ended."""
        self._step += 1

    def begin_load(self, job_id: int, blocks: int, *, queued: int) -> None:
        """Note that vLLM ordered blocks, behind others that were ordered and are not there yet."""
        self._loads[job_id] = _Load(self._clock(), queued + blocks)
        self._last_chunks = max(1, round(blocks / self._blocks_per_chunk))

    def end_load(self, job_id: int, blocks: int, *, landed: int) -> None:
        """Note that so many of the job's blocks have landed; 0 says nothing about the pace of the volume."""
        load = self._loads.pop(job_id)
        if landed:
            now = self._clock()
            amount = load.queued - blocks + landed
            self._loading.observe(amount, now - load.began, now)
            self._refused[size_of(max(1, round(amount / self._blocks_per_chunk)))] = 0
            self._compare()

    def begin_compute(self, request: str) -> None:
        """Note that vLLM schedules the request for the first time in this step."""
        self._waiting.pop(request, None)
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
        chunks = (max(ends) - prefill.start) // self._tokens_per_chunk
        if chunks > 0:
            now = self._clock()
            self._computing.observe(chunks, now - prefill.began, now)
            self._loaded = 0
            self._compare()

    def interrupt(self, request: str) -> None:
        """Note that the request was preempted: the time until its next block says nothing."""
        self._prefills.pop(request, None)

    def end_request(self, request: str) -> None:
        """Forget a request that has ended, scheduled or not."""
        self._waiting.pop(request, None)
        self._prefills.pop(request, None)

    def seconds_to_compute(self, chunks: int) -> float:
        """Return how long computing so many chunks of the first group would take; 0 before the first measurement."""
        return self._computing.seconds(chunks) or 0.0

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
        """Tokens from which on hits are loaded with no queue; 0 if all are, -1 if none of a measured length is."""
        if not any(self._is_losing):
            return self._min_chunks * self._tokens_per_chunk
        first_winning = SIZES - self._is_losing[::-1].index(True)
        above = range(first_winning, SIZES)
        if all(self._loading.measured_at(self._blocks(1 << size), reach=0) == -math.inf for size in above):
            return -1
        return max(1 << first_winning, self._min_chunks) * self._tokens_per_chunk

    def _find_verdict(self, chunks: int, to_read: int, queued: int, tried: int) -> Verdict:
        if chunks < self._min_chunks:
            return Verdict.SHORT
        now = self._clock()
        if not self._is_losing[size_of(chunks)] and self._is_compute_probe_due(now):
            return Verdict.COMPUTE_PROBE
        if not self._is_computing_sooner(chunks, to_read, queued):
            return Verdict.LOAD
        return Verdict.LOAD_PROBE if self._is_load_probe_due(chunks, tried, now) else Verdict.COMPUTE

    def _is_computing_sooner(self, chunks: int, to_read: int, queued: int) -> bool:
        """Say whether a hit would be computed before it would be loaded, with what is queued on either side."""
        if not self.is_cost_aware or not to_read:
            # Chunks that others have ordered come anyway.
            return False
        is_losing = self._is_losing[size_of(chunks)]
        load, compute = self._loading.seconds(queued + to_read), self._computing.seconds(chunks)
        # A size that was never tried is tried, unless there is a queue: that one is never too long to be judged.
        is_untried = not queued and self._loading.measured_at(to_read) == -math.inf
        if load is None or compute is None or is_untried:
            return is_losing
        compute += self._seconds_behind()
        return compute <= load * HYSTERESIS if is_losing else load > compute * HYSTERESIS

    def _seconds_behind(self) -> float:
        """Return how long the engine will take for the requests that wait; it computes many of them at once."""
        return self._computing.seconds_in_bulk(sum(self._waiting.values()))

    def _is_load_probe_due(self, chunks: int, tried: int, now: float) -> bool:
        is_losing = self._is_losing[size_of(chunks)]
        # Loads with no queue before them say little of those with one, though they are of nearly the same size.
        at = self._loading.measured_at(self._blocks(chunks if is_losing else 1 << tried), reach=int(is_losing))
        return self._refused[tried] + 1 >= PROBE_EVERY and now - at >= LOAD_PROBE_SECONDS

    def _is_compute_probe_due(self, now: float) -> bool:
        if not self.is_cost_aware or self._loaded + 1 < COMPUTE_PROBE_EVERY:
            return False
        return now - self._computing.measured_at(1, reach=SIZES) >= COMPUTE_PROBE_SECONDS

    def _compare(self) -> None:
        if not self.is_cost_aware:
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

    def _tokens_per_second(self, seconds: float | None) -> float:
        return self._last_chunks * self._tokens_per_chunk / seconds if seconds else 0.0
