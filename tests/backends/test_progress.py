# SPDX-License-Identifier: Apache-2.0
"""How long the start of an engine is waited for."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from clocks import Clock
from e2e.backends.progress import LOOK_SECONDS, STILL_SECONDS, Progress, processor_seconds

SPIN = "import time\nwhile time.process_time() < 0.3: pass\n"
WITH_A_CHILD = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {SPIN!r}], check=True)\n{SPIN}"
WAIT = "print(flush=True)\nsys.stdin.read()\n"


@pytest.fixture
def session() -> Iterator[int]:
    """A session of which one process has ended, each of which has had its time."""
    words = [sys.executable, "-c", WITH_A_CHILD + WAIT]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid
        process.communicate(timeout=60)


def test_a_session_is_asked_for_all_of_its_processes(session: int) -> None:
    assert processor_seconds(session) > 0.5  # in ticks; either one alone has had less


def test_a_session_of_nobody_has_had_nothing() -> None:
    assert processor_seconds(-1) == 0


def test_a_process_that_ends_while_it_is_asked_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "stat").symlink_to(tmp_path / "gone")
    (tmp_path / "2").mkdir()
    (tmp_path / "2" / "stat").write_text(f"2 (a name) with) S 1 7 7 {' 0' * 7} 100 200 300 400 20")
    assert processor_seconds(7, tmp_path) > 0


def started(clock: Clock, *, spent: Iterator[float], written: Iterator[int]) -> Progress:
    return Progress(lambda: next(spent), lambda: next(written), limit_seconds=100, clock=clock)


@pytest.mark.parametrize(
    ("spent", "written"),
    [
        pytest.param(itertools.count(0.0, 2.0), itertools.repeat(5), id="it works and logs nothing"),
        pytest.param(itertools.repeat(1.5), itertools.count(), id="it logs and hardly works"),
    ],
)
def test_one_that_is_slow_is_waited_for(spent: Iterator[float], written: Iterator[int]) -> None:
    clock = Clock()
    progress = started(clock, spent=spent, written=written)
    for _ in range(20):
        clock.seconds += STILL_SECONDS
        assert progress.verdict() is None


def test_one_that_does_nothing_is_not_waited_for() -> None:
    clock = Clock()
    progress = started(clock, spent=itertools.count(7.0, 0.001), written=itertools.repeat(5))
    assert progress.verdict() is None
    clock.seconds += STILL_SECONDS
    assert progress.verdict() is None
    clock.seconds += LOOK_SECONDS
    assert progress.verdict() == "has done nothing for 125 s"


def test_one_that_never_comes_to_an_end_of_its_start_is_not_waited_for() -> None:
    progress = started(Clock(), spent=itertools.repeat(101.0), written=itertools.count())
    assert progress.verdict() == "has had 101 s of processor time and does not serve"


def test_between_two_looks_nobody_is_asked() -> None:
    clock = Clock()
    progress = started(clock, spent=iter([1.0, 101.0]), written=itertools.repeat(5))
    assert progress.verdict() is None
    clock.seconds += LOOK_SECONDS / 2
    assert progress.verdict() is None
    clock.seconds += LOOK_SECONDS / 2
    assert progress.verdict() == "has had 101 s of processor time and does not serve"
