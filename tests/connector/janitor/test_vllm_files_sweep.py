# SPDX-License-Identifier: Apache-2.0
"""The janitor of vLLM's own fs tier: real files, laid out as vLLM's FileMapper names them."""

from __future__ import annotations

import errno
import itertools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from store_faults import FailingFs, HookedFs
from tier_dir import Refusing

from kvtier_connector.contract.janitor import VLLM_FS_LAYOUT, JanitorConfig
from kvtier_connector.janitor.loop import make_sweeper
from kvtier_connector.janitor.vllm_files import VllmFilesSweeper
from kvtier_connector.store.fs import LOCAL, FileSystem

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
        settings = {
            "tier": "serving/llama",
            "tier_dir": str(self.dir),
            "current": CURRENT,
            "layout": VLLM_FS_LAYOUT,
            "sweep_seconds": 10.0,
            **changes,
        }
        return JanitorConfig(**settings)

    def sweeper(
        self,
        *,
        fs: FileSystem = LOCAL,
        clock: Callable[[], int] = time.time_ns,
        may_act: Callable[[], bool] = lambda: True,
        **changes: Any,
    ) -> VllmFilesSweeper:
        sweeper = VllmFilesSweeper(
            self.config(**changes), fs=fs, clock=clock, now=lambda: self.seconds, may_act=may_act
        )
        sweeper.open()
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
    left = [path for path in files if path.exists()]
    assert left == files[-10:]
    assert sweeper.report.tallies.evicted_blocks == {"budget": 11}
    assert sweeper.report.usage.used_bytes == 10 * SIZE


def test_what_is_too_old_goes_however_often_it_is_read(volume: Volume) -> None:
    old, young = volume.store(1, age=7200, read=1), volume.store(2, age=60)
    volume.sweep(volume.sweeper(ttl_seconds=3600.0, may_act=lambda: False))
    assert old.exists()
    sweeper = volume.sweeper(ttl_seconds=3600.0)
    volume.sweep(sweeper)
    assert (old.exists(), young.exists()) == (False, True)


def test_a_generation_that_nobody_keeps_goes_with_its_directories_once_it_is_idle(volume: Volume) -> None:
    volume.store(1, age=10)
    volume.store(2, age=4000, generation=OLD)
    volume.store(3, age=9000, generation=OLDER)
    used = volume.store(4, age=30, generation="3" * 16)
    (volume.dir / "notes").mkdir()
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
    assert [path.parents[3].name for path in volume.dir.rglob("*.bin")] == [CURRENT]


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
    sweeper = volume.sweeper(ttl_seconds=60.0)
    volume.sweep(sweeper)
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
