# SPDX-License-Identifier: Apache-2.0
"""The block store on the file systems at hand, when the volume fails, and when a directory is another model's."""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml
from checks import check
from plain_engine import PlainEngine
from store_contract import (
    BLOCK_BYTES,
    NOW_NS,
    BlockStoreContract,
    key,
    pages,
    payload,
    read,
    stream,
    whole_file,
    write_block,
)
from store_faults import KINDS, TOO_DEEP, FailingFs, HookedFs, NthCallFails, ShortFs, WatchedFs, plant

from kvtier_connector.contract.errors import IdentityMismatch, StoreUnavailable
from kvtier_connector.io_workers.worker import WorkerFileSystem
from kvtier_connector.store import identity as identities
from kvtier_connector.store.blockstore import BlockStore, Hit, Miss, Stored, StoreFault
from kvtier_connector.store.fs import FileSystem
from kvtier_connector.store.header import HEADER_BYTES, Fault
from kvtier_connector.store.identity import RootClaim, RootState, claim
from kvtier_connector.store.layout import PURGES_FILE, QUARANTINE, TIER_FILE, block_path

CONNECTOR = Path(sys.modules["kvtier_connector.store.blockstore"].__file__ or "").parents[2]
KIT = Path(__file__).parents[2] / "kit"


class TestStoreThatAsksTheVolume(BlockStoreContract):
    """O_DIRECT if the temporary directory takes it."""


class TestStoreThroughThePageCache(BlockStoreContract):
    @pytest.fixture
    def direct(self) -> bool | None:
        return False


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="there is no writable /dev/shm")
class TestStoreInMemory(BlockStoreContract):
    @pytest.fixture
    def base(self) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
            yield Path(directory)


class TestStoreOfAWorkerInMemory(TestStoreInMemory):
    """Workers map files that lie in memory."""

    def make(self, root: Path, direct: bool | None) -> BlockStore:
        return BlockStore(root, fs=WorkerFileSystem(), direct=direct, clock=lambda: NOW_NS)


class TestStoreWhoseTransfersStopAtPages(BlockStoreContract):
    """The count that the system reports ends inside a page; O_DIRECT cannot continue there."""

    def make(self, root: Path, direct: bool | None) -> BlockStore:
        return BlockStore(root, fs=ShortFs(3 * 4096, unreported=100), direct=direct, clock=lambda: NOW_NS)


class TestStoreWhoseTransfersStopAnywhere(TestStoreThroughThePageCache):
    def make(self, root: Path, direct: bool | None) -> BlockStore:
        return BlockStore(root, fs=ShortFs(3001), direct=direct, clock=lambda: NOW_NS)


TABLES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
REFUSALS = [(name, fault) for fault, names in TABLES["refusals"].items() for name in names]


@pytest.mark.parametrize(("name", "fault"), REFUSALS)
@pytest.mark.parametrize("call", ["mkdir", "open", "pwritev", "close", "rename"])
def test_a_refused_write_is_a_value_and_leaves_nothing(root: Path, call: str, name: str, fault: str) -> None:
    number = getattr(errno, name)
    fs = FailingFs(OSError(number, os.strerror(number)), when=lambda called, _: called == call)
    assert BlockStore(root, fs=fs, direct=False).put(key(1), payload(1)) is StoreFault[fault]
    assert not [path for path in root.rglob("*") if path.is_file() and path.name not in {"tier.json", PURGES_FILE}]
    assert BlockStore(root).put(key(1), payload(1)) == Stored(BLOCK_BYTES)


