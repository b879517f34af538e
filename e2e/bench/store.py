# SPDX-License-Identifier: Apache-2.0
"""The store benchmark: kvtier's block store beside vLLM's own fs code and a plain parallel reader, in one run.

Each repetition measures every contestant once, in rotating order, so that a drift of the machine favours none. On a
disk the page cache is dropped before each load. Every load is compared with what was written.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import mmap
import os
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
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
from kvtier_connector.store.permit import PERMIT_FILE, StorePermit, VolumeClock

MIB = 1 << 20
CHUNKS = (0.5, 1, 2, 4, 8, 16)
THREADS = (1, 2, 4, 8, 16, 32)
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
        generator = np.random.default_rng(blocks)
        self._array[:] = np.frombuffer(generator.bytes(self._array.nbytes), dtype=np.uint8)
        self._digests = [hashlib.sha256(self.row(number)).digest() for number in range(blocks)]

    @property
    def bytes(self) -> int:
        """Of all blocks."""
        return self.blocks * self.block_bytes

    def view(self) -> memoryview:
        """Return the whole buffer."""
        return memoryview(self.memory)

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

    def __init__(self, directory: Path, region: Region, *, is_direct: bool) -> None:
        """Store the settings."""
        self.directory = directory
        self.region = region
        self.is_direct = is_direct
        self.keys = [BlockKey(hashlib.sha256(number.to_bytes(8, "big")).digest(), 0) for number in range(region.blocks)]

    @abstractmethod
    def load(self, pool: ThreadPoolExecutor) -> None:
        """Bring every block from the directory into the region."""

    @abstractmethod
    def store(self, pool: ThreadPoolExecutor) -> None:
        """Write every block of the region to the directory."""

    def prepare(self, threads: int) -> None:  # noqa: B027 - most need nothing
        """Start what a load or store of so many threads needs; this is not measured."""

    def close(self) -> None:  # noqa: B027 - most need nothing
        """End what `prepare` started."""

    def path(self, number: int) -> str:
        """Return where a contestant without a layout of its own keeps a block."""
        return f"{self.directory}/{number % 64:02x}/{number:08x}.bin"


class Plain(Contestant):
    """The rate of the volume itself: whole files, one system call each way, no header and no checksum."""

    name = report.PLAIN

    def load(self, pool: ThreadPoolExecutor) -> None:
        """Read each file into its row."""
        _all(pool, self._read, self.region.blocks)

    def store(self, pool: ThreadPoolExecutor) -> None:
        """Write each row to its file."""
        _all(pool, self._write, self.region.blocks)

    def _read(self, number: int) -> None:
        with self._open(number, os.O_RDONLY) as fd:
            done = os.preadv(fd, [self.region.row(number)], 0)
        assert done == self.region.block_bytes

    def _write(self, number: int) -> None:
        os.makedirs(os.path.dirname(self.path(number)), exist_ok=True)  # noqa: PTH103, PTH120 - thousands of them
        with self._open(number, os.O_WRONLY | os.O_CREAT) as fd:
            done = os.pwritev(fd, [self.region.row(number)], 0)
        assert done == self.region.block_bytes

    @contextlib.contextmanager
    def _open(self, number: int, flags: int) -> Iterator[int]:
        fd = os.open(self.path(number), flags | (O_DIRECT if self.is_direct else 0), 0o600)
        try:
            yield fd
        finally:
            os.close(fd)


class KvtierWorkers(Contestant):
    """Ours as the engine uses it: as many processes as the others have threads, each with a buffer of its own."""

    name = report.OURS
    _pool: WorkerPool

    def prepare(self, threads: int) -> None:
        """Start the processes and wait until all are ready."""
        region = self.region
        rows = region.view().cast("B", (region.blocks, region.block_bytes))
        permit = StorePermit(str(self.directory / PERMIT_FILE), VolumeClock())
        permit.is_needed = False
        self._pool = WorkerPool(
            PoolSettings(root=str(self.directory / GENERATION), workers=threads, deadline_seconds=60.0),
            permit=permit,
            breaker=Breaker(),
            rows=rows,
            regions=[Rows(region.file, 0, region.blocks)],
        )
        rows.release()
        self._pool.start()
        # An engine needs one of them; here all are measured.
        while not all(self._pool._is_worker_ready(number) for number in range(threads)):  # noqa: SLF001 - as said
            time.sleep(0.01)

    def close(self) -> None:
        """End the processes."""
        self._pool.close(10.0)

    def load(self, pool: ThreadPoolExecutor) -> None:  # noqa: ARG002 - processes take the threads' place
        """Load each block."""
        self._run(Lane.LOAD, Hit)

    def store(self, pool: ThreadPoolExecutor) -> None:  # noqa: ARG002 - processes take the threads' place
        """Save each block."""
        self._run(Lane.STORE, Stored)

    def _run(self, lane: Lane, wanted: type[Hit | Stored]) -> None:
        self._pool.submit(enumerate([Task(lane, key, row) for row, key in enumerate(self.keys)]))
        left = len(self.keys)
        while left:
            for done in self._pool.collect():
                assert isinstance(done.outcome, wanted), done
                left -= 1
            # An engine's steps take longer; it has a processor of its own, which the volume's programs lack here.
            time.sleep(0.002)


class FsJob(Contestant):
    """VLLM's fs code as its tier calls it: one job is one call on one thread."""

    name = report.STOCK
    is_one_thread = True

    def __init__(self, directory: Path, region: Region, *, is_direct: bool) -> None:
        """Find the code; raise ImportError where vLLM is not installed."""
        super().__init__(directory, region, is_direct=is_direct)
        from vllm.v1.kv_offload.tiering.fs import io

        self.io: Any = io

    def path(self, number: int) -> str:
        """Return where vLLM's tier keeps a block, below its own directory."""
        name = self.keys[number].hash.hex()
        return f"{self.directory}/{name[:3]}/{name[3:5]}_g0/{name}.bin"

    def load(self, pool: ThreadPoolExecutor) -> None:
        """Load every block in one call."""
        pool.submit(self._load, list(range(self.region.blocks))).result()

    def store(self, pool: ThreadPoolExecutor) -> None:
        """Store every block in one call."""
        pool.submit(self._store, list(range(self.region.blocks))).result()

    def _load(self, numbers: list[int]) -> None:
        self.io.batch_load_block(*self._arguments(numbers))

    def _store(self, numbers: list[int]) -> None:
        self.io.batch_store_block(*self._arguments(numbers))

    def _arguments(self, numbers: list[int]) -> tuple[list[str], memoryview, list[int], int, bool]:
        size = self.region.block_bytes
        return [self.path(n) for n in numbers], self.region.view(), [n * size for n in numbers], size, self.is_direct


