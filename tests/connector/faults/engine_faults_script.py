# SPDX-License-Identifier: Apache-2.0
"""Runs one vLLM engine on a volume, breaks the volume in turn while requests run, and prints every answer as JSON.

    python engine_faults_script.py DIRECTORY CONTROL CONFIG_FILE CHUNK_BYTES

DIRECTORY holds the model; CONTROL holds the switches of the volume's faults, see passthrough.py. The reference is what
the engine answers without reading any cache. GPU cache and CPU tier are so small that a few other prompts push out what
was asked before, so that the volume alone has it; a reset of the connector would have the engine look at its weights.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine_under_test import CHUNK_TOKENS, ask, make_llm, read_metrics, tell
from patience import PatientRates

from kvtier_connector.vllm_adapter import secondary_tier

PROMPT_TOKENS = 2 * CHUNK_TOKENS + 16
PROMPTS = 3
FAULTS = {
    "eio on read": {"fail.read": errno.EIO},
    "hang on read": {"hang.read": 0},
    "enospc on write": {"fail.write": errno.ENOSPC},
    "eio on write": {"fail.write": errno.EIO},
    "hang on write": {"hang.write": 0},
    "hang on lookup and open": {"hang.lookup": 0, "hang.open": 0},
}
FULL_CHUNKS = PROMPT_TOKENS // CHUNK_TOKENS
BLOCKS = 20
"""Of the GPU cache: enough for what is asked at once."""
ROWS = 8
FILLERS = 8
"""Prompts of which nothing else fits into either."""
SEEN = {
    "eio on read": "vllm:kvtier_disk_misses:io",
    "hang on read": "vllm:kvtier_disk_misses:deadline",
    "enospc on write": "vllm:kvtier_disk_shed_stores:no_space",
}
"""What is counted once a fault has been met. On a busy machine lookups and writes may be late, and meet none."""
STORM_SECONDS = 4.0
RECOVERY_SECONDS = 300.0
LOOK_SECONDS = 1.0


def prompt(seed: int) -> list[int]:
    return [(7 * place * place + 13 * place + 101 * seed) % 1900 + 100 for place in range(PROMPT_TOKENS)]


class Engine:
    def __init__(self, model: Path, config_file: Path, *, chunk_bytes: int) -> None:
        self.llm = make_llm(
            model,
            config_file,
            dtype="float32",
            max_model_len=1024,
            cpu_bytes=ROWS * chunk_bytes,
            engine={"num_gpu_blocks_override": BLOCKS},
        )
        self._others = itertools.count(10_000)

    def ask(self, seeds: list[int], *, reads_cache: bool = True) -> list[dict[str, Any]]:
        answers = ask(self.llm, [prompt(seed) for seed in seeds], reads_cache=reads_cache)
        return [{"seed": seed, **answer} for seed, answer in zip(seeds, answers, strict=True)]

    def push_out(self) -> None:
        """Leave the volume as the only place that has blocks of what was asked."""
        ask(self.llm, [prompt(next(self._others)) for _ in range(FILLERS)])

    def ask_the_volume(self, seeds: list[int]) -> tuple[list[dict[str, Any]], bool]:
        """Ask again what was pushed out; say also whether all of it was read from the volume."""
        before = self.read_blocks()
        return self.ask(seeds), self.read_blocks() - before == len(seeds) * FULL_CHUNKS

    def read_blocks(self) -> float:
        return read_metrics(self.llm).get("vllm:kvtier_disk_read_blocks", 0)


@contextlib.contextmanager
def broken(control: Path, flags: dict[str, int]) -> Iterator[None]:
    try:
        for name, number in flags.items():
            (control.parent / name).write_text(str(number))
            (control.parent / name).rename(control / name)
        yield
    finally:
        for name in flags:
            (control / name).unlink(missing_ok=True)


def storm(control: Path, until: threading.Event) -> None:
    """Break the volume in one way after the other, each for a moment."""
    for flags in itertools.cycle(FAULTS.values()):
        with broken(control, flags):
            until.wait(0.2)
        if until.wait(0.05):
            return


def main() -> None:
    directory, control, config_file = (Path(argument) for argument in sys.argv[1:4])
    secondary_tier.Rates = PatientRates  # type: ignore[misc]  # of this process
    engine = Engine(directory / "model", config_file, chunk_bytes=int(sys.argv[4]))
    seeds, fresh = list(range(PROMPTS)), itertools.count(100)
    answers: list[dict[str, Any]] = []

    def record(when: str, asked: list[int], **options: Any) -> None:
        answers.extend({"when": when, **answer} for answer in engine.ask(asked, **options))

    def is_read(when: str) -> bool:
        """Say whether the volume gives what it has before long."""
        deadline = time.monotonic() + RECOVERY_SECONDS
        while True:
            engine.push_out()
            got, is_all = engine.ask_the_volume(seeds)
            answers.extend({"when": when, **answer} for answer in got)
            if is_all or time.monotonic() > deadline:
                return is_all
            # Breakers stay open for a while, and each look computes a dozen prompts.
            time.sleep(LOOK_SECONDS)

    record("computed", seeds, reads_cache=False)
    record("stored", seeds)
    was_healthy = is_read("healthy")
    for fault, flags in FAULTS.items():
        # A breaker that the fault before has opened would keep this one's reads off the volume.
        is_read("between")
        engine.push_out()
        with broken(control, flags):
            record(fault, [*seeds, next(fresh)])
            # A breaker that a fault before has opened lets nothing be read or written, too.
            deadline = time.monotonic() + RECOVERY_SECONDS
            while SEEN.get(fault, "") not in {"", *read_metrics(engine.llm)} and time.monotonic() < deadline:
                engine.push_out()
                record(fault, [*seeds, next(fresh)])
    until = threading.Event()
    storming = threading.Thread(target=storm, args=(control, until))
    storming.start()
    try:
        deadline = time.monotonic() + STORM_SECONDS
        while time.monotonic() < deadline:
            record("storm", [*seeds, next(fresh)])
            engine.push_out()
    finally:
        until.set()
        storming.join()
    is_recovered = is_read("recovered")
    # The first step that computes shows that the weights are those of before.
    assert engine.llm.reset_prefix_cache(reset_connector=True)
    was_reset = is_read("reset")
    for seed in range(100, next(fresh)):
        record("computed", [seed], reads_cache=False)
    metrics = read_metrics(engine.llm)
    read = {"healthy": was_healthy, "recovered": is_recovered, "reset": was_reset}
    tell({"answers": answers, "read": read, "metrics": metrics})


if __name__ == "__main__":
    main()
