# SPDX-License-Identifier: Apache-2.0
"""What is measured on engines: one request at a time, users who return together, and a workload that never hits.

Every prompt is one token longer than whole blocks, so that a hit in any tier leaves exactly one token to compute: the
arithmetic is the same whichever tier the blocks came from, and so must the answer be.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from e2e.bench import backends, volumes
from e2e.bench.engines import Engine, EngineFailed
from e2e.bench.journal import Journal
from e2e.bench.models import Shape

WARM_UP_SEED = 1
USER_SEED = 5000
NEVER_SEED = 1_000_000

QUIET_SECONDS = 2.0
"""Nothing stored for so long: the backend has stored all it will."""
STORE_LIMIT_SECONDS = 120.0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All settings of a run."""

    work: Path
    """For models, settings and logs."""
    repository: Path
    lifeboat: Path | None
    shape: Shape
    engine: Mapping[str, Any]
    """Arguments of vLLM's AsyncEngineArgs."""
    seeds_weights: bool
    backends: Sequence[str]
    block_tokens: int
    is_cpu_build: bool
    kvtier: Mapping[str, Any] = field(default_factory=dict)
    single_cpu_bytes: int
    sizes: Mapping[int, int]
    """Prompt length in whole blocks' tokens, and how many prompts of it."""
    output_tokens: int = 8
    user_tokens: int
    user_cpu_bytes: int
    user_repetitions: int = 2
    never_input: int
    never_output: int
    never_requests: int
    never_at_a_time: int
    never_rounds: int
    never_cpu_bytes: int
    time_limit_seconds: float = 0.0
    """No engine is started after this; 0 means no limit."""

    @property
    def block_bytes(self) -> int:
        """Payload of one block file."""
        return self.shape.kv_bytes_per_token * self.block_tokens


