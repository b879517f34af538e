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
import json
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig

CHUNK_TOKENS = 128
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
        self.llm = LLM(
            model=str(model),
            skip_tokenizer_init=True,
            enforce_eager=True,
            dtype="float32",
            max_model_len=1024,
            seed=0,
            enable_prefix_caching=True,
            disable_log_stats=False,
            kv_transfer_config=KVTransferConfig(
                kv_connector="OffloadingConnector",
                kv_role="kv_both",
                kv_connector_extra_config={
                    "spec_name": "KVTierSpec",
                    "spec_module_path": "kvtier_connector.tier.spec",
                    "cpu_bytes_to_use": 256 << 20,
                    "block_size": CHUNK_TOKENS,
                    "secondary_tiers": [
                        {
                            "type": "SharedVolumeTier",
                            "module_path": "kvtier_connector.tier.manager",
                            "config_file": str(config_file),
                        }
                    ],
                },
            ),
        )

    def ask(self, seeds: list[int], *, reads_cache: bool = True) -> list[dict[str, Any]]:
        outputs = self.llm.generate(
            [{"prompt_token_ids": prompt(seed)} for seed in seeds],
            SamplingParams(
                max_tokens=8,
                temperature=0.0,
                ignore_eos=True,
                detokenize=False,
                skip_reading_prefix_cache=not reads_cache,
            ),
            use_tqdm=False,
        )
        return [
            {"seed": seed, "tokens": list(output.outputs[0].token_ids), "cached": output.num_cached_tokens}
            for seed, output in zip(seeds, outputs, strict=True)
        ]

    def reset(self) -> None:
        """Leave the volume as the only place that has blocks."""
        assert self.llm.reset_prefix_cache(reset_connector=True)

    def metrics(self) -> dict[str, float]:
        return {
            " ".join([metric.name, *(metric.labels.get(label, "") for label in ("cause",))]).strip(): metric.value
            for metric in self.llm.get_metrics()
            if metric.name.startswith("vllm:kvtier_") and hasattr(metric, "value")
        }


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
    while not all(answer["cached"] for answer in record("healthy", seeds)) and time.monotonic() < deadline:
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
        is_recovered = all(answer["cached"] for answer in record("recovered", seeds))
    for seed in range(100, next(fresh)):
        record("computed", [seed], reads_cache=False)
    result = {"answers": answers, "is_recovered": is_recovered, "metrics": engine.metrics()}
    sys.stdout.write("RESULT " + json.dumps(result) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
