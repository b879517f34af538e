# SPDX-License-Identifier: Apache-2.0
"""What an engine knows when the volume fails, others crash and clocks jump; and what it counts."""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from shared_engine import Counting, engine
from store_contract import BLOCK_BYTES, NOW_NS, PAYLOAD_BYTES, key, pages, payload
from store_faults import CrashingFs, FailingFs

from kvtier_connector.contract.errors import StoreUnavailable
from kvtier_connector.store.blockstore import Hit, Miss, Present, Stored
from kvtier_connector.store.fsck import check
from kvtier_connector.store.header import Fault
from kvtier_connector.store.identity import claim
from kvtier_connector.store.index import Presence
from kvtier_connector.store.layout import QUARANTINE, block_path, partial_path
from kvtier_connector.store.scan import list_journals
from kvtier_connector.store.shared import SharedStore

PRESENT, ABSENT, UNKNOWN = Presence.PRESENT, Presence.ABSENT, Presence.UNKNOWN
TOKEN = "0123456789abcdef" * 2


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    root = tmp_path / "d1gest"
    claim(root, {}, "d1gest")
    yield root
    shutil.rmtree(root / QUARANTINE, ignore_errors=True)
    assert check(root, partial_age_seconds=0) == []


def test_a_volume_that_does_not_answer_a_probe_leaves_the_keys_unknown(root: Path) -> None:
    fs = FailingFs(OSError(errno.EIO, "broken"), when=lambda call, path: call == "stat")
    store = SharedStore(root, fs=fs)
    assert store.probe([key(1)]) is Fault.IO
    assert store.state(key(1)) is UNKNOWN


def test_without_news_of_the_others_unknown_blocks_are_asked_for(root: Path) -> None:
    broken: list[bool] = []
    fs = FailingFs(
        OSError(errno.EIO, "broken"),
        when=lambda call, path: bool(broken) and "journal" in str(path) and call == "scandir",
    )
    store = engine(root, fs)
    broken.append(True)
    assert "broken" in store.synchronize().problem
    assert store.state(key(1)) is UNKNOWN
    broken.clear()
    assert store.synchronize().problem == ""
    assert store.state(key(1)) is ABSENT


def test_nothing_is_written_where_nothing_may_be(root: Path) -> None:
    writer = engine(root)
    writer.put(key(1), payload(1))
    fs = Counting()
    store = SharedStore(root, fs=fs, direct=False)
    store.synchronize(may_write=False)
    store.rescan(may_write=False)
    assert store.get(key(1), pages()) == Hit(BLOCK_BYTES)
    store.note_used(key(1), PAYLOAD_BYTES)
    assert store.synchronize(may_write=False).written == 0
    assert not {"pwritev", "rename", "unlink", "mkdir"} & set(fs.calls)
    assert store.synchronize().written == 1


def test_a_read_only_volume_is_reported_and_the_others_are_still_read(root: Path) -> None:
    fs = FailingFs(OSError(errno.EROFS, "read-only"), when=lambda call, path: call == "open" and "journal" in str(path))
    failing = [True]
    fs = FailingFs(OSError(errno.EROFS, "read-only"), when=lambda call, path: bool(failing) and call == "pwritev")
    store, other = engine(root, fs), engine(root)
    other.put(key(1), payload(1))
    other.put(key(2), payload(2))
    other.synchronize()
    assert store.synchronize().read == 2
    store.note_used(key(1), PAYLOAD_BYTES)
    outcome = store.synchronize()
    assert "read-only" in outcome.problem
    failing.clear()
    assert store.synchronize().written == 1


def test_a_walk_removes_what_crashed_engines_left_behind(root: Path) -> None:
    dead = engine(root)
    dead.put(key(1), payload(1))
    dead.synchronize()
    (journal,) = list_journals(root)
    old, young = root / partial_path(block_path(key(1)), TOKEN), root / partial_path("direct-io", TOKEN)
    for path in (old, young):
        path.write_bytes(b"half")
    day_ns = 25 * 3600 * 10**9
    for path in (old, root / journal[0]):
        os.utime(path, ns=(NOW_NS - day_ns, NOW_NS - day_ns))
    os.utime(young, ns=(NOW_NS, NOW_NS))
    store = SharedStore(root, clock=lambda: NOW_NS)
    store.rescan(may_write=False)
    assert old.exists()
    store.rescan()
    assert not old.exists()
    assert list_journals(root) == []
    assert young.exists()
    young.unlink()


