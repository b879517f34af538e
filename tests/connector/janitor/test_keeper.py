# SPDX-License-Identifier: Apache-2.0
"""The janitor against real files: what goes, what stays, and what engines learn of it."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace

import pytest
from store_faults import WatchedFs
from tier_dir import BLOCK_BYTES, Engine, Rig, key, payload
from waiting import until_the_next_tick

from kvtier_connector.janitor.pins import write_pins
from kvtier_connector.janitor.sweep import Keeper
from kvtier_connector.store.filesystems import Mount
from kvtier_connector.store.fs import FileSystem, new_token
from kvtier_connector.store.index import Presence
from kvtier_connector.store.layout import JOURNAL, Lineage, block_path, partial_path
from kvtier_connector.store.runtime_settings import BrakeFile, Mode

DAY = 86_400.0


def test_what_engines_stored_is_counted_from_their_journals(rig: Rig) -> None:
    rig.engine().put(*range(5))
    rig.engine().put(*range(5, 8))
    usage = rig.sweep(rig.keeper())
    assert (usage.blocks, usage.used_bytes, usage.is_counted, usage.is_active) == (8, 8 * BLOCK_BYTES, True, True)
    assert usage.problems == ()


def test_what_no_journal_tells_of_is_found_by_the_walk_with_its_place_in_the_prefix(rig: Rig) -> None:
    engine = rig.engine()
    engine.put_chain(*range(10))
    shutil.rmtree(engine.root / "journal")
    keeper = rig.keeper(max_bytes=10 * BLOCK_BYTES, high_watermark=0.9, low_watermark=0.6)
    assert rig.sweep(keeper).blocks == 6
    assert engine.there(range(10)) == list(range(6))


def test_journals_that_take_longer_than_a_step_are_heard_in_the_next_ones(rig: Rig) -> None:
    for number in range(20):
        rig.engine().put(number)

    def now() -> float:
        # Time goes on, so that one step hears a few of the journals.
        rig.clock.seconds += 0.2
        return rig.clock.seconds

    keeper = Keeper(replace(rig.config, sweep_seconds=1e6), clock=lambda: rig.clock.ns, now=now)
    keeper.open()
    pauses = [keeper.step() for _ in range(20)]
    assert keeper.is_idle
    assert pauses[0] == 0.0
    rig.clock.move(1e6)
    keeper.step()
    assert keeper.report is not None
    assert keeper.report.usage.blocks == 20


class CachingFs(FileSystem):
    """Says of the directory of the journals what it was at first, unless it is opened."""

    def __init__(self) -> None:
        self.first: dict[str, os.stat_result] = {}

    def stat(self, path: str) -> os.stat_result:
        if path.endswith("/journal"):
            return self.first.setdefault(path, super().stat(path))
        return super().stat(path)


@pytest.mark.parametrize(("file_system", "most_sweeps"), [("nfs4", 1), ("ext4", 21)])
def test_a_cached_time_of_the_journals_hides_no_news_from_the_janitor(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, file_system: str, most_sweeps: int
) -> None:
    mount = Mount(file_system, "server:/export", {})
    monkeypatch.setattr("kvtier_connector.janitor.follow.mount_of", lambda _: mount)
    engine, keeper = rig.engine(), rig.keeper(fs=CachingFs())
    engine.put(0)
    for _ in range(5):
        assert rig.sweep(keeper).blocks == 1
    until_the_next_tick(engine.root / JOURNAL)
    engine.put(1)
    assert any(rig.sweep(keeper).blocks == 2 for _ in range(most_sweeps))


def test_above_the_high_mark_the_least_recently_used_goes_until_the_low_mark(rig: Rig) -> None:
    engine = rig.engine()
    engine.put(*range(10))
    engine.use(0)
    keeper = rig.keeper(max_bytes=10 * BLOCK_BYTES, high_watermark=0.9, low_watermark=0.7)
    usage = rig.sweep(keeper)
    assert engine.there(range(10)) == [0, 4, 5, 6, 7, 8, 9]
    assert (usage.used_bytes, usage.evicted_blocks) == (7 * BLOCK_BYTES, 3)
    assert engine.check() == []


def test_engines_learn_what_was_removed(rig: Rig) -> None:
    engine = rig.engine()
    engine.put(*range(10))
    rig.sweep(rig.keeper(max_bytes=10 * BLOCK_BYTES))
    engine.store.synchronize()
    states = [engine.store.state(key(number)) for number in range(10)]
    assert [state is Presence.PRESENT for state in states] == [engine.has(number) for number in range(10)]
    assert not all(engine.has(number) for number in range(10))


def test_a_use_of_the_last_block_keeps_the_whole_prefix(rig: Rig) -> None:
    engine = rig.engine()
    engine.put_chain(*range(5))
    engine.put_chain(*range(5, 10))
    engine.use(4)
    rig.sweep(rig.keeper(max_bytes=10 * BLOCK_BYTES, high_watermark=0.9, low_watermark=0.7))
    assert engine.there(range(10)) == [0, 1, 2, 3, 4, 5, 6]


def test_a_pinned_prefix_stays_however_old_it_is(rig: Rig) -> None:
    engine = rig.engine()
    engine.put_chain(*range(5))
    engine.put_chain(*range(5, 10))
    write_pins(rig.dir, {"system": key(2).hash})
    rig.sweep(rig.keeper(max_bytes=10 * BLOCK_BYTES, high_watermark=0.9, low_watermark=0.4))
    assert engine.there(range(10)) == [0, 1, 2, 5]


def test_a_pinned_prefix_stays_whose_engine_died_before_it_told_of_the_middle(rig: Rig) -> None:
    first, killed, last = rig.engine(), rig.engine(), rig.engine()
    first.put(0, lineage=Lineage(b"", 0))
    write_pins(rig.dir, {"system": key(4).hash})
    keeper = rig.keeper(max_bytes=10 * BLOCK_BYTES, high_watermark=0.9, low_watermark=0.4)
    rig.sweep(keeper)
    for number in (1, 2, 3):
        killed.store.put(key(number), payload(number), Lineage(key(number - 1).hash, number))
    # What the ledger knows of the middle, it knows from the files, which nobody walks for days.
    last.put(4, lineage=Lineage(key(3).hash, 4))
    last.put_chain(*range(5, 14))
    rig.sweep(keeper)
    assert last.there(range(5)) == [0, 1, 2, 3, 4]
    assert keeper.ledger.total.blocks == len(last.there(range(14))) < 14


def test_a_block_whose_beginning_is_not_there_is_counted_all_the_same(rig: Rig) -> None:
    engine, keeper = rig.engine(), rig.keeper()
    rig.sweep(keeper)
    engine.put(3, lineage=Lineage(key(2).hash, 3))
    assert rig.sweep(keeper).blocks == 1


def test_nothing_is_evicted_before_the_pins_could_be_read_but_what_outlived_its_time(rig: Rig) -> None:
    engine = rig.engine()
    engine.put(*range(5))
    rig.clock.move(DAY)
    engine.put(*range(5, 10))
    (rig.dir / "pins.json").write_text("{")
    keeper = rig.keeper(max_bytes=5 * BLOCK_BYTES, ttl_seconds=DAY / 2)
    assert "pins.json" in rig.sweep(keeper).problems[0]
    assert engine.there(range(10)) == [5, 6, 7, 8, 9]
    (rig.dir / "pins.json").unlink()
    rig.sweep(keeper)
    assert len(engine.there(range(10))) < 5


def test_pins_above_the_budget_keep_nothing_that_outlived_its_time(rig: Rig) -> None:
    engine = rig.engine()
    engine.put_chain(*range(10))
    write_pins(rig.dir, {"all": key(9).hash})
    keeper = rig.keeper(max_bytes=5 * BLOCK_BYTES, ttl_seconds=DAY)
    rig.sweep(keeper)
    assert len(engine.there(range(10))) == 10
    rig.clock.move(2 * DAY)
    rig.sweep(keeper)
    assert engine.there(range(10)) == []


def test_pins_above_the_budget_are_a_problem_that_is_stated(rig: Rig) -> None:
    engine = rig.engine()
    engine.put_chain(*range(10))
    write_pins(rig.dir, {"all": key(9).hash})
    usage = rig.sweep(rig.keeper(max_bytes=5 * BLOCK_BYTES))
    assert len(engine.there(range(10))) == 10
    assert "pins.json" in usage.problems[0]


def test_what_outlived_its_time_goes_though_it_is_read(rig: Rig) -> None:
    engine = rig.engine()
    engine.put(1, 2)
    rig.clock.move(DAY)
    engine.put(3)
    engine.use(1)
    rig.sweep(rig.keeper(ttl_seconds=DAY))
    assert engine.there(range(4)) == [3]


def test_a_quota_holds_for_its_tenant(rig: Rig) -> None:
    engine = rig.engine()
    engine.put(*range(10), tenant="alice")
    engine.put(*range(10), tenant="bob")
    usage = rig.sweep(rig.keeper(quotas={"alice": 4 * BLOCK_BYTES}, low_watermark=0.5))
    assert {tenant.tenant: tenant.blocks for tenant in usage.tenants} == {"alice": 2, "bob": 10}
    assert engine.there(range(10), "alice") == [8, 9]


def test_tenants_without_a_quota_of_their_own_have_the_default(rig: Rig) -> None:
    engine = rig.engine()
    engine.put(*range(10), tenant="alice")
    engine.put(*range(20, 30))
    usage = rig.sweep(rig.keeper(default_quota_bytes=4 * BLOCK_BYTES, low_watermark=0.5))
    assert {tenant.tenant: tenant.blocks for tenant in usage.tenants} == {"": 10, "alice": 2}


def test_a_second_janitor_goes_on_from_what_the_first_one_saved(rig: Rig) -> None:
    engine = rig.engine()
    engine.put(*range(5))
    first = rig.keeper()
    rig.sweep(first)
    first.close()
    shutil.rmtree(engine.root / "blocks/040")
    second = rig.keeper()
    second.step()
    assert second.report is not None
    assert (second.report.usage.blocks, second.report.usage.is_counted) == (5, True)


def test_a_janitor_that_was_away_for_longer_than_journals_live_counts_anew(rig: Rig) -> None:
    engine = rig.engine()
    engine.put(*range(5))
    first = rig.keeper()
    rig.sweep(first)
    first.close()
    engine.put(*range(5, 9))
    shutil.rmtree(engine.root / "journal")
    rig.clock.move(2 * DAY)
    assert rig.sweep(rig.keeper()).blocks == 9


def test_a_saved_ledger_that_is_damaged_is_not_believed(rig: Rig) -> None:
    rig.engine().put(*range(5))
    first = rig.keeper()
    rig.sweep(first)
    first.close()
    ledger = rig.dir / "janitor.ledger"
    content = bytearray(ledger.read_bytes())
    content[-7] ^= 1
    ledger.write_bytes(content)
    assert rig.sweep(rig.keeper()).blocks == 5


def test_what_vanished_without_a_word_is_forgotten_by_the_next_walk(rig: Rig) -> None:
    engine = rig.engine()
    engine.put(*range(5))
    keeper = rig.keeper(verify_seconds=100.0)
    rig.sweep(keeper)
    shutil.rmtree(engine.root / "blocks")
    (engine.root / "blocks").mkdir()
    for _ in range(50):
        rig.clock.move(10)
        keeper.step()
    assert keeper.report is not None
    assert keeper.report.usage.blocks == 0


class Listed(WatchedFs):
    """Counts the directories of blocks that were listed."""

    def __init__(self) -> None:
        self.directories = 0

    def before(self, call: str, path: str | None) -> None:
        self.directories += call == "scandir" and path is not None and "/blocks/" in path


def test_a_later_walk_lists_one_directory_at_a_time_and_gets_through(rig: Rig) -> None:
    engine = rig.engine()
    engine.put(1)
    for number in range(256):
        (engine.root / "blocks" / f"a{number:02x}").mkdir(parents=True, exist_ok=True)
    fs = Listed()
    keeper = rig.keeper(fs, verify_seconds=1000.0)
    rig.sweep(keeper)
    fs.directories = 0
    listed = []
    for _ in range(1100):
        rig.clock.move(1)
        before = fs.directories
        keeper.step()
        listed.append(fs.directories - before)
    assert max(listed) == 1
    assert sum(listed) >= 256


def test_leftovers_go_when_they_are_old(rig: Rig) -> None:
    engine = rig.engine()
    engine.put(1)
    block = engine.root / "blocks/010"
    old, young = block / f"a.{'0' * 32}.partial", block / f"b.{'0' * 32}.partial"
    quarantined = engine.root / "quarantine" / "x"
    journal = engine.root / "journal" / f"{'1' * 32}.00000000.kvj"
    quarantined.parent.mkdir()
    ledger, generation = rig.dir / f"janitor.ledger.{'2' * 32}.partial", rig.dir / "cc"
    generation.mkdir()
    for path in (old, young, quarantined, journal, ledger):
        path.write_bytes(b"123")
    for path in (old, quarantined, journal, ledger, generation):
        os.utime(path, ns=(rig.clock.ns, rig.clock.ns - int(30 * DAY * 1e9)))
    keeper = rig.keeper()
    rig.sweep(keeper)
    there = [path.exists() for path in (old, young, quarantined, journal, ledger, generation)]
    assert there == [False, True, False, False, False, False]
    assert keeper.report is not None
    assert keeper.report.removed_leftovers["partial"] == 3


def test_young_quarantined_files_stay_and_count(rig: Rig) -> None:
    engine = rig.engine()
    engine.put(1)
    quarantine = engine.root / "quarantine"
    quarantine.mkdir()
    (quarantine / "x").write_bytes(b"123")
    keeper = rig.keeper()
    rig.sweep(keeper)
    assert rig.sweep(keeper).quarantined == 1
    assert (quarantine / "x").exists()


def test_quarantined_files_do_not_outlive_the_time_to_live(rig: Rig) -> None:
    quarantine = rig.engine().root / "quarantine"
    quarantine.mkdir()
    for name, age in (("old", 2 * DAY), ("young", DAY / 2)):
        (quarantine / name).write_bytes(b"123")
        os.utime(quarantine / name, ns=(rig.clock.ns, rig.clock.ns - int(age * 1e9)))
    rig.sweep(rig.keeper(ttl_seconds=DAY))
    assert [path.name for path in quarantine.iterdir()] == ["young"]


def test_an_empty_tree_of_a_tenant_goes(rig: Rig) -> None:
    engine = rig.engine()
    engine.put(1, tenant="alice")
    (engine.root / "tenants/alice/blocks/010" / f"{key(1).hash.hex()}_g0.kvb").unlink()
    shutil.rmtree(engine.root / "journal")
    rig.clock.move(DAY)
    rig.sweep(rig.keeper())
    assert not (engine.root / "tenants/alice").exists()


def test_engines_are_braked_above_the_budget_and_let_go_below_the_high_mark(rig: Rig) -> None:
    engine = rig.engine()
    engine.put_chain(*range(10))
    write_pins(rig.dir, {"all": key(9).hash})
    keeper = rig.keeper(max_bytes=9 * BLOCK_BYTES)
    brake = BrakeFile(str(rig.dir / "brake.json"), clock=lambda: rig.clock.ns)
    usage = rig.sweep(keeper)
    assert brake.refresh() is Mode.READ_ONLY
    assert "max_bytes" in usage.brake
    write_pins(rig.dir, {})
    rig.sweep(keeper)
    assert rig.sweep(keeper).brake == ""
    assert brake.refresh() is Mode.READ_WRITE


def test_a_brake_of_a_janitor_that_died_ends_by_itself(rig: Rig) -> None:
    engine = rig.engine()
    engine.put_chain(*range(10))
    write_pins(rig.dir, {"all": key(9).hash})
    rig.sweep(rig.keeper(max_bytes=5 * BLOCK_BYTES))
    brake = BrakeFile(str(rig.dir / "brake.json"), clock=lambda: rig.clock.ns)
    assert brake.refresh() is Mode.READ_ONLY
    rig.clock.move(600)
    assert brake.mode is Mode.READ_WRITE


def test_a_brake_is_renewed_although_the_clock_of_the_janitor_went_back(rig: Rig) -> None:
    engine = rig.engine()
    engine.put_chain(*range(10))
    write_pins(rig.dir, {"all": key(9).hash})
    keeper = rig.keeper(max_bytes=5 * BLOCK_BYTES)
    rig.sweep(keeper)
    rig.clock.ns -= int(DAY * 1e9)
    rig.sweep(keeper)
    brake = BrakeFile(str(rig.dir / "brake.json"), clock=lambda: rig.clock.ns)
    assert brake.refresh() is Mode.READ_ONLY
    rig.clock.move(600)
    assert brake.refresh() is Mode.READ_WRITE


def test_a_new_volume_is_no_problem(rig: Rig) -> None:
    usage = rig.sweep(rig.keeper(max_bytes=100))
    assert (usage.blocks, usage.problems) == (0, ())
    assert (rig.dir / "brake.json").exists()


def abandon(engine: Engine, rig: Rig, numbers: range, size: int = BLOCK_BYTES) -> None:
    """Leave half-written blocks of writers that died just now."""
    for number in numbers:
        path = engine.root / partial_path(block_path(key(number)), new_token())
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(size))
        os.utime(path, ns=(rig.clock.ns, rig.clock.ns))


def test_half_written_files_count_in_the_budget_and_go(rig: Rig) -> None:
    engine = rig.engine()
    engine.put(*range(20))
    keeper = rig.keeper(max_bytes=40 * BLOCK_BYTES, high_watermark=0.9, low_watermark=0.7)
    rig.sweep(keeper)
    most = 0
    for hour in range(8):
        # An engine that crashes again and again leaves some each time.
        abandon(engine, rig, range(1000 + 10 * hour, 1010 + 10 * hour))
        for _ in range(360):
            rig.clock.move(10)
            keeper.step()
        most = max(most, sum(path.stat().st_size for path in engine.root.rglob("*") if path.is_file()))
    assert most <= 40 * BLOCK_BYTES
    assert keeper.report is not None
    assert keeper.report.removed_leftovers["partial"] >= 60


def test_a_half_written_file_goes_at_the_time_to_live_if_that_is_shorter(rig: Rig) -> None:
    engine = rig.engine()
    engine.put(1)
    keeper = rig.keeper(ttl_seconds=600.0, verify_seconds=60.0)
    rig.sweep(keeper)
    abandon(engine, rig, range(5))
    for _ in range(100):
        rig.clock.move(10)
        keeper.step()
    assert not list(engine.root.rglob("*-partial"))


def test_a_half_written_file_that_becomes_a_block_counts_once(rig: Rig) -> None:
    engine = rig.engine()
    engine.put(*range(5))
    abandon(engine, rig, range(100, 110))
    keeper = rig.keeper(max_bytes=20 * BLOCK_BYTES, high_watermark=0.9, low_watermark=0.7)
    rig.sweep(keeper)
    for path in engine.root.rglob("*-partial"):
        path.rename(path.with_name(path.name[1:].rpartition(".")[0]))
    engine.put(*range(5, 7))
    for _ in range(800):
        rig.clock.move(10)
        keeper.step()
    assert keeper.report is not None
    assert (keeper.report.usage.blocks, keeper.report.evicted_blocks["budget"]) == (17, 0)
