# SPDX-License-Identifier: Apache-2.0
"""A new claim is tried before the first engine starts on it, once, and engines that run are never held up."""

from __future__ import annotations

import json
from typing import Any

import kubernetes_schemas
import pytest
from fake_cluster import FakeCluster, condition, edited, reconciled, run, status
from test_golden import VERSIONS
from test_reconcile import of_somebody
from tiers import CLAIM, DEPLOYMENT, NAMESPACE, SERVICE, TIER_KEY, ready_deployment, tier

from kvtier_operator import names
from kvtier_operator.errors import ClusterForbidden, ClusterUnavailable
from kvtier_operator.names import ObjectKey
from kvtier_operator.reconcile import PATIENCE

JOB = ObjectKey(api_version="batch/v1", kind="Job", name="llama-preflight")
GOOD = {
    "problem": "",
    "direct_io": True,
    "total_bytes": 1 << 40,
    "free_bytes": 1 << 39,
    "write_bytes_per_second": 1 << 30,
    "read_bytes_per_second": 2 << 30,
    "stat_microseconds": 400,
    "file_system": "NFS",
    "round_trip_microseconds": 900,
    "chosen": "reads go past the page cache: 500 MiB/s past the page cache and 300 MiB/s through it",
    "advice": "mount with nconnect=8: one connection carries less than the network does",
}
ALWAYS = {"proof": {"preflight": "Always"}}


def started() -> FakeCluster:
    """Return a cluster in which the Job of a new tier runs."""
    cluster = reconciled(**ALWAYS)
    run(cluster)
    return cluster


def ends(cluster: FakeCluster, code: int, message: str, name: str = "llama-preflight-1") -> None:
    job = cluster.look(JOB)
    terminated = {"exitCode": code, "message": message}
    cluster.put(
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": name,
                "namespace": NAMESPACE,
                "labels": job["spec"]["template"]["metadata"]["labels"],
                "ownerReferences": [{"uid": job["metadata"]["uid"], "controller": True}],
            },
            "spec": job["spec"]["template"]["spec"],
            "status": {"containerStatuses": [{"name": "preflight", "state": {"terminated": terminated}}]},
        }
    )


def ended(code: int, message: str | dict[str, Any]) -> FakeCluster:
    """Return a cluster in which the Job of a new tier has ended like this, and was looked at."""
    cluster = started()
    ends(cluster, code, message if isinstance(message, str) else json.dumps(message))
    run(cluster)
    return cluster


def test_engines_wait_until_the_volume_was_tried_and_everything_else_does_not() -> None:
    cluster = started()
    assert JOB in cluster.existing()
    assert SERVICE in cluster.existing()
    assert DEPLOYMENT not in cluster.existing()
    assert condition(cluster, "StorageChecked")["reason"] == "PreflightRunning"
    assert condition(cluster, "Reconciling")["status"] == "True"
    ends(cluster, 0, json.dumps(GOOD))
    assert DEPLOYMENT in run(cluster).written
    assert condition(cluster, "StorageChecked")["status"] == "True"
    assert "read 2 GiB/s" in condition(cluster, "StorageChecked")["message"]
    message = condition(cluster, "StorageChecked")["message"]
    assert message.startswith("NFS: engines can use the volume")
    assert "reads go past the page cache" in message
    assert "mount with nconnect=8" in message
    storage = status(cluster)["storage"]
    assert (storage["fileSystem"], storage["roundTripMicroseconds"]) == ("NFS", 900)
    assert (storage["readBytesPerSecond"], storage["directIo"], storage["statMicroseconds"]) == (2 << 30, True, 400)


def test_a_claim_that_was_found_good_is_not_looked_at_again_even_when_the_job_is_gone() -> None:
    cluster = ended(0, GOOD)
    cluster.remove(JOB)
    before = status(cluster)
    for _ in range(2):
        assert run(cluster).written == ()
    assert status(cluster)["storage"] == before["storage"]
    assert JOB not in cluster.existing()


def test_a_volume_that_cannot_be_used_keeps_engines_from_starting_and_says_what_to_do() -> None:
    cluster = ended(1, {**GOOD, "problem": "user 10001 may not write in /var/lib/kvtier: set fsGroup"})
    assert DEPLOYMENT not in cluster.existing()
    told = condition(cluster, "StorageChecked")
    assert (told["status"], told["reason"]) == ("False", "PreflightFailed")
    assert "set fsGroup" in told["message"]
    assert condition(cluster, "Ready")["reason"] == "PreflightFailed"
    assert condition(cluster, "Stalled")["status"] == "True"


