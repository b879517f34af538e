# SPDX-License-Identifier: Apache-2.0
"""Lets the tests of this folder import the rig and the broken file systems beside them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "store")]

from tier_dir import Engine, Rig  # noqa: E402 - found through the line above


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


@pytest.fixture
def engine(rig: Rig) -> Engine:
    return rig.engine()
