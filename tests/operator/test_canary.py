# SPDX-License-Identifier: Apache-2.0
"""A canary proves that a cache is shared, and never by somebody else's requests."""

from __future__ import annotations

import asyncio
import json
import struct
import zlib
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

import pytest
from asking_pods import on_loop
from proof_engines import Clock, ScriptedEngine, SharedVolume, StubEngine, stub_engine

from kvtier_operator.observe import canary
from kvtier_operator.observe.canary import SIDE, TEXT_ALONE, Chunk, Replica, Subjects, Waiting, new_picture
from kvtier_operator.observe.engine_client import EngineError, HttpEngine
from kvtier_operator.observe.findings import CanaryOutcome, CanaryResult
from kvtier_operator.observe.http_client import HttpClient

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


@pytest.mark.parametrize(
    ("engine", "chunk", "covered", "left"),
    [
        ({}, Chunk(), (SQL, PICTURE), ()),
        ({"is_blind": True}, Chunk(), (SQL,), (PICTURE,)),
        # The model has no room for a picture.
        ({"most_tokens": 1024}, Chunk(), (SQL,), ()),
        # The prompt of a picture is as long as a chunk, and may be shorter than one.
        ({}, Chunk(tokens=1024), (SQL, PICTURE), ()),
        ({}, Chunk(tokens=1040), (SQL,), ()),
    ],
)
def test_a_tier_with_adapters_and_pictures_is_proven_with_as_many_as_can_be(
    engine: dict[str, Any], chunk: Chunk, covered: tuple[str, ...], left: tuple[str, ...]
) -> None:
    volume = SharedVolume()
    first, second = ScriptedEngine(volume, **engine), ScriptedEngine(volume, **engine)
    found = send(first, second, subjects=BOTH, chunk=chunk)
    assert (found.outcome, found.covered, found.open) == (CanaryOutcome.LOADED, covered, left)
    assert first.adapters == second.adapters == ["sql"]


@pytest.mark.parametrize(("lost", "subject"), [("tiny", ""), ("sql", SQL), ("picture", PICTURE)])
def test_what_is_not_found_is_a_disproof_that_names_the_adapter_or_the_picture(lost: str, subject: str) -> None:
    first, second = pair(loses=lost)
    found = send(first, second, subjects=BOTH)
    assert (found.outcome, found.subject) == (CanaryOutcome.MISSED, subject)
    assert bool(first.adapters) is bool(subject), "nothing else is sent where text alone is not found"


def test_every_picture_is_new_and_can_be_read() -> None:
    pictures = [new_picture() for _ in range(3)]
    assert len(set(pictures)) == 3
    for content in pictures:
        width, height, bits, colours = struct.unpack(">IIBB", content[16:26])
        assert (width, height, bits, colours) == (SIDE, SIDE, 8, 2)
        start = content.index(b"IDAT") + 4
        (size,) = struct.unpack(">I", content[start - 8 : start - 4])
        assert len(zlib.decompress(content[start : start + size])) == SIDE * (1 + 3 * SIDE)


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


def test_every_prompt_is_new_and_fits_the_model_and_the_chunks() -> None:
    first, second = pair()
    for chunk in (Chunk(), Chunk(tokens=512), Chunk(blocks=64), Chunk(tokens=65536)):
        send(first, second, chunk=chunk)
    assert [len(prompt) for prompt in first.asked] == [257, 2049, 4088, 4088]
    assert len({prompt[:16] for prompt in first.asked}) == 4


def test_a_block_that_is_stored_at_its_second_offer_is_offered_twice() -> None:
    first, second = pair()
    send(first, second, offers=2)
    assert (len(first.asked), len(second.asked)) == (2, 1)


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
def test_the_template_of_a_chat_in_the_engines_own_cache_is_no_proof(
    engine: Asked, asked: int | None, cached: int | None
) -> None:
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
