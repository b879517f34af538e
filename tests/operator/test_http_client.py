# SPDX-License-Identifier: Apache-2.0
"""Pods are asked over HTTP within bounds, and who does not answer keeps nobody else waiting."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest
from asking_pods import Pods, on_loop, running, unreachable
from waiting import until

from kvtier_operator.observe import http_client
from kvtier_operator.observe.http_client import Address, HttpClient, HttpReply, HttpRequest


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
        client, _ = listener.accept()
        with client, contextlib.suppress(OSError):
            client.recv(1000)
            client.sendall(said)
            while drips and not is_over.wait(0.05):
                client.sendall(b"a")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=say, args=(listener,))
        thread.start()
        yield listener.getsockname()[1]
        is_over.set()
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
                host = f"127.1.{number // 250}.{number % 250 + 1}"
                request = HttpRequest(address=at(port, host=host), seconds=60.0)
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
        asker.call(lambda: asker.submit(HttpRequest(address=at(pods.port)), owner="tier", on_reply=told.append))
        until(lambda: pods.asked)
    asker.call(told.append, "too late")
    assert told == []
