# SPDX-License-Identifier: Apache-2.0
"""Nodes and what runs on them are read for all tiers at once, and pods are counted as the scheduler counts them."""

from __future__ import annotations

from typing import Any

from fake_cluster import FakeCluster
from test_nodes import GIB, node, pod

from kvtier_operator.errors import ClusterForbidden, ClusterUnavailable
from kvtier_operator.inventory import Inventory, from_objects


class Counting(FakeCluster):
    """Counts readings of nodes, and refuses them when told to."""

    def __init__(self, *objects: Any) -> None:
        super().__init__(*objects)
        self.read = 0
        self.error: Exception | None = None

    def list(self, api_version: str, kind: str, *, namespace: str, selector: str) -> Any:
        self.read += 1
        if self.error is not None:
            raise self.error
        return super().list(api_version, kind, namespace=namespace, selector=selector)


def test_nodes_are_read_once_a_minute_for_all_tiers() -> None:
    cluster, now = Counting(node()), [0.0]
    inventory = Inventory(cluster, is_allowed=True, clock=lambda: now[0])
    for second in (0, 30, 59.9):
        now[0] = second
        assert inventory.look(with_pods=False) is not None
    assert cluster.read == 1
    now[0] = 60.0
    inventory.look(with_pods=False)
    assert cluster.read == 2


def test_a_refusal_lasts_and_an_outage_keeps_what_was_seen() -> None:
    cluster, now = Counting(node()), [0.0]
    inventory = Inventory(cluster, is_allowed=True, clock=lambda: now[0])
    seen = inventory.look(with_pods=False)
    cluster.error, now[0] = ClusterUnavailable("500"), 60.0
    assert inventory.look(with_pods=False) == seen
    cluster.error, now[0] = ClusterForbidden("403"), 120.0
    assert inventory.look(with_pods=False) is None
    cluster.error, now[0] = None, 240.0
    assert inventory.look(with_pods=False) is None
    now[0] = 800.0
    assert inventory.look(with_pods=False) == seen


def test_a_pod_counts_as_the_scheduler_counts_it() -> None:
    body = pod("batch", "2Gi")
    body["spec"]["initContainers"] = [
        {"name": "sidecar", "restartPolicy": "Always", "resources": {"requests": {"memory": "1Gi"}}},
        {"name": "fetch", "resources": {"requests": {"memory": "9Gi"}}},
    ]
    body["spec"]["overhead"] = {"memory": "1Gi"}
    finished = pod("done", "99Gi")
    finished["status"]["phase"] = "Succeeded"
    unscheduled = pod("waiting", "99Gi")
    unscheduled["spec"].pop("nodeName")
    usage = from_objects([{"kind": "List", "items": [body, finished, unscheduled]}]).usage
    assert usage is not None
    assert [each.memory_bytes // GIB for each in usage] == [11]


def test_objects_that_are_no_nodes_are_nobody() -> None:
    assert from_objects([{"kind": "ConfigMap", "metadata": {"name": "x"}}]).nodes == ()
