# SPDX-License-Identifier: Apache-2.0
"""Engines whose Redis does not answer at their start: they serve, and the tier says whom to look for."""

from __future__ import annotations

from typing import Any

import pytest
from light_cluster import Tier
from pods import Bench

from kvtier_localcluster import kinds


@pytest.mark.live
@pytest.mark.timeout(180)
def test_engines_without_their_redis_serve_and_are_told_of(bench: Bench) -> None:
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "redis"}, "stringData": {"password": "secret"}}
    bench.create(kinds.SECRET, secret)
    redis: dict[str, Any] = {"url": "redis://127.0.0.1:1", "passwordSecretRef": {"name": "redis"}}
    tier = Tier(
        bench,
        "unshared",
        replicas=1,
        engine={"accelerator": {"resource": "nvidia.com/gpu"}},
        connector={"type": "LMCache", "lmcache": {"redis": redis}},
        volume=None,
    )
    tier.reaches("Available", "True")
    told = tier.reaches("SharedCacheVerified", "Unknown", "StoreUnreachable")
    (pod,) = tier.pods()
    for part in (pod["metadata"]["name"], "Connection refused", "spec.connector.lmcache.redis", "kvtier.dev/restart"):
        assert part in told["message"]
    assert "secret" not in told["message"].replace("Secret", "")
    assert tier.ask("v1/models") == {"data": [{"id": "org/model"}]}
    tier.reaches("Ready", "True")
    tier.patch(replicas=0)
