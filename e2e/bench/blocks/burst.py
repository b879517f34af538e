# SPDX-License-Identifier: Apache-2.0
"""Stores of the I/O workers beside a plain writer, and what a burst of stores does to loads, on any file system.

``python -m e2e.bench.blocks.burst DIRECTORY``. The rounds of both contestants are interleaved in turning order, so that
a drift of the machine favours none. The plain one has as many threads for reads, and as many for writes, as there are
workers. Directories are there and pages of memory are touched before, as in an engine that has run for a while.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from e2e.bench import report, volumes
from e2e.bench.blocks import slow_streams
from e2e.bench.store import GENERATION, MIB, KvtierWorkers, Plain, Region

from kvtier_connector.io_workers.tasks import Lane, Task
from kvtier_connector.store.blockstore import Hit, Stored
from kvtier_connector.store.fs import LOCAL, DirectIo, new_page
from kvtier_connector.store.layout import block_path

STAGES = {"stores": (False, True), "loads": (True, False), "loads beside stores": (True, True)}
"""Whether a stage loads, and whether it stores."""


class PlainMoves(Plain):
    """Threads that read, and threads that write."""

    def open(self) -> None:
        """Start the threads."""
        self._pools = {lane: ThreadPoolExecutor(self.threads) for lane in (Lane.LOAD, Lane.STORE)}
        self._ended: deque[int] = deque()

    def close(self) -> None:
        """End them."""
        for pool in self._pools.values():
            pool.shutdown()

    def begin(self, lane: Lane, rows: Iterable[int]) -> None:
        """Begin to move blocks."""
        fs = slow_streams.SlowStreams()
        flags, move = (os.O_RDONLY, fs.preadv) if lane is Lane.LOAD else (os.O_WRONLY | os.O_CREAT, fs.pwritev)

        def act(row: int) -> None:
            self.move(row, flags, move)
            self._ended.append(row)

        for row in rows:
            self._pools[lane].submit(act, row)

    def ended(self) -> Iterable[int]:
        """Return the rows whose blocks were moved since the last call."""
        while self._ended:
            yield self._ended.popleft()


class WorkerMoves(KvtierWorkers):
    """The I/O workers of an engine."""

    def path(self, number: int) -> str:
        """Return the path of a row's block."""
        return f"{self.directory}/{GENERATION}/{block_path(self.keys[number])}"

    def begin(self, lane: Lane, rows: Iterable[int]) -> None:
        """Begin to move blocks."""
        self._workers.submit((row, Task(lane, self.keys[row], row, queued=time.monotonic())) for row in rows)

    def ended(self) -> Iterable[int]:
        """Return the rows whose blocks were moved since the last call."""
        for done in self._workers.collect():
            assert isinstance(done.outcome, Hit | Stored), done
            yield done.task


Moves = PlainMoves | WorkerMoves


class Measured(NamedTuple):
    """One stage of one contestant."""

    loads: Sequence[float]
    """Seconds from the request for each block until it was there."""
    gb_stored: float
    """Gigabytes a second, until the last block was stored."""


