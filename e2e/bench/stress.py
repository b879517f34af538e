# SPDX-License-Identifier: Apache-2.0
"""Engines and a janitor on one directory, or on two mounts of a network file system, killed at random.

``python -m e2e.bench.stress --kind KIND``; `local` is a directory of this machine, other kinds have servers. Four
engines, two a mount, move blocks with real workers, two of them compressed. Engines, the janitor and servers are ended
with SIGKILL, and servers come back; half-way all servers stop for 30 s.

No row may get a byte that its block does not have, and no engine may end by itself. In a local directory the blocks
never take more than the budget and the writes under way. At the end, with all servers back, every engine reads again.
Each stored block that is retained is there, and no name is on two servers. The blocks take no more than the budget, and
`kvtier check` finds nothing. Exit code 1: one of these did not hold. 77: this machine cannot mount the file system.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import mmap
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kvtier_connector.contract.errors import StoreUnavailable
from kvtier_connector.contract.janitor import JanitorConfig, encode
from kvtier_connector.io_workers.buffers import Region
from kvtier_connector.io_workers.pool import WorkerPool
from kvtier_connector.io_workers.tasks import Done, Lane, Task
from kvtier_connector.io_workers.worker import PoolSettings
from kvtier_connector.store import fsck
from kvtier_connector.store.blockstore import BlockStore, Hit, Stored
from kvtier_connector.store.header import HEADER_BYTES
from kvtier_connector.store.health import Breaker
from kvtier_connector.store.identity import claim
from kvtier_connector.store.journal import JournalWriter, Op
from kvtier_connector.store.layout import BlockKey, Lineage, block_path
from kvtier_connector.store.permit import PERMIT_FILE, StorePermit
from kvtier_netfs import KINDS
from kvtier_netfs.gluster import GlusterDistribute
from kvtier_netfs.volume import UnavailableError

LOCAL = "local"
"""Kind of a volume that is a directory of this machine."""
ROW_BYTES = 1 << 18
BLOCK_BYTES = HEADER_BYTES + ROW_BYTES
CHAIN = 6
"""Blocks of one prompt."""
CHAINS = 120
BUDGET_BLOCKS = 300
"""Fewer than there are: the janitor has to evict all the time."""
_DEADLINE_SECONDS = 3.0
RETAINED = 12
"""Chains that engines ask the janitor to keep."""
ENGINES = 4
STALL_SECONDS = 30.0
RECOVERY_SECONDS = 180.0
FILL_SECONDS = 120.0
"""Longest time that a busy machine may take besides to fill the budget of a local directory."""
FULL_SHARE = 0.75
"""Share of the budget that blocks must reach, or a run shows nothing; killed engines hold the rest by their permits."""
UNDER_WAY_BYTES = ENGINES * CHAIN * BLOCK_BYTES
_SERVER_SHARE, _JANITOR_SHARE = 0.25, 0.4


def key(chain: int, position: int) -> BlockKey:
    """Return the name of a block."""
    return BlockKey(hashlib.sha256(f"{chain}/{position}".encode()).digest(), 0)


def content(of: BlockKey) -> bytes:
    """Return what the block has: a half that compresses, and one that does not."""
    return (of.hash * (ROW_BYTES // 64)) + random.Random(of.hash).randbytes(ROW_BYTES // 2)


class StressEngine:
    """Loads and stores chains for ever, as an engine's tier does; a second thread talks to the janitor."""

    def __init__(self, root: str, log: str, seed: int, compression: str) -> None:
        """Make a CPU tier of one chain, and workers; `log` gets each block that was stored, loaded or read wrongly."""
        self._source = random.Random(seed)
        self._fd = os.memfd_create("cpu-tier")
        os.ftruncate(self._fd, CHAIN * ROW_BYTES)
        self._memory = mmap.mmap(self._fd, CHAIN * ROW_BYTES)
        self._journal = JournalWriter(Path(root))
        self._permit = StorePermit(str(Path(root).parent / PERMIT_FILE))
        rows = memoryview(self._memory).cast("B", (CHAIN, ROW_BYTES))
        settings = PoolSettings(
            root=root, workers=2, deadline_seconds=_DEADLINE_SECONDS, retry_seconds=2.0, compression=compression
        )
        regions = [Region(self._fd, 0, CHAIN)]
        self._workers = WorkerPool(settings, permit=self._permit, breaker=Breaker(), rows=rows, regions=regions)
        rows.release()
        self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._number = 0

    def run(self) -> None:
        """Work until it is killed."""
        threading.Thread(target=self._follow, daemon=True).start()
        self._workers.start()
        while True:
            chain = int(self._source.paretovariate(0.6)) % CHAINS
            keys = [key(chain, position) for position in range(CHAIN)]
            self._memory[:] = bytes(len(self._memory))
            loaded = self._do([Task(Lane.LOAD, each, row) for row, each in enumerate(keys)])
            missing = []
            for row, (each, done) in enumerate(zip(keys, loaded, strict=True)):
                if not isinstance(done.outcome, Hit):
                    missing.append(row)
                elif self._row(row) != content(each):
                    self._note("wrong", each)
                else:
                    self._note("loaded", each)
            if loaded and isinstance(loaded[-1].outcome, Hit):
                self._journal.append(Op.USED, keys[-1], ROW_BYTES)
            if chain < RETAINED:
                self._journal.append(Op.RETAINED, keys[-1], ROW_BYTES, ahead_seconds=86_400.0)
            for row in missing:
                self._memory[row * ROW_BYTES : (row + 1) * ROW_BYTES] = content(keys[row])
            parents = [b"", *(each.hash for each in keys)]
            stored = self._do([Task(Lane.STORE, keys[row], row, Lineage(parents[row], row)) for row in missing])
            for row, done in zip(missing, stored, strict=True):
                if isinstance(done.outcome, Stored):
                    written = done.outcome.bytes_written - HEADER_BYTES
                    self._journal.append(Op.STORED, keys[row], written, Lineage(parents[row], row))
                    self._note("stored", keys[row])

    def _do(self, tasks: list[Task]) -> list[Done]:
        """Have the workers do tasks; each ends once, whatever the volume does."""
        first, self._number = self._number, self._number + len(tasks)
        self._workers.submit((first + index, task) for index, task in enumerate(tasks))
        ended: dict[int, Done] = {}
        while len(ended) < len(tasks):
            for done in self._workers.collect():
                assert done.task not in ended, "a task ended twice"
                ended[done.task] = done
            time.sleep(0.002)
        return [ended[first + index] for index in range(len(tasks))]

    def _follow(self) -> None:
        while True:
            with contextlib.suppress(StoreUnavailable):
                self._journal.flush()
                if (modified_ns := self._journal.ask_modified_ns()) is not None:
                    self._permit.set_time(modified_ns)
            self._permit.refresh()
            time.sleep(0.5)

    def _row(self, row: int) -> bytes:
        return self._memory[row * ROW_BYTES : (row + 1) * ROW_BYTES]

    def _note(self, what: str, of: BlockKey) -> None:
        os.write(self._log, f"{what} {of.hash.hex()}\n".encode())