@pytest.mark.parametrize("call", ["open", "preadv"])
def test_a_volume_that_refuses_a_read_is_a_value_and_keeps_the_file(root: Path, call: str) -> None:
    BlockStore(root).put(key(1), payload(1))
    fs = FailingFs(OSError(errno.EIO, "broken"), when=lambda name, path: name == call)
    assert BlockStore(root, fs=fs, direct=False).get(key(1), pages()) is Fault.IO
    assert BlockStore(root).get(key(1), pages()) == Hit(BLOCK_BYTES)


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ENODATA])
@pytest.mark.parametrize("call", ["open", "preadv"])
@pytest.mark.parametrize("direct", [False, None])
def test_a_block_that_another_node_removes_while_it_is_read_is_a_miss(
    root: Path, direct: bool | None, call: str, number: int
) -> None:
    BlockStore(root).put(key(1), payload(1))

    def is_removed(name: str, path: str | None) -> bool:
        if name == call:
            (root / block_path(key(1))).unlink(missing_ok=True)
        return name == call

    fs = FailingFs(OSError(number, os.strerror(number)), when=is_removed)
    assert BlockStore(root, fs=fs, direct=direct).get(key(1), pages()) == Miss()


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError(), OSError(errno.EIO, "broken")])
def test_an_exception_at_any_step_of_put_leaves_no_partial_file(root: Path, error: BaseException) -> None:
    for step in itertools.count():
        shutil.rmtree(root / "blocks", ignore_errors=True)
        fs = NthCallFails(step, error)
        store = BlockStore(root, fs=fs)
        try:
            store.put(key(1), payload(1))
        except type(error):
            assert not isinstance(error, OSError)
        # The failing call may be the removal itself: then the file stays for the janitor.
        leftovers = list(root.rglob("*-partial"))
        for path in leftovers:
            path.unlink()
        assert len(leftovers) <= 1
        assert not leftovers or fs.failed_call == "unlink"
        assert check(root, partial_age_seconds=0) == []
        if not fs.has_failed:
            break
    assert step > 5


def test_a_write_that_the_system_takes_nothing_of_is_a_fault(root: Path) -> None:
    class TakesNothing(FileSystem):
        def pwritev(self, fd: int, buffers: object, offset: int) -> int:
            return 0

    assert BlockStore(root, fs=TakesNothing()).put(key(1), payload(1)) is StoreFault.IO


@pytest.mark.parametrize("moment", ["stat", "rename"])
def test_a_good_block_that_replaces_a_damaged_one_before_or_after_the_look_at_it_stays(root: Path, moment: str) -> None:
    path = root / block_path(key(1))
    BlockStore(root).put(key(1), payload(1))
    path.write_bytes(b"damaged")

    def replace(call: str, path: str) -> None:
        if call == moment and not path.endswith("-partial") and QUARANTINE not in path:
            BlockStore(root).put(key(1), payload(1))

    assert BlockStore(root, fs=HookedFs(replace)).get(key(1), pages()) is Fault.TRUNCATED
    assert BlockStore(root).get(key(1), pages()) == Hit(BLOCK_BYTES)
    assert not list(root.glob(f"{QUARANTINE}/*"))


@pytest.mark.parametrize(
    ("number", "calls", "is_removed"),
    [(errno.ENOSPC, {"rename", "mkdir"}, True), (errno.EROFS, {"rename", "mkdir", "unlink"}, False)],
)
def test_damaged_blocks_that_cannot_move_are_gone(root: Path, number: int, calls: set[str], is_removed: bool) -> None:
    BlockStore(root).put(key(1), payload(1))
    path = root / block_path(key(1))
    path.write_bytes(b"damaged")
    fs = FailingFs(OSError(number, os.strerror(number)), when=lambda name, path: name in calls)
    store = BlockStore(root, fs=fs, direct=False)
    again = Miss() if is_removed else Fault.TRUNCATED
    assert [store.get(key(1), pages()) for _ in range(2)] == [Fault.TRUNCATED, again]
    path.unlink(missing_ok=True)


def test_no_descriptor_below_the_root_stays_open(root: Path) -> None:
    store = PlainEngine(root)
    for number in range(3):
        assert store.put(key(number), payload(number)) == Stored(BLOCK_BYTES)
        assert store.get(key(number), pages()) == Hit(BLOCK_BYTES)
    (root / block_path(key(0))).write_bytes(b"damaged")
    assert store.get(key(0), pages()) is Fault.TRUNCATED
    store.tell()
    links = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]  # noqa: PTH115 - of a link that may be gone
    assert [link for link in links if link.startswith(str(root))] == []
    for path in (root / QUARANTINE).iterdir():
        path.unlink()


