# SPDX-License-Identifier: Apache-2.0
"""Who the engine pods are to the API server: nobody. Pure."""

from __future__ import annotations

from kvtier_operator import names
from kvtier_operator.names import Manifest
from kvtier_operator.plan import TierPlan


def service_account(plan: TierPlan) -> Manifest:
    """Return an account of the pods' own, without a token: what runs models needs no cluster credentials."""
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": names.metadata(plan.tier, names.engine(plan.tier), component=names.COMPONENT_ENGINE),
        "automountServiceAccountToken": False,
    }
