# SPDX-License-Identifier: Apache-2.0
"""One engine of the stress run on network file systems: a CPU tier, real movers, and prompts for ever, but no vLLM.

``python -m e2e.bench.netfs_engine JSON``, with what it is `Told`. It ends when it is killed.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import random
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from kvtier_connector.errors import StoreUnavailable
from kvtier_connector.movers.engine import Movers
from kvtier_connector.movers.mover import MoversSettings
from kvtier_connector.movers.rows import Region
from kvtier_connector.movers.tasks import Done, Lane, Task
from kvtier_connector.store.blockstore import Hit, Stored
from kvtier_connector.store.breaker import Breaker
from kvtier_connector.store.format import HEADER_BYTES
from kvtier_connector.store.layout import BlockKey, Lineage
from kvtier_connector.store.shared import SharedStore

ROW_BYTES = 1 << 18
BLOCK_BYTES = HEADER_BYTES + ROW_BYTES
CHAIN = 6
"""Blocks of one prompt."""
CHAINS = 120
BUDGET_BLOCKS = 300
"""Fewer than there are: the janitor has to evict all the time."""
_DEADLINE_SECONDS = 3.0


@dataclass
class Told:
    """What an engine is told: the JSON of its command line."""

    root: str
    log: str
    """Where it notes each block that was stored, and each that it read wrongly."""
    seed: int
    compression: str


def key(chain: int, position: int) -> BlockKey:
    """Return the name of a block."""
    return BlockKey(hashlib.sha256(f"{chain}/{position}".encode()).digest(), 0)


def content(of: BlockKey) -> bytes:
    """Return what the block has: a half that compresses, and one that does not."""
    return (of.hash * (ROW_BYTES // 64)) + random.Random(of.hash).randbytes(ROW_BYTES // 2)


class Engine:
    """Loads and stores chains for ever, as an engine's tier does. One thread, and one that tells and hears news."""

    def __init__(self, told: Told) -> None:
        """Make a CPU tier of two chains, and movers."""
        self._told = told
        self._source = random.Random(told.seed)
        self._fd = os.memfd_create("cpu-tier")
        os.ftruncate(self._fd, CHAIN * ROW_BYTES)
        self._memory = mmap.mmap(self._fd, CHAIN * ROW_BYTES)
        self._store = SharedStore(Path(told.root), max_bytes=BUDGET_BLOCKS * BLOCK_BYTES)
        rows = memoryview(self._memory).cast("B", (CHAIN, ROW_BYTES))
        self._movers = Movers(
            MoversSettings(
                root=told.root,
                processes=2,
                threads=1,
                deadline_seconds=_DEADLINE_SECONDS,
                retry_seconds=2.0,
                compression=told.compression,
            ),
            store=self._store,
            breaker=Breaker(),
            rows=rows,
            regions=[Region(self._fd, 0, CHAIN)],
        )
        rows.release()
        self._log = os.open(told.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._number = 0

    def run(self) -> None:
        """Work until it is killed."""
        threading.Thread(target=self._follow, daemon=True).start()
        self._movers.start()
        while True:
            chain = int(self._source.paretovariate(0.6)) % CHAINS
            keys = [key(chain, position) for position in range(CHAIN)]
            self._memory[:] = bytes(len(self._memory))
            loaded = self._do([Task(Lane.LOAD, (each,), row) for row, each in enumerate(keys)])
            missing = []
            for row, (each, done) in enumerate(zip(keys, loaded, strict=True)):
                if not isinstance(done.outcome, Hit):
                    missing.append(row)
                elif self._row(row) != content(each):
                    self._note("wrong", each)
                else:
                    self._note("loaded", each)
            if loaded and isinstance(loaded[-1].outcome, Hit):
                self._store.note_used(keys[-1], ROW_BYTES)
            for row in missing:
                self._memory[row * ROW_BYTES : (row + 1) * ROW_BYTES] = content(keys[row])
            parents = [b"", *(each.hash for each in keys)]
            stored = self._do([Task(Lane.STORE, (keys[row],), row, Lineage(parents[row], row)) for row in missing])
            for row, done in zip(missing, stored, strict=True):
                if isinstance(done.outcome, Stored):
                    self._note("stored", keys[row])

    def _do(self, tasks: list[Task]) -> list[Done]:
        """Have the movers do tasks; each ends once, whatever the volume does."""
        first, self._number = self._number, self._number + len(tasks)
        self._movers.submit((first + index, task) for index, task in enumerate(tasks))
        ended: dict[int, Done] = {}
        while len(ended) < len(tasks):
            for done in self._movers.collect():
                assert done.task not in ended, "a task ended twice"
                ended[done.task] = done
            time.sleep(0.002)
        return [ended[first + index] for index in range(len(tasks))]

    def _follow(self) -> None:
        is_known = False
        while True:
            try:
                self._store.synchronize()
                is_known = is_known or self._store.rescan()
            except StoreUnavailable:
                is_known = False
            time.sleep(0.5)

    def _row(self, row: int) -> bytes:
        return self._memory[row * ROW_BYTES : (row + 1) * ROW_BYTES]

    def _note(self, what: str, of: BlockKey) -> None:
        os.write(self._log, f"{what} {of.hash.hex()}\n".encode())


if __name__ == "__main__":
    Engine(Told(**json.loads(sys.argv[1]))).run()
