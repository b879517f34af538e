# SPDX-License-Identifier: Apache-2.0
"""Where the rest goes on a volume: from a plain reader or writer to ours, one difference at a time.

``python -m kvtier_netfs glusterfs-distribute -- python -m e2e.bench.store_costs {a}``. Each round measures every way
once, in rotating order, and ratios are of the same round. Beside each rate stands what processors did for a gigabyte,
by program: where the programs of a volume run on the machine that measures, that is what decides. A plain writer
neither looks for the file nor renames it; "and looked for, renamed" makes the calls on the volume that ours makes.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from e2e.bench.contestants import Contestant, FsJob, Kvtier, KvtierMovers, KvtierStaged, Plain, Region
from e2e.bench.volumes import forget_pages

from kvtier_connector.store.checksums import checksum
from kvtier_connector.store.fs import LOCAL, make_directories, new_page
from kvtier_connector.store.layout import block_path

MIB = 1 << 20
MOVERS = "kvtier movers"
"""What their processes are called here."""
_VISIBLE = 0.02
_OF_VOLUMES = ("gluster", "mfs", "ceph", "ganesha")
_WRITTEN_BY_A_WAY = 4
"""Times what is measured, at most: ahead of it where there are to be directories, and to warm movers up."""
_TICKS = os.sysconf("SC_CLK_TCK")


class PlainAsOurs(Plain):
    """The plain one in the directories that ours has, with a header of a page."""

    name = "plain, our directories, a header"

    def path(self, number: int) -> str:
        """Return where ours keeps the block."""
        return f"{self.directory}/{block_path(self.keys[number])}"

    def _read(self, number: int) -> None:
        with self._open(number, os.O_RDONLY) as fd:
            os.preadv(fd, [new_page(), self.region.row(number)], 0)

    def _write(self, number: int) -> None:
        make_directories(LOCAL, os.path.dirname(self.path(number)))  # noqa: PTH120 - as the plain one
        with self._open(number, os.O_WRONLY | os.O_CREAT) as fd:
            os.pwritev(fd, [new_page(), self.region.row(number)], 0)


class PlainRenamed(PlainAsOurs):
    """And written aside, looked for before, renamed."""

    name = "and looked for, renamed"

    def _write(self, number: int) -> None:
        path = self.path(number)
        if os.path.exists(path):  # noqa: PTH110 - one system call
            return
        make_directories(LOCAL, os.path.dirname(path))  # noqa: PTH120 - as the plain one
        flags = os.O_WRONLY | os.O_CREAT | (os.O_DIRECT if self.is_direct else 0)
        fd = os.open(f"{path}-aside", flags, 0o600)
        os.pwritev(fd, [new_page(), self.region.row(number)], 0)
        os.close(fd)
        os.rename(f"{path}-aside", path)  # noqa: PTH104 - one system call


class PlainVerified(PlainAsOurs):
    """And the checksum of each."""

    name = "and a checksum"

    def _read(self, number: int) -> None:
        super()._read(number)
        checksum(self.region.row(number))


class UrgentMovers(KvtierMovers):
    """Movers that give way to nobody."""

    name = "movers that do not give way"

    def prepare(self, threads: int) -> None:
        """Undo what they did when they began."""
        super().prepare(threads)
        for process in _programs():
            if process[1] == MOVERS:
                os.sched_setscheduler(process[0], os.SCHED_OTHER, os.sched_param(0))
                os.setpriority(os.PRIO_PROCESS, process[0], 0)


class StoringMovers(KvtierMovers):
    """As many movers that store as the others have threads; an engine keeps a quarter free for loads."""

    name = "movers that all store"

    def prepare(self, threads: int) -> None:
        """Let all of them."""
        super().prepare(threads)
        self._movers.storing_share = 1.0


WAYS = (
    Plain,
    PlainAsOurs,
    PlainRenamed,
    PlainVerified,
    Kvtier,
    KvtierStaged,
    KvtierMovers,
    StoringMovers,
    UrgentMovers,
    FsJob,
)


def _programs() -> list[tuple[int, str, float]]:
    """Return the processes that may have a part in it: number, program and the seconds that they have run."""
    found = []
    for directory in Path("/proc").iterdir():
        if not directory.name.isdecimal():
            continue
        try:
            words = (directory / "cmdline").read_bytes().split(b"\0")
            fields = (directory / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        # Some servers put in the place of their arguments what they do.
        name = os.path.basename(words[0].decode(errors="replace").partition(" ")[0])  # noqa: PTH119 - of a command line
        if b"kvtier_connector.movers.process" in words and int(fields[1]) == os.getpid():
            name = MOVERS
        elif int(directory.name) == os.getpid():
            name = "this program"
        elif not name.startswith(_OF_VOLUMES):
            name = "others"
        found.append((int(directory.name), name, (int(fields[11]) + int(fields[12])) / _TICKS))
    return found


@contextlib.contextmanager
def going_first() -> Iterator[None]:
    """Have what is measured, and the programs of the volume, run before all else on the machine."""
    ours = [(process, name) for process, name, _ in _programs() if name != "others"]
    try:
        for process, _ in ours:
            _schedule(process, os.SCHED_RR, 1)
        yield
    finally:
        for process, name in ours:
            _schedule(process, os.SCHED_BATCH if name == MOVERS else os.SCHED_OTHER, 0)


def _schedule(process: int, policy: int, priority: int) -> None:
    # Threads and processes may have ended since.
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{process}/task").iterdir():
            with contextlib.suppress(OSError):
                os.sched_setscheduler(int(thread.name), policy, os.sched_param(priority))


def measured(work: Callable[[], object]) -> tuple[float, dict[str, float]]:
    """Return how long it took, and the seconds that programs ran meanwhile."""
    before = {process: seconds for process, _, seconds in _programs()}
    began = time.perf_counter()
    work()
    taken = time.perf_counter() - began
    ran: defaultdict[str, float] = defaultdict(float)
    for process, name, seconds in _programs():
        ran[name] += seconds - before.get(process, seconds)
    return taken, ran


class NoRoomError(Exception):
    """The volume is nearly full; some, MooseFS, give no room back for minutes, and have a writer wait meanwhile."""


class Found:
    """The rates of each round, and the processor seconds by program, of each way and direction."""

    def __init__(self) -> None:
        """Start with none."""
        self.rates: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
        self.costs: defaultdict[tuple[str, str], defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))

    def measure(
        self,
        way: type[Contestant],
        place: Path,
        region: Region,
        pool: ThreadPoolExecutor,
        options: argparse.Namespace,
    ) -> None:
        """Store and load once."""
        free = shutil.disk_usage(place).free
        if free < _WRITTEN_BY_A_WAY * region.bytes:
            raise NoRoomError(f"{free >> 20} MiB are free: measure fewer rounds, or less with --job-mib")
        one = way(place, region, is_direct=True)
        if options.has_directories:
            Kvtier(place, region, is_direct=True).store(pool)
            if not isinstance(one, Kvtier):
                one.store(pool)
            for path in [each for each in place.rglob("*") if each.is_file()]:
                path.unlink()
        one.prepare(options.threads)
        if isinstance(one, KvtierMovers) and not options.has_directories:
            one.warm_up(pool)
        store = functools.partial(Kvtier.store, one) if isinstance(one, KvtierStaged) else one.store
        for direction, work in (("store", store), ("load", one.load)):
            if direction == "load":
                forget_pages(place)
                region.erase()
            with going_first() if options.first else contextlib.nullcontext():
                seconds, ran = measured(functools.partial(work, pool))
            self.rates[direction, way.name].append(region.bytes / seconds / 1e9)
            for name, spent in ran.items():
                self.costs[direction, way.name][name] += spent
        one.close()
        assert region.is_intact(), way.name

    def show(self, direction: str, ways: Sequence[type[Contestant]], gigabytes: float) -> None:
        """Print a table."""
        print(
            f"\n| {direction} | GB/s, median (extremes) | of plain | of vLLM fs | processor seconds a GB, by program |"
        )
        print("|---|---|---|---|---|")
        for way in ways:
            ran = {name: seconds / gigabytes for name, seconds in self.costs[direction, way.name].items()}
            shown = sorted(((seconds, name) for name, seconds in ran.items() if seconds >= _VISIBLE), reverse=True)
            spent_by = ", ".join(f"{name} {seconds:.2f}" for seconds, name in shown[:5])
            rates = self.rates[direction, way.name]
            cells = [f"{statistics.median(rates):.2f} ({min(rates):.2f}-{max(rates):.2f})"]
            for other in (Plain, FsJob):
                ratios = [one / beside for one, beside in zip(rates, self.rates[direction, other.name], strict=True)]
                cells.append(f"{statistics.median(ratios):.0%} ({min(ratios):.0%}-{max(ratios):.0%})")
            print(f"| {way.name} | {' | '.join(cells)} | {spent_by} |")


def main() -> None:
    """Measure, and print a table of each direction."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--chunk-mib", type=int, default=8)
    parser.add_argument("--job-mib", type=int, default=256)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ways", default="", help="names of those to measure, parted by semicolons; all otherwise")
    parser.add_argument(
        "--first", action="store_true", help="what is measured runs before all else on the machine (root)"
    )
    parser.add_argument("--has-directories", action="store_true", help="store where the directories are there already")
    options = parser.parse_args()
    region = Region(options.job_mib // options.chunk_mib, options.chunk_mib * MIB)
    ways = [way for way in WAYS if not options.ways or way in {Plain, FsJob} or way.name in options.ways.split(";")]
    found = Found()
    base = Path(tempfile.mkdtemp(prefix="costs-", dir=options.directory))
    print(f"load before: {' '.join(f'{each:.1f}' for each in os.getloadavg())}", flush=True)
    try:
        with ThreadPoolExecutor(options.threads) as pool:
            for turn in range(options.rounds):
                at = turn % len(ways)
                for way in (*ways[at:], *ways[:at]):
                    place = base / f"{turn}-{ways.index(way)}"
                    place.mkdir()
                    found.measure(way, place, region, pool, options)
                    shutil.rmtree(place)
    except NoRoomError as error:
        sys.exit(f"{options.directory}: {error}")
    finally:
        shutil.rmtree(base, ignore_errors=True)
    for direction in ("load", "store"):
        found.show(direction, ways, options.rounds * region.bytes / 1e9)
    print(f"\nload after: {' '.join(f'{each:.1f}' for each in os.getloadavg())}")


if __name__ == "__main__":
    main()