def test_a_walk_can_be_stopped_and_forgets_nothing_then(root: Path) -> None:
    store = engine(root)
    for number in range(5):
        store.put(key(number), payload(number))
    asked: list[int] = []

    def is_stopped() -> bool:
        asked.append(1)
        return len(asked) > 2

    assert not store.rescan(is_stopped=is_stopped)
    assert store.known_blocks == 5
    assert store.usage_bytes() == 5 * BLOCK_BYTES


def test_a_root_that_cannot_be_walked_is_unavailable_and_nothing_is_forgotten(root: Path) -> None:
    failing: list[bool] = []
    fs = FailingFs(OSError(errno.EIO, "broken"), when=lambda call, path: bool(failing) and call == "scandir")
    store = engine(root, fs)
    store.put(key(1), payload(1))
    failing.append(True)
    with pytest.raises(StoreUnavailable, match="broken"):
        store.rescan()
    assert store.state(key(1)) is PRESENT


def test_a_directory_that_is_deleted_under_an_engine_costs_misses_and_is_made_again(root: Path) -> None:
    store = engine(root)
    for number in range(3):
        store.put(key(number), payload(number))
    store.synchronize()
    shutil.rmtree(root)
    assert store.get(key(0), pages()) == Miss()
    assert store.synchronize().problem == ""
    store.rescan()
    assert store.known_blocks == 0
    assert store.usage_bytes() == 0
    assert store.put(key(0), payload(0)) == Stored(BLOCK_BYTES)
    assert store.synchronize().problem == ""
    claim(root, {}, "d1gest")


def test_a_crash_between_a_store_and_its_flush_is_mended_by_the_next_walk(root: Path) -> None:
    other, dying = engine(root), engine(root, CrashingFs(10**9))
    dying.put(key(1), payload(1))
    other.synchronize()
    assert other.state(key(1)) is ABSENT
    assert other.put(key(1), payload(1)) == Present()
    other.rescan()
    assert other.state(key(1)) is PRESENT


@pytest.mark.parametrize("jump_seconds", [-(10**6), 10**6])
def test_a_clock_that_jumps_changes_no_answer(root: Path, jump_seconds: int) -> None:
    seconds = [int(time.time())]
    store, other = (SharedStore(root, clock=lambda: seconds[0] * 10**9) for _ in range(2))
    for each in (store, other):
        each.synchronize()
        each.rescan()
    store.put(key(1), payload(1))
    store.synchronize()
    seconds[0] += jump_seconds
    store.put(key(2), payload(2))
    assert store.get(key(1), pages()) == Hit(BLOCK_BYTES)
    store.synchronize()
    other.synchronize()
    assert [other.state(key(number)) for number in (1, 2, 3)] == [PRESENT, PRESENT, ABSENT]
    store.rescan()
    other.rescan()
    assert [other.state(key(number)) for number in (1, 2, 3)] == [PRESENT, PRESENT, ABSENT]
    store.put(key(3), payload(3))
    store.synchronize()
    other.synchronize()
    assert other.state(key(3)) is PRESENT


@pytest.mark.parametrize("how", ["stored too", "read", "looked for"])
def test_a_block_that_is_met_before_its_writer_tells_of_it_counts_once(root: Path, how: str) -> None:
    one, other = engine(root), engine(root, max_bytes=100 * BLOCK_BYTES)
    one.put(key(1), payload(1))
    if how == "stored too":
        assert other.put(key(1), payload(1)) == Present()
    elif how == "read":
        assert other.get(key(1), pages()) == Hit(BLOCK_BYTES)
    else:
        other.record_look_up(key(1), is_there=True)
    one.synchronize()
    for _ in range(2):
        other.synchronize()
        assert other.usage_bytes() == BLOCK_BYTES
    one.delete(key(1), payload_bytes=PAYLOAD_BYTES)
    one.synchronize()
    other.synchronize()
    assert other.usage_bytes() == 0
