# SPDX-License-Identifier: Apache-2.0
"""Links and records that an attacker plants on the volume: nothing is removed for them, and the janitor goes on."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_faults import HookedFs, WatchedFs
from test_records import with_checksum
from tier_dir import BLOCK_BYTES, PAYLOAD_BYTES, Engine, Rig, key

from kvtier_connector.contract.errors import StoreUnavailable
from kvtier_connector.janitor.commands import purge_blocks
from kvtier_connector.janitor.sweep import Sweeper
from kvtier_connector.store import fs as fs_module
from kvtier_connector.store import journal
from kvtier_connector.store.fs import CREATE_FLAGS, LOCAL, FileSystem, make_directories, new_token
from kvtier_connector.store.journal import RECORD_BYTES, Op, Record, encode_head, encode_record
from kvtier_connector.store.layout import JournalName, Lineage, block_path, journal_path

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
def test_an_eviction_removes_nothing_through_a_late_link(rig: Rig, engine: Engine, tmp_path: Path, level: str) -> None:
    engine.put(1, tenant="alice")
    fs = Plants(engine, level, tmp_path / "outside")
    rig.clock.move(1.0)
    usage = rig.sweep(rig.sweeper(fs, quotas={"alice": BLOCK_BYTES // 2}))
    assert fs.precious.exists()
    assert usage.blocks == 0


@pytest.mark.parametrize("level", LEVELS)
def test_a_purge_removes_nothing_through_a_link(rig: Rig, engine: Engine, tmp_path: Path, level: str) -> None:
    engine.put(1, tenant="alice")
    fs = Plants(engine, level, tmp_path / "outside")
    purge_blocks(rig.dir, journal.Purge(), is_dry=False, fs=fs, threads=1)
    assert fs.precious.exists()


def test_nothing_is_removed_where_the_tier_is_a_link_which_is_said(rig: Rig, engine: Engine, tmp_path: Path) -> None:
    engine.put(*range(4))
    sweeper = rig.sweeper(max_bytes=2 * BLOCK_BYTES)
    rig.dir.rename(tmp_path / "elsewhere")
    rig.dir.symlink_to(tmp_path / "elsewhere")
    rig.work(sweeper, 3)
    assert engine.there(range(4)) == [0, 1, 2, 3]
    assert not sweeper.report.usage.is_counted
    assert any("is a link" in problem for problem in sweeper.report.usage.problems)


@pytest.mark.parametrize("path", ["{base}/../other/file", "{base}/a/../../other/file", "{base}/a/./file"])
def test_what_leads_up_again_is_refused(tmp_path: Path, path: str) -> None:
    base, other = tmp_path / "base", tmp_path / "other"
    for directory in (base / "a", other):
        directory.mkdir(parents=True)
        (directory / "file").touch()
    with pytest.raises(ValueError, match=r"must not have \. or \.\. below"):
        LOCAL.rooted(str(base / "a")).unlink(path.format(base=base))
    assert (other / "file").exists()


CALLS: dict[str, Callable[[FileSystem, str], object]] = {
    "open": lambda fs, path: fs.open(path, fs_module.READ_FLAGS),
    "create": lambda fs, path: fs.open(f"{path}2", CREATE_FLAGS),
    "stat": lambda fs, path: fs.stat(path),
    "touch": lambda fs, path: fs.touch(path),
    "rename": lambda fs, path: fs.rename(path, f"{path}2"),
    "rename out": lambda fs, path: fs.rename(path, f"{path.partition('/link')[0]}/file"),
    "rename in": lambda fs, path: fs.rename(f"{path.partition('/link')[0]}/own", path),
    "link": lambda fs, path: fs.link(path, f"{path}2"),
    "unlink": lambda fs, path: fs.unlink(path),
    "mkdir": lambda fs, path: fs.mkdir(f"{path}2"),
    "rmdir": lambda fs, path: fs.rmdir(f"{path.rpartition('/')[0]}/directory"),
    "scandir": lambda fs, path: fs.scandir(path.rpartition("/")[0]),
}


@pytest.fixture(params=["openat2", "step by step"])
def without_openat2(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "step by step":
        monkeypatch.setattr(fs_module, "_openat2", lambda: None)
    elif fs_module._openat2() is None:
        pytest.skip("this kernel has no openat2")


@pytest.mark.usefixtures("without_openat2")
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("below", ["", "/deep"])
def test_no_call_goes_through_a_link(tmp_path: Path, call: str, below: str) -> None:
    root, outside = tmp_path / "tier" / "aa", tmp_path / "outside"
    there = Path(f"{outside}{below}")
    for directory in (root, there / "directory"):
        directory.mkdir(parents=True)
    for file in (there / "file", root / "own"):
        file.write_bytes(b"x")
    (root / "link").symlink_to(outside)
    before = sorted((path, path.stat().st_mtime_ns) for path in outside.rglob("*"))
    with pytest.raises(NotADirectoryError) as raised:
        CALLS[call](LOCAL.rooted(str(root)), f"{root}/link{below}/file")
    assert str(root) in raised.value.filename
    assert sorted((path, path.stat().st_mtime_ns) for path in outside.rglob("*")) == before


@pytest.mark.usefixtures("without_openat2")
def test_all_calls_work_beneath_a_directory_that_is_reached_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "short").symlink_to(tmp_path / "real")
    root = f"{tmp_path}/short/tier/aa"
    fs = LOCAL.rooted(root)
    make_directories(fs, f"{root}/a/b")
    fs.mkdir(f"{root}/c")
    fs.close(fs.open(f"{root}/a/file", CREATE_FLAGS))
    fs.touch(f"{root}/a/file")
    fs.link(f"{root}/a/file", f"{root}/a/second")
    fs.rename(f"{root}/a/second", f"{root}/a/third")
    fs.rename(f"{root}/a/third", f"{root}/c/third")
    assert fs.stat(f"{root}/c/third").st_nlink == 2
    assert stat.S_IMODE(fs.stat(f"{root}/a/b").st_mode) == fs_module.DIRECTORY_MODE
    assert {(entry.name, entry.is_dir()) for entry in fs.scandir(f"{root}/a")} == {("file", False), ("b", True)}
    fs.unlink(f"{root}/c/third")
    fs.rmdir(f"{root}/c")
    assert sorted(path.name for path in (tmp_path / "real/tier/aa").iterdir()) == ["a"]


@pytest.mark.parametrize("planted", ["blocks/{first}", "blocks", "journal", "tenants"])
@pytest.mark.parametrize("owner", ["", "alice"])
def test_an_engine_writes_nothing_through_a_link(rig: Rig, tmp_path: Path, planted: str, owner: str) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    engine = rig.engine()
    link = engine.root / planted.format(first=key(1).hash.hex()[:3])
    link.parent.mkdir(parents=True, exist_ok=True)
    if link.is_dir():
        shutil.rmtree(link)
    link.symlink_to(outside)
    with contextlib.suppress(StoreUnavailable):  # of its journal
        rig.engine().put(1, tenant=owner)
    engine.store.get(key(1, owner), memoryview(bytearray(PAYLOAD_BYTES)))
    assert list(outside.iterdir()) == []


def test_an_engine_does_not_use_a_generation_that_is_a_link(rig: Rig, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    rig.dir.mkdir()
    (rig.dir / "aa").symlink_to(outside)
    with pytest.raises(StoreUnavailable, match="is a link; nothing is done"):
        rig.engine()
    assert list(outside.iterdir()) == []


def test_no_descriptor_stays_open(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "file").touch()
    fs = LOCAL.rooted(str(tmp_path / "a"))
    fs.unlink(f"{tmp_path}/a/file")
    for missing in ("a/file", "a/c/file", "a/b"):
        with pytest.raises(OSError, match=missing):
            fs.unlink(f"{tmp_path}/{missing}")
    fs.rmdir(f"{tmp_path}/a/b")
    held = [link.readlink() for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    assert [path for path in held if path.is_relative_to(tmp_path)] == []


BLOCKS = 20
LIMITS = {"max_bytes": 100 * BLOCK_BYTES, "high_watermark": 0.9, "low_watermark": 0.7}


def plant_records(engine: Engine, *records: bytes) -> None:
    writer = new_token()
    path = engine.root / journal_path(JournalName(writer, 0))
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(encode_head(writer, 1) + b"".join(records))


def raw(op: int, number: int, *, payload_bytes: int = PAYLOAD_BYTES, time_ns: int = 1, position: int = 0) -> bytes:
    """Return a record with any numbers and a right checksum."""
    fields = bytearray(encode_record(Record(op, key(number), 1, 1))[:-4])
    fields[8:16] = payload_bytes.to_bytes(8, "little")
    fields[16:24] = time_ns.to_bytes(8, "little")
    fields[24:28] = position.to_bytes(4, "little")
    return with_checksum(fields)


def sweep(rig: Rig, sweeper: Sweeper) -> None:
    for _ in range(8):
        rig.sweep(sweeper)


HOSTILE = {
    "a wrong length": [(Op.STORED, number, {"payload_bytes": 1 << 50}) for number in (0, BLOCKS)],
    "a negative length": [(Op.STORED, number, {"payload_bytes": 2**64 - 1}) for number in (0, BLOCKS)],
    "the longest length": [(Op.STORED, number, {"payload_bytes": journal.MAX_PAYLOAD_BYTES}) for number in (0, BLOCKS)],
    "blocks that are not there": [(Op.STORED, number, {}) for number in range(1000, 1500)],
    "blocks that are there as gone": [(Op.GONE, number, {"time_ns": 2**62}) for number in range(BLOCKS)],
}


@pytest.mark.parametrize("case", HOSTILE)
@pytest.mark.parametrize("is_restarted", [False, True])
def test_wrong_records_evict_and_count_nothing(rig: Rig, engine: Engine, case: str, *, is_restarted: bool) -> None:
    engine.put(*range(BLOCKS))
    sweeper = rig.swept(**LIMITS)
    plant_records(
        engine, *(raw(op, number, **{"time_ns": rig.clock.ns, **fields}) for op, number, fields in HOSTILE[case])
    )
    if is_restarted:
        sweeper = rig.sweeper(**LIMITS)
    sweep(rig, sweeper)
    assert engine.there(range(BLOCKS)) == list(range(BLOCKS))
    usage = sweeper.report.usage
    assert (usage.blocks, usage.used_bytes, usage.store_pause) == (BLOCKS, BLOCKS * BLOCK_BYTES, "")
    assert usage.problems == ()


def test_a_time_long_ago_makes_no_block_too_old(rig: Rig, engine: Engine) -> None:
    engine.put(*range(BLOCKS))
    sweeper = rig.sweeper(ttl_seconds=86_400.0)
    for _ in range(30):
        rig.clock.move(300)
        rig.sweep(sweeper)
    plant_records(engine, raw(Op.STORED, 0), raw(Op.STORED, BLOCKS, time_ns=0))
    engine.put(BLOCKS)
    sweep(rig, sweeper)
    assert engine.there(range(BLOCKS + 1)) == list(range(BLOCKS + 1))


def test_a_file_whose_length_is_wrong_in_the_ledger_removes_nothing_else(rig: Rig, engine: Engine) -> None:
    engine.put(*range(BLOCKS))
    sweeper = rig.swept(**LIMITS)
    sweeper.catalog.update(0, size=1 << 50, created_ns=rig.clock.ns)
    sweep(rig, sweeper)
    assert engine.there(range(BLOCKS)) == list(range(BLOCKS))
    assert sweeper.catalog.total.bytes == BLOCKS * BLOCK_BYTES


def counting(counted: Counter[str]) -> HookedFs:
    return HookedFs(lambda call, path: counted.update([call] * path.endswith(".kvb")))


def test_uses_of_blocks_that_do_not_exist_cost_one_look_each(rig: Rig) -> None:
    engine, fs = rig.engine(), counting(counted := Counter[str]())
    engine.put(0)
    sweeper = rig.swept(fs)
    plant_records(engine, *(raw(Op.USED, number, time_ns=rig.clock.ns) for number in range(1000, 3000)))
    counted.clear()
    for _ in range(3):
        sweep(rig, sweeper)
    assert counted["open"] == 2000
    assert sweeper.catalog.total.blocks == 1


@pytest.mark.parametrize(("low", "looks"), [(0.7, 1), (0.2, 2)])
def test_a_large_sweep_looks_at_every_file_anew(rig: Rig, low: float, looks: int) -> None:
    engine, fs = rig.engine(), counting(counted := Counter[str]())
    engine.put(*range(100))
    rig.swept(fs, **{**LIMITS, "low_watermark": low})
    left = len(engine.there(range(100)))
    assert left == int(100 * low)
    # Before anything is decided by what journals tell, and once more at each removal.
    assert counted["stat"] == 100 * looks + (100 - left)


numbers = st.one_of(st.integers(0, 2**64 - 1), st.sampled_from([0, 1, 2**31, 2**63 - 1, 2**63, 2**64 - 1, 1 << 50]))
hostile = st.builds(
    raw,
    st.integers(0, 255) | st.sampled_from(list(Op)),
    st.integers(0, BLOCKS + 5),
    payload_bytes=numbers,
    time_ns=numbers,
    position=st.integers(0, 2**32 - 1),
)
noise = st.binary(min_size=RECORD_BYTES - 4, max_size=RECORD_BYTES - 4).map(with_checksum)


@given(st.lists(hostile | noise, max_size=60), st.booleans())
@settings(max_examples=60, deadline=None)
def test_no_record_removes_a_block_or_ends_the_janitor(records: list[bytes], is_first: bool) -> None:
    with tempfile.TemporaryDirectory() as base:
        rig = Rig(Path(base))
        engine = rig.engine()
        parent = b""
        for number in range(BLOCKS):
            engine.put(number, lineage=Lineage(parent, number))
            parent = key(number).hash
        sweeper = rig.sweeper(**LIMITS, ttl_seconds=86_400.0, default_quota_bytes=1 << 20)
        if not is_first:
            rig.sweep(sweeper)
        plant_records(engine, *records)
        sweep(rig, sweeper)
        assert engine.there(range(BLOCKS)) == list(range(BLOCKS))
        assert sweeper.catalog.total.blocks >= BLOCKS
        engine.put(BLOCKS + 50)
        rig.sweep(sweeper)
        assert sweeper.catalog.find(sweeper.catalog.generation("aa"), key(BLOCKS + 50)) >= 0
