# SPDX-License-Identifier: Apache-2.0
"""What the end-to-end tests share: one cluster with light engines."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from pods import Bench

sys.path.insert(0, str(Path(__file__).parent))

import light_cluster


@pytest.fixture(scope="session")
def shared_bench(tmp_path_factory: pytest.TempPathFactory, of_group: ExitStack) -> Bench:
    image = light_cluster.make_image(tmp_path_factory.mktemp("image"))
    return of_group.enter_context(light_cluster.running_bench(image, tmp_path_factory.mktemp("cluster")))


@pytest.fixture(scope="module")
def bench(shared_bench: Bench) -> Iterator[Bench]:
    """The cluster, which a module leaves without tiers: each that goes on costs all others time."""
    yield shared_bench
    for tier in shared_bench.list(light_cluster.TIER):
        if "deletionTimestamp" not in tier["metadata"]:
            shared_bench.delete(light_cluster.TIER, tier["metadata"]["name"])
