# SPDX-License-Identifier: Apache-2.0
"""What one chunk costs the engine and its movers, and how fast they load: by size of a chunk and number of movers.

``python -m e2e.bench.movers --directory /dev/shm --movers 1,4,8 --chunk-mib 0.25,1,8``; chunks are compared with what
was stored, and a step of the engine comes every millisecond.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import tempfile
import time
from pathlib import Path

from e2e.bench.contestants import Region

from kvtier_connector.movers.engine import Movers
from kvtier_connector.movers.mover import MoversSettings
from kvtier_connector.movers.rows import Region as Rows
from kvtier_connector.movers.tasks import MOST_PROBED, Done, Lane, Task
from kvtier_connector.store.blockstore import Hit, Stored
from kvtier_connector.store.breaker import Breaker
from kvtier_connector.store.layout import BlockKey
from kvtier_connector.store.shared import SharedStore

MIB = 1 << 20
_STEP_SECONDS = 0.001


class Run:
    """One number of movers over one region."""

    def __init__(self, directory: Path, region: Region, movers: int, *, is_direct: bool | None) -> None:
        """Start the movers and wait until all are ready."""
        self._region = region
        self._rows = region.view().cast("B", (region.blocks, region.block_bytes))
        settings = MoversSettings(
            root=str(directory), direct=is_direct, processes=movers, threads=1, deadline_seconds=600.0
        )
        self._movers = Movers(
            settings,
            store=SharedStore(directory),
            breaker=Breaker(),
            rows=self._rows,
            regions=[Rows(region.file, 0, region.blocks)],
        )
        self._movers.start()
        self._keys = [
            BlockKey(hashlib.sha256(number.to_bytes(8, "big")).digest(), 0) for number in range(region.blocks)
        ]
        self.engine_seconds = 0.0

    def move(self, lane: Lane) -> tuple[float, float, list[object]]:
        """Move every chunk; return the seconds, the movers' seconds and the outcomes."""
        if lane is Lane.PROBE:
            step = MOST_PROBED
            tasks = [Task(lane, tuple(self._keys[first : first + step])) for first in range(0, len(self._keys), step)]
        else:
            tasks = [Task(lane, (key,), row) for row, key in enumerate(self._keys)]
        done: list[Done] = []
        began, engine_began = time.perf_counter(), time.thread_time()
        self._movers.submit(enumerate(tasks))
        while len(done) < len(tasks):
            time.sleep(_STEP_SECONDS)
            done += self._movers.collect()
        self.engine_seconds = time.thread_time() - engine_began
        return time.perf_counter() - began, sum(end.seconds for end in done), [end.outcome for end in done]

    def close(self) -> None:
        """End the movers."""
        self._movers.close(10.0)
        self._rows.release()


def measure(directory: Path, chunk_mib: float, total_mib: int, movers: int, *, is_direct: bool | None) -> None:
    """Store once, load three times, probe, and print a line of each."""
    region = Region(max(1, int(total_mib / chunk_mib)), int(chunk_mib * MIB))
    run = Run(directory, region, movers, is_direct=is_direct)
    plan = (Lane.STORE, Lane.LOAD, Lane.LOAD, Lane.LOAD, Lane.PROBE)
    for lane in plan:
        if lane is Lane.LOAD:
            region.erase()
        seconds, busy, outcomes = run.move(lane)
        if lane is Lane.LOAD and not (region.is_intact() and all(isinstance(outcome, Hit) for outcome in outcomes)):
            raise AssertionError("the load did not bring what was stored")
        if lane is Lane.STORE and not all(isinstance(outcome, Stored) for outcome in outcomes):
            raise AssertionError("not everything was stored")
        count = len(outcomes)
        print(
            f"{lane.name.lower():8} {chunk_mib:5g} MiB {movers:3} movers {region.bytes / seconds / 1e9:6.2f} GB/s  "
            f"engine {run.engine_seconds / count * 1e6:6.1f} us of processor a task, "
            f"mover {busy / count * 1e6:8.1f} us a task",
            flush=True,
        )
    run.close()


def main() -> None:
    """Measure what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=Path("/dev/shm"))
    parser.add_argument(
        "--chunk-mib", type=lambda text: [float(part) for part in text.split(",")], default=[0.25, 1, 8]
    )
    parser.add_argument("--movers", type=lambda text: [int(part) for part in text.split(",")], default=None)
    parser.add_argument("--total-mib", type=int, default=2048)
    parser.add_argument("--direct", action="store_true", help="bypass the page cache")
    options = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    for movers in options.movers or sorted({1, max(1, cores // 2), cores}):
        for chunk_mib in options.chunk_mib:
            directory = Path(tempfile.mkdtemp(prefix="kvtier-bench-", dir=options.directory))
            try:
                measure(directory, chunk_mib, options.total_mib, movers, is_direct=options.direct or None)
            finally:
                shutil.rmtree(directory)


if __name__ == "__main__":
    main()
