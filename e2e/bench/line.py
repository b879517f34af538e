# SPDX-License-Identifier: Apache-2.0
"""Loads over a line of exact latency and bandwidth: which part of the line's rate movers use.

``python -m e2e.bench.line --milliseconds 0.1,1,5,20 --gigabits 1,5,20``. The files lie in memory. Each open, read and
close takes the latency, and all reads of all processes share the bandwidth; nothing else is simulated. Beside each row
stands a plain reader over the same line, as many processes that read whole files into the same rows and verify
nothing, and what processors did for a chunk of each: where the line is fast, that decides. ``--content KV.bin
--compression Always`` loads compressed blocks of a file's bytes.
"""

from __future__ import annotations

import argparse
import fcntl
import mmap
import multiprocessing
import os
import shutil
import struct
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from e2e.bench.contestants import Region
from e2e.bench.store_costs import MOVERS, measured

from kvtier_connector.contract import COMPRESSION_OFF, COMPRESSIONS
from kvtier_connector.movers.engine import Movers
from kvtier_connector.movers.files import ReleasingFs
from kvtier_connector.movers.mover import MoversSettings
from kvtier_connector.movers.rows import Region as Rows
from kvtier_connector.movers.tasks import Done, Lane, Task
from kvtier_connector.store.blockstore import BlockStore, Hit
from kvtier_connector.store.breaker import Breaker
from kvtier_connector.store.format import HEADER_BYTES
from kvtier_connector.store.layout import BlockKey, block_path
from kvtier_connector.store.shared import SharedStore

_STATE = struct.Struct("=d")
_LATENCY, _BYTES_PER_SECOND, _FILE = "KVTIER_LINE_SECONDS", "KVTIER_LINE_RATE", "KVTIER_LINE_FILE"
_CHUNK_BYTES = 8 << 20
_FILES = 64
_MADV_POPULATE_WRITE = 23
_LOADED_SECONDS = 4.0
"""A load is long enough that its beginning does not count; 512 chunks, a prompt of 32k tokens, at most."""
_MOST_LOADED = 512


