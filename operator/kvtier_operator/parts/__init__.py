# SPDX-License-Identifier: Apache-2.0
"""What a tier is made of: each part says what it wants, what keeps it from that, and which others it needs.

Pure: the same plan gives the same objects, each whole, fresh and free of anything that is not applied. A part that is
held up or fails holds up those that need it, and no others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvtier_operator import names
from kvtier_operator.api import TierSpec
from kvtier_operator.api.reasons import Reason
from kvtier_operator.conditions import ConditionRule
from kvtier_operator.names import Manifest
from kvtier_operator.parts import claim, disk, engine_checks, observations
from kvtier_operator.parts.connectors.stores import servers
from kvtier_operator.parts.engine import UP_TO_DATE, deployment
from kvtier_operator.parts.engine_config import config
from kvtier_operator.parts.janitor import HEALTHY, janitor
from kvtier_operator.parts.preflight import CHECKED
from kvtier_operator.parts.routing import ROUTED, router
from kvtier_operator.parts.serving import AVAILABLE, disruption_budget, service, service_account
from kvtier_operator.plan import Refusal, TierPlan
from kvtier_operator.snapshot import Snapshot


@dataclass(frozen=True, kw_only=True)
class Part:
    """One part of a tier."""

    name: str
    wants: Callable[[TierPlan], tuple[Manifest | None, ...]]
    """Its objects, in the order in which they are applied; None is none."""
    kinds: frozenset[str]
    """Of these objects, and of those that it is judged by."""
    needs: tuple[str, ...] = ()
    """Parts that must stand before it is applied."""
    refuse: Callable[[TierSpec, Snapshot], Refusal | None] = lambda _spec, _snapshot: None
    """Says why it cannot become what is asked for."""
    conditions: tuple[ConditionRule, ...] = ()
    """Say what is wrong with it, in the order in which Ready tells of it."""
    serves_as_it_was: bool = False
    """Whether those that need it can do with how it stood before."""

    def objects(self, plan: TierPlan) -> tuple[Manifest, ...]:
        """Return what it wants."""
        return tuple(each for each in self.wants(plan) if each is not None)


CONFIG: Final = "config"
ENGINE: Final = "engine"
PREFLIGHT: Final = "preflight"

PARTS: Final = (
    Part(
        name="claim",
        wants=lambda plan: (claim.claim(plan),),
        kinds=frozenset({names.CLAIM_KIND}),
        refuse=claim.refuse,
        conditions=(claim.BOUND, claim.SHARING),
        serves_as_it_was=True,
    ),
    Part(name=CONFIG, wants=lambda plan: (config(plan),), kinds=frozenset({"ConfigMap"})),
    Part(name="account", wants=lambda plan: (service_account(plan),), kinds=frozenset({"ServiceAccount"})),
    Part(name="service", wants=lambda plan: (service(plan),), kinds=frozenset({"Service"}), conditions=(AVAILABLE,)),
    Part(
        name="disruption budget",
        wants=lambda plan: (disruption_budget(plan),),
        kinds=frozenset({"PodDisruptionBudget"}),
    ),
    # Before the engines, which look for them when they start.
    Part(name="stores", wants=servers, kinds=frozenset({"Deployment"})),
    Part(
        name=ENGINE,
        wants=lambda plan: (deployment(plan),),
        kinds=frozenset({"Deployment"}),
        needs=("claim", CONFIG, "account"),
        conditions=(engine_checks.FITS, engine_checks.READY, engine_checks.SEEDS, UP_TO_DATE),
    ),
    Part(
        name="janitor",
        wants=janitor,
        kinds=frozenset(
            {"ConfigMap", "Deployment", names.LEASE_KIND, "Role", "RoleBinding", "Service", "ServiceAccount"}
        ),
        needs=("claim",),
        conditions=(disk.WITHIN_BUDGET, disk.HEALTHY, HEALTHY),
    ),
    Part(
        name="router",
        wants=router,
        kinds=frozenset({"Deployment", "PodDisruptionBudget", "Role", "RoleBinding", "Service", "ServiceAccount"}),
        conditions=(ROUTED,),
    ),
    # Whose Jobs come and go by themselves, and who has no objects: they are told of, and nothing is applied for them.
    Part(name=PREFLIGHT, wants=lambda _plan: (), kinds=frozenset({"Job"}), conditions=(CHECKED,)),
    Part(
        name="proof",
        wants=lambda _plan: (),
        kinds=frozenset(),
        conditions=(observations.SHARED, observations.EFFECTIVE),
    ),
)
"""In the order in which they are applied: what a pod refers to stands before the pods."""


def render(plan: TierPlan) -> tuple[Manifest, ...]:
    """Return the objects of a tier in apply order."""
    return tuple(each for part in PARTS for each in part.objects(plan))


def refuse_foreign(manifests: tuple[Manifest, ...], snapshot: Snapshot) -> Refusal | None:
    """Refuse to write over what belongs to somebody else."""
    in_the_way = sorted(key for key in map(names.key_of, manifests) if key in snapshot.foreign)
    if not in_the_way:
        return None
    found = ", ".join(str(key) for key in in_the_way)
    return Refusal(
        reason=Reason.OBJECT_NOT_OURS,
        message=f"{found} in namespace {snapshot.tier.namespace} already exists and does not belong to this tier; it "
        "is left as it is: delete or rename it, or create the tier under another name",
    )
