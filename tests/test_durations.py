# SPDX-License-Identifier: Apache-2.0
"""A test that takes more than a second is marked slow, by what the last measured run recorded."""

from __future__ import annotations

from pathlib import Path

import durations
import pytest

RECORD = {"tests/a.py": {"test_long[1]": 2.0}, "tests/b.py": {"*": 5.0}, "tests/c.py": {}}


def stopwatch(*phases: tuple[str, str, float]) -> durations.Stopwatch:
    watch = durations.Stopwatch()
    for nodeid, when, seconds in phases:
        keywords = {"slow": 1} if "long" in nodeid else {}
        watch.add(pytest.TestReport(nodeid, ("", 0, ""), keywords, "passed", None, when, duration=seconds))
    return watch


@pytest.mark.parametrize(
    ("nodeid", "expected"),
    [
        ("tests/a.py::test_long[1]", True),
        ("tests/a.py::test_long[2]", False),
        ("tests/b.py::test_any", True),
        ("tests/c.py::test_any", False),
        ("tests/d.py::test_any", None),
    ],
)
def test_a_test_is_slow_as_recorded_and_unknown_in_a_new_file(nodeid: str, expected: bool | None) -> None:
    assert durations.is_slow(nodeid, RECORD) is expected


def test_calls_of_more_than_a_second_are_recorded() -> None:
    watch = stopwatch(("a.py::test_x", "call", 1.26), ("a.py::test_y", "call", 0.9), ("b.py::test_z", "call", 0.1))
    assert watch.record() == {"a.py": {"test_x": 1.3}, "b.py": {}}


def test_a_fixture_that_one_test_waits_for_makes_its_file_slow() -> None:
    watch = stopwatch(("a.py::test_x", "setup", 4.0), ("a.py::test_x", "call", 0.2), ("a.py::test_y", "call", 0.2))
    assert watch.record() == {"a.py": {"*": 4.0}}


def test_a_fixture_that_each_test_waits_for_makes_these_tests_slow() -> None:
    watch = stopwatch(("a.py::test_x", "setup", 2.0), ("a.py::test_y", "setup", 3.0), ("a.py::test_z", "call", 0.2))
    assert watch.record() == {"a.py": {"test_x": 2.0, "test_y": 3.0}}


def test_a_run_replaces_its_tests_keeps_others_and_forgets_files_that_are_gone() -> None:
    old = {"a.py": {"test_x": 2.0, "test_y": 3.0}, "b.py": {"*": 4.0}, "gone.py": {}}
    watch = stopwatch(("a.py::test_x", "call", 0.1), ("a.py::test_z", "call", 5.0))
    assert durations.merged(old, watch, ["a.py", "b.py"]) == {
        "a.py": {"test_y": 3.0, "test_z": 5.0},
        "b.py": {"*": 4.0},
    }


def test_a_record_reads_back_as_it_was_written(tmp_path: Path) -> None:
    durations.write(RECORD, tmp_path / "durations.json")
    assert durations.read(tmp_path / "durations.json") == RECORD
    assert durations.read(tmp_path / "none.json") == {}


def test_the_summary_has_both_sets() -> None:
    watch = stopwatch(("a.py::test_x", "call", 0.4), ("a.py::test_x", "setup", 0.8), ("a.py::test_long", "call", 7.0))
    assert watch.summary(RECORD) == (
        "1 unmarked tests took 1 s of work, 1 slow ones 7 s; all slow tests take 7 s by tests/durations.json"
    )
