# SPDX-License-Identifier: Apache-2.0
"""Documents that pods of different releases read, and the election over a Lease: one leader, and soon another one."""

from __future__ import annotations

import copy
import json
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from waiting import Clock, until

from kvtier_connector.contract import engine, janitor
from kvtier_connector.contract.errors import ConfigInvalid, LeaseConflict, LeaseUnavailable
from kvtier_connector.contract.lease import Elector, LeaseApi, LeaseObject, LeaseSettings
from kvtier_connector.contract.usage import GenerationUsage, TenantUsage, Usage
from kvtier_connector.contract.usage import decode as decode_usage
from kvtier_connector.contract.usage import encode as encode_usage

TABLES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())

ENGINE_CONFIG = engine.ConnectorConfig(tier="ns/llama", root="/kv/0a1b", digest="0a1b", identity={})
JANITOR_CONFIG = janitor.JanitorConfig(tier="ns/llama", tier_dir="/var/lib/kvtier/ns.llama", current="0a1b")
ENGINE, JANITOR = engine.encode(ENGINE_CONFIG), janitor.encode(JANITOR_CONFIG)


def decode(document: str, change: dict[str, object]) -> object:
    """Read one of the two documents with some fields changed."""
    return (engine if document == ENGINE else janitor).decode(json.dumps({**json.loads(document), **change}))


def test_documents_read_back_as_they_were_written_also_what_a_later_field_says() -> None:
    assert engine.decode(ENGINE) == ENGINE_CONFIG
    config = replace(JANITOR_CONFIG, max_bytes=10, ttl_seconds=3600, quotas={"alice": 5})
    assert janitor.decode(janitor.encode(config)) == config
    assert janitor.encode(janitor.decode(janitor.encode(config))) == janitor.encode(config)
    said = replace(JANITOR_CONFIG, events_port=5557, layout=janitor.VLLM_FS_LAYOUT)
    written = json.loads(janitor.encode(said))
    assert written["events_port"] == 5557
    assert "block_tokens" not in written
    assert janitor.decode(json.dumps(written)) == said


@pytest.mark.parametrize("text", ["tier: x", "[]", '{"version": 1}'])
def test_a_text_that_is_no_document_is_refused(text: str) -> None:
    for kind in (engine, janitor):
        with pytest.raises(ConfigInvalid, match=r"(connector|janitor)\.json: "):
            kind.decode(text)


@pytest.mark.parametrize(
    ("document", "name"),
    [
        *((ENGINE, each.name) for each in fields(engine.ConnectorConfig)),
        *((JANITOR, each.name) for each in fields(janitor.JanitorConfig)),
    ],
)
def test_a_field_of_another_type_is_named(document: str, name: str) -> None:
    with pytest.raises(ConfigInvalid, match=rf"^(connector|janitor)\.json: {name}=\[\] must be (a|an|true) "):
        decode(document, {name: []})


@pytest.mark.parametrize(("document", "change", "complaint"), TABLES["refused"])
def test_a_wrong_setting_is_named_with_its_remedy(document: str, change: dict[str, object], complaint: str) -> None:
    with pytest.raises(ConfigInvalid, match=complaint):
        decode({"engine": ENGINE, "janitor": JANITOR}[document], change)


@pytest.mark.parametrize("change", [{"refresh_seconds": 2}, {"direct_io": None}, {"identity": {"layers": [1, 2]}}])
def test_what_json_writes_in_another_way_is_read(change: dict[str, object]) -> None:
    (name,) = change
    assert getattr(decode(ENGINE, change), name) == change[name]


@pytest.mark.parametrize(("document", "kind"), [(ENGINE, "engine"), (JANITOR, "janitor")], ids=["engine", "janitor"])
def test_a_field_that_came_later_is_written_only_where_it_says_something(document: str, kind: str) -> None:
    """A pod of an earlier release refuses what it does not know: give a new field ``metadata=documents.ADDED``."""
    assert list(json.loads(document)) == TABLES["always_written"][kind]


SIZES = st.integers(min_value=0, max_value=2**62)
TIMES = st.floats(min_value=0, max_value=2**40)
USAGES = st.builds(
    Usage,
    tier=st.text(),
    is_active=st.booleans(),
    is_counted=st.booleans(),
    **dict.fromkeys(("used_bytes", "blocks", "volume_bytes", "volume_free_bytes"), SIZES),
    oldest=TIMES,
    store_pause=st.text(),
    generations=st.builds(
        GenerationUsage, digest=st.text(), used_bytes=SIZES, blocks=SIZES, created=TIMES, last_used=TIMES
    ).map(lambda one: (one,)),
    tenants=st.builds(TenantUsage, tenant=st.text(), used_bytes=SIZES).map(lambda one: (one, one)),
    problems=st.lists(st.text(), max_size=3).map(tuple),
)


