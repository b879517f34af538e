# SPDX-License-Identifier: Apache-2.0
"""What every suite has: switches, and a path to what they share."""

from __future__ import annotations

import contextlib
import gc
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "kit"))

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
LIVE |= {"rigs", "spawn", "target", "tiers", "vllm_flags"}
"""Fixtures that start servers, processes and mounts, or ask vLLM."""

LIVE_PLACES = {"demo", "e2e", "kind", "node", "test_command.py", "test_crash.py", "test_faults_run.py", "test_image.py"}
"""Folders and modules whose tests do so without a fixture."""


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Leave what all tests need to themselves out of each collection of garbage: there are a million objects of it."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what starts something, so that a quick run can leave it out; order the files where workers share them."""
    for item in items:
        if LIVE_PLACES.intersection(item.path.parts) or not LIVE.isdisjoint(getattr(item, "fixturenames", ())):
            item.add_marker("live")
    if hasattr(config, "workerinput"):
        order = {path: number for number, path in enumerate(_long_ones_first(items))}
        items.sort(key=lambda item: order[item.path])


ENGINE_TURNS = (0, 1, 4, 16)
"""Places of the files with engines among all: of four workers two have one, and the second pair follows the first."""


def _long_ones_first(items: list[pytest.Item]) -> list[Path]:
    """Return the files in an order in which no worker begins a long one when the others are done.

    Half the time of what starts something goes by waiting, and the rest computes.
    """
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)

    def rank(path: Path) -> tuple[bool, bool, int]:
        live = sum(item.get_closest_marker("live") is not None for item in files[path])
        return not LIVE_PLACES.intersection(path.parts), not live, -live or -len(files[path])

    engines = [path for path, each in files.items() if any(item.get_closest_marker("engine") for item in each)]
    engines.sort(key=lambda path: len(files[path]))
    order = sorted((path for path in files if path not in engines), key=rank)
    for turn, path in zip(ENGINE_TURNS, engines, strict=False):
        order.insert(turn, path)
    return [*order, *engines[len(ENGINE_TURNS) :]]
