# SPDX-License-Identifier: Apache-2.0
"""How many engines a node drain may take at once. Pure."""

from __future__ import annotations

from kvtier_operator import names
from kvtier_operator.names import Manifest
from kvtier_operator.plan import TierPlan


def disruption_budget(plan: TierPlan) -> Manifest:
    """Return the budget: one engine at a time, and an engine that does not serve never holds up a drain."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": names.metadata(plan.tier, names.engine(plan.tier), component=names.COMPONENT_ENGINE),
        "spec": {
            "maxUnavailable": 1,
            "selector": {"matchLabels": names.selector(plan.tier)},
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }
