# SPDX-License-Identifier: Apache-2.0
"""The store benchmark: kvtier's block store beside vLLM's own fs code and a plain parallel reader, in one run.

Each repetition measures every contestant once, in rotating order, so that a drift of the machine favours nobody. On a
disk the page cache is dropped before each load. Every load is compared with what was written.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from e2e.bench import contestants, journal, volumes
from e2e.bench.contestants import Contestant, Region
from e2e.bench.store_report import store_report

from kvtier_connector.store.fs import LOCAL, DirectIo, new_page

MIB = 1 << 20
CHUNKS = (0.5, 1, 2, 4, 8, 16)
THREADS = (1, 2, 4, 8, 16, 32)


class Bench:
    """Measures one kind of volume. One thread, besides the pool's."""

    def __init__(self, volume: str, directory: Path, log: journal.Journal) -> None:
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
        classes = [kind for kind in contestants.ALL if self._can_run(kind, region)]
        try:
            with ThreadPoolExecutor(1) as pool:
                for kind in classes:
                    if not kind.loads_from:
                        self._contestant(kind, region).store(pool)
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
        if kind is contestants.Checksum:
            # It brought nothing; the next contestant needs the bytes.
            self._contestant(contestants.Plain, region).load(pool)
        if not region.is_intact():
            raise AssertionError(f"{kind.name}: the load did not bring what was written")
        if kind.stores:
            writer = kind(self._directory / f"stored-by-{kind.directory_name()}", region, is_direct=self._is_direct)
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
        directory = self._directory / kind.directory_name(kind.loads_from)
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
    log = journal.Journal(path)
    log.write(journal.describe_run(job_mib=options.job_mib, repetitions=options.repetitions))
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
            print(store_report(options.out))


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
