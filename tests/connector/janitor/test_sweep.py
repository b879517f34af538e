# SPDX-License-Identifier: Apache-2.0
"""The janitor against real files, also those of vLLM's own fs tier: what goes, what stays, what engines learn of it."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from store_faults import FailingFs, HookedFs, flip
from tier_dir import BLOCK_BYTES, DAMAGED, PAYLOAD_BYTES, Engine, Refusing, Rig, key

from kvtier_connector.contract.janitor import VLLM_FS_LAYOUT, JanitorConfig
from kvtier_connector.janitor.loop import make_sweeper
from kvtier_connector.janitor.sweep import Sweeper
from kvtier_connector.janitor.vllm_files import VllmFilesSweeper
from kvtier_connector.store.fs import FileSystem, new_token
from kvtier_connector.store.header import Fault
from kvtier_connector.store.journal import Op
from kvtier_connector.store.layout import Lineage, block_path, partial_path
from kvtier_connector.store.permit import PERMIT_FILE, decode_permit

DAY = 86_400.0


def test_what_no_journal_tells_of_is_found_by_the_walk_with_its_place_in_the_prefix(rig: Rig, engine: Engine) -> None:
    engine.put_chain(*range(10))
    shutil.rmtree(engine.root / "journal")
    assert rig.sweep(rig.sweeper(max_bytes=10 * BLOCK_BYTES, high_watermark=0.9, low_watermark=0.6)).blocks == 6
    assert engine.there(range(10)) == list(range(6))


def test_journals_that_take_longer_than_a_step_are_heard_in_the_next_ones(rig: Rig) -> None:
    for number in range(20):
        rig.engine().put(number)

    def now() -> float:
        # Time goes on, so that one step hears a few of the journals.
        rig.clock.seconds += 0.2
        return rig.clock.seconds

    config = replace(rig.config, sweep_seconds=1e6, max_bytes=100 * BLOCK_BYTES)
    sweeper = Sweeper(config, clock=lambda: rig.clock.ns, now=now)
    sweeper.open()
    pauses = [sweeper.step() for _ in range(100)]
    assert sweeper.is_idle
    assert pauses[0] == 0.0
    rig.clock.move(1e6)
    pauses = [sweeper.step() for _ in range(100)]
    assert (pauses[0], (rig.dir / "permit.json").exists()) == (0.0, True)
    assert sweeper.report.usage.blocks == 20


def test_above_the_high_mark_the_least_recently_used_goes_until_the_low_mark(rig: Rig, engine: Engine) -> None:
    engine.put(*range(10))
    engine.use(0)
    usage = rig.sweep(rig.sweeper(max_bytes=10 * BLOCK_BYTES, high_watermark=0.9, low_watermark=0.7))
    assert engine.there(range(10)) == [0, 4, 5, 6, 7, 8, 9]
    assert (usage.used_bytes, usage.evicted_blocks) == (7 * BLOCK_BYTES, 3)
    assert engine.check() == []


def test_a_used_prefix_stays_whose_engine_died_before_it_told_of_the_middle(rig: Rig) -> None:
    first, killed, last = rig.engine(), rig.engine(), rig.engine()
    first.put(0, lineage=Lineage(b"", 0))
    sweeper = rig.swept(max_bytes=10 * BLOCK_BYTES, high_watermark=0.9, low_watermark=0.5)
    for number in (1, 2, 3):
        killed.put(number, lineage=Lineage(key(number - 1).hash, number), is_telling=False)
    # The catalog knows the middle from the files, and the next walk is hours away.
    last.put(4, lineage=Lineage(key(3).hash, 4))
    last.put_chain(*range(5, 14))
    last.use(4)
    rig.sweep(sweeper)
    assert last.there(range(5)) == [0, 1, 2, 3, 4]
    assert sweeper.catalog.total.blocks == len(last.there(range(14))) < 14


@pytest.mark.parametrize("quota", [{"quotas": {"alice": 4 * BLOCK_BYTES}}, {"default_quota_bytes": 4 * BLOCK_BYTES}])
def test_a_quota_holds_for_its_tenant_and_not_for_other_blocks(rig: Rig, engine: Engine, quota: dict[str, Any]) -> None:
    engine.put(*range(10), tenant="alice")
    engine.put(*range(10))
    usage = rig.sweep(rig.sweeper(**quota, low_watermark=0.5))
    assert {tenant.tenant: tenant.blocks for tenant in usage.tenants} == {"alice": 2, "": 10}
    assert engine.there(range(10), "alice") == [8, 9]


def test_a_second_janitor_goes_on_from_what_the_first_one_saved(rig: Rig, engine: Engine) -> None:
    engine.put(*range(5))
    rig.swept().close()
    shutil.rmtree(engine.root / "blocks/040")
    second = rig.sweeper()
    second.step()
    assert (second.report.usage.blocks, second.report.usage.is_counted) == (5, True)


def test_a_janitor_that_was_away_for_longer_than_journals_live_counts_anew(rig: Rig, engine: Engine) -> None:
    engine.put(*range(5))
    rig.swept().close()
    engine.put(*range(5, 9))
    shutil.rmtree(engine.root / "journal")
    rig.clock.move(2 * DAY)
    assert rig.sweep(rig.sweeper()).blocks == 9


def test_a_saved_ledger_that_is_damaged_is_not_believed(rig: Rig) -> None:
    rig.engine().put(*range(5))
    rig.swept().close()
    flip(rig.dir / "janitor.catalog", -7)
    assert rig.sweep(rig.sweeper()).blocks == 5


def test_what_vanished_without_a_word_is_forgotten_by_the_next_walk(rig: Rig, engine: Engine) -> None:
    engine.put(*range(5))
    sweeper = rig.swept(verify_seconds=100.0)
    shutil.rmtree(engine.root / "blocks")
    (engine.root / "blocks").mkdir()
    rig.work(sweeper, 50)
    assert sweeper.report.usage.blocks == 0


def test_a_later_walk_lists_one_directory_at_a_time_and_gets_through(rig: Rig, engine: Engine) -> None:
    engine.put(1)
    for number in range(256):
        (engine.root / "blocks" / f"a{number:02x}").mkdir(parents=True, exist_ok=True)
    seen: list[bool] = []
    fs = HookedFs(lambda call, path: seen.append(call == "scandir" and "/blocks/" in path))
    sweeper = rig.swept(fs, verify_seconds=1000.0)
    listed = []
    for _ in range(1100):
        rig.clock.move(1)
        seen.clear()
        sweeper.step()
        listed.append(sum(seen))
    assert max(listed) == 1
    assert sum(listed) >= 256


def test_leftovers_go_when_they_are_old(rig: Rig, engine: Engine) -> None:
    emptied = rig.engine("cc")
    for each in (engine, emptied):
        each.put(1)
    # An earlier janitor knew the generation, and died before it removed the directory.
    rig.swept().close()
    shutil.rmtree(emptied.root)
    block = engine.root / "blocks/010"
    old, young = block / f".a.{'0' * 32}-partial", block / f".b.{'0' * 32}-partial"
    quarantined = engine.root / DAMAGED
    journal = engine.root / "journal" / f"{'1' * 32}.00000000.kvj"
    quarantined.parent.mkdir()
    ledger, generation = rig.dir / f".janitor.catalog.{'2' * 32}-partial", emptied.root
    generation.mkdir()
    for path in (old, young, quarantined, journal, ledger):
        path.write_bytes(b"123")
    for path in (old, quarantined, journal, ledger, generation):
        os.utime(path, ns=(rig.clock.ns, rig.clock.ns - int(30 * DAY * 1e9)))
    sweeper = rig.swept()
    there = [path.exists() for path in (old, young, quarantined, journal, ledger, generation)]
    assert there == [False, True, False, False, False, False]
    assert sweeper.report.tallies.removed_leftovers["partial"] == 3


def test_quarantined_files_count_and_do_not_outlive_the_time_to_live(rig: Rig) -> None:
    young = rig.engine().root / DAMAGED
    young.parent.mkdir()
    for path, age in ((young.with_name(young.name.replace("0", "1")), 2 * DAY), (young, DAY / 2)):
        path.write_bytes(b"123")
        os.utime(path, ns=(rig.clock.ns, rig.clock.ns - int(age * 1e9)))
    assert rig.sweep(rig.swept(ttl_seconds=DAY)).quarantined == 1
    assert [*young.parent.iterdir()] == [young]


def test_quarantined_files_count_once_while_those_of_a_tenant_cannot_be_listed(rig: Rig, engine: Engine) -> None:
    engine.put(1, tenant="bob")
    (engine.root / DAMAGED).parent.mkdir()
    (engine.root / DAMAGED).write_bytes(b"123")
    fs = Refusing("tenants/bob/quarantine")
    sweeper = rig.swept(fs)
    fs.calls = ("scandir",)
    rig.work(sweeper, 8, seconds=601)
    assert "tenants/bob" in sweeper.report.problems["tidy"]
    assert (sweeper.report.usage.quarantined, sweeper.report.quarantined_bytes) == (1, 3)


def damage(engine: Engine, *numbers: int) -> None:
    """Let an engine find damaged blocks that were written eight days ago, and tell of them."""
    engine.put(*numbers)
    for number in numbers:
        flip(path := engine.root / block_path(key(number)), -1)
        os.utime(path, ns=(engine.clock.ns, engine.clock.ns - int(8 * DAY * 1e9)))
        assert engine.store.get(key(number), memoryview(bytearray(PAYLOAD_BYTES))) is Fault.CHECKSUM
        engine.journal.append(Op.GONE, key(number), 0)
    engine.journal.flush()


def share(rig: Rig) -> int:
    return decode_permit((rig.dir / PERMIT_FILE).read_bytes()).bytes


def test_quarantined_files_count_at_once_and_leave_the_budget_to_blocks(rig: Rig, engine: Engine) -> None:
    sweeper = rig.swept(max_bytes=10 * BLOCK_BYTES, high_watermark=0.99, low_watermark=0.9)
    engine.put(*range(9))
    rig.work(sweeper, 1)
    for first in range(0, 36, 9):
        damage(engine, *range(first, first + 9))
        rig.work(sweeper, 3)
        for number in range(first + 9, first + 18):
            if share(rig) >= BLOCK_BYTES:
                engine.put(number)
            rig.work(sweeper, 1)
    assert sum(path.stat().st_size for path in rig.dir.rglob("*.kvb*")) <= 13 * BLOCK_BYTES
    rig.work(sweeper, 24, seconds=3590)
    assert min(sweeper.report.usage.blocks, share(rig)) > 0


def test_a_damaged_block_is_kept_for_a_week_from_when_it_was_found(rig: Rig, engine: Engine) -> None:
    damage(engine, 0)
    sweeper = rig.swept()
    for is_kept in (True, False):
        rig.clock.move(6 * DAY)
        rig.sweep(sweeper)
        assert any((engine.root / "quarantine").iterdir()) is is_kept


@pytest.mark.parametrize("quotas", [{}, {"ttl_seconds": DAY}, {"default_quota_bytes": 1000 * BLOCK_BYTES}])
def test_blocks_that_cannot_be_removed_keep_no_others(rig: Rig, engine: Engine, quotas: dict[str, Any]) -> None:
    rig.engine("bb").put(*range(1100), tenant="alice")
    rig.clock.move(2 * DAY)
    engine.put(*range(5000, 5900))
    fs = Refusing("/bb/tenants/alice/blocks", "unlink", number=errno.EACCES)
    sweeper = rig.sweeper(fs, max_bytes=1800 * BLOCK_BYTES, **quotas)
    rig.work(sweeper, 60)
    assert share(rig) > 0
    assert sweeper.report.usage.used_bytes <= 0.9 * 1800 * BLOCK_BYTES


def test_an_empty_tree_of_a_tenant_goes(rig: Rig, engine: Engine) -> None:
    engine.put(1, tenant="alice")
    (engine.root / "tenants/alice/blocks/010" / f"{key(1).hash.hex()}_g0.kvb").unlink()
    shutil.rmtree(engine.root / "journal")
    rig.clock.move(DAY)
    rig.sweep(rig.sweeper())
    assert not (engine.root / "tenants/alice").exists()


def abandon(engine: Engine, rig: Rig, numbers: range, size: int = BLOCK_BYTES) -> None:
    """Leave half-written blocks of writers that died just now."""
    for number in numbers:
        path = engine.root / partial_path(block_path(key(number)), new_token())
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(size))
        os.utime(path, ns=(rig.clock.ns, rig.clock.ns))


def test_a_half_written_file_goes_at_the_time_to_live_if_that_is_shorter(rig: Rig, engine: Engine) -> None:
    engine.put(1)
    sweeper = rig.swept(ttl_seconds=600.0, verify_seconds=60.0)
    abandon(engine, rig, range(5))
    rig.work(sweeper, 100)
    assert not list(engine.root.rglob("*-partial"))


def test_half_written_files_count_in_the_budget_and_go(rig: Rig, engine: Engine) -> None:
    engine.put(*range(20))
    sweeper = rig.swept(max_bytes=40 * BLOCK_BYTES, high_watermark=0.9, low_watermark=0.7)
    most = 0
    for hour in range(8):
        # An engine that crashes again and again leaves some each time.
        abandon(engine, rig, range(1000 + 10 * hour, 1010 + 10 * hour))
        rig.work(sweeper, 360)
        most = max(most, sum(path.stat().st_size for path in engine.root.rglob("*") if path.is_file()))
    assert most <= 40 * BLOCK_BYTES
    assert sweeper.report.tallies.removed_leftovers["partial"] >= 60


def test_a_half_written_file_that_becomes_a_block_counts_once(rig: Rig, engine: Engine) -> None:
    engine.put(*range(5))
    abandon(engine, rig, range(100, 110))
    sweeper = rig.swept(max_bytes=20 * BLOCK_BYTES, high_watermark=0.9, low_watermark=0.7)
    for path in engine.root.rglob("*-partial"):
        path.rename(path.with_name(path.name[1:].rpartition(".")[0]))
    engine.put(*range(5, 7))
    rig.work(sweeper, 800)
    assert (sweeper.report.usage.blocks, sweeper.report.tallies.evicted_blocks["budget"]) == (17, 0)


TOTAL_BLOCKS = 100


class Small(FileSystem):
    """A volume of a hundred blocks. Other users take some of them."""

    def __init__(self, volume: Path, others: int) -> None:
        self.volume, self.others = volume, others

    def statvfs(self, path: str) -> os.statvfs_result:
        free = max(0, TOTAL_BLOCKS - self.others - len(list(self.volume.rglob("*.kvb"))))
        return os.statvfs_result((BLOCK_BYTES, BLOCK_BYTES, TOTAL_BLOCKS, free, free, 0, 0, 0, 0, 255))


@pytest.mark.parametrize(
    "case",
    [(0, 0, 0, 10), (8, 0, 0, 10), (12, 0, 0, 8), (0, 0.12, 0, 8), (12, 0.02, 0, 8), (12, 0, 9, 9), (10**26, 0, 0, 0)],
)
def test_blocks_go_until_enough_is_free(rig: Rig, engine: Engine, case: tuple[float, ...]) -> None:
    free, fraction, least, left = case
    engine.put(*range(10))
    settings = {"min_free_bytes": free * BLOCK_BYTES, "min_free_fraction": fraction, "min_bytes": least * BLOCK_BYTES}
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


CURRENT, OLD, OLDER = "0123456789abcdef", "1111111111111111", "2222222222222222"
SIZE = 4096


class Volume:
    """A tier's directory with files of vLLM's tier in it."""

    def __init__(self, tier_dir: Path) -> None:
        self.dir = tier_dir
        self.seconds = 1000.0

    def store(self, number: int, *, age: float, generation: str = CURRENT, read: float | None = None) -> Path:
        name = f"{number:064x}"
        rank = self.dir / generation / "meta-llama_Llama_0123456789ab_r0"
        path = rank / name[-3:] / f"{name[-5:-3]}_g0" / f"{name}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * SIZE)
        now = time.time()
        os.utime(path, (now - (age if read is None else read), now - age))
        return path

    def config(self, **changes: Any) -> JanitorConfig:
        own = {"tier": "serving/llama", "tier_dir": str(self.dir), "current": CURRENT, "layout": VLLM_FS_LAYOUT}
        return JanitorConfig(**{**own, "sweep_seconds": 10.0, **changes})

    def sweeper(self, *, began_ago: float = 3600.0, **changes: Any) -> VllmFilesSweeper:
        parts = {name: changes.pop(name) for name in ("fs", "clock", "may_act", "ask_volume") if name in changes}
        sweeper = VllmFilesSweeper(self.config(**changes), now=lambda: self.seconds, **parts)
        sweeper.open()
        self.seconds += began_ago
        return sweeper

    def sweep(self, sweeper: VllmFilesSweeper) -> None:
        """Let it walk and remove once; no time goes by meanwhile."""
        self.seconds += 1000.0
        while sweeper.step() == 0:
            pass


@pytest.fixture
def volume(tmp_path: Path) -> Volume:
    directory = tmp_path / "serving.llama"
    directory.mkdir()
    return Volume(directory)


def test_what_lies_there_is_counted_by_generation_when_the_volume_answers(volume: Volume) -> None:
    assert isinstance(make_sweeper(volume.config(), lambda: True), VllmFilesSweeper)
    for number in range(3):
        volume.store(number, age=10)
    volume.store(7, age=20, generation=OLD)
    fs = Refusing("", "scandir", number=errno.EACCES)
    sweeper = volume.sweeper(fs=fs)
    sweeper.step()
    assert "Permission denied" in sweeper.report.problems["walk"]
    fs.calls = ()
    volume.sweep(sweeper)
    assert sweeper.report.problems == {}
    usage = sweeper.report.usage
    assert (usage.is_counted, usage.blocks, usage.used_bytes) == (True, 4, 4 * SIZE)
    assert [(each.digest, each.blocks) for each in usage.generations] == [(CURRENT, 3), (OLD, 1)]
    assert usage.volume_bytes > usage.volume_free_bytes > 0


def test_the_least_recently_used_go_down_to_the_low_watermark(volume: Volume) -> None:
    files = [volume.store(number, age=1000 - number) for number in range(20)]
    # Written first of all, and read a moment ago.
    files.append(volume.store(99, age=5000, read=1))
    sweeper = volume.sweeper(max_bytes=20 * SIZE, high_watermark=0.9, low_watermark=0.5)
    volume.sweep(sweeper)
    assert [path for path in files if path.exists()] == files[-10:]
    assert sweeper.report.tallies.evicted_blocks == {"budget": 11}
    assert sweeper.report.usage.used_bytes == 10 * SIZE


def test_what_is_too_old_goes_however_often_it_is_read(volume: Volume) -> None:
    old, young = volume.store(1, age=7200, read=1), volume.store(2, age=60)
    volume.sweep(volume.sweeper(ttl_seconds=3600.0, may_act=lambda: False))
    assert old.exists()
    volume.sweep(volume.sweeper(ttl_seconds=3600.0))
    assert (old.exists(), young.exists()) == (False, True)


def test_a_generation_that_nobody_keeps_goes_with_its_directories_once_it_is_idle(volume: Volume) -> None:
    volume.store(1, age=10)
    volume.store(2, age=4000, generation=OLD)
    volume.store(3, age=9000, generation=OLDER)
    used = volume.store(4, age=30, generation="3" * 16)
    (volume.dir / "notes").mkdir()
    volume.store(5, age=9000, generation="copied-by-hand")
    sweeper = volume.sweeper(keep_previous=2, generation_idle_seconds=3600.0)
    volume.sweep(sweeper)
    assert not list((volume.dir / OLDER).rglob("*"))
    assert list((volume.dir / OLD).rglob("*.bin"))
    assert (volume.dir / "notes").is_dir()
    volume.sweep(volume.sweeper(keep_previous=0, generation_idle_seconds=3600.0))
    assert (used.exists(), list((volume.dir / OLD).rglob("*"))) == (True, [])
    # Earlier generations go before the current one, and another budget is followed at once.
    sweeper.configure(volume.config(max_bytes=2 * SIZE, high_watermark=0.9, low_watermark=0.5))
    while sweeper.step() == 0:
        pass
    assert sorted(path.parents[3].name for path in volume.dir.rglob("*.bin")) == [CURRENT, "copied-by-hand"]


def test_a_clock_that_jumped_before_the_janitor_began_makes_nothing_old(volume: Volume) -> None:
    files = [volume.store(1, age=60), volume.store(2, age=60, generation=OLD)]
    ahead = {"ask_volume": lambda: time.time_ns() + int(7200e9), "keep_previous": 0}
    sweeper = volume.sweeper(began_ago=0.0, ttl_seconds=7000.0, **ahead)
    volume.sweep(sweeper)
    assert [path.exists() for path in files] == [True, True]
    assert "ttl" in sweeper.report.problems


def test_only_what_vllm_names_so_is_touched(volume: Volume) -> None:
    block = volume.store(1, age=10_000)
    strange = [block.with_name("notes.txt"), block.with_name("abc.bin"), block.parents[1] / "x.bin"]
    config = volume.dir / CURRENT / "meta-llama_Llama_0123456789ab" / "config.json"
    config.parent.mkdir(parents=True)
    partial = block.with_name(f"{block.name}_123.tmp")
    for path in (*strange, config, partial):
        path.write_text("x")
        os.utime(path, (0, 0))
    outside = volume.dir.parent / "outside.bin"
    outside.write_text("x")
    link = block.with_name(f"{5:064x}.bin")
    link.symlink_to(outside)
    volume.sweep(volume.sweeper(ttl_seconds=60.0))
    assert not block.exists()
    assert not partial.exists()
    assert all(path.exists() for path in (*strange, config, outside))
    assert link.is_symlink()


def test_a_file_that_was_written_anew_since_it_was_chosen_stays(volume: Volume) -> None:
    path = volume.store(1, age=1000)
    looks = itertools.count(1)

    def write(call: str, path: str) -> None:
        if call == "stat" and path.endswith(".bin") and next(looks) == 2:
            os.utime(path)

    sweeper = volume.sweeper(max_bytes=SIZE // 2 + 1, fs=HookedFs(write))
    volume.sweep(sweeper)
    assert (path.exists(), sweeper.report.tallies.spared_blocks) == (True, 1)


@pytest.mark.parametrize("ahead_seconds", [25 * 3600.0, -25 * 3600.0])
def test_the_time_of_the_host_makes_nothing_old(volume: Volume, ahead_seconds: float) -> None:
    young, old = volume.store(1, age=3600), volume.store(2, age=30 * 3600)
    partial = young.with_name(f"{young.name}_123.tmp")
    partial.write_bytes(b"x")
    clock = lambda: time.time_ns() + int(ahead_seconds * 1e9)  # noqa: E731 - one line
    sweeper = volume.sweeper(ttl_seconds=24 * 3600.0, clock=clock)
    volume.sweep(sweeper)
    assert (young.exists(), partial.exists(), old.exists()) == (True, True, False)
    assert sweeper.report.problems == {}
    assert sorted(path.name for path in volume.dir.iterdir()) == [CURRENT]


def test_files_that_cannot_be_removed_keep_no_others_from_going(volume: Volume) -> None:
    files = [volume.store(number, age=1000 - number) for number in range(20)]
    # As a directory of another owner is: more of the oldest than are to go.
    stuck = {path.name for path in files[:12]}
    denied = PermissionError(errno.EACCES, "Permission denied")
    fs = FailingFs(denied, lambda call, path: call == "unlink" and Path(path).name in stuck)
    sweeper = volume.sweeper(max_bytes=20 * SIZE, high_watermark=0.9, low_watermark=0.7, fs=fs)
    volume.sweep(sweeper)
    assert "Permission denied" in sweeper.report.problems["walk"]
    for _ in range(2):
        volume.sweep(sweeper)
    assert [path for path in files if path.exists()] == [*files[:12], *files[-2:]]
    assert sweeper.report.usage.used_bytes == 14 * SIZE
    volume.sweep(sweeper)
    assert sweeper.report.problems == {}  # nothing more is to go
