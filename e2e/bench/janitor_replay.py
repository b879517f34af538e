# SPDX-License-Identifier: Apache-2.0
"""Replays a trace of conversations on a real directory with room for a tenth of its blocks, beside exact LRU.

The engine is a `SharedStore` that stores and reads block files, the janitor a `Keeper` that evicts them; both follow
the trace's clock. Exact LRU holds as many blocks as the budget has room for, all the time. A request hits as many
blocks as it finds from its beginning without a gap, which is what an engine can use.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from kvtier_connector.contract_janitor import JanitorConfig
from kvtier_connector.janitor.keeper import Keeper
from kvtier_connector.store.blockstore import Hit
from kvtier_connector.store.format import HEADER_BYTES
from kvtier_connector.store.identity import claim
from kvtier_connector.store.layout import BlockKey, Lineage
from kvtier_connector.store.shared import SharedStore

PAYLOAD_BYTES = 64
BLOCK_BYTES = HEADER_BYTES + PAYLOAD_BYTES
START_NS = 1_750_000_000 * 10**9

Trace = Sequence[tuple[float, Sequence[int]]]
"""Seconds since the beginning, and the blocks of each request in their order."""


def read_trace(path: Path, most: int) -> Trace:
    """Return the requests of a trace in the format of Mooncake's."""
    with path.open() as file:
        lines = [json.loads(line) for line in file]
    return [(line["timestamp"] / 1000, line["hash_ids"]) for line in lines[:most]]


def exact_lru(trace: Trace, capacity: int) -> int:
    """Return how many blocks hit."""
    held: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for _, blocks in trace:
        found = 0
        while found < len(blocks) and blocks[found] in held:
            found += 1
        hits += found
        # The end first, so that a prefix is younger than what continues it.
        for block in reversed(blocks):
            held[block] = None
            held.move_to_end(block)
        while len(held) > capacity:
            held.popitem(last=False)
    return hits


class Clocks:
    """The trace's time."""

    def __init__(self) -> None:
        """Begin at the trace's beginning."""
        self.seconds = 0.0
        self.steps = 0

    def ns(self) -> int:
        """Return nanoseconds since 1970, never the same twice."""
        self.steps += 1
        return START_NS + int(self.seconds * 1e9) + self.steps

    def now(self) -> float:
        """Return seconds."""
        return self.seconds


def replay(trace: Trace, capacity: int, data: Path, sweep_seconds: float) -> tuple[int, int, dict[str, Any]]:
    """Return how many blocks hit, how many stores had no room, and the janitor's sums."""
    tier_dir = data / "ns.replay"
    claim(tier_dir / "aa", {"bench": "replay"}, "aa")
    clocks = Clocks()
    limit = capacity * BLOCK_BYTES
    engine = SharedStore(tier_dir / "aa", max_bytes=limit, direct=False, clock=clocks.ns, now=clocks.now)
    engine.synchronize()
    engine.rescan()
    config = JanitorConfig(
        tier="ns/replay", tier_dir=str(tier_dir), current="aa", max_bytes=limit, sweep_seconds=sweep_seconds
    )
    keeper = Keeper(config, clock=clocks.ns, now=clocks.now, is_lasting=False)
    keeper.open()
    hits = refused = 0
    next_sweep = 0.0
    buffer = memoryview(bytearray(PAYLOAD_BYTES))
    for seconds, blocks in trace:
        while next_sweep <= seconds:
            clocks.seconds = next_sweep
            engine.synchronize()
            while keeper.step() == 0:
                continue
            engine.synchronize()
            next_sweep += sweep_seconds
        clocks.seconds = seconds
        found, misses = _request(engine, blocks, buffer)
        hits, refused = hits + found, refused + misses
    assert keeper.report is not None
    return hits, refused, {"evicted": keeper.report.evicted_blocks, "sweeps": keeper.report.sweeps}


def _request(engine: SharedStore, blocks: Sequence[int], buffer: memoryview) -> tuple[int, int]:
    keys = [BlockKey(hashlib.sha256(str(block).encode()).digest(), 0) for block in blocks]
    found = 0
    while found < len(keys) and isinstance(engine.get(keys[found], buffer), Hit):
        found += 1
    if found:
        engine.note_used(keys[found - 1], PAYLOAD_BYTES)
    refused = 0
    for position, key in _with_numbers(keys, found):
        lineage = Lineage(keys[position - 1].hash if position else b"", position)
        outcome = engine.put(key, memoryview(bytes(PAYLOAD_BYTES)), lineage)
        refused += type(outcome).__name__ == "StoreFault"
    if len(keys) > found:
        engine.note_used(keys[-1], PAYLOAD_BYTES)
    return found, refused


def _with_numbers(keys: Sequence[BlockKey], start: int) -> Iterable[tuple[int, BlockKey]]:
    return ((position, keys[position]) for position in range(start, len(keys)))


def main() -> None:
    """Replay, print, remove."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(",")[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--data", type=Path, default=Path("/dev/shm/kvtier-janitor-replay"))
    parser.add_argument("--share", type=float, default=0.1, help="of the trace's blocks that have room")
    parser.add_argument("--sweep-seconds", type=float, default=5.0)
    parser.add_argument("--most", type=int, default=1 << 30, help="requests")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    trace = read_trace(options.trace, options.most)
    blocks = len({block for _, each in trace for block in each})
    asked = sum(len(each) for _, each in trace)
    capacity = int(blocks * options.share)
    shutil.rmtree(options.data, ignore_errors=True)
    began = time.monotonic()
    try:
        hits, refused, sums = replay(trace, capacity, options.data, options.sweep_seconds)
    finally:
        shutil.rmtree(options.data, ignore_errors=True)
    result = {
        "date": time.strftime("%Y-%m-%d"),
        "trace": options.trace.name,
        "requests": len(trace),
        "blocks": blocks,
        "asked": asked,
        "capacity": capacity,
        "hit_percent": 100 * hits / asked,
        "exact_lru_hit_percent": 100 * exact_lru(trace, capacity) / asked,
        "unlimited_hit_percent": 100 * exact_lru(trace, blocks) / asked,
        "refused_stores": refused,
        **sums,
        "seconds": time.monotonic() - began,
    }
    text = json.dumps(result, indent=2)
    print(text)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
