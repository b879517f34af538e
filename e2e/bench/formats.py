# SPDX-License-Identifier: Apache-2.0
"""What block format 3 costs against 2: ``python -m e2e.bench.formats OTHER``, one core, files in memory.

OTHER is the connector directory of a release that writes the other format, as ``git archive b2a16c0 connector`` gives
it. Both take turns, each in a process of its own; every figure is the median of the rounds.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kvtier_connector
from kvtier_connector.store import format as block_format
from kvtier_connector.store.blockstore import BlockStore
from kvtier_connector.store.identity import claim
from kvtier_connector.store.layout import BlockKey

BLOCKS = 40
CALLS = 20_000
CHANGED_BYTES = 8 << 20


def seconds(act: Callable[[], object]) -> float:
    """Return the processor time that it takes, which others on the machine disturb less than the clock."""
    began = time.process_time()
    act()
    return time.process_time() - began


def measure(directory: Path) -> dict[str, float]:
    """Return what this process's release takes, in microseconds for each block, and in bytes."""
    root = directory / "d1gest"
    claim(root, {}, "d1gest")
    store = BlockStore(root, direct=False)
    keys = [BlockKey(number.to_bytes(32, "big"), 0) for number in range(BLOCKS)]
    payload = memoryview(mmap.mmap(-1, CHANGED_BYTES))
    payload[:] = os.urandom(CHANGED_BYTES)
    store.put(BlockKey(bytes(31) + b"w", 0), payload)
    found: dict[str, float] = {
        "format": block_format.FORMAT_VERSION,
        "put": seconds(lambda: [store.put(key, payload) for key in keys]) / BLOCKS * 1e6,
        "get": seconds(lambda: [store.get(key, payload) for key in keys]) / BLOCKS * 1e6,
        "get again": seconds(lambda: [store.get(key, payload) for key in keys]) / BLOCKS * 1e6,
    }
    (file, *_) = root.rglob("*.kvb")
    page = file.read_bytes()[: block_format.HEADER_BYTES]
    header = block_format.decode_header(page)
    if isinstance(header, block_format.Fault):
        raise SystemExit(f"its own block is no block: {header}")
    found["file bytes beyond the payload"] = file.stat().st_size - CHANGED_BYTES
    found["encode"] = seconds(lambda: [block_format.encode_header(header) for _ in range(CALLS)]) / CALLS * 1e6
    found["decode"] = seconds(lambda: [block_format.decode_header(page) for _ in range(CALLS)]) / CALLS * 1e6
    return found


def ask(connector: Path) -> dict[str, float]:
    """Measure a release in a process of its own."""
    directory = tempfile.mkdtemp(dir="/dev/shm")
    try:
        done = subprocess.run(
            [sys.executable, __file__, "--here", directory],
            env={**os.environ, "PYTHONPATH": str(connector)},
            check=True,
            capture_output=True,
            text=True,
        )
    finally:
        shutil.rmtree(directory)
    answer: dict[str, float] = json.loads(done.stdout)
    return answer


def main() -> None:
    """Measure both in turn, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("other", nargs="?", type=Path, help="connector directory of the other release")
    parser.add_argument("--here", type=Path, help="measure this process's release in this directory")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    if options.here:
        sys.stdout.write(json.dumps(measure(options.here)))
        return
    if options.other is None:
        parser.error("name the connector directory of the other release")
    ours = Path(kvtier_connector.__file__).parents[1]
    rounds: list[list[dict[str, Any]]] = [[ask(each) for each in (options.other, ours)] for _ in range(options.rounds)]
    for name in rounds[0][0]:
        both = [[each[side][name] for each in rounds] for side in (0, 1)]
        shown = [f"{statistics.median(all_of):10.2f} ({min(all_of):.2f}-{max(all_of):.2f})" for all_of in both]
        sys.stdout.write(f"{name:32} {shown[0]:32} {shown[1]}\n")


if __name__ == "__main__":
    main()
