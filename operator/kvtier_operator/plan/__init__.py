# SPDX-License-Identifier: Apache-2.0
"""Decide what a tier becomes: spec and snapshot in, one complete plan or one refusal out.

Pure and total. What Kubernetes would reject later, half-way through a list of objects, is refused here as a value, with
the remedy in its message.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvtier_connector import contract
from kvtier_operator import names
from kvtier_operator.names import TierRef
from kvtier_operator.plan import digest, flags
from kvtier_operator.plan.janitor import JanitorPlan, make_janitor
from kvtier_operator.plan.sizing import Sizing, make_sizing
from kvtier_operator.snapshot import Claim, Snapshot
from kvtier_operator.spec import TierSpec

SHARED: Final = "ReadWriteMany"


class RefusalReason(enum.Enum):
    """Why a spec that is valid by itself cannot be carried out in this cluster."""

    OBJECT_NOT_OURS = enum.auto()
    CLAIM_MISSING = enum.auto()
    CLAIM_NOT_SHARED = enum.auto()
    CLAIM_IMMUTABLE = enum.auto()
    CLAIM_CANNOT_SHRINK = enum.auto()


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """A legal "no": what is wrong and what to do about it."""

    reason: RefusalReason
    message: str


@dataclass(frozen=True, kw_only=True)
class Generation:
    """One set of mutually readable blocks: its identity, its digest, and where it lies in the pod."""

    digest: str
    identity: Mapping[str, Any]
    root: str


@dataclass(frozen=True, kw_only=True)
class TierPlan:
    """Everything the manifests need; nothing in it is read from a cluster again."""

    tier: TierRef
    spec: TierSpec
    connector_image: str
    sizing: Sizing
    generation: Generation
    config_text: str
    config_digest: str
    live_text: str
    """What engines follow without a restart: no digest of a pod template contains it."""
    claim_name: str
    janitor: JanitorPlan | None


@dataclass(frozen=True, kw_only=True)
class Images:
    """Images that come with the operator."""

    connector: str
    janitor: str


def make_plan(spec: TierSpec, snapshot: Snapshot, *, images: Images) -> TierPlan | Refusal:
    """Decide everything the manifests need; refuse what Kubernetes would reject later (a shrinking claim)."""
    refusal = _refuse_foreign(spec, snapshot) or _refuse_claim(spec, snapshot)
    if refusal is not None:
        return refusal
    return make_unchecked_plan(spec, snapshot.tier, images=images)


def make_unchecked_plan(spec: TierSpec, tier: TierRef, *, images: Images) -> TierPlan:
    """Decide the same for a cluster that nobody has looked at: for rendering offline."""
    generation, encryption = make_generation(spec, tier), spec.disk.encryption
    config_text = contract.encode(
        contract.ConnectorConfig(
            tier=str(tier),
            root=generation.root,
            digest=generation.digest,
            identity=generation.identity,
            # Live: what stands here would restart every engine when it changes.
            max_bytes=0,
            keys_dir="" if encryption is None else names.KEYS_MOUNT,
            cost_aware=spec.disk.admission.cost_aware,
            min_tokens=spec.disk.admission.min_tokens,
            min_reuse=spec.disk.admission.min_reuse,
            live_file=f"{names.CONFIG_MOUNT}/{contract.LIVE_FILE}",
        )
    )
    return TierPlan(
        tier=tier,
        spec=spec,
        connector_image=images.connector,
        sizing=sizing_of(spec),
        generation=generation,
        config_text=config_text,
        config_digest=digest.digest_text(config_text),
        live_text=contract.encode_live(
            spec.disk.mode,
            max_bytes=spec.disk.budget.max_bytes or 0,
            active_key="" if encryption is None else encryption.active_key,
        ),
        claim_name=spec.volume.existing_claim or names.claim(tier),
        janitor=make_janitor(spec, tier, root=generation.root, image=images.janitor),
    )


def sizing_of(spec: TierSpec) -> Sizing:
    """Return the sizes of one engine pod of this spec."""
    return make_sizing(
        cpu_bytes=spec.cpu.size_bytes,
        engine_memory_bytes=spec.engine.memory_bytes,
        engines_per_pod=flags.engines_per_pod(spec.engine.args),
        # Weights pass through this memory, so it says how large they may be; nobody here has seen the model.
        weight_bytes=spec.engine.memory_bytes,
    )


def make_generation(spec: TierSpec, tier: TierRef) -> Generation:
    """Return the generation that engines of this spec read and write."""
    identity = digest.identity(spec)
    key = digest.digest(identity)
    parts = (names.VOLUME_MOUNT, spec.volume.path.strip("/"), f"{tier.namespace}.{tier.name}", key)
    return Generation(digest=key, identity=identity, root="/".join(part for part in parts if part))


def _refuse_foreign(spec: TierSpec, snapshot: Snapshot) -> Refusal | None:
    in_the_way = sorted(
        key for key in snapshot.foreign if key.kind != names.CLAIM_KIND or spec.volume.claim is not None
    )
    if not in_the_way:
        return None
    found = ", ".join(str(key) for key in in_the_way)
    return Refusal(
        reason=RefusalReason.OBJECT_NOT_OURS,
        message=f"{found} in namespace {snapshot.tier.namespace} already exists and does not belong to this tier; it "
        "is left as it is: delete or rename it, or create the tier under another name",
    )


def _refuse_claim(spec: TierSpec, snapshot: Snapshot) -> Refusal | None:
    live = snapshot.claim
    if spec.volume.claim is None:
        return _refuse_existing(spec, snapshot)
    return None if live is None else _refuse_change(spec, live)


def _refuse_existing(spec: TierSpec, snapshot: Snapshot) -> Refusal | None:
    live, name = snapshot.claim, spec.volume.existing_claim
    if live is None:
        return Refusal(
            reason=RefusalReason.CLAIM_MISSING,
            message=f"spec.volume.existingClaim: no PersistentVolumeClaim {name!r} in namespace "
            f"{snapshot.tier.namespace}: create it, or let the operator make one with spec.volume.claim",
        )
    if spec.replicas > 1 and SHARED not in live.access_modes:
        return Refusal(
            reason=RefusalReason.CLAIM_NOT_SHARED,
            message=f"spec.volume.existingClaim: {name!r} is {', '.join(live.access_modes) or 'without access modes'}, "
            f"and {spec.replicas} replicas need {SHARED}: set spec.replicas to 1 or use a {SHARED} claim",
        )
    return None


def _refuse_change(spec: TierSpec, live: Claim) -> Refusal | None:
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
            reason=RefusalReason.CLAIM_IMMUTABLE,
            message=f"spec.volume.claim: the claim {live.name!r} exists and its {'; '.join(differing)}; Kubernetes "
            "cannot change that: restore the old value, or move to another claim with spec.volume.existingClaim",
        )
    if wanted.size_bytes < live.requested_bytes:
        return Refusal(
            reason=RefusalReason.CLAIM_CANNOT_SHRINK,
            message=f"spec.volume.claim.size: {wanted.size} is less than the {live.requested_bytes} bytes that claim "
            f"{live.name!r} has, and a claim cannot shrink: restore the size, or limit spec.disk.budget.maxBytes",
        )
    return None
