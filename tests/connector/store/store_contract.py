# SPDX-License-Identifier: Apache-2.0
"""What every block store promises. A new store derives a test class from `BlockStoreContract` and gives it fixtures."""

from __future__ import annotations

import mmap
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from checks import check

from kvtier_connector.store.blockstore import BlockStore, Hit, Miss, Present, Stored
from kvtier_connector.store.header import HEADER_BYTES, Fault, Header, checksum, decode_header, encode_header
from kvtier_connector.store.identity import claim
from kvtier_connector.store.layout import QUARANTINE, BlockKey, Home, block_path
from kvtier_connector.store.mounts import mount_of

PAYLOAD_BYTES = 64 * 1024
BLOCK_BYTES = HEADER_BYTES + PAYLOAD_BYTES
NOW_NS = 1_750_000_000 * 10**9
HOME = Home("d1gest")
K1, K2 = bytes(range(32)), bytes(range(100, 132))
"""Keys of blocks, which the fixture `keys_dir` has as files."""


def key(number: int, group: int = 0) -> BlockKey:
    return BlockKey(number.to_bytes(4, "little") + bytes(range(28)), group)


def pages(content: bytes = b"", size: int = PAYLOAD_BYTES) -> memoryview:
    """Return page-aligned memory that begins with the content."""
    view = memoryview(mmap.mmap(-1, size))
    view[: len(content)] = content
    return view


