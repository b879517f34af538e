# SPDX-License-Identifier: Apache-2.0
"""Costs of an edit of a tier: which fields start a new cache generation, and which replace the pods.

Pure. There is no second list of such fields: each changed field is tried alone, so the answer is what the operator
would do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvtier_operator import quantity
from kvtier_operator.api import TierSpec
from kvtier_operator.api.generations_spec import IMAGE_KEEPS_CACHE
from kvtier_operator.api.parse import ABSENT, document, with_value


@dataclass(frozen=True, kw_only=True)
class Effect:
    """Results of a spec that an edit can change."""

    generation: str
    """Digest of the blocks that its engines read."""
    template: Mapping[str, Any]
    """The pod template of its engines."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """One field that differs."""

    field: str
    before: object
    """None where the field was left out."""
    after: object
    """None where the field is left out."""
    is_new_generation: bool
    """Whether this field alone makes the cached blocks unreadable."""
    is_restart: bool
    """Whether this field alone replaces the pods."""
    refusal: str = ""
    """Why the API server refuses to change this field; empty where it does not."""


@dataclass(frozen=True, kw_only=True)
class Diff:
    """Costs of an edit."""

    changes: tuple[Change, ...]
    generation: str
    new_generation: str
    restarted_pods: int
    """Engine pods that are replaced, one after the other."""
    replicas: tuple[int, int]
    """Engine pods before and after."""
    warm_bytes: int | None
    """Bytes that the current generation holds on the volume; None where they are unknown."""
    upgrade: tuple[str, ...] = ()
    """Other changes that another release of the operator makes in replaced pods; empty for none."""
    ranks_hint: str = ""
    """Advice about a cache that another ``tensorParallel`` discards; empty for none."""

    @property
    def discards_cache(self) -> bool:
        """Tell whether the new engines start with an empty cache."""
        return self.generation != self.new_generation


def make_diff(
    before: TierSpec,
    after: TierSpec,
    *,
    effect_of: Callable[[TierSpec], Effect],
    running: Effect | None = None,
    warm_bytes: int | None = None,
) -> Diff:
    """Say what it does to replace one spec by the other, given what the operator makes of a spec.

    The engines that run were made from `running`; None where they are as the operator makes them of `before`. The
    current generation holds `warm_bytes`, if that is known.
    """
    old, new = effect_of(before), effect_of(after)
    runs = running or old
    old_document = document(before)

    def effect_alone(path: tuple[str, ...], value: object) -> Effect:
        try:
            return effect_of(TierSpec.model_validate(with_value(old_document, path, value)))
        except ValueError:
            # Not valid without the other fields: then it shares what all of them do.
            return new

    changes = []
    for path, was, becomes in differences(old_document, document(after)):
        alone = effect_alone(path, becomes)
        changes.append(
            Change(
                field=".".join(("spec", *path)),
                before=None if was is ABSENT else was,
                after=None if becomes is ABSENT else becomes,
                is_new_generation=alone.generation != old.generation,
                is_restart=alone.template != old.template,
                refusal=why_refused(".".join(path), was, becomes),
            )
        )
    return Diff(
        changes=tuple(changes),
        generation=runs.generation,
        new_generation=new.generation,
        restarted_pods=before.replicas if runs.template != new.template else 0,
        replicas=(before.replicas, after.replicas),
        warm_bytes=warm_bytes,
    )


def why_refused(field: str, was: Any, becomes: Any) -> str:
    """Return why the API server refuses a change of a spec, by the rules of the CRD that name the old value."""
    if field == "volume.claim.size" and quantity.parse_bytes(becomes) < quantity.parse_bytes(was):
        return "cannot shrink, because a PersistentVolumeClaim cannot: to use less of it, set spec.disk.budget.maxBytes"
    is_same = field == "volume.claim.accessModes" and set(was) == set(becomes)
    if (field in _FIXED and not is_same) or (field == "volume" and becomes is ABSENT):
        return "cannot change after creation: create another KVCacheTier, and delete this one when it is not needed"
    return ""


_FIXED: Final = frozenset({"operatorClassName", "volume.claim", "volume.existingClaim", "volume.path"}) | {
    f"volume.claim.{name}" for name in ("accessModes", "storageClassName")
}


def warm_bytes(status: Mapping[str, Any]) -> int | None:
    """Return the bytes that the current generation of a tier holds on the volume, by its status."""
    for entry in status.get("generations") or ():
        if isinstance(entry, Mapping) and entry.get("digest") == (status.get("generation") or {}).get("current"):
            found = entry.get("usedBytes")
            return found if isinstance(found, int) else None
    for tier in status.get("tiers") or ():
        if isinstance(tier, Mapping) and tier.get("name") == "disk" and isinstance(tier.get("usedBytes"), int):
            found = tier["usedBytes"]
            return int(found)
    return None


def warnings(diff: Diff) -> tuple[str, ...]:
    """Return what a person should know before such an edit, as sentences; nothing where it costs nothing."""
    if refused := [
        f"the API server refuses this edit: {each.field} {each.refusal}" for each in diff.changes if each.refusal
    ]:
        return tuple(refused)
    sentences = []
    if diff.discards_cache:
        held = "" if diff.warm_bytes is None else f" ({quantity.show_bytes(diff.warm_bytes)} on the volume)"
        sentences.append(
            f"starts an empty cache: blocks of generation {diff.generation}{held} cannot be read by engines with "
            f"{_fields(change for change in diff.changes if change.is_new_generation)}; they stay for a rollback until "
            "they are removed as an old generation"
        )
    elif any(change.field == "spec.engine.image" and not change.is_new_generation for change in diff.changes):
        sentences.append(IMAGE_KEEPS_CACHE)
    if diff.ranks_hint:
        sentences.append(diff.ranks_hint)
    if diff.restarted_pods:
        causes = _fields(change for change in diff.changes if change.is_restart)
        pods = "1 engine pod" if diff.restarted_pods == 1 else f"{diff.restarted_pods} engine pods, one after another"
        sentences.append(f"replaces {pods}: {causes} changed")
    if diff.restarted_pods and diff.upgrade:
        sentences.append(
            f"an earlier operator made the engines that run; new ones differ in {', '.join(diff.upgrade)}, too"
        )
    return tuple(sentences)


def _fields(changes: Iterator[Change]) -> str:
    return ", ".join(change.field for change in changes) or "these fields together"


def differences(
    old: Mapping[str, Any], new: Mapping[str, Any], above: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], object, object]]:
    """Yield each field that differs; lists are compared whole."""
    for name in dict.fromkeys((*old, *new)):
        was, becomes = old.get(name, ABSENT), new.get(name, ABSENT)
        if isinstance(was, Mapping) and isinstance(becomes, Mapping):
            yield from differences(was, becomes, (*above, name))
        elif was != becomes:
            yield (*above, name), was, becomes
