# SPDX-License-Identifier: Apache-2.0
"""Processes that are killed at each system call of a store, and processes that store one block at once."""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from store_contract import BLOCK_BYTES, key, pages, payload

from kvtier_connector.store import blockstore
from kvtier_connector.store.blockstore import Hit, Miss, Present, Stored
from kvtier_connector.store.check import check
from kvtier_connector.store.identity import claim
from kvtier_connector.store.index import Presence
from kvtier_connector.store.leftovers import remove_stale_partials
from kvtier_connector.store.shared import SharedStore

CONNECTOR = Path(blockstore.__file__ or "").parents[2]
PATHS = [str(CONNECTOR), str(Path(__file__).parents[1] / "store")]

DIES = """
import os, signal, sys
from pathlib import Path
root, step, torn_bytes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
sys.path[:0] = sys.argv[4:]
from kvtier_connector.store.shared import SharedStore
from store_contract import key, payload
from store_faults import WatchedFs
class Kills(WatchedFs):
    steps = 0
    def before(self, call, path):
        self.steps += 1
        if self.steps > step:
            os.kill(os.getpid(), signal.SIGKILL)
    def pwritev(self, fd, buffers, offset):
        if self.steps == step and torn_bytes:
            os.pwrite(fd, b"".join(bytes(buffer) for buffer in buffers)[:torn_bytes], offset)
        return super().pwritev(fd, buffers, offset)
store = SharedStore(Path(root), fs=Kills(), direct=False)
store.put(key(1), payload(1))
store.synchronize()
"""


@pytest.mark.parametrize("torn_bytes", [0, 5000])
def test_a_process_killed_at_any_system_call_of_a_store_leaves_the_block_or_none(
    tmp_path: Path, torn_bytes: int
) -> None:
    outcomes = []
    for step in itertools.count():
        # given
        root = tmp_path / str(step)
        claim(root, {}, "d1gest")
        other = SharedStore(root)
        other.synchronize()
        other.rescan()
        # when
        completed = subprocess.run(
            [sys.executable, "-c", DIES, str(root), str(step), str(torn_bytes), *PATHS], check=False
        )
        # then
        assert completed.returncode in {0, -signal.SIGKILL}
        other.synchronize()
        into = pages()
        outcomes.append(other.get(key(1), into))
        assert outcomes[-1] in {Miss(), Hit(BLOCK_BYTES)}
        assert outcomes[-1] == Miss() or into == payload(1)
        assert len(remove_stale_partials(root, 0)) <= 1
        assert other.put(key(1), payload(1)) in {Stored(BLOCK_BYTES), Present()}
        assert other.get(key(1), into) == Hit(BLOCK_BYTES)
        assert into == payload(1)
        assert check(root, partial_age_seconds=0) == []
        if completed.returncode == 0:
            break
    assert step > 10
    assert outcomes[0] == Miss()
    assert outcomes[-1] == Hit(BLOCK_BYTES)


WRITES = """
import sys
from pathlib import Path
sys.path[:0] = sys.argv[2:]
from kvtier_connector.store.shared import SharedStore
from store_contract import key, payload
store = SharedStore(Path(sys.argv[1]))
print("ready", flush=True)
for line in sys.stdin:
    outcome = store.put(key(int(line)), payload(int(line)))
    store.synchronize()
    print(type(outcome).__name__, flush=True)
"""


def test_two_processes_that_store_one_block_at_once_leave_one_whole_block(tmp_path: Path) -> None:
    claim(tmp_path, {}, "d1gest")
    observer = SharedStore(tmp_path)
    observer.synchronize()
    observer.rescan()
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITES, str(tmp_path), *PATHS],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    try:
        for writer in writers:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "ready\n"
        for number in range(60):
            for writer in writers:
                assert writer.stdin is not None
                writer.stdin.write(f"{number}\n")
                writer.stdin.flush()
            answers = {writer.stdout.readline().strip() for writer in writers if writer.stdout is not None}
            assert answers <= {"Stored", "Present"}
            assert "Stored" in answers
    finally:
        for writer in writers:
            writer.communicate()
    assert [writer.returncode for writer in writers] == [0, 0]
    observer.synchronize()
    assert observer.known_blocks == 60
    assert observer.usage_bytes() == observer.blocks.refresh_usage() == 60 * BLOCK_BYTES
    assert all(observer.state(key(number)) is Presence.PRESENT for number in range(60))
    assert check(tmp_path, partial_age_seconds=0) == []
