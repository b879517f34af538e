# SPDX-License-Identifier: Apache-2.0
"""Measures the janitor at a million blocks: first count, restart, idle cost, and a sweep that frees a quarter.

The janitor is the real process with its settings file; its memory and processor time are read from /proc, its system
calls are counted by strace. It runs without a Lease; what the client for that takes is measured in a process of its
own. Everything it makes is removed at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from e2e.bench.janitor_fill import fill

from kvtier_connector.contract_janitor import JanitorConfig, encode
from kvtier_connector.store.format import HEADER_BYTES

TICKS = os.sysconf("SC_CLK_TCK")
WINDOW_SECONDS = 30.0
"""System calls are counted over so long at a time."""
LEASE_CLIENT = """
import re, pathlib, kvtier_connector.janitor.__main__
rss = lambda: int(re.findall(r"VmRSS:\\s+(\\d+)", pathlib.Path("/proc/self/status").read_text())[0])
before = rss()
import kubernetes.client, kubernetes.config
kubernetes.client.CoordinationV1Api()
print((rss() - before) / 1024)
"""


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


def main() -> None:
    """Measure, print and remove."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split(":")[0])
    parser.add_argument("--data", type=Path, default=Path("/dev/shm/kvtier-janitor-bench"))
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--idle-seconds", type=float, default=150.0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    shutil.rmtree(options.data, ignore_errors=True)
    try:
        result = measure(options.data, options.blocks, options.idle_seconds)
    finally:
        shutil.rmtree(options.data, ignore_errors=True)
    text = json.dumps(result, indent=2)
    print(text)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text + "\n")


def measure(data: Path, blocks: int, idle_seconds: float) -> dict[str, Any]:
    """Return what was measured."""
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
    result["ledger_bytes"] = (tier_dir / "janitor.ledger").stat().st_size

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
    client = subprocess.run([sys.executable, "-c", LEASE_CLIENT], capture_output=True, text=True, check=True)
    result["lease_client_rss_mib"] = float(client.stdout)
    result["freed_blocks"] = blocks - process.usage()["blocks"]
    process.stop()
    files = sum(len(names) for _, _, names in os.walk(tier_dir / "aa" / "blocks"))
    assert files == blocks - result["freed_blocks"], (files, result)
    result["files_left"] = files
    return result


if __name__ == "__main__":
    main()
