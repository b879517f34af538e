# SPDX-License-Identifier: Apache-2.0
"""The traffic benchmark on one GPU: conversations, short prompts, arrivals and shared prefixes, for each backend.

A run is a list of stages, each an engine of one backend and the cells it serves, such as ``kvtier:traffic``. The
stage ``restart`` is a new engine that finds on the volume what the stage ``traffic`` of its backend left there. A stage
that fails is a record, and the next one begins. ``--device cpu`` plays the same with a tiny model on vLLM's CPU build.
With ``--device paced`` it plays the GPU's workloads on an engine that only takes a GPU's time; see `paced`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import re
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from e2e.backends import lmcache_memcpy
from e2e.bench import backends, cells, report, throttle, volumes, workloads
from e2e.bench.cells import STAGES, TINY_STAGES, HeavyCell, HeavySizes, Stage
from e2e.bench.engines import BenchEngine
from e2e.bench.workloads import Cell, Sizes
from e2e.engines import paced, weights
from e2e.engines.process import EngineEnded
from e2e.engines.weights import SHAPES

ROOT = Path(__file__).resolve().parents[2]
GPU_BLOCK_TOKENS = 16
CELL_LIMIT_SECONDS = 400.0
STORE_LIMIT_SECONDS = 120.0
RESTART_ROUNDS = 3
PREPARES = 2
"""A volume slower than the GPU leaves blocks out at first."""
QUIET_SECONDS = 1.5
"""Nothing stored for so long: the backend has stored all it will."""
MOST_ENGINES = 8
"""Start at once."""
STARTS_WITH = 0.1
"""Share of the GPU's memory that must be free where an engine starts beside others."""
Run = tuple[str, str, Sequence[str]]
"""A backend, a stage and the cells to play; none for the stage's own."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of all stages."""

    work: Path
    volume: Path
    sizes: Sizes
    heavy: HeavySizes
    stages: Mapping[str, Stage]
    engine: Mapping[str, Any]
    is_cpu_build: bool
    block_tokens: int
    block_bytes: int
    vocabulary: int
    groups: int = 1
    """Kinds of layers, each with blocks of its own."""
    kvtier: Mapping[str, Any] = field(default_factory=dict)
    variant: str = ""
    """Note about this run, for the report."""
    rounds: int = 1
    """How often conversations and short prompts are played, each time others."""
    deadline: float = 0.0
    """On the monotonic clock; 0 for none."""


