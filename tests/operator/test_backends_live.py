# SPDX-License-Identifier: Apache-2.0
"""A tier that changes its connector: what stands, what goes, what stays, and what its status says."""

from __future__ import annotations

from fake_cluster import FakeCluster, condition, edited, reconciled, run, serving
from tiers import CLAIM, DEPLOYMENT, JANITOR, LEASE, NAMESPACE, TIER_KEY, tier

from kvtier_operator.names import ObjectKey

REDIS = ObjectKey(api_version="apps/v1", kind="Deployment", name="llama-redis")


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


def test_a_claim_of_the_user_that_is_not_there_is_not_missed_where_nobody_mounts_it() -> None:
    cluster = reconciled(connector={"type": "SimpleCPU"}, volume={"existingClaim": "kv", "claim": None})
    assert DEPLOYMENT in cluster.existing()


def test_a_small_redis_stands_before_the_engines_and_goes_with_the_connector() -> None:
    cluster = FakeCluster(tier(connector={"type": "LMCache", "lmcache": {"redis": {"trial": {}}}}, volume=None))
    outcome = run(cluster)
    assert outcome.written.index(REDIS) < outcome.written.index(DEPLOYMENT)
    service = cluster.look(ObjectKey(api_version="v1", kind="Service", name="llama-redis"))
    assert service["metadata"]["namespace"] == NAMESPACE
    edited(cluster, connector={"type": "VLLMOffloading", "lmcache": None})
    assert REDIS not in cluster.existing()


def test_vllms_own_files_get_a_janitor_that_knows_them() -> None:
    cluster = reconciled(connector={"type": "VLLMTiering"})
    assert JANITOR in cluster.existing()
    told = cluster.look(ObjectKey(api_version="v1", kind="ConfigMap", name="llama-janitor"))["data"]["janitor.json"]
    assert '"layout": "vllm-fs"' in told
    assert condition(cluster, "JanitorHealthy")["reason"] != "NotApplicable"
