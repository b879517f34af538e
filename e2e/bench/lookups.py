# SPDX-License-Identifier: Apache-2.0
"""Figures of lookups: calls and time of prompts, of the block of another engine, at rest, and memory of the worker.

``python -m e2e.bench.lookups A B``: A and B are one directory as two nodes see it, or the same one twice. Blocks are
files of the right names and lengths without bytes, since a lookup asks for no more. Each figure is measured as the
volume is, and with 5 ms more for each call.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import statistics
import time
from collections.abc import Iterable
from pathlib import Path

from e2e.bench.processes import kernel_number

from kvtier_connector.io_workers.lookups import BlockQuery, Found, LookupWorker
from kvtier_connector.io_workers.worker import PoolSettings
from kvtier_connector.store.fs import FileSystem
from kvtier_connector.store.header import HEADER_BYTES
from kvtier_connector.store.layout import BlockKey, block_path

PROMPT_BLOCKS = 1000
CALL_SECONDS = 0.005
REST_SECONDS = 10.0
VOLUMES = {"as it is": "", "5 ms more a call": "e2e.bench.lookups:FarFileSystem"}


class FarFileSystem(FileSystem):
    """A volume that is far away."""

    def stat(self, path: str) -> os.stat_result:
        """Describe a path a while later."""
        time.sleep(CALL_SECONDS)
        return super().stat(path)


def chain(name: object, count: int = PROMPT_BLOCKS) -> list[BlockKey]:
    """Return the blocks of a prompt."""
    return [BlockKey(hashlib.sha256(f"{name}/{number}".encode()).digest(), 0) for number in range(count)]


def make_file(root: Path, key: BlockKey) -> None:
    """Make a block without bytes."""
    path = root / block_path(key)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.truncate(HEADER_BYTES + 4096)


class MeasuredWorker:
    """One worker for lookups, and the time of its answers."""

    def __init__(self, root: Path, file_system: str) -> None:
        """Start the worker, and wait until it is ready."""
        before, began = self._children(), time.monotonic()
        settings = PoolSettings(root=str(root), workers=1, deadline_seconds=60.0, file_system=file_system)
        self.worker = LookupWorker(settings, lookup_seconds=60.0)
        self.worker.start()
        while not self.worker.is_ready:
            self.worker.collect()
            time.sleep(0.001)
        self.start_seconds = time.monotonic() - began
        (self.process,) = self._children() - before
        self._number = 0

    def ask(self, keys: list[BlockKey]) -> tuple[int, int, float]:
        """Return the number of blocks that are there, the calls, and the seconds."""
        self._number += 1
        asked = time.monotonic()
        self.worker.submit(self._number, BlockQuery(tuple(keys), is_prefix=True))
        while not (done := self.worker.collect()):
            self.worker.wait(1.0)
        found = done[0].found
        assert isinstance(found, Found), found
        return found.present, found.calls, time.monotonic() - asked

    def _children(self) -> set[str]:
        return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


def try_prompts(
    measured: MeasuredWorker, prompts: Iterable[list[BlockKey]], present: int
) -> Iterable[tuple[int, float]]:
    """Yield calls and seconds of each prompt that has so many blocks on the volume."""
    for keys in prompts:
        found, calls, seconds = measured.ask(keys)
        assert found == present, found
        yield calls, seconds


def try_others(measured: MeasuredWorker, there: Path, blocks: Iterable[list[BlockKey]]) -> Iterable[tuple[int, float]]:
    """Yield calls and seconds until a block is found that was looked for in vain before another engine stored it."""
    for keys in blocks:
        assert measured.ask(keys)[0] == 0
        make_file(there, keys[0])
        stored, calls, is_found = time.monotonic(), 0, False
        while not is_found:
            found, made, _ = measured.ask(keys)
            is_found, calls = bool(found), calls + made
        yield calls, time.monotonic() - stored


def measure(root: Path, there: Path, blocks: int, turns: range) -> None:
    """Print the table; `there` is the root as another engine sees it."""
    chains = blocks // PROMPT_BLOCKS
    began = time.monotonic()
    for number in range(chains):
        for key in chain(number):
            make_file(there, key)
    print(f"{blocks} blocks, made in {time.monotonic() - began:.0f} s\n")
    print("| volume | figure | calls | median | least to most |\n|---|---|---|---|---|")
    for volume, file_system in VOLUMES.items():
        measured = MeasuredWorker(root, file_system)
        print(f"| {volume} | start of the worker, ms | | {1000 * measured.start_seconds:.0f} | |")
        first_kib = kernel_number(measured.process, "VmRSS")
        stored = [chain(turn * 7919 % chains) for turn in turns]
        turned = [keys[:800] + chain(f"new {turn}", 200) for turn, keys in zip(turns, stored, strict=True)]
        for name, tries in (
            ("a cold prompt of 1,000 blocks", try_prompts(measured, [chain(f"cold {turn}") for turn in turns], 0)),
            ("a hit of 1,000 blocks", try_prompts(measured, stored, PROMPT_BLOCKS)),
            ("a turn: 800 of 1,000 are there", try_prompts(measured, turned, 800)),
            (
                "a block of another engine, looked for in vain just before",
                try_others(measured, there, [chain(f"{volume} {turn}", 1) for turn in turns]),
            ),
        ):
            calls, seconds = zip(*tries, strict=True)
            spread = f"{1000 * min(seconds):.1f} to {1000 * max(seconds):.1f}"
            print(f"| {volume} | {name}, ms | {max(calls)} | {1000 * statistics.median(seconds):.1f} | {spread} |")
        before = kernel_number(measured.process, "voluntary_ctxt_switches")
        time.sleep(REST_SECONDS)
        switches = kernel_number(measured.process, "voluntary_ctxt_switches") - before
        print(f"| {volume} | wake-ups of the worker in {REST_SECONDS:.0f} s without a question | {switches} | | |")
        memory = f"{first_kib / 1024:.0f} | {kernel_number(measured.process, 'VmHWM') / 1024:.0f}"
        print(f"| {volume} | memory of the worker, MiB: at first, at most | | {memory} |", flush=True)
        measured.worker.close()


def main() -> None:
    """Measure what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("a", type=Path)
    parser.add_argument("b", type=Path)
    parser.add_argument("--blocks", type=int, default=100_000)
    parser.add_argument("--repetitions", type=int, default=9)
    given = parser.parse_args()
    name = f"lookups{os.getpid()}"
    try:
        measure(given.a / name / "0a1b", given.b / name / "0a1b", given.blocks, range(given.repetitions))
    finally:
        shutil.rmtree(given.b / name)


if __name__ == "__main__":
    main()
