# SPDX-License-Identifier: Apache-2.0
"""How many calls on the volume a block costs: on a network file system each is a round trip."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path

import pytest
from store_contract import BLOCK_BYTES, key, pages, payload, remove, writes
from store_faults import NotingFs

from kvtier_connector.store.blockstore import BlockStore, Hit, Present, Stored
from kvtier_connector.store.fs import ALIGNMENT, FileSystem
from kvtier_connector.store.header import HEADER_BYTES
from kvtier_connector.store.identity import RootClaim, RootState, claim
from kvtier_connector.store.layout import BlockKey
from kvtier_connector.store.mounts import Mount


def hashed(number: int) -> BlockKey:
    """Return a key whose directory is that of the number: three hexadecimal digits."""
    return BlockKey(bytes.fromhex(f"{number:03x}".ljust(64, "0")), 0)


@pytest.fixture
def fs() -> NotingFs:
    return NotingFs()


@pytest.fixture
def store(tmp_path: Path, fs: NotingFs) -> BlockStore:
    claim(tmp_path, {}, "d1gest")
    return BlockStore(tmp_path, fs=fs, direct=False)


LOOK = ["open", "fstat", "close"]
"""At the mark of purges, before the rename."""


def test_a_store_of_a_block_costs_eight_calls(tmp_path: Path, store: BlockStore, fs: NotingFs) -> None:
    # Its directories are there now.
    assert store.put(key(1), payload(1)) == Stored(BLOCK_BYTES)
    remove(tmp_path, key(1))
    fs.calls.clear()
    assert store.put(key(1), payload(1)) == Stored(BLOCK_BYTES)
    assert fs.calls == ["open", "open", *writes(tmp_path), "close", *LOOK, "rename"]


def test_the_first_block_of_a_directory_costs_what_makes_the_directory_and_no_more(
    tmp_path: Path, store: BlockStore, fs: NotingFs
) -> None:
    assert store.put(key(1), payload(1)) == Stored(BLOCK_BYTES)
    # In vain, and once more; the mark is looked for, made, and looked at.
    made = ["open", *["open", "close"], *LOOK]
    assert fs.calls == ["open", "open", *["mkdir"] * 3, "open", *writes(tmp_path), "close", *made, "rename"]
    for number, made in ((0x220, ["open", "mkdir"]), (0x220, [])):
        remove(tmp_path, hashed(number))
        fs.calls.clear()
        assert store.put(hashed(number), payload(1)) == Stored(BLOCK_BYTES)
        assert fs.calls == ["open", *made, "open", *writes(tmp_path), "close", *LOOK, "rename"]


def test_on_moosefs_a_block_is_as_long_as_it_will_be_before_the_rest_of_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[tuple[int, int]] = []

    class Noting(FileSystem):
        def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            written.append((offset, sum(buffer.nbytes for buffer in buffers)))
            return super().pwritev(fd, buffers, offset)

    monkeypatch.setattr("kvtier_connector.store.reading.mount_of", lambda _: Mount("fuse", "mfs#10.0.0.1:9421", {}))
    claim(tmp_path, {}, "d1gest")
    store = BlockStore(tmp_path, fs=Noting(), direct=False)
    for number, length in enumerate((ALIGNMENT, ALIGNMENT + 1, 3 * ALIGNMENT, 3 * ALIGNMENT + 5)):
        data = os.urandom(length)
        written.clear()
        assert isinstance(store.put(key(number), memoryview(data)), Stored)
        end = HEADER_BYTES + length
        assert written[-1] == (0, end)
        assert written[:-1] == ([(offset, end - offset)] if (offset := (end - 1) & -ALIGNMENT) > HEADER_BYTES else [])
        into = memoryview(bytearray(length))
        assert store.get(key(number), into) == Hit(end)
        assert into == data


def test_directories_belong_to_their_group_below_one_that_was_copied_without_its_mode(tmp_path: Path) -> None:
    blocks = tmp_path / "blocks"
    before = os.umask(0o007)
    try:
        blocks.mkdir()
        store = BlockStore(tmp_path, direct=False)
        for number in (0x111, 0x222, 0x333):
            assert store.put(hashed(number), payload(1)) == Stored(BLOCK_BYTES)
    finally:
        os.umask(before)
    assert {stat.S_IMODE(each.stat().st_mode) for each in blocks.rglob("*") if each.is_dir()} == {0o2770}


def test_a_load_of_a_block_costs_four_calls(store: BlockStore, fs: NotingFs) -> None:
    store.put(key(1), payload(1))
    fs.calls.clear()
    assert store.get(key(1), pages()) == Hit(BLOCK_BYTES)
    assert fs.calls == ["open", "preadv", "fstat", "close"]


def test_a_block_that_is_there_costs_four_calls_and_no_write(store: BlockStore, fs: NotingFs) -> None:
    store.put(key(1), payload(1))
    fs.calls.clear()
    assert store.put(key(1), payload(1)) == Present()
    assert fs.calls == ["open", "fstat", "preadv", "close"]


def test_looking_after_a_claim_costs_one_call(tmp_path: Path, fs: NotingFs) -> None:
    ours = RootClaim(tmp_path, {}, "d1gest", fs=fs)
    ours.renew()
    fs.calls.clear()
    assert ours.look(may_write=True) is RootState.SAME
    assert fs.calls == ["stat"]
