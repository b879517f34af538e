# SPDX-License-Identifier: Apache-2.0
"""The chart's roles: enough for every lifecycle, and nothing in them that none of these needs.

A new call of the operator needs a rule in charts/kvtier/templates/_rules.tpl and a step in `LIFECYCLES` that makes it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest
from chart import NAMESPACE as SYSTEM
from chart import render
from definition import open_definition, tier_definition
from granted import Rbac, aggregated
from live import APPS, BATCH, CORE, NAMESPACE, TIERS, Client, Controllers, body
from waiting import until

from kvtier_localcluster.apiserver import ApiServerThread
from kvtier_localcluster.apiserver.registry import writes
from kvtier_operator import names

POLICY = "/apis/policy/v1"
NETWORKING = "/apis/networking.k8s.io/v1"
SLOW = 120.0


RBAC = "/apis/rbac.authorization.k8s.io/v1"


def becomes_ready(kubectl: Client) -> None:
    kubectl.apply_tier(body())
    until(kubectl.is_ready, seconds=SLOW)


def scales_down_to_one_and_up(kubectl: Client) -> None:
    for count in (1, 2):
        kubectl.merge(TIERS, "kvcachetiers", "llama", {"spec": {"replicas": count}})
        until(kubectl.is_ready, seconds=SLOW)


def is_repaired(kubectl: Client) -> None:
    for group, plural, name in (
        (CORE, "configmaps", "llama-connector"),
        (CORE, "services", "llama-engine"),
        (CORE, "serviceaccounts", "llama-engine"),
        (POLICY, "poddisruptionbudgets", "llama-engine"),
        (APPS, "deployments", "llama-engine"),
    ):
        kubectl.delete(group, plural, name)
        until(lambda where=(group, plural, name): kubectl.get(*where), seconds=SLOW)
    until(kubectl.is_ready, seconds=SLOW)


def does_without_its_janitor_and_with_it_again(kubectl: Client) -> None:
    for is_enabled in (False, True):
        kubectl.merge(TIERS, "kvcachetiers", "llama", {"spec": {"janitor": {"enabled": is_enabled}}})
        until(
            lambda wanted=is_enabled: (kubectl.get(RBAC, "roles", "llama-janitor") is not None) is wanted, seconds=SLOW
        )
        until(kubectl.is_ready, seconds=SLOW)


def grows_its_claim(kubectl: Client) -> None:
    kubectl.merge(TIERS, "kvcachetiers", "llama", {"spec": {"volume": {"claim": {"size": "3Ti"}}}})
    until(kubectl.is_ready, seconds=SLOW)


def cannot_mount_its_volume(kubectl: Client) -> None:
    pod = next(each for each in kubectl.items(CORE, "pods") if each["metadata"]["name"].startswith("llama-engine"))
    metadata = pod["metadata"]
    about = {"kind": "Pod", "namespace": NAMESPACE, "name": metadata["name"], "uid": metadata["uid"]}
    told = {"reason": "FailedMount", "message": "no such export", "type": "Warning", "involvedObject": about}
    told |= {"metadata": {"name": "no-mount", "namespace": NAMESPACE}, "lastTimestamp": metadata["creationTimestamp"]}
    kubectl.call("POST", kubectl.path(CORE, "events"), {"apiVersion": "v1", "kind": "Event", **told})
    waiting = {"name": "engine", "image": "i", "imageID": "", "ready": False, "restartCount": 0}
    waiting["state"] = {"waiting": {"reason": "ContainerCreating"}}
    status = {
        "phase": "Pending",
        "conditions": [{"type": "PodScheduled", "status": "True"}, {"type": "Ready", "status": "False"}],
        "containerStatuses": [waiting],
    }
    kubectl.merge(CORE, "pods", metadata["name"], {"status": status}, sub="/status")
    until(lambda: "no such export" in kubectl.condition("EnginesReady").get("message", ""), seconds=SLOW)


def is_routed_and_not_any_more(kubectl: Client) -> None:
    group, _, version = names.INFERENCE_POOL.partition("/")
    definition = open_definition(group, names.POOL_KIND, version)
    asked = {"type": "Router", "inferencePool": {"endpointPicker": {"name": "epp"}}}
    kubectl.merge(TIERS, "kvcachetiers", "llama", {"spec": {"routing": asked}})
    until(lambda: kubectl.condition("RoutingReady").get("reason") == "PoolKindMissing", seconds=SLOW)
    # Nothing tells the operator of the kind, and its next look is ten minutes away.
    kubectl.call("POST", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", definition)
    until(lambda: kubectl.get(f"/apis/{names.INFERENCE_POOL}", "inferencepools", "llama-engine"), seconds=SLOW)
    for mode in ("FailOpen", "FailClose"):
        routing = {"type": "Router", "inferencePool": {"endpointPicker": {"name": "epp", "failureMode": mode}}}
        kubectl.merge(TIERS, "kvcachetiers", "llama", {"spec": {"routing": routing}})

        def stands(wanted: str = mode) -> bool:
            found = kubectl.get(f"/apis/{names.INFERENCE_POOL}", "inferencepools", "llama-engine")
            return found is not None and found["spec"]["endpointPickerRef"]["failureMode"] == wanted

        until(stands, seconds=SLOW)
        until(kubectl.is_ready, seconds=SLOW)
    kubectl.merge(TIERS, "kvcachetiers", "llama", {"spec": {"routing": None}})
    until(lambda: kubectl.get(POLICY, "poddisruptionbudgets", "llama-router") is None, seconds=SLOW)
    until(lambda: kubectl.get(f"/apis/{names.INFERENCE_POOL}", "inferencepools", "llama-engine") is None, seconds=SLOW)
    until(kubectl.is_ready, seconds=SLOW)


def is_closed_off_and_opened(kubectl: Client) -> None:
    for egress in ([{"ports": [{"port": 443}]}], []):
        kubectl.merge(TIERS, "kvcachetiers", "llama", {"spec": {"networkPolicy": {"egress": egress}}})

        def stands(rules: int = 2 + len(egress)) -> bool:
            found = kubectl.get(NETWORKING, "networkpolicies", "llama-engine")
            return found is not None and len(found["spec"]["egress"]) == rules

        until(stands, seconds=SLOW)
    kubectl.delete(NETWORKING, "networkpolicies", "llama-janitor")
    until(lambda: kubectl.get(NETWORKING, "networkpolicies", "llama-janitor"), seconds=SLOW)
    kubectl.merge(TIERS, "kvcachetiers", "llama", {"spec": {"networkPolicy": None}})
    until(lambda: kubectl.get(NETWORKING, "networkpolicies", "llama-engine") is None, seconds=SLOW)
    until(kubectl.is_ready, seconds=SLOW)


def goes(kubectl: Client) -> None:
    kubectl.delete(TIERS, "kvcachetiers", "llama")
    until(lambda: kubectl.get(APPS, "deployments", "llama-engine") is None, seconds=SLOW)


def is_refused(kubectl: Client) -> None:
    kubectl.apply_tier(body("other", volume={"claim": None, "existingClaim": "nowhere"}))
    until(lambda: kubectl.condition("VolumeBound", "other").get("status") == "False", seconds=SLOW)


def finds_a_lease_in_its_way(kubectl: Client) -> None:
    theirs = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": "late-janitor"}}
    theirs["metadata"]["labels"] = {"kvtier.dev/tier": "late"}
    leases = "/apis/coordination.k8s.io/v1"
    kubectl.call("POST", kubectl.path(leases, "leases"), theirs)
    kubectl.apply_tier(body("late"))
    until(lambda: kubectl.condition("Ready", "late").get("reason") == "ObjectNotOurs", seconds=SLOW)
    kubectl.delete(leases, "leases", "late-janitor")
    until(lambda: kubectl.is_ready("late"), seconds=SLOW)


def has_its_volume_tried(kubectl: Client) -> None:
    def as_group(number: int) -> dict[str, Any]:
        return {"podTemplate": {"securityContext": {"fsGroup": number}}}

    kubectl.apply_tier(body("tried", proof={"preflight": "Always"}, engine=as_group(7)))
    until(lambda: kubectl.get(BATCH, "jobs", "tried-preflight"), seconds=SLOW)
    kubectl.merge(TIERS, "kvcachetiers", "tried", {"spec": {"engine": as_group(8)}})
    until(lambda: kubectl.is_ready("tried"), seconds=SLOW)
    assert kubectl.condition("StorageChecked", "tried")["status"] == "True"


LIFECYCLES: tuple[Callable[[Client], None], ...] = (
    becomes_ready,
    scales_down_to_one_and_up,
    is_repaired,
    does_without_its_janitor_and_with_it_again,
    grows_its_claim,
    is_routed_and_not_any_more,
    is_closed_off_and_opened,
    cannot_mount_its_volume,
    goes,
    is_refused,
    finds_a_lease_in_its_way,
    has_its_volume_tried,
)


REPLAYED_ELSEWHERE = ("update leases",)
"""By the janitors, whose roles may not say more than the operator's own does."""


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServerThread]:
    # What is made is an hour old at once: a pod that waits for its volume has waited for long.
    before = (datetime.now(UTC) - timedelta(hours=1)).strftime("%Y-%m-%dT%H:%M:%SZ")
    monkeypatch.setattr(writes, "timestamp", lambda: before)
    with ApiServerThread() as server:
        server.create(tier_definition())
        server.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": SYSTEM}})
        yield server


