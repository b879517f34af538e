# SPDX-License-Identifier: Apache-2.0
"""Requests through vLLM's own router, which finds the engines by itself; only vLLM is stood in for."""

from __future__ import annotations

import json
import os
import signal
import threading
import urllib.request
from collections.abc import Iterator
from http.client import HTTPException
from typing import Any

import pytest
from light_cluster import Tier
from pods import Bench
from waiting import until

from kvtier_localcluster import kinds

SESSIONS = [f"session-{number}" for number in range(24)]


@pytest.fixture(scope="module")
def routed(bench: Bench) -> Iterator[Tier]:
    tier = Tier(bench, "routed", replicas=2, routing={"type": "Router", "router": {"replicas": 1}})
    tier.reaches("EnginesReady", "True")
    tier.reaches("RoutingReady", "True", "RouterReady")
    yield tier
    tier.patch(routing=None, replicas=0)


def ask(tier: Tier, session: str) -> str:
    """Send a prompt through the Service of the router and return which engine has answered."""
    service = tier.bench.get(kinds.SERVICE, f"{tier.name}-router")
    request = urllib.request.Request(
        f"http://{service['spec']['clusterIP']}:8000/v1/completions",
        data=json.dumps({"model": "org/model", "prompt": session}).encode(),
        headers={"Content-Type": "application/json", "X-Session-ID": session},
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        return str(json.load(answer)["id"])


def engines(tier: Tier) -> set[str]:
    """Return which engines answer requests through the router."""
    return {ask(tier, session) for session in SESSIONS}


@pytest.mark.timeout(600)
def test_the_router_finds_the_engines_and_keeps_a_session_with_one(routed: Tier) -> None:
    until(lambda: len(engines(routed)) == 2)
    first = [ask(routed, session) for session in SESSIONS]
    assert [ask(routed, session) for session in SESSIONS] == first
    assert routed.status()["routing"]["service"] == "routed-router.default.svc:8000"


@pytest.mark.timeout(600)
def test_an_engine_that_dies_costs_no_request_that_comes_after(routed: Tier) -> None:
    until(lambda: len(engines(routed)) == 2)
    dies = ask(routed, SESSIONS[0])
    failures: list[str] = []
    answered: list[str] = []
    is_over = threading.Event()

    def go_on(session: str) -> None:
        while not is_over.is_set():
            try:
                answered.append(ask(routed, session))
            except (OSError, HTTPException, ValueError) as error:
                # Refused, cut off before the answer, or within it.
                failures.append(f"{session}: {error}")

    threads = [threading.Thread(target=go_on, args=(session,)) for session in SESSIONS[:8]]
    for thread in threads:
        thread.start()
    try:
        until(lambda: len(answered) > 40)
        os.kill(int(dies.removeprefix("cmpl-")), signal.SIGKILL)
        before = len(answered)
        until(lambda: len(answered) > before + 400)
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
    # What was being answered then may be lost: one request of each client.
    assert len(failures) <= len(threads), failures
    until(lambda: dies not in engines(routed) and len(engines(routed)) == 2)


@pytest.mark.timeout(600)
def test_a_router_whose_flags_are_wrong_is_told_with_its_last_words(bench: Bench) -> None:
    router: dict[str, Any] = {"replicas": 1, "args": ["--cache-threshold", "much"]}
    tier = Tier(bench, "misrouted", replicas=1, routing={"type": "Router", "router": router})
    assert "invalid float value: 'much'" in tier.reaches("RoutingReady", "False", "RouterFailing")["message"]
    tier.reaches("Available", "True")
    tier.patch(routing={"type": "ClientIP", "router": None})
    tier.reaches("RoutingReady", "True", "RoutedByClient")
    until(lambda: bench.get(kinds.DEPLOYMENT, "misrouted-router") is None)
    tier.patch(replicas=0)
