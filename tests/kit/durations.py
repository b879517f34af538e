# SPDX-License-Identifier: Apache-2.0
"""How long tests take, by the record in tests/durations.json: a test of more than a second is marked slow.

Pytest loads this module as a plugin of tests/conftest.py. `make durations` measures anew.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "tests" / "durations.json"
LONGEST_SECONDS = 1.0
"""Most that a test without the mark may take."""

WHOLE_FILE = "*"
"""Stands for all tests of a file whose fixtures take more than a second once."""

Record = dict[str, dict[str, float]]
"""Seconds by file and test, of slow tests only. A file without slow tests is there, too."""


def is_slow(nodeid: str, record: Mapping[str, Mapping[str, float]]) -> bool | None:
    """Tell whether a test is recorded as slow; None for a test whose file was never measured."""
    file, _, name = nodeid.partition("::")
    if file not in record:
        return None
    return WHOLE_FILE in record[file] or name in record[file]


class Stopwatch:
    """Adds up the phases of each test of a run.

    Attributes:
        seconds: By test, then by phase: setup, call, teardown.
        marked: The tests that have the mark.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, dict[str, float]] = defaultdict(dict)
        self.marked: set[str] = set()

    def add(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid][report.when] = report.duration
        if "slow" in report.keywords:
            self.marked.add(report.nodeid)

    def record(self) -> Record:
        found: Record = {}
        setups = Counter[str]()
        for nodeid, phases in self.seconds.items():
            file = nodeid.partition("::")[0]
            found.setdefault(file, {})
            setups[file] += phases.get("setup", 0.0) > LONGEST_SECONDS
        for nodeid, phases in self.seconds.items():
            file, _, name = nodeid.partition("::")
            setup, own = phases.get("setup", 0.0), phases.get("call", 0.0) + phases.get("teardown", 0.0)
            # A fixture that only the first test waits for is shared: without that test, the next one would wait.
            is_shared = setup > LONGEST_SECONDS and setups[file] == 1
            if is_shared:
                found[file][WHOLE_FILE] = round(setup, 1)
            if own + (0.0 if is_shared else setup) > LONGEST_SECONDS:
                found[file][name] = round(own + (0.0 if is_shared else setup), 1)
        return found

    def summary(self, record: Mapping[str, Mapping[str, float]]) -> str:
        """Return in one line what the tests with and without the mark took."""
        spent = {nodeid: sum(phases.values()) for nodeid, phases in self.seconds.items()}
        quick = [seconds for nodeid, seconds in spent.items() if nodeid not in self.marked]
        slow = [seconds for nodeid, seconds in spent.items() if nodeid in self.marked]
        known = sum(seconds for tests in record.values() for seconds in tests.values())
        return (
            f"{len(quick)} unmarked tests took {sum(quick):.0f} s of work, {len(slow)} slow ones {sum(slow):.0f} s;"
            f" all slow tests take {known:.0f} s by tests/durations.json"
        )


def read(path: Path = RECORD) -> Record:
    return json.loads(path.read_text()) if path.exists() else {}


def merged(old: Mapping[str, Mapping[str, float]], stopwatch: Stopwatch, existing: Iterable[str]) -> Record:
    """Return the record with the tests of a run replaced, and without files that are gone."""
    files, new = set(existing), stopwatch.record()
    found: Record = {}
    for file in sorted(files & {*old, *new}):
        kept = {name: took for name, took in old.get(file, {}).items() if f"{file}::{name}" not in stopwatch.seconds}
        found[file] = dict(sorted({**kept, **new.get(file, {})}.items()))
    return found


def write(record: Record, path: Path = RECORD) -> None:
    lines = ",\n".join(f" {json.dumps(file)}: {json.dumps(tests)}" for file, tests in record.items())
    path.write_text("{\n" + lines + "\n}\n")
