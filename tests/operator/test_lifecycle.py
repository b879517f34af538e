# SPDX-License-Identifier: Apache-2.0
"""The life of a tier with real watches, the real client and a real HTTP API server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from definition import tier_definition
from live import APPS, CORE, NAMESPACE, TIERS, Client, agents, running
from tiers import tier
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


def body(**spec: Any) -> dict[str, Any]:
    manifest = tier(**spec)
    manifest["metadata"]["namespace"] = NAMESPACE
    return manifest


@contextmanager
def ready(kubectl: Client, **settings: Any) -> Iterator[OperatorMetrics]:
    """Run an operator whose tier is ready."""
    with running(**settings) as metrics:
        kubectl.apply_tier(body())
        until(kubectl.is_ready)
        yield metrics


def wanted_engines(kubectl: Client) -> int:
    """Return the engines that the Deployment asks for."""
    found: int = (kubectl.get(APPS, "deployments", "llama-engine") or {})["spec"]["replicas"]
    return found


def all_gone(kubectl: Client) -> Callable[[], bool]:
    return lambda: all(kubectl.get(*child) is None for child in CHILDREN)


@pytest.mark.usefixtures("controllers")
def test_a_tier_becomes_ready_scales_and_goes(kubectl: Client) -> None:
    with ready(kubectl):
        assert all(kubectl.get(*child) is not None for child in (*CHILDREN, CLAIM))
        found = kubectl.get(TIERS, "kvcachetiers", "llama")
        assert found is not None
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
    assert found is not None
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
def test_a_tier_deleted_while_the_operator_is_down_goes_at_once_and_keeps_its_claim(kubectl: Client) -> None:
    with ready(kubectl):
        pass
    kubectl.delete(TIERS, "kvcachetiers", "llama")
    assert kubectl.get(TIERS, "kvcachetiers", "llama") is None
    until(all_gone(kubectl))
    assert kubectl.get(*CLAIM) is not None


@pytest.mark.usefixtures("controllers")
def test_a_claim_under_deletion_policy_delete_goes_along(kubectl: Client) -> None:
    with running():
        kubectl.apply_tier(body(volume={"deletionPolicy": "Delete"}))
        until(kubectl.is_ready)
        kubectl.delete(TIERS, "kvcachetiers", "llama")
        until(all_gone(kubectl))
        until(lambda: kubectl.get(*CLAIM) is None)


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
def test_drift_is_taken_back_as_soon_as_it_happens(kubectl: Client) -> None:
    with ready(kubectl):
        kubectl.merge(CORE, "services", "llama-engine", {"spec": {"sessionAffinity": "ClientIP"}})
        until(lambda: (kubectl.get(CORE, "services", "llama-engine") or {})["spec"]["sessionAffinity"] == "None")
        kubectl.merge(APPS, "deployments", "llama-engine", {"spec": {"replicas": 9}})
        until(lambda: wanted_engines(kubectl) == 2)
        kubectl.delete(POLICY, "poddisruptionbudgets", "llama-engine")
        until(lambda: kubectl.get(POLICY, "poddisruptionbudgets", "llama-engine"))


@pytest.mark.usefixtures("controllers")
def test_paused_stops_every_change_until_it_is_lifted(kubectl: Client) -> None:
    with ready(kubectl):
        kubectl.merge(TIERS, "kvcachetiers", "llama", {"spec": {"paused": True, "replicas": 1}})
        until(lambda: kubectl.condition("Paused").get("status") == "True")
        assert wanted_engines(kubectl) == 2
        kubectl.merge(TIERS, "kvcachetiers", "llama", {"spec": {"paused": False}})
        until(lambda: wanted_engines(kubectl) == 1)
        until(lambda: [e for e in kubectl.items(CORE, "events") if e["reason"] == "Active"])


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


@pytest.mark.parametrize(("code", "reason"), [(500, "InternalError"), (409, "Conflict"), (429, "TooManyRequests")])
@pytest.mark.usefixtures("controllers")
def test_faults_of_the_api_server_are_outlived(api: ApiServerThread, kubectl: Client, code: int, reason: str) -> None:
    refused: list[str] = []

    def fault(request: Any) -> ApiError | None:
        # What is applied and the status; Leases and Events are sent by other verbs.
        is_write = request.method == "PATCH" and request.headers.get("User-Agent") != "test"
        if not is_write or len(refused) >= 2:
            return None
        refused.append(request.path)
        return ApiError(code, reason, "injected")

    api.server.faults.append(fault)
    with ready(kubectl):
        pass
    assert len(refused) == 2


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


def test_a_tier_that_no_watch_told_of_is_found_by_listing(api: ApiServerThread, kubectl: Client) -> None:
    def deaf(request: Any) -> ApiError | None:
        is_watch = "watch" in request.query and request.path.endswith("/kvcachetiers")
        return ApiError(503, "ServiceUnavailable", "injected") if is_watch else None

    with running(resync_seconds=0.3) as metrics:
        until(lambda: [call for call in agents(api, "watch") if "kvcachetiers" in call])
        api.server.faults.append(deaf)
        api.drop_watches()
        kubectl.apply_tier(body())
        until(lambda: kubectl.get(APPS, "deployments", "llama-engine") is not None)
        until(lambda: ok_passes(metrics) > 0)
        api.server.faults.clear()


def test_an_invalid_tier_says_which_field_without_any_child(api: ApiServerThread, kubectl: Client) -> None:
    # A cluster with an older CRD lets through what the operator then refuses.
    crd = tier_definition()
    whole = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    whole.pop("x-kubernetes-validations")
    schema = whole["properties"]["spec"]
    schema.clear()
    schema.update({"type": "object", "x-kubernetes-preserve-unknown-fields": True})
    kubectl.call(
        "PATCH",
        "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/" + crd["metadata"]["name"],
        {"spec": {"versions": crd["spec"]["versions"]}},
        "application/merge-patch+json",
    )
    with running():
        kubectl.apply_tier(body(replicas="two"))
        found = until(lambda: kubectl.condition("Ready"))
    assert found["reason"] == "SpecInvalid"
    assert found["message"].startswith("spec.replicas: ")
    assert kubectl.get(APPS, "deployments", "llama-engine") is None


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
def test_the_restart_annotation_replaces_every_engine_once(kubectl: Client) -> None:
    def running_engines() -> set[str]:
        return {pod["metadata"]["uid"] for pod in engines(kubectl)}

    with ready(kubectl):
        before = running_engines()
        kubectl.merge(TIERS, "kvcachetiers", "llama", {"metadata": {"annotations": {"kvtier.dev/restart": "once"}}})
        until(lambda: len(running_engines() - before) == 2)
        until(kubectl.is_ready)
    with running(connector_image="ghcr.io/kvtier/connector:next") as metrics:
        after = running_engines()
        until(lambda: ok_passes(metrics))
        assert running_engines() == after


@pytest.mark.usefixtures("controllers")
def test_a_claim_grown_by_hand_neither_holds_up_the_tier_nor_one_made_anew(kubectl: Client) -> None:
    with ready(kubectl, resync_seconds=3600):
        kubectl.merge(*CLAIM, {"spec": {"resources": {"requests": {"storage": "4Ti"}}}})
        until(lambda: kubectl.condition("Ready").get("reason") == "ClaimCannotShrink")
        kubectl.merge(TIERS, "kvcachetiers", "llama", {"spec": {"replicas": 3, "disk": {"mode": "Bypass"}}})
        until(lambda: wanted_engines(kubectl) == 3)
        config = kubectl.get(CORE, "configmaps", "llama-connector") or {}
        assert '"mode":"Bypass"' in config["data"]["live.json"].replace(" ", "")
        kubectl.delete(TIERS, "kvcachetiers", "llama")
        until(all_gone(kubectl))
        kubectl.apply_tier(body())
        until(lambda: len(engines(kubectl)) == 2)


@pytest.mark.usefixtures("controllers")
def test_a_tier_that_is_made_anew_at_once_becomes_ready_without_a_resync(kubectl: Client) -> None:
    with running(resync_seconds=3600):
        for _ in range(2):
            kubectl.apply_tier(body())
            until(kubectl.is_ready)
            kubectl.delete(TIERS, "kvcachetiers", "llama")
        kubectl.apply_tier(body())
        until(kubectl.is_ready)


@pytest.mark.usefixtures("controllers")
def test_a_lease_of_somebody_else_is_refused_until_it_is_gone(kubectl: Client) -> None:
    leases = "/apis/coordination.k8s.io/v1"
    theirs = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": "llama-janitor"}}
    theirs["metadata"]["labels"] = {"kvtier.dev/tier": "llama"}
    kubectl.call("POST", kubectl.path(leases, "leases"), theirs)
    with running(resync_seconds=3600):
        kubectl.apply_tier(body())
        until(lambda: kubectl.condition("Ready").get("reason") == "ObjectNotOurs")
        kubectl.delete(leases, "leases", "llama-janitor")
        until(kubectl.is_ready)
