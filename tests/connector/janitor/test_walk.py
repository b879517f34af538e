# SPDX-License-Identifier: Apache-2.0
"""The walks over a volume of which a part cannot be read, and of janitors that are restarted on the way."""

from __future__ import annotations

import errno
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from tier_dir import BLOCK_BYTES, Engine, Refusing, Rig, key

from kvtier_connector.janitor.commands import purge_blocks
from kvtier_connector.store.fs import FileSystem
from kvtier_connector.store.journal import JournalWriter, Purge
from kvtier_connector.store.layout import block_path
from kvtier_connector.store.permit import PERMIT_FILE

TABLES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())

DAY = 86_400.0
PARTS = ("blocks", "journal", "quarantine", "releases", "tenants")
UNREADABLE = ("scandir", "open")
STOPPED = "engines store nothing until all was read once"


def unreadable(path: str, number: int = errno.EIO) -> Refusing:
    """Refuse to look at one path and at what is below it; with `calls` empty, at nothing."""
    return Refusing(f"{path}/", *UNREADABLE, number=number)


ALICE = block_path(key(3, "alice"))
PLACES = [(ALICE.rpartition("/")[0], 1), (ALICE, 1), ("tenants/alice/blocks", 10), ("tenants", 20), ("blocks", 10)]
"""Paths in a generation, and how many of the blocks of `fill` are below them."""


def fill(engine: Engine) -> None:
    for tenant in ("", "alice", "bob"):
        engine.put(*range(10), tenant=tenant)


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES])
@pytest.mark.parametrize(("place", "count"), PLACES)
def test_unreadable_parts_are_told_and_others_count(
    rig: Rig, engine: Engine, number: int, place: str, count: int
) -> None:
    fill(engine)
    shutil.rmtree(engine.root / "journal")
    fs = unreadable(f"{engine.root}/{place}", number)
    sweeper = rig.sweeper(fs)
    usage = rig.sweep(sweeper)
    assert (usage.blocks, usage.is_counted) == (30 - count, True)
    assert all(word in "".join(usage.problems) for word in (place.rpartition(".")[0], os.strerror(number), STOPPED))
    fs.calls = ()
    rig.clock.move(700)
    usage = rig.sweep(sweeper)
    assert (usage.blocks, usage.problems) == (30, ())


@pytest.mark.parametrize(("place", "count"), PLACES)
def test_blocks_that_cannot_be_read_are_not_taken_for_gone(rig: Rig, engine: Engine, place: str, count: int) -> None:
    fill(engine)
    fs = unreadable(f"{engine.root}/{place}")
    fs.calls = ()
    sweeper = rig.sweeper(fs, verify_seconds=100.0)
    assert rig.sweep(sweeper).blocks == 30
    fs.calls = UNREADABLE
    for tenant in ("", "alice", "bob"):
        (engine.root / block_path(key(5, tenant))).unlink()
    rig.work(sweeper, 60)
    assert sweeper.report.usage.blocks == 27 + {1: 0, 10: 1, 20: 2}[count]
    assert [problem for problem in sweeper.report.usage.problems if place in problem] or place == ALICE


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES])
def test_a_file_that_cannot_be_opened_counts_and_stops_no_stores(rig: Rig, engine: Engine, number: int) -> None:
    fill(engine)
    shutil.rmtree(engine.root / "journal")
    sweeper = rig.swept(Refusing(ALICE, "open", number=number), max_bytes=100 * BLOCK_BYTES)
    rig.clock.move(60)
    usage = rig.sweep(sweeper)
    assert (usage.blocks, usage.used_bytes, usage.problems) == (30, 30 * BLOCK_BYTES, ())
    assert (rig.dir / PERMIT_FILE).exists()


def test_a_volume_that_cannot_be_read_is_tried_each_minute_until_it_is_counted(rig: Rig, engine: Engine) -> None:
    engine.put(*range(20))
    fs = unreadable(f"{engine.root}/blocks")
    sweeper = rig.sweeper(fs)
    for _ in range(1000):
        pause = sweeper.step()
        # A janitor that can do nothing rests.
        assert pause > 0
        assert any(problem.startswith("walk:") for problem in sweeper.report.usage.problems)
        rig.clock.move(pause)
    fs.calls = ()
    rig.work(sweeper, 8)
    assert sweeper.report.usage.is_counted


def test_looks_that_fail_slowly_end_with_the_step(rig: Rig, engine: Engine) -> None:
    engine.put(*range(10))

    class Slow(Refusing):
        looks = 0

        def before(self, call: str, path: str | None) -> None:
            if call == "unlink" and not self.looks:
                rig.clock.move(6)
                engine.put(*range(100, 400), tenant="slow")
            elif call in self.calls and self.path in (path or ""):
                self.looks += 1
                assert self.looks < 1000
                rig.clock.move(1)
            super().before(call, path)

    fs = Slow("/tenants/slow/", "stat", "open")
    sweeper = rig.swept(fs)
    rig.clock.move(10)
    sweeper.configure(replace(sweeper.config, max_bytes=10 * BLOCK_BYTES))
    for _ in range(2):
        sweeper.step()
    assert 300 <= fs.looks <= 600


