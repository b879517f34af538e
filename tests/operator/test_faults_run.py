# SPDX-License-Identifier: Apache-2.0
"""Calls fail, watches end, operators are killed: in the end everything is as the specs ask for."""

from __future__ import annotations

from pathlib import Path

import pytest
from e2e.bench.operator_scale import passes, tier, until
from fault_cluster import TIERS, BenchCluster, is_final, operator
from operator_faults import faults, forbidden

from kvtier_localcluster.ports import free_port


@pytest.mark.timeout(600)
def test_after_faults_and_killed_operators_everything_is_as_asked(tmp_path: Path) -> None:
    kinds = ("poddisruptionbudgets", "services")
    result = faults(tmp_path, tiers=6, seconds=18, kill_seconds=7, kinds=kinds, lease_seconds=8)
    assert result["wrong"] == []
    assert result["by_forbidden_kind"]["services"]["tiers_that_name_it"] > 0
    assert result["killed"] > 0
    assert result["injected"].keys() & {"409", "429", "500", "503"}


@pytest.mark.timeout(300)
def test_a_kind_that_is_forbidden_keeps_nothing_else_from_a_tier_and_is_named(tmp_path: Path) -> None:
    result = forbidden(tmp_path, kinds=("poddisruptionbudgets", "roles"), seconds=90)
    assert result["wrong"] == []


@pytest.mark.timeout(300)
def test_an_operator_that_takes_over_and_one_that_looks_again_have_nothing_to_write(tmp_path: Path) -> None:
    names = [f"t{number}" for number in range(3)]
    with BenchCluster() as cluster:
        with operator(cluster, tmp_path, "--leader-elect", KVTIER_LEASE_SECONDS="60"):
            for name in names:
                cluster.call("POST", TIERS, tier(name))
            until(lambda: all(map(is_final, cluster.tiers())), seconds=200)
            rest(cluster)
        first, port = counts(cluster), free_port()
        with operator(cluster, tmp_path, KVTIER_RESYNC_SECONDS="5", KVTIER_METRICS_PORT=str(port)):
            until(lambda: passes(port) >= len(names), seconds=60)
            rest(cluster)
            started, done = counts(cluster), passes(port)
            until(lambda: passes(port) >= done + len(names), seconds=60)
        assert started["requests"] > first["requests"]
        assert started["status writes"] == first["status writes"]
        assert counts(cluster)["writes"] == started["writes"]


def counts(cluster: BenchCluster) -> dict[str, int]:
    """Requests of operators so far, without those for their Lease."""
    requests = {what: count for what, count in cluster.requests.items() if not what.endswith(" leases")}
    writes = {what: count for what, count in cluster.writes().items() if not what.endswith(" leases")}
    status_writes = writes.get("PATCH kvcachetiers", 0)
    return {"requests": sum(requests.values()), "writes": sum(writes.values()), "status writes": status_writes}


def rest(cluster: BenchCluster, quiet_seconds: float = 1.0) -> None:
    """Wait until nothing has been written for a while."""
    seen = [-1]

    def is_quiet() -> bool:
        seen.append(counts(cluster)["writes"])
        return seen[-1] == seen[-2]

    until(is_quiet, seconds=60, pause=quiet_seconds)