class LineFs(ReleasingFs):
    """Real system calls on files in memory, behind the line that the environment describes."""

    def __init__(self) -> None:
        """Join the others that use the line."""
        super().__init__()
        self._latency = float(os.environ[_LATENCY])
        self._rate = float(os.environ[_BYTES_PER_SECOND])
        self._file = os.open(os.environ[_FILE], os.O_RDWR)
        self._state = mmap.mmap(self._file, mmap.PAGESIZE)

    def open(self, path: str, flags: int) -> int:
        """Open after a round trip."""
        time.sleep(self._latency)
        return super().open(path, flags)

    def close(self, fd: int) -> None:
        """Close after a round trip."""
        time.sleep(self._latency)
        super().close(fd)

    def stat(self, path: str) -> os.stat_result:
        """Look after a round trip."""
        time.sleep(self._latency)
        return super().stat(path)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Read, and return when the last byte has come over the line."""
        count = super().preadv(fd, buffers, offset)
        fcntl.lockf(self._file, fcntl.LOCK_EX)
        try:
            (free_at,) = _STATE.unpack_from(self._state)
            free_at = max(free_at, time.monotonic() + self._latency) + count / self._rate
            _STATE.pack_into(self._state, 0, free_at)
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN)
        time.sleep(max(0.0, free_at - time.monotonic()))
        return count


def read_plainly(start: Connection, root: str, memory: str, numbers: Sequence[int]) -> None:
    """Read whole files over the line into their rows, once told to; say when it is done and what it took: a process."""
    fs, header = LineFs(), memoryview(bytearray(HEADER_BYTES))
    with open(memory, "r+b") as file:  # noqa: PTH123 - an open file of the parent
        mapped = mmap.mmap(file.fileno(), 0)
    mapped.madvise(_MADV_POPULATE_WRITE)
    rows = memoryview(mapped)
    start.send(None)
    start.recv()
    began = time.process_time()
    for number in numbers:
        fd = fs.open(f"{root}/{block_path(key(number))}", os.O_RDONLY)
        fs.preadv(fd, [header, rows[number * _CHUNK_BYTES : (number + 1) * _CHUNK_BYTES]], 0)
        fs.close(fd)
    start.send(time.process_time() - began)


def measure_plain(root: str, memory: str, processes: int, count: int) -> tuple[float, float]:
    """Return how long a plain reader takes for the same blocks, and what that is of processors."""
    context = multiprocessing.get_context("spawn")
    pairs = [context.Pipe() for _ in range(processes)]
    readers = [
        context.Process(
            target=read_plainly, args=(far, root, memory, [n % _FILES for n in range(first, count, processes)])
        )
        for first, (_, far) in enumerate(pairs)
    ]
    for reader in readers:
        reader.start()
    for near, _ in pairs:
        near.recv()
    began = time.perf_counter()
    for near, _ in pairs:
        near.send(None)
    ran = sum(near.recv() for near, _ in pairs)
    taken = time.perf_counter() - began
    for reader in readers:
        reader.join()
    return taken, ran


def measure(directory: Path, region: Region, *, seconds: float, gigabits: float) -> None:
    """Load over one line and print a row."""
    rate = gigabits * 1e9 / 8
    line = directory / "line"
    line.write_bytes(bytes(mmap.PAGESIZE))
    os.environ.update({_LATENCY: str(seconds), _BYTES_PER_SECOND: str(rate), _FILE: str(line)})
    store = SharedStore(directory / "0a1b", fs=LineFs())
    store.measure_round_trip()
    rows = region.view().cast("B", (region.blocks, region.block_bytes))
    movers = Movers(
        MoversSettings(
            root=str(directory / "0a1b"),
            direct=True,
            processes=16,
            first_processes=len(os.sched_getaffinity(0)),
            threads=16,
            deadline_seconds=600.0,
            file_system="e2e.bench.line:LineFs",
        ),
        store=store,
        breaker=Breaker(),
        rows=rows,
        regions=[Rows(region.file, 0, region.blocks)],
    )
    movers.start()
    done: list[Done] = []
    asked = 0
    began = time.monotonic()
    # What a load finds: the movers that the latency asks for, ready.
    while len(done) < asked or time.monotonic() - began < 3.0:  # noqa: PLR2004 - seconds
        done += movers.collect()
        if len(done) == asked and time.monotonic() - began < 2.0:  # noqa: PLR2004 - seconds
            movers.submit([(1_000_000 + asked, Task(Lane.PROBE, (key(0),)))])
            asked += 1
        time.sleep(0.01)
    count = int(min(_MOST_LOADED, max(_FILES, _LOADED_SECONDS * rate / region.block_bytes)))
    ended: list[Done] = []

    def load() -> None:
        movers.submit([(n, Task(Lane.LOAD, (key(n % _FILES),), n % _FILES)) for n in range(count)])
        while len(ended) < count:
            ended.extend(each for each in movers.collect() if each.task < count)
            time.sleep(0.001)

    # Movers enter the pages of a row once, and of their own buffer; the plain reader has done so.
    load()
    ended.clear()
    taken, ran = measured(load)
    assert all(isinstance(each.outcome, Hit) for each in ended)
    processes = movers.counts().processes
    movers.close(10.0)
    rows.release()
    memory = f"/proc/{os.getpid()}/fd/{region.file}"
    plain, ran_plain = measure_plain(str(directory / "0a1b"), memory, processes, count)
    got = count * region.block_bytes / taken
    print(
        f"| {seconds * 1e3:g} ms | {gigabits:g} Gbit/s | {processes} | {count} | {got / 1e9:.2f} | {got / rate:.0%} "
        f"| {count * region.block_bytes / plain / rate:.0%} | {plain / taken:.0%} "
        f"| {ran[MOVERS] / count * 1e3:.1f} ms | {ran_plain / count * 1e3:.1f} ms |",
        flush=True,
    )


def key(number: int) -> BlockKey:
    """Return a name that no other number has."""
    return BlockKey(number.to_bytes(32, "little"), 0)


def main() -> None:
    """Measure each line that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--milliseconds", type=_numbers, default=[0.1, 1.0, 5.0, 20.0])
    parser.add_argument("--gigabits", type=_numbers, default=[1.0, 5.0, 20.0])
    parser.add_argument("--content", type=Path, help="file whose bytes the blocks have, over and over")
    parser.add_argument("--compression", choices=COMPRESSIONS, default=COMPRESSION_OFF)
    options = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="kvtier-line-", dir="/dev/shm"))
    region = Region(_FILES, _CHUNK_BYTES)
    try:
        blocks = BlockStore(directory / "0a1b", direct=False, compression=options.compression)
        if options.content:
            content = options.content.read_bytes()
            memory = region.view()
            for start in range(0, region.bytes, len(content)):
                memory[start : start + len(content)] = content[: region.bytes - start]
        for number in range(_FILES):
            blocks.put(key(number), region.row(number))
        print(f"load before: {' '.join(f'{each:.1f}' for each in os.getloadavg())}")
        print(
            "| latency | line | movers | chunks | GB/s | of the line | plain, of the line | movers / plain "
            "| processors, a chunk | plain, a chunk |"
        )
        print("|---|---|---|---|---|---|---|---|---|---|", flush=True)
        for gigabits in options.gigabits:
            for milliseconds in options.milliseconds:
                measure(directory, region, seconds=milliseconds / 1e3, gigabits=gigabits)
    finally:
        shutil.rmtree(directory)


def _numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


if __name__ == "__main__":
    main()
