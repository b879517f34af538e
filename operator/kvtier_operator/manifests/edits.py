# SPDX-License-Identifier: Apache-2.0
"""What an edit of a tier does to its pods and to its cache, as the operator would carry it out. Pure."""

from __future__ import annotations

from kvtier_operator.manifests.engine import deployment
from kvtier_operator.names import TierRef
from kvtier_operator.plan import diff, make_unchecked_plan
from kvtier_operator.snapshot import Snapshot
from kvtier_operator.spec import TierSpec


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
    """

    def effect_of(spec: TierSpec) -> diff.Effect:
        plan = make_unchecked_plan(spec, tier, connector_image=connector_image, snapshot=snapshot)
        return diff.Effect(generation=plan.generation.digest, template=deployment(plan)["spec"]["template"])

    return diff.make_diff(before, after, effect_of=effect_of, warm_bytes=warm_bytes)
