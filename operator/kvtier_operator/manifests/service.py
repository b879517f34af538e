# SPDX-License-Identifier: Apache-2.0
"""The address of the engines. Pure."""

from __future__ import annotations

from kvtier_operator import names
from kvtier_operator.names import Manifest
from kvtier_operator.plan import TierPlan


def service(plan: TierPlan) -> Manifest:
    """Return the Service in front of the ready engine pods."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": names.metadata(plan.tier, names.engine(plan.tier), component=names.COMPONENT_ENGINE),
        "spec": {
            "type": "ClusterIP",
            "selector": names.selector(plan.tier),
            "ports": [{"name": "http", "port": names.HTTP_PORT, "targetPort": "http", "protocol": "TCP"}],
            "sessionAffinity": "None",
        },
    }
