# SPDX-License-Identifier: Apache-2.0
"""How many I/O workers may read at a time, on volumes of several kinds."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from kvtier_connector.io_workers.reading_limit import FEWEST_READING, PAUSE_SECONDS, ROUND_READS, ReadingLimit

ENOUGH_READS = 2_000
MANY = 1_000


def disk(workers: int) -> float:
    """Return reads a second, by the number of workers that read."""
    return min(workers * 130.0, 180.0)


def distant(workers: int) -> float:
    return workers * 12.0


def memory(workers: int) -> float:
    return 300.0 * workers / (1 + workers / 14)


def network(workers: int) -> float:
    return min(workers * 45.0, 370.0)


def quick(_: int) -> float:
    return 20_000.0


class _Volume:
    """Workers that are never idle; each takes its share of what the volume gives."""

    def __init__(self) -> None:
        self.limit = ReadingLimit()
        self.now = 0.0
        self._random = random.Random(7)

    def read(self, speed: Callable[[int], float], workers: int = 16, count: int = ENOUGH_READS) -> set[int]:
        """Let so many reads end; return how many workers could read meanwhile."""
        seen = set()
        for _ in range(count):
            reading = self.limit.most(workers)
            seen.add(reading)
            self.now += self._random.lognormvariate(0, 0.2) / speed(reading)
            self.end(reading / speed(reading), workers, left=MANY)
        return seen

    def end(self, seconds: float, workers: int, *, left: int) -> None:
        self.limit.note(seconds, self.now, reads=left, workers=workers, now=self.now)


@pytest.mark.parametrize(("speed", "most"), [(disk, 4), (network, 8), (distant, 16), (memory, 16), (quick, 16)])
def test_as_few_workers_read_as_the_volume_needs(speed: Callable[[int], float], most: int) -> None:
    volume = _Volume()
    assert volume.limit.most(16) == FEWEST_READING
    volume.read(speed)
    assert [workers for workers in (4, 8, 16) if volume.limit.is_all(workers)][-1] == most
    assert volume.limit.may_need_more(16) is (speed is distant)
    # The next comparison is far away.
    assert volume.read(speed, count=ROUND_READS) == {most}


def test_a_comparison_that_was_wrong_is_made_again() -> None:
    volume = _Volume()
    volume.read(distant)
    volume.now += PAUSE_SECONDS
    assert volume.read(distant) == {8, 16}
    assert volume.limit.is_all(16)


def test_a_volume_that_becomes_quicker_or_slower_is_compared_without_a_pause() -> None:
    volume = _Volume()
    volume.read(disk)
    volume.read(memory)
    assert volume.limit.is_all(16)
    volume.read(disk)
    assert volume.limit.is_all(FEWEST_READING)
    assert not volume.limit.is_all(8)
    assert volume.now < PAUSE_SECONDS


def test_workers_that_are_added_are_compared_at_once() -> None:
    volume = _Volume()
    assert volume.read(distant, workers=3, count=ROUND_READS) == {3}
    volume.read(distant, workers=6)
    assert volume.limit.is_all(6)
    assert not volume.limit.is_all(16)
    volume.read(distant, workers=16)
    assert volume.limit.is_all(16)


def test_reads_that_ended_before_the_engine_looked_belong_to_no_other_number_of_workers() -> None:
    limit = ReadingLimit()
    reading, now, late = limit.most(16), 0.0, []
    for count in range(ENOUGH_READS):
        now += 1 / disk(reading)
        late.append((reading / disk(reading), now))
        if count % 100 == 99:
            for seconds, ended in late:
                limit.note(seconds, ended, reads=MANY, workers=16, now=now)
            reading, late = limit.most(16), []
    assert not limit.is_all(8)


def test_a_comparison_ends_with_bursts_that_are_shorter_than_its_larger_number() -> None:
    volume = _Volume()
    volume.read(quick)
    assert volume.limit.is_all(16)
    for _ in range(ENOUGH_READS // 10):
        for left in range(10, 0, -1):
            volume.now += 1 / 180.0
            volume.end(min(left, volume.limit.most(16)) / 180.0, 16, left=left)
    assert not volume.limit.is_all(8)
