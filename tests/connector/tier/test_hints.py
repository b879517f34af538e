# SPDX-License-Identifier: Apache-2.0
"""What a client asks of the cache in a request, whatever it may send."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

from kvtier_connector.cascade.hints import (
    LONGEST_RETENTION_SECONDS,
    MOST_ACTIONS,
    NO_HINTS,
    HintProblem,
    Hints,
    Retention,
    parse_hints,
)


def action(kind: str, payload: dict[str, Any] | None = None, version: str = "1.0") -> dict[str, Any]:
    return {"action_id": "a", "action_type": kind, "action_version": version, "payload": payload or {}}


def hinted(*actions: Any) -> dict[str, Any]:
    return {"kv_hints": {"protocol_version": "0.1", "message_id": "m", "actions": list(actions)}}


@pytest.mark.parametrize(
    ("params", "hints"),
    [
        (None, NO_HINTS),
        ({}, NO_HINTS),
        ({"kvtier_store": False}, Hints(may_store=False)),
        ({"kvtier_load": False}, Hints(may_load=False)),
        ({"kvtier_load": True, "kvtier_store": True}, NO_HINTS),
        ({"max_load_tokens": 7, "max_offload_tokens": 0, "kvtier_tenant": "a", "tp_size": 2}, NO_HINTS),
        ({"do_remote_prefill": True, "remote_host": "h", "transfer_id": "t"}, NO_HINTS),
        (hinted(action("kv.retain")), Hints(retained=Retention(LONGEST_RETENTION_SECONDS, None))),
        (
            hinted(action("kv.retain", {"scope": "s", "directives": [{"end": 64, "priority": 80, "duration": 60}]})),
            Hints(retained=Retention(60.0, 64)),
        ),
        (
            hinted(action("kv.retain", {"directives": [{"end": 64, "duration": 5}, {"start": 64, "priority": 0}]})),
            Hints(retained=Retention(5.0, 64)),
        ),
        (
            hinted(
                action("kv.retain", {"directives": [{"end": 32, "duration": 9}]}, "1.7"),
                action("kv.retain", {"directives": [{"start": 32, "end": 48, "duration": 2}]}),
            ),
            Hints(retained=Retention(9.0, 48)),
        ),
        (
            {"kv_hints": {"actions": [{"action_type": "kv.retain"}]}},
            Hints(retained=Retention(LONGEST_RETENTION_SECONDS, None)),
        ),
        (
            hinted(action("kv.retain", {"directives": [{"duration": 10**400}]})),
            Hints(retained=Retention(LONGEST_RETENTION_SECONDS, None)),
        ),
    ],
)
def test_what_is_asked_for_is_understood(params: Any, hints: Hints) -> None:
    assert parse_hints(params, None)[0] == hints


def test_vllms_own_envelope_says_the_same_as_an_object() -> None:
    envelope = KvHintsEnvelope("0.1", "m", [KvHintAction("a", "kv.retain", "1.0", {"directives": [{"duration": 3}]})])
    assert parse_hints(None, envelope)[0] == Hints(retained=Retention(3.0, None))
    assert parse_hints({"kvtier_store": False}, envelope)[0] == Hints(may_store=False, retained=Retention(3.0, None))


@pytest.mark.parametrize(
    ("params", "cause", "name"),
    [
        ("text", "value", "kv_transfer_params"),
        ([1], "value", "kv_transfer_params"),
        ({"kvtier_sotre": False}, "key", "kvtier_sotre"),
        ({"max_offload_token": 3}, "key", "max_offload_token"),
        ({"a secret, maybe": 1}, "key", "(not shown)"),
        ({5: 1}, "key", "(not shown)"),
        ({"sk-live-0123456789abcdef": 1}, "key", "(not shown)"),
        ({"kvtier_" + 40 * "s": 1}, "key", "(not shown)"),
        (hinted(action("sk-live-0123456789abcdef")), "action", "(not shown)"),
        (hinted(action("kv." + 40 * "s")), "action", "(not shown)"),
        ({"kv_load_tiers": "sk-live"}, "value", "kv_load_tiers"),
        ({"kv_load_tiers": [{"medium": "CPU"}, {"medium": "sk-live"}]}, "value", "kv_load_tiers"),
        ({"kv_load_tiers": [{"locality": 5}]}, "value", "kv_load_tiers"),
        ({"kv_load_tiers": ["sk-live"]}, "value", "kv_load_tiers"),
        ({"max_load_tokens": -1}, "value", "max_load_tokens"),
        ({"max_offload_tokens": True}, "value", "max_offload_tokens"),
        ({"max_offload_tokens": "12"}, "value", "max_offload_tokens"),
        ({"kv_hints": "kv.retain"}, "value", "kv_hints"),
        ({"kv_hints": {"actions": {}}}, "value", "kv_hints"),
        (hinted(*[action("kv.retain")] * (MOST_ACTIONS + 1)), "value", "kv_hints"),
        ({"kv_hints": {"protocol_version": "9", "actions": []}}, "version", "kv_hints"),
        ({"kv_hints": {"protocol_version": [], "actions": []}}, "version", "kv_hints"),
        (hinted("kv.retain"), "action", "(not shown)"),
        (hinted(action("kv.fetch")), "action", "kv.fetch"),
        (hinted({"action_type": ["kv.retain"]}), "action", "(not shown)"),
        (hinted(action("kv.retain", version="2.0")), "version", "kv.retain"),
        (hinted({"action_type": "kv.retain", "action_version": 1}), "version", "kv.retain"),
        (hinted(action("kv.demote")), "action", "kv.demote"),
        (hinted({"action_type": "kv.retain", "payload": 3}), "payload", "kv.retain"),
        (hinted(action("kv.retain", {"directives": 3})), "payload", "kv.retain"),
        (hinted(action("kv.retain", {"directives": [{}] * (MOST_ACTIONS + 1)})), "payload", "kv.retain"),
        (hinted(action("kv.retain", {"seconds": 3})), "payload", "kv.retain"),
        *[
            (hinted(action("kv.retain", {"directives": [bad]})), "payload", "kv.retain")
            for bad in (
                "all",
                {"end": -1},
                {"end": 0},
                {"start": 5, "end": 5},
                {"duration": "60"},
                {"duration": float("nan")},
                {"duration": float("inf")},
                {"duration": -1},
                {"duration": True},
                {"priority": 101},
                {"priority": True},
                {"ttl": 60},
            )
        ],
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


@pytest.mark.parametrize(
    ("given_params", "left"),
    [
        ("sk-live", None),
        ({"max_load_tokens": "sk-live", "max_offload_tokens": 5}, {"max_load_tokens": None, "max_offload_tokens": 5}),
        (
            {"max_load_tokens": True, "max_offload_tokens": -1, "x": 1},
            {"max_load_tokens": None, "max_offload_tokens": None, "x": 1},
        ),
        ({"kv_load_tiers": []}, {"kv_load_tiers": []}),
        (
            {"kv_load_tiers": [{}, {"medium": "cpu", "locality": None}]},
            {"kv_load_tiers": [{}, {"medium": "cpu", "locality": None}]},
        ),
        ({"kv_load_tiers": [{"medium": "CPU"}, {"medium": "sk-live"}]}, {"kv_load_tiers": [{"medium": "CPU"}]}),
        ({"kv_load_tiers": [{"medium": "sk-live"}], "x": 1}, {"kv_load_tiers": None, "x": 1}),
        ({"kv_load_tiers": {"medium": "CPU"}}, {"kv_load_tiers": None}),
    ],
)
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
