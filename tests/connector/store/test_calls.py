# SPDX-License-Identifier: Apache-2.0
"""How many calls on the volume a block costs, what a mount is called, and what is said of its options."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml
from store_contract import BLOCK_BYTES, key, pages, payload, read, remove, writes
from store_faults import NotingFs, ShortFs

from kvtier_connector.io_workers.worker import WorkerFileSystem
from kvtier_connector.store import reading
from kvtier_connector.store.blockstore import BlockStore, Hit, Miss, Outcome, Present, Stored
from kvtier_connector.store.fs import ALIGNMENT, LOCAL, DirectIo, FileSystem
from kvtier_connector.store.header import HEADER_BYTES, Fault
from kvtier_connector.store.identity import RootClaim, RootState, claim
from kvtier_connector.store.layout import BlockKey, block_path
from kvtier_connector.store.mounts import UNKNOWN, Mount, advice, mount_of
from kvtier_connector.store.reading import PIECE_BYTES

TABLES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())


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


def test_a_store_costs_eight_calls_a_load_four_and_a_block_that_is_there_four_and_no_write(
    tmp_path: Path, store: BlockStore, fs: NotingFs
) -> None:
    # Its directories are there now.
    assert store.put(key(1), payload(1)) == Stored(BLOCK_BYTES)
    remove(tmp_path, key(1))
    fs.calls.clear()
    assert store.put(key(1), payload(1)) == Stored(BLOCK_BYTES)
    assert fs.calls == ["open", "open", *writes(tmp_path), "close", *LOOK, "rename"]
    fs.calls.clear()
    assert store.get(key(1), pages()) == Hit(BLOCK_BYTES)
    assert fs.calls == ["open", "preadv", "fstat", "close"]
    fs.calls.clear()
    assert store.put(key(1), payload(1)) == Present()
    assert fs.calls == ["open", "fstat", "preadv", "close"]


def test_the_first_block_of_a_directory_costs_little_more(tmp_path: Path, store: BlockStore, fs: NotingFs) -> None:
    assert store.put(key(1), payload(1)) == Stored(BLOCK_BYTES)
    # In vain, and once more; the mark is looked for, made, and looked at.
    made = ["open", *["open", "close"], *LOOK]
    assert fs.calls == ["open", "open", *["mkdir"] * 3, "open", *writes(tmp_path), "close", *made, "rename"]
    for number, made in ((0x220, ["open", "mkdir"]), (0x220, [])):
        remove(tmp_path, hashed(number))
        fs.calls.clear()
        assert store.put(hashed(number), payload(1)) == Stored(BLOCK_BYTES)
        assert fs.calls == ["open", *made, "open", *writes(tmp_path), "close", *LOOK, "rename"]


def test_on_moosefs_a_block_has_its_length_before_its_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        for number in (0x111, 0x222, 0x333):
            assert BlockStore(tmp_path, direct=False).put(hashed(number), payload(1)) == Stored(BLOCK_BYTES)
    finally:
        os.umask(before)
    assert {stat.S_IMODE(each.stat().st_mode) for each in blocks.rglob("*") if each.is_dir()} == {0o2770}


def test_looking_after_a_claim_costs_one_call(tmp_path: Path, fs: NotingFs) -> None:
    ours = RootClaim(tmp_path, {}, "d1gest", fs=fs)
    ours.renew()
    fs.calls.clear()
    assert ours.look(may_write=True) is RootState.SAME
    assert fs.calls == ["stat"]


SIZE = 3 * PIECE_BYTES - 4096


class Taker:
    def __init__(self, *, most: int = 1 << 30) -> None:
        self.got = bytearray(SIZE)
        self.pieces = 0
        self._most = most

    def __call__(self, offset: int, piece: memoryview) -> bool:
        if self.pieces == self._most:
            return False
        self.pieces += 1
        self.got[offset : offset + piece.nbytes] = piece
        return True


def stream(root: Path, of: BlockKey, taker: Taker, *, fs: FileSystem = LOCAL, direct: bool = False) -> Outcome | None:
    return BlockStore(root, fs=fs, direct=direct).stream(of, pages(size=SIZE), taker)


@pytest.mark.parametrize(("direct", "reads"), [(False, 3), (True, 1)])
def test_large_blocks_are_read_in_pieces_through_page_cache_only(tmp_path: Path, *, direct: bool, reads: int) -> None:
    if direct and not DirectIo(LOCAL, str(tmp_path), direct=None).is_supported():
        pytest.skip("the temporary directory does not take O_DIRECT")
    fs = NotingFs()
    store = BlockStore(tmp_path, fs=fs, direct=direct)
    store.put(key(1), payload(1, SIZE))
    fs.calls.clear()
    taker = Taker()
    assert store.stream(key(1), pages(size=SIZE), taker) == Hit(HEADER_BYTES + SIZE)
    assert taker.got == payload(1, SIZE)
    assert fs.calls == ["open", *["preadv"] * reads, "fstat", "close"]


@pytest.mark.parametrize(
    "fs", [LOCAL, ShortFs(3001), ShortFs(300_000), WorkerFileSystem()], ids=["whole", "tiny", "short", "mapped"]
)
def test_the_pieces_make_up_the_block(tmp_path: Path, fs: FileSystem) -> None:
    BlockStore(tmp_path, direct=False).put(key(1), payload(1, SIZE))
    taker = Taker()
    assert isinstance(stream(tmp_path, key(1), taker, fs=fs), Hit)
    assert taker.got == payload(1, SIZE)


def test_whoever_takes_no_more_ends_the_read_and_the_block_stays(tmp_path: Path) -> None:
    BlockStore(tmp_path, direct=False).put(key(1), payload(1, SIZE))
    assert stream(tmp_path, key(1), Taker(most=1)) is None
    assert isinstance(stream(tmp_path, key(1), Taker()), Hit)


def test_a_block_of_another_key_or_length_is_refused_before_anything_is_taken(tmp_path: Path) -> None:
    store = BlockStore(tmp_path, direct=False)
    store.put(key(1), payload(1, SIZE))
    store.put(key(2), payload(2, SIZE + 4096))
    (tmp_path / block_path(key(3))).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / block_path(key(1))).rename(tmp_path / block_path(key(3)))
    taker = Taker()
    assert stream(tmp_path, key(3), taker) is Fault.KEY
    assert stream(tmp_path, key(2), taker) is Fault.LENGTH
    assert taker.pieces == 0


def test_a_block_whose_header_is_wrong_is_not_read_to_its_end(tmp_path: Path) -> None:
    BlockStore(tmp_path).put(key(1), payload(1, SIZE))
    with (tmp_path / block_path(key(1))).open("r+b") as file:
        file.write(b"what")
    fs = NotingFs()
    assert stream(tmp_path, key(1), Taker(), fs=fs) is Fault.MAGIC
    assert fs.calls.count("preadv") == 1


TABLE = TABLES["mounts"].replace("ODD", "\xa0\u2028\r")


@pytest.mark.parametrize(("path", "name"), TABLES["types"])
def test_a_file_system_is_called_by_its_name(path: str, name: str) -> None:
    assert mount_of(path, table=TABLE).name == name


def test_a_system_that_does_not_tell_has_an_unknown_file_system_and_this_one_tells() -> None:
    assert mount_of("/mnt", table="") == UNKNOWN
    assert advice(UNKNOWN) == []
    assert mount_of("/proc/self").type == "proc"


@pytest.mark.parametrize(("type_", "options", "words"), TABLES["options"])
def test_an_option_that_costs_speed_or_safety_is_named(type_: str, options: str, words: list[str]) -> None:
    found = advice(Mount(type_, "x", dict(part.partition("=")[::2] for part in options.split(","))))
    assert len(found) == len(words)
    assert all(word in sentence for word, sentence in zip(words, found, strict=True))


class NfsClient(FileSystem):
    """Says of a name that was looked for in vain that it is not there, until the directory above is opened."""

    def __init__(self) -> None:
        self._absent: set[Path] = set()
        self.opened = 0

    def open(self, path: str, flags: int) -> int:
        self.opened += 1
        for each in (*reversed(Path(path).parents), Path(path)):
            if each in self._absent:
                raise FileNotFoundError(errno.ENOENT, "as last time", path)
            if not each.exists() and not flags & os.O_CREAT:
                self._absent.add(each)
                raise FileNotFoundError(errno.ENOENT, "no such file", path)
        if Path(path).is_dir():
            self._absent = {each for each in self._absent if each.parent != Path(path)}
        return super().open(path, flags)


class FuseClient(FileSystem):
    """Opens the file that it has in mind, which the server has replaced, until it is asked anew about the name."""

    def __init__(self) -> None:
        self.is_stale = True

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if self.is_stale:
            raise OSError(errno.ESTALE, "stale")
        return super().preadv(fd, buffers, offset)

    def look_again(self, path: str) -> None:
        super().look_again(path)
        self.is_stale = False


def of_type(name: str) -> object:
    return lambda _: Mount(name, "server:/export", {})


@pytest.mark.parametrize("first", [(), (2,)], ids=["no directory yet", "another block in the directory"])
def test_a_block_that_was_looked_for_in_vain_is_read_once_another_node_has_stored_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: Sequence[int]
) -> None:
    monkeypatch.setattr(reading, "mount_of", of_type("nfs4"))
    reader, writer = BlockStore(tmp_path, fs=NfsClient()), BlockStore(tmp_path)
    for number in first:
        writer.put(key(number), payload(number))
    assert reader.get(key(1), pages()) == Miss()
    writer.put(key(1), payload(1))
    assert read(reader, key(1)) == (Hit(BLOCK_BYTES), bytes(payload(1)))


def test_a_miss_costs_one_call_where_names_come_from_no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    for kind in ("fuse.glusterfs", "nfs4"):
        monkeypatch.setattr(reading, "mount_of", of_type(kind))
        fs = NfsClient()
        assert BlockStore(tmp_path, fs=fs, direct=False).get(key(1), pages()) == Miss()
        counts.append(fs.opened)
    assert counts[0] == 1 < counts[1]


def test_a_file_that_was_replaced_on_the_server_is_asked_for_anew(tmp_path: Path) -> None:
    fs = FuseClient()
    BlockStore(tmp_path).put(key(1), payload(1))
    assert read(BlockStore(tmp_path, fs=fs, direct=False), key(1)) == (Hit(BLOCK_BYTES), bytes(payload(1)))


def test_to_look_again_changes_nothing_and_raises_nothing(tmp_path: Path) -> None:
    fs = FileSystem()
    BlockStore(tmp_path).put(key(1), payload(1))
    path = tmp_path / block_path(key(1))
    before = path.stat()
    fs.look_again(str(path))
    assert path.stat() == before
    fs.look_again(str(tmp_path / "nothing"))
