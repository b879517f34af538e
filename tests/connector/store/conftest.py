# SPDX-License-Identifier: Apache-2.0
"""Lets the tests of this folder, and later stores, import the contract and the broken file systems beside them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from checks import check

from kvtier_connector.store.identity import claim

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """A directory of one generation, in which nothing is wrong when the test ends."""
    root = tmp_path / "d1gest"
    claim(root, {"model": "test"}, "d1gest")
    yield root
    assert check(root, partial_age_seconds=0) == []