def play(moves: Moves, stores: Sequence[int], *, hit: int, every_seconds: float, seconds: float) -> Measured:
    """Store blocks at once, and ask for a hit of so many blocks now and then, until all is stored and time is over."""
    loadable = itertools.cycle(range(moves.region.blocks // 2))
    asked: dict[int, float] = {}
    left, loads = set(stores), []
    began = stored_at = next_hit = time.perf_counter()
    moves.begin(Lane.STORE, stores)
    while (is_on := left or time.perf_counter() - began < seconds) or asked:
        if is_on and hit and time.perf_counter() >= next_hit:
            rows = [row for row in itertools.islice(loadable, hit) if row not in asked]
            asked |= dict.fromkeys(rows, time.perf_counter())
            moves.begin(Lane.LOAD, rows)
            next_hit += every_seconds
        for row in moves.ended():
            if row in asked:
                loads.append(time.perf_counter() - asked.pop(row))
            else:
                left.remove(row)
                stored_at = time.perf_counter()
        # An engine's steps are longer; a shorter pause would take a processor from the volume's programs.
        time.sleep(0.001)
    return Measured(loads, len(stores) * moves.region.block_bytes / 1e9 / (stored_at - began) if stores else 0.0)


def measure(options: argparse.Namespace) -> dict[tuple[str, str], list[Measured]]:
    """Measure every stage of every contestant, `options.rounds` times."""
    region = Region(options.blocks, int(options.chunk_mib * MIB))
    rows = range(region.blocks)
    half = rows[len(rows) // 2 :]
    options.directory.mkdir(parents=True, exist_ok=True)
    is_direct = bool(DirectIo(LOCAL, str(options.directory), direct=None).flag(new_page()))
    found = defaultdict(list)
    contestants = [
        kind(options.directory / kind.__name__, region, threads=options.workers, is_direct=is_direct)
        for kind in (PlainMoves, WorkerMoves)
    ]
    try:
        for moves in contestants:
            play(moves, rows, hit=0, every_seconds=0, seconds=0)
        for turn, (stage, (has_loads, has_stores)) in itertools.product(range(options.rounds), STAGES.items()):
            stores, seconds = (half, 0) if has_stores else ([], options.seconds)
            hit = options.hit if has_loads else 0
            for moves in contestants[:: -1 if turn % 2 else 1]:
                for row in stores:
                    Path(moves.path(row)).unlink()
                volumes.forget_pages(moves.directory)
                one = play(moves, stores, hit=hit, every_seconds=options.every, seconds=seconds)
                found[moves.name, stage].append(one)
        assert region.is_intact()
    finally:
        for moves in contestants:
            moves.close()
            shutil.rmtree(moves.directory)
    return found


def table(found: dict[tuple[str, str], list[Measured]]) -> str:
    """Return a table with a line for each stage and contestant."""
    lines = []
    for stage, (has_loads, has_stores) in STAGES.items():
        bare = [one.gb_stored for one in found[PlainMoves.name, stage]]
        for name in (PlainMoves.name, WorkerMoves.name):
            rates = [one.gb_stored for one in found[name, stage]]
            loads = [seconds for one in found[name, stage] for seconds in one.loads]
            shares = sorted(rate / plain for rate, plain in zip(rates, bare, strict=True)) if has_stores else []
            share = f"{statistics.median(shares):.0%} ({shares[0]:.0%}-{shares[-1]:.0%})" if has_stores else "-"
            cuts = statistics.quantiles(loads, n=100, method="inclusive") if has_loads else []
            times = [f"{1000 * cuts[cut - 1]:.0f}" for cut in (50, 99)] if has_loads else ["-", "-"]
            lines.append([f"{stage}: {name}", report.plain(rates) if has_stores else "-", share, *times])
    return report.table(["stage: contestant", "stored, GB/s", "of plain", "load P50, ms", "load P99, ms"], lines)


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="on the file system to measure")
    parser.add_argument("--blocks", type=int, default=64, help="half of them are loaded, half are stored")
    parser.add_argument("--chunk-mib", type=float, default=8)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--hit", type=int, default=4, help="blocks that are loaded at once")
    parser.add_argument("--every", type=float, default=0.25, help="seconds between hits")
    parser.add_argument("--seconds", type=float, default=2.0, help="of loads without stores")
    parser.add_argument("--first", type=int, default=0, help="workers at first; the others start where they help")
    parser.add_argument("--stream-mb", type=float, help="each read and each write moves so many MB a second")
    options = parser.parse_args()
    WorkerMoves.settings = {"first_workers": options.first}
    if options.stream_mb:
        os.environ[slow_streams.RATE] = str(options.stream_mb * 1e6)
        WorkerMoves.settings["file_system"] = "e2e.bench.blocks.slow_streams:SlowStreams"
    print(table(measure(options)), flush=True)


if __name__ == "__main__":
    main()
