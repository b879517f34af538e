# SPDX-License-Identifier: Apache-2.0
"""The walks over a volume of which a part cannot be read, and of janitors that are restarted on the way."""

from __future__ import annotations

import errno
import os
import shutil
from dataclasses import replace

import pytest
from store_faults import WatchedFs
from tier_dir import BLOCK_BYTES, Engine, Refusing, Rig, key

from kvtier_connector.janitor.commands import purge_blocks
from kvtier_connector.store.journal import Purge
from kvtier_connector.store.layout import block_path

DAY = 86_400.0


class Unreadable(WatchedFs):
    """Refuses to look at one path and at what is below it."""

    def __init__(self, path: str, number: int = errno.EIO) -> None:
        self.path, self.number = path, number

    def before(self, call: str, path: str | None) -> None:
        if self.path and call in {"scandir", "open"} and path is not None and f"{path}/".startswith(f"{self.path}/"):
            raise OSError(self.number, os.strerror(self.number), path)


ALICE = block_path(key(3, "alice"))
PLACES = [(ALICE.rpartition("/")[0], 1), (ALICE, 1), ("tenants/alice/blocks", 10), ("tenants", 20), ("blocks", 10)]
"""Paths in a generation, and how many of the blocks of `fill` are below them."""


def fill(engine: Engine) -> None:
    for tenant in ("", "alice", "bob"):
        engine.put(*range(10), tenant=tenant)


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES])
@pytest.mark.parametrize(("place", "count"), PLACES)
def test_what_cannot_be_read_is_stated_and_the_rest_is_counted(
    rig: Rig, engine: Engine, number: int, place: str, count: int
) -> None:
    fill(engine)
    shutil.rmtree(engine.root / "journal")
    fs = Unreadable(f"{engine.root}/{place}", number)
    sweeper = rig.sweeper(fs)
    usage = rig.sweep(sweeper)
    assert (usage.blocks, usage.is_counted) == (30 - count, True)
    assert all(word in "".join(usage.problems) for word in (place.rpartition(".")[0], os.strerror(number)))
    fs.path = ""
    rig.clock.move(700)
    usage = rig.sweep(sweeper)
    assert (usage.blocks, usage.problems) == (30, ())


@pytest.mark.parametrize(("place", "count"), PLACES)
def test_blocks_that_cannot_be_read_are_not_taken_for_gone(rig: Rig, engine: Engine, place: str, count: int) -> None:
    fill(engine)
    fs = Unreadable("")
    sweeper = rig.sweeper(fs, verify_seconds=100.0)
    assert rig.sweep(sweeper).blocks == 30
    fs.path = f"{engine.root}/{place}"
    for tenant in ("", "alice", "bob"):
        (engine.root / block_path(key(5, tenant))).unlink()
    rig.work(sweeper, 60)
    hidden = {1: 0, 10: 1, 20: 2}[count]
    assert sweeper.report.usage.blocks == 27 + hidden
    assert [problem for problem in sweeper.report.usage.problems if place in problem] or place == ALICE


@pytest.mark.parametrize("name", ["xyz", "ABC", "0300", "030/03"])
def test_a_directory_that_no_block_can_be_in_is_nobodys_business(rig: Rig, engine: Engine, name: str) -> None:
    fill(engine)
    (engine.root / "blocks" / name).mkdir(parents=True)
    sweeper = rig.sweeper(Unreadable(f"{engine.root}/blocks/{name}"))
    usage = rig.sweep(sweeper)
    assert (usage.blocks, usage.problems) == (30, ())


def test_blocks_go_for_room_although_a_directory_cannot_be_read(rig: Rig, engine: Engine) -> None:
    engine.put(*range(10))
    shutil.rmtree(engine.root / "journal")
    fs = Unreadable(f"{engine.root}/{block_path(key(9)).rpartition('/')[0]}")
    rig.sweep(rig.sweeper(fs, max_bytes=9 * BLOCK_BYTES, high_watermark=0.9, low_watermark=0.5))
    assert engine.there(range(10)) == [5, 6, 7, 8, 9]


