# SPDX-License-Identifier: Apache-2.0
"""What the kubelet is told, and by what the operator knows that a watch is dead."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

import pytest
from live import APPS, Client, body, running
from waiting import until

from kvtier_localcluster.apiserver import ApiError, ApiServerThread
from kvtier_localcluster.ports import free_port
from kvtier_operator import controller
from kvtier_operator.kube.http_server import Health


def ask(port: int, path: str) -> tuple[int, dict[str, Any]]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


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


def test_a_check_that_breaks_is_a_problem_and_no_crash() -> None:
    health = Health()
    health.alive_if("broken", lambda: str(1 // 0))
    assert "ZeroDivisionError" in health.problems("/healthz")["broken"]


def test_a_dead_watch_is_told_to_the_kubelet_by_name(api: ApiServerThread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller, "DEAD_WATCH_SECONDS", 0.5)
    kubectl, health = Client(api.url), Health()

    def deaf(request: Any) -> ApiError | None:
        is_watch = "watch" in request.query and request.path.endswith("/kvcachetiers")
        is_meant = is_watch and request.headers["User-Agent"].startswith("kopf")
        return ApiError(503, "ServiceUnavailable", "injected") if is_meant else None

    def is_kopfs(call: Any) -> bool:
        return call.verb == "watch" and call.path.endswith("/kvcachetiers") and call.user_agent.startswith("kopf")

    with running(health=health, resync_seconds=1):
        until(lambda: any(map(is_kopfs, list(api.server.audit))))
        assert health.problems("/healthz") == {}
        api.server.faults.append(deaf)
        api.drop_watches()
        kubectl.apply_tier(body())
        found = until(lambda: health.problems("/healthz").get("watches"))
        assert "kopf has not reported that default/llama changed" in found
        until(lambda: kubectl.get(APPS, "deployments", "llama-engine"))
        api.server.faults.clear()


def test_tiers_that_may_not_be_read_any_more_are_told_of_and_looked_after_again_once_they_may(
    api: ApiServerThread,
) -> None:
    kubectl, health = Client(api.url), Health()

    def forbid(request: Any) -> ApiError | None:
        is_ours = request.headers.get("User-Agent") != "test" and "kvcachetiers" in request.path
        return ApiError(403, "Forbidden", "kvcachetiers is forbidden") if is_ours else None

    with running(health=health, resync_seconds=0.3):
        until(lambda: [call for call in list(api.server.audit) if call.verb == "watch" and "kvcachetiers" in call.path])
        api.server.faults.append(forbid)
        api.drop_watches()
        assert "kvcachetiers is forbidden" in until(lambda: health.problems("/readyz").get("tiers"))
        assert health.problems("/healthz") == {}
        kubectl.apply_tier(body())
        api.server.faults.clear()
        until(lambda: kubectl.get(APPS, "deployments", "llama-engine"))
        until(lambda: health.problems("/readyz") == {})
