# SPDX-License-Identifier: Apache-2.0
"""The key of engines is found where vLLM finds it, read only where that is allowed, and never shown."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
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
from kvtier_operator.errors import ClusterUnavailable
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


def test_a_key_in_the_spec_needs_no_reading() -> None:
    cluster = FakeCluster()
    assert read_key(cluster, TIER, KeySource(literal="sesame")) == "sesame"
    assert cluster.calls == []


def test_a_key_is_read_from_its_secret() -> None:
    assert read_key(FakeCluster(secret(k=b"sesame")), TIER, OF_SECRET) == "sesame"


def test_engines_without_their_optional_key_are_asked_without() -> None:
    source = KeySource(secret="s", entry="k", is_optional=True)
    assert read_key(FakeCluster(), TIER, source) == ""
    assert read_key(FakeCluster(secret(other=b"x")), TIER, source) == ""


@pytest.mark.parametrize(
    ("objects", "says"),
    [
        ((), "Secret s has no entry k"),
        ((secret(other=b"x"),), "Secret s has no entry k"),
        ((secret(k=b"\xff\xfe"),), "entry k of Secret s is no text"),
    ],
)
def test_a_key_that_is_not_there_is_told(objects: tuple[dict[str, Any], ...], says: str) -> None:
    with pytest.raises(EngineLocked, match=says):
        read_key(FakeCluster(*objects), TIER, OF_SECRET)


def test_a_secret_that_cannot_be_read_now_is_told_in_the_same_words_each_time() -> None:
    cluster = FakeCluster()
    cluster.fail = (1, ClusterUnavailable("cannot read Secret/s: port 51234"))
    with pytest.raises(EngineLocked, match=r"^Secret s could not be read$"):
        read_key(cluster, TIER, OF_SECRET)


def test_no_key_is_shown_by_what_remembers_it() -> None:
    assert "sesame" not in repr(KeySource(literal="sesame"))


@pytest.mark.parametrize("key", ["sesame\n", "s\u00e9same", "a\r\nX: y"])
def test_a_key_that_no_header_can_carry_is_refused_and_not_shown(asker: HttpClient, key: str) -> None:
    with pytest.raises(EngineLocked) as refused:
        HttpEngine(asker, "127.0.0.1", owner="tier", key=key)
    assert key not in str(refused.value)


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServerThread]:
    with ApiServerThread() as server:
        monkeypatch.setenv("KUBECONFIG", str(server.write_kubeconfig(tmp_path / "kubeconfig")))
        server.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
        yield server


@pytest.mark.parametrize(
    "scope", [{}, {"scope": "Namespaced", "namespaces": [NAMESPACE]}], ids=["cluster", "namespaced"]
)
def test_the_chart_lets_the_operator_read_the_secrets_it_is_told_and_no_other(
    api: ApiServerThread, scope: dict[str, Any]
) -> None:
    for name in ("ours", "theirs"):
        api.create(secret(name, k=b"sesame"))
    rbac = Rbac(render({"rbac": {"readSecrets": ["ours"]}, **scope}), lambda _request: True)
    api.server.faults.append(rbac.fault)
    cluster = connect()
    assert read_key(cluster, TIER, KeySource(secret="ours", entry="k")) == "sesame"
    with pytest.raises(EngineLocked, match="the operator may not read Secret theirs"):
        read_key(cluster, TIER, KeySource(secret="theirs", entry="k"))


def test_the_chart_lets_it_read_no_secret_unless_told() -> None:
    rules = [rule for found in render({}) for rule in found.get("rules") or ()]
    assert "secrets" not in {resource for rule in rules for resource in rule["resources"]}


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
