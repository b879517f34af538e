# SPDX-License-Identifier: Apache-2.0
"""The janitor benchmark: ``python e2e/bench/janitor.py million|stress --out FILE``.

million: the janitor as a process with a million blocks. It measures the first count, a restart, the cost at rest and a
sweep that frees a quarter. Memory and processor time come from /proc, system calls from strace.

stress: ten writers that also read, and a janitor, all killed with SIGKILL at random for minutes. No reader may get a
wrong byte, blocks may not take more than the budget and the writes under way, and `kvtier check` must find nothing.
The exit status is 1 when one of these did not hold.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvtier_connector.contract.janitor import JanitorConfig, encode
from kvtier_connector.store import fsck
from kvtier_connector.store.fs import LOCAL, make_directories
from kvtier_connector.store.header import HEADER_BYTES, Header, encode_header
from kvtier_connector.store.identity import claim
from kvtier_connector.store.journal import JournalLimits, JournalWriter, Op
from kvtier_connector.store.layout import BlockKey, Home, Lineage, block_path

TICKS = os.sysconf("SC_CLK_TCK")
WINDOW_SECONDS = 30.0
"""System calls are counted over so long at a time."""
CHAIN = 16
"""Blocks of one prefix."""
PAYLOAD_BYTES = 16 << 10
BLOCK_BYTES = HEADER_BYTES + PAYLOAD_BYTES
_FILL_SECONDS = 120.0
"""Longest time that a busy machine may take besides to fill the budget."""
BATCH = 4
"""Blocks that a writer has under way between two looks at what the others wrote."""

WORKER = """
import hashlib, os, random, sys, time
from pathlib import Path
root, seed, payload_bytes, batch, keys, mistakes = sys.argv[1], *map(int, sys.argv[2:6]), sys.argv[6]
from kvtier_connector.store.blockstore import BlockStore, Hit, Stored
from kvtier_connector.store.header import HEADER_BYTES
from kvtier_connector.store.journal import JournalWriter, Op
from kvtier_connector.store.layout import BlockKey, Lineage
from kvtier_connector.store.permit import PERMIT_FILE, StorePermit, VolumeClock
source = random.Random(seed)
store, journal, clock = BlockStore(Path(root), direct=False), JournalWriter(Path(root)), VolumeClock()
permit = StorePermit(str(Path(root).parent / PERMIT_FILE), clock)
def tell():
    journal.flush()
    os.utime(Path(root, "journal"))
    clock.set(os.stat(Path(root, "journal")).st_mtime_ns)
    permit.refresh()
tell()
buffer = memoryview(bytearray(payload_bytes))
def key(chain, position):
    return BlockKey(hashlib.sha256(f"{chain}/{position}".encode()).digest(), 0)
