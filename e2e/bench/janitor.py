# SPDX-License-Identifier: Apache-2.0
"""The janitor benchmark: ``python -m e2e.bench.janitor --out FILE``, the janitor as a process with a million blocks.

It measures the first count, a restart, the cost at rest and a sweep that frees a quarter. Memory and processor time
come from /proc, system calls from strace.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import time
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

from e2e.bench.processes import MeasuredProcess, running, until

from kvtier_connector.contract.janitor import JanitorConfig, encode
from kvtier_connector.store.fs import LOCAL, make_directories
from kvtier_connector.store.header import HEADER_BYTES, Header, encode_header
from kvtier_connector.store.identity import claim
from kvtier_connector.store.journal import JournalLimits, JournalWriter, Op
from kvtier_connector.store.layout import BlockKey, Home, Lineage, block_path

WINDOW_SECONDS = 30.0
"""System calls are counted over so long at a time."""
CHAIN = 16
"""Blocks of one prefix."""


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


class Janitor:
    """The janitor as a process, once it serves."""

    def __init__(self, process: MeasuredProcess) -> None:
        """Wait until it serves."""
        self.process = process
        until(lambda: "serving on port" in process.log.read_text(), seconds=60, pause=0.1)
        self.port = int(re.findall(r"serving on port (\d+)", process.log.read_text())[0])

    def usage(self) -> dict[str, Any]:
        """Return what it says at /usage."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/usage", timeout=30) as answer:
            return dict(json.load(answer))

    def syscalls_per_second(self, seconds: float) -> float:
        """Count system calls of all threads for so long."""
        strace = ["strace", "-c", "-f", "-p", str(self.process.process.pid)]
        words = ["timeout", "-s", "INT", str(seconds), *strace]
        counted = subprocess.run(words, capture_output=True, text=True, check=False)
        totals = re.findall(r"^100\.00\s+\S+\s+\S+\s+(\d+)", counted.stderr, re.MULTILINE)
        if not totals:
            raise RuntimeError(f"strace counted nothing: {counted.stderr[-500:]}")
        return int(totals[0]) / seconds


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
    command = ("kvtier_connector.janitor", "--config", str(config_file))
    with running(data / "first.log", *command) as process:
        janitor = Janitor(process)
        result["first_count_seconds"] = until(lambda: janitor.usage()["is_counted"], seconds=1800, pause=0.1)
        result["first_count_cpu_seconds"] = process.cpu_seconds()
        assert janitor.usage()["blocks"] == blocks, janitor.usage()
        result["first_count_rss_mib"] = process.memory_bytes("VmHWM") / 2**20
        began = time.monotonic()
    result["stop_seconds"] = time.monotonic() - began
    result["catalog_bytes"] = (tier_dir / "janitor.catalog").stat().st_size

    with running(data / "second.log", *command) as process:
        again = Janitor(process)
        result["restart_seconds"] = until(lambda: again.usage()["is_counted"], seconds=600, pause=0.1)
        time.sleep(20)
        before, began = process.cpu_seconds(), time.monotonic()
        time.sleep(60)
        result["idle_cpu_percent"] = 100 * (process.cpu_seconds() - before) / (time.monotonic() - began)
        windows = max(1, round(idle_seconds / WINDOW_SECONDS))
        calls = [again.syscalls_per_second(WINDOW_SECONDS) for _ in range(windows)]
        result["idle_syscalls_per_second"] = sum(calls) / len(calls)
        result["idle_syscalls_per_second_in_the_worst_30_s"] = max(calls)
        result["idle_rss_mib"] = process.memory_bytes("VmRSS") / 2**20

        limit = int(blocks * (HEADER_BYTES + payload))
        before = process.cpu_seconds()
        config_file.write_text(encode(replace(config, max_bytes=limit, high_watermark=0.9, low_watermark=0.75)))
        result["sweep_seconds"] = until(lambda: again.usage()["blocks"] <= blocks * 0.75, seconds=1800, pause=0.1)
        result["sweep_cpu_seconds"] = process.cpu_seconds() - before
        result["sweep_peak_rss_mib"] = process.memory_bytes("VmHWM") / 2**20
        result["freed_blocks"] = blocks - again.usage()["blocks"]
    result["files_left"] = sum(len(names) for _, _, names in os.walk(tier_dir / "aa" / "blocks"))
    assert result["files_left"] == blocks - result["freed_blocks"], result
    return result


def main() -> None:
    """Print the figures, and remove the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("/dev/shm/kvtier-janitor-bench"))
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=150.0, help="at rest")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    shutil.rmtree(options.data, ignore_errors=True)
    options.data.mkdir(parents=True)
    try:
        text = json.dumps(million(options.data, options.blocks, options.seconds), indent=2)
    finally:
        shutil.rmtree(options.data, ignore_errors=True)
    print(text)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
