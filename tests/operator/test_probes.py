# SPDX-License-Identifier: Apache-2.0
"""Pods are asked in the background, seldom, and nobody waits for one that hangs."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler

import pytest
from clocks import Clock
from waiting import until

from kvtier_operator import probes
from kvtier_operator.listening import HttpServer
from kvtier_operator.probes import Address, Answer, Probes, fetch

JANITOR = Address(host="10.0.0.1", port=9400, path="/usage")


class Pod:
    """Answers what it is told to, when it is told to."""

    def __init__(self) -> None:
        self.asked = threading.Semaphore(0)
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.says: bytes | Exception = b"1"
        self.calls = 0

    def __call__(self, address: Address) -> bytes:
        self.calls += 1
        self.asked.release()
        assert self.may_answer.wait(20)
        if isinstance(self.says, Exception):
            raise self.says
        return self.says


class Rig:
    def __init__(self) -> None:
        self.pod, self.clock = Pod(), Clock()
        self.woken: list[str] = []
        self.probes: Probes[str] = Probes(self.woken.append, ask=self.pod, now=self.clock, interval_seconds=10)

    def look(self, meaning: Callable[[bytes], object] = int, address: Address = JANITOR) -> Answer | None:
        return self.probes.look(address, owner="llama", meaning=meaning)

    def settle(self, wakings: int) -> None:
        until(lambda: len(self.woken) == wakings)


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.pod.may_answer.set()
    made.probes.close()


def test_the_first_look_finds_nothing_and_the_answer_wakes_the_tier(rig: Rig) -> None:
    assert rig.look() is None
    rig.settle(1)
    assert rig.woken == ["llama"]
    assert rig.look() == Answer(value=1)


def test_nobody_waits_for_a_pod_that_hangs_and_it_is_asked_once(rig: Rig) -> None:
    rig.pod.may_answer.clear()
    assert rig.look() is None
    assert rig.pod.asked.acquire(timeout=20)
    rig.clock.seconds = 100
    assert rig.look() is None
    rig.pod.may_answer.set()
    rig.settle(1)
    assert rig.pod.calls == 1


def test_an_address_is_asked_once_per_interval(rig: Rig) -> None:
    rig.look()
    rig.settle(1)
    for _ in range(50):
        rig.look()
    assert rig.pod.calls == 1
    rig.clock.seconds = 10
    rig.look()
    until(lambda: rig.pod.calls == 2)


def test_an_answer_that_means_the_same_wakes_nobody(rig: Rig) -> None:
    rig.look(lambda body: int(body) // 100)
    rig.settle(1)
    rig.clock.seconds, rig.pod.says = 10, b"99"
    rig.look(lambda body: int(body) // 100)
    until(lambda: rig.pod.calls == 2)
    rig.clock.seconds, rig.pod.says = 20, b"101"
    until(lambda: (rig.look(lambda body: int(body) // 100), len(rig.woken) == 2)[1])
    assert rig.look(lambda body: int(body) // 100) == Answer(value=1)


def test_a_failure_is_an_answer_and_new_words_for_it_wake_nobody(rig: Rig) -> None:
    rig.pod.says = ConnectionRefusedError("refused by port 1")
    rig.look()
    rig.settle(1)
    assert rig.look() == Answer(problem="http://10.0.0.1:9400/usage: refused by port 1")
    rig.clock.seconds, rig.pod.says = 10, ConnectionRefusedError("refused by port 2")
    until(lambda: "port 2" in (rig.look() or Answer()).problem)
    rig.clock.seconds, rig.pod.says = 20, b"x"
    until(lambda: "invalid literal" in (rig.look() or Answer()).problem)
    assert rig.woken == ["llama"]


def test_an_answer_that_breaks_its_reader_is_a_failure_like_any_other(rig: Rig) -> None:
    rig.look(lambda body: {}[body])
    rig.settle(1)
    assert "not understood" in (rig.look() or Answer()).problem


def test_pods_that_are_gone_are_forgotten(rig: Rig) -> None:
    rig.look()
    rig.settle(1)
    rig.clock.seconds = probes.FORGET_SECONDS + 1
    rig.look(address=Address(host="10.0.0.2", port=9400, path="/usage"))
    rig.settle(2)
    assert rig.look() is None


@pytest.mark.parametrize(
    ("host", "url"),
    [("10.0.0.1", "http://10.0.0.1:1/x"), ("fd00::1", "http://[fd00::1]:1/x"), ("a.b", "http://a.b:1/x")],
)
def test_an_address_reads_as_a_url(host: str, url: str) -> None:
    assert str(Address(host=host, port=1, path="/x")) == url


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/missing":
            self.send_error(404)
            return
        self.send_response(200)
        self.end_headers()
        if self.path == "/endless":
            try:
                while True:
                    self.wfile.write(b"x" * (1 << 20))
            except OSError:
                return
        self.wfile.write(b"fine")

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    server = HttpServer("127.0.0.1", 0, Handler)
    stop = server.serve_on_thread("pod")
    yield server.server_port
    stop()


def test_an_answer_is_read_whole(port: int) -> None:
    assert fetch(Address(host="127.0.0.1", port=port, path="/")) == b"fine"


@pytest.mark.parametrize(("path", "says"), [("/missing", "answers 404"), ("/endless", "more than")])
def test_a_bad_answer_is_refused(port: int, path: str, says: str) -> None:
    with pytest.raises(OSError, match=says):
        fetch(Address(host="127.0.0.1", port=port, path=path))


def test_nobody_listening_is_an_error_of_the_system() -> None:
    with pytest.raises(OSError, match="refused"):
        fetch(Address(host="127.0.0.1", port=1, path="/"))


@pytest.mark.parametrize("said", [b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\n\r\n"], ids=["headers", "body"])
def test_who_says_a_byte_now_and_then_is_not_listened_to_for_ever(said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "DEADLINE_SECONDS", 0.5)
    is_over = threading.Event()

    def drip(listener: socket.socket) -> None:
        client, _ = listener.accept()
        with client, contextlib.suppress(OSError):
            client.sendall(said)
            while not is_over.wait(0.05):
                client.sendall(b"a")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=drip, args=(listener,))
        thread.start()
        with pytest.raises(TimeoutError, match="too slowly"):
            fetch(Address(host="127.0.0.1", port=listener.getsockname()[1], path="/"))
        is_over.set()
        thread.join()
