# SPDX-License-Identifier: Apache-2.0
"""A walk by another process finds what a walk here finds, and one that cannot be done there is done here."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pools import ROW_BYTES, children, key, payload

from kvtier_connector.contract.errors import StoreUnavailable
from kvtier_connector.io_workers.walker import WalkProcess
from kvtier_connector.store.blockstore import BlockStore
from kvtier_connector.store.header import HEADER_BYTES
from kvtier_connector.store.index import Presence
from kvtier_connector.store.layout import BlockKey, block_path
from kvtier_connector.store.shared import SharedStore
from kvtier_connector.store.walks import Batch, walk_here

BLOCKS, TURNS = 40, 50


@pytest.fixture
def others() -> set[int]:
    """The processes that other tests of this worker started, such as vLLM's, which go when Python does."""
    return set(children(os.getpid()))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    store = BlockStore(tmp_path)
    for number in range(BLOCKS):
        tenant = ("", "a", "b")[number % 3]
        store.put(BlockKey(key(number).hash, number % 2, tenant), memoryview(payload(number)))
    quarantine = tmp_path / "tenants" / "a" / "quarantine"
    quarantine.mkdir()
    (quarantine / "damaged").write_bytes(b"12345")
    return tmp_path


def total(batches: Iterator[Batch]) -> tuple[set[bytes], dict[str, int]]:
    names: set[bytes] = set()
    sizes: dict[str, int] = {}
    for batch in batches:
        names.update(batch.names[start : start + 15] for start in range(0, len(batch.names), 15))
        for tenant, size in batch.sizes.items():
            sizes[tenant] = sizes.get(tenant, 0) + size
    return names, sizes


def never() -> bool:
    return False


def test_another_process_finds_what_this_one_finds(root: Path, others: set[int]) -> None:
    found = total(WalkProcess(2)(root, may_write=False, is_stopped=never))
    assert found == total(walk_here(root, may_write=False))
    assert len(found[0]) == BLOCKS
    assert sum(found[1].values()) == BLOCKS * (HEADER_BYTES + ROW_BYTES) + 5
    assert set(children(os.getpid())) <= others


def test_a_store_whose_root_another_process_walks_knows_every_block_and_byte(root: Path) -> None:
    store = SharedStore(root, walk=WalkProcess(2))
    (root / block_path(BlockKey(key(0).hash, 0))).unlink()
    store.record_look_up(BlockKey(key(0).hash, 0), is_there=True)
    assert store.rescan()
    assert store.is_complete
    assert store.known_blocks == BLOCKS - 1
    assert store.state(BlockKey(key(4).hash, 0, "a")) is Presence.PRESENT
    assert store.usage_bytes() == (BLOCKS - 1) * (HEADER_BYTES + ROW_BYTES) + 5


def test_a_root_that_cannot_be_walked_is_unavailable_there_too(root: Path) -> None:
    (root / "blocks" / "file").write_bytes(b"")
    blocked = root / "x"
    blocked.mkdir()
    name = "n" * 255
    path = str(blocked)
    fd = os.open(path, os.O_RDONLY)
    for _ in range(20):
        os.mkdir(name, dir_fd=fd)
        below = os.open(name, os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
    os.close(fd)
    # No path is as long as these directories are deep.
    with pytest.raises(StoreUnavailable, match="cannot be walked"):
        total(WalkProcess(1)(root, may_write=False, is_stopped=never))


@pytest.fixture
def silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have walkers say nothing, as on a volume that hangs."""
    popen = subprocess.Popen

    def start_silent(_command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        return popen(["sleep", "600"], **options)

    monkeypatch.setattr(subprocess, "Popen", start_silent)


@pytest.mark.usefixtures("silence")
def test_a_walk_that_is_stopped_ends_its_process_and_forgets_nothing(root: Path, others: set[int]) -> None:
    store = SharedStore(root, walk=WalkProcess(1))
    store.record_look_up(key(77), is_there=True)
    seen: set[int] = set()

    def is_stopped() -> bool:
        seen.update(set(children(os.getpid())) - others)
        return bool(seen)

    assert not store.rescan(is_stopped=is_stopped)
    assert not store.is_complete
    assert store.state(key(77)) is Presence.PRESENT
    assert set(children(os.getpid())) <= others


def test_a_host_without_room_for_a_process_walks_itself(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - numbers
    monkeypatch.setattr(subprocess, "Popen", refuse)
    store = SharedStore(root, walk=WalkProcess(1))
    for _ in range(TURNS):
        assert store.rescan()
    assert store.known_blocks == BLOCKS
    # Other threads of this process may open some meanwhile; a leak would be one in each turn.
    assert len(os.listdir("/proc/self/fd")) - before < TURNS  # noqa: PTH208 - numbers


@pytest.mark.usefixtures("silence")
def test_a_walk_whose_process_is_killed_is_done_here_and_counts_nothing_twice(root: Path, others: set[int]) -> None:
    def kill_the_walker() -> bool:
        for process in set(children(os.getpid())) - others:
            os.kill(process, signal.SIGKILL)
        return False

    def walk(root: Path, *, may_write: bool, is_stopped: Callable[[], bool]) -> Iterator[Batch]:
        yield from walk_here(root, may_write=False)
        yield from WalkProcess(1)(root, may_write=may_write, is_stopped=is_stopped)

    store = SharedStore(root, walk=walk)
    assert store.rescan(is_stopped=kill_the_walker)
    assert store.known_blocks == BLOCKS
    assert store.usage_bytes() == BLOCKS * (HEADER_BYTES + ROW_BYTES) + 5
