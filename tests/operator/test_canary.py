# SPDX-License-Identifier: Apache-2.0
"""A canary proves that a cache is shared, by no request of others, with a key that is never shown."""

from __future__ import annotations

import asyncio
import base64
import json
import struct
import zlib
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import yaml
from asking_pods import Clock, ScriptedEngine, SharedVolume, StubEngine, on_loop, stub_engine
from chart import render
from fake_cluster import FakeCluster
from granted import Rbac
from tiers import NAMESPACE, TIER, tier

from kvtier_localcluster.apiserver import ApiServerThread
from kvtier_operator.api import parse
from kvtier_operator.errors import ClusterError, ClusterUnavailable
from kvtier_operator.kube.client import connect
from kvtier_operator.observe import canary
from kvtier_operator.observe.canary import SIDE, TEXT_ALONE, Chunk, Replica, Subjects, Waiting, new_picture
from kvtier_operator.observe.engine_client import EngineError, EngineLocked, HttpEngine, KeySource, find_key, read_key
from kvtier_operator.observe.findings import CanaryOutcome, CanaryResult
from kvtier_operator.observe.http_client import HttpClient

TABLES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())

Found = TypeVar("Found")


def send(
    first: ScriptedEngine,
    second: ScriptedEngine,
    *,
    offers: int = 1,
    chunk: Chunk | None = None,
    subjects: Subjects = TEXT_ALONE,
) -> CanaryResult:
    clock = Clock()
    waiting = Waiting(now=clock.now, pause=clock.pause)
    replicas = (Replica(name="a", engine=first), Replica(name="b", engine=second))
    sent = canary.run(*replicas, chunk=chunk or Chunk(), min_reuse=offers, waiting=waiting, subjects=subjects)
    return asyncio.run(sent)


def pair(**second: Any) -> tuple[ScriptedEngine, ScriptedEngine]:
    volume = SharedVolume()
    return ScriptedEngine(volume), ScriptedEngine(volume, **second)


STORES_NOTHING = (ScriptedEngine(SharedVolume(), stores=False), ScriptedEngine(SharedVolume()))
APART = (ScriptedEngine(SharedVolume()), ScriptedEngine(SharedVolume()))


@pytest.mark.parametrize(
    ("engines", "outcome", "cached"),
    [
        (pair(), CanaryOutcome.LOADED, 256),
        (pair(other_requests=3), CanaryOutcome.LOADED, 256),
        # Counters prove it where the answer does not tell, and nothing while others are served.
        (pair(tells_cached=False), CanaryOutcome.LOADED, 256),
        (pair(tells_cached=False, other_requests=3), CanaryOutcome.BUSY, None),
        # A hit that was computed because that is quicker is a hit.
        (pair(computes_hits=True), CanaryOutcome.FOUND, None),
        (pair(computes_hits=True, other_requests=3), CanaryOutcome.BUSY, None),
        (APART, CanaryOutcome.MISSED, None),
        (STORES_NOTHING, CanaryOutcome.NOT_STORED, None),
    ],
)
def test_what_the_first_replica_stored_and_the_second_one_loads_is_proof(
    engines: tuple[ScriptedEngine, ScriptedEngine], outcome: CanaryOutcome, cached: int | None
) -> None:
    found = send(*engines)
    assert (found.outcome, found.first, found.second) == (outcome, "a", "b")
    assert cached in {found.cached_tokens, None}


BOTH = Subjects(adapters=("sql",), has_pictures=True)


SQL, PICTURE = "the adapter sql", "a picture"


@pytest.mark.parametrize(("engine", "chunk", "covered", "left"), TABLES["covered"])
def test_a_tier_with_adapters_and_pictures_is_proven_with_as_many_as_can_be(
    engine: dict[str, Any], chunk: dict[str, int], covered: list[str], left: list[str]
) -> None:
    volume = SharedVolume()
    first, second = ScriptedEngine(volume, **engine), ScriptedEngine(volume, **engine)
    found = send(first, second, subjects=BOTH, chunk=Chunk(**chunk))
    assert (found.outcome, [*found.covered], [*found.open]) == (CanaryOutcome.LOADED, covered, left)
    assert first.adapters == second.adapters == ["sql"]


@pytest.mark.parametrize(("lost", "subject"), [("tiny", ""), ("sql", SQL), ("picture", PICTURE)])
def test_what_is_not_found_is_a_disproof_that_names_the_adapter_or_the_picture(lost: str, subject: str) -> None:
    first, second = pair(loses=lost)
    found = send(first, second, subjects=BOTH)
    assert (found.outcome, found.subject) == (CanaryOutcome.MISSED, subject)
    assert bool(first.adapters) is bool(subject), "nothing else is sent where text alone is not found"


def test_every_picture_and_every_prompt_is_new_and_fits_the_model_and_the_chunks() -> None:
    pictures = [new_picture() for _ in range(3)]
    assert len(set(pictures)) == 3
    for content in pictures:
        width, height, bits, colours = struct.unpack(">IIBB", content[16:26])
        assert (width, height, bits, colours) == (SIDE, SIDE, 8, 2)
        start = content.index(b"IDAT") + 4
        (size,) = struct.unpack(">I", content[start - 8 : start - 4])
        assert len(zlib.decompress(content[start : start + size])) == SIDE * (1 + 3 * SIDE)
    first, second = pair()
    for chunk in (Chunk(), Chunk(tokens=512), Chunk(blocks=64), Chunk(tokens=65536)):
        send(first, second, chunk=chunk)
    assert [len(prompt) for prompt in first.asked] == [257, 2049, 4088, 4088]
    assert len({prompt[:16] for prompt in first.asked}) == 4
    asked = len(first.asked), len(second.asked)
    send(first, second, offers=2)
    assert (len(first.asked) - asked[0], len(second.asked) - asked[1]) == (2, 1)


