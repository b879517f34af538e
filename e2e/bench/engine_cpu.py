# SPDX-License-Identifier: Apache-2.0
"""The engine benchmark for a machine without a GPU: vLLM's CPU build, a tiny model, some minutes.

The stock ``fs`` tier and ours run under the same vLLM, with the same worker between engine and CPU tier, since upstream
has none for this platform.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from e2e.bench import backends, journal, models, report, volumes
from e2e.bench.scenarios import Plan, Scenarios

CONTENDERS = (backends.KVTIER, backends.FS, backends.NONE)
GIB = 1 << 30


def main() -> None:
    """Measure a computed prompt against a hit in each tier, for every backend."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="for the model, the volume, logs and results")
    parser.add_argument("--out", type=Path, help="for the results (default: DATA/results)")
    parser.add_argument("--backends", type=lambda text: text.split(","), default=list(CONTENDERS))
    options = parser.parse_args()
    data = options.data.resolve()
    out = options.out or data / "results"
    model = data / "model"
    models.write_model(model, models.TINY)
    plan = Plan(
        work=data,
        repository=Path(__file__).resolve().parents[2],
        lifeboat=None,
        shape=models.TINY,
        engine={
            **models.engine_arguments(model),
            "max_model_len": 4224,
            # The CPU build takes this share of a NUMA node's memory for its own cache.
            "gpu_memory_utilization": 0.1,
        },
        seeds_weights=False,
        backends=options.backends,
        block_tokens=128,
        is_cpu_build=True,
        single_cpu_bytes=GIB // 2,
        sizes={512: 3, 2048: 3, 4096: 2},
        user_tokens=2048,
        user_cpu_bytes=GIB // 2,
        never_input=0,
        never_output=0,
        never_requests=0,
        never_at_a_time=0,
        never_rounds=0,
        never_cpu_bytes=0,
    )
    path = out / "engine.jsonl"
    path.unlink(missing_ok=True)
    log = journal.Journal(path)
    log.write(journal.describe_run(backends=options.backends))
    volume = data / "volume"
    try:
        Scenarios(plan, log).single("disk", volume)
    finally:
        volumes.clear(volume)
        print(report.engine_report(out))


if __name__ == "__main__":
    main()