CONTESTANTS: tuple[type[Contestant], ...] = (
    Plain,
    KvtierWorkers,
    FsJob,
)


def _all(pool: ThreadPoolExecutor, task: Any, count: int) -> None:
    for future in [pool.submit(task, number) for number in range(count)]:
        future.result()


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
        classes = [kind for kind in CONTESTANTS if self._can_run(kind, region)]
        try:
            with ThreadPoolExecutor(1) as pool:
                for kind in classes:
                    writer = self._contestant(kind, region)
                    writer.prepare(1)
                    writer.store(pool)
                    writer.close()
            for count in threads:
                with ThreadPoolExecutor(count) as pool:
                    # Threads start when there is work for them; that is not what is measured.
                    list(pool.map(time.sleep, [0.01] * count))
                    for repetition in range(repetitions):
                        turn = repetition % len(classes)
                        for kind in [*classes[turn:], *classes[:turn]]:
                            if not kind.is_one_thread or count == threads[0]:
                                self._measure(kind, region, pool, count, repetition)
        finally:
            volumes.clear(self._directory)

    def _measure(
        self, kind: type[Contestant], region: Region, pool: ThreadPoolExecutor, threads: int, repetition: int
    ) -> None:
        reader = self._contestant(kind, region)
        if self._volume == "disk":
            volumes.forget_pages(reader.directory)
        region.erase()
        reader.prepare(threads)
        began = time.perf_counter()
        reader.load(pool)
        self._record(kind, region, "load", threads, repetition, time.perf_counter() - began)
        reader.close()
        if not region.is_intact():
            raise AssertionError(f"{kind.name}: the load did not bring what was written")
        writer = kind(self._directory / f"stored-by-{kind.__name__}", region, is_direct=self._is_direct)
        writer.directory.mkdir()
        writer.prepare(threads)
        began = time.perf_counter()
        writer.store(pool)
        self._record(kind, region, "store", threads, repetition, time.perf_counter() - began)
        writer.close()
        volumes.clear(writer.directory)

    def _record(  # noqa: PLR0913, PLR0917 - one measurement has this many names
        self, kind: type[Contestant], region: Region, way: str, threads: int, repetition: int, seconds: float
    ) -> None:
        self._log.write(
            {
                "kind": "store",
                "volume": self._volume,
                "contestant": kind.name,
                "way": way,
                "chunk_mib": region.block_bytes / MIB,
                "threads": 0 if kind.is_one_thread else threads,
                "repetition": repetition,
                "gb_per_second": region.bytes / seconds / 1e9,
            }
        )

    def _contestant(self, kind: type[Contestant], region: Region) -> Contestant:
        directory = self._directory / kind.__name__
        directory.mkdir(parents=True, exist_ok=True)
        return kind(directory, region, is_direct=self._is_direct)

    def _can_run(self, kind: type[Contestant], region: Region) -> bool:
        try:
            self._contestant(kind, region)
        except ImportError as error:
            self._log.say(f"{kind.name}: left out: {error}")
            return False
        return True


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
                for chunk_mib in options.chunk_mib:
                    bench.run(chunk_mib, options.job_mib, options.threads, options.repetitions)
                    log.say(f"{volume}: {chunk_mib:g} MiB measured")
        finally:
            volumes.clear(places["tmpfs"])
            print(report.store_report(options.out))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="for store.jsonl, the tables and the charts")
    parser.add_argument("--disk", type=Path, default=Path.cwd(), help="a directory on the disk to measure (default: .)")
    parser.add_argument("--tmpfs", type=Path, default=Path("/dev/shm"), help="a directory in a tmpfs")
    parser.add_argument("--volumes", type=lambda text: text.split(","), default=["tmpfs", "disk"])
    parser.add_argument("--chunk-mib", type=_numbers, default=list(CHUNKS), help="sizes of a block, e.g. 0.5,8")
    parser.add_argument("--threads", type=lambda text: [int(part) for part in text.split(",")], default=list(THREADS))
    parser.add_argument("--job-mib", type=int, default=512, help="bytes of one load or store, in MiB")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="two sizes, two numbers of threads, under a minute")
    options = parser.parse_args()
    if options.quick:
        options.chunk_mib, options.threads, options.job_mib, options.repetitions = [1.0, 8.0], [1, 4], 64, 3
    return options


def _numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


if __name__ == "__main__":
    main()
