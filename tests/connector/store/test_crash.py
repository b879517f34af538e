# SPDX-License-Identifier: Apache-2.0
"""A process that dies at any moment leaves the old block or the new one, and leftovers that can be removed."""

from __future__ import annotations

import itertools
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from checks import check
from planted import clear
from store_contract import BLOCK_BYTES, key, pages, payload, whole_file
from store_faults import CrashError, CrashingFs

from kvtier_connector.store.blockstore import BlockStore, Hit, Miss, Stored
from kvtier_connector.store.header import Fault
from kvtier_connector.store.identity import claim
from kvtier_connector.store.layout import block_path
from kvtier_connector.store.scan import Leftover, LeftoverKind, scan

CONNECTOR = Path(sys.modules["kvtier_connector.store.blockstore"].__file__ or "").parents[2]
KIT = Path(__file__).parents[2] / "kit"


def clean(root: Path) -> None:
    clear(root, LeftoverKind.PARTIAL, LeftoverKind.QUARANTINED)


@pytest.mark.parametrize("direct", [None, False])
@pytest.mark.parametrize("torn_bytes", [0, 1, 4096, 10_000])
@pytest.mark.parametrize("before", ["nothing", "a damaged block", "a block of another length"])
def test_a_crash_at_any_step_of_put_leaves_the_old_or_the_new_block(
    tmp_path: Path, before: str, torn_bytes: int, direct: bool | None
) -> None:
    calls: list[str] = []
    outcomes = set()
    for step in itertools.count():
        # given
        root = tmp_path / str(step) / "d1gest"
        claim(root, {}, "d1gest")
        if before != "nothing":
            path = root / block_path(key(1))
            path.parent.mkdir(parents=True)
            path.write_bytes(b"damaged" if before == "a damaged block" else whole_file(key(1), payload(9, 4096)))
        fs = CrashingFs(step, torn_bytes=torn_bytes)
        # when
        try:
            BlockStore(root, fs=fs, direct=direct).put(key(1), payload(1))
        except CrashError:
            assert fs.has_crashed
        # then
        reopened = BlockStore(root)
        into = pages()
        outcome = reopened.get(key(1), into)
        outcomes.add(outcome)
        assert not isinstance(outcome, Hit) or into == payload(1)
        clean(root)
        reopened.put(key(1), payload(1))
        assert reopened.get(key(1), into) == Hit(BLOCK_BYTES)
        assert check(root, partial_age_seconds=0) == []
        shutil.rmtree(root)
        if not fs.has_crashed:
            calls = fs.calls
            break
    assert {"open", "pwritev", "close", "rename"} <= set(calls)
    old = {"nothing": Miss(), "a damaged block": Fault.TRUNCATED, "a block of another length": Fault.LENGTH}[before]
    assert outcomes == {old, Hit(BLOCK_BYTES)}


def test_a_crash_at_any_step_of_get_loses_no_good_block_and_serves_no_bad_one(tmp_path: Path) -> None:
    for content in (whole_file(key(1), payload(1)), whole_file(key(1), payload(1))[:-1] + b"\xff"):
        is_good = content == whole_file(key(1), payload(1))
        for step in itertools.count():
            root = tmp_path / f"{is_good}{step}" / "d1gest"
            claim(root, {}, "d1gest")
            path = root / block_path(key(1))
            path.parent.mkdir(parents=True)
            path.write_bytes(content)
            fs = CrashingFs(step)
            try:
                BlockStore(root, fs=fs).get(key(1), pages())
            except CrashError:
                assert fs.has_crashed
            outcome = BlockStore(root).get(key(1), pages())
            assert outcome == Hit(BLOCK_BYTES) if is_good else outcome in {Fault.CHECKSUM, Miss()}
            clean(root)
            assert check(root, partial_age_seconds=0) == []
            if not fs.has_crashed:
                break


def test_a_crash_at_any_step_of_claim_leaves_a_directory_that_can_be_claimed(tmp_path: Path) -> None:
    identity = {"model": "test", "layers": [1, 2]}
    for step in itertools.count():
        root = tmp_path / str(step) / "d1gest"
        fs = CrashingFs(step, torn_bytes=5)
        try:
            claim(root, identity, "d1gest", fs=fs)
        except CrashError:
            assert fs.has_crashed
        claim(root, identity, "d1gest")
        clean(root)
        assert check(root, partial_age_seconds=0) == []
        if not fs.has_crashed:
            break
    assert step > 5


def test_a_process_killed_in_the_middle_of_a_write_leaves_a_partial_file(tmp_path: Path) -> None:
    """The same with certainty: the writer stops inside the write until it is killed."""
    root = tmp_path / "d1gest"
    claim(root, {}, "d1gest")
    stopped = """
import os, sys
from pathlib import Path
sys.path[:0] = sys.argv[2:]
from kvtier_connector.store.blockstore import BlockStore
from kvtier_connector.store.fs import FileSystem
from store_contract import key, payload
class Stops(FileSystem):
    def pwritev(self, fd, buffers, offset):
        os.pwrite(fd, bytes(buffers[0]), 0)
        print("written", flush=True)
        sys.stdin.read()
BlockStore(Path(sys.argv[1]), fs=Stops(), direct=False).put(key(1), payload(1))
"""
    with subprocess.Popen(
        [sys.executable, "-c", stopped, str(root), str(CONNECTOR), str(Path(__file__).parent), str(KIT)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout.readline() == "written\n"
        process.kill()
    assert [entry.kind for entry in scan(root, partial_age_seconds=0) if isinstance(entry, Leftover)] == [
        LeftoverKind.PARTIAL
    ]
    assert list(scan(root)) == []
    assert BlockStore(root).get(key(1), pages()) == Miss()
    assert BlockStore(root).put(key(1), payload(1)) == Stored(BLOCK_BYTES)
    assert len(clear(root, LeftoverKind.PARTIAL)) == 1
    assert check(root, partial_age_seconds=0) == []
