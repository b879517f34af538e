# SPDX-License-Identifier: Apache-2.0
"""Runs one vLLM engine on a volume, breaks the volume in turn while requests run, and prints every answer as JSON.

    python engine_faults_script.py DIRECTORY CONTROL CONFIG_FILE

DIRECTORY holds the model; CONTROL holds the switches of the volume's faults, see passthrough.py. The reference is what
the engine answers without reading any cache.
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
STORM_SECONDS = 4.0
RECOVERY_SECONDS = 60.0


def prompt(seed: int) -> list[int]:
    return [(7 * place * place + 13 * place + 101 * seed) % 1900 + 100 for place in range(PROMPT_TOKENS)]


class Engine:
    def __init__(self, model: Path, config_file: Path) -> None:
        self.llm = make_llm(model, config_file, dtype="float32", max_model_len=1024, cpu_bytes=256 << 20)

    def ask(self, seeds: list[int], *, reads_cache: bool = True) -> list[dict[str, Any]]:
        answers = ask(self.llm, [prompt(seed) for seed in seeds], reads_cache=reads_cache)
        return [{"seed": seed, **answer} for seed, answer in zip(seeds, answers, strict=True)]

    def reset(self) -> None:
        """Leave the volume as the only place that has blocks."""
        assert self.llm.reset_prefix_cache(reset_connector=True)


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
    directory, control, config_file = (Path(argument) for argument in sys.argv[1:])
    engine = Engine(directory / "model", config_file)
    seeds, fresh = list(range(PROMPTS)), itertools.count(100)
    answers: list[dict[str, Any]] = []

    def record(when: str, asked: list[int], **options: Any) -> list[dict[str, Any]]:
        got = [{"when": when, **answer} for answer in engine.ask(asked, **options)]
        answers.extend(got)
        return got

    record("computed", seeds, reads_cache=False)
    deadline = time.monotonic() + RECOVERY_SECONDS
    while not all(answer["cached_tokens"] for answer in record("healthy", seeds)) and time.monotonic() < deadline:
        time.sleep(0.1)
    for fault, flags in FAULTS.items():
        engine.reset()
        with broken(control, flags):
            record(fault, [*seeds, next(fresh)])
    engine.reset()
    until = threading.Event()
    storming = threading.Thread(target=storm, args=(control, until))
    storming.start()
    try:
        deadline = time.monotonic() + STORM_SECONDS
        while time.monotonic() < deadline:
            record("storm", [*seeds, next(fresh)])
            engine.reset()
    finally:
        until.set()
        storming.join()
    deadline = time.monotonic() + RECOVERY_SECONDS
    is_recovered = False
    while not is_recovered and time.monotonic() < deadline:
        engine.reset()
        is_recovered = all(answer["cached_tokens"] for answer in record("recovered", seeds))
    for seed in range(100, next(fresh)):
        record("computed", [seed], reads_cache=False)
    tell({"answers": answers, "is_recovered": is_recovered, "metrics": read_metrics(engine.llm)})


if __name__ == "__main__":
    main()
