# SPDX-License-Identifier: Apache-2.0
"""Turn a plan into Kubernetes objects.

Pure: the same plan gives the same objects, each whole, fresh and free of anything that is not applied.
"""

from __future__ import annotations

from kvtier_operator.manifests.access import service_account
from kvtier_operator.manifests.config import config
from kvtier_operator.manifests.disruption import disruption_budget
from kvtier_operator.manifests.engine import deployment
from kvtier_operator.manifests.janitor import janitor
from kvtier_operator.manifests.service import service
from kvtier_operator.manifests.volume import claim
from kvtier_operator.names import Manifest
from kvtier_operator.plan import TierPlan


def render(plan: TierPlan) -> tuple[Manifest, ...]:
    """Return the objects of a tier in apply order: what a pod refers to stands before the pods."""
    volume = claim(plan)
    return (
        *(() if volume is None else (volume,)),
        config(plan),
        service_account(plan),
        service(plan),
        disruption_budget(plan),
        deployment(plan),
        *janitor(plan),
    )
