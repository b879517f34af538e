# SPDX-License-Identifier: Apache-2.0
"""Finds how few I/O workers read as much as all of them would.

A disk is busy with two or four readers. More of them only share its rate, so that each read takes longer: the first
chunk of a hit comes later, and a join finds more chunks half read. A file system in memory or a distant one needs all.
Two numbers of workers are compared by the time in which they read equally many chunks, in bursts that have more chunks
than the smaller number. Pure; the scheduler's thread only.
"""

from __future__ import annotations

FEWEST_READING = 4
"""Readers of any volume: one of them may have to wait for long."""
ROUND_READS, ROUNDS = 32, 2
"""Two numbers are compared in turns of so many reads, and each has so many turns."""
_BETTER, _ENOUGH = 1.1, 0.95
"""More workers are better if they read so much more; fewer are enough if they read this share."""
PAUSE_SECONDS = 60.0
"""Numbers are compared again after so long, or as soon as a chunk takes another time than it did."""
_CHANGED = 1.5
NOTICE_SECONDS = 0.025
"""After so long, workers that could not read before know that they may, see `worker`."""
_QUICK_SECONDS = 0.0008
"""Where a chunk comes within less, fewer readers would save some milliseconds at most, and all workers read."""


class ReadingLimit:
    """See the module."""

    def __init__(self) -> None:
        """Begin with few: where more are better, that is plain after a few hundred reads.

        That fewer are enough is not: all of them would be kept where two measurements differ by chance.
        """
        self._numbers = (FEWEST_READING, FEWEST_READING)
        """Of workers that read at a time: in use, and compared with it."""
        self._workers = self._turn = self._reads = self._skipped = 0
        self._is_comparing = self._is_burst = False
        self._round_seconds, self._seconds = 0.0, [0.0, 0.0]
        """In which chunks were read, in this round, and in earlier ones by turn."""
        self._ended = self._valid_from = self._compare_at = 0.0
        """When the last read ended, from when on reads count for this turn, and when numbers are compared again."""
        self._chunk_seconds = 0.0
        """For one chunk, when numbers were last compared."""

    def most(self, workers: int) -> int:
        """Return how many of so many workers may read at a time now."""
        return min(workers, self._numbers[self._turn])

    def is_all(self, workers: int) -> bool:
        """Return whether fewer than so many workers were found to read less."""
        return self._numbers[0] >= workers

    def may_need_more(self, workers: int) -> bool:
        """Return whether more than so many workers may be worth their memory."""
        return self.is_all(workers) and not 0 < self._chunk_seconds < _QUICK_SECONDS

    def note(self, seconds: float, ended: float, *, reads: int, workers: int, now: float) -> None:
        """Take in how long a read took and when it ended, one of so many that were open until then.

        Many may be told at once, long after they ended: an engine at work does not ask for answers.
        """
        spent = max(0.0, min(seconds, ended - self._ended))
        self._ended = max(self._ended, ended)
        if workers > self._workers:
            self._take_in(workers, now)
        if workers <= FEWEST_READING:
            return
        is_burst = self._is_burst or reads > min(self._numbers)
        self._is_burst = is_burst and reads > 1
        if not is_burst or ended < self._valid_from:
            return
        if self._skipped:
            # It began in the turn before, or beside reads that did.
            self._skipped -= 1
            return
        self._round_seconds += spent
        self._reads += 1
        if self._reads % ROUND_READS:
            return
        chunk_seconds = max(1e-9, self._round_seconds / ROUND_READS)
        if chunk_seconds < _QUICK_SECONDS:
            self._chunk_seconds = chunk_seconds
            self._compare(workers, workers // 2, is_comparing=False)
        elif self._is_comparing:
            self._seconds[self._turn] += self._round_seconds
            self._round_seconds, self._turn = 0.0, 1 - self._turn
            self._discard(now)
            if self._reads == 2 * ROUNDS * ROUND_READS:
                self._decide(workers)
                self._compare_at = now + PAUSE_SECONDS
        else:
            is_same = 1 / _CHANGED < chunk_seconds / self._chunk_seconds < _CHANGED
            self._compare(*self._numbers, is_comparing=now >= self._compare_at or not is_same)

    def _take_in(self, workers: int, now: float) -> None:
        """Compare all workers with more, where all were needed."""
        if self.is_all(self._workers):
            self._compare(self._numbers[0], 2 * self._numbers[0])
        self._workers = workers
        self._discard(now)

    def _discard(self, now: float) -> None:
        self._valid_from = now + NOTICE_SECONDS
        self._skipped = sum(min(self._workers, number) for number in self._numbers)

    def _compare(self, used: int, tried: int, *, is_comparing: bool = True) -> None:
        self._numbers, self._is_comparing = (max(FEWEST_READING, used), max(FEWEST_READING, tried)), is_comparing
        self._turn = self._reads = 0
        self._round_seconds, self._seconds = 0.0, [0.0, 0.0]

    def _decide(self, workers: int) -> None:
        """Choose between the two numbers, and what is compared next."""
        used, tried = (min(workers, number) for number in self._numbers)
        is_more = tried > used
        is_taken = self._seconds[0] / self._seconds[1] >= (_BETTER if is_more else _ENOUGH)
        if is_taken:
            used = tried
        # The direction that helped is tried again at once, and the opposite one after a pause.
        is_more = is_more is is_taken
        is_possible = used < workers if is_more else used > FEWEST_READING
        self._chunk_seconds = self._seconds[is_taken] / (ROUNDS * ROUND_READS)
        tried = 2 * used if is_more is is_possible else used // 2
        self._compare(used, tried, is_comparing=is_taken and is_possible)
