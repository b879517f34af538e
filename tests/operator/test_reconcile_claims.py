# SPDX-License-Identifier: Apache-2.0
"""Whose claim it is, what may become of it, and that nobody loses data by an edit."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fake_cluster import FakeCluster, condition, edited, reconciled, run
from test_reconcile import CHILDREN
from tiers import CLAIM, CONFIG, DEPLOYMENT, JANITOR, RUNNING, TIER_KEY, claim, pod, tier, waiting

from kvtier_operator.errors import ClusterError, ClusterForbidden, ClusterRejected
from kvtier_operator.names import ObjectKey, key_of


def test_a_retained_claim_is_taken_up_by_the_next_tier_of_the_name() -> None:
    cluster = reconciled()
    cluster.remove(TIER_KEY)
    assert cluster.existing() == {CLAIM}
    before = cluster.look(CLAIM)
    cluster.put(tier())
    run(cluster)
    assert cluster.look(CLAIM)["metadata"]["uid"] == before["metadata"]["uid"]
    assert cluster.existing() == CHILDREN | {TIER_KEY}


def test_a_claim_goes_with_its_tier_only_under_deletion_policy_delete() -> None:
    cluster = reconciled(volume={"deletionPolicy": "Delete"})
    edited(cluster, volume={"deletionPolicy": "Retain"})
    assert "ownerReferences" not in cluster.look(CLAIM)["metadata"]
    edited(cluster, volume={"deletionPolicy": "Delete"})
    cluster.remove(TIER_KEY)
    assert cluster.existing() == set()


def test_an_existing_claim_is_never_written() -> None:
    cluster = FakeCluster(tier(volume={"claim": None, "existingClaim": "mine"}), claim("mine", "ReadWriteMany"))
    key = ObjectKey(api_version="v1", kind="PersistentVolumeClaim", name="mine")
    before = cluster.look(key)
    run(cluster)
    assert cluster.look(key) == before
    assert not [call for call in cluster.writes() if "PersistentVolumeClaim" in call[1]]
    assert condition(cluster, "VolumeBound")["status"] == "True"
    cluster.remove(TIER_KEY)
    assert cluster.existing() == {key}


@pytest.mark.parametrize(
    ("existing", "reason", "words"),
    [
        ([], "ClaimMissing", "no PersistentVolumeClaim 'mine'"),
        ([claim("mine", "ReadWriteOncePod")], "ClaimNotShared", "set spec.replicas to 1"),
    ],
    ids=["it does not exist", "one pod can mount it"],
)
def test_an_existing_claim_that_cannot_serve_is_refused_with_a_remedy(
    existing: list[dict[str, Any]], reason: str, words: str
) -> None:
    cluster = FakeCluster(tier(volume={"claim": None, "existingClaim": "mine"}), *existing)
    run(cluster)
    assert DEPLOYMENT not in cluster.existing()
    assert condition(cluster, "Ready")["reason"] == reason
    assert words in condition(cluster, "Ready")["message"]


@pytest.mark.parametrize(
    ("change", "reason", "words"),
    [
        ({"size": "1Ti"}, "ClaimCannotShrink", "1Ti is less than the 2Ti"),
        ({"storageClassName": "nfs"}, "ClaimImmutable", "'cephfs', not 'nfs'"),
        ({"accessModes": ["ReadWriteMany", "ReadWriteOnce"]}, "ClaimImmutable", "accessModes"),
    ],
    ids=["smaller", "another class", "another mode"],
)
def test_a_change_that_a_claim_cannot_make_is_refused_and_holds_up_nothing_else(
    change: dict[str, Any], reason: str, words: str
) -> None:
    cluster = reconciled()
    before = cluster.look(CLAIM)
    assert edited(cluster, replicas=1, volume={"claim": change}).written == (DEPLOYMENT,)
    assert cluster.look(CLAIM) == before
    assert condition(cluster, "Ready")["reason"] == reason
    assert words in condition(cluster, "Ready")["message"]


@pytest.mark.parametrize("error", [ClusterForbidden("cannot grow"), ClusterRejected("cannot grow")], ids=str)
def test_a_claim_that_cannot_grow_is_told_and_holds_up_nothing_else(error: ClusterError) -> None:
    cluster = reconciled()
    edited(cluster, replicas=5, volume={"claim": {"size": "3Ti"}})
    first = cluster.calls.index(("apply", str(CLAIM))) + 1
    cluster.edit(TIER_KEY, {"spec": {"replicas": 6, "volume": {"claim": {"size": "4Ti"}}}})
    cluster.fail = (first, error)
    outcome = run(cluster)
    assert (outcome.written, outcome.failure) == ((DEPLOYMENT,), error)
    assert condition(cluster, "Ready")["message"] == "cannot grow"


def grown_by_hand(size: str = "4Ti") -> FakeCluster:
    """Return a tier whose claim somebody has made larger than the spec says."""
    cluster = reconciled()
    cluster.edit(CLAIM, {"spec": {"resources": {"requests": {"storage": size}}}, "status": {"phase": "Bound"}})
    return cluster


def test_a_tier_whose_claim_was_grown_by_hand_is_bypassed_and_scaled_as_its_spec_says() -> None:
    cluster = grown_by_hand()
    assert set(edited(cluster, replicas=3, disk={"mode": "Bypass"}).written) == {CONFIG, DEPLOYMENT}
    assert json.loads(cluster.look(CONFIG)["data"]["live.json"])["mode"] == "Bypass"
    assert cluster.look(DEPLOYMENT)["spec"]["replicas"] == 3
    assert cluster.look(CLAIM)["spec"]["resources"]["requests"]["storage"] == "4Ti"
    assert condition(cluster, "Ready")["reason"] == "ClaimCannotShrink"
    assert "2Ti is less than the 4Ti that claim 'llama-blocks' has" in condition(cluster, "Ready")["message"]


def test_a_tier_made_anew_over_a_claim_that_was_grown_by_hand_gets_its_engines() -> None:
    cluster = grown_by_hand()
    cluster.remove(TIER_KEY)
    assert cluster.existing() == {CLAIM}
    cluster.put(tier())
    run(cluster)
    assert cluster.existing() == CHILDREN | {TIER_KEY}


@pytest.mark.parametrize(("mode", "is_beside"), [("ReadWriteOnce", True), ("ReadWriteMany", False)])
def test_janitor_and_replicas_run_on_one_node_where_a_claim_of_the_users_is_of_one_node(
    mode: str, is_beside: bool
) -> None:
    volume = {"claim": None, "existingClaim": "mine"}
    cluster = FakeCluster(tier(replicas=2, volume=volume), claim("mine", mode))
    assert run(cluster).failure is None
    found, engine = (cluster.look(key)["spec"]["template"]["spec"] for key in (JANITOR, DEPLOYMENT))
    assert ("affinity" in found, "nvidia.com/gpu" in str(found["tolerations"])) == (is_beside, is_beside)
    assert engine.get("affinity") == found.get("affinity")


def test_an_affinity_of_the_users_stays_beside_the_one_to_replicas_on_a_volume_of_one_node() -> None:
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    own = {"labelSelector": {"matchLabels": {"app": "cache"}}, "topologyKey": "zone"}
    affinity = {"podAffinity": {required: [own]}, "podAntiAffinity": {required: []}}
    volume = {"claim": {"size": "1Ti", "accessModes": ["ReadWriteOnce"]}}
    cluster = FakeCluster(tier(replicas=2, volume=volume, engine={"podTemplate": {"affinity": affinity}}))
    run(cluster)
    pod_spec = cluster.look(DEPLOYMENT)["spec"]["template"]["spec"]
    first, ours = pod_spec["affinity"]["podAffinity"][required]
    assert first == own
    assert ours["labelSelector"] == cluster.look(DEPLOYMENT)["spec"]["selector"]
    assert ours["topologyKey"] == "kubernetes.io/hostname"
    assert pod_spec["affinity"]["podAntiAffinity"] == {required: []}


def test_the_janitor_lets_go_of_a_volume_of_one_node_that_an_engine_elsewhere_waits_for() -> None:
    volume = {"claim": None, "existingClaim": "mine"}
    cluster = FakeCluster(tier(replicas=1, volume=volume), claim("mine", "ReadWriteOnce"))
    run(cluster)
    stuck = pod("moved", cluster.look(DEPLOYMENT)["spec"]["template"], **waiting("ContainerCreating"))
    stuck["metadata"] |= {"uid": "pod-moved", "creationTimestamp": "2026-01-01T11:00:00Z"}
    key = key_of(cluster.put(stuck))
    cluster.events_about("pod-moved", {"reason": "FailedAttachVolume", "message": "Multi-Attach error for volume"})
    for status, replicas in ({}, 0), (RUNNING, 1):
        cluster.edit(key, {"status": status})
        run(cluster)
        assert cluster.look(JANITOR)["spec"]["replicas"] == replicas


def test_a_deleted_claim_is_let_go_by_every_pod_of_the_tier_once_no_engine_is_wanted() -> None:
    cluster = reconciled(proof={"preflight": "Always"})
    run(cluster)
    preflight = ObjectKey(api_version="batch/v1", kind="Job", name="llama-preflight")
    assert preflight in cluster.existing()
    cluster.edit(CLAIM, {"metadata": {"deletionTimestamp": "2026-01-01T11:00:00Z"}, "status": {"phase": "Bound"}})
    run(cluster)
    assert preflight not in cluster.existing()
    assert cluster.look(JANITOR)["spec"]["replicas"] == 1
    assert "set spec.replicas to 0, which stops the janitor" in condition(cluster, "VolumeBound")["message"]
    edited(cluster, replicas=0)
    assert cluster.look(JANITOR)["spec"]["replicas"] == 0
    assert "names others that use it" in condition(cluster, "VolumeBound")["message"]
    assert run(cluster).written == ()
    cluster.remove(CLAIM)
    run(cluster)
    run(cluster)
    assert cluster.look(JANITOR)["spec"]["replicas"] == 1
    assert {CLAIM, preflight} <= cluster.existing()
