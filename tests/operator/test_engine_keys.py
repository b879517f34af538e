# SPDX-License-Identifier: Apache-2.0
"""The key of engines is found where vLLM finds it, read only where that is allowed, and never shown."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import pytest
from asking_pods import on_loop
from chart import render
from fake_cluster import FakeCluster
from granted import Rbac
from proof_engines import StubEngine, stub_engine
from tiers import NAMESPACE, TIER, tier

from kvtier_localcluster.apiserver import ApiServerThread
from kvtier_operator.api import parse
from kvtier_operator.errors import ClusterError, ClusterUnavailable
from kvtier_operator.kube.client import connect
from kvtier_operator.observe.engine_client import EngineLocked, HttpEngine, KeySource, find_key, read_key
from kvtier_operator.observe.http_client import HttpClient

SECRET = {"name": "VLLM_API_KEY", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}
OPTIONAL = {"name": "VLLM_API_KEY", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k", "optional": True}}}
NAMED = {"name": "OURS", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}
FROM_MAP = {"name": "VLLM_API_KEY", "valueFrom": {"configMapKeyRef": {"name": "s", "key": "k"}}}
PLAIN = {"name": "VLLM_API_KEY", "value": "sesame"}
OF_SECRET = KeySource(secret="s", entry="k")


@pytest.mark.parametrize(
    ("engine", "found"),
    [
        ({}, None),
        ({"env": [PLAIN]}, KeySource(literal="sesame")),
        ({"env": [SECRET]}, OF_SECRET),
        ({"env": [OPTIONAL]}, KeySource(secret="s", entry="k", is_optional=True)),
        ({"env": [FROM_MAP]}, None),
        ({"env": [{"name": "VLLM_API_KEY", "value": ""}]}, None),
        ({"env": [{"name": "VLLM_API_KEY", "value": "$(OTHER)"}]}, None),
        ({"args": ["--api-key", "sesame"]}, KeySource(literal="sesame")),
        ({"args": ["--api-key", "sesame", "another"]}, KeySource(literal="sesame")),
        ({"args": ["--api_key=sesame"], "env": [SECRET]}, KeySource(literal="sesame")),
        ({"args": ["--api-key=first", "--api-key=last"]}, KeySource(literal="last")),
        ({"args": ["--api-key=$(OURS)"], "env": [NAMED]}, OF_SECRET),
        ({"args": ["--api-key", "$(OURS)"], "env": [NAMED]}, OF_SECRET),
        ({"args": ["--api-key=a$(OURS)"], "env": [NAMED]}, None),
        ({"args": ["--api-key=$(NOBODY)"]}, None),
        ({"args": ["--api-key="], "env": [SECRET]}, OF_SECRET),
        ({"args": ["--api-key-file=x"]}, None),
    ],
    ids=str,
)
def test_the_key_is_looked_for_where_vllm_finds_it(engine: dict[str, Any], found: KeySource | None) -> None:
    assert find_key(parse(tier(engine=engine))) == found


def secret(name: str = "s", **data: bytes) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "data": {entry: base64.b64encode(value).decode() for entry, value in data.items()},
    }


OF_OPTIONAL = KeySource(secret="s", entry="k", is_optional=True)


@pytest.mark.parametrize(
    ("source", "objects", "key"),
    [
        (OF_SECRET, [secret(k=b"sesame")], "sesame"),
        (OF_OPTIONAL, [], ""),
        (OF_OPTIONAL, [secret(other=b"x")], ""),
    ],
)
def test_a_key_is_read_from_its_secret_and_may_be_optional(source: KeySource, objects: list[Any], key: str) -> None:
    assert read_key(FakeCluster(*objects), TIER, source) == key


def test_a_key_in_the_spec_needs_no_reading() -> None:
    cluster = FakeCluster()
    assert read_key(cluster, TIER, KeySource(literal="sesame")) == "sesame"
    assert cluster.calls == []


@pytest.mark.parametrize(
    ("objects", "failure", "says"),
    [
        ([], None, "Secret s has no entry k"),
        ([secret(other=b"x")], None, "Secret s has no entry k"),
        ([secret(k=b"\xff\xfe")], None, "entry k of Secret s is no text"),
        # In the same words each time.
        ([], ClusterUnavailable("cannot read Secret/s: port 51234"), r"^Secret s could not be read$"),
    ],
)
def test_a_key_that_cannot_be_had_is_told(objects: list[Any], failure: ClusterError | None, says: str) -> None:
    cluster = FakeCluster(*objects)
    cluster.fail = None if failure is None else (1, failure)
    with pytest.raises(EngineLocked, match=says):
        read_key(cluster, TIER, OF_SECRET)


def test_no_key_is_shown_by_what_remembers_it() -> None:
    assert "sesame" not in repr(KeySource(literal="sesame"))


@pytest.mark.parametrize("key", ["sesame\n", "s\u00e9same", "a\r\nX: y"])
def test_a_key_that_no_header_can_carry_is_refused_and_not_shown(asker: HttpClient, key: str) -> None:
    with pytest.raises(EngineLocked) as refused:
        HttpEngine(asker, "127.0.0.1", owner="tier", key=key)
    assert key not in str(refused.value)


@pytest.mark.parametrize(
    "scope", [{}, {"scope": "Namespaced", "namespaces": [NAMESPACE]}], ids=["cluster", "namespaced"]
)
def test_the_chart_lets_the_operator_read_the_secrets_it_is_told_and_no_other(
    api: ApiServerThread, scope: dict[str, Any]
) -> None:
    api.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
    for name in ("ours", "theirs"):
        api.create(secret(name, k=b"sesame"))
    rbac = Rbac(render({"rbac": {"readSecrets": ["ours"]}, **scope}), lambda _request: True)
    api.server.faults.append(rbac.fault)
    cluster = connect()
    assert read_key(cluster, TIER, KeySource(secret="ours", entry="k")) == "sesame"
    with pytest.raises(EngineLocked, match="the operator may not read Secret theirs"):
        read_key(cluster, TIER, KeySource(secret="theirs", entry="k"))


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with stub_engine(monkeypatch, key="sesame") as host:
        StubEngine.answers |= {"/v1/completions": (200, b"{}"), "/metrics": (200, b"")}
        yield host


def test_an_engine_is_asked_with_its_key_and_its_metrics_are_not(asker: HttpClient, address: str) -> None:
    engine = HttpEngine(asker, address, owner="tier", key="sesame")
    assert on_loop(asker, engine.model).name == "tiny"
    on_loop(asker, lambda: engine.complete("tiny", [11]))
    on_loop(asker, engine.metrics)
    assert StubEngine.given == {"/v1/models": "Bearer sesame", "/v1/completions": "Bearer sesame", "/metrics": None}


@pytest.mark.parametrize("key", ["", "wrong"])
def test_an_engine_that_wants_another_key_says_so(asker: HttpClient, address: str, key: str) -> None:
    with pytest.raises(EngineLocked, match="answers /v1/models with 401"):
        on_loop(asker, HttpEngine(asker, address, owner="tier", key=key).model)
