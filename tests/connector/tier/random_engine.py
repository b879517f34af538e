# SPDX-License-Identifier: Apache-2.0
"""Random operations on simulated engines that share one volume, by a seed."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import ClassVar

from engine_fleet import Engines
from engine_parts import FixedRate
from engine_rig import SimulatedEngine
from rig import Rigs

LONG = "KVTIER_RANDOM_EXAMPLES"
"""Environment variable for a long run: how many examples. Their seeds come from the clock."""
LIMIT_SECONDS = 0 if LONG in os.environ else 300
"""A test of random operations takes no longer, but in a long run."""


class RandomOperations(ABC):
    """What examples of random operations do alike. Call `run`, then `close`."""

    weights: ClassVar[Mapping[int, str]]
    """Methods, by how often each of them is chosen."""

    def __init__(self, random: Random, tried: Counter[str]) -> None:
        """Count in `tried` what engines did, so that a test can say that it tried what it claims."""
        self.random, self.tried = random, tried
        self.directory = Path(tempfile.mkdtemp())
        self.engines = Engines(Rigs(self.directory))
        self.made: list[SimulatedEngine] = []
        self.turn = self.count = 0
        self.done: list[str] = []
        self.aborted: set[str] = set()
        """Requests that need no answer."""

    @property
    def engine(self) -> SimulatedEngine:
        return self.made[self.turn]

    def run(self, operations: int) -> None:
        """Do so many operations, and see that all ends well."""
        names = [name for weight, several in self.weights.items() for name in several.split() * weight]
        for name in self.random.choices(names, k=operations):
            self.done.append(name)
            getattr(self, name)()
        self.end()

    @abstractmethod
    def end(self) -> None:
        """See that all requests are answered and nothing is left."""

    def step(self) -> None:
        for _ in range(self.random.randint(1, 12)):
            self.engine.step()

    def abort(self) -> None:
        alive = sorted(name for name, request in self.engine.scheduler.requests.items() if not request.is_finished())
        if alive:
            name = self.random.choice(alive)
            self.aborted.add(name)
            self.engine.abort(name)

    def have_copies_lag(self) -> None:
        self.engine.copies.lag = self.random.randint(0, 4)
        # One chunk of the stores with each step, or all of them.
        self.engine.side._storing = self.random.choice([FixedRate(), FixedRate(1.0)])

    def reset_caches(self) -> None:
        has_connector = self.random.choice([True, False])
        self.engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=has_connector)

    def note(self) -> None:
        """Count what the engine of this turn did until it ends."""
        engine = self.engine
        self.tried["requests"] += len(engine.answers)
        self.tried["preemptions"] += engine.preemptions
        self.tried["blocks read"] += int(engine.metric("vllm:kvtier_disk_read_blocks"))
        self.tried["blocks written"] += int(engine.metric("vllm:kvtier_disk_written_blocks"))
        self.tried["joins"] += int(engine.metric("vllm:kvtier_disk_split_joins"))
        self.tried["engines refused"] += bool(engine.tier.attachment.refused_field)

    def close(self) -> None:
        self.engines.close()
        shutil.rmtree(self.directory, ignore_errors=True)


def run_random(machine: type[RandomOperations], *, examples: int, operations: int) -> Counter[str]:
    """Run examples, always the same ones but in a long run; return what they did."""
    tried: Counter[str] = Counter()
    first = time.time_ns() if LONG in os.environ else 0
    for seed in range(first, first + int(os.environ.get(LONG, examples))):
        made = machine(Random(seed), tried)
        try:
            made.run(operations)
        except BaseException as error:
            error.add_note(f"seed {seed}: {', '.join(made.done)}")
            raise
        finally:
            made.close()
    return tried
