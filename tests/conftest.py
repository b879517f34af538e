# SPDX-License-Identifier: Apache-2.0
"""What every suite has: switches, and a path to what they share."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "kit"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite expected files instead of comparing")
