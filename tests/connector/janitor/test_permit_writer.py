# SPDX-License-Identifier: Apache-2.0
"""The permit follows the room that is left; a volume that refuses and a janitor that dies leave all sound."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import shutil
import struct
import zlib
from pathlib import Path

import pytest
import yaml
from checks import check
from store_faults import KINDS, TOO_DEEP, CrashError, CrashingFs, FailingFs, HookedFs, plant
from tier_dir import BLOCK_BYTES, DAMAGED, Engine, Refusing, Rig, key

from kvtier_connector.contract.errors import StoreUnavailable
from kvtier_connector.janitor.catalog import CATALOG_FILE, ROW, Catalog, load
from kvtier_connector.janitor.permit import PERMIT_SECONDS, RENEW_SECONDS, share_of
from kvtier_connector.janitor.policy import Room
from kvtier_connector.store.blockstore import StoreFault
from kvtier_connector.store.fs import LOCAL, new_token
from kvtier_connector.store.journal import JournalWriter, encode_head
from kvtier_connector.store.layout import JournalName, block_path, journal_path
from kvtier_connector.store.permit import PERMIT_BYTES, PERMIT_FILE, UNLIMITED_BYTES, Permit, StorePermit, decode_permit

GIB = 1 << 30
MOUNTS = "kvtier_connector.store.mounts._mount_table"


def permit_of(rig: Rig) -> Permit:
    content = (rig.dir / PERMIT_FILE).read_bytes()
    assert len(content) == PERMIT_BYTES
    return decode_permit(content)


def test_a_budget_of_1_gib_lets_each_of_100_writers_store_a_block_of_8_mib() -> None:
    assert share_of(Room(GIB), writers=100, largest_bytes=8 << 20) == 8 << 20
    assert share_of(Room(GIB), writers=10, largest_bytes=8 << 20) == GIB // 4 // 10
    assert share_of(Room(4 << 20), writers=100, largest_bytes=8 << 20) == 0


def test_a_new_janitor_shares_the_room_among_those_that_wrote_lately_and_not_among_5000_empty_journals(
    rig: Rig, engine: Engine
) -> None:
    for _ in range(5000):
        writer = new_token()
        (engine.root / journal_path(JournalName(writer, 0))).write_bytes(encode_head(writer, 1))
    rig.swept(max_bytes=GIB)
    assert permit_of(rig).bytes == GIB // 16
    for number in range(20):
        rig.engine().put(number)
    rig.swept(max_bytes=GIB).close()
    for seconds, writers in ((60, 20), (700, 4)):
        rig.clock.move(seconds)
        rig.swept(max_bytes=GIB)
        assert permit_of(rig).bytes == (GIB - 20 * BLOCK_BYTES) // 4 // writers


def test_engines_stop_above_the_budget_and_resume_below_the_high_mark(rig: Rig, engine: Engine) -> None:
    engine.put(*range(12))
    fs = Refusing(".kvb", "unlink")
    sweeper = rig.sweeper(fs, max_bytes=10 * BLOCK_BYTES, high_watermark=0.9, low_watermark=0.7)
    usage = rig.sweep(sweeper)
    assert permit_of(rig).bytes == 0
    assert "more than 100% of max_bytes" in permit_of(rig).reason == usage.store_pause
    fs.calls = ()
    rig.sweep(sweeper)
    rig.sweep(sweeper)
    assert permit_of(rig).reason == ""
    assert permit_of(rig).bytes == BLOCK_BYTES


def test_a_permit_is_renewed_in_time_and_when_half_of_it_is_used_up(rig: Rig, engine: Engine) -> None:
    engine.put(0)
    sweeper = rig.swept(max_bytes=82 * BLOCK_BYTES, sweep_seconds=5)

    def renewed_after(seconds: float) -> bool:
        before = permit_of(rig).number
        rig.clock.move(seconds)
        sweeper.step()
        return permit_of(rig).number != before

    renewed_after(RENEW_SECONDS)
    assert not renewed_after(6)
    engine.put(1, 2)
    assert not renewed_after(6)
    engine.put(3)
    assert renewed_after(6)
    assert not renewed_after(6)
    assert renewed_after(RENEW_SECONDS - 6)


def test_blocks_that_cannot_be_looked_at_count_as_their_journal_says(rig: Rig, engine: Engine) -> None:
    engine.put(0)
    fs = Refusing(".kvb")
    sweeper = rig.swept(fs, max_bytes=11 * BLOCK_BYTES, high_watermark=1.0)
    fs.calls = ("stat", "open")
    engine.put(*range(1, 9))
    rig.work(sweeper, 1)
    for number in range(1, 9):
        engine.use(number)
    rig.work(sweeper, 20)
    assert permit_of(rig).bytes == BLOCK_BYTES
    assert "look: 8 blocks" in sweeper.report.problems["look"]
    engine.put(9, 10)
    rig.sweep(sweeper)
    assert permit_of(rig).bytes == 0
    fs.calls = ()
    rig.clock.move(4000)
    usage = rig.sweep(sweeper)
    assert (usage.blocks, sweeper.report.tallies.evicted_blocks, usage.problems) == (8, {"budget": 3}, ())


def test_a_tenant_over_its_quota_is_refused_until_it_is_below_the_high_mark(rig: Rig, engine: Engine) -> None:
    engine.put(*range(5), tenant="alice")
    engine.put(*range(4), tenant="bob")
    fs = Refusing(".kvb", "unlink")
    quotas = {"alice": 4 * BLOCK_BYTES, "bob": 5 * BLOCK_BYTES}
    sweeper = rig.swept(fs, quotas=quotas, high_watermark=0.9, low_watermark=0.5)
    assert permit_of(rig).tenants == {"alice"}
    fs.calls = ()
    rig.sweep(sweeper)
    rig.sweep(sweeper)
    assert permit_of(rig).tenants == frozenset()


@pytest.mark.parametrize(("path", "calls"), [("ns.llama/aa", ("open", "scandir")), ("ns.llama", ("scandir",))], ids=str)
def test_who_cannot_count_lets_the_permit_expire(rig: Rig, engine: Engine, path: str, calls: tuple[str, ...]) -> None:
    engine.put(1)
    fs = Refusing(path)
    sweeper = rig.swept(fs, max_bytes=100 * BLOCK_BYTES)
    rig.clock.move(RENEW_SECONDS)
    rig.sweep(sweeper)
    number = permit_of(rig).number
    fs.calls = calls
    engine.put(2)
    rig.work(sweeper, 20)
    assert permit_of(rig).number == number
    fs.calls = ()
    rig.clock.move(700)
    rig.sweep(sweeper)
    assert permit_of(rig).number != number


def test_a_mount_that_goes_before_an_eviction_leaves_the_count_and_is_walked_before_the_next_permit(
    rig: Rig, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.put(*range(20))
    monkeypatch.setattr(MOUNTS, lambda: f"2 1 0:2 / {rig.dir.parent} rw - nfs x rw\n")
    sweeper = rig.trusting(max_bytes=20 * BLOCK_BYTES, low_watermark=0.5, sweep_seconds=30)
    with monkeypatch.context() as patch:
        patch.setattr(sweeper, "_evict", lambda _: None)
        rig.work(sweeper, 5, seconds=30)
    number, away = permit_of(rig).number, rig.dir.rename(rig.dir.parent.with_name("away"))
    with monkeypatch.context() as patch:
        patch.setattr(MOUNTS, str)
        rig.work(sweeper, 3, seconds=1)
        assert sweeper.catalog.total.blocks == 20
        rig.work(sweeper, 1, seconds=30)
    away.rename(rig.dir)
    monkeypatch.setattr(sweeper, "_walk", lambda _: None)
    rig.work(sweeper, 10)
    assert permit_of(rig).number == number


def test_while_a_journal_cannot_be_read_permits_go_on_from_walks(rig: Rig) -> None:
    unread, engine = rig.engine(), rig.engine()
    fs = Refusing(f"/journal/{unread.journal.writer}", "open")
    sweeper = rig.swept(fs, max_bytes=34 * BLOCK_BYTES)
    for number in range(3):
        unread.put(number)
        engine.put(10 + number)
        before = permit_of(rig).number
        rig.clock.move(RENEW_SECONDS)
        for _ in range(5):
            rig.sweep(sweeper)
        assert permit_of(rig).number != before
    assert permit_of(rig).bytes == 28 * BLOCK_BYTES // 16
    assert "counted by walking" in sweeper.report.problems["journals"]
    listed = fs.listed
    for _ in range(4):
        before = permit_of(rig).number
        rig.clock.move(RENEW_SECONDS)
        rig.sweep(sweeper)
        assert permit_of(rig).number != before
    assert fs.listed <= listed + 1  # the hourly walk
    for path in unread.root.glob(f"journal/{unread.journal.writer}*"):
        path.unlink()
    rig.sweep(sweeper)
    assert sweeper.report.problems == {}


def test_janitors_that_start_anew_know_what_an_unreadable_journal_does_not_tell(rig: Rig, engine: Engine) -> None:
    first = rig.sweeper(max_bytes=34 * BLOCK_BYTES)
    engine.put(0)
    rig.sweep(first)
    first.close()
    stored = 1
    for _ in range(30):
        last = stored + permit_of(rig).bytes // BLOCK_BYTES
        engine.put(*range(stored, last))
        stored = last
        rig.clock.move(5)
        rig.sweep(rig.sweeper(Refusing("/journal/", "open"), max_bytes=34 * BLOCK_BYTES))
    assert stored <= 34


def test_an_engine_that_cannot_write_its_journal_soon_stores_no_more(rig: Rig, engine: Engine) -> None:
    fs, now = FailingFs(OSError(errno.EIO, "broken"), lambda _, path: "/journal/" in path), lambda: rig.clock.seconds
    sweeper = rig.swept(max_bytes=100 * BLOCK_BYTES, sweep_seconds=5)
    permit = StorePermit(str(rig.dir / PERMIT_FILE), now=now)
    permit.set_time((rig.dir / PERMIT_FILE).stat().st_mtime_ns)
    engine.journal = JournalWriter(engine.root, fs=fs, clock=lambda: rig.clock.ns, now=now)
    numbers, refusal = itertools.count(), None
    for _ in range(360):
        rig.work(sweeper, 1, seconds=5)
        permit.refresh()
        while (refusal := permit.reserve(BLOCK_BYTES)) is None:
            with contextlib.suppress(StoreUnavailable):
                engine.put(next(numbers))
            permit.end(BLOCK_BYTES, BLOCK_BYTES)
            permit.untold_since = engine.journal.refused_at
    assert refusal is StoreFault.NO_JOURNAL
    assert 10 < next(numbers) <= 50
    fs.is_failing = False
    engine.put(next(numbers))
    permit.untold_since = engine.journal.refused_at
    assert permit.reserve(BLOCK_BYTES) is None


def test_a_journal_of_another_release_is_counted_by_walking(rig: Rig, engine: Engine) -> None:
    engine.put(1)
    writer = new_token()
    (engine.root / journal_path(JournalName(writer, 0))).write_bytes(b"later release " * 20)
    sweeper = rig.sweeper(max_bytes=34 * BLOCK_BYTES)
    for _ in range(10):
        rig.sweep(sweeper)
    engine.put(2, is_telling=False)
    with (engine.root / journal_path(JournalName(writer, 0))).open("ab") as file:
        file.write(b"more")
    for _ in range(10):
        usage = rig.sweep(sweeper)
    assert usage.blocks == 2
    assert "no journal of this release" in str(usage.problems)


def test_an_early_permit_waits_until_idle_journals_were_read(rig: Rig) -> None:
    idle, busy = rig.engine(), rig.engine()
    sweeper = rig.sweeper(max_bytes=160 * BLOCK_BYTES, sweep_seconds=1)
    idle.put(0)
    for number in range(20, 50):
        busy.put(number)
        rig.clock.move(1)
        sweeper.step()
    idle.put(*range(1, 5))
    for number in range(50, 70):
        busy.put(number)
    rig.clock.move(1)
    before = permit_of(rig).number
    assert sweeper.step() == 0
    assert permit_of(rig).number == before
    sweeper.step()
    assert permit_of(rig).number != before
    assert permit_of(rig).bytes == (160 - 55) * BLOCK_BYTES // 16


def test_a_janitor_that_has_not_counted_or_does_not_hold_the_lease_writes_no_permit(rig: Rig) -> None:
    rig.engine().put(*range(1, 8), is_telling=False)
    rig.sweep(rig.sweeper(parts={"may_act": lambda: False}, max_bytes=100 * BLOCK_BYTES))
    for unread in ("/blocks", "/blocks/010/"):
        fs = Refusing(unread, "scandir")
        rig.work(sweeper := rig.sweeper(fs, max_bytes=100 * BLOCK_BYTES), 5)
        assert not (rig.dir / PERMIT_FILE).exists()
    fs.calls = ()
    rig.work(sweeper, 60)
    assert (rig.dir / PERMIT_FILE).exists()


def test_an_engine_goes_on_storing_at_its_budget_whatever_the_high_mark(rig: Rig, engine: Engine) -> None:
    sweeper = rig.swept(max_bytes=10 * BLOCK_BYTES, high_watermark=1.0, low_watermark=0.5)
    engine.put(*range(10))
    rig.work(sweeper, 20)
    assert (sweeper.report.usage.blocks, permit_of(rig).bytes > 0) == (5, True)


def test_a_permit_of_the_user_that_the_janitor_ran_as_before_is_replaced(rig: Rig, engine: Engine) -> None:
    engine.put(1)
    rig.swept(max_bytes=100 * BLOCK_BYTES).close()
    number, fs = permit_of(rig).number, Refusing(PERMIT_FILE, "open", number=errno.EACCES)
    fs.unlink = lambda path: setattr(fs, "calls", ()) or LOCAL.unlink(path)  # type: ignore[method-assign]  # of this one
    rig.clock.move(100)
    assert rig.swept(fs, max_bytes=100 * BLOCK_BYTES).report.usage.problems == ()
    assert permit_of(rig).number != number


def test_a_full_volume_is_told_although_nothing_new_can_be_written(rig: Rig) -> None:
    rig.engine().put(1)
    rig.sweep(rig.sweeper())
    permit = permit_of(rig)
    assert (permit.bytes, permit.reason, permit.seconds) == (UNLIMITED_BYTES, "", PERMIT_SECONDS)

    sweeper = rig.swept(FailingFs(OSError(errno.ENOSPC, "no room"), lambda call, _: call == "rename"))
    rig.engine().put(2)
    for seconds in (700, 10, 10):
        rig.clock.move(seconds)
        sweeper.step()
    assert permit_of(rig).reason == "the volume has no room left"


def test_an_engine_stores_as_much_as_the_permit_says_and_nothing_once_the_janitor_is_gone(rig: Rig) -> None:
    rig.engine().put(0)
    sweeper = rig.swept(max_bytes=82 * BLOCK_BYTES)
    path, now = rig.dir / PERMIT_FILE, lambda: rig.clock.seconds
    permit = StorePermit(str(path), now=now)
    permit.set_time(path.stat().st_mtime_ns)
    permit.refresh()
    granted = 0
    while permit.reserve(BLOCK_BYTES) is None:
        permit.end(BLOCK_BYTES, BLOCK_BYTES)
        granted += 1
    assert (granted, permit.reserve(BLOCK_BYTES)) == (81 // 16, StoreFault.NO_BUDGET)
    rig.clock.move(RENEW_SECONDS)
    rig.sweep(sweeper)
    permit.refresh()
    assert permit.refusal() is None
    rig.clock.move(PERMIT_SECONDS + 1)
    permit.refresh()
    assert permit.refusal() is StoreFault.NO_PERMIT


LIMITS = {"max_bytes": 10 * BLOCK_BYTES, "high_watermark": 0.9, "low_watermark": 0.5}


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.EROFS, errno.ESTALE])
@pytest.mark.parametrize("calls", [("unlink",), ("scandir",), ("stat",), ("open",), ("statvfs",), ("pwritev",)])
def test_what_is_refused_is_said_until_it_ends(rig: Rig, engine: Engine, number: int, calls: tuple[str, ...]) -> None:
    engine.put_chain(*range(10))
    fs = Refusing("", *calls, number=number)
    sweeper = rig.sweeper(fs, **LIMITS)
    rig.work(sweeper, 3)
    assert any(os.strerror(number) in problem for problem in sweeper.report.usage.problems)
    fs.calls = ()
    rig.clock.move(100)
    usage = rig.sweep(sweeper)
    rig.clock.move(4000)
    usage = rig.sweep(sweeper)
    assert usage.problems == ()
    assert engine.there(range(10)) == list(range(5))
    assert engine.check() == []


def test_a_janitor_killed_at_any_call_leaves_a_volume_that_the_next_one_finishes(rig: Rig) -> None:
    engine, old = rig.engine(), rig.engine("bb")
    engine.put_chain(*range(10))
    old.put(1)
    quarantined = engine.root / DAMAGED
    quarantined.parent.mkdir()
    quarantined.write_bytes(b"1")
    for path in [quarantined, *old.root.glob("journal/*"), old.root / "tier.json"]:
        os.utime(path, (0, 0))
    before = rig.dir.with_name("before")
    shutil.copytree(rig.dir, before)
    step, has_died = 0, True
    while has_died:
        shutil.rmtree(rig.dir)
        shutil.copytree(before, rig.dir, copy_function=shutil.copy2)
        try:
            sweeper = rig.trusting(CrashingFs(step), keep_previous=0, **LIMITS)
            rig.work(sweeper, 8)
            sweeper.close()
            has_died = False
        except CrashError:
            step += 1
        assert check(engine.root) == [] or quarantined.exists()
        there = engine.there(range(10))
        assert there == list(range(len(there)))
        usage = rig.sweep(rig.trusting(keep_previous=0, **LIMITS))
        there = engine.there(range(10))
        assert there == list(range(len(there)))
        assert 5 <= len(there) == usage.blocks <= 9
        assert not old.root.exists() or not list(old.root.iterdir())
        step += 4
    assert step > 50


def test_the_beginning_of_a_prefix_stays_as_long_as_its_end_does(rig: Rig, engine: Engine) -> None:
    # More than one thread takes at a time.
    engine.put_chain(*range(100))
    engine.put_chain(*range(100, 110))
    sweeper = rig.sweeper(Refusing(key(90).hash.hex(), "unlink"), max_bytes=110 * BLOCK_BYTES, low_watermark=0.001)
    sweeper.step()
    rig.work(sweeper, 5)
    assert engine.there(range(100)) == list(range(91))
    assert engine.there(range(100, 110)) == []


def test_what_was_written_anew_keeps_all_before_it(rig: Rig, engine: Engine) -> None:
    engine.put_chain(*range(5))
    rig.clock.move(60)
    file, times = engine.root / block_path(key(3)), [rig.clock.ns - 1]

    def rewrite(call: str, _: str) -> None:
        """Write a block as another engine does just before the janitor removes any."""
        if call == "unlink" and times:
            os.utime(file, ns=(times[0], times.pop()))

    sweeper = rig.sweeper(HookedFs(rewrite), max_bytes=5 * BLOCK_BYTES, high_watermark=0.9, low_watermark=0.1)
    while sweeper.step() == 0.0:
        pass
    assert engine.there(range(5)) == list(range(4))


def test_a_janitor_that_loses_the_lease_in_the_middle_of_a_batch_removes_no_more(rig: Rig, engine: Engine) -> None:
    engine.put(*range(200))
    removed: list[str] = []
    fs = HookedFs(lambda call, path: call == "unlink" and removed.append(path))
    # Another janitor becomes the active one after some removals.
    lease = {"may_act": lambda: len(removed) < 10}
    rig.work(rig.sweeper(fs, parts=lease, max_bytes=200 * BLOCK_BYTES, high_watermark=0.9, low_watermark=0.1), 20)
    # Each of the threads may be in the middle of one.
    assert 200 - len(engine.there(range(200))) <= 10 + rig.config.threads - 1


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_file_anywhere_on_the_volume_holds_up_no_janitor(rig: Rig, engine: Engine, kind: str) -> None:
    engine.put_chain(*range(10))
    plant(kind, engine.root / block_path(key(77)))
    plant(kind, engine.root / block_path(key(3)).replace(key(3).hash.hex(), key(78).hash.hex()))
    for name in (PERMIT_FILE, CATALOG_FILE):
        plant(kind, engine.root.parent / name)
    sweeper = rig.swept(**LIMITS)
    rig.clock.move(4000)
    usage = rig.sweep(sweeper)
    assert engine.there(range(10)) == list(range(5))
    assert usage.blocks == 5
    if kind != "directory":  # a problem names it, and a person removes it
        assert decode_permit((engine.root.parent / PERMIT_FILE).read_bytes()).bytes > 0


VERSION = 7
EMPTY: list[object] = [VERSION, [], [""], 0, {}, False]
ROWS_OF_NO_GENERATION = bytes(ROW.itemsize)
IMPOSSIBLE = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())["impossible"]
"""Places in the document of a catalog, and what no janitor writes there."""


@pytest.mark.parametrize(
    ("document", "rows", "is_taken"),
    [
        (EMPTY, b"", True),
        (EMPTY, ROWS_OF_NO_GENERATION, False),
        *((each, b"", False) for each in (TOO_DEEP, b"[]", b"{}", b"7", b"\xff")),
        *(([*EMPTY[:place], value, *EMPTY[place + 1 :]], b"", False) for place, value in IMPOSSIBLE),
    ],
    ids=lambda each: str(each)[:60],
)
def test_a_catalog_that_is_whole_is_taken_if_a_janitor_could_have_written_it(
    tmp_path: Path, document: bytes | list[object], rows: bytes, is_taken: bool
) -> None:
    content = document if isinstance(document, bytes) else json.dumps(document).encode()
    head = struct.pack("<IQ", zlib.crc32(rows, zlib.crc32(content)), len(content))
    (tmp_path / CATALOG_FILE).write_bytes(head + content + rows)
    assert (load(Catalog(), str(tmp_path), fs=LOCAL) is not None) == is_taken
