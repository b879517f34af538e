# SPDX-License-Identifier: Apache-2.0
"""What every suite has: switches, and a path to what they share."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "kit"))

# A machine with a GPU, for the tests that need one, may have pytest and nothing else.
with contextlib.suppress(ModuleNotFoundError):
    from hypothesis import HealthCheck, settings

    # No test is about time, and another one may take the processor meanwhile.
    settings.register_profile("kvtier", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("kvtier")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite expected files instead of comparing")
