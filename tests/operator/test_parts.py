# SPDX-License-Identifier: Apache-2.0
"""One failure stops one part: what needs it waits, the rest is done, and the live settings go out in any case."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest
from fake_cluster import FakeCluster, condition, edited, reconciled, run, serving
from test_nodes import GIB, node, share
from test_reconcile import CHILDREN, JANITORS, of_somebody
from tiers import CLAIM, CONFIG, DEPLOYMENT, JANITOR, NOON, TIER_KEY, pod, tier, waiting

from kvtier_connector.contract import engine
from kvtier_operator.errors import ClusterForbidden, ClusterUnavailable
from kvtier_operator.inventory import Inventory
from kvtier_operator.names import ObjectKey

BUDGET = ObjectKey(api_version="policy/v1", kind="PodDisruptionBudget", name="llama-engine")
ACCOUNT = ObjectKey(api_version="v1", kind="ServiceAccount", name="llama-engine")


def forbidden(kind: str) -> ClusterForbidden:
    return ClusterForbidden(f"403 {kind} is forbidden")


def mode(cluster: FakeCluster) -> str:
    return str(json.loads(cluster.look(CONFIG)["data"]["live.json"])["mode"])


@pytest.mark.parametrize("verbs", [{"apply"}, {"list", "get", "apply"}], ids=["write", "read and write"])
@pytest.mark.parametrize(
    ("kind", "waiting"),
    [
        ("PodDisruptionBudget", {BUDGET}),
        ("ServiceAccount", {ACCOUNT, DEPLOYMENT}),
        ("PersistentVolumeClaim", {CLAIM, DEPLOYMENT, *JANITORS}),
        ("Role", set()),
        ("RoleBinding", set()),
    ],
)
def test_a_kind_that_is_forbidden_holds_up_what_needs_it_and_is_named(
    kind: str, waiting: set[ObjectKey], verbs: set[str]
) -> None:
    cluster = FakeCluster(tier())
    cluster.broken[kind] = (verbs, forbidden(kind))
    outcome = run(cluster)
    assert isinstance(outcome.failure, ClusterForbidden)
    made = CHILDREN - waiting
    assert {key for key in made if key not in JANITORS} <= cluster.existing()
    assert not waiting & cluster.existing()
    ready = condition(cluster, "Ready")
    assert (ready["status"], ready["reason"]) == ("False", "ApplyFailed")
    assert f"{kind} is forbidden" in ready["message"]
    cluster.broken.clear()
    assert run(cluster).failure is None
    assert cluster.existing() == CHILDREN | {TIER_KEY}


@pytest.mark.parametrize("kind", sorted({key.kind for key in CHILDREN} | {"Pod"}))
def test_a_tier_that_runs_is_scaled_and_bypassed_whatever_else_is_forbidden(kind: str) -> None:
    cluster = reconciled()
    cluster.broken[kind] = ({"list", "get", "apply"}, forbidden(kind))
    edited(cluster, replicas=5, disk={"mode": "Bypass"})
    assert (mode(cluster) == "Bypass") is (kind != "ConfigMap")
    holds_engines = kind in {"ConfigMap", "Deployment", "ServiceAccount", "PersistentVolumeClaim"}
    assert (cluster.look(DEPLOYMENT)["spec"]["replicas"] == 5) is not holds_engines


def test_an_outage_is_not_waited_for_by_each_part() -> None:
    cluster = FakeCluster(tier())
    cluster.broken = {key.kind: ({"apply"}, ClusterUnavailable("no route to host")) for key in CHILDREN}
    assert isinstance(run(cluster).failure, ClusterUnavailable)
    assert len(cluster.writes()) == 3


@pytest.mark.parametrize(
    ("change", "replicas"),
    [({"volume": {"claim": None, "existingClaim": "nowhere"}}, 2), ({"cpu": {"size": None, "fraction": "60%"}}, 1)],
    ids=["no claim", "nodes unknown"],
)
def test_engines_that_run_follow_the_mode_of_a_spec_that_cannot_be_carried_out(
    change: dict[str, Any], replicas: int
) -> None:
    cluster = reconciled()
    before, config = cluster.look(DEPLOYMENT), cluster.look(CONFIG)["data"][engine.CONFIG_FILE]
    disk = {**change.get("disk", {}), "mode": "Bypass"}
    edited(cluster, **change, replicas=1, disk=disk)
    assert condition(cluster, "Ready")["status"] == "False"
    assert mode(cluster) == "Bypass"
    assert cluster.look(CONFIG)["data"][engine.CONFIG_FILE] == config
    assert cluster.look(DEPLOYMENT)["spec"] == {**before["spec"], "replicas": replicas}


def test_an_account_of_somebody_else_keeps_no_engine_that_runs_from_its_mode() -> None:
    cluster = reconciled()
    cluster.remove(ACCOUNT)
    cluster.put(of_somebody(ACCOUNT))
    assert edited(cluster, replicas=5, disk={"mode": "Bypass"}).written == (CONFIG,)
    assert condition(cluster, "Ready")["reason"] == "ObjectNotOurs"


def test_a_share_of_nodes_that_are_not_there_yet_makes_pods_that_wait_for_one() -> None:
    cluster, now = FakeCluster(share()), [0.0]
    inventory = Inventory(cluster, is_allowed=True, clock=lambda: now[0])
    outcome = run(cluster, inventory=inventory)
    assert DEPLOYMENT in cluster.existing()
    assert outcome.waits_for_nodes
    fits = condition(cluster, "SizingFits")
    assert (fits["status"], fits["reason"]) == ("False", "NoNodeMatches")
    assert "until then an engine asks for 1 GiB, so that its pod waits" in fits["message"]
    cluster.put(node())
    now[0] = 1000.0
    outcome = run(cluster, inventory=inventory)
    assert (outcome.written, outcome.waits_for_nodes) == ((DEPLOYMENT,), False)
    assert cluster.look(TIER_KEY)["status"]["sizing"]["cpuBytes"] == 128 * GIB


def test_a_share_that_was_decided_stays_while_another_one_cannot_be() -> None:
    cluster, now = FakeCluster(share(), node()), [0.0]
    inventory = Inventory(cluster, is_allowed=True, clock=lambda: now[0])
    run(cluster, inventory=inventory)
    cluster.remove(ObjectKey(api_version="v1", kind="Node", name=node()["metadata"]["name"]))
    now[0] = 1000.0
    cluster.edit(TIER_KEY, {"spec": {"engine": {"podTemplate": {"nodeSelector": {"pool": "new"}}}}})
    run(cluster, inventory=inventory)
    assert cluster.look(TIER_KEY)["status"]["sizing"]["cpuBytes"] == 128 * GIB
    assert cluster.look(DEPLOYMENT)["spec"]["template"]["spec"]["nodeSelector"] == {"pool": "new"}


@pytest.mark.parametrize(
    ("minutes", "verdict", "ready", "again"), [(1, "Unknown", "True", 360.0), (9, "False", "False", None)]
)
def test_a_janitor_without_a_ready_pod_is_dead_after_minutes_and_looked_at_again_by_then(
    minutes: int, verdict: str, ready: str, again: float | None
) -> None:
    cluster = reconciled()
    serving(cluster)
    since = (NOON - timedelta(minutes=minutes)).strftime("%Y-%m-%dT%H:%M:%SZ")
    away = {"type": "Available", "status": "False", "lastTransitionTime": since}
    cluster.edit(JANITOR, {"status": {"conditions": [away]}})
    assert run(cluster).requeue_after == again
    found = [condition(cluster, kind)["status"] for kind in ("JanitorHealthy", "Ready", "Available")]
    assert found == [verdict, ready, "True"]


def test_a_janitor_in_a_crash_loop_is_told_with_its_last_words() -> None:
    cluster = reconciled()
    serving(cluster)
    crashed = waiting("CrashLoopBackOff", container="janitor", exitCode=1)
    crashed["containerStatuses"][0]["lastState"]["terminated"]["message"] = "/blocks: Permission denied"
    cluster.put(pod("llama-janitor-0", cluster.look(JANITOR)["spec"]["template"], **crashed))
    run(cluster)
    assert condition(cluster, "Ready")["reason"] == "JanitorFailing"
    assert condition(cluster, "Available")["status"] == "True"
    assert "exit code 1: /blocks: Permission denied" in condition(cluster, "JanitorHealthy")["message"]
    assert "JanitorFailing" in {event["reason"] for event in cluster.posted}


def test_another_right_that_is_missing_is_told_in_the_place_of_the_one_before() -> None:
    cluster = reconciled()
    for kind in ("PodDisruptionBudget", "Service"):
        cluster.broken = {kind: ({"get"}, forbidden(kind))}
        run(cluster)
        assert f"{kind} is forbidden" in condition(cluster, "Ready")["message"]
