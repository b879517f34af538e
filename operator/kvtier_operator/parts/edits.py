# SPDX-License-Identifier: Apache-2.0
"""What an edit of a tier does to its pods and to its cache, as the operator would carry it out. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from kvtier_operator.api import TierSpec
from kvtier_operator.errors import SpecInvalid
from kvtier_operator.names import TierRef
from kvtier_operator.parts.engine import deployment
from kvtier_operator.plan import TierPlan, canonical, diff, make_unchecked_plan
from kvtier_operator.snapshot import Snapshot


def explain_edit(  # noqa: PLR0913  each by its name
    before: TierSpec,
    after: TierSpec,
    tier: TierRef,
    *,
    connector_image: str,
    snapshot: Snapshot | None = None,
    warm_bytes: int | None = None,
) -> diff.Diff:
    """Say what replacing one spec by the other does.

    Args:
        before: the spec that the engines run.
        after: the spec that they are to run.
        tier: whose.
        connector_image: image that brings the connector into the engine pods.
        snapshot: the cluster, whose Deployment says what was decided before; None where nobody has looked at one.
        warm_bytes: what the current generation holds on the volume; see `diff.warm_bytes`.

    Raises:
        SpecInvalid: one of the specs cannot be carried out whatever the nodes are.
    """

    def effect_of(spec: TierSpec) -> diff.Effect:
        plan = _plan(spec, tier, connector_image=connector_image, snapshot=snapshot)
        return diff.Effect(generation=plan.generation.digest, template=deployment(plan)["spec"]["template"])

    found = diff.make_diff(before, after, effect_of=effect_of, warm_bytes=warm_bytes)
    is_for_ranks = any(change.field == _RANKS and change.is_new_generation for change in found.changes)
    return replace(found, ranks_hint=canonical.advise(after)) if is_for_ranks else found


_RANKS: Final = "spec.engine.tensorParallel"


def _plan(spec: TierSpec, tier: TierRef, *, connector_image: str, snapshot: Snapshot | None) -> TierPlan:
    """Return what becomes of a spec; a share of nodes that nobody has seen stands for itself."""
    try:
        return make_unchecked_plan(spec, tier, connector_image=connector_image, snapshot=snapshot)
    except SpecInvalid:
        if spec.cpu.percent is None:
            raise
        assumed = spec.cpu.model_copy(update={"size": f"{spec.cpu.percent}Mi", "fraction": None})
        return make_unchecked_plan(
            spec.model_copy(update={"cpu": assumed}), tier, connector_image=connector_image, snapshot=snapshot
        )
