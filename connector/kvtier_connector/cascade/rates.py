# SPDX-License-Identifier: Apache-2.0
"""Two rates that an engine measures while it serves, of the volume and of prefill, and the decision that they make.

Each hit on the volume is loaded, split or computed, whichever takes the least time by these rates. A volume that was
never measured is tried, and so is one that lost when it was measured last and was not measured for a while. The
scheduler's thread only.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Callable, Sequence

JOIN_SECONDS = 0.015
"""A join takes so much longer than a load: it waits for the step under way, and for chunks that come between steps."""
PAUSE_WEIGHT = 0.25
"""A second by which an answer under way is paused counts as so many seconds until a first token."""
HIT_SECONDS = 0.01
"""A hit takes so much longer than its bytes at the volume's rate: chunks come in rounds, and are copied to the GPU."""
LONG_TOKENS, LOOK_SECONDS = 4096, 2.0
"""A hit of so many tokens is computed only where it waits for none, and the volume was measured so lately."""
NEW_SHARE = 0.3
"""Weight of a new measurement of a rate."""
KNOWN_SECONDS = 60.0
"""A volume that lost is tried again after so long without a measurement."""
LEAST_PATIENCE_SECONDS = 0.05
"""Requests wait at least so long before the volume counts as slower than it was."""
STALLED_SHARE = 0.1
"""Of the time that computing its rest takes, a load waits for a volume that gives nothing to any request."""
STALLED_SECONDS = 0.5
"""A volume that gives nothing for so long, while it is read, counts as one that hangs."""
LEAST_WINDOW_SECONDS = 0.03
"""Shortest time over which the volume's rate is measured."""
SURE_WINDOW_SECONDS, SURE_TOKENS = 0.1, 2048
"""A measurement of so much that is less than half of the rate is believed at once: loads would take too long."""
MEASURED_TOKENS = 1024
"""A step of fewer tokens, and of fewer than half of what a step may compute, says little about the rate of prefill."""
FIRST_MEASURED_TOKENS = 256
"""A step of so many measures it all the same, if no other has."""
ATTENTION_TOKENS = 50_000
"""Until it is known: a token behind half as many others takes twice as long to compute as the first one."""
APART_SHARE = 0.25
"""It is known once attention took so much of a step's time: shorter prompts say little about it."""
SLOW_RATIO, SLOW_STEPS = 1.5, 2
"""Where steps take so many times as long as expected, so many and the next one say nothing: idle GPUs begin slowly."""


class Way(enum.Enum):
    """How a request gets a hit whose chunks lie on the volume."""

    LOAD = "load"
    """All of it is read."""
    SPLIT = "split"
    """Its head is computed while its tail is read."""
    COMPUTE = "compute"
    """All of it is computed, since reading takes longer."""
    SHORT = "short"
    """All of it is computed: it has fewer tokens than configured."""

    @property
    def reads(self) -> bool:
        """Whether anything is read."""
        return self in {Way.LOAD, Way.SPLIT}


class Rate:
    """Units a second; new measurements count most."""

    def __init__(self, value: float = 0.0) -> None:
        """Start with a value; 0 stands for none."""
        self.value = value

    def observe(self, units: float, seconds: float) -> None:
        """Take in that `seconds` were taken by `units`."""
        if seconds > 0:
            new = units / seconds
            # Of the ratio, so that one that is a tenth of before is known as soon as one that is ten times as high.
            self.value = self.value * (new / self.value) ** NEW_SHARE if self.value and new else new

    def seconds(self, units: float) -> float:
        """Return how long so many units take; infinite where the rate is not known or 0."""
        return units / self.value if self.value else math.inf


def count_pairs(begin: float, tokens: float) -> float:
    """Return the work of attention of so many tokens of a prompt behind others: twice the pairs that they make."""
    return tokens * (2 * max(0, begin) + tokens)


class PrefillRate(Rate):
    """Tokens a second at the beginning of a prompt. Later ones take longer, for each attends to all before it."""

    pair_seconds = 0.0
    """How long a pair takes, see `count_pairs`."""
    _is_apart = False

    def observe(self, units: float, seconds: float, pairs: float = 0) -> None:
        """Take in how long tokens and their pairs took; of both, the one that takes longer is learnt from most."""
        if not (self.value and self.pair_seconds and pairs):
            super().observe(units + pairs / ATTENTION_TOKENS, seconds)
            self.pair_seconds = 1 / (ATTENTION_TOKENS * self.value) if pairs and self.value else self.pair_seconds
        elif seconds > 0:
            attending = pairs * self.pair_seconds
            expected = units / self.value + attending
            ratio, share = (seconds / expected) ** NEW_SHARE, attending / expected
            self._is_apart |= share > APART_SHARE
            self.value /= ratio ** (1 - share if self._is_apart else 1)
            self.pair_seconds *= ratio ** (share if self._is_apart else 1)

    def seconds(self, units: float, begin: float = 0, *, pairs: float | None = None) -> float:
        """Return how long so many tokens take behind `begin` others of their prompt; or with so many pairs."""
        pairs = count_pairs(begin, units) if pairs is None else pairs
        return super().seconds(units) + pairs * self.pair_seconds

    def head(self, begin: float, tokens: float, volume: float) -> float:
        """Return how many of some tokens are computed while a volume of so many tokens a second gives the others."""
        # Both take as long: pair_seconds * head**2 + linear * head == all / volume.
        linear, square = self.seconds(1, begin) + 1 / volume, max(0.0, tokens) / volume
        return 2 * square / (linear + math.sqrt(linear**2 + 4 * self.pair_seconds * square))

    def head_rate(self, begin: float, tokens: float, volume: float) -> float:
        """Return at how many tokens a second `head` is computed."""
        return 1 / self.seconds(1, begin + self.head(begin, tokens, volume) / 2)