@pytest.mark.parametrize("has_a_new_job", [True, False])
def test_a_failure_is_told_until_the_next_try_has_ended_and_then_engines_start(*, has_a_new_job: bool) -> None:
    cluster = ended(1, "Traceback: boom")
    if has_a_new_job:
        cluster.remove(JOB)
    run(cluster)
    assert JOB in cluster.existing()
    run(cluster)
    assert condition(cluster, "StorageChecked")["reason"] == "PreflightFailed"
    assert "boom" in condition(cluster, "StorageChecked")["message"]
    ends(cluster, 0, json.dumps(GOOD), name="llama-preflight-2")
    run(cluster)
    assert DEPLOYMENT in cluster.existing()
    assert "problem" not in status(cluster)["storage"]


SOME_NUMBERS = '{"problem": "", "read_bytes_per_second": 1048576, "free_bytes": true}'


@pytest.mark.parametrize("message", ["", "nonsense", "[1]", '{"total_bytes": "many"}', SOME_NUMBERS])
def test_a_result_is_taken_as_far_as_it_goes_and_lets_engines_start(message: str) -> None:
    cluster = ended(0, message)
    assert DEPLOYMENT in cluster.existing()
    assert status(cluster)["storage"].keys() == {"key", *(["readBytesPerSecond"] if message is SOME_NUMBERS else [])}
    assert ("read 1 MiB/s" in condition(cluster, "StorageChecked")["message"]) is (message is SOME_NUMBERS)


def test_a_job_that_gave_up_is_told_in_its_own_words() -> None:
    cluster = started()
    failed = {"type": "Failed", "status": "True", "message": "Job was active longer than specified deadline"}
    cluster.edit(JOB, {"status": {"conditions": [failed]}})
    run(cluster)
    assert "longer than specified deadline" in condition(cluster, "StorageChecked")["message"]


def test_where_pods_may_not_be_read_the_job_itself_tells_how_it_ended() -> None:
    cluster = FakeCluster(tier(**ALWAYS))
    cluster.broken["Pod"] = ({"list"}, ClusterForbidden("pods is forbidden"))
    for _ in range(2):
        run(cluster)
    assert (JOB in cluster.existing(), DEPLOYMENT in cluster.existing()) == (True, False)
    cluster.edit(JOB, {"status": {"conditions": [{"type": "Complete", "status": "True"}]}})
    run(cluster)
    assert DEPLOYMENT in cluster.existing()
    assert condition(cluster, "StorageChecked")["status"] == "True"
    assert "pods is forbidden" in condition(cluster, "Ready")["message"]


def test_another_claim_or_another_user_is_tried_anew() -> None:
    cluster = started()
    first = cluster.look(JOB)
    edited(cluster, engine={"podTemplate": {"securityContext": {"fsGroup": 7}}})
    run(cluster)
    second = cluster.look(JOB)
    assert first["metadata"]["annotations"] != second["metadata"]["annotations"]
    assert second["spec"]["template"]["spec"]["securityContext"]["fsGroup"] == 7


def test_engines_that_run_are_not_held_up_by_a_preflight() -> None:
    cluster = reconciled()
    cluster.edit(DEPLOYMENT, {"status": ready_deployment()})
    cluster.edit(CLAIM, {"status": {"phase": "Bound"}})
    assert DEPLOYMENT in edited(cluster, proof={"preflight": "Always"}, replicas=3).written
    ends(cluster, 1, json.dumps({**GOOD, "problem": "only 3 MiB are free"}))
    run(cluster)
    assert condition(cluster, "StorageChecked")["status"] == "False"
    assert condition(cluster, "Ready")["reason"] == "EnginesStarting"


@pytest.mark.parametrize("change", [{"proof": {"preflight": "Never"}}, {"disk": {"mode": "Bypass"}}])
def test_a_job_that_nobody_waits_for_is_deleted_once_and_never_made_without_need(change: dict[str, Any]) -> None:
    for cluster in (started(), reconciled(**{**ALWAYS, **change})):
        edited(cluster, **change)
        assert JOB not in cluster.existing()
        assert DEPLOYMENT in cluster.existing()
        assert condition(cluster, "StorageChecked")["reason"] == "PreflightOff"
        assert run(cluster).deleted == ()