def test_reading_makes_no_directories(tmp_path: Path) -> None:
    store = BlockStore(tmp_path / "nothing")
    assert store.get(key(1), pages()) == Miss()
    assert store.look_up(key(1)) is False
    assert list(tmp_path.iterdir()) == []


def test_the_volume_is_asked_for_direct_io_once(root: Path) -> None:
    asked: list[str] = []
    store = BlockStore(root, fs=HookedFs(lambda call, path: asked.append(f"{call} {path}")))
    for number in range(3):
        store.put(key(number), payload(number))
        store.get(key(number), pages())
    assert sum(each.startswith("open ") and "direct-io" in each for each in asked) == 1


def test_a_volume_without_direct_io_is_used_through_the_page_cache(root: Path) -> None:
    class NoDirectIo(FileSystem):
        def open(self, path: str, flags: int) -> int:
            if flags & os.O_DIRECT:
                raise OSError(errno.EINVAL, "no O_DIRECT here")
            return super().open(path, flags)

    store = BlockStore(root, fs=NoDirectIo())
    assert store.put(key(1), payload(1)) == Stored(BLOCK_BYTES)
    assert store.get(key(1), pages()) == Hit(BLOCK_BYTES)


@pytest.mark.parametrize("size", [HEADER_BYTES, BLOCK_BYTES - 1, BLOCK_BYTES + 1])
def test_a_file_of_the_wrong_size_is_not_present_whatever_its_header_says(root: Path, size: int) -> None:
    write_block(root, key(1), (whole_file(key(1), payload(1)) + b"more")[:size])
    store = BlockStore(root)
    assert store.put(key(1), payload(1)) == Stored(BLOCK_BYTES)
    assert store.get(key(1), pages()) == Hit(BLOCK_BYTES)


def test_a_partial_file_that_was_cleaned_away_is_written_again(root: Path) -> None:
    cleaned: list[str] = []

    def clean(call: str, path: str) -> None:
        if call == "rename" and not cleaned:
            cleaned.append(path)
            Path(path).unlink()

    store = BlockStore(root, fs=HookedFs(clean))
    assert store.put(key(1), payload(1)) == Stored(BLOCK_BYTES)
    assert store.get(key(1), pages()) == Hit(BLOCK_BYTES)


def start_writer(root: Path, turns: int) -> subprocess.Popen[str]:
    paths = [str(CONNECTOR), str(Path(__file__).parent), str(KIT)]
    command = [sys.executable, "-c", TABLES["WRITER"], str(root), str(turns), *paths]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    return process


def test_processes_that_put_get_and_delete_the_same_blocks_see_whole_blocks_only(root: Path) -> None:
    processes = [start_writer(root, 300) for _ in range(3)]
    assert [process.communicate("go\n", timeout=250)[0] for process in processes] == ["done\n"] * 3
    assert [process.returncode for process in processes] == [0, 0, 0]


@pytest.mark.parametrize("umask", ["000", "022", "077", "777"])
def test_modes_do_not_depend_on_the_umask(tmp_path: Path, umask: str) -> None:
    subprocess.run([sys.executable, "-c", TABLES["PUTS"], str(tmp_path / "root"), umask], check=True)
    paths = [path for path in (tmp_path / "root").rglob("*") if path.name != PURGES_FILE]
    assert len(paths) == 5
    assert stat.S_IMODE((tmp_path / "root" / PURGES_FILE).stat().st_mode) == 0o660
    for path in paths:
        assert stat.S_IMODE(path.stat().st_mode) == (0o2770 if path.is_dir() else 0o640), path


