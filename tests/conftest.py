# SPDX-License-Identifier: Apache-2.0
"""Switches that every suite knows."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite expected files instead of comparing")