class Scenarios:
    """Runs phases and records each measurement. One thread; at most one engine works at any time."""

    def __init__(self, plan: Plan, journal: Journal) -> None:
        """Store the settings."""
        self._plan = plan
        self._journal = journal

    def single(self, volume: str, directory: Path, sizes: Mapping[int, int] | None = None) -> None:
        """Measure one request at a time: computed, and answered by each tier; the disk in a second engine."""
        sizes = sizes or self._plan.sizes
        for backend in self._backends(f"single-{volume}"):
            blocks = directory / backend
            volumes.clear(blocks)
            with self._reporting(backend, volume):
                self._single_first(backend, volume, blocks, sizes)
                if backends.has_volume(backend):
                    if volume == "disk":
                        volumes.forget_pages(blocks)
                    self._single_second(backend, volume, blocks, sizes)
            volumes.clear(blocks)

    def users(self, count: int, directory: Path) -> None:
        """Measure so many users with long prompts, who all return at once after the engine was restarted."""
        phase = f"users-{count}"
        tokens = self._plan.user_tokens + 1
        requests = [{"seed": USER_SEED + number, "tokens": tokens} for number in range(count)]
        for backend in self._backends(phase):
            blocks = directory / backend
            volumes.clear(blocks)
            with self._reporting(backend, phase):
                cpu_bytes = self._plan.user_cpu_bytes
                with self._engine(backend, phase, blocks, cpu_bytes) as engine:
                    stored = self._warm_up(engine, blocks, backend)
                    self._wave(engine, backend, phase, "cold", requests, 0)
                    if not backends.has_volume(backend):
                        for repetition in range(self._plan.user_repetitions):
                            engine.forget()
                            self._wave(engine, backend, phase, "return", requests, repetition)
                    else:
                        self._settle(blocks, stored + count * self._plan.user_tokens // self._plan.block_tokens)
                if backends.has_volume(backend):
                    self._users_return(backend, phase, blocks, requests)
            volumes.clear(blocks)

    def never(self, directory: Path) -> None:
        """Measure what offloading costs a workload that never hits: engines side by side, used in turn."""
        phase = "never"
        plan = self._plan
        with contextlib.ExitStack() as stack:
            engines: dict[str, Engine] = {}
            for backend in self._backends(phase):
                blocks = directory / backend
                volumes.clear(blocks)
                stack.callback(volumes.clear, blocks)
                with self._reporting(backend, phase):
                    share = round(0.9 / len(plan.backends), 2)
                    engine = self._engine(backend, phase, blocks, plan.never_cpu_bytes, gpu_memory_utilization=share)
                    engines[backend] = stack.enter_context(engine)
                    self._warm_up(engine, blocks, backend)
                    volumes.remove_blocks(blocks, at_least=plan.block_bytes)
            for round_number in range(-1, plan.never_rounds):
                first_seed = NEVER_SEED + (round_number + 1) * plan.never_requests
                requests = [{"seed": first_seed + i, "tokens": plan.never_input} for i in range(plan.never_requests)]
                # Every other round the other way round, so that a drift of the machine favours nobody.
                for backend in list(engines) if round_number % 2 else list(reversed(engines)):
                    is_done = False
                    with self._reporting(backend, phase):
                        self._never_round(engines[backend], backend, phase, requests, round_number)
                        is_done = True
                    if not is_done:
                        del engines[backend]
                    elif backends.has_volume(backend):
                        expected = plan.never_requests * (plan.never_input // plan.block_tokens)
                        self._settle(directory / backend, expected)
                        volumes.remove_blocks(directory / backend, at_least=plan.block_bytes)

    def _never_round(
        self, engine: Engine, backend: str, phase: str, requests: Sequence[Mapping[str, int]], round_number: int
    ) -> None:
        plan = self._plan
        answer = engine.run(requests, output_tokens=plan.never_output, at_a_time=plan.never_at_a_time)
        results = answer["requests"]
        if round_number < 0:
            self._journal.say(f"{phase:12} {backend:9} warm-up {answer['seconds']:.2f} s")
            return
        tokens = sum(len(result["output"]) for result in results)
        record = {
            "kind": "never",
            "phase": phase,
            "backend": backend,
            "repetition": round_number,
            "seconds": answer["seconds"],
            "requests_per_second": len(results) / answer["seconds"],
            "output_tokens_per_second": tokens / answer["seconds"],
            "tpot": [(r["seconds"] - r["first"]) / max(1, len(r["output"]) - 1) for r in results],
            "first": [result["first"] for result in results],
            "hits": sum(result["cached"] > 0 for result in results),
            "seeds": [result["seed"] for result in results],
            "outputs": [result["output"] for result in results],
        }
        self._journal.write(
            record, f"{phase:12} {backend:9} round {round_number}: {record['output_tokens_per_second']:.1f} tokens/s"
        )

    def _single_first(self, backend: str, volume: str, blocks: Path, sizes: Mapping[int, int]) -> None:
        phase = f"single-{volume}"
        stored = 0
        with self._engine(backend, f"{phase}-first", blocks, self._plan.single_cpu_bytes) as engine:
            stored = self._warm_up(engine, blocks, backend)
            for tokens, seed, repetition in _prompts(sizes):
                self._one(engine, backend, phase, "cold", tokens, seed, repetition)
                if backends.has_volume(backend):
                    stored += tokens // self._plan.block_tokens
                    self._settle(blocks, stored)
                self._one(engine, backend, phase, "gpu_hit", tokens, seed, repetition)
                if backends.has_volume(backend):
                    engine.forget()
                    self._one(engine, backend, phase, "cpu_hit", tokens, seed, repetition)

    def _single_second(self, backend: str, volume: str, blocks: Path, sizes: Mapping[int, int]) -> None:
        phase = f"single-{volume}"
        with self._engine(backend, f"{phase}-second", blocks, self._plan.single_cpu_bytes) as engine:
            self._warm_up(engine, blocks, backend)
            for tokens, seed, repetition in _prompts(sizes):
                self._one(engine, backend, phase, "disk_hit", tokens, seed, repetition)
                engine.forget()
                self._one(engine, backend, phase, "cpu_hit_again", tokens, seed, repetition)

    def _users_return(self, backend: str, phase: str, blocks: Path, requests: Sequence[Mapping[str, int]]) -> None:
        with self._engine(backend, f"{phase}-second", blocks, self._plan.user_cpu_bytes) as engine:
            self._warm_up(engine, blocks, backend)
            for repetition in range(self._plan.user_repetitions):
                self._wave(engine, backend, phase, "return", requests, repetition)
                engine.forget(cpu_tier=True)

    def _warm_up(self, engine: Engine, blocks: Path, backend: str) -> int:
        """Run each path once: compute or, in a second engine, disk hit, then CPU hit and GPU hit; return the blocks."""
        stored = 0
        for number, tokens in enumerate(sorted(self._plan.sizes)[:2]):
            requests = [{"seed": WARM_UP_SEED + number, "tokens": tokens + 1}]
            stored += tokens // self._plan.block_tokens
            engine.run(requests, output_tokens=self._plan.output_tokens)
            if backends.has_volume(backend):
                self._settle(blocks, stored)
                engine.forget()
                engine.run(requests, output_tokens=self._plan.output_tokens)
            engine.run(requests, output_tokens=self._plan.output_tokens)
        return stored

    def _one(  # noqa: PLR0913, PLR0917 - one measurement has this many names
        self, engine: Engine, backend: str, phase: str, case: str, tokens: int, seed: int, repetition: int
    ) -> None:
        answer = engine.run([{"seed": seed, "tokens": tokens + 1}], output_tokens=self._plan.output_tokens)
        (result,) = answer["requests"]
        record = {
            "kind": "single",
            "phase": phase,
            "backend": backend,
            "case": case,
            "tokens": tokens,
            "repetition": repetition,
            "seed": seed,
            "first": result["first"],
            "cached": result["cached"],
            "output": result["output"],
        }
        took = f"{result['first'] * 1000:8.1f} ms, {result['cached']} cached"
        line = f"{phase:12} {backend:9} {case:13} {tokens:6} tokens: {took}"
        self._journal.write(record, line)

    def _wave(  # noqa: PLR0913, PLR0917 - as above
        self,
        engine: Engine,
        backend: str,
        phase: str,
        case: str,
        requests: Sequence[Mapping[str, int]],
        repetition: int,
    ) -> None:
        answer = engine.run(requests, output_tokens=self._plan.output_tokens)
        results = answer["requests"]
        whole = self._plan.user_tokens
        record = {
            "kind": "wave",
            "phase": phase,
            "backend": backend,
            "case": case,
            "users": len(results),
            "tokens": whole,
            "repetition": repetition,
            "all_first": max(result["at"] for result in results),
            "first": [result["first"] for result in results],
            "cached": [result["cached"] for result in results],
            "served": sum(result["cached"] >= whole for result in results),
            "seeds": [result["seed"] for result in results],
            "outputs": [result["output"] for result in results],
        }
        self._journal.write(
            record,
            f"{phase:12} {backend:9} {case:13} all first tokens after {record['all_first']:.2f} s, "
            f"{record['served']} of {len(results)} served whole",
        )

    def _settle(self, blocks: Path, expected: int) -> None:
        count = volumes.wait_for_blocks(
            blocks,
            at_least=self._plan.block_bytes,
            expected=expected,
            quiet_seconds=QUIET_SECONDS,
            limit_seconds=STORE_LIMIT_SECONDS,
        )
        if count < expected:
            line = f"{blocks.name}: {count} of {expected} blocks are on the volume"
            self._journal.write({"kind": "missing", "backend": blocks.name, "found": count, "expected": expected}, line)

    def _engine(self, backend: str, name: str, blocks: Path, cpu_bytes: int, **arguments: Any) -> Engine:
        plan = self._plan
        offload = backends.Offload(
            cpu_bytes=cpu_bytes, block_tokens=plan.block_tokens, is_cpu_build=plan.is_cpu_build, kvtier=plan.kvtier
        )
        settings = {
            "engine": {**plan.engine, **({} if plan.is_cpu_build else arguments)},
            "transfer": backends.transfer_config(backend, blocks, offload),
            "seeds_weights": plan.seeds_weights,
            "vocabulary": plan.shape.vocabulary,
        }
        environment = backends.environment(backend, plan.repository, plan.lifeboat)
        engine = Engine(f"{name}-{backend}", settings, environment, plan.work / "engines")
        self._journal.write(
            {"kind": "engine", "name": name, "backend": backend, **engine.facts},
            f"{name}: {backend} serves after {engine.facts['seconds']:.1f} s",
        )
        return engine

    def _backends(self, phase: str) -> Iterator[str]:
        limit = self._plan.time_limit_seconds
        for backend in self._plan.backends:
            if limit and self._journal.elapsed() > limit:
                self._journal.write(
                    {"kind": "skipped", "phase": phase, "backend": backend}, f"{phase}: no time for {backend}"
                )
            else:
                yield backend

    @contextlib.contextmanager
    def _reporting(self, backend: str, phase: str) -> Iterator[None]:
        """Let the other backends be measured when one fails; its failure is a record."""
        try:
            yield
        except EngineFailed as error:
            self._journal.write({"kind": "failed", "phase": phase, "backend": backend, "error": str(error)}, str(error))


def _prompts(sizes: Mapping[int, int]) -> Iterator[tuple[int, int, int]]:
    for tokens, repetitions in sizes.items():
        for repetition in range(repetitions):
            yield tokens, tokens * 100 + repetition + 2, repetition
