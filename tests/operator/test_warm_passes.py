# SPDX-License-Identifier: Apache-2.0
"""The Job that sends the prompts of spec.warm, through the passes that an edit of its tier takes."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from fake_cluster import FakeCluster
from tiers import CLAIM, DEPLOYMENT, NAMESPACE, NOON, TIER, TIER_KEY, pod, ready_deployment, tier

from kvtier_operator.names import Manifest, ObjectKey
from kvtier_operator.reconcile import reconcile

JOB = ObjectKey(api_version="batch/v1", kind="Job", name="llama-warm")
WARM = {"prompts": {"configMap": {"name": "prompts"}}, "required": True}
DONE = {"prompts": 3, "warm": 3, "blocks": 12, "bytes": 12000, "missing": 0, "failed": 0, "problem": ""}


def run(cluster: FakeCluster) -> None:
    assert reconcile(cluster, TIER, connector_image="connector:test", clock=lambda: NOON).failure is None


def look(cluster: FakeCluster, key: ObjectKey) -> Manifest:
    found = cluster.look(key)
    assert found is not None
    return found


def condition(cluster: FakeCluster, kind: str) -> dict[str, Any]:
    return next(each for each in look(cluster, TIER_KEY)["status"]["conditions"] if each["type"] == kind)


def edit(cluster: FakeCluster, change: Callable[[dict[str, Any]], None]) -> None:
    """Have a user edit the spec."""
    body = look(cluster, TIER_KEY)
    change(body["spec"])
    body["metadata"]["generation"] = body["metadata"].get("generation", 1) + 1
    cluster.put(body)


def ends(cluster: FakeCluster, code: int, document: dict[str, Any], name: str = "one") -> None:
    """Have the Job's pod end with these last words."""
    job = look(cluster, JOB)
    template = job["spec"]["template"]
    state = {"terminated": {"exitCode": code, "message": json.dumps(document)}}
    cluster.put(
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": name,
                "namespace": NAMESPACE,
                "labels": template["metadata"]["labels"],
                "ownerReferences": [{"uid": job["metadata"]["uid"], "controller": True}],
            },
            "spec": template["spec"],
            "status": {"containerStatuses": [{"name": "warm", "state": state}]},
        }
    )


@pytest.fixture
def cluster() -> FakeCluster:
    """Return a tier whose two engines serve, and whose Job runs."""
    made = FakeCluster(tier(warm=WARM))
    run(made)
    made.edit(CLAIM, {"status": {"phase": "Bound"}})
    made.edit(DEPLOYMENT, {"status": ready_deployment()})
    for name in "ab":
        made.put(pod(name, look(made, DEPLOYMENT)["spec"]["template"]))
    run(made)
    assert made.look(JOB) is not None
    return made


def digest(cluster: FakeCluster) -> str:
    found: str = look(cluster, TIER_KEY)["status"]["generation"]["current"]
    return found


def test_a_new_generation_is_warm_only_after_engines_of_it_were_asked(cluster: FakeCluster) -> None:
    before = digest(cluster)
    assert f"--generation={before}" in look(cluster, JOB)["spec"]["template"]["spec"]["containers"][0]["args"]
    ends(cluster, 0, DONE)
    run(cluster)
    assert condition(cluster, "Warm")["status"] == "True"
    cluster.remove(JOB)

    edit(cluster, lambda spec: spec.update(engine={"args": ["--kv-cache-dtype=fp8"]}))
    for _ in range(2):
        # The Deployment's controller has not seen it yet: its status still speaks of the engines before.
        run(cluster)
        assert digest(cluster) != before
        assert cluster.look(JOB) is None
        assert condition(cluster, "Warm")["reason"] == "PromptsPending"
    generation = look(cluster, DEPLOYMENT)["metadata"]["generation"]
    cluster.edit(DEPLOYMENT, {"status": {**ready_deployment(generation=generation), "updatedReplicas": 1}})
    run(cluster)
    assert cluster.look(JOB) is None
    cluster.edit(DEPLOYMENT, {"status": ready_deployment(generation=generation)})
    run(cluster)
    assert f"--generation={digest(cluster)}" in look(cluster, JOB)["spec"]["template"]["spec"]["containers"][0]["args"]
    assert condition(cluster, "Warm")["status"] == "False"


@pytest.mark.parametrize("change", [{"warm": None}, {"disk": {"mode": "ReadOnly"}}, {"replicas": 0}])
def test_a_job_whose_prompts_nobody_wants_any_more_is_ended_and_looked_for_once(
    cluster: FakeCluster, change: dict[str, Any]
) -> None:
    edit(cluster, lambda spec: spec.update(change))
    run(cluster)
    assert cluster.look(JOB) is None
    assert condition(cluster, "Warm")["status"] == "Unknown"
    cluster.calls.clear()
    run(cluster)
    assert [call for call in cluster.calls if "llama-warm" in call[1]] == []


def test_a_job_goes_on_while_its_tier_is_paused_and_is_ended_afterwards(cluster: FakeCluster) -> None:
    edit(cluster, lambda spec: spec.update(warm=None, paused=True))
    run(cluster)
    assert cluster.look(JOB) is not None
    edit(cluster, lambda spec: spec.update(paused=False))
    run(cluster)
    assert cluster.look(JOB) is None


def test_what_failed_is_sent_again_after_a_wait_that_doubles_and_at_once_with_another_revision(
    cluster: FakeCluster,
) -> None:
    waits = []
    for number in (1, 2, 3):
        job = look(cluster, JOB)
        assert job["spec"]["backoffLimit"] == 0
        waits.append(job["spec"]["ttlSecondsAfterFinished"])
        ends(cluster, 2, {"problem": "line 1: is no JSON"}, f"pod-{number}")
        for _ in range(2):
            run(cluster)
        assert look(cluster, TIER_KEY)["status"]["warm"]["failures"] == number
        assert f"again {5 * 2 ** (number - 1)} minutes after it has ended" in condition(cluster, "Warm")["message"]
        cluster.remove(JOB)
        run(cluster)
    assert waits == [300, 600, 1200]
    edit(cluster, lambda spec: spec["warm"].update(revision="2"))
    for _ in range(2):
        run(cluster)
    assert look(cluster, JOB)["spec"]["ttlSecondsAfterFinished"] == 300
    ends(cluster, 0, DONE, "last")
    run(cluster)
    assert "failures" not in look(cluster, TIER_KEY)["status"]["warm"]


def test_prompts_that_cannot_be_mounted_are_named_with_their_field(cluster: FakeCluster) -> None:
    job = look(cluster, JOB)
    labels = job["spec"]["template"]["metadata"]["labels"]
    made = cluster.put(
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": "stuck",
                "namespace": NAMESPACE,
                "labels": labels,
                "creationTimestamp": (NOON - timedelta(minutes=2)).isoformat(),
                "ownerReferences": [{"uid": job["metadata"]["uid"], "controller": True}],
            },
            "spec": job["spec"]["template"]["spec"],
            "status": {"containerStatuses": [{"name": "warm", "state": {"waiting": {"reason": "ContainerCreating"}}}]},
        }
    )
    said = 'MountVolume.SetUp failed for volume "prompts" : configmap "prompts" not found'
    cluster.events_about(made["metadata"]["uid"], {"reason": "FailedMount", "message": said})
    outcome = reconcile(cluster, TIER, connector_image="connector:test", clock=lambda: NOON)
    assert outcome.again_after is not None
    told = condition(cluster, "Warm")["message"]
    assert said in told
    assert "spec.warm, which names key prompts.jsonl of ConfigMap prompts" in told
