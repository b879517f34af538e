# SPDX-License-Identifier: Apache-2.0
"""Pods are asked in the background, seldom while they answer and by themselves until they do."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
from asking_pods import Pods, running
from clocks import Clock
from waiting import until

from kvtier_operator.observe import poller
from kvtier_operator.observe.http_client import Address, HttpClient
from kvtier_operator.observe.poller import PollAnswer, Poller, PollTarget

HOST = "127.0.0.1"


class Rig:
    def __init__(self, pods: Pods, asker: HttpClient, clock: Clock) -> None:
        self.pods, self.asker, self.clock, self.woken = pods, asker, clock, list[str]()
        self.probes = Poller(asker, self.woken.append, now=clock, interval_seconds=10)

    def look(
        self,
        meaning: Callable[[bytes], object] = int,
        *,
        uid: str = "",
        since: str = "",
        host: str = HOST,
        is_passing: Callable[[object], bool] = lambda _value: False,
    ) -> PollAnswer | None:
        subject = PollTarget(address=Address(host=host, port=self.pods.port, path="/"), uid=uid)
        return self.probes.answer(subject, owner="llama", parse=meaning, since=since, is_passing=is_passing)

    def settle(self, wakings: int) -> None:
        until(lambda: len(self.woken) == wakings)

    def asked(self, times: int) -> None:
        until(lambda: self.pods.asked[HOST] == times)

    def pass_time(self, seconds: float) -> None:
        """Let so many seconds pass, and have who is due by then asked."""
        is_done = threading.Event()
        self.rest()
        self.clock.seconds += seconds
        self.asker.call(self.probes._ask_due)
        self.asker.call(is_done.set)
        assert is_done.wait(60)
        self.rest()

    def rest(self) -> None:
        until(lambda: not any(known.is_asking for known in self.probes._known.values()))


@pytest.fixture
def rig() -> Iterator[Rig]:
    with Pods().serving() as pods, running() as asker:
        yield Rig(pods, asker, Clock())
        pods.may_answer.set()


def test_the_first_look_finds_nothing_and_the_answer_wakes_the_tier(rig: Rig) -> None:
    assert rig.look() is None
    rig.settle(1)
    assert rig.woken == ["llama"]
    for _ in range(50):
        assert rig.look() == PollAnswer(value=1)
    assert rig.pods.asked[HOST] == 1


def test_nobody_waits_for_a_pod_that_hangs_and_it_is_asked_once(rig: Rig) -> None:
    rig.pods.may_answer.clear()
    assert rig.look() is None
    rig.asked(1)
    rig.clock.seconds = 100
    assert rig.look() is None
    rig.pods.may_answer.set()
    rig.settle(1)
    assert rig.pods.asked[HOST] == 1


def test_a_pod_is_asked_once_per_interval_though_nobody_looks_again(rig: Rig) -> None:
    rig.look()
    rig.settle(1)
    for number in range(1, 4):
        rig.pass_time(8.9)
        rig.asked(number)
        rig.pass_time(1.2)
        rig.asked(number + 1)


def test_who_is_one_of_very_many_is_asked_more_seldom(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(poller, "MOST_A_SECOND", 0.05)
    rig.look()
    rig.settle(1)
    rig.pass_time(17.0)
    rig.asked(1)
    rig.pass_time(4.0)
    rig.asked(2)


def test_an_answer_that_is_about_to_change_is_asked_for_again_within_seconds(rig: Rig) -> None:
    rig.look(is_passing=lambda value: value == 1)
    rig.settle(1)
    for seconds, asked in ((0.8, 1), (0.3, 2), (1.7, 2), (0.4, 3), (3.5, 3), (0.6, 4)):
        rig.pass_time(seconds)
        rig.asked(asked)
    rig.pods.says["/"] = b"2"
    rig.pass_time(8.0)
    rig.settle(2)
    assert rig.look() == PollAnswer(value=2)
    rig.pass_time(8.5)
    rig.asked(5)


def test_a_pod_that_has_become_ready_since_is_asked_at_once(rig: Rig) -> None:
    rig.look(since="noon")
    rig.settle(1)
    rig.look(since="one")
    rig.asked(2)


def test_a_pod_that_becomes_ready_while_it_is_asked_is_asked_again(rig: Rig) -> None:
    rig.pods.may_answer.clear()
    rig.look(since="noon")
    rig.asked(1)
    rig.look(since="one")
    rig.pods.may_answer.set()
    rig.asked(2)


def test_another_pod_at_the_same_address_does_not_inherit_an_answer(rig: Rig) -> None:
    rig.look(uid="old")
    rig.settle(1)
    assert rig.look(uid="new") is None
    rig.asked(2)


def test_an_answer_that_means_the_same_wakes_nobody(rig: Rig) -> None:
    rig.look(lambda body: int(body) // 100)
    rig.settle(1)
    rig.clock.seconds, rig.pods.says["/"] = 10, b"99"
    rig.look(lambda body: int(body) // 100)
    rig.asked(2)
    until(lambda: not next(iter(rig.probes._known.values())).is_asking)
    rig.clock.seconds, rig.pods.says["/"] = 20, b"101"
    rig.look(lambda body: int(body) // 100)
    rig.settle(2)
    assert rig.look(lambda body: int(body) // 100) == PollAnswer(value=1)


def test_a_failure_is_an_answer_and_new_words_for_it_wake_nobody(rig: Rig) -> None:
    rig.pods.says.clear()
    rig.look()
    rig.settle(1)
    assert rig.look() == PollAnswer(problem=f"http://{HOST}:{rig.pods.port}/: answers 404 Not Found")
    rig.clock.seconds, rig.pods.says["/"] = 20, b"x"
    until(lambda: "invalid literal" in (rig.look() or PollAnswer()).problem)
    assert rig.woken == ["llama"]


def test_who_does_not_answer_is_asked_again_by_itself_and_later_each_time(rig: Rig) -> None:
    rig.pods.says.clear()
    rig.look()
    rig.settle(1)
    for seconds, asked in ((0.8, 1), (0.3, 2), (1.7, 2), (0.4, 3), (3.5, 3), (0.6, 4)):
        rig.pass_time(seconds)
        rig.asked(asked)
    rig.pods.says["/"] = b"1"
    rig.look(since="ready")
    until(lambda: (rig.look(since="ready") or PollAnswer()).value == 1)


def test_an_answer_that_breaks_its_reader_is_a_failure_like_any_other(rig: Rig) -> None:
    rig.look(lambda body: {}[body])
    rig.settle(1)
    assert "not understood" in (rig.look() or PollAnswer()).problem


def test_pods_that_are_gone_are_forgotten(rig: Rig) -> None:
    rig.look()
    rig.settle(1)
    rig.clock.seconds = poller.FORGET_SECONDS + 1
    rig.look(host="127.0.0.2")
    rig.settle(2)
    assert rig.look() is None
