# SPDX-License-Identifier: Apache-2.0
"""Large blocks are read in pieces and verified on the way."""

from __future__ import annotations

from pathlib import Path

import pytest
from store_contract import key, pages, payload
from store_faults import WatchedFs

from kvtier_connector.io_workers.worker import WorkerFileSystem
from kvtier_connector.store.blockstore import BlockStore, Hit, Miss
from kvtier_connector.store.fs import LOCAL, DirectIo
from kvtier_connector.store.header import HEADER_BYTES, Fault
from kvtier_connector.store.layout import QUARANTINE, block_path
from kvtier_connector.store.reading import PIECE_BYTES

PIECES = 5
LARGE = PIECES * PIECE_BYTES - 4096


@pytest.mark.parametrize(("direct", "reads"), [(False, PIECES), (True, 1)])
def test_a_large_block_is_read_in_pieces_through_the_page_cache_only(root: Path, *, direct: bool, reads: int) -> None:
    if direct and not DirectIo(LOCAL, str(root), direct=None).is_supported():
        pytest.skip("the temporary directory does not take O_DIRECT")
    calls: list[str] = []

    class Listing(WatchedFs):
        def before(self, call: str, path: str | None) -> None:
            calls.append(call)

    store = BlockStore(root, fs=Listing(), direct=direct)
    store.put(key(1), payload(1, LARGE))
    calls.clear()
    into = pages(size=LARGE)
    assert store.get(key(1), into) == Hit(HEADER_BYTES + LARGE)
    assert into == payload(1, LARGE)
    assert calls == ["open", *["preadv"] * reads, "fstat", "close"]


@pytest.mark.parametrize("piece", range(PIECES))
@pytest.mark.parametrize("kind", ["flipped", "truncated"])
def test_damage_in_any_piece_of_a_large_block_is_noticed(root: Path, piece: int, kind: str) -> None:
    BlockStore(root).put(key(1), payload(1, LARGE))
    at = HEADER_BYTES + piece * PIECE_BYTES + 17
    with (root / block_path(key(1))).open("r+b") as file:
        if kind == "truncated":
            file.truncate(at)
        else:
            file.seek(at)
            file.write(b"?")
    outcome = BlockStore(root, direct=False).get(key(1), pages(size=LARGE))
    assert outcome is (Fault.TRUNCATED if kind == "truncated" else Fault.CHECKSUM)
    for path in (root / QUARANTINE).iterdir():
        path.unlink()


def test_a_block_whose_header_is_wrong_is_not_read_to_its_end(root: Path) -> None:
    BlockStore(root).put(key(1), payload(1, LARGE))
    with (root / block_path(key(1))).open("r+b") as file:
        file.write(b"what")
    reads: list[str] = []

    class Listing(WatchedFs):
        def before(self, call: str, path: str | None) -> None:
            if call == "preadv":
                reads.append(call)

    assert BlockStore(root, fs=Listing(), direct=False).get(key(1), pages(size=LARGE)) is Fault.MAGIC
    assert len(reads) == 1
    for path in (root / QUARANTINE).iterdir():
        path.unlink()


@pytest.mark.parametrize("appended", [1, 4096])
@pytest.mark.parametrize("way", ["get", "get direct", "stream", "stream mapped"])
def test_a_block_with_bytes_appended_is_a_fault_and_is_moved_away(tmp_path: Path, way: str, appended: int) -> None:
    fs = WorkerFileSystem() if way == "stream mapped" else LOCAL
    store = BlockStore(tmp_path, fs=fs, direct=None if way == "get direct" else False)
    store.put(key(1), payload(1))
    with (tmp_path / block_path(key(1))).open("ab") as file:
        file.write(bytes(appended))

    def read() -> object:
        if way.startswith("get"):
            return store.get(key(1), pages())
        return store.stream(key(1), pages(), lambda _offset, _piece: True)

    assert read() is Fault.TRAILING
    assert read() == Miss()
    assert [path.name.split(".")[2] for path in (tmp_path / QUARANTINE).iterdir()] == ["trailing"]
