# SPDX-License-Identifier: Apache-2.0
"""Whatever happens to weights, adapters and engines, no block is served for another identity than it was computed for.

Two engines share a volume under vLLM's own scheduler. Requests with salts, adapters, images, tenants and hints come,
are preempted, aborted and go; adapters are rewritten, loaded in place, weights replaced, caches reset, engines
restarted, some with other weights from the start. A `SimulatedEngine` compares in each step every value that it
builds upon.
``KVTIER_RANDOM_EXAMPLES`` asks for more than the suite has time for, and draws others each time;
``--hypothesis-seed`` says which.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from typing import Any, NamedTuple

import pytest
from engine_parts import IMAGE_TOKENS, Shape, prompt_of
from engine_rig import SimulatedEngine
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule
from random_engine import EngineMachine, run
from test_adapters import request_for, write
from vllm.lora.request import LoRARequest

EXAMPLES = int(os.environ.get("KVTIER_RANDOM_EXAMPLES", "6"))
ENOUGH = 200
"""Examples of which some come to everything; fewer may happen not to."""
OPERATIONS = 50
SHAPES = {
    "plenty": Shape(),
    "small": Shape(gpu_blocks=40, cpu_chunks=8),
    "long chunks": Shape(blocks_per_chunk=3, cpu_chunks=10),
    "answers too": Shape(prompt_only=False, cpu_chunks=20),
    "few adapters": Shape(most_loras=1, is_sharing_adapters=False, cpu_chunks=20),
    "adapters in pieces": Shape(most_loras=2, is_sharing_adapters=False, most_tokens=48, prompt_only=False),
}
ADAPTERS = ("math", "law", "art")
PARAMS: tuple[dict[str, Any], ...] = (
    {},
    {},
    {},
    {"kvtier_tenant": "alice"},
    {"kvtier_tenant": "bob"},
    {"kvtier_tenant": "no tenant/"},
    {"kvtier_store": False},
    {"kvtier_load": False},
    {"max_load_tokens": 70},
    {"max_offload_tokens": 70},
    {"kv_hints": {"actions": [{"action_type": "kv.retain"}, {"action_type": "kv.prefetch"}]}},
    {"kv_hints": {"actions": [{"action_type": "kv.retain"}, {"action_type": "kv.unheard-of"}]}},
)
WANTED: dict[str, st.SearchStrategy[Any]] = {
    "family": st.integers(0, 1),
    "chunks": st.sampled_from([12, 9, 4, 1]),
    "salt": st.sampled_from([None, None, "salt"]),
    "adapter": st.sampled_from([None, *ADAPTERS]),
    "image": st.sampled_from([None, None, ("cat", 0), ("dog", 0), ("cat", 40), ("dog", 40)]),
    "params": st.integers(0, len(PARAMS) - 1),
}


class Wanted(NamedTuple):
    """A request."""

    family: int
    """Prompts of one family share their beginning."""
    chunks: int
    salt: str | None
    adapter: str | None
    image: tuple[str, int] | None
    params: int


TRIED: Counter[str] = Counter()


class Machine(EngineMachine):
    """Random operations on two engines, one at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[Wanted] = []

    @initialize(shape=st.sampled_from(sorted(SHAPES)))
    def begin(self, shape: str) -> None:
        self.shape = SHAPES[shape]
        # This is followed by a look at the invariant, and is no operation.
        TRIED["operations"] -= 1
        TRIED["examples"] += 1
        for name in ADAPTERS:
            write(self.directory / name, f"{name} 0")
        self.made = [self.start(), self.start()]
        # Some examples draw no other one.
        self.add(Wanted(0, 9, None, None, None, 0))

    def start(self, weights: int = 0) -> SimulatedEngine:
        return self.engines.make(self.shape, weights=weights, refresh_seconds=0.02, tenant_from="Parameter")

    def lora(self, name: str | None) -> LoRARequest | None:
        if name is None:
            return None
        return request_for(self.directory / name, name)

    @rule(wanted=st.lists(st.builds(Wanted, **WANTED), min_size=1, max_size=4))
    def arrive(self, wanted: list[Wanted]) -> None:
        for each in wanted:
            self.add(each)

    @precondition(lambda self: self.asked)
    @rule(choices=st.lists(st.integers(0, 1000), min_size=1, max_size=4))
    def repeat(self, choices: list[int]) -> None:
        for choice in choices:
            self.add(self.asked[choice % len(self.asked)])

    @precondition(lambda self: self.asked)
    @rule(choices=st.lists(st.integers(0, 1000), min_size=1, max_size=4), changed=st.builds(Wanted, **WANTED))
    def ask_the_other(self, choices: list[int], changed: Wanted) -> None:
        """Repeat requests where they were not computed, and such as differ from them in one thing."""
        self.finish()
        self.turn = 1 - self.turn
        for number, choice in enumerate(choices):
            each = self.asked[choice % len(self.asked)]
            self.add(each)
            field = tuple(WANTED)[(choice + number) % len(WANTED)]
            self.add(each._replace(**{field: getattr(changed, field)}))

    def add(self, wanted: Wanted) -> None:
        self.asked.append(wanted)
        self.count += 1
        prompt = prompt_of(wanted.chunks, seed=wanted.family, more=3)
        is_there = wanted.image is not None and wanted.image[1] + IMAGE_TOKENS < len(prompt)
        self.engine.add(
            f"r{self.count}",
            prompt,
            salt=wanted.salt,
            # Requests of all lengths are under way at once.
            answer=1 + self.count % 20,
            lora=self.lora(wanted.adapter),
            image=wanted.image if is_there else None,
            **PARAMS[wanted.params],
        )

    @invariant()
    def count_operation(self) -> None:
        TRIED["operations"] += 1

    @rule()
    def finish(self) -> None:
        self.engine.run()
        threading.Event().wait(0.05)

    @rule(adapter=st.sampled_from(ADAPTERS), contents=st.integers(0, 2))
    def rewrite(self, adapter: str, contents: int) -> None:
        write(self.directory / adapter, f"{adapter} {contents}")

    @rule(adapter=st.sampled_from(ADAPTERS))
    def load_in_place(self, adapter: str) -> None:
        if self.shape.is_sharing_adapters:
            # What the GPU has of the old contents is vLLM's affair; what the CPU tier has is ours.
            self.engine.run()
            self.engine.scheduler.reset_prefix_cache(reset_running_requests=True)
        self.engine.lora_manager.add_adapter(request_for(self.directory / adapter, adapter, inplace=True))

    @rule(seed=st.integers(0, 2), connector=st.booleans(), data=st.booleans())
    def replace_weights(self, seed: int, connector: bool, data: bool) -> None:
        if self.may_reset():
            self.engine.update_weights(seed, resets_connector=connector, by_data=data)

    @rule(connector=st.booleans())
    def reset(self, connector: bool) -> None:
        if self.may_reset():
            self.engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=connector)

    @rule(weights=st.sampled_from([0, 0, 0, 5]))
    def restart(self, weights: int) -> None:
        self.engine.run()
        self.note()
        self.engine.close()
        # One that was started with other weights is no engine of this generation, and must find out itself.
        self.made[self.turn] = self.start(weights)

    def note(self) -> None:
        """Count what was read, so that a run can say that it tried what it claims."""
        engine = self.engine
        TRIED["requests"] += len(engine.answers)
        TRIED["preemptions"] += engine.preemptions
        TRIED["blocks read"] += int(engine.metric("vllm:kvtier_disk_read_blocks"))
        TRIED["blocks written"] += int(engine.metric("vllm:kvtier_disk_written_blocks"))
        TRIED["engines refused"] += bool(engine.tier.attachment.refused_field)

    def teardown(self) -> None:
        try:
            for turn in range(len(self.made)):
                self.turn = turn
                self.engine.run()
                self.engine.assert_nothing_is_left()
                self.note()
        finally:
            self.close()


@pytest.mark.timeout(3600)
def test_no_order_of_events_serves_a_block_for_another_identity() -> None:
    TRIED.clear()
    # The few of the suite are the same each time; a long run draws others.
    run(Machine, examples=EXAMPLES, operations=OPERATIONS, derandomize="KVTIER_RANDOM_EXAMPLES" not in os.environ)
    logging.getLogger(__name__).warning("tried: %s", dict(TRIED))
    assert TRIED["requests"] > 0
    if EXAMPLES >= ENOUGH:
        assert min(TRIED["blocks read"], TRIED["blocks written"], TRIED["preemptions"]) > 0
