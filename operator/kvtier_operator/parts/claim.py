# SPDX-License-Identifier: Apache-2.0
"""The claim that holds the blocks: why it cannot be used or become what is asked for, and who else fills it. Pure."""

from __future__ import annotations

from typing import Final

from kvtier_operator import names, quantity
from kvtier_operator.api import TierSpec
from kvtier_operator.api.disk_spec import OF_ONE_NODE, SHARED
from kvtier_operator.api.reasons import Reason, Refusal
from kvtier_operator.conditions import (
    ConditionRule,
    PlannedStage,
    Problem,
    Status,
    as_before,
    checked,
    listed,
    met,
    not_checked,
    quoted,
)
from kvtier_operator.names import Manifest, TierRef
from kvtier_operator.parts.part import Work
from kvtier_operator.plan import TierPlan, releases_claim
from kvtier_operator.snapshot import LiveClaim, Snapshot

PART: Final = "claim"
DELETE: Final = "Delete"

UNUSABLE: Final = frozenset({Reason.CLAIM_MISSING, Reason.CLAIM_NOT_SHARED})
"""With any other refusal the claim stays as it is, and serves."""


def wanted(work: Work) -> tuple[Manifest, ...]:
    """Return the claim; none that is being deleted, which takes no change."""
    live, made = work.snapshot.claim, claim(work.plan)
    return () if made is None or (live is not None and live.is_terminating) else (made,)


def claim(plan: TierPlan) -> Manifest | None:
    """Return the claim, or None where the user brings one: that is never applied, labelled or deleted."""
    wanted = plan.spec.volume.claim
    if wanted is None:
        return None
    spec = {
        "accessModes": list(wanted.access_modes),
        "resources": {"requests": {"storage": wanted.size}},
        **({"storageClassName": wanted.storage_class_name} if wanted.storage_class_name is not None else {}),
        "volumeMode": "Filesystem",
    }
    return of_spec(plan.tier, spec, is_owned=plan.spec.volume.deletion_policy == DELETE)


def of_spec(tier: TierRef, spec: Manifest, *, is_owned: bool) -> Manifest:
    """Return the claim with a spec. The garbage collector deletes what the tier owns: a retained claim is not owned."""
    metadata = names.metadata(tier, names.claim(tier), component=names.COMPONENT_VOLUME, is_owned=is_owned)
    return {"apiVersion": "v1", "kind": names.CLAIM_KIND, "metadata": metadata, "spec": spec}


def refuse(spec: TierSpec, snapshot: Snapshot) -> Refusal | None:
    """Return what Kubernetes would not let the claim become, or why no engine could use it."""
    live = snapshot.claim
    if spec.volume.claim is None:
        # One that no engine mounts is not missed.
        return _refuse_existing(spec, snapshot) if spec.connector.uses_volume else None
    # A claim that is being deleted is left alone: VolumeBound says so.
    return None if live is None or live.is_terminating else _refuse_change(spec, live)


def _refuse_existing(spec: TierSpec, snapshot: Snapshot) -> Refusal | None:
    live, name = snapshot.claim, spec.volume.existing_claim
    if live is None:
        return Refusal(
            Reason.CLAIM_MISSING,
            f"spec.volume.existingClaim: no PersistentVolumeClaim {name!r} in namespace "
            f"{snapshot.tier.namespace}: create it, or let the operator make one with spec.volume.claim",
        )
    if spec.replicas > 1 and not {SHARED, OF_ONE_NODE}.intersection(live.access_modes):
        return Refusal(
            Reason.CLAIM_NOT_SHARED,
            f"spec.volume.existingClaim: {name!r} is {', '.join(live.access_modes) or 'without access modes'}, "
            f"and {spec.replicas} replicas need {SHARED}, or {OF_ONE_NODE} to run on one node: set spec.replicas to 1 "
            "or use another claim",
        )
    return None


def _refuse_change(spec: TierSpec, live: LiveClaim) -> Refusal | None:
    wanted = spec.volume.claim
    assert wanted is not None
    differing = [
        f"{field} is {found!r}, not {value!r}"
        for field, found, value in (
            ("accessModes", sorted(live.access_modes), sorted(wanted.access_modes)),
            ("storageClassName", live.storage_class_name, wanted.storage_class_name or live.storage_class_name),
        )
        if found != value
    ]
    if differing:
        return Refusal(
            Reason.CLAIM_IMMUTABLE,
            f"spec.volume.claim: the claim {live.name!r} exists and its {'; '.join(differing)}; Kubernetes "
            "cannot change that: restore the old value, or move to another claim with spec.volume.existingClaim",
        )
    if wanted.size_bytes < live.requested_bytes:
        return Refusal(
            Reason.CLAIM_CANNOT_SHRINK,
            f"spec.volume.claim.size: {wanted.size} is less than the "
            f"{quantity.format_bytes(live.requested_bytes)} that claim {live.name!r} has, and a claim cannot "
            "shrink. Set that size, or limit spec.disk.budget.maxBytes; the claim stays as it is, and is used",
        )
    return None


