# SPDX-License-Identifier: Apache-2.0
"""The Redis and the Mooncake master that the operator makes: judged by a condition, and kept over its upgrades."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from fake_cluster import FakeCluster, condition, edited, reconciled, run
from healthy_tier import READY_POD, UNREADY_POD, changed, conditions, varied
from tiers import NAMESPACE, tier

from kvtier_operator.api import parse
from kvtier_operator.names import Manifest, ObjectKey
from kvtier_operator.parts.connectors import stores
from kvtier_operator.plan import TierPlan
from kvtier_operator.snapshot import ContainerStatus

REDIS = ObjectKey(api_version="apps/v1", kind="Deployment", name="llama-redis")
WITH_REDIS: dict[str, Any] = {"type": "LMCache", "lmcache": {"redis": {"trial": {"memory": "1Gi"}}}}
WITH_MASTER: dict[str, Any] = {"type": "Mooncake", "mooncake": {"config": {"protocol": "tcp"}, "master": {}}}


def pod_template(cluster: FakeCluster) -> Manifest:
    found = cluster.look(REDIS)
    return dict(found["spec"]["template"])


def of_another_release(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the operator render another Redis from the same spec."""
    before = stores.servers

    def servers(plan: TierPlan) -> tuple[Manifest, ...]:
        made = before(plan)
        for each in made:
            if each["kind"] == "Deployment":
                each["spec"]["template"]["spec"]["containers"][0]["args"].append("--new")
        return made

    monkeypatch.setattr(stores, "servers", servers)


def test_a_redis_that_runs_is_left_alone_by_another_release_until_the_spec_asks_for_another_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = reconciled(connector=WITH_REDIS)
    before = pod_template(cluster)
    of_another_release(monkeypatch)
    edited(cluster, replicas=3)
    assert pod_template(cluster) == before
    larger = {"type": "LMCache", "lmcache": {"redis": {"trial": {"memory": "2Gi"}}}}
    edited(cluster, connector=larger)
    (container,) = pod_template(cluster)["spec"]["containers"]
    assert "--new" in container["args"]
    assert str(2 << 30) in container["args"]


def test_a_redis_that_somebody_edits_is_repaired() -> None:
    cluster = reconciled(connector=WITH_REDIS)
    before = pod_template(cluster)
    cluster.edit(REDIS, {"spec": {"template": {"spec": {"containers": [{"name": "redis", "image": "theirs"}]}}}})
    run(cluster)
    assert pod_template(cluster)["spec"]["containers"][0]["image"] == before["spec"]["containers"][0]["image"]


@pytest.mark.parametrize(("connector", "name"), [(WITH_REDIS, "llama-redis"), (WITH_MASTER, "llama-mooncake")])
def test_the_server_of_a_connector_is_judged(connector: dict[str, Any], name: str) -> None:
    spec = parse(tier(connector=connector))

    def judged(*pods: Any) -> tuple[str, str, str, str]:
        found = conditions(varied(changed(stores=pods), spec=spec))
        store = found["StoreReady"]
        return store["status"], store["reason"], store["message"], found["Ready"]["reason"]

    assert judged(READY_POD)[:2] == ("True", "StoreReady")
    status, reason, message, ready = judged()
    assert (status, reason, ready) == ("False", "StoreStarting", "StoreStarting")
    assert f"kubectl describe deployment/{name}" in message
    pulls = ContainerStatus(name="redis", image="redis:no", waiting_reason="ImagePullBackOff")
    assert judged(replace(UNREADY_POD, containers=(pulls,)))[1] == "StoreImagePullFailed"
    unscheduled = replace(UNREADY_POD, is_scheduled=False)
    assert judged(unscheduled)[1] == "StoreNotScheduled"


def test_pods_of_the_server_are_read() -> None:
    cluster = reconciled(connector=WITH_REDIS)
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": "llama-redis-x",
            "namespace": NAMESPACE,
            "labels": {**pod_template(cluster)["metadata"]["labels"], "pod-template-hash": "abc"},
            "ownerReferences": [{"kind": "ReplicaSet", "name": "llama-redis-abc", "controller": True, "uid": "r"}],
        },
        "spec": pod_template(cluster)["spec"],
        "status": {"conditions": [{"type": "PodScheduled", "status": "False", "message": "no room"}]},
    }
    cluster.put(pod)
    run(cluster)
    told = condition(cluster, "StoreReady")
    assert (told["reason"], "no room" in told["message"]) == ("StoreNotScheduled", True)
