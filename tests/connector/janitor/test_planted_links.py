# SPDX-License-Identifier: Apache-2.0
"""Links that somebody plants on the volume: what they name stays, whoever removes and whenever they are planted."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from store_faults import WatchedFs
from tier_dir import BLOCK_BYTES, Engine, Rig, key

from kvtier_connector.janitor.purge import Criteria, purge
from kvtier_connector.store.beneath import Beneath
from kvtier_connector.store.fs import LOCAL
from kvtier_connector.store.layout import block_path

LEVELS = ["tenants", "tenants/alice", "tenants/alice/blocks", "the first digits", "the next digits"]


def plant(engine: Engine, number: int, level: str, outside: Path) -> Path:
    """Put a link in the place of a directory above a block, to one that has the same below; return the block there."""
    path = Path(block_path(key(number, "alice")))
    above = {"the first digits": path.parents[1], "the next digits": path.parent}.get(level, Path(level))
    there = outside / above.name
    outside.mkdir(exist_ok=True)
    (engine.root / above).rename(there)
    (engine.root / above).symlink_to(there)
    return there / path.relative_to(above)


class Plants(WatchedFs):
    """Plants the link at the last moment: when the file has been looked at and is about to be removed."""

    def __init__(self, engine: Engine, level: str, outside: Path) -> None:
        self.engine, self.level, self.outside = engine, level, outside
        self.precious: Path | None = None

    def stat(self, path: str) -> os.stat_result:
        status = super().stat(path)
        if path.endswith(".kvb") and self.precious is None:
            self.precious = plant(self.engine, 1, self.level, self.outside)
        return status


@pytest.mark.parametrize("level", LEVELS)
def test_an_eviction_removes_nothing_through_a_link_planted_at_the_last_moment(
    rig: Rig, tmp_path: Path, level: str
) -> None:
    engine = rig.engine()
    engine.put(1, tenant="alice")
    fs = Plants(engine, level, tmp_path / "outside")
    rig.clock.move(1.0)
    usage = rig.sweep(rig.keeper(fs, quotas={"alice": BLOCK_BYTES // 2}))
    assert fs.precious is not None
    assert fs.precious.exists()
    assert usage.blocks == 0


@pytest.mark.parametrize("level", LEVELS)
def test_a_purge_removes_nothing_through_a_link(rig: Rig, tmp_path: Path, level: str) -> None:
    engine = rig.engine()
    engine.put(1, tenant="alice")
    fs = Plants(engine, level, tmp_path / "outside")
    purge(rig.dir, Criteria(), is_dry=False, fs=fs, threads=1)
    assert fs.precious is not None
    assert fs.precious.exists()


def test_nothing_is_removed_where_the_tier_itself_is_a_link_and_that_is_stated(rig: Rig, tmp_path: Path) -> None:
    engine = rig.engine()
    engine.put(*range(4))
    keeper = rig.keeper(max_bytes=2 * BLOCK_BYTES)
    rig.dir.rename(tmp_path / "elsewhere")
    rig.dir.symlink_to(tmp_path / "elsewhere")
    for _ in range(3):
        keeper.step()
        rig.clock.move(10)
    assert keeper.report is not None
    assert engine.there(range(4)) == [0, 1, 2, 3]
    assert keeper.report.usage.blocks == 4
    assert any("is a link" in problem for problem in keeper.report.usage.problems)


@pytest.mark.parametrize("path", ["{base}/../other/file", "{base}/a/../../other/file", "{base}other/file", "{base}"])
def test_what_is_not_below_the_base_is_refused(tmp_path: Path, path: str) -> None:
    base, other = tmp_path / "base", tmp_path / "other"
    for directory in (base / "a", other, tmp_path / "baseother"):
        directory.mkdir(parents=True)
        (directory / "file").touch()
    with pytest.raises(ValueError, match="is not below"):
        Beneath(LOCAL, str(base)).unlink(path.format(base=base))
    assert (other / "file").exists()


def test_an_error_names_the_whole_path(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to(tmp_path)
    with pytest.raises(NotADirectoryError) as raised:
        Beneath(LOCAL, str(tmp_path)).rmdir(f"{tmp_path}/a/b")
    assert (raised.value.errno, raised.value.filename) == (errno.ENOTDIR, f"{tmp_path}/a/b")


def test_no_descriptor_stays_open(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "file").touch()
    fs = Beneath(LOCAL, str(tmp_path))
    fs.unlink(f"{tmp_path}/a/file")
    for missing in ("a/file", "a/c/file", "a/b"):
        with pytest.raises(OSError, match=missing):
            fs.unlink(f"{tmp_path}/{missing}")
    fs.rmdir(f"{tmp_path}/a/b")
    held = [link.readlink() for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    assert [path for path in held if path.is_relative_to(tmp_path)] == []