class Traffic:
    """Plays stages and records each cell. One thread, one engine at a time."""

    engine: BenchEngine
    engines: Sequence[BenchEngine]
    """All of the stage; `engine` is the first."""

    def __init__(
        self, settings: Settings, log: report.Journal, start: Callable[..., BenchEngine] = BenchEngine
    ) -> None:
        """Store the settings, and what starts an engine."""
        self._settings = settings
        self.sizes, self.heavy, self.rounds = settings.sizes, settings.heavy, settings.rounds
        self._log = log
        self._start = start
        self._backend = ""
        self._stage = ""
        self._cells: Sequence[str] = ()
        self.blocks = settings.volume

    def play(self, runs: Sequence[Run]) -> None:
        """Start the engines of these runs at once, then play the runs in their order: one engine works at a time.

        Runs of the same backend and stage are played by one engine.
        """
        settings = self._settings
        asked: dict[tuple[str, str], list[str]] = defaultdict(list)
        for backend, name, given in runs:
            asked[backend, name] += given or settings.stages[name].cells
        used = {backends.volume(backend) for backend, _ in asked} - {""}
        if used:
            # Data of other backends takes memory.
            kept = used if any(settings.stages[name].keeps_volume for _, name in asked) else set()
            for other in {backends.volume(each) for each in backends.KNOWN} - kept - {""}:
                shutil.rmtree(settings.volume / other, ignore_errors=True)
        if self._remaining() <= 0:
            for self._backend, self._stage in asked:
                self._log.write(self._record("skipped"), f"{self._backend} {self._stage}: no time left")
            return
        with ExitStack() as self._engines:
            engines = self._start_all(asked)
            warm: set[tuple[str, str]] = set()
            for backend, name, given in runs:
                key = self._backend, self._stage = backend, name
                if key in engines:
                    self.engines, self._cells = engines[key], asked[key]
                    self.engine = self.engines[0]
                    with self._failures_noted():
                        self._play_run(given, is_warm=key in warm)
                    engines[key] = self.engines
                    warm.add(key)

    def _start_all(
        self, asked: Mapping[tuple[str, str], Sequence[str]]
    ) -> dict[tuple[str, str], Sequence[BenchEngine]]:
        """Start the engines of stages at once; leave out a stage that has not all of its own."""
        stages = self._settings.stages
        with ThreadPoolExecutor(MOST_ENGINES) as pool:
            starts = {
                key: [pool.submit(self._make_engine, *key, given, number) for number in range(stages[key[1]].engines)]
                for key, given in asked.items()
            }
        engines: dict[tuple[str, str], Sequence[BenchEngine]] = {}
        for key, started in starts.items():
            self._backend, self._stage = key
            found = []
            for start in started:
                with self._failures_noted():
                    found.append(self._engines.enter_context(start.result()))
            if len(found) == len(started):
                engines[key] = found
        return engines

    def _play_run(self, given: Sequence[str], *, is_warm: bool) -> None:
        stage = self._settings.stages[self._stage]
        self.blocks = self._settings.volume / backends.volume(self._backend)
        if stage.keeps_volume:
            volumes.forget_pages(self.blocks)
        if not is_warm:
            self._warm_up()
        for cell in given or stage.cells:
            self._play_cell(cell)

    @contextmanager
    def _failures_noted(self) -> Iterator[None]:
        try:
            yield
        except EngineEnded as error:
            line = f"{self._backend} {self._stage}: {error}"
            self._log.write({**self._record("failed"), "error": str(error)}, line)

    def start_engine(self) -> None:
        """Start the stage's engine again, and let it compile what it will need."""
        self.engines = [self._engines.enter_context(self._make_engine(self._backend, self._stage, self._cells))]
        self._warm_up()

    def _warm_up(self) -> None:
        for engine in self.engines:
            self.engine = engine
            self.ask(workloads.warm_up(self.sizes))
            self.engine.forget()
            self.ask(workloads.warm_up(self.sizes))
        self.engine = self.engines[0]

    def _play_cell(self, cell: str) -> None:
        match cell:
            case Cell.CONVERSATIONS:
                self._conversations(cell, self.sizes.conversations)
            case Cell.FITTING:
                self._conversations(cell, self.sizes.fitting_conversations)
            case Cell.SHORT:
                self._short(cell)
            case Cell.ARRIVALS:
                for _round in range(RESTART_ROUNDS):
                    self._measure(cell, workloads.arrivals(self.sizes))
                    self.forget_all()
            case Cell.SHARED:
                self._shared(cell)
            case Cell.SINGLE:
                self._single(cell)
            case Cell.NEVER:
                self._never(cell)
            case _ if (requests := cells.prepared(cell, self.sizes, self.heavy)) and backends.has_volume(self._backend):
                self._prepare(requests)
            case _:
                cells.play(self, cell)

    def _prepare(self, requests: list[workloads.Request]) -> None:
        is_stored = False
        for _ in range(PREPARES):
            if not is_stored:
                self.ask(requests, at_a_time=2)
                is_stored = self._settle(requests)
                self.forget_all()

    def _conversations(self, cell: str, count: int) -> None:
        for number in range(self.rounds):
            requests = workloads.conversations(self.sizes, count, first=number * count)
            self._measure(cell, requests, at_a_time=self.sizes.conversations_at_a_time)
            self.empty()

    def _short(self, cell: str) -> None:
        at_a_time = self.sizes.short_at_a_time
        for number in range(self.rounds):
            requests = workloads.short_prompts(self.sizes, first=number * self.sizes.short_prompts)
            self._measure(f"{cell} first", requests, at_a_time=at_a_time)
            self._settle(requests)
            self._measure(cell, requests, at_a_time=at_a_time)
            self.empty()

    def _shared(self, cell: str) -> None:
        rounds = itertools.count(0, self.sizes.sharers)
        for _round in range(RESTART_ROUNDS):
            self._measure(cell, workloads.sharers(self.sizes, first=next(rounds)))
            if self._backend == backends.NONE:
                # The limit for every backend: the prefix never left the GPU.
                self._measure(f"{cell} in GPU", workloads.sharers(self.sizes, first=next(rounds)))
            self.forget_all()

    def _single(self, cell: str) -> None:
        requests = workloads.singles(self.sizes)
        for request in requests:
            self._measure(f"{cell} first", [request])
            if self._backend != backends.NONE:
                self.engine.forget()
                volumes.forget_pages(self.blocks)
                self._measure(f"{cell} again", [request])
            self._measure(f"{cell} in GPU", [request])
        self._settle(requests)

    def _never(self, cell: str) -> None:
        sizes = self.sizes
        self.ask(workloads.never(sizes, sizes.never_rounds), at_a_time=sizes.never_at_a_time)
        for number in range(sizes.never_rounds):
            self.empty()
            self._measure(cell, workloads.never(sizes, number), at_a_time=sizes.never_at_a_time)

    def forget_all(self) -> None:
        """Leave the engine as it is after a restart, once it has served: what is cached is on the volume alone."""
        self.engine.forget(cpu_tier=self._backend != backends.NONE)
        volumes.forget_pages(self.blocks)
        self.ask(workloads.warm_up(self.sizes))

    def _measure(self, cell: str, requests: Sequence[Mapping[str, Any]], *, at_a_time: int = 0) -> None:
        self.note(cell, self.ask(requests, at_a_time=at_a_time))

    def note(self, cell: str, found: Mapping[str, Any]) -> None:
        """Record what was asked as a cell."""
        if not found["requests"]:
            raise EngineEnded(f"{cell}: no request was answered")
        record = {**self._record("cell"), "cell": cell, **found}
        self._log.write(record, report.one_line(record))

    def ask(self, requests: Sequence[Mapping[str, Any]], *, at_a_time: int = 0, until: float = 0.0) -> dict[str, Any]:
        """Have the engine answer requests, all at once unless told how many, or those it answers until some second."""
        limit = max(1.0, min(CELL_LIMIT_SECONDS, self._remaining()))
        return self.engine.run(requests, at_a_time, until=until, limit_seconds=limit)

    def ask_each(self, requests: Sequence[Sequence[workloads.Request]], *, at_a_time: int) -> dict[str, Any]:
        """Have every engine answer requests of its own, so many of each at a time."""
        limit = max(1.0, min(CELL_LIMIT_SECONDS, self._remaining()))
        with ThreadPoolExecutor(len(requests)) as pool:
            asked = [
                pool.submit(engine.run, own, at_a_time, until=0.0, limit_seconds=limit)
                for engine, own in zip(self.engines, requests, strict=True)
                if own
            ]
        found = [each.result() for each in asked]
        return {
            "seconds": max(each["seconds"] for each in found),
            "began": min(each["began"] for each in found),
            "counts": {name: sum(each["counts"][name] for each in found) for name in found[0]["counts"]},
            "requests": [{**one, "engine": n} for n, each in enumerate(found) for one in each["requests"]],
        }

    def _settle(self, requests: list[workloads.Request]) -> bool:
        """Wait until the prompts are stored, and say whether they are."""
        if not backends.has_volume(self._backend):
            return True
        file_tokens = backends.file_tokens(self._backend, self._settings.block_tokens)
        expected = workloads.block_count(requests, file_tokens) * self._settings.groups
        found = volumes.wait_for_blocks(
            self.blocks,
            at_least=self._settings.block_bytes,
            expected=expected,
            quiet_seconds=QUIET_SECONDS,
            limit_seconds=max(0.0, min(STORE_LIMIT_SECONDS, self._remaining())),
        )
        # Of layers with a window, only the last blocks are stored.
        is_stored = found * self._settings.groups >= expected
        if not is_stored:
            line = f"{self._backend}: {found} of {expected} blocks are on the volume"
            self._log.write({**self._record("missing"), "found": found, "expected": expected}, line)
        return is_stored

    def empty(self) -> None:
        """Make room for the next cell, which asks for nothing of this one."""
        volumes.remove_blocks(self.blocks, at_least=self._settings.block_bytes)

    def _make_engine(self, backend: str, name: str, asked: Sequence[str], number: int = 0) -> BenchEngine:
        settings, stage = self._settings, self._settings.stages[name]
        transfer = backends.transfer_config(
            backend,
            settings.volume / backends.volume(backend),
            cpu_bytes=stage.cpu_bytes,
            block_tokens=settings.block_tokens,
            is_cpu_build=settings.is_cpu_build,
            kvtier=settings.kvtier,
        )
        arguments = {**backends.BACKENDS[backend].get("engine", {}), **settings.engine, **stage.engine}
        length = cells.model_length(asked, self.sizes, self.heavy)
        arguments["max_model_len"] = max(length, arguments.get("max_model_len", 0))
        if stage.gpu_tokens and settings.is_cpu_build:
            arguments["num_gpu_blocks_override"] = stage.gpu_tokens // settings.block_tokens * settings.groups
        elif stage.gpu_tokens:
            # Then vLLM does not look how much memory is free, and engines can start at once.
            group_bytes = settings.block_bytes // settings.block_tokens
            arguments["kv_cache_memory_bytes"] = (stage.gpu_tokens + GPU_BLOCK_TOKENS) * group_bytes * settings.groups
            arguments["gpu_memory_utilization"] = STARTS_WITH
        engine = self._start(
            f"{name}-{backend}-{settings.variant}-{number}",
            {"engine": arguments, "transfer": transfer, "vocabulary": settings.vocabulary},
            settings.work / "engines",
        )
        record = {**self._record("engine"), "backend": backend, "stage": name, **engine.facts}
        self._log.write(record, f"{backend} {name}: serves, {engine.facts}")
        return engine

    def _record(self, kind: str) -> report.Record:
        return {"kind": kind, "backend": self._backend, "stage": self._stage, "variant": self._settings.variant}

    def _remaining(self) -> float:
        deadline = self._settings.deadline
        return deadline - time.monotonic() if deadline else float("inf")


