# SPDX-License-Identifier: Apache-2.0
"""What every suite has: switches, and a path to what they share."""

from __future__ import annotations

import contextlib
import gc
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "kit"))

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


def pytest_collection_finish() -> None:
    """Leave what all tests need to themselves out of each collection of garbage: there are a million objects of it."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what starts something, so that a quick run can leave it out."""
    for item in items:
        if LIVE_PLACES.intersection(item.path.parts) or not LIVE.isdisjoint(getattr(item, "fixturenames", ())):
            item.add_marker("live")
