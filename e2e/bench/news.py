# SPDX-License-Identifier: Apache-2.0
"""What engines tell each other: what that costs a volume, at rest and with news, and how soon another engine knows.

``python -m e2e.bench.news DIRECTORY [THE SAME BY ANOTHER MOUNT ...]``: engines are what an engine has of the volume,
without vLLM's part, each with a journal, a reader and threads of its own, all of them in this process; those that
listen share the mounts but the first. Calls are counted where the store makes them, and by clients of NFS.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import random
import threading
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from kvtier_connector.contract import MUST_BE_KNOWN, ConnectorConfig
from kvtier_connector.store.blockstore import Stored
from kvtier_connector.store.fs import FileSystem
from kvtier_connector.store.index import Presence
from kvtier_connector.store.layout import BlockKey
from kvtier_connector.tier.volume import Volume

_PAYLOAD = memoryview(bytes(4096))
_DIGEST = "0a1b"
_FIELDS_OF_A_CALL = 8
"""At least so many figures stand behind the name of a call in mountstats; of the mount as a whole, fewer do."""
_MOST_ROUNDS = 60
"""They rest when nobody lists the journals any more; a hundred that begin at once take a while on a slow volume."""
_NEVER_SECONDS = 60.0


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


def over_the_wire(directories: Sequence[Path]) -> Counter[str]:
    """Return what mounts of NFS have asked their servers so far, by name; nothing of other file systems."""
    asked: Counter[str] = Counter()
    is_ours = False
    for line in Path("/proc/self/mountstats").read_text(encoding="utf-8", errors="replace").splitlines():
        words = line.split()
        if words[:1] == ["device"]:
            # device SERVER mounted on DIRECTORY with fstype TYPE
            is_ours = any(directory.is_relative_to(words[4]) for directory in directories) and "nfs" in words[7]
        elif is_ours and len(words) >= _FIELDS_OF_A_CALL and words[0].rstrip(":").isupper() and words[1].isdecimal():
            asked[words[0].rstrip(":")] += int(words[1])
    return asked


class Asked:
    """What all engines ask of the volume from now on."""

    def __init__(self, fs: CountingFs, directories: Sequence[Path]) -> None:
        """Begin to count; `directories` are those of which mounts are asked what went over the wire."""
        self._fs, self._directories = fs, directories
        self._before, self._wire_before, self._began = fs.calls.copy(), over_the_wire(directories), time.monotonic()

    def show(self, what: str) -> tuple[Counter[str], float]:
        """Print it, and return it with the seconds that it took."""
        seconds = time.monotonic() - self._began
        made, wire = self._fs.calls - self._before, over_the_wire(self._directories) - self._wire_before
        print(f"{what}, {made.total() / seconds:.1f} calls a second over {seconds:.0f} s: {dict(made)}", flush=True)
        if wire:
            print(f"over the wire {wire.total() / seconds:.1f} a second: {dict(wire)}", flush=True)
        return made, seconds


def rest(engines: int, fs: CountingFs, seconds: float, directories: Sequence[Path]) -> float:
    """Print and return how many calls a second they make when nothing happens; first each finds out what is there."""
    rate = 0.0
    for _ in range(_MOST_ROUNDS):
        asked = Asked(fs, directories)
        time.sleep(seconds)
        made, took = asked.show(f"{engines} engines")
        rate = made.total() / took
        if not made["scandir"]:
            break
    print(f"until then {fs.calls.total()} calls: {dict(fs.calls)}", flush=True)
    return rate


def latency(writer: Volume, readers: Sequence[Volume], count: int) -> None:
    """Print after how long a block that one stores is known to each other; each after a pause of random length."""
    seconds = []
    last = []
    for number in range(count):
        time.sleep(random.uniform(0.5, 4.0))
        name = key(number)
        outcome = writer.store.put(name, _PAYLOAD)
        began = time.monotonic()
        assert isinstance(outcome, Stored), outcome
        waiting = list(readers)
        while waiting:
            time.sleep(0.005)
            still_waiting = [each for each in waiting if each.store.state(name) is not Presence.PRESENT]
            took = time.monotonic() - began
            seconds += [took] * (len(waiting) - len(still_waiting))
            waiting = still_waiting
            if took > _NEVER_SECONDS:
                raise AssertionError(f"{len(waiting)} engines do not know of the block")
        last.append(seconds[-1])
    seconds.sort()
    print(
        f"known to another: p50 {at(seconds, 0.5):.2f} s, p99 {at(seconds, 0.99):.2f} s, most {seconds[-1]:.2f} s of "
        f"{count} blocks times {len(readers)} engines",
        flush=True,
    )
    print("known to the last:", *(f"{each:.2f}" for each in last), flush=True)


def at(numbers: Sequence[float], part: float) -> float:
    """Return a quantile of what is sorted."""
    return numbers[int(len(numbers) * part)]


def main() -> None:
    """Measure both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directories", type=Path, nargs="+")
    parser.add_argument("--engines", type=int, default=100)
    parser.add_argument("--blocks", type=int, default=60, help="none measures rest alone")
    parser.add_argument("--seconds", type=float, default=20.0)
    options = parser.parse_args()
    name = f"news-{uuid.uuid4().hex}"
    roots = [directory / name / _DIGEST for directory in options.directories]
    theirs = itertools.cycle(roots[1:] or roots)
    fs = CountingFs()
    threading.stack_size(1 << 18)
    writer = engine(roots[0], fs)
    others = [engine(root, fs) for root in itertools.islice(theirs, options.engines - 1)]
    try:
        directories = [each.absolute() for each in options.directories]
        resting = rest(options.engines, fs, options.seconds, directories)
        if options.blocks:
            asked = Asked(fs, directories)
            latency(writer, others, options.blocks)
            made, took = asked.show("with news")
            print(f"for each block {(made.total() - resting * took) / options.blocks:.0f} calls more than at rest")
    finally:
        for volume in (writer, *others):
            volume.close(0.0)


if __name__ == "__main__":
    main()