@pytest.mark.parametrize("failing", ["a", "b"])
@pytest.mark.parametrize(
    ("trouble", "outcome"),
    [
        ({"failure": "answers /v1/models with 401"}, CanaryOutcome.UNANSWERED),
        ({"wants_another_key": True}, CanaryOutcome.LOCKED),
    ],
)
def test_an_engine_that_does_not_answer_proves_nothing_and_is_named(
    failing: str, trouble: dict[str, Any], outcome: CanaryOutcome
) -> None:
    first, second = pair()
    vars(first if failing == "a" else second).update(trouble)
    found = send(first, second)
    assert (found.outcome, found.problem) == (outcome, f"pod {failing} answers /v1/models with 401")


class Asked:
    """An engine on this machine, asked on the asker's loop."""

    def __init__(self, asker: HttpClient) -> None:
        self._asker = asker
        self._engine = HttpEngine(asker, "127.0.0.1", owner="tier")

    def get(self, question: Callable[[HttpEngine], Coroutine[Any, Any, Found]]) -> Found:
        return on_loop(self._asker, lambda: question(self._engine))


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, asker: HttpClient) -> Iterator[Asked]:
    with stub_engine(monkeypatch):
        yield Asked(asker)


def test_an_engine_is_asked_as_its_api_wants_it(engine: Asked) -> None:
    usage = {"usage": {"prompt_tokens": 64, "prompt_tokens_details": {"cached_tokens": 48}}}
    StubEngine.answers.update(
        {
            "/v1/completions": (200, json.dumps(usage).encode()),
            "/v1/chat/completions": (200, json.dumps(usage).encode()),
            "/metrics": (200, b'vllm:request_success_total{finished_reason="stop"} 3.0\n'),
        }
    )
    served = engine.get(HttpEngine.model)
    assert (served.name, served.most_tokens) == ("tiny", 4096)
    assert engine.get(lambda http: http.complete("tiny", [11, 12])) == 48
    assert engine.get(HttpEngine.metrics).finished_requests == 3
    assert StubEngine.bodies == [{"model": "tiny", "prompt": [11, 12], "max_tokens": 1, "temperature": 0}]
    assert engine.get(lambda http: http.see("tiny", "12 34", b"png")) == 48
    picture, words = StubEngine.bodies[-1]["messages"][0]["content"]
    assert picture == {"type": "image_url", "image_url": {"url": "data:image/png;base64,cG5n"}}
    assert words == {"type": "text", "text": "12 34"}


@pytest.mark.parametrize(("asked", "cached"), [(64, 48), (96, 0), (400, 0), (None, None)])
def test_a_chat_template_in_the_engines_cache_is_no_proof(engine: Asked, asked: int | None, cached: int | None) -> None:
    usage = {"prompt_tokens": asked, "prompt_tokens_details": {"cached_tokens": 48}}
    StubEngine.answers["/v1/chat/completions"] = (200, json.dumps({"usage": usage}).encode())
    assert engine.get(lambda http: http.see("tiny", "12 34", b"png")) == cached


@pytest.mark.parametrize(
    ("answer", "words"),
    [((401, b"{}"), "with 401"), ((200, b"nonsense"), "something else than JSON"), ((200, b"[]"), "lists no model")],
)
def test_an_answer_that_makes_no_sense_is_an_error_in_words(engine: Asked, answer: Any, words: str) -> None:
    StubEngine.answers["/v1/models"] = answer
    with pytest.raises(EngineError, match=words):
        engine.get(HttpEngine.model)


def test_an_engine_that_is_not_there_is_an_error_without_its_address(asker: HttpClient) -> None:
    with pytest.raises(EngineError) as caught:
        Asked(asker).get(HttpEngine.metrics)
    assert str(caught.value) == "does not answer /metrics (ConnectionRefusedError)"


OF_SECRET = KeySource(secret="s", entry="k")


@pytest.mark.parametrize(("engine", "found"), TABLES["keys"], ids=str)
def test_the_key_is_looked_for_where_vllm_finds_it(engine: dict[str, Any], found: dict[str, Any] | None) -> None:
    assert find_key(parse(tier(engine=engine))) == (None if found is None else KeySource(**found))


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
        (KeySource(literal="sesame"), [], "sesame"),
    ],
)
def test_a_key_is_read_from_its_secret_if_it_is_no_literal(source: KeySource, objects: list[Any], key: str) -> None:
    cluster = FakeCluster(*objects)
    assert read_key(cluster, TIER, source) == key
    assert bool(cluster.calls) is (source.literal == "")


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


@pytest.mark.parametrize("key", ["sesame\n", "s\u00e9same", "a\r\nX: y"])
def test_a_key_that_no_header_can_carry_is_refused_and_none_is_shown(asker: HttpClient, key: str) -> None:
    with pytest.raises(EngineLocked) as refused:
        HttpEngine(asker, "127.0.0.1", owner="tier", key=key)
    assert key not in str(refused.value)
    assert "sesame" not in repr(KeySource(literal="sesame"))


@pytest.mark.parametrize(
    "scope", [{}, {"scope": "Namespaced", "namespaces": [NAMESPACE]}], ids=["cluster", "namespaced"]
)
def test_the_chart_lets_the_operator_read_the_given_secrets_only(api: ApiServerThread, scope: dict[str, Any]) -> None:
    api.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
    for name in ("ours", "theirs"):
        api.create(secret(name, k=b"sesame"))
    api.server.faults.append(Rbac(render({"rbac": {"readSecrets": ["ours"]}, **scope}), lambda _request: True).fault)
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