def test_a_generation_that_cannot_be_read_keeps_no_other_from_being_kept(rig: Rig) -> None:
    engine, old, locked = rig.engine(), rig.engine("bb"), rig.engine("cc")
    for each in (engine, old, locked):
        each.put(*range(10))
    fs = unreadable(str(locked.root))
    old.age(3 * DAY)
    usage = rig.sweep(rig.trusting(fs, keep_previous=0, max_bytes=8 * BLOCK_BYTES, low_watermark=0.5))
    assert not old.root.exists()
    assert engine.there(range(10)) == [6, 7, 8, 9]
    assert len(locked.there(range(10))) == 10
    assert any(str(locked.root) in problem for problem in usage.problems)
    fs.calls = ()


def test_a_volume_that_does_not_answer_a_new_janitor_is_not_taken_for_empty(rig: Rig, engine: Engine) -> None:
    engine.put(*range(5))
    rig.swept().close()
    rig.clock.move(60)
    fs = unreadable(str(rig.dir))
    fs.calls = ()
    second = rig.sweeper(fs)
    fs.calls = UNREADABLE
    rig.work(second, 3)
    assert second.report.usage.blocks == 5
    assert any("Input/output" in problem for problem in second.report.usage.problems)
    fs.calls = ()
    rig.clock.move(700)
    usage = rig.sweep(second)
    assert (usage.blocks, usage.problems) == (5, ())


def test_blocks_that_an_earlier_janitor_could_not_read_are_kept_and_reported(rig: Rig, engine: Engine) -> None:
    fill(engine)
    place = f"{engine.root}/tenants/alice/blocks/030"
    rig.swept(unreadable(place)).close()
    second = rig.sweeper(unreadable(place), verify_seconds=100.0)
    rig.work(second, 60)
    assert any("alice/blocks/030" in problem for problem in second.report.usage.problems)
    assert second.report.usage.blocks == 30


@pytest.mark.parametrize("selection", [Purge(), Purge("")])
def test_a_purge_goes_on_where_a_folder_is_unreadable_and_says_so(rig: Rig, engine: Engine, selection: Purge) -> None:
    engine.put_chain(*range(10))
    path = block_path(key(9))
    fs = unreadable(f"{engine.root}/{path.rpartition('/')[0]}")
    (purged,) = purge_blocks(rig.dir, selection, is_dry=False, fs=fs)
    assert (purged.blocks, purged.failed, engine.there(range(10))) == (9, 1, [9])
    assert path.rpartition("/")[0] in purged.problem


def test_older_generations_go_before_the_current_one(rig: Rig) -> None:
    old, new = rig.engine("bb"), rig.engine("aa")
    new.put(*range(5))
    old.put(*range(5))
    rig.sweep(rig.sweeper(max_bytes=10 * BLOCK_BYTES, high_watermark=0.9, low_watermark=0.6))
    assert (len(old.there(range(5))), len(new.there(range(5)))) == (1, 5)


@pytest.mark.parametrize(("days", "kept"), TABLES["generations"])
def test_generations_beyond_those_to_keep_go_when_unused(rig: Rig, days: dict[str, int], kept: list[str]) -> None:
    for name, age in days.items():
        engine = rig.engine(name)
        engine.put(*range(3))
        engine.age(age * DAY)
    usage = rig.sweep(rig.trusting(keep_previous=1))
    assert sorted(generation.digest for generation in usage.generations) == kept
    assert sorted(path.name for path in rig.dir.iterdir() if path.is_dir()) == kept
    assert usage.blocks == 3 * len(kept)


def test_a_directory_that_no_generation_can_have_is_none_whatever_it_holds(rig: Rig) -> None:
    previous, current = rig.engine("bb"), rig.engine("aa")
    for engine, age in ((previous, 2 * DAY), (current, 0.0)):
        engine.put(*range(3))
        engine.age(age)
    # A preflight at work, of a release that called a file so; and a copy that a person made.
    trying = rig.dir / f".preflight-{'0' * 32}"
    trying.mkdir()
    (trying / "journal").write_bytes(b"")
    copied = Path(shutil.copytree(previous.root, rig.dir / "bb.bak"))
    usage = rig.sweep(rig.trusting(keep_previous=1))
    assert previous.there(range(3)) == [0, 1, 2]
    assert len(list(copied.rglob("*.kvb"))) == 3
    assert [generation.digest for generation in usage.generations][:2] == ["aa", "bb"]
    assert usage.problems == ()
    assert (trying / "journal").exists()


