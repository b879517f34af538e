# SPDX-License-Identifier: Apache-2.0
"""The engine benchmark on one GPU: Llama-3.1-8B's shape, every backend in turn, phases that each fit ten minutes.

``--device cpu --tiny`` runs the same phases with a tiny model on vLLM's CPU build, to try the script itself.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path

from e2e.bench import backends, journal, models, report, volumes
from e2e.bench.scenarios import Plan, Scenarios

PHASES = ("single-tmpfs", "single-disk", "users-8", "users-16", "overhead")
GIB = 1 << 30

GRAPHS = {
    "enforce_eager": False,
    # Without compiling the model, which takes minutes and changes nothing about the copies.
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
}
"""Decode steps as CUDA graphs, as vLLM runs them unless told otherwise: then the GPU is the limit, not its host."""

_TMPFS_BYTES = 90 * GIB
"""The blocks of 16 users of 32k tokens take 64 GiB, and a machine of 128 GiB must hold the CPU tier beside them."""
_DISK_SIZES = {2048: 2, 8192: 2, 32768: 3}


def gpu_plan(options: argparse.Namespace, work: Path, lifeboat: Path | None) -> Plan:
    """Return the settings of the real run."""
    model = work / "model"
    models.write_config(model, models.LLAMA_8B)
    return Plan(
        work=work,
        repository=_repository(),
        lifeboat=lifeboat,
        shape=models.LLAMA_8B,
        engine={
            **models.engine_arguments(model),
            **(GRAPHS if options.graphs else {}),
            "load_format": "dummy",
            "max_model_len": 66560,
            "max_num_batched_tokens": 8192,
            "gpu_memory_utilization": 0.9,
        },
        seeds_weights=True,
        backends=options.backends,
        block_tokens=64,
        is_cpu_build=False,
        kvtier=options.kvtier,
        single_cpu_bytes=20 * GIB,
        sizes={2048: 5, 8192: 5, 32768: 3, 65536: 2},
        user_tokens=32768,
        user_cpu_bytes=24_000_000_000,
        never_input=1025,
        never_output=128,
        never_requests=96,
        never_at_a_time=32,
        never_rounds=options.rounds,
        never_cpu_bytes=12 * GIB,
        time_limit_seconds=options.time_limit,
    )


def tiny_plan(options: argparse.Namespace, work: Path, lifeboat: Path | None) -> Plan:
    """Return settings with which the same phases take minutes on two cores."""
    model = work / "model"
    models.write_model(model, models.TINY)
    return Plan(
        work=work,
        repository=_repository(),
        lifeboat=lifeboat,
        shape=models.TINY,
        engine={
            **models.engine_arguments(model),
            "max_model_len": 4224,
            "gpu_memory_utilization": 0.15,
        },
        # The CPU build repacks the weights while loading, so they come from a file.
        seeds_weights=False,
        backends=options.backends,
        block_tokens=128,
        is_cpu_build=True,
        kvtier=options.kvtier,
        single_cpu_bytes=256 << 20,
        sizes={256: 2, 512: 1, 1024: 1},
        user_tokens=512,
        user_cpu_bytes=24 << 20,
        never_input=257,
        never_output=8,
        never_requests=6,
        never_at_a_time=3,
        never_rounds=2,
        never_cpu_bytes=64 << 20,
        time_limit_seconds=options.time_limit,
    )


def main() -> None:
    """Run the phases that the command line names."""
    options = _options()
    options.out.mkdir(parents=True, exist_ok=True)
    work = options.work or Path(tempfile.mkdtemp(prefix="kvtier-bench-"))
    work.mkdir(parents=True, exist_ok=True)
    lifeboat = backends.unpack_lifeboat(options.lifeboat, work / "lifeboat")
    is_cpu = options.device == "cpu"
    plan = (tiny_plan if is_cpu else gpu_plan)(options, work, lifeboat)
    log = journal.Journal(options.out / "engine.jsonl")
    if backends.LIFEBOAT in plan.backends and lifeboat is None:
        log.say("lifeboatcache: no wheel given, left out")
        options.backends.remove(backends.LIFEBOAT)
    log.write(
        journal.describe_run(
            phases=options.phases, backends=options.backends, kvtier=options.kvtier, tiny=is_cpu, graphs=options.graphs
        )
    )
    tmpfs = volumes.make_tmpfs(work / "tmpfs", GIB if is_cpu else _TMPFS_BYTES)
    disk = options.disk or work / "disk"
    disk.mkdir(parents=True, exist_ok=True)
    if not is_cpu:
        volumes.enlarge_shared_memory(60 * GIB, log.say)
    for directory in (tmpfs, disk):
        log.say(f"{directory}: {volumes.free_bytes(directory) / GIB:.0f} GiB free")
    scenarios = Scenarios(plan, log)
    try:
        for phase in options.phases:
            _run_phase(scenarios, phase, tmpfs, disk, plan.sizes if is_cpu else _DISK_SIZES)
    finally:
        volumes.release_tmpfs(tmpfs)
        # Also after a failure: whatever was measured is worth reading.
        report.engine_report(options.out)
    log.say("done")


def _run_phase(scenarios: Scenarios, phase: str, tmpfs: Path, disk: Path, disk_sizes: Mapping[int, int]) -> None:
    if phase == "single-tmpfs":
        scenarios.single("tmpfs", tmpfs, None)
    elif phase == "single-disk":
        scenarios.single("disk", disk, disk_sizes)
    elif phase == "overhead":
        scenarios.never(tmpfs)
    else:
        scenarios.users(int(phase.partition("-")[2]), tmpfs)


def _repository() -> Path:
    return Path(__file__).resolve().parents[2]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--phases", type=lambda text: text.split(","), default=list(PHASES), help=",".join(PHASES))
    parser.add_argument(
        "--backends", type=lambda text: text.split(","), default=list(backends.ALL), help=",".join(backends.KNOWN)
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="for engine.jsonl, tables and charts; continued if there"
    )
    parser.add_argument("--work", type=Path, help="for the model, logs and the mounted tmpfs (default: in /tmp)")
    parser.add_argument("--disk", type=Path, help="directory on the disk to measure (default: in --work)")
    parser.add_argument("--lifeboat", type=Path, help="wheel of lifeboatcache; without it that backend is left out")
    parser.add_argument("--kvtier", type=json.loads, default={}, help="fields of ConnectorConfig as JSON")
    parser.add_argument("--rounds", type=int, default=6, help="repetitions of the workload that never hits")
    parser.add_argument("--time-limit", type=float, default=0.0, help="start no engine after so many seconds")
    parser.add_argument("--graphs", action="store_true", help="decode with CUDA graphs; otherwise vLLM runs eagerly")
    parser.add_argument("--device", choices=("gpu", "cpu"), default="gpu")
    parser.add_argument("--tiny", action="store_true", help="accepted with --device cpu, which is always tiny")
    options = parser.parse_args()
    options.backends = list(options.backends)
    if unknown := set(options.backends) - set(backends.KNOWN):
        parser.error(f"unknown backend: {', '.join(sorted(unknown))}")
    if unknown := set(options.phases) - set(PHASES):
        parser.error(f"unknown phase: {', '.join(sorted(unknown))}")
    return options


if __name__ == "__main__":
    main()
