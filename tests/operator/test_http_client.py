# SPDX-License-Identifier: Apache-2.0
"""Pods are asked over HTTP within bounds, with no wait for those that hang; the operator serves probes and metrics."""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import socket
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from asking_pods import Pods, on_loop, running, unreachable
from plain_http import PlainHttp, has_ipv6, is_answered
from waiting import until

from kvtier_localcluster.ports import free_port
from kvtier_operator.kube.http_server import Health
from kvtier_operator.metrics import OperatorMetrics
from kvtier_operator.observe import http_client, poller
from kvtier_operator.observe.http_client import Address, HttpClient, HttpReply, HttpRequest, OnReply
from kvtier_operator.observe.poller import PollAnswer, Poller, PollTarget


@pytest.fixture
def pods() -> Iterator[Pods]:
    with Pods().serving() as made:
        yield made


def at(port: int, path: str = "/", host: str = "127.0.0.1") -> Address:
    return Address(host=host, port=port, path=path)


def fetch(asker: HttpClient, address: Address, *, seconds: float = 50.0, most_bytes: int = 4 << 20) -> HttpReply:
    question = HttpRequest(address=address, seconds=seconds, most_bytes=most_bytes)
    return on_loop(asker, lambda: asker.send(question, owner="tier"))


@pytest.mark.parametrize(
    ("host", "url"),
    [("10.0.0.1", "http://10.0.0.1:1/x"), ("fd00::1", "http://[fd00::1]:1/x"), ("a.b", "http://a.b:1/x")],
)
def test_an_address_reads_as_a_url(host: str, url: str) -> None:
    assert str(at(1, "/x", host)) == url


def test_an_answer_is_read_whole_whatever_its_status_unless_it_is_too_long(
    asker: HttpClient, pods: Pods, monkeypatch: pytest.MonkeyPatch
) -> None:
    pods.says |= {"/": b"fine" * 10_000, "/long": bytes(200_000)}
    assert fetch(asker, at(pods.port)) == HttpReply(status=200, reason="OK", body=b"fine" * 10_000)
    assert fetch(asker, at(pods.port, "/missing")).status == 404
    with pytest.raises(OSError, match="more than 1000 bytes"):
        fetch(asker, at(pods.port), most_bytes=1000)
    monkeypatch.setattr(http_client, "MOST_HELD_BYTES", 100_000)
    with pytest.raises(OSError, match="more than there is room for"):
        fetch(asker, at(pods.port, "/long"))
    assert len(fetch(asker, at(pods.port)).body) == 40_000


@contextlib.contextmanager
def saying(said: bytes, *, drips: bool) -> Iterator[int]:
    """Run a server that answers with this and then ends, or says a byte now and then."""
    is_over = threading.Event()

    def say(listener: socket.socket) -> None:
        with contextlib.suppress(OSError), listener.accept()[0] as client:
            client.recv(1000)
            client.sendall(said)
            while drips and not is_over.wait(0.05):
                client.sendall(b"a")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=say, args=(listener,))
        thread.start()
        yield listener.getsockname()[1]
        is_over.set()
        listener.shutdown(socket.SHUT_RDWR)  # Ends the wait for a client that gave up before it connected.
        thread.join()


