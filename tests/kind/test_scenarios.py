# SPDX-License-Identifier: Apache-2.0
"""What people do with a tier, in this order: make it, use it, restart it, upgrade the operator, limit it, delete it."""

from __future__ import annotations

from typing import Any

import pytest
from kind_cluster import SECONDS, Cluster, until

TIER = "scenario"
PROMPTS = [f"prompt {number}: " + f"the beginning that many users share, {number} " * 120 for number in range(3)]
pytestmark = pytest.mark.timeout(int(4 * SECONDS))


def spec(cluster: Cluster, **changes: Any) -> dict[str, Any]:
    return {
        "apiVersion": "kvtier.dev/v1beta1",
        "kind": "KVCacheTier",
        "metadata": {"name": TIER},
        "spec": {
            "model": cluster.model,
            "replicas": 2,
            "engine": cluster.engine,
            "cpu": {"size": "512Mi"},
            "volume": {"claim": cluster.claim},
            "disk": {"splitHits": "Off", **changes},
        },
    }


def is_hit(cluster: Cluster, pod: str, prompt: str) -> None:
    """Ask until the engine has heard of what another one stored."""
    until(lambda: cluster.ask(pod, prompt) > 0, f"a hit on the volume by {pod}")


def test_a_tier_becomes_ready_with_what_it_is_made_of(cluster: Cluster) -> None:
    cluster.apply(spec(cluster))
    cluster.reaches(TIER, "Ready", "True")
    assert len(cluster.ready_engines(TIER)) == 2
    assert cluster.get("pvc", f"{TIER}-blocks")["status"]["phase"] == "Bound"
    assert cluster.get("service", f"{TIER}-engine")["spec"]["ports"][0]["port"] == 8000
    until(lambda: cluster.pods(TIER, "janitor") != [], "the janitor")
    cluster.reaches(TIER, "JanitorHealthy", "True")


def test_one_replica_reads_what_another_one_computed(cluster: Cluster) -> None:
    first, second = sorted(cluster.ready_engines(TIER))
    for prompt in PROMPTS:
        cluster.ask(first, prompt)
    is_hit(cluster, second, PROMPTS[0])


def test_engines_that_were_all_replaced_find_what_was_there(cluster: Cluster) -> None:
    before = cluster.ready_engines(TIER)
    cluster.kubectl("delete", "pod", *before, "--wait=false")
    # `Ready` is true still when nobody has looked yet.
    until(lambda: len(cluster.ready_engines(TIER) - before) == 2, "two new engines")
    cluster.reaches(TIER, "Ready", "True")
    is_hit(cluster, min(cluster.ready_engines(TIER)), PROMPTS[1])


def test_another_version_leaves_engines_alone_until_they_are_restarted_and_keeps_the_cache(cluster: Cluster) -> None:
    before = cluster.ready_engines(TIER)
    cluster.upgrade()
    cluster.reaches(TIER, "UpToDate", "False", "EnginesOutdated")
    assert cluster.ready_engines(TIER) == before
    cluster.kubectl("annotate", "kvcachetier", TIER, "--overwrite", "kvtier.dev/restart=1")
    until(lambda: len(cluster.ready_engines(TIER) - before) == 2, "new engines", seconds=2 * SECONDS)
    cluster.reaches(TIER, "UpToDate", "True")
    cluster.reaches(TIER, "Ready", "True")
    is_hit(cluster, min(cluster.ready_engines(TIER)), PROMPTS[2])


def test_the_volume_is_kept_within_its_budget(cluster: Cluster) -> None:
    def used() -> int:
        found = cluster.get("kvcachetier", TIER)["status"].get("tiers", ())
        return int(next((each.get("usedBytes", 0) for each in found if each["name"] == "disk"), 0))

    until(lambda: used() > 0, "somebody has counted")
    limit = max(4 << 20, used() // 2)
    cluster.apply(spec(cluster, budget={"maxBytes": str(limit)}))
    until(lambda: 0 < used() <= limit, f"no more than {limit} bytes")
    cluster.reaches(TIER, "DiskWithinBudget", "True")


def test_a_tier_that_is_deleted_leaves_its_blocks(cluster: Cluster) -> None:
    cluster.kubectl("delete", "kvcachetier", TIER, f"--timeout={SECONDS:.0f}s")
    until(lambda: cluster.pods(TIER) == [], "no engine")
    assert cluster.get("pvc", f"{TIER}-blocks")["status"]["phase"] == "Bound"
