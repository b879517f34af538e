# SPDX-License-Identifier: Apache-2.0
"""What every suite has: switches, and a path to what they share."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent / "kit"))

import durations
import groups
from engine_host import EngineHost
from groups import group_of

# A fifth of what importing vLLM takes goes into looking for garbage among a million objects that stay.
gc.disable()

# A machine with a GPU, for the tests that need one, may have pytest and nothing else.
with contextlib.suppress(ModuleNotFoundError):
    from hypothesis import HealthCheck, settings

    # No test is about time, and another one may take the processor meanwhile. The examples are the same each time, so
    # that a run that fails says something about the change; `make test-random` draws others.
    settings.register_profile("same", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.register_profile("random", settings.get_profile("same"), derandomize=False, print_blob=True)
    settings.load_profile("same")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite expected files instead of comparing")
    parser.addoption("--write-durations", action="store_true", help="record in tests/durations.json what tests took")


LIVE = {
    "api",
    "authority",
    "controllers",
    "crews",
    "engines",
    "faulty_volume",
    "image",
    "killer",
    "kubectl",
    "processes",
}
LIVE |= {"rigs", "spawn", "target", "tiers", "vllm", "vllm_flags"}
"""Fixtures that start servers, processes and mounts, or ask vLLM."""

LIVE_PLACES = {"demo", "e2e", "kind", "test_command.py", "test_faults_run.py"}
LIVE_PLACES |= {"test_process.py", "test_wheel.py"}
"""Folders and modules whose tests do so without a fixture."""


@pytest.fixture
def kvtier(capsys: pytest.CaptureFixture[str]) -> Any:
    """``kvtier("status", "llama")`` runs the command; see tests/kit/command.py."""
    from command import Command  # noqa: PLC0415  most tests do without the operator

    return Command(capsys)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Leave what all tests need to themselves out of each collection of garbage: there are a million objects of it."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests that start something and slow tests; order the files where workers share them."""
    record = durations.read()
    for item in items:
        places = item.path.relative_to(durations.ROOT).parts[1:]
        if LIVE_PLACES.intersection(places) or not LIVE.isdisjoint(getattr(item, "fixturenames", ())):
            item.add_marker("live")
        slow = durations.is_slow(item.nodeid, record)
        is_engine, is_live = (item.get_closest_marker(name) is not None for name in ("engine", "live"))
        if is_engine or (is_live if slow is None else slow):
            item.add_marker("slow")
    if is_worker(config):
        order = {name: number for number, name in enumerate(_long_ones_first(items))}
        items.sort(key=lambda item: (order[group_of(item.nodeid)], item.get_closest_marker("engine") is None))


def pytest_configure(config: pytest.Config) -> None:
    """Measure the tests."""
    if not is_worker(config):
        config.stash[STOPWATCH] = durations.Stopwatch()
        config.pluginmanager.register(Measuring(config.stash[STOPWATCH]))


STOPWATCH = pytest.StashKey[durations.Stopwatch]()


class Measuring:
    """Hands the reports of tests to a stopwatch."""

    def __init__(self, stopwatch: durations.Stopwatch) -> None:
        self._stopwatch = stopwatch

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._stopwatch.add(report)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print the time of unmarked and slow tests, and record it where that is asked for."""
    record, stopwatch = durations.read(), config.stash[STOPWATCH]
    if config.getoption("--write-durations"):
        files = (str(path.relative_to(durations.ROOT)) for path in durations.ROOT.glob("tests/**/test_*.py"))
        record = durations.merged(record, stopwatch, files)
        durations.write(record)
    terminalreporter.write_line(stopwatch.summary(record))


def is_worker(config: pytest.Config) -> bool:
    """Tell whether others run tests beside this process."""
    return hasattr(config, "workerinput")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give the files of a group to one worker."""
    return groups.GroupScheduling(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.fixture(scope="session")
def of_group(pytestconfig: pytest.Config) -> Iterator[contextlib.ExitStack]:
    """Where fixtures leave what the files of one group share. It ends with the last test of them."""
    with contextlib.ExitStack() as stack:
        pytestconfig.stash[OF_GROUP] = stack
        yield stack


OF_GROUP = pytest.StashKey[contextlib.ExitStack]()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End what a group shares: clusters that go on cost all others time. Who runs alone may come back to a group."""
    is_last = nextitem is None or group_of(nextitem.nodeid) != group_of(item.nodeid)
    if is_last and is_worker(item.config) and OF_GROUP in item.config.stash:
        item.config.stash[OF_GROUP].close()


@pytest.fixture(scope="session")
def engine_host(of_group: contextlib.ExitStack) -> EngineHost:
    """Starts vLLM engines."""
    return of_group.enter_context(EngineHost())


def _long_ones_first(items: list[pytest.Item]) -> list[str]:
    """Return the groups in an order in which no worker begins a long one when the others are done.

    Half the time of what starts something goes by waiting, and the rest computes.
    """
    found: dict[str, list[pytest.Item]] = {}
    for item in items:
        found.setdefault(group_of(item.nodeid), []).append(item)

    def rank(name: str) -> tuple[int, bool, int]:
        first = groups.FIRST.index(name) if name in groups.FIRST else len(groups.FIRST)
        live = sum(item.get_closest_marker("live") is not None for item in found[name])
        return first, not live, -live or -len(found[name])

    return sorted(found, key=rank)