@given(USAGES)
def test_a_document_is_read_back_as_it_was_written(usage: Usage) -> None:
    assert decode_usage(encode_usage(usage)) == usage


def test_a_document_of_usage_has_defaults_and_never_holds_more_than_a_reader_takes() -> None:
    assert decode_usage('{"tier": "ns/llama", "mood": {"is": "good"}}') == Usage(tier="ns/llama")
    many = Usage(tier="t", problems=[f"problem {number}" for number in range(2000)])
    assert len(decode_usage(encode_usage(many)).problems) == 1000


@pytest.mark.parametrize(
    ("document", "says"), [*TABLES["no_usage"], ("[" * 100_000, "nested")], ids=lambda value: str(value)[:40]
)
def test_nonsense_is_refused_by_name(document: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        decode_usage(document if isinstance(document, str) else json.dumps(document))


NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)


@dataclass
class LeaseServer:
    """One Lease with optimistic locking, and calls that fail before or after they were done."""

    lease: LeaseObject | None = None
    version: int = 0
    fault: Callable[[str], str | None] = field(default=lambda _call: None)

    def api(self) -> LeaseApi:
        return LeaseApi(get=self._get, create=self._create, update=self._update)

    def _get(self) -> LeaseObject | None:
        with self._call("get"):
            return copy.deepcopy(self.lease)

    def _create(self, lease: LeaseObject) -> LeaseObject:
        with self._call("create"):
            if self.lease is not None:
                raise LeaseConflict("exists")
            return self._store(lease)

    def _update(self, lease: LeaseObject) -> LeaseObject:
        with self._call("update"):
            if self.lease is None or self.lease["metadata"]["resourceVersion"] != lease["metadata"]["resourceVersion"]:
                raise LeaseConflict("changed or gone")
            return self._store(lease)

    def _store(self, lease: LeaseObject) -> LeaseObject:
        self.version += 1
        self.lease = copy.deepcopy(lease)
        self.lease["metadata"]["resourceVersion"] = str(self.version)
        return copy.deepcopy(self.lease)

    @contextmanager
    def _call(self, name: str) -> Iterator[None]:
        fault = self.fault(name)
        if fault == "before":
            raise LeaseUnavailable("injected, and not done")
        yield
        if fault == "after":
            raise LeaseUnavailable("injected, but done")

    @property
    def spec(self) -> dict[str, Any]:
        spec: dict[str, Any] = self.lease["spec"]
        return spec


def settings(identity: str = "a", **changes: Any) -> LeaseSettings:
    return LeaseSettings(namespace="ns", name="kvtier", identity=identity, **changes)


def elector(server: LeaseServer, clock: Callable[[], float], identity: str = "a") -> Elector:
    return Elector(server.api(), settings(identity), clock=clock, wall=lambda: NOON)


def test_the_first_one_creates_the_lease_and_leads() -> None:
    server, clock = LeaseServer(), Clock(100.0)
    first = elector(server, clock)
    assert not first.is_leader()
    assert first.step() == 4.0
    assert first.is_leader()
    assert server.spec == {
        "holderIdentity": "a",
        "leaseDurationSeconds": 12,
        "acquireTime": "2026-11-21T12:00:00.000000Z",
        "renewTime": "2026-11-21T12:00:00.000000Z",
        "leaseTransitions": 0,
    }


def test_a_dead_holder_is_followed_when_its_lease_has_not_changed_for_its_duration_here() -> None:
    server, clock = LeaseServer(), Clock(100.0)
    elector(server, clock, "a").step()
    server.spec["renewTime"] = "1999-01-01T00:00:00.000000Z"  # the holder's clock does not matter
    second = elector(server, clock, "b")
    died = clock.seconds
    pause = second.step()
    while not second.is_leader():
        clock.seconds += pause
        assert clock.seconds < died + 14
        pause = second.step()
    assert clock.seconds >= died + 12
    assert (server.spec["holderIdentity"], server.spec["leaseTransitions"]) == ("b", 1)


def test_a_lease_that_vanishes_keeps_those_who_knew_it_waiting_and_one_given_back_is_taken_at_once() -> None:
    for vanishes in (True, False):
        server, clock = LeaseServer(), Clock(100.0)
        first, second = elector(server, clock, "a"), elector(server, clock, "b")
        first.step()
        second.step()
        second.release()
        assert server.spec["holderIdentity"] == "a", "only the holder gives it back"
        if vanishes:
            server.lease = None
            clock.seconds += 1
        else:
            first.release()
            assert server.spec["holderIdentity"] == ""
        second.step()
        assert (first.is_leader(), second.is_leader()) == (vanishes, not vanishes)


@pytest.mark.parametrize("spec", [None, {}, {"holderIdentity": None}, {"holderIdentity": "", "leaseTransitions": None}])
def test_a_lease_that_names_nobody_is_taken(spec: Any) -> None:
    server, clock = LeaseServer(), Clock(100.0)
    server.lease = {"metadata": {"name": "kvtier", "resourceVersion": "0"}, "spec": spec}
    first = elector(server, clock)
    first.step()
    assert first.is_leader()