@pytest.mark.parametrize("is_read_first", [False, True])
@pytest.mark.parametrize("direct", [False, None])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_file_under_a_blocks_name_is_a_fault_once_and_is_replaced_by_a_block(
    root: Path, kind: str, *, direct: bool | None, is_read_first: bool
) -> None:
    plant(kind, root / block_path(key(1)))
    store = BlockStore(root, direct=direct)
    assert store.look_up(key(1)) is False
    if is_read_first:
        assert [store.get(key(1), pages()) for _ in range(2)] == [Fault.MAGIC, Miss()]
    assert store.put(key(1), payload(1)) == Stored(BLOCK_BYTES)
    assert store.get(key(1), pages()) == Hit(BLOCK_BYTES)


class StaleFs(WatchedFs):
    """So many calls of one kind say that the file was replaced on the server."""

    def __init__(self, call: str, times: int) -> None:
        self.call, self.left = call, times

    def before(self, call: str, path: str | None) -> None:
        # Other files than blocks and journals are opened, too.
        if call == self.call and self.left and (call != "open" or ".kv" in path):
            self.left -= 1
            raise OSError(errno.ESTALE, "Stale file handle")


@pytest.mark.parametrize("call", ["open", "preadv"])
def test_a_file_that_was_replaced_on_the_server_is_opened_again(root: Path, call: str) -> None:
    BlockStore(root).put(key(1), payload(1))
    assert read(BlockStore(root, fs=StaleFs(call, 1)), key(1)) == (Hit(BLOCK_BYTES), bytes(payload(1)))
    assert stream(BlockStore(root, fs=StaleFs(call, 1), direct=False), key(1)) == (Hit(BLOCK_BYTES), bytes(payload(1)))


@pytest.mark.parametrize("call", ["open", "preadv"])
def test_a_file_that_stays_stale_is_a_volume_that_fails(root: Path, call: str) -> None:
    BlockStore(root).put(key(1), payload(1))
    fs = StaleFs(call, 100)
    assert BlockStore(root, fs=fs, direct=False).get(key(1), pages()) is Fault.IO
    # It is asked for once more, and not for ever.
    assert fs.left == 98


@pytest.mark.parametrize("call", ["open", "pwritev", "close", "rename"])
def test_a_write_into_what_was_replaced_on_the_server_is_made_again(root: Path, call: str) -> None:
    engine = PlainEngine(root, fs=(fs := StaleFs(call, 0)), direct=False)
    assert engine.put(key(1), payload(1)) == Stored(BLOCK_BYTES)
    assert engine.tell() == ""
    for write in (lambda: engine.put(key(9), payload(9)) == Stored(BLOCK_BYTES), lambda: engine.tell() == ""):
        fs.call, fs.left = "pwritev" if call == "rename" and engine.journal.pending else call, 1
        assert write()
        assert not fs.left
    assert engine.get(key(9), pages()) == Hit(BLOCK_BYTES)
    assert list(root.rglob("*-partial")) == []


IDENTITY = {"model": "llama", "dtype": "bfloat16", "groups": [[1, 2], [3]]}


def test_the_first_claim_makes_directory_and_file_and_another_changes_nothing(tmp_path: Path) -> None:
    root = tmp_path / "a" / "b" / "d1gest"
    claim(root, IDENTITY, "d1gest")
    assert json.loads((root / TIER_FILE).read_text()) == {"digest": "d1gest", "format": 4, "identity": IDENTITY}
    assert [path.name for path in root.iterdir()] == [TIER_FILE]
    assert check(root, partial_age_seconds=0) == []
    before = (root / TIER_FILE).stat()
    claim(root, {"groups": ((1, 2), (3,)), "dtype": "bfloat16", "model": "llama"}, "d1gest")
    after = (root / TIER_FILE).stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


class HalfMadeFs(WatchedFs):
    """Another client is making the directory: for some calls it is there, and nothing can be made in it."""

    def __init__(self, calls: int, of: str) -> None:
        self.left, self.of = calls, of

    def before(self, call: str, path: str | None) -> None:
        # The first look finds no description yet.
        if call == self.of and path is not None and not path.endswith(TIER_FILE) and "d1gest" in path and self.left:
            self.left -= 1
            raise FileNotFoundError(errno.ENOENT, "no such directory", path)


