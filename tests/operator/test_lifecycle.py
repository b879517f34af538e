# SPDX-License-Identifier: Apache-2.0
"""The life of a tier with real watches, the real client and a real HTTP API server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from live import APPS, CORE, NAMESPACE, TIERS, Client, agents, body, running
from waiting import until

from kvtier_localcluster.apiserver import ApiError, ApiServerThread
from kvtier_operator.metrics import OperatorMetrics

POLICY = "/apis/policy/v1"
RBAC = "/apis/rbac.authorization.k8s.io/v1"
CHILDREN = (
    (CORE, "configmaps", "llama-connector"),
    (CORE, "serviceaccounts", "llama-engine"),
    (CORE, "services", "llama-engine"),
    (POLICY, "poddisruptionbudgets", "llama-engine"),
    (APPS, "deployments", "llama-engine"),
    (CORE, "configmaps", "llama-janitor"),
    (CORE, "serviceaccounts", "llama-janitor"),
    ("/apis/coordination.k8s.io/v1", "leases", "llama-janitor"),
    (RBAC, "roles", "llama-janitor"),
    (RBAC, "rolebindings", "llama-janitor"),
    (CORE, "services", "llama-janitor"),
    (APPS, "deployments", "llama-janitor"),
)
CLAIM = (CORE, "persistentvolumeclaims", "llama-blocks")


@contextmanager
def ready(kubectl: Client, **settings: Any) -> Iterator[OperatorMetrics]:
    """Run an operator whose tier is ready."""
    with running(**settings) as metrics:
        kubectl.apply_tier(body())
        until(kubectl.is_ready)
        yield metrics


def all_gone(kubectl: Client) -> Callable[[], bool]:
    return lambda: all(kubectl.get(*child) is None for child in CHILDREN)


@pytest.mark.usefixtures("controllers")
def test_a_tier_becomes_ready_scales_and_goes(kubectl: Client) -> None:
    with ready(kubectl):
        assert all(kubectl.get(*child) is not None for child in (*CHILDREN, CLAIM))
        found = kubectl.get(TIERS, "kvcachetiers", "llama")
        assert (found["status"]["replicas"], found["status"]["readyReplicas"]) == (2, 2)
        assert found["status"]["sizing"]["memoryBytes"] == 331 << 28

        kubectl.merge(TIERS, "kvcachetiers", "llama", {"spec": {"replicas": 3}}, sub="/scale")
        until(lambda: kubectl.is_ready() and len(engines(kubectl)) == 3)

        kubectl.merge(TIERS, "kvcachetiers", "llama", {"spec": {"hash": {"seed": "7"}}})
        until(lambda: kubectl.is_ready() and {seed(pod) for pod in engines(kubectl)} == {"7"})

        kubectl.delete(TIERS, "kvcachetiers", "llama")
        until(all_gone(kubectl))
        assert kubectl.get(*CLAIM) is not None
    reasons = {event["reason"] for event in kubectl.items(CORE, "events")}
    assert "Ready" in reasons
    assert not [event for event in kubectl.items(CORE, "events") if event["type"] == "Warning"]


def engines(kubectl: Client) -> list[dict[str, Any]]:
    pods = kubectl.items(CORE, "pods")
    return [pod for pod in pods if pod["metadata"]["labels"]["app.kubernetes.io/component"] == "engine"]


def seed(pod: dict[str, Any]) -> str:
    env = pod["spec"]["containers"][0]["env"]
    return next(entry["value"] for entry in env if entry["name"] == "PYTHONHASHSEED")


@pytest.mark.usefixtures("controllers")
def test_an_idle_operator_leaves_everything_untouched_and_unmarked(api: ApiServerThread, kubectl: Client) -> None:
    with ready(kubectl, resync_seconds=0.2) as metrics:

        def state() -> tuple[list[str], int]:
            versions = [(kubectl.get(*child) or {})["metadata"]["resourceVersion"] for child in (*CHILDREN, CLAIM)]
            return versions, len([call for call in agents(api, "patch") if "/status" in call])

        # What was on its way when the tier became Ready may still come; an operator that writes for ever never rests.
        until(lambda: is_unchanged(metrics, state))
    found = kubectl.get(TIERS, "kvcachetiers", "llama")
    assert not {"finalizers", "annotations"} & found["metadata"].keys()
    assert all("finalizers" not in (kubectl.get(*child) or {})["metadata"] for child in CHILDREN)


def is_unchanged(metrics: Any, state: Callable[[], object], *, passes: int = 5) -> bool:
    """Tell whether so many passes have left a state as it was."""
    before, done = state(), ok_passes(metrics)
    until(lambda: ok_passes(metrics) > done + passes)
    return state() == before


def ok_passes(metrics: Any) -> float:
    return float(metrics.registry.get_sample_value("kvtier_operator_reconcile_total", {"outcome": "ok"}) or 0)


@pytest.mark.usefixtures("controllers")
def test_what_changed_while_the_operator_was_down_is_made_good_when_it_is_back(kubectl: Client) -> None:
    with ready(kubectl):
        pass
    kubectl.merge(TIERS, "kvcachetiers", "llama", {"spec": {"replicas": 1}})
    kubectl.delete(CORE, "configmaps", "llama-connector")
    with running():
        until(lambda: kubectl.get(CORE, "configmaps", "llama-connector") is not None)
        until(lambda: kubectl.is_ready() and len(engines(kubectl)) == 1)


@pytest.mark.usefixtures("controllers")
def test_an_object_of_somebody_else_is_refused_until_it_is_gone(kubectl: Client) -> None:
    theirs = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "llama-connector"}, "data": {"a": "b"}}
    kubectl.call("POST", kubectl.path(CORE, "configmaps"), theirs)
    with running(resync_seconds=3600):
        kubectl.apply_tier(body())
        until(lambda: kubectl.condition("Ready").get("reason") == "ObjectNotOurs")
        assert (kubectl.get(CORE, "configmaps", "llama-connector") or {})["data"] == {"a": "b"}
        assert kubectl.get(APPS, "deployments", "llama-engine") is None
        kubectl.delete(CORE, "configmaps", "llama-connector")
        until(kubectl.is_ready)
    warnings = [event["reason"] for event in kubectl.items(CORE, "events") if event["type"] == "Warning"]
    assert warnings == ["ObjectNotOurs"]


@pytest.mark.usefixtures("controllers")
def test_dropped_watches_expired_versions_and_the_end_of_kopf_are_outlived(
    api: ApiServerThread, kubectl: Client
) -> None:
    ended: list[str] = []

    def end_kopf(request: Any) -> ApiError | None:
        # kopf takes no list that fails in this way, and ends.
        is_meant = request.headers.get("User-Agent", "").startswith("kopf") and "watch" not in request.query
        if not is_meant or ended:
            return None
        ended.append(request.path)
        return ApiError(409, "Conflict", "injected")

    with ready(kubectl):
        api.server.faults.append(end_kopf)
        api.compact()
        api.drop_watches()
        kubectl.merge(TIERS, "kvcachetiers", "llama", {"spec": {"replicas": 1}})
        until(lambda: kubectl.is_ready() and len(engines(kubectl)) == 1, seconds=20)
    assert ended


def test_tiers_are_watched_by_kopf_alone(api: ApiServerThread, kubectl: Client) -> None:
    def agents_that_watch() -> set[str]:
        found = [
            call for call in list(api.server.audit) if call.verb == "watch" and call.path.endswith("/kvcachetiers")
        ]
        return {call.user_agent.partition("/")[0] for call in found}

    with running():
        until(lambda: "kopf" in agents_that_watch())
        kubectl.apply_tier(body())
        until(lambda: kubectl.get(APPS, "deployments", "llama-engine"))
    assert agents_that_watch() == {"kopf"}


def test_a_tier_whose_going_no_watch_told_of_is_missed_in_a_list(api: ApiServerThread, kubectl: Client) -> None:
    def deaf(request: Any) -> ApiError | None:
        is_watch = "watch" in request.query and request.path.endswith("/kvcachetiers")
        return ApiError(503, "ServiceUnavailable", "injected") if is_watch else None

    with running(resync_seconds=0.3) as metrics:
        kubectl.apply_tier(body())
        until(lambda: kubectl.get(APPS, "deployments", "llama-engine"))
        api.server.faults.append(deaf)
        api.drop_watches()
        kubectl.delete(TIERS, "kvcachetiers", "llama")
        until(lambda: metrics.registry.get_sample_value("kvtier_operator_reconcile_total", {"outcome": "gone"}))
        api.server.faults.clear()


def test_a_namespace_that_may_not_be_read_holds_up_no_other(api: ApiServerThread, kubectl: Client) -> None:
    def forbid(request: Any) -> ApiError | None:
        is_ours = request.headers.get("User-Agent") != "test" and "/namespaces/other/kvcachetiers" in request.path
        return ApiError(403, "Forbidden", "kvcachetiers is forbidden") if is_ours else None

    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "other"}}
    kubectl.call("POST", f"{CORE}/namespaces", namespace)
    there = body()
    there["metadata"]["namespace"] = "other"
    kubectl.call("POST", f"{TIERS}/namespaces/other/kvcachetiers", there)
    api.server.faults.append(forbid)
    with running(namespaces=(NAMESPACE, "other"), resync_seconds=0.5):
        kubectl.apply_tier(body())
        until(lambda: kubectl.get(APPS, "deployments", "llama-engine"))
        api.server.faults.clear()
        until(lambda: kubectl.call("GET", f"{APPS}/namespaces/other/deployments")["items"])


@pytest.mark.usefixtures("controllers")
def test_a_claim_of_the_users_own_is_noticed_as_soon_as_it_is_there(kubectl: Client) -> None:
    mine = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "mine"},
        "spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Ti"}}},
    }
    with running(resync_seconds=3600):
        kubectl.apply_tier(body(volume={"claim": None, "existingClaim": "mine"}))
        until(lambda: kubectl.condition("Ready").get("reason") == "ClaimMissing")
        assert kubectl.condition("Stalled")["status"] == "False"
        kubectl.call("POST", kubectl.path(CORE, "persistentvolumeclaims"), mine)
        until(kubectl.is_ready)


@pytest.mark.usefixtures("controllers")
def test_a_tier_that_is_made_anew_at_once_becomes_ready_without_a_resync(kubectl: Client) -> None:
    with running(resync_seconds=3600):
        for _ in range(2):
            kubectl.apply_tier(body())
            until(kubectl.is_ready)
            kubectl.delete(TIERS, "kvcachetiers", "llama")
        kubectl.apply_tier(body())
        until(kubectl.is_ready)
