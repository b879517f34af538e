# SPDX-License-Identifier: Apache-2.0
"""The estimate of what rules cost, against the numbers of a real API server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from kvtier_localcluster.apiserver.admission.cel_cost import costs

REAL: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "cel_costs.yaml").read_text())


def over(rule: str) -> dict[str, Any]:
    return {"type": "object", "properties": REAL["properties"], "x-kubernetes-validations": [{"rule": rule}]}


@pytest.mark.parametrize(("rule", "cost"), REAL["costs"].items())
def test_a_rule_is_estimated_as_a_real_server_does_and_never_below(rule: str, cost: int) -> None:
    [(_, found)] = costs(over(rule))
    assert cost <= found <= max(cost + 1, 1.1 * cost)


def test_a_rule_of_a_nested_value_costs_as_often_as_the_value_may_occur() -> None:
    found = {
        path.split(".x-kubernetes")[0]
        .replace(".properties[", ".")
        .replace("]", "")
        .replace(".items", "[]")
        .replace(".additionalProperties", ".*"): cost
        for path, cost in costs(REAL["nested"]["schema"])
    }
    assert found == REAL["nested"]["costs"]
