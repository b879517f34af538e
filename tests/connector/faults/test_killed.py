# SPDX-License-Identifier: Apache-2.0
"""Processes that are killed at each system call of a store, and processes that store one block at once."""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from checks import check
from plain_engine import PlainEngine
from planted import clear
from store_contract import BLOCK_BYTES, key, pages, payload

from kvtier_connector.janitor.permit import PermitWriter
from kvtier_connector.janitor.policy import Room
from kvtier_connector.store import blockstore
from kvtier_connector.store.blockstore import Hit, Miss, Present, Stored
from kvtier_connector.store.fs import LOCAL
from kvtier_connector.store.identity import claim
from kvtier_connector.store.permit import PERMIT_FILE, decode_permit
from kvtier_connector.store.scan import LeftoverKind

CONNECTOR = Path(blockstore.__file__ or "").parents[2]
PATHS = [str(CONNECTOR), str(Path(__file__).parents[1] / "store"), str(Path(__file__).parents[2] / "kit")]

DIES = """
import os, signal, sys
from pathlib import Path
sys.path[:0] = sys.argv[1:]
from kvtier_connector.janitor.permit import PermitWriter
from kvtier_connector.janitor.policy import Room
from kvtier_connector.store.identity import claim
from plain_engine import PlainEngine
from store_contract import key, payload
from store_faults import WatchedFs
class Kills(WatchedFs):
    def __init__(self, step, torn_bytes):
        self.step, self.torn_bytes, self.steps = step, torn_bytes, 0
    def before(self, call, path):
        self.steps += 1
        if self.steps > self.step:
            os.kill(os.getpid(), signal.SIGKILL)
    def pwritev(self, fd, buffers, offset):
        if self.steps == self.step and self.torn_bytes:
            os.pwrite(fd, b"".join(bytes(buffer) for buffer in buffers)[:self.torn_bytes], offset)
        return super().pwritev(fd, buffers, offset)
def act(action, root, fs):
    if action == "claim":
        claim(Path(root), {"model": "test"}, "d1gest", fs=fs)
    elif action == "permit":
        room = Room(0, "the volume is nearly full")
        PermitWriter(root, fs=fs).renew(room, used_bytes=0, writers=0, largest_bytes=0, tenants=())
    else:
        store = PlainEngine(Path(root), fs=fs, direct=False)
        if action == "put":
            store.put(key(1), payload(1))
        else:
            store.delete(key(1), payload_bytes=payload(1).nbytes)
        store.tell()
for line in sys.stdin:
    action, root, step, torn_bytes = line.split()
    child = os.fork()
    if child == 0:
        try:
            act(action, root, Kills(int(step), int(torn_bytes)))
            os._exit(0)
        finally:
            os._exit(1)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Killer:
    """Does something in a process of its own that is killed on the way; one that knows all modules is forked for it."""

    def __init__(self) -> None:
        self._parent = subprocess.Popen(
            [sys.executable, "-c", DIES, *PATHS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, action: str, root: Path, step: int, torn_bytes: int = 0) -> bool:
        """Kill the process at that system call; say whether it came to that."""
        self._parent.stdin.write(f"{action} {root} {step} {torn_bytes}\n")
        self._parent.stdin.flush()
        code = int(self._parent.stdout.readline())
        assert code in {0, -signal.SIGKILL}
        return code != 0

    def close(self) -> None:
        self._parent.communicate()


@pytest.fixture(scope="module")
def killer() -> Iterator[Killer]:
    made = Killer()
    yield made
    made.close()


@pytest.mark.parametrize("torn_bytes", [0, 5000])
def test_a_process_killed_at_any_system_call_of_a_store_leaves_the_block_or_none(
    tmp_path: Path, killer: Killer, torn_bytes: int
) -> None:
    outcomes = []
    for step in itertools.count():
        # given
        root = tmp_path / str(step) / "d1gest"
        claim(root, {}, "d1gest")
        other = PlainEngine(root)
        # when
        was_killed = killer.run("put", root, step, torn_bytes)
        # then
        into = pages()
        outcomes.append(other.get(key(1), into))
        assert outcomes[-1] in {Miss(), Hit(BLOCK_BYTES)}
        assert outcomes[-1] == Miss() or into == payload(1)
        assert len(clear(root, LeftoverKind.PARTIAL)) <= 1
        assert other.put(key(1), payload(1)) in {Stored(BLOCK_BYTES), Present()}
        assert other.get(key(1), into) == Hit(BLOCK_BYTES)
        assert into == payload(1)
        assert check(root, partial_age_seconds=0) == []
        if not was_killed:
            break
    assert step > 10
    assert outcomes[0] == Miss()
    assert outcomes[-1] == Hit(BLOCK_BYTES)


def test_a_process_killed_at_any_system_call_of_a_removal_leaves_the_block_or_none(
    tmp_path: Path, killer: Killer
) -> None:
    outcomes = []
    for step in itertools.count():
        root = tmp_path / str(step) / "d1gest"
        claim(root, {}, "d1gest")
        other = PlainEngine(root)
        other.put(key(1), payload(1))
        was_killed = killer.run("delete", root, step)
        outcomes.append(other.get(key(1), pages()))
        assert outcomes[-1] in {Miss(), Hit(BLOCK_BYTES)}
        assert check(root, partial_age_seconds=0) == []
        if not was_killed:
            break
    assert (outcomes[0], outcomes[-1]) == (Hit(BLOCK_BYTES), Miss())


@pytest.mark.parametrize("torn_bytes", [0, 5])
def test_a_process_killed_at_any_system_call_of_a_claim_leaves_a_directory_that_can_be_claimed(
    tmp_path: Path, killer: Killer, torn_bytes: int
) -> None:
    for step in itertools.count():
        root = tmp_path / str(step) / "d1gest"
        was_killed = killer.run("claim", root, step, torn_bytes)
        claim(root, {"model": "test"}, "d1gest")
        clear(root, LeftoverKind.PARTIAL)
        assert check(root, partial_age_seconds=0) == []
        if not was_killed:
            break
    assert step > 5


def test_a_janitor_killed_at_any_system_call_of_a_permit_leaves_one_that_the_engines_understand(
    tmp_path: Path, killer: Killer
) -> None:
    sizes = []
    for step in itertools.count():
        directory = tmp_path / str(step)
        directory.mkdir()
        PermitWriter(str(directory), fs=LOCAL).renew(Room(100), used_bytes=0, writers=1, largest_bytes=1, tenants=())
        was_killed = killer.run("permit", directory, step)
        sizes.append(decode_permit((directory / PERMIT_FILE).read_bytes()).bytes)
        if not was_killed:
            break
    assert (sizes[0], sizes[-1]) == (6, 0)


WRITES = """
import sys
from pathlib import Path
sys.path[:0] = sys.argv[2:]
from plain_engine import PlainEngine
from store_contract import key, payload
store = PlainEngine(Path(sys.argv[1]))
print("ready", flush=True)
for line in sys.stdin:
    outcome = store.put(key(int(line)), payload(int(line)))
    store.tell()
    print(type(outcome).__name__, flush=True)
"""


def test_two_processes_that_store_one_block_at_once_leave_one_whole_block(tmp_path: Path) -> None:
    root = tmp_path / "d1gest"
    claim(root, {}, "d1gest")
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITES, str(root), *PATHS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    try:
        for writer in writers:
            assert writer.stdout.readline() == "ready\n"
        for number in range(60):
            for writer in writers:
                writer.stdin.write(f"{number}\n")
                writer.stdin.flush()
            answers = {writer.stdout.readline().strip() for writer in writers if writer.stdout is not None}
            assert answers <= {"Stored", "Present"}
            assert "Stored" in answers
    finally:
        for writer in writers:
            writer.communicate()
    assert [writer.returncode for writer in writers] == [0, 0]
    assert len(list(root.rglob("*.kvb"))) == 60
    assert check(root, partial_age_seconds=0) == []
