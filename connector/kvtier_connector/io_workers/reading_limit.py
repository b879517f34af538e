# SPDX-License-Identifier: Apache-2.0
"""Finds how few I/O workers read as much as all of them would.

A disk is busy with two or four readers. More of them only share its rate, so that each read takes longer: the first
chunk of a hit comes later, and a join finds more chunks half read. A file system in memory or a distant one needs all.
Reads count while more chunks wait than workers may read. Workers that are never idle finish ``workers / seconds``
chunks a second, where a read takes so many seconds on the mean. Pure; the scheduler's thread only.
"""

from __future__ import annotations

FEWEST_READING = 4
"""Readers of any volume: one of them may have to wait for long."""
ROUND_READS, ROUNDS = 32, 2
"""Two numbers of workers are compared in turns of so many reads, and each has so many turns."""
_BETTER, _ENOUGH = 1.1, 0.95
"""More workers are better if they read so much more; fewer are enough if they read this share."""
PAUSE_SECONDS = 60.0
"""Numbers are compared again after so long, or as soon as a read takes another time than it did."""
_CHANGED = 1.5
_QUICK_SECONDS = 0.001
"""Reads that take less are not worth a comparison, and all workers read."""


class ReadingLimit:
    """See the module."""

    def __init__(self) -> None:
        """Begin with few: where more are better, that is known after a few hundred reads."""
        self._numbers = (FEWEST_READING, FEWEST_READING)
        """Of workers that read at a time: in use, and compared with it."""
        self._workers = self._turn = 0
        self._is_comparing = False
        self._reads = self._skipped = 0
        self._round_seconds, self._seconds = 0.0, [0.0, 0.0]
        """That reads took in this round, and in earlier ones by turn."""
        self._mean_seconds = self._compare_at = 0.0
        """That a read took when numbers were last compared, and when they are compared again."""

    def most(self, workers: int) -> int:
        """Return how many of so many workers may read at a time now."""
        return min(workers, self._numbers[self._turn])

    def is_all(self, workers: int) -> bool:
        """Return whether fewer than so many workers were found to read less."""
        return self._numbers[0] >= workers

    def note(self, seconds: float, workers: int, now: float) -> None:
        """Take in how long a read took that ended at a time when more chunks waited than workers may read."""
        if workers <= FEWEST_READING:
            return
        if workers > self._workers:
            if self.is_all(self._workers):
                self._compare(self._numbers[0], 2 * self._numbers[0])
            self._workers = workers
        if self._skipped:
            # It began in the turn before, or beside reads that did.
            self._skipped -= 1
            return
        self._round_seconds += seconds
        self._reads += 1
        if self._reads % ROUND_READS:
            return
        spent, self._round_seconds = self._round_seconds, 0.0
        mean = spent / ROUND_READS
        if mean < _QUICK_SECONDS:
            self._mean_seconds = mean
            self._compare(workers, max(FEWEST_READING, workers // 2), is_comparing=False)
        elif self._is_comparing:
            self._seconds[self._turn] += spent
            self._turn = 1 - self._turn
            self._skipped = sum(min(workers, number) for number in self._numbers)
            if self._reads == 2 * ROUNDS * ROUND_READS:
                self._decide(workers)
                self._compare_at = now + PAUSE_SECONDS
        else:
            is_due = now >= self._compare_at or not 1 / _CHANGED < mean / self._mean_seconds < _CHANGED
            self._compare(*self._numbers, is_comparing=is_due)

    def _compare(self, used: int, tried: int, *, is_comparing: bool = True) -> None:
        self._numbers, self._is_comparing = (used, tried), is_comparing
        self._turn = self._reads = 0
        self._seconds = [0.0, 0.0]

    def _decide(self, workers: int) -> None:
        """Choose between the two numbers, and what is compared next."""
        used, tried = (min(workers, number) for number in self._numbers)
        is_more = tried > used
        gain = tried / self._seconds[1] * self._seconds[0] / used
        is_taken = gain >= (_BETTER if is_more else _ENOUGH)
        if is_taken:
            used = tried
        # The direction that helped is tried again at once, and the opposite one after a pause.
        is_more = is_more is is_taken
        is_possible = used < workers if is_more else used > FEWEST_READING
        self._mean_seconds = self._seconds[is_taken] / (ROUNDS * ROUND_READS)
        tried = 2 * used if is_more is is_possible else max(FEWEST_READING, used // 2)
        self._compare(used, tried, is_comparing=is_taken and is_possible)
