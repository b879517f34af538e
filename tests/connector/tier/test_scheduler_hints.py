# SPDX-License-Identifier: Apache-2.0
"""What clients ask of the cache in a request, under vLLM's own scheduler, down to what the janitor makes of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from engine_fleet import Engines
from engine_parts import BLOCK_TOKENS, Shape, answer_of
from engine_rig import SimulatedEngine
from prompts import LATER, PROMPT, finish, restart
from rig import DIGEST
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.core.sched.output import KVConnectorBlockState, SchedulerOutput
from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope
from vllm.v1.request import Request

from kvtier_connector.contract.janitor import JanitorConfig
from kvtier_connector.janitor.sweep import Sweeper
from kvtier_connector.store.journal import RECORD_BYTES

CHUNKS = len(PROMPT) // BLOCK_TOKENS
RETAIN = {"actions": [{"action_type": "kv.retain", "payload": {"directives": [{"duration": 3600}]}}]}


def serve(engine: SimulatedEngine, name: str, prompt: Sequence[int], params: Any, hints: Any = None) -> int:
    """Serve a request that came with these, whatever they are; return how many tokens were computed."""
    sampling = SamplingParams(
        max_tokens=1, ignore_eos=True, temperature=0.0, extra_args=params and {"kv_transfer_params": params}
    )
    hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
    request = Request(name, list(prompt), sampling, None, block_hasher=hasher, kv_hints=hints)
    engine.computed[name] = 0
    engine.scheduler.add_request(request)
    engine.run(lambda: name in engine.answers)
    assert engine.answers[name] == answer_of(prompt, 1)
    return engine.computed[name]


@pytest.mark.parametrize("windows", [(None,), (None, 64)], ids=["one group", "a sliding window"])
@pytest.mark.parametrize(("tokens", "chunks"), [(0, 0), (1, 0), (5 * BLOCK_TOKENS, 5), (10**9, CHUNKS)])
def test_no_more_of_a_prompt_is_stored_than_its_client_allows(
    engines: Engines, windows: tuple[int | None, ...], tokens: int, chunks: int
) -> None:
    engine = engines.make(Shape(windows=windows))
    engine.ask("r", PROMPT, max_offload_tokens=tokens)
    finish(engine)
    stored = {len(list((engines.rigs.root / "blocks").rglob(f"*_g{group}.kvb"))) for group in range(len(windows))}
    assert max(stored) == chunks


@pytest.mark.parametrize("tokens", [0, 5 * BLOCK_TOKENS, 5 * BLOCK_TOKENS + 3, 10**9])
@pytest.mark.usefixtures("writer")
def test_no_more_of_a_prompt_is_loaded_than_its_client_allows(engines: Engines, tokens: int) -> None:
    reader = restart(engines)
    loaded = min(tokens, len(PROMPT)) // BLOCK_TOKENS
    assert reader.ask("r", PROMPT, max_load_tokens=tokens) == len(PROMPT) - loaded * BLOCK_TOKENS
    finish(reader)
    assert reader.metric("vllm:kvtier_disk_read_blocks") == loaded


@pytest.mark.parametrize("shape", [Shape(), Shape(prompt_only=False), Shape(windows=(None, 64))])
def test_a_private_prompt_is_stored_nowhere_but_in_the_gpu(engines: Engines, shape: Shape) -> None:
    engine = engines.make(shape)
    engine.ask("private", PROMPT, answer=40, kvtier_store=False)
    finish(engine)
    assert engines.count() == 0
    assert engine.manager.primary_tier._num_evictable_cache_chunks == 0
    assert engine.metric("vllm:kvtier_request_hints", "no_store") == 1
    # Of the same prompt, asked in public, all is stored that the GPU still has or computes again.
    engine.scheduler.reset_prefix_cache()
    engine.ask("public", PROMPT)
    finish(engine)
    assert engines.assert_volume_holds(engine, PROMPT) >= CHUNKS


@pytest.mark.parametrize(
    ("params", "is_stored"),
    [
        ({}, True),
        ({"max_offload_tokens": 3 * BLOCK_TOKENS}, True),
        ({"max_offload_tokens": 3 * BLOCK_TOKENS - 1}, False),
        ({"max_offload_tokens": 0}, False),
        ({"kvtier_store": False}, False),
    ],
)
def test_a_state_that_ends_behind_what_may_be_stored_is_not_stored_and_ends_no_engine(
    engines: Engines, params: dict[str, Any], *, is_stored: bool
) -> None:
    engine = engines.make()
    side = engine.side
    # As for a model with states, of which vLLM stores the last one at a token inside of a block.
    side.config = side.config._replace(supports_partial_tail=True)
    side._partial_tail_block_size = 4 * BLOCK_TOKENS
    side._cow_source_groups = frozenset({0})
    engine.add("r", PROMPT, **params)
    state = KVConnectorBlockState({"r"}, lambda _: ([1],), {"r": [(0, 1, 3 * BLOCK_TOKENS)], "gone": [(0, 1, 16)]})
    output = SchedulerOutput.make_empty()
    output.kv_connector_block_state = state
    assert bool(side._build_partial_tail_store_jobs(output)) == is_stored
    assert state.boundary_state_offloads.keys() == {"r", "gone"}


@pytest.mark.parametrize(
    ("params", "records"),
    [
        ({}, 1),
        ({"kvtier_store": False}, 0),
        ({"kv_hints": RETAIN}, 2),
        ({"kv_hints": RETAIN, "kvtier_store": False}, 0),
    ],
)
@pytest.mark.usefixtures("writer")
def test_a_private_prompt_leaves_no_record_of_what_it_used(
    engines: Engines, params: dict[str, Any], records: int
) -> None:
    before = set((engines.rigs.root / "journal").glob("*.kvj"))
    reader = restart(engines)
    assert reader.ask("r", PROMPT, **params) < len(PROMPT)
    finish(reader)
    reader.close()
    (journal,) = set((engines.rigs.root / "journal").glob("*.kvj")) - before
    assert journal.stat().st_size == (1 + records) * RECORD_BYTES


@pytest.mark.usefixtures("writer")
def test_a_request_that_wants_nothing_loaded_is_computed(engines: Engines) -> None:
    reader = restart(engines)
    assert reader.ask("r", PROMPT, kvtier_load=False) == len(PROMPT)
    finish(reader)
    assert reader.metric("vllm:kvtier_disk_read_blocks") == 0
    assert reader.metric("vllm:kvtier_request_hints", "no_load") == 1
    assert restart(engines).ask("r", PROMPT) < len(PROMPT)


@pytest.mark.parametrize(
    ("params", "cause"),
    [
        ("not an object", "value"),
        ({"kvtier_stroe": False}, "key"),
        ({"kvtier_store": "no"}, "value"),
        ({"max_load_tokens": "5"}, "value"),
        ({"kv_hints": {"actions": [{"action_type": "kv.pin"}]}}, "action"),
        ({"kv_hints": {"actions": [{"action_type": "kv.retain", "payload": {"session_id": "s"}}]}}, "payload"),
    ],
)
@pytest.mark.usefixtures("writer")
def test_what_is_not_understood_is_counted_and_told_once_and_costs_nothing(
    engines: Engines, caplog: pytest.LogCaptureFixture, params: Any, cause: str
) -> None:
    reader = restart(engines)
    for number in range(3):
        serve(reader, f"r{number}", PROMPT, params)
    finish(reader)
    assert reader.metric("vllm:kvtier_ignored_request_hints", cause) == 3
    (told,) = [record for record in caplog.records if record.name == "vllm.kvtier.hints"]
    assert "not an object" not in told.getMessage()


SECRET = "sk-live-0123456789abcdef"


@pytest.mark.parametrize(
    "params",
    [
        {"max_load_tokens": SECRET},
        {"max_offload_tokens": SECRET},
        {"kv_load_tiers": SECRET},
        {"kv_load_tiers": [{"medium": SECRET}]},
        {"kv_load_tiers": [{"locality": SECRET}]},
        {SECRET: 1},
        {"kv_hints": {"actions": [{"action_type": SECRET}]}},
    ],
)
def test_nothing_that_a_client_sends_is_in_the_log(
    engines: Engines, caplog: pytest.LogCaptureFixture, params: dict[str, Any]
) -> None:
    engine = engines.make()
    serve(engine, "r", PROMPT, params)
    finish(engine)
    assert sum(engine.metric("vllm:kvtier_ignored_request_hints", cause) for cause in ("value", "key", "action")) == 1
    assert "r" in engine.answers
    assert SECRET not in caplog.text


def janitor_leaves(engines: Engines, engine: SimulatedEngine, most_blocks: int) -> tuple[int, int]:
    """Have a janitor keep so many blocks; return how many of `PROMPT` and of `LATER` those are."""
    engine.close()
    size = next((engines.rigs.root / "blocks").rglob("*.kvb")).stat().st_size
    config = JanitorConfig(
        tier="ns/tier",
        tier_dir=str(engines.rigs.root.parent),
        current=DIGEST,
        http_port=0,
        max_bytes=most_blocks * size,
        high_watermark=0.9999,
        low_watermark=0.9998,
    )
    sweeper = Sweeper(config, is_lasting=False, ask_volume=lambda: None)
    sweeper.open()
    sweeper.finish()
    sweeper.close()
    return engines.assert_volume_holds(engine, PROMPT), engines.assert_volume_holds(engine, LATER)


def envelope(kind: str) -> KvHintsEnvelope:
    return KvHintsEnvelope("0.1", "m", [KvHintAction("a", kind, "1.0", {})])


@pytest.mark.parametrize(
    ("early", "late", "left"),
    [
        (None, None, (13, 8)),
        ({"kv_hints": RETAIN}, None, (20, 1)),
        (envelope("kv.retain"), None, (20, 1)),
        ({"kv_hints": RETAIN}, {"kv_hints": RETAIN}, (13, 8)),
    ],
    ids=["no hint", "retained", "retained by the engine's API", "both"],
)
def test_the_janitor_keeps_what_clients_want(engines: Engines, early: Any, late: Any, left: tuple[int, int]) -> None:
    engine = engines.make()
    for name, prompt, hints in (("early", PROMPT, early), ("late", LATER, late)):
        is_envelope = isinstance(hints, KvHintsEnvelope)
        serve(engine, name, prompt, None if is_envelope else hints, hints if is_envelope else None)
        engine.run()
    finish(engine)
    assert engines.count() == CHUNKS + 8
    assert janitor_leaves(engines, engine, 22) == left
