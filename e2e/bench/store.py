# SPDX-License-Identifier: Apache-2.0
"""The store benchmark: kvtier's block store beside vLLM's own fs code and a plain parallel reader, in one run.

Each repetition measures every contestant once, in rotating order, so that a drift of the machine favours none. On a
disk the page cache is dropped before each load. Every load is compared with what was written.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import itertools
import mmap
import os
import shutil
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from e2e.bench import report, volumes

from kvtier_connector.io_workers.buffers import Region as Rows
from kvtier_connector.io_workers.pool import WorkerPool
from kvtier_connector.io_workers.tasks import Lane, Task
from kvtier_connector.io_workers.worker import PoolSettings
from kvtier_connector.store.blockstore import Hit, Stored
from kvtier_connector.store.fs import LOCAL, O_DIRECT, DirectIo, new_page
from kvtier_connector.store.health import Breaker
from kvtier_connector.store.layout import BlockKey
from kvtier_connector.store.permit import PERMIT_FILE, StorePermit

MIB = 1 << 20
GENERATION = "bench"
"""A store's directory is named after its generation."""

Bytes = npt.NDArray[np.uint8]


class Region:
    """One page-aligned buffer of so many blocks, and a copy of what was written from it."""

    def __init__(self, blocks: int, block_bytes: int) -> None:
        """Fill it with bytes that do not compress or repeat."""
        self.blocks = blocks
        self.block_bytes = block_bytes
        # A file without a name, so that processes can share it.
        self.file = os.memfd_create("kvtier-bench")
        os.ftruncate(self.file, blocks * block_bytes)
        self.memory = mmap.mmap(self.file, blocks * block_bytes)
        self._array: Bytes = np.frombuffer(self.memory, dtype=np.uint8)
        self._array[:] = np.frombuffer(np.random.default_rng(blocks).bytes(self._array.nbytes), dtype=np.uint8)
        self._digests = [hashlib.sha256(self.row(number)).digest() for number in range(blocks)]

    def row(self, number: int) -> memoryview:
        """Return one block."""
        start = number * self.block_bytes
        return memoryview(self.memory)[start : start + self.block_bytes]

    def erase(self) -> None:
        """Overwrite every block, so that what a load leaves must have come from the volume."""
        self._array[:] = 0

    def is_intact(self) -> bool:
        """Say whether every block holds again what was written."""
        return all(hashlib.sha256(self.row(n)).digest() == digest for n, digest in enumerate(self._digests))


class Contestant(ABC):
    """Moves all blocks of a region; `directory` is its own."""

    name: ClassVar[str]
    is_one_thread: ClassVar[bool] = False
    """Whether more threads change nothing."""

    def __init__(self, directory: Path, region: Region, *, threads: int, is_direct: bool) -> None:
        """Start what a load or store of so many threads needs; this is not measured."""
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.region = region
        self.threads = threads
        self.is_direct = is_direct
        self.keys = [BlockKey(hashlib.sha256(number.to_bytes(8, "big")).digest(), 0) for number in range(region.blocks)]
        self.open()

    def open(self) -> None:
        """Start threads, which start when there is work for them."""
        self._pool = ThreadPoolExecutor(self.threads)
        list(self._pool.map(time.sleep, [0.01] * self.threads))

    def close(self) -> None:
        """End what was started."""
        self._pool.shutdown()

    @abstractmethod
    def load(self) -> None:
        """Bring every block from the directory into the region."""

    @abstractmethod
    def store(self) -> None:
        """Write every block of the region to the directory."""


class Plain(Contestant):
    """The rate of the volume itself: whole files, one system call each way, no header and no checksum."""

    name = report.PLAIN

    def load(self) -> None:
        """Read each file into its row."""
        list(self._pool.map(lambda row: self.move(row, os.O_RDONLY, os.preadv), range(self.region.blocks)))

    def store(self) -> None:
        """Write each row to its file."""
        flags = os.O_WRONLY | os.O_CREAT
        list(self._pool.map(lambda row: self.move(row, flags, os.pwritev), range(self.region.blocks)))

    def path(self, number: int) -> str:
        """Return the path of a row's file."""
        return f"{self.directory}/{number % 64:02x}/{number:08x}.bin"

    def move(self, number: int, flags: int, move: Callable[[int, list[memoryview], int], int]) -> None:
        """Move one block in one call."""
        path = self.path(number)
        if flags & os.O_CREAT:
            os.makedirs(os.path.dirname(path), exist_ok=True)  # noqa: PTH103, PTH120 - thousands of them
        fd = os.open(path, flags | (O_DIRECT if self.is_direct else 0), 0o600)
        try:
            assert move(fd, [self.region.row(number)], 0) == self.region.block_bytes
        finally:
            os.close(fd)


