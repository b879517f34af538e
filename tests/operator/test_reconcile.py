# SPDX-License-Identifier: Apache-2.0
"""A pass over a tier: twice is once, a failure stops one part until the next pass, no object of others is touched."""

from __future__ import annotations

import json
import re
from datetime import timedelta
from typing import Any

import pytest
from fake_cluster import FakeCluster, condition, edited, reconciled, run, serving
from test_nodes import GIB, node, share
from tiers import (
    CLAIM,
    CONFIG,
    DEPLOYMENT,
    JANITOR,
    JANITOR_CONFIG,
    JANITOR_SERVICE,
    LEASE,
    NAMESPACE,
    NOON,
    SERVICE,
    TIER_KEY,
    merge,
    pod,
    tier,
    waiting,
)

from kvtier_connector.contract import engine
from kvtier_operator import names, settings
from kvtier_operator.errors import ClusterConflict, ClusterForbidden, ClusterUnavailable
from kvtier_operator.inventory import Inventory
from kvtier_operator.names import ObjectKey
from kvtier_operator.reconcile import ReconcileResult

CHILDREN = {
    CLAIM,
    CONFIG,
    DEPLOYMENT,
    SERVICE,
    ObjectKey(api_version="v1", kind="ServiceAccount", name="llama-engine"),
    ObjectKey(api_version="policy/v1", kind="PodDisruptionBudget", name="llama-engine"),
    JANITOR,
    JANITOR_CONFIG,
    JANITOR_SERVICE,
    ObjectKey(api_version="v1", kind="ServiceAccount", name="llama-janitor"),
    LEASE,
    ObjectKey(api_version=names.RBAC, kind="Role", name="llama-janitor"),
    ObjectKey(api_version=names.RBAC, kind="RoleBinding", name="llama-janitor"),
}


def test_a_new_tier_gets_all_its_children_and_a_status_and_a_second_pass_writes_nothing() -> None:
    cluster = FakeCluster(tier())
    outcome = run(cluster)
    assert (cluster.existing(), set(outcome.written), outcome.failure) == (CHILDREN | {TIER_KEY}, CHILDREN, None)
    assert condition(cluster, "Ready")["reason"] == "ClaimPending"
    version = cluster.look(TIER_KEY)["metadata"]["resourceVersion"]
    assert run(cluster).written == ()
    assert [verb for verb, _ in cluster.writes()] == ["apply"] * (len(CHILDREN) - 1)
    assert cluster.look(TIER_KEY)["metadata"]["resourceVersion"] == version
    assert len(cluster.posted) == 1


@pytest.mark.parametrize(
    ("edit", "written"),
    [
        ({"replicas": 5}, {DEPLOYMENT}),
        ({"volume": {"claim": {"size": "3Ti"}}}, {CLAIM}),
        # What engines read at their start replaces them.
        ({"disk": {"admission": {"minReuse": 2}}}, {CONFIG, DEPLOYMENT}),
    ],
    ids=["replicas", "claim", "admission"],
)
def test_an_edit_changes_only_what_it_concerns(edit: dict[str, Any], written: set[ObjectKey]) -> None:
    cluster = reconciled()
    before = cluster.look(DEPLOYMENT)["spec"]
    assert set(edited(cluster, **edit).written) == written
    after = cluster.look(DEPLOYMENT)["spec"]
    assert after["replicas"] == edit.get("replicas", 2)
    assert (after["template"] != before["template"]) is (CONFIG in written)


@pytest.mark.parametrize("error", [ClusterUnavailable("500"), ClusterConflict("409"), ClusterForbidden("403")], ids=str)
def test_a_failure_at_any_call_is_repaired_by_the_next_pass(error: Any) -> None:
    healthy = FakeCluster(tier())
    run(healthy)
    calls = len(healthy.calls)
    unwanted = {
        number
        for number, call in enumerate(healthy.calls, 1)
        if call == ("get", "Job/llama-preflight") or call[1].startswith("NetworkPolicy/")
    }
    for number in range(1, calls + 1):
        cluster = FakeCluster(tier())
        cluster.fail = (number, error)
        outcome = run(cluster)
        # No Job and no policy is wanted here: a pass misses nothing where none may be read, before or after its writes.
        is_missed = number not in unwanted or not isinstance(error, ClusterForbidden)
        assert outcome.failure is (error if is_missed else None)
        cluster.fail = None
        assert run(cluster).failure is None
        assert cluster.existing() == healthy.existing()
        assert condition(cluster, "Ready")["reason"] == condition(healthy, "Ready")["reason"]


