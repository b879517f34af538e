# SPDX-License-Identifier: Apache-2.0
"""What state machines of random operations do alike to the engines that they have on one volume."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from engine_fleet import Engines
from engine_rig import SimulatedEngine
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule
from rig import Rigs
from vllm.v1.request import RequestStatus


class EngineMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp())
        self.engines = Engines(Rigs(self.directory))
        self.made: list[SimulatedEngine] = []
        self.turn = self.count = 0

    @property
    def engine(self) -> SimulatedEngine:
        return self.made[self.turn]

    @rule(steps=st.integers(1, 12))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.engine.step()

    # Without a precondition: who is there depends on how quick the volume is, and what is drawn must not.
    @rule(choice=st.integers(0, 100))
    def abort(self, choice: int) -> None:
        alive = sorted(name for name, request in self.engine.scheduler.requests.items() if not request.is_finished())
        if alive:
            self.forget(alive[choice % len(alive)])
            self.engine.abort(alive[choice % len(alive)])

    def forget(self, name: str) -> None:
        """Expect no answer to a request."""

    @rule(lag=st.integers(0, 4))
    def have_copies_lag(self, lag: int) -> None:
        self.engine.copies.lag = lag

    def may_reset(self) -> bool:
        """Say whether vLLM can take the blocks of every request: not yet of one that is being loaded."""
        requests = self.engine.scheduler.requests.values()
        is_loading = any(
            request.is_finished() or request.status is RequestStatus.WAITING_FOR_REMOTE_KVS for request in requests
        )
        return not is_loading and not self.engine.scheduler.kv_holding_waiting

    def close(self) -> None:
        self.engines.close()
        shutil.rmtree(self.directory, ignore_errors=True)


def run(machine: type[EngineMachine], *, examples: int, operations: int, derandomize: bool = False) -> None:
    """Run a machine; a counterexample is not made smaller, which would take minutes."""
    machine.TestCase.settings = settings(
        max_examples=examples,
        stateful_step_count=operations,
        derandomize=derandomize,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
        print_blob=True,
    )
    machine.TestCase().runTest()