class KvtierWorkers(Contestant):
    """Ours as the engine uses it: as many processes as the others have threads, each with a buffer of its own."""

    name = report.OURS
    settings: ClassVar[dict[str, Any]] = {}
    """More fields of `PoolSettings`."""

    def open(self) -> None:
        """Start the processes and wait until all are ready."""
        region = self.region
        rows = memoryview(region.memory).cast("B", (region.blocks, region.block_bytes))
        permit = StorePermit(str(self.directory / PERMIT_FILE))
        permit.is_needed = False
        root = str(self.directory / GENERATION)
        settings = PoolSettings(root=root, workers=self.threads, deadline_seconds=60.0, **self.settings)
        regions = [Rows(region.file, 0, region.blocks)]
        self._workers = WorkerPool(settings, permit=permit, breaker=Breaker(), rows=rows, regions=regions)
        rows.release()
        self._workers.start()
        # An engine needs one of them; here all are measured.
        first = range(settings.first_workers or self.threads)
        while not all(self._workers._is_worker_ready(number) for number in first):  # noqa: SLF001  nothing public tells it
            time.sleep(0.01)

    def close(self) -> None:
        """End the processes."""
        self._workers.close(10.0)

    def load(self) -> None:
        """Load each block."""
        self._run(Lane.LOAD, Hit)

    def store(self) -> None:
        """Save each block."""
        self._run(Lane.STORE, Stored)

    def _run(self, lane: Lane, wanted: type[Hit | Stored]) -> None:
        self._workers.submit(enumerate([Task(lane, key, row) for row, key in enumerate(self.keys)]))
        left = len(self.keys)
        while left:
            for done in self._workers.collect():
                assert isinstance(done.outcome, wanted), done
                left -= 1
            # An engine's steps take longer; it has a processor of its own, which the volume's programs lack here.
            time.sleep(0.002)


class FsJob(Contestant):
    """VLLM's fs code as its tier calls it: one job is one call on one thread."""

    name = report.STOCK
    is_one_thread = True

    def open(self) -> None:
        """Find the code; raise ImportError where vLLM is not installed."""
        from vllm.v1.kv_offload.tiering.fs import io

        super().open()
        self._io: Any = io

    def load(self) -> None:
        """Load every block in one call."""
        self._io.batch_load_block(*self._arguments())

    def store(self) -> None:
        """Store every block in one call."""
        self._io.batch_store_block(*self._arguments())

    def _arguments(self) -> tuple[list[str], memoryview, list[int], int, bool]:
        size, names = self.region.block_bytes, [key.hash.hex() for key in self.keys]
        # As vLLM's tier names them, below its own directory.
        paths = [f"{self.directory}/{name[:3]}/{name[3:5]}_g0/{name}.bin" for name in names]
        places = [size * number for number in range(len(paths))]
        return paths, memoryview(self.region.memory), places, size, self.is_direct


CONTESTANTS: tuple[type[Contestant], ...] = (Plain, KvtierWorkers, FsJob)