def payload(number: int, size: int = PAYLOAD_BYTES) -> memoryview:
    line = number.to_bytes(8, "little")
    return pages((line * (size // len(line) + 1))[:size], size)


def whole_file(of: BlockKey, data: memoryview, home: Home = HOME) -> bytes:
    """Return the bytes of a sound block file, without the store's help."""
    return encode_header(Header(of, data.nbytes, checksum(data), NOW_NS, home)) + bytes(data)


def stream(store: BlockStore, of: BlockKey, size: int = PAYLOAD_BYTES) -> tuple[object, bytes]:
    """Return the outcome of a read, and the bytes that were handed on."""
    taken = bytearray(size)

    def take(offset: int, piece: memoryview) -> bool:
        taken[offset : offset + piece.nbytes] = piece
        return True

    return store.stream(of, pages(size=size), take), bytes(taken)


def read(store: BlockStore, of: BlockKey, size: int = PAYLOAD_BYTES) -> tuple[object, bytes]:
    """Return the outcome of a read into page-aligned memory, and what is there then."""
    into = pages(size=size)
    return store.get(of, into), bytes(into)


def write_block(root: Path, of: BlockKey, content: bytes) -> Path:
    """Write a file under the name of a block, whatever it holds."""
    path = root / block_path(of)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def remove(root: Path, of: BlockKey) -> None:
    (root / block_path(of)).unlink(missing_ok=True)


def header_of(root: Path, of: BlockKey) -> Header:
    header = decode_header((root / block_path(of)).read_bytes())
    assert isinstance(header, Header)
    return header


class BlockStoreContract:
    """Every test ends with a check of the whole root that finds nothing."""

    @pytest.fixture
    def base(self, tmp_path: Path) -> Path | Iterator[Path]:
        """Return where the root's parent is; override to use another file system."""
        return tmp_path

    @pytest.fixture
    def direct(self) -> bool | None:
        return None

    @pytest.fixture
    def root(self, base: Path) -> Iterator[Path]:
        root = base / "tier" / "d1gest"
        claim(root, {"model": "test"}, "d1gest")
        yield root
        assert check(root, partial_age_seconds=0) == []

    @pytest.fixture
    def store(self, root: Path, direct: bool | None) -> BlockStore:
        return self.make(root, direct)

    def make(self, root: Path, direct: bool | None) -> BlockStore:
        return BlockStore(root, direct=direct, clock=lambda: NOW_NS)

    damage = Fault.CHECKSUM

    def whole_file(self, of: BlockKey, data: memoryview) -> bytes:
        """Return the bytes of a file that the store reads, without the store's help."""
        return whole_file(of, data)

    def test_a_block_that_was_put_is_read_back(self, store: BlockStore) -> None:
        assert store.put(key(1), payload(1)) == Stored(BLOCK_BYTES)
        assert read(store, key(1)) == (Hit(BLOCK_BYTES), bytes(payload(1)))

    def test_the_file_is_the_header_and_the_payload_and_nothing_else(self, root: Path, store: BlockStore) -> None:
        store.put(key(1), payload(1))
        assert (root / block_path(key(1))).read_bytes() == self.whole_file(key(1), payload(1))

    def test_a_file_that_another_process_wrote_is_read(self, root: Path, store: BlockStore) -> None:
        write_block(root, key(1), self.whole_file(key(1), payload(1)))
        assert read(store, key(1)) == (Hit(BLOCK_BYTES), bytes(payload(1)))

    def test_groups_of_one_hash_are_different_blocks(self, store: BlockStore) -> None:
        store.put(key(1, group=0), payload(10))
        store.put(key(1, group=1), payload(11))
        assert [read(store, key(1, group=group))[1] for group in (0, 1)] == [payload(10), payload(11)]

    def test_a_block_that_is_there_is_not_written_again(self, root: Path, store: BlockStore) -> None:
        store.put(key(1), payload(1))
        inode = (root / block_path(key(1))).stat().st_ino
        assert store.put(key(1), payload(1)) == Present()
        assert (root / block_path(key(1))).stat().st_ino == inode

    @pytest.mark.parametrize("size", [1, 511, 4095, 4096, 4097, 100_000, (3 << 20) + 4096])
    def test_any_payload_length_and_any_memory_works(self, store: BlockStore, size: int) -> None:
        data = bytes(index % 251 for index in range(size))
        unaligned = memoryview(bytearray(size + 1))[1:]
        assert store.put(key(1), memoryview(data)) == Stored(HEADER_BYTES + size)
        assert store.get(key(1), unaligned) == Hit(HEADER_BYTES + size)
        assert unaligned == data
        assert stream(store, key(1), size) == (Hit(HEADER_BYTES + size), data)

    def test_memory_of_another_shape_is_taken_as_bytes(self, store: BlockStore) -> None:
        assert store.put(key(1), payload(1).cast("b", (16, PAYLOAD_BYTES // 16))) == Stored(BLOCK_BYTES)
        into = pages()
        assert store.get(key(1), into.cast("b", (16, PAYLOAD_BYTES // 16))) == Hit(BLOCK_BYTES)
        assert into == payload(1)

    def test_empty_and_read_only_memory_is_refused(self, store: BlockStore) -> None:
        with pytest.raises(ValueError, match="empty"):
            store.put(key(1), memoryview(b""))
        with pytest.raises(ValueError, match="empty"):
            store.get(key(1), memoryview(bytearray()))
        with pytest.raises(ValueError, match="writable"):
            store.get(key(1), memoryview(b"x"))

    def test_a_look_up_answers_by_name(self, root: Path, store: BlockStore) -> None:
        store.put(key(1), payload(1))
        assert (store.look_up(key(1)), store.look_up(key(2))) == (True, False)
        remove(root, key(1))
        assert store.look_up(key(1)) is False
        assert store.get(key(1), pages()) == Miss()

    def test_a_tree_removed_under_the_store_is_made_again(self, root: Path, store: BlockStore) -> None:
        store.put(key(1), payload(1))
        shutil.rmtree(root)
        assert store.get(key(1), pages()) == Miss()
        assert store.put(key(1), payload(1)) == Stored(BLOCK_BYTES)
        claim(root, {"model": "test"}, "d1gest")

    def test_a_block_of_another_length_is_a_fault_and_is_replaced_by_put(self, root: Path, store: BlockStore) -> None:
        write_block(root, key(1), self.whole_file(key(1), payload(1, 4096)))
        assert store.get(key(1), pages()) is Fault.LENGTH
        assert (root / block_path(key(1))).exists()
        assert store.put(key(1), payload(1)) == Stored(BLOCK_BYTES)
        assert store.get(key(1), pages()) == Hit(BLOCK_BYTES)

    def test_a_damaged_block_is_moved_away_once_and_can_be_written_again(self, root: Path, store: BlockStore) -> None:
        content = bytearray(self.whole_file(key(1), payload(1)))
        content[-1] ^= 1
        write_block(root, key(1), bytes(content))
        assert store.get(key(1), pages()) is self.damage
        assert store.get(key(1), pages()) == Miss()
        assert store.put(key(1), payload(1)) == Stored(BLOCK_BYTES)
        moved = list((root / QUARANTINE).iterdir())
        assert [path.read_bytes() for path in moved] == [bytes(content)]
        moved[0].unlink()

    def test_threads_on_the_same_blocks_see_whole_blocks_only(self, root: Path, store: BlockStore) -> None:
        def work(thread: int) -> set[object]:
            into = pages()
            seen: set[object] = set()
            for turn in range(120):
                number = (thread * 7 + turn) % 4
                store.put(key(number), payload(number))
                outcome = store.get(key(number), into)
                assert not isinstance(outcome, Hit) or into == payload(number)
                seen.add(outcome)
                if turn % 11 == 0:
                    remove(root, key(number))
            return seen

        with ThreadPoolExecutor(8) as pool:
            seen = set[object]().union(*pool.map(work, range(8)))
        assert seen <= {Hit(BLOCK_BYTES), Miss()}
        assert Hit(BLOCK_BYTES) in seen


def writes(root: Path) -> list[str]:
    """Return the calls that write a file of several pages there."""
    return ["pwritev"] * (2 if mount_of(str(root)).is_end_written_first else 1)