@pytest.mark.parametrize("said", [b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\n\r\n"], ids=["headers", "body"])
def test_who_says_a_byte_now_and_then_is_not_listened_to_for_ever(asker: HttpClient, said: bytes) -> None:
    with saying(said, drips=True) as port, pytest.raises(TimeoutError, match="too slowly"):
        fetch(asker, at(port), seconds=0.5)


def test_who_gives_no_answer_of_http_is_an_error_in_words(asker: HttpClient) -> None:
    with pytest.raises(ConnectionRefusedError, match="refused"):
        fetch(asker, at(1))
    with unreachable() as port, pytest.raises(TimeoutError, match="takes no connection"):
        fetch(asker, at(port))
    with saying(b"SSH-2.0-OpenSSH\r\n", drips=False) as port, pytest.raises(OSError, match="does not speak HTTP"):
        fetch(asker, at(port))


def test_pods_that_nobody_reaches_keep_no_other_tier_waiting(pods: Pods, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answer is waited for for half as long as the deadline of the others is."""
    monkeypatch.setattr(http_client, "CONNECT_SECONDS", 60.0)
    silent: list[object] = []
    with unreachable() as port, running() as client:

        def ask_all() -> None:
            for number in range(600):
                request = HttpRequest(address=at(port, host=f"127.1.{number // 250}.{number % 250 + 1}"), seconds=60.0)
                client.submit(request, owner=f"silent-{number % 60}", on_reply=silent.append)

        client.call(ask_all)
        assert fetch(client, at(pods.port)).is_ok
    assert not [each for each in silent if isinstance(each, HttpReply)]


def test_an_owner_has_a_few_requests_open_at_a_time(pods: Pods) -> None:
    pods.may_answer.clear()
    replies: list[HttpReply | OSError] = []
    with running() as client:

        def ask_all() -> None:
            for number in range(3 * http_client.REQUESTS_EACH):
                request = HttpRequest(address=at(pods.port, host=f"127.0.1.{number + 1}"), seconds=30.0)
                client.submit(request, owner="tier", on_reply=replies.append)

        client.call(ask_all)
        until(lambda: len(pods.asked) == http_client.REQUESTS_EACH)
        pods.may_answer.set()
        until(lambda: len(replies) == 3 * http_client.REQUESTS_EACH)
    assert all(isinstance(each, HttpReply) for each in replies)


def test_an_asker_that_ends_leaves_nobody_behind(pods: Pods) -> None:
    pods.may_answer.clear()
    told: list[object] = []
    with running() as asker:
        asker.call(lambda: asker.submit(HttpRequest(address=at(pods.port), seconds=50), owner="", on_reply=told.append))
        until(lambda: pods.asked)
    asker.call(told.append, "too late")
    assert told == []


HOST = "127.0.0.1"


class InStep(HttpClient):
    """Asks pods in the thread and the time of a test. Those that hang answer when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds, self.says, self.hangs = 0.0, b"1", False
        self.asked = 0
        self._open: list[OnReply] = []
        self._timers: dict[int, tuple[float, Callable[[], object]]] = {}
        self._numbers = itertools.count()

    def call(self, function: Callable[..., object], *arguments: object) -> None:
        function(*arguments)

    def call_later(self, seconds: float, function: Callable[[], object]) -> Any:
        number = next(self._numbers)
        self._timers[number] = (self.seconds + seconds, function)
        return SimpleNamespace(cancel=lambda: self._timers.pop(number, None))

    def submit(self, request: HttpRequest, *, owner: Hashable, on_reply: OnReply) -> None:
        self.asked += 1
        self._open.append(on_reply)
        if not self.hangs:
            self.reply()

    def reply(self) -> None:
        self.hangs = False
        status, reason = (200, "OK") if self.says else (404, "Not Found")
        while self._open:
            self._open.pop()(HttpReply(status=status, reason=reason, body=self.says))

    def pass_time(self, seconds: float) -> None:
        self.seconds += seconds
        while due := [number for number, (at, _) in self._timers.items() if at <= self.seconds]:
            self._timers.pop(due[0])[1]()


class Rig:
    def __init__(self) -> None:
        self.pods, self.woken = InStep(), list[str]()
        self.probes = Poller(self.pods, self.woken.append, now=lambda: self.pods.seconds, interval_seconds=10)

    def look(
        self,
        meaning: Callable[[bytes], object] = int,
        *,
        uid: str = "",
        since: str = "",
        host: str = HOST,
        is_passing: Callable[[object], bool] = lambda _value: False,
    ) -> PollAnswer | None:
        subject = PollTarget(address=at(1, host=host), uid=uid)
        return self.probes.answer(subject, owner="llama", parse=meaning, since=since, is_passing=is_passing)

    def is_asked(self, *steps: tuple[float, int]) -> bool:
        """Let time pass, and tell whether the pod was asked so many times by then."""
        found = []
        for seconds, _ in steps:
            self.pods.pass_time(seconds)
            found.append((seconds, self.pods.asked))
        return found == list(steps)


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_the_first_look_finds_nothing_and_the_answer_wakes_the_tier(rig: Rig) -> None:
    assert rig.look() is None
    assert rig.woken == ["llama"]
    for _ in range(50):
        assert rig.look() == PollAnswer(value=1)
    assert rig.pods.asked == 1


def test_nobody_waits_for_a_pod_that_hangs_and_it_is_asked_once(rig: Rig) -> None:
    rig.pods.hangs = True
    assert rig.look() is None
    rig.pods.seconds = 100
    assert rig.look() is None
    rig.pods.reply()
    assert (rig.woken, rig.pods.asked) == (["llama"], 1)


def test_a_pod_is_asked_once_per_interval_though_nobody_looks_again(rig: Rig) -> None:
    rig.look()
    assert rig.is_asked((8.9, 1), (1.2, 2), (8.9, 2), (1.2, 3), (8.9, 3), (1.2, 4))


def test_who_is_one_of_very_many_is_asked_more_seldom(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(poller, "MOST_A_SECOND", 0.05)
    rig.look()
    assert rig.is_asked((17.0, 1), (4.0, 2))


LATER_EACH_TIME = ((0.8, 1), (0.3, 2), (1.7, 2), (0.4, 3), (3.5, 3), (0.6, 4))


def test_an_answer_that_is_about_to_change_is_asked_for_again_within_seconds(rig: Rig) -> None:
    rig.look(is_passing=lambda value: value == 1)
    assert rig.is_asked(*LATER_EACH_TIME)
    rig.pods.says = b"2"
    assert rig.is_asked((8.0, 5))
    assert (rig.look(), len(rig.woken)) == (PollAnswer(value=2), 2)
    assert rig.is_asked((8.5, 5))


@pytest.mark.parametrize("hangs", [False, True])
def test_a_pod_that_becomes_ready_is_asked_at_once_or_again_if_it_is_being_asked(rig: Rig, *, hangs: bool) -> None:
    rig.pods.hangs = hangs
    rig.look(since="noon")
    rig.look(since="one")
    rig.pods.reply()
    assert rig.pods.asked == 2


def test_another_pod_at_the_same_address_does_not_inherit_an_answer(rig: Rig) -> None:
    rig.look(uid="old")
    assert rig.look(uid="new") is None
    assert rig.pods.asked == 2


def test_an_answer_that_means_the_same_wakes_nobody(rig: Rig) -> None:
    for seconds, says, wakings in ((0, b"1", 1), (10, b"99", 1), (20, b"101", 2)):
        rig.pods.seconds, rig.pods.says = seconds, says
        rig.look(lambda body: int(body) // 100)
        assert len(rig.woken) == wakings
    assert rig.pods.asked == 3
    assert rig.look(lambda body: int(body) // 100) == PollAnswer(value=1)


def test_a_failure_is_an_answer_and_new_words_for_it_wake_nobody(rig: Rig) -> None:
    rig.pods.says = b""
    rig.look()
    assert rig.look() == PollAnswer(problem=f"http://{HOST}:1/: answers 404 Not Found")
    rig.pods.seconds, rig.pods.says = 20, b"x"
    rig.look()
    assert "invalid literal" in (rig.look() or PollAnswer()).problem
    assert rig.woken == ["llama"]


def test_who_does_not_answer_is_asked_again_by_itself_and_later_each_time(rig: Rig) -> None:
    rig.pods.says = b""
    rig.look()
    assert rig.is_asked(*LATER_EACH_TIME)
    rig.pods.says = b"1"
    rig.look(since="ready")
    assert rig.look(since="ready") == PollAnswer(value=1)


def test_an_answer_that_breaks_its_reader_is_a_failure_like_any_other(rig: Rig) -> None:
    rig.look(lambda body: {}[body])
    assert "not understood" in (rig.look() or PollAnswer()).problem


def test_pods_that_are_gone_are_forgotten(rig: Rig) -> None:
    rig.look()
    rig.pods.seconds = poller.FORGET_SECONDS + 1
    rig.look(host="127.0.0.2")
    assert rig.look() is None


def ask(port: int, path: str) -> tuple[int, Any]:
    return PlainHttp(f"http://127.0.0.1:{port}", seconds=60).send("GET", path)


@pytest.fixture
def port() -> int:
    return free_port()


def test_probes_are_answered_with_the_reasons(port: int) -> None:
    health = Health()
    wrong: dict[str, str | None] = {"queue": None, "lease": "not yet"}
    health.alive_if("queue", lambda: wrong["queue"])
    health.ready_if("lease", lambda: wrong["lease"])
    stop = health.serve(port, host="127.0.0.1")
    try:
        assert ask(port, "/healthz") == (200, {"ok": True, "problems": {}})
        assert ask(port, "/readyz") == (503, {"ok": False, "problems": {"lease": "not yet"}})
        wrong.update(queue="stuck", lease=None)
        assert ask(port, "/healthz?verbose") == (503, {"ok": False, "problems": {"queue": "stuck"}})
        assert ask(port, "/readyz")[0] == 503
        assert ask(port, "/")[0] == 404
    finally:
        stop()


def test_a_check_that_breaks_is_a_problem_and_a_port_that_is_taken_an_error() -> None:
    health = Health()
    health.alive_if("broken", lambda: str(1 // 0))
    assert "ZeroDivisionError" in health.problems("/healthz")["broken"]
    with serving(Health().serve) as port, pytest.raises(OSError, match="in use"):
        Health().serve(port)


Serve = Callable[[int], Callable[[], None]]


@contextmanager
def serving(serve: Serve) -> Iterator[int]:
    port = free_port()
    stop = serve(port)
    try:
        yield port
    finally:
        stop()


with_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")


@with_ipv6
@pytest.mark.parametrize(("host", "other"), [("127.0.0.1", "::1"), ("::1", "127.0.0.1")])
def test_one_address_is_served_alone(host: str, other: str) -> None:
    with serving(functools.partial(Health().serve, host=host)) as port:
        assert is_answered(str(at(port, "/healthz", host)))
        assert not is_answered(str(at(port, "/healthz", other)))


@with_ipv6
@pytest.mark.parametrize(("serve", "path"), [(Health().serve, "/healthz"), (OperatorMetrics().serve, "/metrics")])
def test_probes_and_metrics_are_answered_over_both(serve: Serve, path: str) -> None:
    with serving(serve) as port:
        assert is_answered(f"http://127.0.0.1:{port}{path}")
        assert is_answered(f"http://[::1]:{port}{path}")
    assert not is_answered(f"http://127.0.0.1:{port}{path}")


class WithoutIpv6(socket.socket):
    """A socket of a kernel that was started with ipv6.disable=1."""

    def __init__(self, family: int = -1, kind: int = -1, proto: int = -1, fileno: int | None = None) -> None:
        if family == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
        super().__init__(family, kind, proto, fileno)


def test_a_machine_without_ipv6_serves_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "socket", WithoutIpv6)
    with serving(Health().serve) as port:
        assert is_answered(f"http://127.0.0.1:{port}/healthz")


def tier(name: str, ready: str, reason: str, *, engines: int) -> dict[str, object]:
    return {
        "metadata": {"namespace": "team-a", "name": name},
        "spec": {"replicas": 2},
        "status": {"conditions": [{"type": "Ready", "status": ready, "reason": reason}], "readyReplicas": engines},
    }


def test_each_tier_shows_its_conditions_and_engines_by_namespace_and_name_for_as_long_as_it_is_there() -> None:
    metrics = OperatorMetrics()

    def value(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(name, labels)

    llama = {"namespace": "team-a", "tier": "llama"}
    starting = {"condition": "Ready", "status": "False", "reason": "EnginesStarting"}
    metrics.count_tiers(
        [tier("llama", "False", "EnginesStarting", engines=1), tier("qwen", "True", "Ready", engines=2)]
    )
    assert value("kvtier_tier_condition", **llama, **starting) == 1
    assert value("kvtier_tier_engines", **llama, state="ready") == 1
    assert value("kvtier_tier_engines", **llama, state="wanted") == 2
    assert value("kvtier_operator_tiers", **starting) == 1
    metrics.count_tiers([{"metadata": llama | {"name": "llama"}}])
    assert value("kvtier_tier_condition", **llama, **starting) is None
    assert value("kvtier_operator_tiers", **starting) is None
    assert value("kvtier_tier_engines", **llama, state="ready") == 0
    assert value("kvtier_tier_engines", namespace="team-a", tier="qwen", state="ready") is None


def test_passes_and_writes_are_counted() -> None:
    metrics = OperatorMetrics()
    metrics.count_reconcile(outcome="ok", seconds=0.2, written_kinds=("Service", "Service"))
    found = {
        (sample.name, *sample.labels.values()): sample.value
        for family in metrics.registry.collect()
        for sample in family.samples
    }
    assert found["kvtier_operator_reconcile_total", "ok"] == 1
    assert found["kvtier_operator_reconcile_total", "failed"] == 0
    assert found["kvtier_operator_writes_total", "Service"] == 2
