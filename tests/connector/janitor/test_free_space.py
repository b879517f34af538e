# SPDX-License-Identifier: Apache-2.0
"""Room that is to stay free of the volume, whoever fills it: a share or an amount, and the larger of both."""

from __future__ import annotations

import os
from typing import Any

import pytest
from tier_dir import BLOCK_BYTES, Rig

from kvtier_connector.store.fs import FileSystem

TOTAL_BLOCKS = 100


class Small(FileSystem):
    """A volume of a hundred blocks, of which others take so many."""

    def __init__(self, rig: Rig, others: int) -> None:
        self.rig, self.others = rig, others

    def statvfs(self, path: str) -> os.statvfs_result:
        ours = len(list(self.rig.dir.rglob("*.kvb")))
        free = max(0, TOTAL_BLOCKS - self.others - ours)
        return os.statvfs_result((BLOCK_BYTES, BLOCK_BYTES, TOTAL_BLOCKS, free, free, 0, 0, 0, 0, 255))


@pytest.mark.parametrize(
    ("settings", "left"),
    [
        ({}, 10),
        ({"min_free_bytes": 8 * BLOCK_BYTES}, 10),
        ({"min_free_bytes": 12 * BLOCK_BYTES}, 5),
        ({"min_free_fraction": 0.12}, 5),
        ({"min_free_fraction": 0.02, "min_free_bytes": 12 * BLOCK_BYTES}, 5),
        ({"min_free_bytes": 12 * BLOCK_BYTES, "min_bytes": 8 * BLOCK_BYTES}, 8),
        ({"min_free_bytes": 10**30}, 0),
    ],
)
def test_blocks_go_until_as_much_as_was_asked_for_is_free(rig: Rig, settings: dict[str, Any], left: int) -> None:
    engine = rig.engine()
    engine.put(*range(10))
    rig.sweep(rig.sweeper(Small(rig, others=80), **settings))
    assert engine.there(range(10)) == list(range(10 - left, 10))