@pytest.mark.parametrize("call", ["mkdir", "open", "link"])
def test_a_directory_that_another_client_is_making_is_waited_for_but_not_for_ever(tmp_path: Path, call: str) -> None:
    claim(tmp_path / "a" / "d1gest", IDENTITY, "d1gest", fs=HalfMadeFs(4, call))
    assert (tmp_path / "a" / "d1gest" / TIER_FILE).exists()
    with pytest.raises(StoreUnavailable, match="cannot be claimed"):
        claim(tmp_path / "b" / "d1gest", IDENTITY, "d1gest", fs=HalfMadeFs(1000, call))


@pytest.mark.parametrize(("changes", "digest", "expected"), TABLES["strangers"])
def test_strangers_are_refused_by_reason(tmp_path: Path, changes: dict[str, Any], digest: str, expected: str) -> None:
    identity = {name: value for name, value in {**IDENTITY, **changes}.items() if value is not None}
    claim(tmp_path, IDENTITY, "d1gest")
    before = (tmp_path / TIER_FILE).read_bytes()
    with pytest.raises(
        IdentityMismatch, match=rf"^{tmp_path}/tier.json: .*{expected}.*volume.path.*remove the directory"
    ):
        claim(tmp_path, identity, digest)
    assert (tmp_path / TIER_FILE).read_bytes() == before


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", "{}", '{"identity": 1}', "\xff", TOO_DEEP.decode()),
        json.dumps({"digest": "d1gest", "format": 5, "identity": IDENTITY}),
    ],
)
def test_a_damaged_file_and_one_of_another_format_are_refused_and_kept(tmp_path: Path, text: str) -> None:
    (tmp_path / TIER_FILE).write_bytes(text.encode("latin-1"))
    with pytest.raises(IdentityMismatch, match="format is 5 there and 4 here" if "5" in text else "restore the file"):
        claim(tmp_path, IDENTITY, "d1gest")
    assert (tmp_path / TIER_FILE).read_bytes() == text.encode("latin-1")
    assert [problem.kind for problem in check(tmp_path)] == ["identity"]


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC, errno.EACCES, errno.EIO])
@pytest.mark.parametrize("call", ["mkdir", "open", "pwritev", "fsync", "close", "link"])
def test_a_volume_that_fails_is_unavailable_and_says_why(tmp_path: Path, call: str, number: int) -> None:
    root = tmp_path / "d1gest"
    # Without the directory the first open is a plain "no such file": let only later ones fail.
    error = OSError(number, "as the system says")
    fs = FailingFs(error, when=lambda name, path: name == call and (name != "open" or "partial" in str(path)))
    if call == "close":
        fs = FailingFs(error, when=lambda name, path: name == call)
    with pytest.raises(StoreUnavailable, match="as the system says") as caught:
        claim(root, IDENTITY, "d1gest", fs=fs)
    assert caught.value.__cause__ is error
    assert not root.exists() or list(root.iterdir()) == []
    claim(root, IDENTITY, "d1gest")


@pytest.mark.parametrize("number", [errno.ESTALE, errno.ENODATA])
@pytest.mark.parametrize("call", ["mkdir", "open"])
def test_what_clients_of_glusterfs_refuse_in_a_race_is_tried_again(tmp_path: Path, call: str, number: int) -> None:
    tries = itertools.count()
    where = {"mkdir": "a", "open": "partial"}[call]
    fs = FailingFs(OSError(number, "raced"), lambda name, at: name == call and where in at and next(tries) < 3)
    claim(tmp_path / "a", IDENTITY, "d1gest", fs=fs)


