# SPDX-License-Identifier: Apache-2.0
"""The parts of a tier: their objects, refusals and conditions. Pure.

The same plan gives the same objects, each whole and fresh. A part that is refused or fails holds up the parts that need
it, and no others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from kvtier_operator import names
from kvtier_operator.api.reasons import Reason, Refusal
from kvtier_operator.names import Manifest, ObjectKey, TierRef
from kvtier_operator.parts import claim, engine_checks, engine_config, janitor, observations, preflight, routing
from kvtier_operator.parts.connectors import stores
from kvtier_operator.parts.engine import UP_TO_DATE, deployment
from kvtier_operator.parts.external import checks as attached
from kvtier_operator.parts.external.checks import by_owner, of_our_engines
from kvtier_operator.parts.network_policies import NETWORK_POLICIES
from kvtier_operator.parts.part import Part, Work
from kvtier_operator.plan import TierPlan
from kvtier_operator.snapshot import Snapshot

__all__ = ["PARTS", "Part", "Work", "keys", "refuse_foreign", "render"]


def _keys(name: str, *kinds: tuple[str, str]) -> tuple[ObjectKey, ...]:
    return tuple(ObjectKey(api_version=version, kind=kind, name=name) for version, kind in kinds)


_CONFIG_MAP: Final = ("v1", "ConfigMap")
_SERVICE: Final = ("v1", "Service")
_ACCOUNT: Final = ("v1", "ServiceAccount")
_DEPLOYMENT: Final = ("apps/v1", "Deployment")
_BUDGET: Final = ("policy/v1", "PodDisruptionBudget")
_ROLE: Final = (names.RBAC, "Role")
_BINDING: Final = (names.RBAC, "RoleBinding")
_LEASE: Final = (names.COORDINATION, names.LEASE_KIND)


PARTS: Final = (
    Part(
        name=claim.PART,
        keys=lambda tier: (names.claim_key(names.claim(tier)),),
        wants=claim.wanted,
        refuse=claim.refuse,
        # A claim is never deleted: no edit of a tier may cost data.
        leaves=lambda _work: True,
        conditions=(claim.BOUND, claim.SHARING),
        serves_as_it_was=True,
    ),
    Part(name=engine_config.PART, keys=lambda tier: _keys(names.config(tier), _CONFIG_MAP), wants=engine_config.wanted),
    Part(
        name="account",
        keys=lambda tier: _keys(names.engine(tier), _ACCOUNT),
        wants=lambda work: (routing.service_account(work.plan),),
    ),
    Part(
        name="service",
        keys=lambda tier: _keys(names.engine(tier), _SERVICE),
        wants=of_our_engines(lambda work: (routing.service(work.plan),)),
        conditions=(by_owner(routing.AVAILABLE, external=attached.AVAILABLE),),
    ),
    Part(
        name="disruption budget",
        keys=lambda tier: _keys(names.engine(tier), _BUDGET),
        wants=of_our_engines(lambda work: (routing.disruption_budget(work.plan),)),
    ),
    NETWORK_POLICIES,
    # Engines connect to them when they start.
    Part(
        name="stores",
        keys=lambda tier: tuple(
            key for name in (names.redis, names.mooncake_master) for key in _keys(name(tier), _SERVICE, _DEPLOYMENT)
        ),
        wants=stores.wanted,
        conditions=(stores.STORE_READY,),
    ),
    Part(
        name="preflight",
        keys=lambda tier: (names.preflight_key(tier),),
        wants=preflight.wanted,
        leaves=preflight.leaves_job,
        why_deleted=preflight.why_deleted,
        conditions=(preflight.CHECKED,),
    ),
    Part(
        name="engine",
        keys=lambda tier: (names.deployment_key(names.engine(tier)),),
        wants=of_our_engines(lambda work: (deployment(work.plan),)),
        waits=lambda work: not preflight.lets_engines_start(work),
        needs=(claim.PART, engine_config.PART, "account"),
        conditions=(
            engine_checks.FITS,
            by_owner(engine_checks.READY, external=attached.READY),
            engine_checks.SEEDS,
            by_owner(UP_TO_DATE, external=attached.UP_TO_DATE),
        ),
    ),
    Part(
        name="janitor",
        keys=lambda tier: _keys(
            names.janitor(tier), _CONFIG_MAP, _LEASE, _ACCOUNT, _ROLE, _BINDING, _SERVICE, _DEPLOYMENT
        ),
        wants=lambda work: janitor.janitor(work.plan),
        needs=(claim.PART,),
        conditions=(janitor.WITHIN_BUDGET, janitor.DISK_HEALTHY, janitor.JANITOR_HEALTHY),
    ),
    Part(
        name="router",
        keys=lambda tier: _keys(names.router(tier), _ACCOUNT, _ROLE, _BINDING, _SERVICE, _BUDGET, _DEPLOYMENT),
        wants=lambda work: routing.router(work.plan),
        conditions=(routing.ROUTED,),
    ),
    Part(
        name=routing.POOL,
        keys=lambda tier: (names.pool_key(tier),),
        wants=lambda work: (routing.pool(work.plan.spec, work.plan.tier),),
        is_read=routing.asks_for_pool,
        own_problem=routing.pool_problem,
    ),
    # Engines are asked in the background; nothing is applied for that.
    Part(name="observation", conditions=(observations.SHARED, observations.EFFECTIVE)),
)
"""In the order in which they are applied: what a pod refers to stands before the pods."""


def keys(body: Mapping[str, Any], tier: TierRef) -> tuple[ObjectKey, ...]:
    """Return the objects that are read for a KVCacheTier body."""
    return tuple(key for part in PARTS if part.is_read(body) for key in part.keys(tier))


def render(plan: TierPlan) -> tuple[Manifest, ...]:
    """Return the objects of a tier in apply order, as in a cluster that has none of them."""
    work = Work(plan=plan, snapshot=Snapshot(tier=plan.tier))
    return tuple(each for part in PARTS for each in part.objects(work))


def refuse_foreign(manifests: tuple[Manifest, ...], snapshot: Snapshot) -> Refusal | None:
    """Refuse to write over an object that does not belong to the tier."""
    in_the_way = sorted(key for key in map(names.key_of, manifests) if key in snapshot.foreign)
    if not in_the_way:
        return None
    found = ", ".join(str(key) for key in in_the_way)
    return Refusal(
        Reason.OBJECT_NOT_OURS,
        f"{found} in namespace {snapshot.tier.namespace} already exists and does not belong to this tier; it "
        "is left as it is: delete or rename it, or create the tier under another name",
    )