class Bench:
    """Measures one kind of volume. One thread, besides the pool's."""

    def __init__(self, volume: str, directory: Path, log: report.Journal) -> None:
        """Ask whether files there take O_DIRECT."""
        directory.mkdir(parents=True, exist_ok=True)
        self._volume = volume
        self._directory = directory
        self._log = log
        self._is_direct = bool(DirectIo(LOCAL, str(directory), direct=None).flag(new_page()))
        log.say(f"{volume}: {directory}, O_DIRECT {'taken' if self._is_direct else 'refused'}")

    def run(self, chunk_mib: float, job_mib: int, threads: Sequence[int], repetitions: int) -> None:
        """Measure blocks of one size."""
        region = Region(max(1, int(job_mib / chunk_mib)), int(chunk_mib * MIB))
        classes: list[type[Contestant]] = []
        try:
            for kind in CONTESTANTS:
                try:
                    with self._contestant(kind, region, 1) as writer:
                        writer.store()
                    classes.append(kind)
                except ImportError as error:
                    self._log.say(f"{kind.name}: left out: {error}")
            for count, repetition in itertools.product(threads, range(repetitions)):
                turn = repetition % len(classes)
                for kind in [*classes[turn:], *classes[:turn]]:
                    if not kind.is_one_thread or count == threads[0]:
                        self._measure(kind, region, count, repetition)
        finally:
            shutil.rmtree(self._directory, ignore_errors=True)

    def _measure(self, kind: type[Contestant], region: Region, threads: int, repetition: int) -> None:
        for way in ("load", "store"):
            with self._contestant(kind, region, threads, "" if way == "load" else "stored-by-") as contestant:
                # Libraries, pages of memory and directories are there, as in an engine that has run for a while.
                getattr(contestant, way)()
                if way == "store":
                    volumes.remove_blocks(contestant.directory, at_least=region.block_bytes)
                else:
                    if self._volume == "disk":
                        volumes.forget_pages(contestant.directory)
                    region.erase()
                began = time.perf_counter()
                getattr(contestant, way)()
                seconds = time.perf_counter() - began
            if not region.is_intact():
                raise AssertionError(f"{kind.name}: the load did not bring what was written")
            record = {
                "kind": "store",
                "volume": self._volume,
                "contestant": kind.name,
                "way": way,
                "chunk_mib": region.block_bytes / MIB,
                "threads": 0 if kind.is_one_thread else threads,
                "repetition": repetition,
                "gb_per_second": region.blocks * region.block_bytes / seconds / 1e9,
            }
            self._log.write(record)
        shutil.rmtree(contestant.directory, ignore_errors=True)

    def _contestant(self, kind: type[Contestant], region: Region, threads: int, prefix: str = "") -> Any:
        directory = self._directory / f"{prefix}{kind.__name__}"
        return contextlib.closing(kind(directory, region, threads=threads, is_direct=self._is_direct))


def main() -> None:
    """Measure what the command line names, and write the report."""
    options = _options()
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "store.jsonl"
    path.unlink(missing_ok=True)
    log = report.Journal(path)
    log.write(report.describe_run(job_mib=options.job_mib, repetitions=options.repetitions))
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-", dir=options.disk) as disk:
        places = {"tmpfs": options.tmpfs / Path(disk).name, "disk": Path(disk)}
        try:
            for volume in options.volumes:
                bench = Bench(volume, places[volume] / "blocks", log)
                threads = [int(part) for part in options.threads.split(",")]
                for chunk_mib in map(float, options.chunk_mib.split(",")):
                    bench.run(chunk_mib, options.job_mib, threads, options.repetitions)
                    log.say(f"{volume}: {chunk_mib:g} MiB measured")
        finally:
            shutil.rmtree(places["tmpfs"], ignore_errors=True)
            print(report.store_report(options.out))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="for store.jsonl and the tables")
    parser.add_argument("--disk", type=Path, default=Path.cwd(), help="a directory on the disk to measure (default: .)")
    parser.add_argument("--tmpfs", type=Path, default=Path("/dev/shm"), help="a directory in a tmpfs")
    parser.add_argument("--volumes", type=lambda text: text.split(","), default=["tmpfs", "disk"])
    parser.add_argument("--chunk-mib", default="0.5,1,2,4,8,16", help="sizes of a block")
    parser.add_argument("--threads", default="1,2,4,8,16,32")
    parser.add_argument("--job-mib", type=int, default=512, help="bytes of one load or store, in MiB")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="two sizes, two numbers of threads, under a minute")
    options = parser.parse_args()
    if options.quick:
        options.chunk_mib, options.threads, options.job_mib, options.repetitions = "1,8", "1,4", 64, 3
    return options


if __name__ == "__main__":
    main()