def test_a_failure_is_told_once_when_it_lasts_whatever_its_words_are() -> None:
    cluster, told = reconciled(), []
    for attempt, port in ((1, 40000), (3, 40001), (5, 40002), (5, 40003)):
        why = f"cannot apply Service/llama-engine: read tcp 10.0.0.1:{port}: connection reset"
        cluster.fail = (9, ClusterUnavailable(why))
        assert run(cluster, attempt=attempt).failure is not None
        told.append((condition(cluster, "Ready")["reason"], condition(cluster, "Ready")["message"]))
    assert told[0][0] == "ClaimPending"
    assert told[1] == told[2] == told[3]
    assert (told[1][0], "40001" in told[1][1], "Service/llama-engine" in told[1][1]) == ("ApplyFailed", True, True)


def of_somebody(key: ObjectKey) -> dict[str, Any]:
    return {"apiVersion": key.api_version, "kind": key.kind, "metadata": {"name": key.name, "namespace": NAMESPACE}}


@pytest.mark.parametrize("key", sorted(CHILDREN), ids=str)
def test_an_object_of_somebody_else_is_refused_and_left_as_it_is(key: ObjectKey) -> None:
    cluster = FakeCluster(tier(), of_somebody(key))
    before = cluster.look(key)
    assert run(cluster).failure is None
    assert cluster.look(key) == before
    assert cluster.existing() == (CHILDREN - waiting_for(key)) | {TIER_KEY, key}
    assert condition(cluster, "Ready")["reason"] == "ObjectNotOurs"
    assert str(key) in condition(cluster, "Ready")["message"]
    cluster.remove(key)
    run(cluster)
    assert cluster.existing() == CHILDREN | {TIER_KEY}


def waiting_for(key: ObjectKey) -> set[ObjectKey]:
    """Return what cannot be made while an object of somebody else stands there."""
    if key in JANITORS:
        return set(JANITORS)
    if key == CLAIM:
        return {DEPLOYMENT, *JANITORS}
    return {DEPLOYMENT} if key in {CONFIG, ACCOUNT, DEPLOYMENT} else {key}


JANITORS = sorted(key for key in CHILDREN if key.name == "llama-janitor")


@pytest.mark.parametrize("key", JANITORS, ids=str)
def test_an_object_under_the_name_of_a_janitor_holds_up_no_tier_that_has_none(key: ObjectKey) -> None:
    cluster = FakeCluster(tier(janitor={"enabled": False}), of_somebody(key))
    before = cluster.look(key)
    run(cluster)
    assert cluster.look(key) == before
    assert cluster.existing() == CHILDREN - set(JANITORS) | {TIER_KEY, key}
    assert condition(cluster, "Ready")["reason"] != "ObjectNotOurs"
    edited(cluster, janitor={"enabled": True})
    assert condition(cluster, "Ready")["reason"] == "ObjectNotOurs"
    assert cluster.look(key) == before


@pytest.mark.parametrize(
    ("metadata", "reason", "words"),
    [
        # Its children are of a tier of the same name that is gone.
        ({"uid": "another"}, "ObjectNotOurs", ""),
        (
            {"annotations": {names.ANNOTATION_PAUSED: "yes"}},
            "SpecInvalid",
            "metadata.annotations[kvtier.dev/paused]: must be",
        ),
    ],
)
def test_what_stands_in_the_metadata_and_cannot_be_honoured_is_told(metadata: Any, reason: str, words: str) -> None:
    cluster = reconciled()
    cluster.edit(TIER_KEY, {"metadata": metadata})
    run(cluster)
    assert condition(cluster, "Ready")["reason"] == reason
    assert condition(cluster, "Ready")["message"].startswith(words)


@pytest.mark.parametrize("key", sorted(CHILDREN - {CLAIM, LEASE}), ids=str)
def test_a_child_that_lost_its_labels_or_is_gone_gets_them_back(key: ObjectKey) -> None:
    cluster = reconciled()
    labels = cluster.look(key)["metadata"]["labels"]
    cluster.edit(key, {"metadata": {"labels": dict.fromkeys(labels)}})
    assert run(cluster).written == (key,)
    assert cluster.look(key)["metadata"]["labels"] == labels
    cluster.remove(key)
    assert run(cluster).written == (key,)


