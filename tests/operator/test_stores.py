# SPDX-License-Identifier: Apache-2.0
"""The Redis and the Mooncake master that the operator makes, and what stands and goes when the connector changes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from fake_cluster import FakeCluster, condition, edited, reconciled, run, serving
from healthy_tier import READY_POD, UNREADY_POD, changed, conditions, varied
from tiers import CLAIM, DEPLOYMENT, JANITOR, JANITOR_CONFIG, LEASE, NAMESPACE, TIER_KEY, made_by, merge, tier

from kvtier_operator.api import parse
from kvtier_operator.names import Manifest, ObjectKey
from kvtier_operator.parts.connectors import stores
from kvtier_operator.plan import TierPlan
from kvtier_operator.snapshot import ContainerStatus

REDIS = ObjectKey(api_version="apps/v1", kind="Deployment", name="llama-redis")
WITH_REDIS: dict[str, Any] = {"type": "LMCache", "lmcache": {"redis": {"trial": {"memory": "1Gi"}}}}
WITH_MASTER: dict[str, Any] = {"type": "Mooncake", "mooncake": {"config": {"protocol": "tcp"}, "master": {}}}


def pod_template(cluster: FakeCluster) -> Manifest:
    return dict(cluster.look(REDIS)["spec"]["template"])


def test_a_redis_that_runs_is_left_alone_by_another_release_until_the_spec_asks_for_another_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of_this_release = stores.servers

    def servers(plan: TierPlan) -> tuple[Manifest, ...]:
        made = of_this_release(plan)
        for each in made:
            if each["kind"] == "Deployment":
                each["spec"]["template"]["spec"]["containers"][0]["args"].append("--new")
        return made

    cluster = reconciled(connector=WITH_REDIS)
    before = pod_template(cluster)
    monkeypatch.setattr(stores, "servers", servers)
    edited(cluster, replicas=3)
    assert pod_template(cluster) == before
    edited(cluster, connector={"type": "LMCache", "lmcache": {"redis": {"trial": {"memory": "2Gi"}}}})
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
    unscheduled = {"type": "PodScheduled", "status": "False", "message": "no room"}
    pod = merge(pod_template(cluster), {"metadata": {"name": "llama-redis-x", "namespace": NAMESPACE}})
    pod["metadata"]["labels"]["pod-template-hash"] = "abc"
    pod["metadata"]["ownerReferences"] = [made_by("llama-redis-abc")]
    cluster.put({"apiVersion": "v1", "kind": "Pod", **pod, "status": {"conditions": [unscheduled]}})
    run(cluster)
    told = condition(cluster, "StoreReady")
    assert (told["reason"], "no room" in told["message"]) == ("StoreNotScheduled", True)


def generation(cluster: FakeCluster) -> str:
    return str(cluster.look(TIER_KEY)["status"]["generation"]["current"])


def test_a_tier_with_another_connector_keeps_its_claim_and_loses_its_janitor() -> None:
    cluster = reconciled()
    before = generation(cluster)
    assert JANITOR in cluster.existing()
    edited(cluster, connector={"type": "SimpleCPU"})
    assert CLAIM in cluster.existing()
    assert not {JANITOR, LEASE} & cluster.existing()
    assert generation(cluster) != before
    volume = condition(cluster, "VolumeBound")
    assert (volume["status"], volume["reason"]) == ("Unknown", "NotApplicable")
    assert "spec.volume is kept and not mounted" in volume["message"]
    assert [each["name"] for each in cluster.look(TIER_KEY)["status"]["tiers"]] == ["cpu"]
    edited(cluster, connector={"type": "Bundled"})
    assert JANITOR in cluster.existing()
    assert generation(cluster) == before


COUNTED = {"usedBytes": 1 << 30, "blocks": 9}


def test_what_the_status_says_of_generations_follows_the_connector() -> None:
    cluster = reconciled()
    bundled = generation(cluster)
    cluster.edit(TIER_KEY, {"status": {"generations": [{"digest": bundled, "role": "Current", **COUNTED}]}})
    run(cluster)
    assert cluster.look(TIER_KEY)["status"]["generation"]["root"].endswith(bundled)

    edited(cluster, connector={"type": "VLLMTiering"})
    told = cluster.look(TIER_KEY)["status"]
    assert told["generations"] == [{"digest": bundled, "role": "Previous", **COUNTED}]
    assert told["generation"]["root"].endswith(generation(cluster))

    edited(cluster, connector={"type": "SimpleCPU"})
    told = cluster.look(TIER_KEY)["status"]
    assert "generations" not in told
    assert set(told["generation"]) == {"current"}  # its blocks are in no directory of the volume


def test_generations_that_nobody_counts_any_more_are_not_told() -> None:
    cluster = reconciled()
    cluster.edit(TIER_KEY, {"status": {"generations": [{"digest": generation(cluster), **COUNTED}]}})
    edited(cluster, janitor={"enabled": False})
    assert "generations" not in cluster.look(TIER_KEY)["status"]


def test_a_tier_without_a_volume_becomes_ready_when_its_engines_are() -> None:
    cluster = reconciled(connector={"type": "VLLMOffloading"}, volume=None)
    assert CLAIM not in cluster.existing()
    serving(cluster)
    run(cluster)
    ready = condition(cluster, "Ready")
    assert (ready["status"], ready["reason"]) == ("True", "Ready")
    assert condition(cluster, "SharedCacheVerified")["reason"] == "NotApplicable"


def test_a_small_redis_stands_before_the_engines_and_goes_with_the_connector() -> None:
    cluster = FakeCluster(tier(connector={"type": "LMCache", "lmcache": {"redis": {"trial": {}}}}, volume=None))
    outcome = run(cluster)
    assert outcome.written.index(REDIS) < outcome.written.index(DEPLOYMENT)
    edited(cluster, connector={"type": "VLLMOffloading", "lmcache": None})
    assert REDIS not in cluster.existing()
    # Nobody mounts a volume then, so that a claim that is not there is not missed.
    cluster = reconciled(connector={"type": "SimpleCPU"}, volume={"existingClaim": "kv", "claim": None})
    assert DEPLOYMENT in cluster.existing()


def test_vllms_own_files_get_a_janitor_that_knows_them() -> None:
    cluster = reconciled(connector={"type": "VLLMTiering"})
    assert JANITOR in cluster.existing()
    assert '"layout": "vllm-fs"' in cluster.look(JANITOR_CONFIG)["data"]["janitor.json"]
    assert condition(cluster, "JanitorHealthy")["reason"] != "NotApplicable"
