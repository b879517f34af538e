# SPDX-License-Identifier: Apache-2.0
"""Ten writers that read, too, and a janitor on one directory, all killed with SIGKILL now and then, for minutes.

What must hold at the end, and where it can be seen, at any time: no reader got a wrong byte; the blocks never take more
than the budget and what the writers had under way; `kvtier check` finds nothing. Exit code 1 says what did not hold.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvtier_connector.contract_janitor import JanitorConfig, encode
from kvtier_connector.store import check
from kvtier_connector.store.format import HEADER_BYTES
from kvtier_connector.store.identity import claim

PAYLOAD_BYTES = 16 << 10
BLOCK_BYTES = HEADER_BYTES + PAYLOAD_BYTES
BATCH = 4
"""Blocks that a writer has under way between two looks at what the others wrote."""

WORKER = """
import random, sys, time
from pathlib import Path
root, seed, max_bytes, payload_bytes, batch, keys, mistakes = sys.argv[1], *map(int, sys.argv[2:7]), sys.argv[7]
from kvtier_connector.store.blockstore import Hit
from kvtier_connector.store.layout import BlockKey, Lineage
from kvtier_connector.store.shared import SharedStore
import hashlib
source = random.Random(seed)
store = SharedStore(Path(root), max_bytes=max_bytes, direct=False)
store.synchronize()
store.rescan()
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
        else:
            store.put(this, payload(this), Lineage(parent, position))
        parent = this.hash
        if position % batch == batch - 1:
            store.synchronize()
    if last is not None:
        store.note_used(last, payload_bytes)
    store.synchronize()
"""


@dataclass
class Run:
    """What a run saw."""

    seconds: float
    kills: int = 0
    janitor_kills: int = 0
    most_bytes: int = 0
    max_bytes: int = 0
    allowed_bytes: int = 0
    evicted: int = 0
    problems: list[str] = field(default_factory=list)


def used_bytes(root: Path) -> int:
    """Return what blocks took at one moment: those that one look found and the next one found again.

    Of blocks that go and come while somebody looks, one look counts more than there ever were at once.
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


def stress(data: Path, *, seconds: float, writers: int, blocks: int, seed: int) -> Run:
    """Run it, and return what was seen."""
    source = random.Random(seed)
    tier_dir = data / "ns.stress"
    root = tier_dir / "aa"
    claim(root, {"bench": "stress"}, "aa")
    run = Run(seconds=seconds, max_bytes=blocks * BLOCK_BYTES)
    run.allowed_bytes = run.max_bytes + writers * BATCH * BLOCK_BYTES
    config = JanitorConfig(
        tier="ns/stress", tier_dir=str(tier_dir), current="aa", max_bytes=run.max_bytes, sweep_seconds=0.5, http_port=0
    )
    config_file, mistakes = data / "janitor.json", data / "mistakes"
    config_file.write_text(encode(config))
    log = (data / "log").open("w")

    def start_worker(number: int) -> subprocess.Popen[bytes]:
        numbers = (number, run.max_bytes, PAYLOAD_BYTES, BATCH, blocks)
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
        while time.monotonic() < ends:
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
        time.sleep(0)
        janitor.send_signal(signal.SIGTERM)
        janitor.wait(60)
        log.close()
    _judge(run, tier_dir, mistakes)
    return run


def _judge(run: Run, tier_dir: Path, mistakes: Path) -> None:
    if mistakes.exists():
        run.problems.append(f"wrong bytes were read: {mistakes.read_text()[:500]}")
    if run.most_bytes > run.allowed_bytes:
        run.problems.append(f"{run.most_bytes} bytes were used of {run.allowed_bytes} allowed")
    # Partial files of killed writers are young; an hour later the janitor removes them.
    report = check.inspect_all(tier_dir)
    run.problems += [f"check: {problem.path}: {problem.kind}" for problem in report.problems]
    for path in sorted((tier_dir / "aa" / "journal").glob("*.kvj")):
        run.evicted += path.read_bytes().count(b"\x03\x20\x00\x00\x00\x00\x00\x00")


def main() -> int:
    """Run, print, remove."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(".")[0])
    parser.add_argument("--data", type=Path, default=Path("/dev/shm/kvtier-janitor-stress"))
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--writers", type=int, default=10)
    parser.add_argument("--blocks", type=int, default=5000, help="that the budget has room for")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    shutil.rmtree(options.data, ignore_errors=True)
    options.data.mkdir(parents=True)
    try:
        run = stress(
            options.data, seconds=options.seconds, writers=options.writers, blocks=options.blocks, seed=options.seed
        )
        log = (options.data / "log").read_text()
        if "Traceback" in log:
            run.problems.append(log[log.index("Traceback") :][:2000])
    finally:
        shutil.rmtree(options.data, ignore_errors=True)
    result: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "writers": options.writers, **vars(run)}
    text = json.dumps(result, indent=2)
    print(text)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text + "\n")
    return 1 if run.problems else 0


if __name__ == "__main__":
    sys.exit(main())