@pytest.mark.parametrize("has_owner", [True, False], ids=["with its owner", "labels alone"])
@pytest.mark.parametrize("key", [SERVICE, CONFIG, DEPLOYMENT, CLAIM], ids=str)
def test_a_copy_of_an_object_under_another_name_is_never_deleted(key: ObjectKey, *, has_owner: bool) -> None:
    cluster = reconciled()
    # As `kubectl expose` does, or a person who makes a canary of the engines by hand.
    copied = merge(cluster.look(key), {"metadata": {"name": f"{key.name}-canary", "uid": None}})
    if not has_owner:
        copied["metadata"].pop("ownerReferences", None)
    theirs = cluster.put(copied)
    outcome = run(cluster)
    assert (outcome.written, outcome.deleted, outcome.failure) == ((), (), None)
    assert cluster.look(names.key_of(theirs)) == theirs


def test_what_has_no_owner_is_adopted_where_it_is_rendered_and_otherwise_never_deleted() -> None:
    # As a backup restores it.
    cluster = reconciled()
    cluster.edit(JANITOR_SERVICE, {"metadata": {"ownerReferences": None}})
    assert run(cluster).written == (JANITOR_SERVICE,)
    assert JANITOR_SERVICE in {key for key, _ in edited(cluster, janitor={"enabled": False}).deleted}
    # As people make it under a name that the tier does not use now.
    theirs = cluster.put(merge(cluster.look(SERVICE), {"metadata": {"name": "llama-janitor", "uid": None}}))
    cluster.edit(names.key_of(theirs), {"metadata": {"ownerReferences": None}})
    assert run(cluster).deleted == ()
    assert JANITOR_SERVICE in cluster.existing()


def test_each_deletion_is_told_in_an_event_but_no_claim_is_ever_deleted() -> None:
    cluster = reconciled()
    deleted = {key for key, _ in edited(cluster, janitor={"enabled": False}).deleted}
    assert deleted == set(JANITORS)
    assert cluster.existing() == CHILDREN - deleted | {TIER_KEY}
    told = [event["message"] for event in cluster.posted if event["reason"] == "Deleted"]
    assert {str(key) for key in deleted} == {message.split()[1].rstrip(":") for message in told}
    assert len(told) == len(deleted)
    assert "deleted Service/llama-janitor: the spec does not ask for it any more" in told
    edited(cluster, volume={"existingClaim": "mine", "claim": None})
    assert CLAIM in cluster.existing()


@pytest.mark.parametrize(
    ("pause", "go_on"),
    [
        ({"spec": {"paused": True}}, {"spec": {"paused": False}}),
        *[tuple({"metadata": {"annotations": {names.ANNOTATION_PAUSED: word}}} for word in ("true", "false"))],
    ],
)
def test_a_paused_tier_keeps_its_children_as_they_are_and_still_reports(pause: Any, go_on: Any) -> None:
    cluster = reconciled()
    cluster.edit(TIER_KEY, pause)
    cluster.edit(SERVICE, {"spec": {"sessionAffinity": "ClientIP"}})
    assert edited(cluster, replicas=7).written == ()
    assert {verb for verb, _ in cluster.writes()} == {"patch_status", "post_event"}
    assert condition(cluster, "Paused")["status"] == "True"
    cluster.edit(TIER_KEY, go_on)
    assert set(run(cluster).written) == {DEPLOYMENT, SERVICE}


def test_a_tier_that_goes_is_left_alone_and_what_a_controller_reports_is_not_our_write() -> None:
    cluster = FakeCluster()
    assert run(cluster) == ReconcileResult(exists=False)
    going = tier()
    going["metadata"] |= {"deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": ["foregroundDeletion"]}
    cluster = FakeCluster(going)
    assert run(cluster) == ReconcileResult(exists=False)
    assert cluster.writes() == []
    cluster = BusyCluster(tier())
    run(cluster)
    cluster.is_busy = True
    assert run(cluster).written == ()


class BusyCluster(FakeCluster):
    """A cluster whose controllers write a status between any look and the next write."""

    is_busy = False

    def apply(self, manifest: Any, *, over: str | None) -> Any:
        if self.is_busy and manifest["kind"] == "Deployment":
            key, annotation = names.key_of(manifest), {"deployment.kubernetes.io/revision": "1"}
            self.edit(key, {"status": {"replicas": 1}, "metadata": {"annotations": annotation}})
        return super().apply(manifest, over=over)


