# SPDX-License-Identifier: Apache-2.0
"""The permit that engines need to store: it follows the room that is left, and ends where the janitor cannot count."""

from __future__ import annotations

import errno

import pytest
from store_faults import FailingFs
from tier_dir import BLOCK_BYTES, Engine, Refusing, Rig

from kvtier_connector.janitor.permit import PERMIT_SECONDS, RENEW_SECONDS, share_of
from kvtier_connector.janitor.policy import Room
from kvtier_connector.store.blockstore import StoreFault
from kvtier_connector.store.fs import new_token
from kvtier_connector.store.journal import encode_head
from kvtier_connector.store.layout import JOURNAL, JournalName, journal_path
from kvtier_connector.store.permit import PERMIT_BYTES, PERMIT_FILE, UNLIMITED_BYTES, Permit, StorePermit, decode_permit

GIB = 1 << 30


def permit_of(rig: Rig) -> Permit:
    content = (rig.dir / PERMIT_FILE).read_bytes()
    assert len(content) == PERMIT_BYTES
    return decode_permit(content)


def test_a_budget_of_1_gib_lets_each_of_100_writers_store_a_block_of_8_mib() -> None:
    assert share_of(Room(GIB), writers=100, largest_bytes=8 << 20) == 8 << 20
    assert share_of(Room(GIB), writers=10, largest_bytes=8 << 20) == GIB // 4 // 10
    assert share_of(Room(4 << 20), writers=100, largest_bytes=8 << 20) == 0


def test_five_thousand_empty_journals_take_no_share_of_an_empty_volume(rig: Rig) -> None:
    directory = rig.engine().root / JOURNAL
    directory.mkdir(exist_ok=True)
    for _ in range(5000):
        writer = new_token()
        (directory.parent / journal_path(JournalName(writer, 0))).write_bytes(encode_head(writer, 1))
    rig.swept(max_bytes=GIB)
    assert permit_of(rig).bytes == GIB // 16


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
    assert (usage.blocks, usage.problems) == (11, ())


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
    rig.engine().put(1)
    rig.sweep(rig.sweeper(parts={"may_act": lambda: False}, max_bytes=100 * BLOCK_BYTES))
    uncounted = rig.sweeper(Refusing("/blocks", "scandir"), max_bytes=100 * BLOCK_BYTES)
    rig.work(uncounted, 5)
    assert not (rig.dir / PERMIT_FILE).exists()


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