@pytest.mark.parametrize("duration", [None, 0, -5, 10**9, "12"])
def test_a_nonsensical_duration_does_not_lock_everybody_out(duration: Any) -> None:
    server, clock = LeaseServer(), Clock(100.0)
    spec = {"holderIdentity": "x", "leaseDurationSeconds": duration}
    server.lease = {"metadata": {"name": "kvtier", "resourceVersion": "0"}, "spec": spec}
    first = elector(server, clock)
    first.step()
    clock.seconds += 11.9
    first.step()
    assert not first.is_leader()
    clock.seconds += 0.2
    first.step()
    assert first.is_leader()


def test_other_fields_of_the_lease_are_kept() -> None:
    server, clock = LeaseServer(), Clock(100.0)
    first = elector(server, clock)
    first.step()
    server.lease["metadata"]["annotations"] = {"theirs": "1"}
    server.lease["metadata"]["resourceVersion"] = "77"
    clock.seconds += 4
    first.step()
    first.step()
    assert server.lease["metadata"]["annotations"] == {"theirs": "1"}


@pytest.mark.parametrize("changes", [{"deadline_seconds": 12.0}, {"retry_seconds": 0}, {"renew_seconds": 9.0}])
def test_times_that_could_make_two_leaders_are_refused(changes: Any) -> None:
    with pytest.raises(ValueError, match="retry <= renew < deadline < duration"):
        settings(**changes)


@pytest.mark.parametrize("seed", range(30))
def test_whatever_fails_there_are_never_two_leaders_and_one_comes_back(seed: int) -> None:
    chance = random.Random(seed)
    server, clock = LeaseServer(), Clock(100.0)
    rate = chance.choice([0.0, 0.2, 0.6])
    server.fault = lambda _call: chance.choice(["before", "after"]) if chance.random() < rate else None
    # Each process has a clock that started at another moment; it may stop for a while, or die and come back renamed.
    due: dict[str, float] = {}
    running: dict[str, Elector] = {}

    def spawn(name: str) -> None:
        offset = chance.uniform(0, 1e6)
        running[name] = elector(server, lambda: clock.seconds + offset, name)
        due[name] = clock.seconds + chance.uniform(0, 3)

    for number in range(3):
        spawn(f"p{number}")
    led = 0
    for turn in range(600):
        name = min(due, key=lambda each: due[each])
        clock.seconds = max(clock.seconds, due[name])
        leaders = [each for each, process in running.items() if process.is_leader()]
        assert len(leaders) <= 1, f"{leaders} lead at {clock.seconds}"
        led += len(leaders)
        due[name] = clock.seconds + running[name].step()
        event = chance.random()
        if event < 0.05:
            due[name] += chance.uniform(0, 40)  # paused, with all it believes
        elif event < 0.07:
            del due[name], running[name]
            spawn(f"p{turn + 3}")
        elif event < 0.09:
            running[name].release()
    assert led > 50
    server.fault = lambda _call: None
    end = clock.seconds + 80
    while clock.seconds < end:
        name = min(due, key=lambda each: due[each])
        clock.seconds = max(clock.seconds, due[name])
        due[name] = clock.seconds + running[name].step()
    assert [each for each, process in running.items() if process.is_leader()] == [server.spec["holderIdentity"]]


def test_on_threads_it_leads_hands_over_survives_a_client_that_breaks_and_ends() -> None:
    server = LeaseServer()
    fast = settings("a", duration_seconds=2, deadline_seconds=0.6, renew_seconds=0.2, retry_seconds=0.1)
    told: tuple[list[bool], list[bool]] = [], []
    failures, hang = iter([ZeroDivisionError("a bug")]), threading.Event()

    def breaks(_call: str) -> None:
        for error in failures:
            raise error

    server.fault = breaks
    patient = settings("b", duration_seconds=120, deadline_seconds=100, renew_seconds=0.2, retry_seconds=0.1)
    first, second = (
        Elector(server.api(), each, on_change=heard.append) for each, heard in zip((fast, patient), told, strict=True)
    )
    first.start()
    until(lambda: first.is_leader() and told[0])
    # The loss is told even while a request hangs.
    server.fault = lambda call: hang.wait(60) and None if call == "update" else None
    until(lambda: not first.is_leader() and not told[0][-1])
    server.fault = lambda _call: None
    hang.set()
    until(lambda: first.is_leader() and told[0][-1])
    second.start()
    first.close()
    # On a busy machine it is late with a renewal now and then, and loses more than once.
    assert len(told[0]) >= 4
    assert told[0] == [True, False] * (len(told[0]) // 2)
    until(lambda: told[1] == [True])
    assert second.is_leader()
    second.close()
    assert server.spec["holderIdentity"] == ""
    assert told[1] == [True, False]
