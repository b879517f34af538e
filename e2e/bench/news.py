# SPDX-License-Identifier: Apache-2.0
"""What engines tell each other: what that costs a volume at rest, and after how long another engine knows a block.

``python -m e2e.bench.news DIRECTORY [THE SAME BY ANOTHER MOUNT]``: engines are what an engine has of the volume,
without vLLM's part; those that listen are on the second mount. Calls are counted where the store makes them.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import random
import threading
import time
import uuid
from collections import Counter
from pathlib import Path

from kvtier_connector.contract import MUST_BE_KNOWN, ConnectorConfig
from kvtier_connector.store.blockstore import Stored
from kvtier_connector.store.fs import FileSystem
from kvtier_connector.store.index import Presence
from kvtier_connector.store.layout import BlockKey
from kvtier_connector.tier.volume import Volume

_PAYLOAD = memoryview(bytes(4096))
_DIGEST = "0a1b"
_MOST_ROUNDS, _SAME = 6, 0.9
"""They rest when a round makes no fewer calls than the one before it."""


class CountingFs(FileSystem):
    """Counts system calls of all threads, by name; counts that collide are lost, which is rare."""

    def __init__(self) -> None:
        """Start at none."""
        self.calls: Counter[str] = Counter()

    def __getattribute__(self, name: str) -> object:
        """Count what is looked up to be called."""
        found = object.__getattribute__(self, name)
        if not name.startswith("_") and callable(found):
            self.calls[name] += 1
        return found


def engine(root: Path, fs: FileSystem) -> Volume:
    """Return an engine that has the volume open."""
    config = ConnectorConfig(tier="bench/news", root=str(root), digest=_DIGEST, identity={"model": "none"}, max_bytes=0)
    volume = Volume(config, fs)
    volume.start({"model": "none", **dict.fromkeys(MUST_BE_KNOWN, "known")}, 60.0)
    return volume


def key(number: int) -> BlockKey:
    """Return a name that no other number has."""
    return BlockKey(hashlib.sha256(number.to_bytes(8, "big")).digest(), 0)


def rest(engines: int, fs: CountingFs, seconds: float) -> None:
    """Print how many calls a second they make when nothing happens; first each has to find out what is there."""
    rate = math.inf
    for _ in range(_MOST_ROUNDS):
        before, last = fs.calls.copy(), rate
        time.sleep(seconds)
        made = fs.calls - before
        rate = made.total() / seconds
        print(f"{engines} engines, {rate:.1f} calls a second over {seconds:g} s: {dict(made)}", flush=True)
        if rate > _SAME * last:
            return


def latency(writer: Volume, reader: Volume, count: int) -> None:
    """Print after how long a block that one stores is known to the other; each after a pause of random length."""
    seconds = []
    for number in range(count):
        time.sleep(random.uniform(0.5, 4.0))
        name = key(number)
        outcome = writer.store.put(name, _PAYLOAD)
        began = time.monotonic()
        assert isinstance(outcome, Stored), outcome
        while reader.store.state(name) is not Presence.PRESENT:
            if time.monotonic() - began > 60:  # noqa: PLR2004 - it never will be
                raise AssertionError("the block is not known after a minute")
            time.sleep(0.005)
        seconds.append(time.monotonic() - began)
    print("each:", *(f"{each:.2f}" for each in seconds), flush=True)
    seconds.sort()
    print(
        f"known elsewhere: p50 {seconds[len(seconds) // 2]:.2f} s, p99 {seconds[int(len(seconds) * 0.99)]:.2f} s, "
        f"most {seconds[-1]:.2f} s of {count}",
        flush=True,
    )


def main() -> None:
    """Measure both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directories", type=Path, nargs="+")
    parser.add_argument("--engines", type=int, default=100)
    parser.add_argument("--blocks", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=20.0)
    options = parser.parse_args()
    name = f"news-{uuid.uuid4().hex}"
    roots = [directory / name / _DIGEST for directory in options.directories]
    fs = CountingFs()
    threading.stack_size(1 << 18)
    writer = engine(roots[0], fs)
    others = [engine(roots[-1], fs) for _ in range(options.engines - 1)]
    try:
        rest(options.engines, fs, options.seconds)
        latency(writer, others[0], options.blocks)
    finally:
        for volume in (writer, *others):
            volume.close(0.0)


if __name__ == "__main__":
    main()