class Rates:
    """See the module."""

    def __init__(
        self, *, now: Callable[[], float], min_tokens: int = 0, most_step_tokens: int = 2 * MEASURED_TOKENS
    ) -> None:
        """Start without a measurement.

        Args:
            now: Seconds that never go back.
            min_tokens: Hits of fewer tokens are computed.
            most_step_tokens: Of one step.
        """
        self.prefill = PrefillRate()
        """How quickly the engine computes prompts."""
        self.volume = Rate()
        """Tokens a second that the volume gives, to all requests; 0 before the first, and after it hung."""
        self.copying = Rate()
        """Tokens a second that a worker copies from the CPU tier to the GPU."""
        self.is_hanging = self.has_hung = False
        """Whether the volume is read and gives nothing, and whether that was so since it was measured last."""
        self.latency_seconds = 0.0
        """Time that reading one chunk takes, where few others are read."""
        self.step_seconds = self.least_seconds = 0.0
        """Time that the last step took, and that launching one of some hundred tokens takes. The second is 0 where it
        was never longer than computing them."""
        self.now = now
        self._min_tokens = min_tokens
        self._measured_tokens = min(MEASURED_TOKENS, most_step_tokens // 2)
        self._in_flight = 0
        self._steps: deque[tuple[int, float, float]] = deque()
        """Tokens and pairs of each step that has not ended, and when it was scheduled."""
        self._ended = (0, 0.0, 0.0)
        """Tokens, pairs and seconds of the step that ended before the last one; none where the GPU was idle between."""
        self._scheduled_at = self._began_at = 0.0
        """When the end of the step before the one under way was told, and when it is thought to have been."""
        self._slow_steps = 0
        self._window_began = self._moved_at = self._window_landed = self._window_longest = 0.0
        self._measured_at = -math.inf

    def note_step(self, tokens: int, in_flight: int, pairs: float = 0) -> None:
        """Take in the tokens of a step and their pairs, as it is scheduled, and the tokens in flight without it."""
        now = self.now()
        ended, self._in_flight = self._in_flight - in_flight, in_flight + tokens
        ended_pairs, left = 0.0, sum(tokens for tokens, *_ in self._steps)
        is_alone = bool(self._steps) and self._began_at <= self._steps[0][2]
        while self._steps and left - self._steps[0][0] >= in_flight:
            left -= self._steps[0][0]
            ended_pairs += self._steps.popleft()[1]
        if tokens:
            self._steps.append((tokens, pairs, now))
        if ended > 0:
            self.step_seconds = seconds = now - self._scheduled_at
            expected = self.prefill.seconds(ended, pairs=ended_pairs)
            # While the next step is launched, nothing tells that this one ended, and that the next one began.
            following = self._steps[0][2] if self._steps else now
            is_plain = ended >= FIRST_MEASURED_TOKENS and expected < math.inf
            is_hidden = following < now and self._steps[0][0] >= FIRST_MEASURED_TOKENS
            if is_plain and is_alone and not is_hidden:
                took, least = now - self._began_at, self.least_seconds
                is_short = took > SLOW_RATIO * expected and ended < 2 * MEASURED_TOKENS
                limit = min(4 * JOIN_SECONDS, 1.1 * least or 2 * JOIN_SECONDS) if is_short else least
                self.least_seconds = min(took, limit)
            is_late = is_plain and is_hidden and now - following <= SLOW_RATIO * self.least_seconds
            self._began_at = min(now, max(self._began_at + expected, following)) if is_late else now
            # Where this call is late, the next step has ended as well: the mean of two is right.
            before, self._ended = self._ended, (ended, ended_pairs, seconds)
            if ended >= min(self._measured_tokens, MEASURED_TOKENS if self.prefill.value else FIRST_MEASURED_TOKENS):
                work, pairs, took = (sum(both) for both in zip(self._ended, before, strict=True))
                is_slow = took > SLOW_RATIO * self.prefill.seconds(work, pairs=pairs)
                skipped, self._slow_steps = self._slow_steps, (self._slow_steps + 1) * is_slow
                if not 0 < (self._slow_steps or skipped) <= SLOW_STEPS:
                    self.prefill.observe(work, took, pairs)
        if not in_flight:
            self._ended, self._began_at = (0, 0.0, 0.0), now
        if ended > 0 or not in_flight:
            self._scheduled_at = now

    def note_gone(self, tokens: int) -> None:
        """Take in that a request is gone with so many tokens in flight, whose end nothing tells."""
        self._in_flight -= tokens

    def note_ordered(self) -> None:
        """Take in that chunks were ordered: a quick volume may give all of them before the next call."""
        if not self._window_began:
            self._window_began = self._moved_at = self.now()

    def note_landed(self, tokens: int, *, reads: Sequence[tuple[float, float]] = (), is_reading: bool) -> None:
        """Take in how many tokens have come from the volume since the last call.

        Args:
            tokens: Tokens of the chunks that have landed.
            reads: Of each of these chunks, the seconds that its read took, and when it ended.
            is_reading: Whether chunks are still being read.
        """
        now = self.now()
        if tokens or not self._window_began:
            self._moved_at = now
        self._window_landed += tokens
        if reads:
            # Reads beside others take longer, so the least counts, and is forgotten slowly.
            self.latency_seconds = min(min(reads)[0], 1.002 * self.latency_seconds or math.inf)
            self._window_longest = max(self._window_longest, max(reads)[0])
            ended = max(ended for _, ended in reads)
            seconds = ended - self._window_began
            # Reads that run side by side end together, and a call may come between: a window has whole rounds of them.
            is_whole = seconds >= 2 * self._window_longest if is_reading else seconds >= 0.99 * self._window_longest
            is_more = not is_reading and self._window_landed > self.volume.value * seconds
            if self._window_began and is_whole and (seconds >= LEAST_WINDOW_SECONDS or is_more):
                is_sure = seconds >= SURE_WINDOW_SECONDS and self._window_landed >= SURE_TOKENS
                if is_sure and 2 * self._window_landed < self.volume.value * seconds:
                    self.volume.value = self._window_landed / seconds
                else:
                    self.volume.observe(self._window_landed, max(seconds, 1e-3))
                self._window_began, self._window_landed, self._window_longest = ended, 0, 0.0
                self._measured_at, self.has_hung = now, False
        if not is_reading:
            self._window_began, self._window_landed, self._window_longest = 0.0, 0, 0.0
        elif not self._window_began:
            self._window_began = now
        self.is_hanging = is_reading and now - self._moved_at >= STALLED_SECONDS
        if self.is_hanging:
            # When the reads under way have ended, the next hit measures the volume anew.
            self.volume.value, self._window_began, self.has_hung = 0.0, now, True

    @property
    def busy_seconds(self) -> float:
        """How long the steps that are scheduled already still take to compute prompts."""
        tokens, pairs = self._in_flight, sum(pairs for _, pairs, _ in self._steps)
        return max(0.0, self.prefill.seconds(tokens, pairs=pairs) - self.now() + self._began_at) if tokens else 0.0

    def choose(  # noqa: PLR0913 - keywords
        self,
        tokens: int,
        *,
        unread: int,
        begin: int = 0,
        queued: int = 0,
        backlog: float = 0.0,
        answering: int = 0,
        may_split: bool = False,
    ) -> Way:
        """Say how a hit is there soonest, without pausing the answers of others for long.

        Args:
            tokens: Tokens of the hit.
            unread: Tokens of those chunks of it that must be read.
            begin: Tokens before it.
            queued: Tokens that were ordered before and are not there yet.
            backlog: Seconds of what the engine computes before.
            answering: Requests whose answers are under way; a step that computes a prompt pauses them.
            may_split: Whether the hit may be split.
        """
        if tokens < self._min_tokens:
            return Way.SHORT
        trial, volume = Way.SPLIT if may_split else Way.LOAD, self.volume.value
        if self.is_hanging:
            return Way.COMPUTE
        if not (volume and self.prefill.value):
            return trial
        busy, paused, computing = self.busy_seconds, PAUSE_WEIGHT * answering, self.prefill.seconds(tokens, begin)
        seconds = {
            Way.LOAD: max(busy, self.latency_seconds + self.volume.seconds(queued + unread)) + HIT_SECONDS,
            Way.COMPUTE: busy + backlog + (1 + paused) * computing,
        }
        if may_split:
            prefill = self.prefill.head_rate(begin, unread, volume)
            work = queued + unread * (1 + paused) + (backlog + busy) * prefill
            # Chunks that come during a step are copied behind it.
            copied = volume * self.prefill.seconds(2 * MEASURED_TOKENS) / (self.copying.value or math.inf)
            seconds[Way.SPLIT] = work / (prefill + volume) + copied + JOIN_SECONDS + HIT_SECONDS
            if tokens >= LONG_TOKENS and (queued or backlog or self.now() - self._measured_at >= LOOK_SECONDS):
                # Its head is computed anyway, and until its turn comes the volume may give more than now.
                del seconds[Way.COMPUTE]
        way = min(seconds, key=seconds.__getitem__)
        return trial if way is Way.COMPUTE and self.now() - self._measured_at >= KNOWN_SECONDS else way

    def is_stalled(self, computing: float) -> bool:
        """Say whether the volume gives nothing to any request, for a share of so many seconds that computing takes."""
        patience = max(LEAST_PATIENCE_SECONDS, 2 * self.latency_seconds, STALLED_SHARE * computing)
        return bool(self._window_began) and self.now() - self._moved_at > patience
