# SPDX-License-Identifier: Apache-2.0
"""Real movers over a small CPU tier, and what the tests ask of them."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import mmap
import os
from pathlib import Path

from mover_fs import GATE, WAITING
from waiting import until

from kvtier_connector.movers.dispatch import Dispatcher, DispatchSettings, Ended
from kvtier_connector.movers.region import find_region
from kvtier_connector.movers.tasks import Task
from kvtier_connector.store.blockstore import BlockStore
from kvtier_connector.store.layout import BlockKey

ROW_BYTES = 16384
ROWS = 32
PATIENCE_SECONDS = 60.0
wait_until = functools.partial(until, seconds=PATIENCE_SECONDS, pause_seconds=0.002)


def key(number: int) -> BlockKey:
    return BlockKey(hashlib.sha256(str(number).encode()).digest(), 0)


def payload(number: int) -> bytes:
    return hashlib.sha512(str(number).encode()).digest() * (ROW_BYTES // 64)


def is_alive(process: int) -> bool:
    """Say whether the process runs; a zombie does not."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def children(parent: int) -> list[int]:
    """Return the processes that are children of one."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[1]) == parent:
                found.append(int(stat.parent.name))
    return found


class CrewUnderTest:
    """A CPU tier of `ROWS` rows in shared memory, a volume, and movers between them."""

    def __init__(
        self,
        root: Path,
        *,
        movers: int = 2,
        stuck_seconds: float = 60.0,
        file_system: str = "",
        retry_seconds: float = 60.0,
    ) -> None:
        self.store = BlockStore(root)
        self._fd = os.memfd_create("cpu-tier")
        os.ftruncate(self._fd, ROWS * ROW_BYTES)
        self.memory = mmap.mmap(self._fd, ROWS * ROW_BYTES)
        region = find_region(memoryview(self.memory))
        assert region is not None
        before = set(children(os.getpid()))
        self.dispatcher = Dispatcher(
            DispatchSettings(
                movers=movers,
                region=region,
                row_bytes=ROW_BYTES,
                root=str(root),
                direct=None,
                stuck_seconds=stuck_seconds,
                file_system=file_system,
                retry_seconds=retry_seconds,
            )
        )
        self.dispatcher.start()
        self.processes = sorted(set(children(os.getpid())) - before)
        self.ended: dict[tuple[int, int], Ended] = {}

    def row(self, slot: int) -> bytes:
        return self.memory[slot * ROW_BYTES : (slot + 1) * ROW_BYTES]

    def set_row(self, slot: int, content: bytes) -> None:
        self.memory[slot * ROW_BYTES : (slot + 1) * ROW_BYTES] = content

    def write(self, *numbers: int) -> None:
        """Put blocks on the volume."""
        for number in numbers:
            self.store.put(key(number), memoryview(payload(number)))

    def load(self, owner: int, *numbers: int, first_slot: int = 0) -> None:
        """Ask for blocks, into the rows from a slot on."""
        self.dispatcher.submit(
            owner,
            [
                (index, Task(is_load=True, key=key(number), slot=first_slot + index))
                for index, number in enumerate(numbers)
            ],
        )

    def save(self, owner: int, number: int, slot: int) -> None:
        """Ask to write a row."""
        self.dispatcher.submit(owner, [(0, Task(is_load=False, key=key(number), slot=slot))])

    def collect(self) -> None:
        """Do one step."""
        for ended in self.dispatcher.collect():
            assert (ended.owner, ended.number) not in self.ended, "a task ended twice"
            self.ended[ended.owner, ended.number] = ended

    def wait_for(self, count: int) -> None:
        """Step until so many tasks have ended."""

        def is_reached() -> bool:
            self.collect()
            return len(self.ended) >= count

        wait_until(is_reached, f"{count} tasks have ended")

    def outcome(self, owner: int, index: int = 0) -> object:
        return self.ended[owner, index].outcome

    def withdraw(self, owner: int) -> None:
        wait_until(lambda: self.dispatcher.withdraw(owner), "the tasks are withdrawn")

    def close(self) -> None:
        self.dispatcher.close(5.0)
        self.memory.close()
        os.close(self._fd)


class Crews:
    """Makes crews on one volume, and ends them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._made: list[CrewUnderTest] = []

    def make(
        self, *, movers: int = 2, stuck_seconds: float = 60.0, file_system: str = "", retry_seconds: float = 60.0
    ) -> CrewUnderTest:
        crew = CrewUnderTest(
            self.directory / "volume",
            movers=movers,
            stuck_seconds=stuck_seconds,
            file_system=file_system,
            retry_seconds=retry_seconds,
        )
        self._made.append(crew)
        return crew

    def close(self) -> None:
        for crew in self._made:
            crew.close()


def shut(crews: Crews) -> Path:
    gate = crews.directory / GATE
    gate.touch()
    return gate


def is_waiting(crews: Crews) -> bool:
    return (crews.directory / WAITING).exists()