def is_operator(request: Any) -> bool:
    return request.headers.get("User-Agent") != "test"


def operators_own(manifests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the roles that are bound to the operator; others are for people."""
    bound = {found["roleRef"]["name"] for found in manifests if found["kind"].endswith("RoleBinding")}
    return [found for found in manifests if "rules" in found and found["metadata"]["name"] in bound]


def replay(api: ApiServerThread, tmp_path: Path, values: dict[str, Any]) -> Rbac:
    """Run the operator as the chart does, with no more rights than it grants, through every lifecycle."""
    manifests = render(values)

    def exists(target: Any) -> bool:
        plural = f"{target.plural}.{target.group}".rstrip(".")
        try:
            return api.server.get(plural, target.namespace, target.name) is not None
        except KeyError:
            return False  # no such kind yet

    rbac = Rbac(operators_own(manifests), is_operator, exists)
    api.server.faults.append(rbac.fault)
    deployment = next(found for found in manifests if found["kind"] == "Deployment")
    container = deployment["spec"]["template"]["spec"]["containers"][0]
    given = {entry["name"]: entry.get("value", SYSTEM) for entry in container["env"]}
    arguments = [word for word in container["args"] if not word.startswith(("--liveness", "--metrics", "--log"))]
    environment = {**os.environ, **given, "KUBECONFIG": str(api.write_kubeconfig(tmp_path / "kubeconfig"))}
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "kvtier_cli", *arguments], env=environment, stdout=log, stderr=log
        )
    kubectl = Client(api.url)
    try:
        with Controllers(kubectl, api):
            for lifecycle in LIFECYCLES:
                lifecycle(kubectl)
        process.send_signal(signal.SIGTERM)
        assert process.wait(SLOW) == 0
    finally:
        process.kill()
        process.wait()
    return rbac


@pytest.mark.parametrize(
    "values", [{}, {"scope": "Namespaced", "namespaces": [NAMESPACE]}], ids=["cluster", "namespaced"]
)
def test_the_roles_grant_what_the_lifecycles_need_and_nothing_else(
    api: ApiServerThread, tmp_path: Path, values: dict[str, Any]
) -> None:
    rbac = replay(api, tmp_path, values)
    assert rbac.denied == []
    unused = {str(grant) for grant in rbac.grants - rbac.used}
    assert {grant for grant in unused if not grant.startswith(REPLAYED_ELSEWHERE)} == set()


def built_in(*gathered: str) -> dict[str, Any]:
    """Return one of Kubernetes' own roles for people; its own rules do not matter here."""
    selectors = [{"matchLabels": {f"rbac.authorization.k8s.io/aggregate-to-{each}": "true"}} for each in gathered]
    rule = {"clusterRoleSelectors": selectors}
    return {"kind": "ClusterRole", "metadata": {"name": gathered[0]}, "aggregationRule": rule}


BUILT_IN = {"view": built_in("view"), "edit": built_in("edit", "view"), "admin": built_in("admin", "edit", "view")}


def acts_as(api: ApiServerThread, role: str, values: dict[str, Any]) -> Client:
    """Return the hands of who has one of Kubernetes' own roles in one namespace, and nothing else."""
    given = aggregated(BUILT_IN[role], render(values))
    in_namespace = {**given, "kind": "Role", "metadata": {"name": role, "namespace": NAMESPACE}}
    api.server.faults.append(Rbac([in_namespace], lambda request: not is_operator(request)).fault)
    return Client(api.url)


@pytest.mark.parametrize("role", ["edit", "admin"])
def test_who_may_edit_a_namespace_makes_scales_and_deletes_tiers_in_it(api: ApiServerThread, role: str) -> None:
    person = acts_as(api, role, {})
    person.apply_tier(body())
    assert person.names(TIERS, "kvcachetiers") == {"llama"}
    person.merge(TIERS, "kvcachetiers", "llama", {"spec": {"replicas": 3}}, sub="/scale")
    person.merge(TIERS, "kvcachetiers", "llama", {"spec": {"disk": {"mode": "Bypass"}}})
    person.delete(TIERS, "kvcachetiers", "llama")
    elsewhere = f"{TIERS}/namespaces/elsewhere/kvcachetiers"
    with pytest.raises(HTTPError, match="403"):
        person.call("POST", elsewhere, {**body(), "metadata": {"name": "llama", "namespace": "elsewhere"}})
    with pytest.raises(HTTPError, match="403"):
        person.merge(TIERS, "kvcachetiers", "llama", {"status": {"conditions": []}}, sub="/status")


@pytest.mark.parametrize(("role", "values"), [("view", {}), ("admin", {"rbac": {"aggregate": False}})])
def test_who_may_only_view_or_gets_no_right_from_the_chart_changes_no_tier(
    api: ApiServerThread, role: str, values: dict[str, Any]
) -> None:
    person = acts_as(api, role, values)
    if not values:
        assert person.names(TIERS, "kvcachetiers") == set()
    with pytest.raises(HTTPError, match="403"):
        person.apply_tier(body())