@dataclass
class StressRun:
    """Events and figures of a run."""

    kind: str
    seconds: float
    engine_kills: int = 0
    janitor_kills: int = 0
    server_kills: int = 0
    stalls: int = 0
    loads: int = 0
    stores: int = 0
    retained_stores: int = 0
    blocks_at_end: int = 0
    compressed_at_end: int = 0
    bytes_at_end: int = 0
    max_bytes: int = 0
    most_bytes: int = 0
    """Of blocks at one moment, in a local directory."""
    recovered_seconds: float = 0.0
    problems: list[str] = field(default_factory=list)


class Stress:
    """One run on one volume. One thread."""

    def __init__(self, volume: Any, data: Path, run: StressRun, seed: int) -> None:
        """Claim the directory of a tier."""
        self.result = run
        self._volume = volume
        self._data = data
        self._source = random.Random(seed)
        self._roots = [mount / "ns.stress" / "aa" for mount in (volume.a, volume.b)]
        claim(self._roots[0], {"bench": "stress"}, "aa")
        run.max_bytes = BUDGET_BLOCKS * BLOCK_BYTES
        self._config = data / "janitor.json"
        self._config.write_text(
            encode(
                JanitorConfig(
                    tier="ns/stress",
                    tier_dir=str(self._roots[1].parent),
                    current="aa",
                    max_bytes=run.max_bytes,
                    sweep_seconds=1.0,
                    # Blocks of a server that is away are taken for gone until the next walk.
                    verify_seconds=60.0,
                    http_port=0,
                )
            )
        )
        self._output = (data / "output").open("w")
        self._engines = [self._start_engine(number) for number in range(ENGINES)]
        self._janitor = self._start_janitor()
        self._down: dict[str, float] = {}

    def go_on(self) -> None:
        """Kill one thing or another until the time is over, with a stall of all servers half-way.

        It also goes on until both kinds were killed and, in a local directory, blocks have nearly filled the budget.
        """
        began = time.monotonic()
        half, ends, next_kill = began + self.result.seconds / 2, began + self.result.seconds, began + 3.0
        full_bytes = 0 if self._volume.serving else FULL_SHARE * self.result.max_bytes
        while (now := time.monotonic()) < ends or (now < ends + FILL_SECONDS and self._is_poor(full_bytes)):
            for name in [name for name, back in self._down.items() if back <= now]:
                self._volume.servers.start(name)
                del self._down[name]
            if not self._volume.serving:
                self.result.most_bytes = max(self.result.most_bytes, self._used_bytes())
            if self._volume.serving and not self.result.stalls and now >= half and not self._down:
                self._volume.servers.pause(*self._volume.serving)
                time.sleep(STALL_SECONDS)
                self._volume.servers.resume(*self._volume.serving)
                self.result.stalls += 1
            elif now >= next_kill:
                # Engines of a busy machine that are killed all the time fill nothing.
                next_kill = now + self._source.uniform(0.5, 4.0) * (1 if now < ends else 4)
                self._kill(now)
            self._look_after_engines()
            time.sleep(0.1)
        for name in self._down:
            self._volume.servers.start(name)

    def _is_poor(self, full_bytes: float) -> bool:
        return self.result.most_bytes < full_bytes or not (self.result.janitor_kills and self.result.engine_kills)

    def _kill(self, now: float) -> None:
        draw = self._source.random()
        if draw < _SERVER_SHARE:
            up = [name for name in self._volume.serving if name not in self._down]
            if up:
                name = self._source.choice(up)
                self._volume.servers.kill(name)
                self._down[name] = now + self._source.uniform(1.0, 8.0)
                self.result.server_kills += 1
        elif draw < _JANITOR_SHARE:
            self._janitor.kill()
            self._janitor.wait()
            self._janitor = self._start_janitor()
            self.result.janitor_kills += 1
        else:
            number = self._source.randrange(ENGINES)
            self._engines[number].kill()
            self._engines[number].wait()
            self._engines[number] = self._start_engine(number)
            self.result.engine_kills += 1

    def _look_after_engines(self) -> None:
        for number, engine in enumerate(self._engines):
            if engine.poll() is not None:
                self.result.problems.append(f"engine {number} ended by itself with {engine.returncode}")
                self._engines[number] = self._start_engine(number)

    def wait_for_recovery(self) -> None:
        """Wait until each engine has read a block again, and the janitor has made room."""
        began = time.monotonic()
        before = [self._notes(number).count("loaded ") for number in range(ENGINES)]
        while time.monotonic() - began < RECOVERY_SECONDS:
            has_read = all(self._notes(number).count("loaded ") > before[number] for number in range(ENGINES))
            is_within = self._used_bytes() <= self.result.max_bytes
            if has_read and is_within:
                self.result.recovered_seconds = round(time.monotonic() - began, 1)
                return
            time.sleep(0.5)
        self.result.problems.append(
            f"{RECOVERY_SECONDS:g} s after all servers were back: {'' if has_read else 'not '}every engine reads, "
            f"the budget is {'' if is_within else 'not '}kept"
        )

    def close(self) -> None:
        """End what runs."""
        for engine in self._engines:
            engine.kill()
            engine.wait()
        time.sleep(2.0)
        self._janitor.send_signal(signal.SIGTERM)
        self._janitor.wait(60)
        self._output.close()

    def judge(self) -> None:
        """Say what does not hold at the end."""
        run, notes = self.result, [self._notes(number) for number in range(ENGINES)]
        run.loads = sum(text.count("loaded ") for text in notes)
        run.stores = sum(text.count("stored ") for text in notes)
        run.problems += [f"a wrong byte was read: {line}" for text in notes for line in _lines(text, "wrong")]
        retained = {key(chain, position) for chain in range(RETAINED) for position in range(CHAIN)}
        heard = {line for text in notes for line in _lines(text, "stored")}
        kept = [each for each in retained if each.hash.hex() in heard]
        run.retained_stores = len(kept)
        reader, buffer = BlockStore(self._roots[0]), memoryview(mmap.mmap(-1, ROW_BYTES))
        deadline = time.monotonic() + RECOVERY_SECONDS
        for each in kept:
            # This node may be the last to hear that a server is back, whose files do not exist for it until then.
            while not isinstance(found := reader.get(each, buffer), Hit) and time.monotonic() < deadline:
                time.sleep(0.5)
            if not isinstance(found, Hit):
                on_server = "" if Path(block_path(each)).name in self._copies() else "not "
                run.problems.append(
                    f"{block_path(each)} was stored and retained, and is lost: {found}, {on_server}on a server"
                )
            elif bytes(buffer) != content(each):
                run.problems.append(f"{block_path(each)} is not what was stored")
        for root in self._roots:
            report = fsck.check_all(root.parent)
            run.problems += [f"check: {problem.path}: {problem.kind}" for problem in report.problems]
        run.blocks_at_end, run.compressed_at_end = report.blocks, report.compressed
        run.bytes_at_end = self._used_bytes()
        if run.most_bytes > run.max_bytes + UNDER_WAY_BYTES:
            run.problems.append(f"{run.most_bytes} bytes were used of {run.max_bytes} and what was under way")
        if run.bytes_at_end > run.max_bytes:
            run.problems.append(f"{run.bytes_at_end} bytes are used of {run.max_bytes}")
        run.problems += [f"{name} is on {count} servers" for name, count in self._copies().items() if count > 1]
        output = (self._data / "output").read_text()
        if "Traceback" in output:
            run.problems.append(output[output.index("Traceback") :][:2000])

    def _copies(self) -> dict[str, int]:
        """Count on how many servers of a distributed volume each block's bytes are."""
        found: dict[str, int] = {}
        if type(self._volume) is GlusterDistribute:
            for number in range(len(self._volume.serving)):
                for path in (self._volume.brick(number) / "ns.stress").rglob("*.kvb"):
                    # A pointer to the other server has no bytes.
                    if path.stat().st_size:
                        found[path.name] = found.get(path.name, 0) + 1
        return found

    def _used_bytes(self) -> int:
        """Return what blocks took at one moment: those that one scan found and the next one found again.

        Blocks come and go during a scan, so one alone counts more than ever existed at once.
        """
        found = _files(self._roots[1] / "blocks") & _files(self._roots[1] / "blocks")
        return sum(size for _, _, size in found)

    def _start_engine(self, number: int) -> subprocess.Popen[bytes]:
        log, compression = self._data / f"engine{number}.log", "Always" if number >= ENGINES // 2 else "Off"
        settings = [str(self._roots[number % 2]), str(log), self._source.getrandbits(31), compression]
        command = [sys.executable, "-m", "e2e.bench.stress", "--engine", json.dumps(settings)]
        path = os.pathsep.join(each or "." for each in sys.path)
        environment = {**os.environ, "PYTHONPATH": path}
        return subprocess.Popen(command, stdout=self._output, stderr=self._output, env=environment)

    def _start_janitor(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "kvtier_connector.janitor", "--config", str(self._config)]
        return subprocess.Popen(command, stdout=self._output, stderr=self._output)

    def _notes(self, number: int) -> str:
        path = self._data / f"engine{number}.log"
        return path.read_text() if path.exists() else ""