def payload(of):
    return memoryview((of.hash * (payload_bytes // 32 + 1))[:payload_bytes])
while True:
    chain = int(source.paretovariate(0.8)) % keys
    parent, last = b"", None
    for position in range(8):
        this = key(chain, position)
        outcome = store.get(this, buffer)
        if isinstance(outcome, Hit):
            if buffer != payload(this):
                with open(mistakes, "a") as file:
                    file.write(this.hash.hex() + "\\n")
            last = this
        elif permit.reserve(HEADER_BYTES + payload_bytes) is None:
            is_stored = isinstance(store.put(this, payload(this), Lineage(parent, position)), Stored)
            permit.end(HEADER_BYTES + payload_bytes, (HEADER_BYTES + payload_bytes) * is_stored)
            if is_stored:
                journal.append(Op.STORED, this, payload_bytes, Lineage(parent, position))
        parent = this.hash
        if position % batch == batch - 1:
            tell()
    if last is not None:
        journal.append(Op.USED, last, payload_bytes)
    tell()
"""


def fill(tier_dir: Path, digest: str, *, blocks: int, payload_bytes: int, writers: int = 10) -> Path:
    """Write that many blocks in prefixes of `CHAIN`, recorded in the journals of several engines; return the root.

    The payload is a hole in the file: names, headers and journals are what the janitor looks at.
    """
    root = tier_dir / digest
    claim(root, {"bench": "janitor"}, digest)
    source = random.Random(1)
    limits = JournalLimits(segments=1000)
    journals = [JournalWriter(root, limits=limits) for _ in range(writers)]
    made: set[str] = set()
    parent = b""
    for number in range(blocks):
        position = number % CHAIN
        lineage = Lineage(parent if position else b"", position)
        key = BlockKey(source.randbytes(32), 0)
        parent = key.hash
        path = f"{root}/{block_path(key)}"
        directory = path.rpartition("/")[0]
        if directory not in made:
            make_directories(LOCAL, directory)
            made.add(directory)
        page = encode_header(Header(key, payload_bytes, bytes(32), time.time_ns(), Home(digest), lineage))
        fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o640)
        try:
            os.write(fd, page)
            os.ftruncate(fd, HEADER_BYTES + payload_bytes)
        finally:
            os.close(fd)
        journal = journals[number // CHAIN % writers]
        journal.append(Op.STORED, key, payload_bytes, lineage)
        if number % 20_000 == 0:
            for each in journals:
                each.flush()
    for each in journals:
        each.flush()
    return root


class Process:
    """The janitor as a process."""

    def __init__(self, config_file: Path, log: Path) -> None:
        """Start it and wait until it serves."""
        self.log = log
        self.started = time.monotonic()
        with log.open("w") as sink:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", "kvtier_connector.janitor", "--config", str(config_file)],
                stdout=sink,
                stderr=sink,
            )
        self.wait(lambda: "serving on port" in log.read_text(), 60)
        self.port = int(re.findall(r"serving on port (\d+)", log.read_text())[0])

    def wait(self, is_so: Callable[[], bool], seconds: float) -> float:
        """Wait until it is so, and return the seconds that took."""
        began = time.monotonic()
        while not is_so():
            if time.monotonic() - began > seconds or self.popen.poll() is not None:
                raise TimeoutError(self.log.read_text()[-2000:])
            time.sleep(0.1)
        return time.monotonic() - began

    def usage(self) -> dict[str, Any]:
        """Return what it says at /usage."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/usage", timeout=30) as answer:
            document: dict[str, Any] = json.load(answer)
        return document

    def cpu_seconds(self) -> float:
        """Return what it took of all cores so far."""
        fields = Path(f"/proc/{self.popen.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS

    def memory_mib(self, which: str) -> float:
        """Return one of the numbers of /proc: VmRSS now, VmHWM at most so far."""
        status = Path(f"/proc/{self.popen.pid}/status").read_text()
        return int(re.findall(rf"{which}:\s+(\d+) kB", status)[0]) / 1024

    def syscalls_per_second(self, seconds: float) -> float:
        """Count system calls of all threads for so long."""
        counted = subprocess.run(
            ["timeout", "-s", "INT", str(seconds), "strace", "-c", "-f", "-p", str(self.popen.pid)],
            capture_output=True,
            text=True,
            check=False,
        )
        totals = re.findall(r"^100\.00\s+\S+\s+\S+\s+(\d+)", counted.stderr, re.MULTILINE)
        if not totals:
            raise RuntimeError(f"strace counted nothing: {counted.stderr[-500:]}")
        return int(totals[0]) / seconds

    def stop(self) -> float:
        """End it, and return the seconds that took."""
        began = time.monotonic()
        self.popen.send_signal(signal.SIGTERM)
        self.popen.wait(120)
        return time.monotonic() - began


def million(data: Path, blocks: int, idle_seconds: float) -> dict[str, Any]:
    """Return the figures of a janitor with so many blocks."""
    tier_dir = data / "ns.bench"
    payload = 64
    began = time.monotonic()
    fill(tier_dir, "aa", blocks=blocks, payload_bytes=payload)
    result: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "cores": os.cpu_count(),
        "blocks": blocks,
        "fill_seconds": time.monotonic() - began,
    }
    config = JanitorConfig(tier="ns/bench", tier_dir=str(tier_dir), current="aa", http_port=0)
    config_file = data / "janitor.json"
    config_file.write_text(encode(config))
    process = Process(config_file, data / "first.log")
    result["first_count_seconds"] = process.wait(lambda: process.usage()["is_counted"], 1800)
    result["first_count_cpu_seconds"] = process.cpu_seconds()
    assert process.usage()["blocks"] == blocks, process.usage()
    result["first_count_rss_mib"] = process.memory_mib("VmHWM")
    result["stop_seconds"] = process.stop()
    result["ledger_bytes"] = (tier_dir / "janitor.catalog").stat().st_size

    process = Process(config_file, data / "second.log")
    result["restart_seconds"] = process.wait(lambda: process.usage()["is_counted"], 600)
    time.sleep(20)
    before, began = process.cpu_seconds(), time.monotonic()
    time.sleep(60)
    result["idle_cpu_percent"] = 100 * (process.cpu_seconds() - before) / (time.monotonic() - began)
    windows = [process.syscalls_per_second(WINDOW_SECONDS) for _ in range(max(1, round(idle_seconds / WINDOW_SECONDS)))]
    result["idle_syscalls_per_second"] = sum(windows) / len(windows)
    result["idle_syscalls_per_second_in_the_worst_30_s"] = max(windows)
    result["idle_rss_mib"] = process.memory_mib("VmRSS")

    limit = int(blocks * (HEADER_BYTES + payload))
    before = process.cpu_seconds()
    config_file.write_text(encode(replace(config, max_bytes=limit, high_watermark=0.9, low_watermark=0.75)))
    result["sweep_seconds"] = process.wait(lambda: process.usage()["blocks"] <= blocks * 0.75, 1800)
    result["sweep_cpu_seconds"] = process.cpu_seconds() - before
    result["sweep_peak_rss_mib"] = process.memory_mib("VmHWM")
    result["freed_blocks"] = blocks - process.usage()["blocks"]
    process.stop()
    files = sum(len(names) for _, _, names in os.walk(tier_dir / "aa" / "blocks"))
    assert files == blocks - result["freed_blocks"], (files, result)
    result["files_left"] = files
    return result


@dataclass
class JanitorRun:
    """Events and figures of a run."""

    seconds: float
    kills: int = 0
    janitor_kills: int = 0
    most_bytes: int = 0
    max_bytes: int = 0
    allowed_bytes: int = 0
    problems: list[str] = field(default_factory=list)


def used_bytes(root: Path) -> int:
    """Return what blocks took at one moment: those that one look found and the next one found again.

    Blocks come and go during a scan, so one scan alone counts more than ever existed at once.
    """
    return sum(size for _, _, size in _blocks(root) & _blocks(root))


def _blocks(root: Path) -> set[tuple[str, int, int]]:
    """Return path, number and size of the block files; they may vanish meanwhile."""
    found = set()
    for directory, _, names in os.walk(root / "blocks"):
        for name in names:
            if name.endswith(".kvb"):
                path = f"{directory}/{name}"
                try:
                    status = os.stat(path)  # noqa: PTH116 - a million times
                except FileNotFoundError:
                    continue
                found.add((path, status.st_ino, status.st_size))
    return found


def stress(data: Path, *, seconds: float, writers: int, blocks: int, seed: int) -> JanitorRun:
    """Run it until blocks have nearly filled the budget, and at least so long; return what was seen."""
    source = random.Random(seed)
    tier_dir = data / "ns.stress"
    root = tier_dir / "aa"
    claim(root, {"bench": "stress"}, "aa")
    run = JanitorRun(seconds=seconds, max_bytes=blocks * BLOCK_BYTES)
    run.allowed_bytes = run.max_bytes + writers * BATCH * BLOCK_BYTES
    config = JanitorConfig(
        tier="ns/stress", tier_dir=str(tier_dir), current="aa", max_bytes=run.max_bytes, sweep_seconds=0.5, http_port=0
    )
    config_file, mistakes = data / "janitor.json", data / "mistakes"
    config_file.write_text(encode(config))
    log = (data / "log").open("w")

    def start_worker(number: int) -> subprocess.Popen[bytes]:
        numbers = (number, PAYLOAD_BYTES, BATCH, blocks)
        return subprocess.Popen(
            [sys.executable, "-c", WORKER, str(root), *map(str, numbers), str(mistakes)], stdout=log, stderr=log
        )

    def start_janitor() -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "kvtier_connector.janitor", "--config", str(config_file)]
        return subprocess.Popen(command, stdout=log, stderr=log)

    janitor = start_janitor()
    workers = [start_worker(number) for number in range(writers)]
    ends = time.monotonic() + seconds
    next_kill = time.monotonic() + 1
    try:
        full_bytes = int(0.85 * run.max_bytes)
        while time.monotonic() < ends or (run.most_bytes < full_bytes and time.monotonic() < ends + _FILL_SECONDS):
            run.most_bytes = max(run.most_bytes, used_bytes(root))
            if time.monotonic() >= next_kill:
                next_kill = time.monotonic() + source.uniform(0.2, 3.0)
                if source.random() < 0.2:  # noqa: PLR2004 - one of five
                    janitor.kill()
                    janitor.wait()
                    janitor = start_janitor()
                    run.janitor_kills += 1
                else:
                    number = source.randrange(writers)
                    workers[number].kill()
                    workers[number].wait()
                    workers[number] = start_worker(source.getrandbits(31))
                    run.kills += 1
            for number, worker in enumerate(workers):
                if worker.poll() is not None:
                    run.problems.append(f"writer {number} ended by itself with {worker.returncode}")
                    workers[number] = start_worker(source.getrandbits(31))
            time.sleep(0.05)
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
        janitor.send_signal(signal.SIGTERM)
        janitor.wait(60)
        log.close()
    _judge(run, tier_dir, mistakes)
    return run


def _judge(run: JanitorRun, tier_dir: Path, mistakes: Path) -> None:
    if mistakes.exists():
        run.problems.append(f"wrong bytes were read: {mistakes.read_text()[:500]}")
    if run.most_bytes > run.allowed_bytes:
        run.problems.append(f"{run.most_bytes} bytes were used of {run.allowed_bytes} allowed")
    # Partial files of killed writers are young; an hour later the janitor removes them.
    report = fsck.check_all(tier_dir)
    run.problems += [f"check: {problem.path}: {problem.kind}" for problem in report.problems]


def main() -> int:
    """Run one of the two, print its figures, and remove its files; return 1 when something did not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("million", "stress"))
    parser.add_argument("--data", type=Path, default=Path("/dev/shm/kvtier-janitor-bench"))
    parser.add_argument("--blocks", type=int, help="that stand (1,000,000), or that the budget has room for (5,000)")
    parser.add_argument("--seconds", type=float, help="at rest (150), or of stress (600)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    shutil.rmtree(options.data, ignore_errors=True)
    options.data.mkdir(parents=True)
    problems: list[str] = []
    try:
        if options.what == "million":
            result = million(options.data, options.blocks or 1_000_000, options.seconds or 150.0)
        else:
            run = stress(
                options.data,
                seconds=options.seconds or 600.0,
                writers=10,
                blocks=options.blocks or 5000,
                seed=options.seed,
            )
            log = (options.data / "log").read_text()
            if "Traceback" in log:
                run.problems.append(log[log.index("Traceback") :][:2000])
            result, problems = {"date": time.strftime("%Y-%m-%d"), "writers": 10, **vars(run)}, run.problems
    finally:
        shutil.rmtree(options.data, ignore_errors=True)
    text = json.dumps(result, indent=2)
    print(text)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text + "\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
