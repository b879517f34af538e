# SPDX-License-Identifier: Apache-2.0
"""Whatever happens to weights, adapters and engines, no block is served for another identity than it was computed for.

Two engines share a volume under vLLM's own scheduler. Requests with salts and adapters come, are preempted and go;
adapters are rewritten, loaded in place, weights replaced, caches reset, engines restarted. A `SimulatedEngine` compares
in each step every value that it builds upon. ``KVTIER_RANDOM_EXAMPLES`` asks for more than the suite has time for.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from pathlib import Path

import pytest
from engine_fleet import Engines
from engine_parts import Shape, prompt_of
from engine_rig import SimulatedEngine
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from rig import Rigs
from test_adapters import request_for, write
from vllm.lora.request import LoRARequest
from vllm.v1.request import RequestStatus

EXAMPLES = int(os.environ.get("KVTIER_RANDOM_EXAMPLES", "6"))
OPERATIONS = 50
SHAPES = {
    "plenty": Shape(),
    "small": Shape(gpu_blocks=40, cpu_chunks=8),
    "long chunks": Shape(blocks_per_chunk=3, cpu_chunks=10),
    "answers too": Shape(prompt_only=False, cpu_chunks=20),
}
ADAPTERS = ("math", "law")


class Machine(RuleBasedStateMachine):
    """Random operations on two engines, one at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp())
        self.engines = Engines(Rigs(self.directory))
        self.contents = dict.fromkeys(ADAPTERS, 0)
        self.count = self.turn = 0

    @initialize(shape=st.sampled_from(sorted(SHAPES)))
    def begin(self, shape: str) -> None:
        self.shape = SHAPES[shape]
        for name in ADAPTERS:
            write(self.directory / name, f"{name} 0")
        self.pair = [self.start(), self.start()]

    @property
    def engine(self) -> SimulatedEngine:
        return self.pair[self.turn]

    def start(self) -> SimulatedEngine:
        return self.engines.make(self.shape, refresh_seconds=0.02)

    def lora(self, name: str | None) -> LoRARequest | None:
        if name is None:
            return None
        return request_for(self.directory / name, name)

    @rule(
        family=st.integers(0, 1),
        chunks=st.integers(0, 12),
        salt=st.sampled_from([None, None, "salt"]),
        adapter=st.sampled_from([None, *ADAPTERS]),
        answer=st.integers(1, 20),
    )
    def arrive(self, family: int, chunks: int, salt: str | None, adapter: str | None, answer: int) -> None:
        self.count += 1
        prompt = prompt_of(chunks, seed=family, more=3)
        self.engine.add(f"r{self.count}", prompt, salt=salt, answer=answer, lora=self.lora(adapter))

    @rule(steps=st.integers(1, 12))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.engine.step()

    @rule()
    def finish(self) -> None:
        self.engine.run()
        threading.Event().wait(0.03)

    @rule()
    def turn_to_the_other(self) -> None:
        self.engine.run()
        self.turn = 1 - self.turn

    @rule(adapter=st.sampled_from(ADAPTERS))
    def rewrite(self, adapter: str) -> None:
        self.contents[adapter] += 1
        write(self.directory / adapter, f"{adapter} {self.contents[adapter]}")

    @rule(adapter=st.sampled_from(ADAPTERS))
    def load_in_place(self, adapter: str) -> None:
        self.engine.run()
        # What the GPU has of the old contents is vLLM's affair; what the CPU tier has is ours.
        self.engine.scheduler.reset_prefix_cache(reset_running_requests=True)
        self.engine.adapters.pop(adapter, None)

    @rule(seed=st.integers(0, 2))
    def replace_weights(self, seed: int) -> None:
        if self.may_reset():
            self.engine.update_weights(seed)

    @rule(connector=st.booleans())
    def reset(self, connector: bool) -> None:
        if self.may_reset():
            self.engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=connector)

    @rule()
    def restart(self) -> None:
        self.engine.run()
        self.engine.close()
        self.pair[self.turn] = self.start()

    def may_reset(self) -> bool:
        """Say whether vLLM can take the blocks of every request: not yet of one that is being loaded."""
        requests = self.engine.scheduler.requests.values()
        is_loading = any(
            request.is_finished() or request.status is RequestStatus.WAITING_FOR_REMOTE_KVS for request in requests
        )
        return not is_loading and not self.engine.scheduler.kv_holding_waiting

    def teardown(self) -> None:
        try:
            for engine in getattr(self, "pair", ()):
                engine.run()
                engine.assert_nothing_is_left()
        finally:
            self.engines.close()
            shutil.rmtree(self.directory, ignore_errors=True)


@pytest.mark.timeout(3600)
def test_no_order_of_events_serves_a_block_for_another_identity() -> None:
    Machine.TestCase.settings = settings(
        max_examples=EXAMPLES,
        stateful_step_count=OPERATIONS,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        # A counterexample is not made smaller: that would take minutes.
        phases=[Phase.generate],
        print_blob=True,
    )
    Machine.TestCase().runTest()
