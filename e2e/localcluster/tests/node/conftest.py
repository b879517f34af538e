# SPDX-License-Identifier: Apache-2.0
"""A cluster for all tests of a module, and a namespace of its own for each test."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from pods import NAMESPACE, Bench

from kvtier_localcluster.cluster import ClusterSettings, ClusterThread
from kvtier_localcluster.node.environment import ImageProfile
from kvtier_localcluster.node.services import NodeSettings, Restarts

IMAGES = [ImageProfile(prefix="ghcr.io/kvtier/", environment={"PYTHONPATH": "/opt/of-the-image"})]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterThread]:
    settings = ClusterSettings(
        data=tmp_path_factory.mktemp("cluster"),
        node=NodeSettings(restarts=Restarts(first_seconds=0.1, limit_seconds=0.4), images=IMAGES, stop_grace_seconds=1),
        allocatable={"cpu": "64", "memory": "64Gi"},
    )
    with ClusterThread(settings) as running:
        yield running


_NUMBERS = itertools.count(1)


@pytest.fixture
def bench(cluster: ClusterThread) -> Iterator[Bench]:
    namespace = f"test-{next(_NUMBERS)}"
    manifest = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}}
    cluster.call(lambda: cluster.cluster.server.create(manifest))
    yield Bench(cluster, namespace)
    client = cluster.cluster.client
    created = cluster.call(lambda: client.get(NAMESPACE, ("", namespace)))
    cluster.call(lambda: client.delete(NAMESPACE, created))
