# SPDX-License-Identifier: Apache-2.0
"""How many I/O workers read, of volumes of which some need all of them."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from kvtier_connector.io_workers.reading_limit import FEWEST_READING, PAUSE_SECONDS, ROUND_READS, ReadingLimit

ENOUGH_READS = 1_000


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
            self.now += 1 / speed(reading)
            self.limit.note(reading / speed(reading) * self._random.lognormvariate(0, 0.3), workers, self.now)
        return seen


@pytest.mark.parametrize(("speed", "most"), [(disk, 4), (network, 8), (distant, 16), (memory, 16), (quick, 16)])
def test_as_few_workers_read_as_the_volume_needs(speed: Callable[[int], float], most: int) -> None:
    volume = _Volume()
    volume.read(speed)
    assert [workers for workers in (4, 8, 16) if volume.limit.is_all(workers)][-1] == most
    # The next comparison is far away.
    assert volume.read(speed, count=ROUND_READS) == {most}


def test_a_comparison_that_was_wrong_is_made_again() -> None:
    volume = _Volume()
    volume.read(memory)
    volume.now += PAUSE_SECONDS
    assert volume.read(memory, count=ENOUGH_READS) == {8, 16}
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