def main() -> None:
    """Play the stages that the command line names."""
    options = _options()
    options.out.mkdir(parents=True, exist_ok=True)
    work = options.work or Path(tempfile.mkdtemp(prefix="kvtier-traffic-"))
    work.mkdir(parents=True, exist_ok=True)
    log = report.Journal(options.out / "traffic.jsonl")
    log.write(report.describe_run(runs=options.runs, kvtier=options.kvtier, variant=options.variant))
    with nullcontext(options.volume) if options.volume else tempfile.TemporaryDirectory(dir="/dev/shm") as volume:
        traffic = Traffic(_settings(options, work, Path(volume)), log)
        try:
            for group in options.runs:
                runs = [run.split(":") for run in group.split(",")]
                traffic.play([(backend, stage, given) for backend, stage, *given in runs])
        finally:
            print(report.write(options.out))
    log.say("done")


def _settings(options: argparse.Namespace, work: Path, volume: Path) -> Settings:
    is_cpu, is_paced = options.device != "gpu", options.device == "paced"
    shape = SHAPES[options.shape or {"gpu": "llama_8b", "cpu": "llama_small", "paced": paced.SHAPE}[options.device]]
    is_tiny = is_cpu and not is_paced
    groups = len(set(shape.get("layer_types", ["full_attention"])))
    item_bytes = 1 if str(options.engine.get("kv_cache_dtype", "")).startswith("fp8") else 2
    block_tokens = 128 if is_cpu else 64
    model, plugin = work / "model", work / "plugin"
    engine = {
        "model": str(model),
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "dtype": "bfloat16",
        "seed": 0,
        "enable_prefix_caching": True,
    }
    weights.offer_plugin(plugin)
    # A process that is spawned takes this path over, whatever the environment says.
    sys.path.insert(0, str(plugin))
    paths = [str(plugin), str(ROOT), str(ROOT / "connector"), os.environ.get("PYTHONPATH", "")]
    if options.throttle is not None or any(
        HeavyCell.RATES in run.split(":") for run in re.split(",| ", " ".join(options.runs))
    ):
        os.environ[throttle.FILE] = str(work / "throttle")
        rate = math.inf if options.throttle is None else options.throttle * 1e9
        throttle.Bucket(work / "throttle").rate = rate
    if is_cpu:
        # The CPU build repacks the weights while loading, so they come from a file.
        weights.write(model, shape)
        engine |= {"max_model_len": 2176, "gpu_memory_utilization": 0.15}
        if "lmcache" in " ".join(options.runs):
            os.environ[lmcache_memcpy.ASKED] = "1"
        if is_paced:
            os.environ[paced.PACED] = "1"
            engine |= {"max_model_len": 66560, "max_num_batched_tokens": 8192, "max_num_seqs": 64}
    else:
        model.mkdir(parents=True, exist_ok=True)
        (model / "config.json").write_text(json.dumps(dict(shape)))
        os.environ[weights.SEEDS_WEIGHTS] = "1"
        engine |= {
            "load_format": "dummy",
            "max_model_len": 66560,
            "max_num_batched_tokens": 8192,
            "max_num_seqs": 64,
            "gpu_memory_utilization": 0.9,
            # The model is compiled and steps are CUDA graphs, as vLLM does by default.
            "enforce_eager": False,
        }
    # Spawned processes have the path of this one, and what they start has the environment's.
    os.environ.update(
        PYTHONPATH=os.pathsep.join(path for path in paths if path),
        PYTHONHASHSEED="0",
        PYTHONWARNINGS="ignore",
        HF_HUB_OFFLINE="1",
        VLLM_NO_USAGE_STATS="1",
        # The CPU build reserves more cores with offloading than without: other speed, and other rounding.
        VLLM_CPU_NUM_OF_RESERVED_CPU="0",
    )
    heavy = cells.sized(cells.TINY_HEAVY if is_tiny else cells.GPU_HEAVY, options.sizes)
    stages = TINY_STAGES if is_tiny else STAGES
    if is_paced:
        heavy = replace(heavy, volume_rates=[rate * paced.scale() for rate in heavy.volume_rates])
        stages = {name: replace(each, cpu_bytes=int(each.cpu_bytes * paced.scale())) for name, each in stages.items()}
    return Settings(
        work=work,
        volume=volume,
        sizes=cells.sized(workloads.TINY_SIZES if is_tiny else workloads.GPU_SIZES, options.sizes),
        heavy=heavy,
        stages=stages,
        engine=engine | options.engine,
        is_cpu_build=is_cpu,
        block_tokens=block_tokens,
        block_bytes=weights.kv_bytes_per_token(shape, item_bytes=item_bytes) * block_tokens // groups,
        vocabulary=shape["vocab_size"],
        groups=groups,
        kvtier=options.kvtier,
        variant=options.variant,
        rounds=options.rounds,
        deadline=time.monotonic() + options.time_limit if options.time_limit else 0.0,
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    runs = f"BACKEND:STAGE[:CELL...], with a stage of {', '.join(STAGES)}; a comma joins those that start together"
    parser.add_argument("runs", nargs="+", help=runs)
    parser.add_argument("--out", type=Path, required=True, help="for traffic.jsonl, which is continued, and the report")
    parser.add_argument("--work", type=Path, help="for the model and logs (default: in /tmp)")
    parser.add_argument("--volume", type=Path, help="directory for the blocks (default: in /dev/shm)")
    parser.add_argument("--shape", choices=SHAPES, help="model (default: llama_8b, with --device cpu llama_small)")
    parser.add_argument("--throttle", type=float, help="GB/s at which kvtier's processes read blocks; 0: they hang")
    parser.add_argument("--kvtier", type=json.loads, default={}, help="fields of ConnectorConfig as JSON")
    parser.add_argument("--engine", type=json.loads, default={}, help="more of vLLM's engine arguments as JSON")
    parser.add_argument("--variant", default="", help="name of what is special about this run")
    parser.add_argument("--rounds", type=int, default=1, help="repetitions of A, B and C, each with other prompts")
    parser.add_argument("--sizes", type=json.loads, default={}, help="of workloads, other than usual, as JSON")
    parser.add_argument("--time-limit", type=float, default=0.0, help="end after so many seconds")
    parser.add_argument("--device", choices=("gpu", "cpu", "paced"), default="gpu")
    options = parser.parse_args()
    for run in (run for group in options.runs for run in group.split(",")):
        backend, _, stage = run.partition(":")
        if backend not in backends.KNOWN or stage.partition(":")[0] not in STAGES:
            parser.error(f"not a backend and a stage: {run}")
        if unknown := set(run.split(":")[2:]) - cells.known():
            parser.error(f"not cells: {', '.join(sorted(unknown))}; there are {', '.join(sorted(cells.known()))}")
    return options


if __name__ == "__main__":
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    main()