def test_a_paused_tier_keeps_its_job_until_it_goes_on() -> None:
    cluster = started()
    cluster.edit(TIER_KEY, {"spec": {"paused": True, "proof": {"preflight": "Never"}}})
    for _ in range(2):
        run(cluster)
        assert JOB in cluster.existing()
    edited(cluster, paused=False)
    assert JOB not in cluster.existing()


def test_a_failure_at_any_call_is_repaired_by_the_next_pass() -> None:
    healthy = started()
    for number in range(1, 40):
        making, deleting = FakeCluster(tier(**ALWAYS)), started()
        deleting.edit(TIER_KEY, {"spec": {"proof": {"preflight": "Never"}}})
        for cluster, attempt in ((making, 1), (deleting, PATIENCE)):
            cluster.fail = (number, ClusterUnavailable("500"))
            run(cluster, attempt=attempt)
            cluster.fail = None
            run(cluster)
        assert JOB not in deleting.existing()
        run(making)
        assert making.existing() == healthy.existing()


@pytest.mark.parametrize(
    ("spec", "told"), [({}, "spec.proof.preflight"), (ALWAYS, "does not belong to this tier")], ids=["never", "always"]
)
def test_a_job_of_somebody_else_is_left(spec: dict[str, Any], told: str) -> None:
    cluster = FakeCluster(tier(**spec), of_somebody(JOB))
    before = cluster.look(JOB)
    for _ in range(2):
        run(cluster)
    assert cluster.look(JOB) == before
    assert told in condition(cluster, "StorageChecked")["message"]


@pytest.mark.parametrize("version", VERSIONS)
def test_the_job_is_what_kubernetes_knows_and_goes_where_engines_may_go_without_a_device(version: str) -> None:
    placed: dict[str, Any] = {
        "nodeSelector": {"zone": "b"},
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "affinity": {"nodeAffinity": {"x": {}}, "podAntiAffinity": {"y": {}}},
    }
    plain, cluster = started().look(JOB), reconciled(engine={"podTemplate": placed}, **ALWAYS)
    kubernetes_schemas.validate({field: plain[field] for field in plain if field != "status"}, version, strict=False)
    assert names.selector(names.tier_ref(tier())).items() - plain["spec"]["template"]["metadata"]["labels"].items()
    run(cluster)
    pod = cluster.look(JOB)["spec"]["template"]["spec"]
    # As the restricted standard allows.
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["containers"][0]["securityContext"]["readOnlyRootFilesystem"] is True
    of_devices = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    assert pod["nodeSelector"] == placed["nodeSelector"]
    assert pod["tolerations"] == [*placed["tolerations"], of_devices]
    assert pod["affinity"] == {"nodeAffinity": {"x": {}}}
    assert "nvidia.com/gpu" not in str(pod["containers"][0]["resources"])


@pytest.mark.parametrize(("phase", "asks"), [("Pending", True), ("Bound", False)])
def test_a_volume_of_one_node_is_made_where_an_engine_has_room(phase: str, asks: bool) -> None:
    volume = {"claim": {"accessModes": ["ReadWriteOnce"], "size": "10Gi"}}
    cluster = reconciled(replicas=1, volume=volume, **ALWAYS)
    cluster.edit(CLAIM, {"status": {"phase": phase}})
    run(cluster)
    job = cluster.look(JOB)
    requests = job["spec"]["template"]["spec"]["containers"][0]["resources"]["requests"]
    assert ("nvidia.com/gpu" in requests, requests["memory"] == "84736Mi") == (asks, asks)


@pytest.mark.parametrize("mode", ["ReadOnly", "Bypass"])
def test_a_volume_that_is_not_written_is_not_tried_and_holds_up_no_engine(mode: str) -> None:
    cluster = reconciled(disk={"mode": mode}, **ALWAYS)
    run(cluster)
    assert JOB not in cluster.existing()
    assert DEPLOYMENT in cluster.existing()
    assert f"spec.disk.mode is {mode}" in condition(cluster, "StorageChecked")["message"]
    edited(cluster, disk={"mode": "ReadWrite"})
    assert JOB in cluster.existing()
