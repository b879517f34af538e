# SPDX-License-Identifier: Apache-2.0
"""What the kubelet is told, and by what the operator knows that a watch is dead."""

from __future__ import annotations

import json
import socket
import urllib.error
import urllib.request
from typing import Any

import pytest
from clocks import Clock
from fake_cluster import FakeCluster
from live import APPS, Client, running
from tiers import NAMESPACE, tier
from waiting import until

from kvtier_localcluster.apiserver import ApiError, ApiServerThread
from kvtier_operator import handlers
from kvtier_operator.health import Beat, Health
from kvtier_operator.lookout import Lookout, WatchfulCluster

CONFIG: dict[str, Any] = {
    "apiVersion": "v1",
    "kind": "ConfigMap",
    "metadata": {"name": "c", "namespace": NAMESPACE},
    "data": {"a": "b"},
}


def ask(port: int, path: str) -> tuple[int, dict[str, Any]]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


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


def test_a_beat_ages_from_the_first_one_on() -> None:
    clock = Clock()
    beat = Beat(clock=clock)
    clock.seconds = 100
    assert beat.seconds_since() == 0
    beat.mark()
    clock.seconds = 160
    assert beat.seconds_since() == 60


def lookout() -> tuple[Lookout, Clock]:
    clock = Clock()
    return Lookout(frozenset({"ConfigMap"}), clock=clock), clock


def version(number: int) -> dict[str, Any]:
    labels = {"kvtier.dev/tier": "llama"}
    more = {"uid": "u", "resourceVersion": str(number), "labels": labels}
    return {**CONFIG, "metadata": {**CONFIG["metadata"], **more}}


def test_a_change_that_no_watch_tells_of_grows_old() -> None:
    look, clock = lookout()
    look.heard(version(1), is_deleted=False)
    look.found(version(1))
    assert look.longest_unheard() == (0.0, "")
    look.found(version(2))
    clock.seconds = 200
    look.found(version(3))
    assert look.longest_unheard() == (200.0, f"ConfigMap {NAMESPACE}/c")


def test_what_was_read_just_before_it_was_gone_is_not_waited_for() -> None:
    look, clock = lookout()
    look.heard(version(1), is_deleted=False)
    look.heard(version(2), is_deleted=True)
    look.found(version(1))  # a list that was answered before
    clock.seconds = 5000
    assert look.longest_unheard()[0] == 0


@pytest.mark.parametrize("is_deleted", [False, True])
def test_whatever_a_watch_tells_of_an_object_shows_that_it_lives(is_deleted: bool) -> None:
    look, clock = lookout()
    look.found(version(2))
    clock.seconds = 500
    look.heard(version(3), is_deleted=is_deleted)
    assert look.longest_unheard() == (0.0, "")


def test_a_list_older_than_the_event_is_made_good_by_the_next_list() -> None:
    look, clock = lookout()
    look.heard(version(2), is_deleted=False)
    look.found(version(1))
    clock.seconds = 60
    look.found(version(2))
    assert look.longest_unheard() == (0.0, "")


def test_what_was_applied_last_is_not_applied_again_until_somebody_touches_it() -> None:
    live = FakeCluster()
    cluster = WatchfulCluster(live, Lookout(frozenset()))
    labels = {"l": "1"}
    manifest = {**CONFIG, "metadata": {**CONFIG["metadata"], "labels": labels}}

    def apply(body: dict[str, Any]) -> int:
        before = len(live.writes())
        found = cluster.list("v1", "ConfigMap", namespace=NAMESPACE, selector="l=1")
        uid = found[0]["metadata"]["uid"] if found else None
        result = cluster.apply(body, over=uid)
        assert (
            result["metadata"]["resourceVersion"]
            == live.list("v1", "ConfigMap", namespace=NAMESPACE, selector="")[0]["metadata"]["resourceVersion"]
        )
        return len(live.writes()) - before

    assert [apply(manifest), apply(manifest), apply(manifest)] == [1, 0, 0]
    assert [apply({**manifest, "data": {"a": "c"}}), apply({**manifest, "data": {"a": "c"}})] == [1, 0]
    key = next(iter(live.existing()))
    live.edit(key, {"data": {"theirs": "1"}})
    assert [apply({**manifest, "data": {"a": "c"}}), apply({**manifest, "data": {"a": "c"}})] == [1, 0]


@pytest.mark.parametrize(
    ("kind", "is_repeated"),
    [("Lease", False), ("Deployment", False), ("PersistentVolumeClaim", False), ("ConfigMap", True)],
)
def test_what_others_write_all_the_time_is_no_reason_to_apply_again(kind: str, is_repeated: bool) -> None:
    look, _ = lookout()
    manifest: dict[str, Any] = {"apiVersion": "v1", "kind": kind, "metadata": {"name": "c", "namespace": NAMESPACE}}
    live = {**manifest, "metadata": {**manifest["metadata"], "uid": "u", "resourceVersion": "1"}}
    look.applied(manifest, live)
    look.found({**live, "metadata": {**live["metadata"], "resourceVersion": "2"}})
    assert (look.is_applied(manifest, over="u") is None) is is_repeated
    look.found({**live, "metadata": {**live["metadata"], "resourceVersion": "3", "labels": {"a": "b"}}})
    assert look.is_applied(manifest, over="u") is None


def test_a_claim_of_somebody_else_is_not_waited_for() -> None:
    look, clock = lookout()
    theirs = version(1)
    del theirs["metadata"]["labels"]
    look.found(theirs)
    clock.seconds = 500
    assert look.longest_unheard() == (0.0, "")


def test_a_dead_watch_is_told_to_the_kubelet_by_name(api: ApiServerThread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handlers, "DEAF_SECONDS", 0.5)
    kubectl, health = Client(api.url), Health()

    def deaf(request: Any) -> ApiError | None:
        is_watch = "watch" in request.query and request.path.endswith("/kvcachetiers")
        return ApiError(503, "ServiceUnavailable", "injected") if is_watch else None

    with running(health=health, resync_seconds=0.3):
        until(lambda: [call for call in list(api.server.audit) if call.verb == "watch" and "kvcachetiers" in call.path])
        assert health.problems("/healthz") == {}
        api.server.faults.append(deaf)
        api.drop_watches()
        body = tier()
        body["metadata"]["namespace"] = "default"
        kubectl.apply_tier(body)
        found = until(lambda: health.problems("/healthz").get("watches"))
        assert "KVCacheTier default/llama changed" in found
        assert kubectl.get(APPS, "deployments", "llama-engine") is not None
        api.server.faults.clear()