def test_a_generation_in_use_is_not_removed_and_the_current_one_never(rig: Rig) -> None:
    used, current = rig.engine("bb"), rig.engine("aa")
    used.put(1)
    current.put(1)
    current.age(30 * DAY)
    rig.sweep(rig.trusting(keep_previous=0))
    assert (used.has(1), current.has(1)) == (True, True)


def test_a_removed_file_that_a_dead_nfs_client_had_open_is_stated_and_tried_again_in_a_minute(rig: Rig) -> None:
    rig.engine("aa").put(1)
    old = rig.engine("bb")
    old.put(*range(3))
    old.age(30 * DAY)
    left = (old.root / block_path(key(0))).with_name(".nfs0000000012345678000000aa")
    left.write_text("open somewhere")
    sweeper = rig.trusting(keep_previous=0)
    assert left.name in rig.sweep(sweeper).problems[0]
    assert {path for path in old.root.rglob("*") if path.is_file()} == {left, old.root / "tier.json"}
    assert sweeper.step() > 0
    left.unlink()
    rig.work(sweeper, 7)
    assert (old.root.exists(), sweeper.report.problems) == (False, {})


@pytest.mark.parametrize("place", ["notes.txt", "blocks/notes.txt", "journal/old/notes.txt", "quarantine/notes.txt"])
def test_a_generation_with_somebody_elses_file_is_stated_and_keeps_no_other(rig: Rig, place: str) -> None:
    older, old = rig.engine("cc"), rig.engine("bb")
    rig.engine("aa").put(1)
    old.put(1)
    (old.root / place).parent.mkdir(exist_ok=True)
    (old.root / place).write_text("mine")
    for engine, age in ((older, 3 * DAY), (old, 2 * DAY)):
        engine.age(age)
    usage = rig.sweep(rig.trusting(keep_previous=0))
    assert (old.root / place).exists()
    assert not older.root.exists()
    assert place.rpartition("/notes")[0] in usage.problems[0]


@pytest.mark.parametrize("place", ["archive", *(f"research/{part}/thesis.tex" for part in PARTS)])
def test_a_directory_of_another_program_stays_whatever_its_name(rig: Rig, engine: Engine, place: str) -> None:
    engine.put(0)
    strange = rig.dir / place
    (strange if place == "archive" else strange.parent).mkdir(parents=True)
    if place != "archive":
        strange.write_text("mine")
    for path in (strange, strange.parent):
        os.utime(path, ns=(0, rig.clock.ns - int(30 * DAY * 1e9)))
    sweeper = rig.trusting(keep_previous=0)
    for _ in range(2):
        usage = rig.sweep(sweeper)
        rig.clock.move(2 * DAY)
    assert strange.exists()
    assert usage.problems == ()


def test_a_clock_that_jumped_before_the_janitor_began_removes_no_generation_in_use(rig: Rig, engine: Engine) -> None:
    used = rig.engine("bb")
    for each in (engine, used):
        each.put(1)
    sweeper = rig.sweeper(keep_previous=0, parts={"ask_volume": lambda: rig.clock.ns + int(7200e9)})
    rig.work(sweeper, 5)
    assert used.has(1)


@pytest.mark.parametrize(("digest", "place"), TABLES["planted"])
def test_a_planted_link_takes_nothing_else_with_it(rig: Rig, tmp_path: Path, digest: str, place: str) -> None:
    root = rig.engine(digest).root
    rig.engine("aa")
    # What is named lies where a block would be in each of the places.
    for there in ("", "010", "alice/blocks/010", "blocks/010"):
        precious = tmp_path / "other" / there / Path(block_path(key(1))).name
        precious.parent.mkdir(parents=True, exist_ok=True)
        precious.write_text("mine")
    shutil.rmtree(root / place, ignore_errors=True)
    (root / place).parent.mkdir(exist_ok=True)
    (root / place).symlink_to(tmp_path / "other")
    rig.clock.move(30 * DAY)
    assert rig.sweep(rig.trusting(keep_previous=0, ttl_seconds=3600.0)).blocks == 0
    assert len(list((tmp_path / "other").rglob("*.kvb"))) == 4
    assert root.exists() is (digest == "aa")


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
    reading = JournalWriter(old.root, fs=Stamping(rig), clock=lambda: rig.clock.ns, now=lambda: rig.clock.seconds)
    sweeper = rig.sweeper(keep_previous=0)
    for _ in range(18):
        reading.show_life()
        rig.sweep(sweeper)
        rig.clock.move(600)
    assert old.has(1)
    rig.clock.move(3600)
    rig.sweep(sweeper)
    assert not old.root.exists()


def test_as_many_generations_as_updates_leave_in_an_hour_are_counted_and_removed(rig: Rig, engine: Engine) -> None:
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