def claim_exists(stage: PlannedStage) -> Problem | None:
    """There is a claim, and it was not deleted."""
    if stage.snapshot.claim is None:
        name = stage.spec.volume.existing_claim or names.claim(stage.snapshot.tier)
        return Problem(Reason.CLAIM_MISSING, f"PersistentVolumeClaim/{name} does not exist yet")
    if stage.snapshot.claim.is_terminating:
        name = stage.snapshot.claim.name
        remedy = (
            "the tier's own pods are stopped for that; `kubectl describe pvc "
            f"{name}` names others that use it (Used By)"
            if releases_claim(stage.spec, stage.snapshot)
            else "back up what you need, then set spec.replicas to 0, which stops the janitor and the preflight, too; "
            "engines of another owner are stopped there instead"
        )
        return Problem(
            Reason.CLAIM_TERMINATING, f"PersistentVolumeClaim/{name} was deleted and goes when no pod uses it: {remedy}"
        )
    return None


def claim_is_bound(stage: PlannedStage) -> Problem | None:
    """A volume stands behind the claim."""
    claim = stage.snapshot.claim
    if claim is None or claim.phase == "Bound":
        return None
    if claim.phase == "Lost":
        return Problem(
            Reason.CLAIM_LOST,
            f"the volume of PersistentVolumeClaim/{claim.name} is gone: delete the claim so that a new one can "
            "be made; what was cached is lost",
        )
    return Problem(
        Reason.CLAIM_PENDING,
        f"PersistentVolumeClaim/{claim.name} (storage class {claim.storage_class_name or 'by default'}) is "
        f"{claim.phase}: `kubectl describe pvc {claim.name}` says why; a class with WaitForFirstConsumer binds when "
        "the first engine is scheduled",
    )


def claim_has_its_size(stage: PlannedStage) -> Problem | None:
    """The volume is as large as was asked for; a claim that still grows serves meanwhile."""
    claim = stage.snapshot.claim
    if claim is None or (not claim.resizing and not 0 < claim.capacity_bytes < claim.requested_bytes):
        return None
    has, wants = quantity.format_bytes(claim.capacity_bytes), quantity.format_bytes(claim.requested_bytes)
    remedy = (
        "the storage class's driver grows it when a pod mounts it next: set the annotation kvtier.dev/restart if it "
        "stays so"
        if "FileSystemResizePending" in claim.resizing
        else f"`kubectl describe pvc {claim.name}` shows how far it is"
    )
    return met(
        Reason.CLAIM_EXPANDING, f"the claim is bound; it grows from {has} to {wants}{quoted(claim.resizing)}; {remedy}"
    )


_SHARED: Final = "ClaimShared"


def claim_is_shared(spec: TierSpec, snapshot: Snapshot) -> Problem:
    """Other tiers keep their blocks on the same claim; whatever their paths, they share the room."""
    found, wanted = snapshot.claim, spec.volume.claim
    name = spec.volume.existing_claim or names.claim(snapshot.tier)
    if not snapshot.neighbours:
        return Problem(Reason.CLAIM_ALONE, f"no other tier is on claim {name}")
    budgets = {each.name: each.max_bytes for each in snapshot.neighbours}
    budgets[snapshot.tier.name] = spec.disk.budget.max_bytes
    others = listed([f"{each} ({_size(budgets[each])})" for each in budgets if each != snapshot.tier.name])
    shared = f"claim {name} is shared with {others}"
    room = 0 if wanted is None else wanted.size_bytes
    room = room if found is None else found.capacity_bytes or found.requested_bytes
    without, total = [each for each, most in budgets.items() if most is None], sum(filter(None, budgets.values()))
    if without:
        return met(
            Reason.BUDGETS_OVERLAP,
            f"{shared}, and nothing limits the blocks of {listed(sorted(without))}: set spec.disk.budget.maxBytes of "
            "each, so that together they fit the claim",
        )
    sizes = f"their budgets are {quantity.format_bytes(total)} together"
    if 0 < room < total:
        return met(
            Reason.BUDGETS_OVERLAP,
            f"{shared}, and {sizes}, of {quantity.format_bytes(room)}: the volume is full before janitors make room; "
            "lower spec.disk.budget.maxBytes of each, so that together they fit, or let the claim grow",
        )
    return met(Reason.BUDGETS_FIT, f"{shared}; {sizes}{f', of {quantity.format_bytes(room)}' if room else ''}")


def _size(most: int | None) -> str:
    return "no limit" if most is None else quantity.format_bytes(most)


BOUND: Final = checked(
    "VolumeBound", (claim_exists, claim_is_bound, claim_has_its_size), ok=Reason.BOUND, text="the claim is bound"
)


def _judge_sharing(stage: PlannedStage, previous: Status) -> Problem:
    if names.CLAIM_KIND in stage.snapshot.unreadable:
        return as_before(_SHARED, previous) or not_checked()
    return claim_is_shared(stage.spec, stage.snapshot)


SHARING: Final = ConditionRule(kind=_SHARED, needs=PlannedStage, judge=_judge_sharing, counts=False)
