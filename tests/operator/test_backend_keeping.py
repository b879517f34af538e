# SPDX-License-Identifier: Apache-2.0
"""Who has room for the blocks of a connector, and who clears them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tiers import tier

from kvtier_operator import names
from kvtier_operator.api import parse
from kvtier_operator.api.reasons import Reason
from kvtier_operator.parts import render
from kvtier_operator.parts.capabilities import not_applicable
from kvtier_operator.plan import make_unchecked_plan
from kvtier_operator.snapshot import Engines, Neighbour, Snapshot


@pytest.mark.parametrize(
    ("connector", "one", "four"), [({"type": "SimpleCPU", "simpleCPU": {"medium": "Disk"}}, "65Gi", "257Gi")]
)
def test_the_nodes_disk_holds_the_blocks_of_every_engine_in_the_pod(
    connector: dict[str, Any], one: str, four: str
) -> None:
    def limit(args: list[str]) -> str:
        body = tier(connector=connector)
        body["spec"]["engine"] = {**body["spec"].get("engine", {}), "args": args}
        made = render(make_unchecked_plan(parse(body), names.tier_ref(body), connector_image="connector:test"))
        pod = next(each for each in made if each["kind"] == "Deployment" and each["metadata"]["name"] == "llama-engine")
        volumes = {each["name"]: each for each in pod["spec"]["template"]["spec"]["volumes"]}
        return str(volumes["kvtier-offload"]["emptyDir"]["sizeLimit"])

    assert (limit([]), limit(["--data-parallel-size=4"])) == (one, four)


def test_blocks_of_a_tier_that_is_not_there_have_no_janitor() -> None:
    spec = parse(tier(connector={"type": "Hybrid", "hybrid": {"nixl": {"blocksOf": "other"}}}))
    alone = Snapshot(tier=names.tier_ref(tier()), claim=None, engines=Engines(), pods=(), live={})
    told = not_applicable("JanitorHealthy", spec, alone)
    assert told is not None
    assert (told.reason, told.is_known, told.is_met) == (Reason.JANITOR_MISSING, True, False)
    assert "spec.connector.hybrid.nixl.blocksOf: there is no tier other" in told.message
    beside = replace(alone, neighbours=(Neighbour(name="other", max_bytes=None),))
    found = not_applicable("JanitorHealthy", spec, beside)
    assert found is not None
    assert found.reason is Reason.NOT_APPLICABLE
