# SPDX-License-Identifier: Apache-2.0
"""Room that is to stay free of the volume, whoever fills it: a share or an amount, and the larger of both."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tier_dir import BLOCK_BYTES, Engine, Rig

from kvtier_connector.janitor.sweep import Sweeper
from kvtier_connector.store.fs import FileSystem

TOTAL_BLOCKS = 100


class Small(FileSystem):
    """A volume of a hundred blocks, of which other users take so many."""

    def __init__(self, volume: Path, others: int) -> None:
        self.volume, self.others = volume, others

    def statvfs(self, path: str) -> os.statvfs_result:
        ours = len(list(self.volume.rglob("*.kvb")))
        free = max(0, TOTAL_BLOCKS - self.others - ours)
        return os.statvfs_result((BLOCK_BYTES, BLOCK_BYTES, TOTAL_BLOCKS, free, free, 0, 0, 0, 0, 255))


@pytest.mark.parametrize(
    ("settings", "left"),
    [
        ({}, 10),
        ({"min_free_bytes": 8 * BLOCK_BYTES}, 10),
        ({"min_free_bytes": 12 * BLOCK_BYTES}, 8),
        ({"min_free_fraction": 0.12}, 8),
        ({"min_free_fraction": 0.02, "min_free_bytes": 12 * BLOCK_BYTES}, 8),
        ({"min_free_bytes": 12 * BLOCK_BYTES, "min_bytes": 9 * BLOCK_BYTES}, 9),
        ({"min_free_bytes": 10**30}, 0),
    ],
)
def test_blocks_go_until_as_much_as_was_asked_for_is_free(
    rig: Rig, engine: Engine, settings: dict[str, Any], left: int
) -> None:
    engine.put(*range(10))
    sweeper = rig.sweeper(Small(rig.dir, others=80), **settings)
    for _ in range(10):
        rig.sweep(sweeper)
    assert engine.there(range(10)) == list(range(10 - left, 10))


def test_two_tiers_of_a_volume_give_way_to_its_other_users_together_and_no_more_than_needed(tmp_path: Path) -> None:
    rigs = [Rig(tmp_path / name) for name in ("a", "b")]
    fs = Small(tmp_path, others=0)
    engines, sweepers = [], list[Sweeper]()
    for rig in rigs:
        rig.dir.parent.mkdir()
        rig.config = replace(rig.config, min_free_fraction=0.2)
        engines.append(rig.engine())
        engines[-1].put(*range(30))
        sweepers.append(rig.sweeper(fs))
        rig.sweep(sweepers[-1])
    fs.others = 36
    for _ in range(10):
        for rig, sweeper in zip(rigs, sweepers, strict=True):
            rig.sweep(sweeper)
    left = [len(engine.there(range(30))) for engine in engines]
    assert 100 - 36 - sum(left) in {20, 21, 22}
    assert abs(left[0] - left[1]) <= 6
