# SPDX-License-Identifier: Apache-2.0
"""Which generations go, and that nothing else goes with them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from tier_dir import BLOCK_BYTES, Engine, Rig

from kvtier_connector.store.fs import FileSystem
from kvtier_connector.store.journal import JournalWriter

DAY = 86_400.0


def test_older_generations_go_before_the_current_one(rig: Rig) -> None:
    old, new = rig.engine("bb"), rig.engine("aa")
    new.put(*range(5))
    old.put(*range(5))
    rig.sweep(rig.sweeper(max_bytes=10 * BLOCK_BYTES, high_watermark=0.9, low_watermark=0.6))
    assert (len(old.there(range(5))), len(new.there(range(5)))) == (1, 5)


def test_a_generation_beyond_those_to_keep_is_removed_when_nobody_uses_it(rig: Rig) -> None:
    oldest, older, current = rig.engine("cc"), rig.engine("bb"), rig.engine("aa")
    for engine, age in ((oldest, 3 * DAY), (older, 2 * DAY), (current, 0.0)):
        engine.put(*range(3))
        engine.age(age)
    usage = rig.sweep(rig.sweeper(keep_previous=1))
    assert not oldest.root.exists()
    assert older.root.exists()
    assert [generation.digest for generation in usage.generations] == ["aa", "bb"]
    assert usage.blocks == 6


def test_a_directory_of_updated_weights_goes_when_no_engine_uses_it_and_takes_no_generation_s_place(rig: Rig) -> None:
    previous, idle, used, current = (rig.engine(name) for name in ("bb", "aa.w1", "aa.p2", "aa"))
    for engine, age in ((previous, 3 * DAY), (idle, 2 * DAY), (used, 0.0), (current, 0.0)):
        engine.put(*range(3))
        engine.age(age)
    usage = rig.sweep(rig.sweeper(keep_previous=1))
    assert not idle.root.exists()
    assert {generation.digest for generation in usage.generations} == {"aa", "aa.p2", "bb"}


def test_the_generation_of_a_release_that_refused_the_current_one_stays_with_it(rig: Rig) -> None:
    previous, older, latest, current = (rig.engine(name) for name in ("bb", "aa.r1", "aa.r2", "aa"))
    for engine, age in ((older, 4 * DAY), (previous, 3 * DAY), (latest, 2 * DAY), (current, 5 * DAY)):
        engine.put(*range(3))
        engine.age(age)
    usage = rig.sweep(rig.sweeper(keep_previous=1))
    assert {generation.digest for generation in usage.generations} == {"aa", "aa.r2", "bb"}


def test_a_directory_that_no_generation_can_have_is_none_whatever_it_holds(rig: Rig) -> None:
    previous, current = rig.engine("bb"), rig.engine("aa")
    for engine, age in ((previous, 2 * DAY), (current, 0.0)):
        engine.put(*range(3))
        engine.age(age)
    # A preflight at work, of a release that called a file so.
    trying = rig.dir / f".preflight-{'0' * 32}"
    trying.mkdir()
    (trying / "journal").write_bytes(b"")
    usage = rig.sweep(rig.sweeper(keep_previous=1))
    assert previous.there(range(3)) == [0, 1, 2]
    assert [generation.digest for generation in usage.generations] == ["aa", "bb"]
    assert usage.problems == ()
    assert (trying / "journal").exists()


def test_a_generation_in_use_is_not_removed_and_the_current_one_never(rig: Rig) -> None:
    used, current = rig.engine("bb"), rig.engine("aa")
    used.put(1)
    current.put(1)
    current.age(30 * DAY)
    rig.sweep(rig.sweeper(keep_previous=0))
    assert (used.has(1), current.has(1)) == (True, True)


def test_a_generation_with_somebody_elses_file_is_not_removed_but_stated_and_keeps_no_other(rig: Rig) -> None:
    older, old = rig.engine("cc"), rig.engine("bb")
    rig.engine("aa")
    (old.root / "notes.txt").write_text("mine")
    for engine, age in ((older, 3 * DAY), (old, 2 * DAY)):
        engine.age(age)
    usage = rig.sweep(rig.sweeper(keep_previous=0))
    assert (old.root / "notes.txt").exists()
    assert not older.root.exists()
    assert "notes.txt" in usage.problems[0]


@pytest.mark.parametrize(
    "place", ["blocks", "quarantine", "journal", "tenants", "tenants/alice", f".x.{'0' * 32}-partial"]
)
def test_a_link_planted_in_an_old_generation_takes_nothing_else_with_it(rig: Rig, tmp_path: Path, place: str) -> None:
    old = rig.engine("bb")
    rig.engine("aa")
    other = tmp_path / "other" / "blocks"
    other.mkdir(parents=True)
    (other / "precious").write_text("mine")
    shutil.rmtree(old.root / place, ignore_errors=True)
    (old.root / place).parent.mkdir(exist_ok=True)
    (old.root / place).symlink_to(other.parent if place.startswith("tenants") else other)
    rig.clock.move(30 * DAY)
    rig.sweep(rig.sweeper(keep_previous=0))
    assert (other / "precious").exists()
    assert not old.root.exists()


def test_a_link_planted_in_the_place_of_the_quarantine_takes_nothing_else_with_it(
    rig: Rig, engine: Engine, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "precious").write_text("mine")
    (engine.root / "quarantine").symlink_to(other)
    rig.clock.move(30 * DAY)
    rig.sweep(rig.sweeper())
    assert (other / "precious").exists()


def test_a_link_planted_among_the_blocks_is_not_walked(rig: Rig) -> None:
    engine, other = rig.engine(), Engine(rig.dir.parent / "ns.other", "aa", rig.clock)
    other.put(*range(4))
    (engine.root / "blocks").mkdir()
    for directory in (other.root / "blocks").iterdir():
        (engine.root / "blocks" / directory.name).symlink_to(directory)
    shutil.rmtree(other.root / "journal")
    rig.clock.move(DAY)
    usage = rig.sweep(rig.sweeper(ttl_seconds=3600.0))
    assert usage.blocks == 0
    assert other.there(range(4)) == [0, 1, 2, 3]


class Stamping(FileSystem):
    """A volume that stamps files with the rig's time."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig

    def touch(self, path: str) -> None:
        os.utime(path, ns=(self.rig.clock.ns, self.rig.clock.ns))


def test_a_generation_that_engines_only_read_is_in_use_as_long_as_they_are_there(rig: Rig) -> None:
    old = rig.engine("bb")
    old.put(1)
    rig.engine("aa")
    old.age(365 * DAY)
    fs = Stamping(rig)
    reading = JournalWriter(old.root, fs=fs, clock=lambda: rig.clock.ns, now=lambda: rig.clock.seconds)
    sweeper = rig.sweeper(keep_previous=0)
    for _ in range(18):
        reading.show_life()
        rig.sweep(sweeper)
        rig.clock.move(600)
    assert old.has(1)
    rig.clock.move(3600)
    rig.sweep(sweeper)
    assert not old.root.exists()


def test_as_many_generations_as_updates_of_the_weights_leave_in_an_hour_are_counted_and_removed(
    rig: Rig, engine: Engine
) -> None:
    for number in range(300):
        rig.engine(f"aa.p{number:030x}").put(number)
    engine.put(1000)
    sweeper = rig.sweeper(generation_idle_seconds=3600)
    usage = rig.sweep(sweeper)
    assert (usage.blocks, usage.problems) == (301, ())
    rig.clock.move(7200)
    engine.put(1001)
    usage = rig.sweep(sweeper)
    assert (usage.blocks, [each.digest for each in usage.generations]) == (2, ["aa"])