def test_what_stays_unreadable_is_tried_more_and_more_seldom(rig: Rig, engine: Engine) -> None:
    fill(engine)
    tried = []

    class Counted(Unreadable):
        def before(self, call: str, path: str | None) -> None:
            if call == "scandir" and path == self.path:
                tried.append(rig.clock.seconds)
            super().before(call, path)

    sweeper = rig.swept(Counted(f"{engine.root}/tenants/alice/blocks/030"))
    rig.work(sweeper, 2 * 360)
    assert 5 <= len(tried) <= 10


def test_a_volume_that_cannot_be_read_is_tried_each_minute_until_it_is_counted(rig: Rig, engine: Engine) -> None:
    engine.put(*range(20))
    fs = Unreadable(f"{engine.root}/blocks")
    sweeper = rig.sweeper(fs)
    for _ in range(1000):
        pause = sweeper.step()
        # A janitor that can do nothing rests.
        assert pause > 0
        assert any(problem.startswith("walk:") for problem in sweeper.report.usage.problems)
        rig.clock.move(pause)
    fs.path = ""
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
    fs = Unreadable(str(locked.root))
    for path in [*old.root.glob("journal/*"), old.root / "tier.json"]:
        os.utime(path, ns=(rig.clock.ns, rig.clock.ns - int(3 * DAY * 1e9)))
    usage = rig.sweep(rig.sweeper(fs, keep_previous=0, max_bytes=8 * BLOCK_BYTES, low_watermark=0.5))
    assert not old.root.exists()
    assert engine.there(range(10)) == [6, 7, 8, 9]
    assert len(locked.there(range(10))) == 10
    assert any(str(locked.root) in problem for problem in usage.problems)
    fs.path = ""


def test_a_quarantine_that_cannot_be_read_keeps_no_other_from_being_emptied(rig: Rig) -> None:
    for digest in ("aa", "bb"):
        quarantined = rig.engine(digest).root / "quarantine" / "x"
        quarantined.parent.mkdir()
        quarantined.write_bytes(b"1")
        os.utime(quarantined, (0, 0))
    usage = rig.sweep(rig.sweeper(Unreadable(f"{rig.dir}/aa/quarantine")))
    assert [(rig.dir / digest / "quarantine" / "x").exists() for digest in ("aa", "bb")] == [True, False]
    assert any("aa/quarantine" in problem for problem in usage.problems)


def test_a_volume_that_does_not_answer_a_new_janitor_is_not_taken_for_empty(rig: Rig, engine: Engine) -> None:
    engine.put(*range(5))
    first = rig.swept()
    first.close()
    rig.clock.move(60)
    fs = Unreadable(str(rig.dir))
    fs.path = ""
    second = rig.sweeper(fs)
    fs.path = str(rig.dir)
    rig.work(second, 3)
    assert second.report.usage.blocks == 5
    assert any("Input/output" in problem for problem in second.report.usage.problems)
    fs.path = ""
    rig.clock.move(700)
    usage = rig.sweep(second)
    assert (usage.blocks, usage.problems) == (5, ())


def test_blocks_that_an_earlier_janitor_could_not_read_are_kept_and_reported_by_the_next_walk(
    rig: Rig, engine: Engine
) -> None:
    fill(engine)
    place = f"{engine.root}/tenants/alice/blocks/030"
    first = rig.swept(Unreadable(place))
    first.close()
    second = rig.sweeper(Unreadable(place), verify_seconds=100.0)
    rig.work(second, 60)
    assert any("alice/blocks/030" in problem for problem in second.report.usage.problems)
    assert second.report.usage.blocks == 30


@pytest.mark.parametrize("selection", [Purge(), Purge("")])
def test_a_purge_goes_on_where_a_directory_cannot_be_read_and_says_so(
    rig: Rig, engine: Engine, selection: Purge
) -> None:
    engine.put_chain(*range(10))
    path = block_path(key(9))
    fs = Unreadable(f"{engine.root}/{path.rpartition('/')[0]}")
    (purged,) = purge_blocks(rig.dir, selection, is_dry=False, fs=fs)
    assert (purged.blocks, purged.failed, engine.there(range(10))) == (9, 1, [9])
    assert path.rpartition("/")[0] in purged.problem
