# SPDX-License-Identifier: Apache-2.0
"""What a client asks of the cache in a request, whatever it may send."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from engine_fleet import LATER, PROMPT, Engines, finish, restart
from engine_parts import BLOCK_TOKENS, Shape, answer_of
from engine_rig import SimulatedEngine
from hypothesis import given
from hypothesis import strategies as st
from rig import DIGEST
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.core.sched.output import KVConnectorBlockState, SchedulerOutput
from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope
from vllm.v1.request import Request

from kvtier_connector.cascade.hints import (
    LONGEST_RETENTION_SECONDS,
    MOST_ACTIONS,
    NO_HINTS,
    HintProblem,
    Hints,
    Retention,
    parse_hints,
)
from kvtier_connector.contract.janitor import JanitorConfig
from kvtier_connector.janitor.sweep import Sweeper
from kvtier_connector.store.journal import RECORD_BYTES

TABLES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())


def action(kind: str, payload: dict[str, Any] | None = None, version: str = "1.0") -> dict[str, Any]:
    return {"action_id": "a", "action_type": kind, "action_version": version, "payload": payload or {}}


def hinted(*actions: Any) -> dict[str, Any]:
    return {"kv_hints": {"protocol_version": "0.1", "message_id": "m", "actions": list(actions)}}


def retain(*directives: Any, version: str = "1.0", **more: Any) -> dict[str, Any]:
    return action("kv.retain", {"directives": list(directives), **more}, version)


def kept(seconds: float = LONGEST_RETENTION_SECONDS, end: int | None = None) -> Hints:
    return Hints(retained=Retention(seconds, end))


FIRST = retain({"end": 32, "duration": 9}, version="1.7")


@pytest.mark.parametrize(
    ("params", "hints"),
    [
        (None, NO_HINTS),
        *((given, Hints(**hints)) for given, hints in TABLES["understood"]),
        (hinted(action("kv.retain")), kept()),
        ({"kv_hints": {"actions": [{"action_type": "kv.retain"}]}}, kept()),
        (hinted(retain({"duration": 10**400})), kept()),
        (hinted(retain({"end": 64, "priority": 80, "duration": 60}, scope="s")), kept(60.0, 64)),
        (hinted(retain({"end": 64, "duration": 5}, {"start": 64, "priority": 0})), kept(5.0, 64)),
        (hinted(FIRST, retain({"start": 32, "end": 48, "duration": 2})), kept(9.0, 48)),
    ],
)
def test_what_is_asked_for_is_understood(params: Any, hints: Hints) -> None:
    assert parse_hints(params, None)[0] == hints


@pytest.mark.parametrize(
    ("params", "cause", "name"),
    [
        *TABLES["ignored"],
        *((hinted(action(**each)), cause, name) for each, cause, name in TABLES["ignored_actions"]),
        ({5: 1}, "key", "(not shown)"),
        ({"kvtier_" + 40 * "s": 1}, "key", "(not shown)"),
        (hinted(*[action("kv.retain")] * (MOST_ACTIONS + 1)), "value", "kv_hints"),
        (hinted(retain(*[{}] * (MOST_ACTIONS + 1))), "payload", "kv.retain"),
        *((hinted(retain(bad)), "payload", "kv.retain") for bad in TABLES["bad_directives"]),
    ],
)
def test_what_is_not_understood_is_ignored_and_named(params: Any, cause: str, name: str) -> None:
    hints, _ = parse_hints(params, None)
    assert hints == Hints(problems=(HintProblem(cause, name),))
    assert list(hints.taken) == []


@pytest.mark.parametrize("value", ["false", "true", "no", 0, 1, None, [], {}])
def test_a_prompt_is_public_only_if_its_client_says_so_or_nothing(value: Any) -> None:
    assert parse_hints({"kvtier_store": value}, None)[0] == Hints(
        may_store=False, problems=(HintProblem("value", "kvtier_store"),)
    )
    assert parse_hints({"kvtier_load": value}, None)[0] == Hints(
        may_load=False, problems=(HintProblem("value", "kvtier_load"),)
    )


@pytest.mark.parametrize(("given_params", "left"), TABLES["understood_by_vllm"])
def test_vllm_gets_what_it_understands(given_params: Any, left: Any) -> None:
    assert parse_hints(given_params, None)[1] == left


KEYS = (
    "kv_hints actions action_type action_version payload directives end duration kvtier_store max_load_tokens "
    "kv_load_tiers medium protocol_version"
)
NAMES = st.text(max_size=4) | st.sampled_from(KEYS.split())
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
JSON = st.recursive(
    LEAVES | st.sampled_from(["1.0", "kv.retain"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=12,
)


@given(JSON)
def test_nothing_that_a_client_sends_raises(params: Any) -> None:
    for given_params in (params, {"kv_hints": params}, {"kv_hints": {"actions": params}}, hinted(params)):
        hints, understood = parse_hints(given_params, None)
        assert isinstance(understood, dict | None)
        retained = hints.retained
        assert retained is None or 0 <= retained.seconds <= LONGEST_RETENTION_SECONDS


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
def test_no_more_is_stored_than_allowed(
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
    assert engine.metric("vllm:kvtier_request_hints", "no_store") == 1
    # Of the same prompt, asked in public, all is computed and stored.
    engine.scheduler.reset_prefix_cache()
    assert engine.ask("public", PROMPT) == len(PROMPT)
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
    # A model with states: vLLM stores the last state at a token inside a block.
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
def test_a_private_prompt_leaves_no_record_of_its_use(engines: Engines, params: dict[str, Any], records: int) -> None:
    before = set((engines.rigs.root / "journal").glob("*.kvj"))
    reader = restart(engines)
    assert reader.ask("r", PROMPT, **params) < len(PROMPT)
    finish(reader)
    reader.close()
    (journal,) = set((engines.rigs.root / "journal").glob("*.kvj")) - before
    assert journal.stat().st_size == (1 + records) * RECORD_BYTES


SECRET = "sk-live-0123456789abcdef"


@pytest.mark.parametrize(
    ("params", "cause"),
    [
        (SECRET, "value"),
        ({SECRET: 1}, "key"),
        ({"max_load_tokens": SECRET}, "value"),
        ({"kv_hints": {"actions": [{"action_type": SECRET}]}}, "action"),
        ({"kv_hints": {"actions": [{"action_type": "kv.retain", "payload": {SECRET: "s"}}]}}, "payload"),
    ],
)
def test_what_is_not_understood_is_counted_told_once_without_its_words_and_costs_nothing(
    engines: Engines, caplog: pytest.LogCaptureFixture, params: Any, cause: str
) -> None:
    reader = engines.make()
    for number in range(3):
        serve(reader, f"r{number}", PROMPT, params)
    finish(reader)
    assert reader.metric("vllm:kvtier_ignored_request_hints", cause) == 3
    assert len([record for record in caplog.records if record.name == "vllm.kvtier.hints"]) == 1
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


@pytest.mark.parametrize(
    ("early", "late", "left"),
    [
        (None, None, (13, 8)),
        ({"kv_hints": RETAIN}, None, (20, 1)),
        (KvHintsEnvelope("0.1", "m", [KvHintAction("a", "kv.retain", "1.0", {})]), None, (20, 1)),
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