def _lines(text: str, what: str) -> Iterator[str]:
    return (line.partition(" ")[2] for line in text.splitlines() if line.startswith(f"{what} "))


def _files(directory: Path) -> set[tuple[str, int, int]]:
    """Return path, number and size of the block files; they may vanish meanwhile."""
    found = set()
    for path in directory.rglob("*.kvb"):
        with contextlib.suppress(FileNotFoundError):
            status = path.stat()
            found.add((str(path), status.st_ino, status.st_size))
    return found


@contextlib.contextmanager
def local_directory(directory: Path) -> Iterator[Any]:
    """Stand for a volume that has no servers; its parent is temporary."""
    directory.mkdir(parents=True)
    yield SimpleNamespace(a=directory, b=directory, serving=(), servers=None)


def stress(kind: str, seconds: float, seed: int) -> StressRun:
    """Run it, and return what was seen; raise UnavailableError where this machine cannot mount the file system."""
    run = StressRun(kind, seconds)
    with (
        tempfile.TemporaryDirectory(prefix="kvtier-stress-", ignore_cleanup_errors=True) as data,
        (local_directory if kind == LOCAL else KINDS[kind])(Path(data) / "volume") as volume,
    ):
        what = Stress(volume, Path(data), run, seed)
        try:
            what.go_on()
            what.wait_for_recovery()
        finally:
            what.close()
        what.judge()
    return run


def main() -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(".")[0])
    parser.add_argument("--kind", choices=[LOCAL, *KINDS], default=GlusterDistribute.name)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine:
        StressEngine(*json.loads(options.engine)).run()
    try:
        run = stress(options.kind, options.seconds, options.seed)
    except UnavailableError as error:
        print(f"{options.kind}: {error}", file=sys.stderr)
        return 77
    print(json.dumps({"date": time.strftime("%Y-%m-%d"), **asdict(run)}, indent=2))
    return 1 if run.problems else 0


if __name__ == "__main__":
    sys.exit(main())