@pytest.mark.parametrize(("age", "words"), [(5, ""), (60, "Multi-Attach error")])
def test_a_pod_that_its_node_cannot_start_is_asked_about_after_a_while(age: int, words: str) -> None:
    cluster = reconciled()
    creating = waiting("ContainerCreating", container="install-connector")
    stuck = pod("a", cluster.look(DEPLOYMENT)["spec"]["template"], **creating)
    born = (NOON - timedelta(seconds=age)).strftime("%Y-%m-%dT%H:%M:%SZ")
    stuck["metadata"] |= {"uid": "pod-a", "creationTimestamp": born}
    cluster.put(stuck)
    cluster.events_about("pod-a", {"reason": "FailedAttachVolume", "message": "Multi-Attach error for volume"})
    run(cluster)
    assert (("events", "pod-a") in cluster.calls) is bool(words)
    assert words in condition(cluster, "EnginesReady")["message"]


def test_pods_listen_where_the_cluster_reaches_them_and_engines_that_run_stay_as_they_are() -> None:
    def hosts(cluster: FakeCluster) -> dict[str, list[str]]:
        found = {key.name: json.dumps(cluster.look(key)["spec"]) for key in (DEPLOYMENT, JANITOR)}
        return {name: re.findall(r"--host=([^\"]*)", text) for name, text in found.items()}

    cluster = FakeCluster(tier())
    run(cluster, listen_host=names.EVERY_ADDRESS)
    # The engine, and who asks it whether it is ready.
    assert hosts(cluster) == {"llama-engine": ["::", "::"], "llama-janitor": ["::"]}
    run(cluster)
    assert hosts(cluster) == {"llama-engine": ["::", "::"], "llama-janitor": ["0.0.0.0"]}


@pytest.mark.parametrize(
    ("address", "host"), [("10.96.0.1", "0.0.0.0"), ("fd00:10:96::1", "::"), ("", "0.0.0.0"), ("kubernetes", "0.0.0.0")]
)
def test_what_pods_listen_on_is_of_the_family_that_the_cluster_prefers(address: str, host: str) -> None:
    assert settings.parse({"KUBERNETES_SERVICE_HOST": address}).listen_host == host
    assert settings.parse({}).listen_host == "0.0.0.0"


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
def test_a_forbidden_kind_holds_up_its_users_and_is_named(kind: str, waiting: set[ObjectKey], verbs: set[str]) -> None:
    cluster = FakeCluster(tier())
    cluster.broken[kind] = (verbs, forbidden(kind))
    assert isinstance(run(cluster).failure, ClusterForbidden)
    assert CHILDREN - waiting - {*JANITORS} <= cluster.existing()
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


def test_an_outage_is_not_waited_for_and_another_missing_right_is_told_in_its_place() -> None:
    cluster = FakeCluster(tier())
    cluster.broken = {key.kind: ({"apply"}, ClusterUnavailable("no route to host")) for key in CHILDREN}
    assert isinstance(run(cluster).failure, ClusterUnavailable)
    assert len(cluster.writes()) == 3
    cluster = reconciled()
    for kind in ("PodDisruptionBudget", "Service"):
        cluster.broken = {kind: ({"get"}, forbidden(kind))}
        run(cluster)
        assert f"{kind} is forbidden" in condition(cluster, "Ready")["message"]


@pytest.mark.parametrize(
    ("change", "replicas"),
    [({"volume": {"claim": None, "existingClaim": "nowhere"}}, 2), ({"cpu": {"size": None, "fraction": "60%"}}, 1)],
    ids=["no claim", "nodes unknown"],
)
def test_engines_that_run_follow_the_mode_of_a_spec_that_is_refused(change: dict[str, Any], replicas: int) -> None:
    cluster = reconciled()
    before, config = cluster.look(DEPLOYMENT), cluster.look(CONFIG)["data"][engine.CONFIG_FILE]
    edited(cluster, **change, replicas=1, disk={"mode": "Bypass"})
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


def test_a_share_is_decided_once_there_is_a_node_and_stays_while_another_one_cannot_be() -> None:
    cluster, now = FakeCluster(share()), [0.0]
    inventory = Inventory(cluster, is_allowed=True, clock=lambda: now[0])
    outcome = run(cluster, inventory=inventory)
    assert DEPLOYMENT in cluster.existing()
    assert outcome.waits_for_nodes
    fits = condition(cluster, "SizingFits")
    assert (fits["status"], fits["reason"]) == ("False", "NoNodeMatches")
    assert "until then an engine asks for 1 GiB, so that its pod waits" in fits["message"]
    there = names.key_of(cluster.put(node()))
    now[0] = 1000.0
    outcome = run(cluster, inventory=inventory)
    assert (outcome.written, outcome.waits_for_nodes) == ((DEPLOYMENT,), False)
    assert cluster.look(TIER_KEY)["status"]["sizing"]["cpuBytes"] == 128 * GIB
    cluster.remove(there)
    now[0] = 2000.0
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