@pytest.mark.parametrize("call", ["preadv", "stat"])
def test_a_volume_that_cannot_be_looked_at_says_nothing_of_a_claim(tmp_path: Path, call: str) -> None:
    claim(tmp_path, IDENTITY, "d1gest")
    fs = FailingFs(OSError(errno.ESTALE, "it fails"), when=lambda name, path: name == call)
    ours = RootClaim(tmp_path, IDENTITY, "d1gest", fs=fs)
    with pytest.raises(StoreUnavailable, match="it fails"):
        ours.look(may_write=True) if call == "stat" else ours.renew()


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_volume_without_hard_links_can_be_claimed(tmp_path: Path, number: int) -> None:
    root = tmp_path / "d1gest"
    fs = FailingFs(OSError(number, "no links"), when=lambda name, path: name == "link")
    claim(root, IDENTITY, "d1gest", fs=fs)
    claim(root, IDENTITY, "d1gest", fs=fs)
    assert check(root, partial_age_seconds=0) == []


def test_who_comes_second_by_a_hair_keeps_the_first_ones_file(tmp_path: Path) -> None:
    fs = HookedFs(lambda call, _: call == "link" and claim(tmp_path, {"model": "faster"}, "d1gest"))
    with pytest.raises(IdentityMismatch, match="'faster'"):
        claim(tmp_path, {"model": "slower"}, "d1gest", fs=fs)
    assert [path.name for path in tmp_path.iterdir()] == [TIER_FILE]


def test_many_threads_and_processes_may_claim_at_once(tmp_path: Path) -> None:
    root = tmp_path / "d1gest"
    program = (
        "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[2]); "
        "from kvtier_connector.store.identity import claim; claim(Path(sys.argv[1]), {'model': 'test'}, 'd1gest')"
    )
    processes = [subprocess.Popen([sys.executable, "-c", program, str(root), str(CONNECTOR)]) for _ in range(3)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: claim(root, {"model": "test"}, "d1gest"), range(16)))
    assert [process.wait(timeout=60) for process in processes] == [0, 0, 0]
    assert [path.name for path in root.iterdir()] == [TIER_FILE]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_file_in_the_place_of_a_description_makes_it_unusable(tmp_path: Path, kind: str) -> None:
    plant(kind, tmp_path / TIER_FILE)
    with pytest.raises(StoreUnavailable, match="cannot be claimed"):
        claim(tmp_path, IDENTITY, "d1gest")


def test_a_claim_is_renewed_where_the_description_is_another_or_is_gone(tmp_path: Path) -> None:
    root = tmp_path / "d1gest"
    ours = RootClaim(root, IDENTITY, "d1gest")
    ours.renew()
    assert ours.look(may_write=True) is RootState.SAME
    (root / TIER_FILE).unlink()
    assert ours.look(may_write=False) is RootState.GONE
    assert ours.look(may_write=True) is RootState.OTHER
    ours.renew()
    assert identities.read(root) is not None
    assert ours.look(may_write=True) is RootState.SAME
    shutil.rmtree(root)
    # Nothing is left that another user could take for a file of theirs.
    assert ours.look(may_write=True) is RootState.GONE
    claim(root, {**IDENTITY, "dtype": "float16"}, "d1gest")
    assert ours.look(may_write=False) is RootState.OTHER
    with pytest.raises(IdentityMismatch, match="dtype"):
        ours.renew()


def test_a_description_that_has_another_file_number_but_was_not_written_is_no_news(tmp_path: Path) -> None:
    ours = RootClaim(tmp_path, IDENTITY, "d1gest")
    assert ours.renew()
    # Longer ago than any volume's clock is coarse.
    os.utime(tmp_path / TIER_FILE, (1, 1))
    assert ours.renew()
    shutil.copy2(tmp_path / TIER_FILE, tmp_path / "copy")
    (tmp_path / "copy").rename(tmp_path / TIER_FILE)
    assert ours.look(may_write=True) is RootState.OTHER
    assert not ours.renew()
    assert ours.look(may_write=True) is RootState.SAME
    (tmp_path / TIER_FILE).unlink()
    assert ours.renew()
