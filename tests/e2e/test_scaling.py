# SPDX-License-Identifier: Apache-2.0
"""A tier that is scaled to none and back: what it says meanwhile, and what the first pod finds."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import ci_tools
import pytest
from light_cluster import Tier
from pods import Bench
from waiting import until

from kvtier_localcluster import kinds

KUBECTL = ci_tools.load("helm").binary("kubectl")


@pytest.fixture(scope="module")
def scaled(bench: Bench) -> Iterator[Tier]:
    tier = Tier(bench, "scaled")
    tier.reaches("Available", "True")
    yield tier
    tier.patch(replicas=0)


def scale(tier: Tier, replicas: int) -> None:
    """Scale as an autoscaler does: through the subresource."""
    config = f"--kubeconfig={tier.bench.cluster.kubeconfig}"
    command = [KUBECTL, config, "scale", f"kvt/{tier.name}", f"--replicas={replicas}"]
    subprocess.run(command, check=True, capture_output=True)


@pytest.mark.live
@pytest.mark.timeout(240)
def test_a_tier_that_comes_back_from_none_finds_its_blocks(bench: Bench, scaled: Tier) -> None:
    scaled.ask("store/prompt")
    scale(scaled, 0)
    assert scaled.reaches("Available", "False", "ScaledToZero")["message"] == "spec.replicas is 0: no engine serves"
    until(lambda: scaled.pods() == [])
    until(lambda: (scaled.status()["replicas"], scaled.status()["readyReplicas"]) == (0, 0))
    # Nothing is wrong with it, so nothing may wake anybody.
    assert scaled.condition("Stalled")["status"] == "False"
    assert scaled.condition("JanitorHealthy")["status"] != "False"
    assert bench.get(kinds.PERSISTENT_VOLUME_CLAIM, "scaled-blocks") is not None
    scale(scaled, 1)
    scaled.reaches("Available", "True", "Serving")
    assert scaled.ask("load/prompt")["is_hit"] is True
    until(lambda: scaled.status()["readyReplicas"] == 1)
