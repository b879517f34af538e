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

from kvtier_operator.observe import http_client as asker_module
from kvtier_operator.observe.http_client import Address, HttpClient, HttpReply, HttpRequest, Turns


@pytest.fixture
def pods() -> Iterator[Pods]:
    with Pods().serving() as made:
        yield made


def at(port: int, path: str = "/", host: str = "127.0.0.1") -> Address:
    return Address(host=host, port=port, path=path)


def fetch(asker: HttpClient, address: Address, *, seconds: float = 5.0, most_bytes: int = 4 << 20) -> HttpReply:
    question = HttpRequest(address=address, seconds=seconds, most_bytes=most_bytes)
    return on_loop(asker, lambda: asker.ask(question, owner="tier"))


def test_owners_take_turns_and_nobody_has_more_places_than_are_for_each() -> None:
    turns: Turns[str] = Turns(places=4, places_each=2)
    for name in ("a1", "a2", "a3"):
        turns.add(name, owner="a", is_hopeful=True)
    turns.add("b1", owner="b", is_hopeful=True)
    assert [turns.take() for _ in range(4)] == [("a", "a1"), ("b", "b1"), ("a", "a2"), None]
    turns.leave("a")
    assert turns.take() == ("a", "a3")


def test_who_did_not_answer_last_waits_for_everybody_else() -> None:
    turns: Turns[str] = Turns(places=1, places_each=1)
    turns.add("silent", owner="a", is_hopeful=False)
    turns.add("new", owner="b", is_hopeful=True)
    assert turns.take() == ("b", "new")
    assert turns.take() is None
    turns.leave("b")
    assert turns.take() == ("a", "silent")


@pytest.mark.parametrize(
    ("host", "url"),
    [("10.0.0.1", "http://10.0.0.1:1/x"), ("fd00::1", "http://[fd00::1]:1/x"), ("a.b", "http://a.b:1/x")],
)
def test_an_address_reads_as_a_url(host: str, url: str) -> None:
    assert str(at(1, "/x", host)) == url


def test_an_answer_is_read_whole_whatever_its_status(asker: HttpClient, pods: Pods) -> None:
    pods.says["/"] = b"fine" * 100_000
    assert fetch(asker, at(pods.port)) == HttpReply(status=200, reason="OK", body=b"fine" * 100_000)
    assert fetch(asker, at(pods.port, "/missing")).status == 404


def test_an_answer_that_is_too_long_is_refused(asker: HttpClient, pods: Pods) -> None:
    pods.says["/"] = bytes(1 << 20)
    with pytest.raises(OSError, match="more than 1000 bytes"):
        fetch(asker, at(pods.port), most_bytes=1000)


def test_nobody_listening_is_an_error_of_the_system(asker: HttpClient) -> None:
    with pytest.raises(ConnectionRefusedError, match="refused"):
        fetch(asker, at(1))


@pytest.mark.parametrize("said", [b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\n\r\n"], ids=["headers", "body"])
def test_who_says_a_byte_now_and_then_is_not_listened_to_for_ever(asker: HttpClient, said: bytes) -> None:
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
            fetch(asker, at(listener.getsockname()[1]), seconds=0.5)
        is_over.set()
        thread.join()


def test_who_drops_what_is_sent_is_told_apart_from_who_is_slow(
    asker: HttpClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    with unreachable() as port, pytest.raises(TimeoutError, match="takes no connection"):
        fetch(asker, at(port))


def test_who_says_something_else_than_http_is_an_error_in_words(asker: HttpClient) -> None:
    def say(listener: socket.socket) -> None:
        client, _ = listener.accept()
        with client:
            client.recv(1000)
            client.sendall(b"SSH-2.0-OpenSSH\r\n")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=say, args=(listener,))
        thread.start()
        with pytest.raises(OSError, match="does not speak HTTP"):
            fetch(asker, at(listener.getsockname()[1]))
        thread.join()


@pytest.mark.parametrize("tiers", [60, 600])
def test_six_hundred_pods_that_nobody_reaches_keep_no_other_tier_waiting(
    tiers: int, pods: Pods, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answer is waited for for half as long as the deadline of the others is."""
    monkeypatch.setattr(asker_module, "CONNECT_SECONDS", 60.0)
    silent: list[object] = []
    with unreachable() as port, running(places=64) as asker:

        def ask_all() -> None:
            for number in range(600):
                question = HttpRequest(address=at(port, host=f"127.1.{number // 250}.{number % 250 + 1}"), seconds=60.0)
                asker.submit(question, owner=f"silent-{number % tiers}", done=silent.append)

        asker.call(ask_all)
        assert fetch(asker, at(pods.port)).is_ok
    assert not [each for each in silent if isinstance(each, HttpReply)]


def test_who_goes_on_for_too_long_beside_others_is_cut_off(pods: Pods) -> None:
    pods.may_answer.clear()
    told: list[HttpReply | OSError] = []
    with running(places=2) as asker:

        def ask_all() -> None:
            for number in range(6):
                question = HttpRequest(address=at(pods.port, host=f"127.0.1.{number + 1}"), seconds=30.0)
                asker.submit(question, owner=number, done=told.append)

        asker.call(ask_all)
        until(lambda: len(told) >= 2)
        pods.may_answer.set()
    assert [str(each) for each in told[:2]] == ["answers too slowly"] * 2


def test_the_longest_answer_gives_way_when_all_of_them_hold_too_much(
    asker: HttpClient, pods: Pods, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asker_module, "MOST_HELD_BYTES", 100_000)
    pods.says |= {"/": bytes(50_000), "/long": bytes(200_000)}
    with pytest.raises(OSError, match="more than there is room for"):
        fetch(asker, at(pods.port, "/long"))
    assert len(fetch(asker, at(pods.port)).body) == 50_000


def test_an_asker_that_ends_leaves_nobody_behind(pods: Pods) -> None:
    pods.may_answer.clear()
    told: list[object] = []
    with running() as asker:
        asker.call(lambda: asker.submit(HttpRequest(address=at(pods.port)), owner="tier", done=told.append))
        until(lambda: pods.asked)
    asker.call(told.append, "too late")
    assert told == []
