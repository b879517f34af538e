# SPDX-License-Identifier: Apache-2.0
"""``spec.volume`` of a KVCacheTier: the shared volume that holds the blocks. Pure."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import Field, StrictStr

from kvtier_operator import quantity
from kvtier_operator.api.rules import TEXT, ApiModel, ByteQuantity, Checked, ObjectName, Rule, at

SHARED: Final = "ReadWriteMany"

_MOVE: Final = "create another KVCacheTier for the new place and delete this one when its blocks are no longer needed"

_PATH_IS_RELATIVE: Final = Rule.that(
    TEXT.matches("([A-Za-z0-9_-][A-Za-z0-9._-]*(/[A-Za-z0-9_-][A-Za-z0-9._-]*)*)?"),
    "must be a relative path inside the claim, of letters, digits, '.', '_' and '-', without '..': such as team-a/kv",
)


def _constant(field: str, *, cel: str = "self == oldSelf") -> Rule:
    return Rule(cel=cel, message=f"{field} cannot change after creation: {_MOVE}", check=None)


class ClaimSpec(ApiModel):
    """A PersistentVolumeClaim that the operator makes."""

    storage_class_name: ObjectName | None = None
    """StorageClass of the claim; the cluster's default if left out. Cannot change."""
    size: Annotated[
        ByteQuantity,
        Checked(
            (
                Rule(
                    cel="!isQuantity(self) || !isQuantity(oldSelf) || quantity(self).compareTo(quantity(oldSelf)) >= 0",
                    message="cannot shrink, because a PersistentVolumeClaim cannot: restore the old size; to use less "
                    "of it, set spec.disk.budget.maxBytes",
                    check=None,
                ),
            )
        ),
    ]
    """Storage to ask for, such as `2Ti`. May grow where the StorageClass allows it; cannot shrink."""
    access_modes: Annotated[
        tuple[Literal["ReadWriteMany", "ReadWriteOnce"], ...],
        Field(min_length=1, max_length=2),
        Checked(
            (
                _constant(
                    "spec.volume.claim.accessModes",
                    cel="self.size() == oldSelf.size() && self.all(mode, mode in oldSelf)",
                ),
            )
        ),
    ] = (SHARED,)
    """How pods mount the claim. More than one replica needs `ReadWriteMany`; `ReadWriteOnce` does for one. Cannot
    change."""

    rules = (
        _constant(
            "spec.volume.claim.storageClassName",
            cel="has(self.storageClassName) == has(oldSelf.storageClassName) && (!has(self.storageClassName) || "
            "self.storageClassName == oldSelf.storageClassName)",
        ),
    )

    @property
    def size_bytes(self) -> int:
        """Return `size` in bytes."""
        return quantity.parse_bytes(self.size)


class VolumeSpec(ApiModel):
    """The volume that all replicas share: exactly one of `claim` and `existingClaim`."""

    claim: ClaimSpec | None = None
    """A PersistentVolumeClaim that the operator makes."""
    existing_claim: Annotated[ObjectName, Checked((_constant("spec.volume.existingClaim"),))] | None = None
    """Name of a PersistentVolumeClaim in the same namespace, which the operator never changes or deletes. Cannot
    change."""
    path: Annotated[
        StrictStr,
        Field(max_length=256),
        Checked((_PATH_IS_RELATIVE, _constant("spec.volume.path"))),
    ] = ""
    """Directory inside the volume, for a claim that holds other things too; its root if left out. Cannot change."""
    deletion_policy: Literal["Retain", "Delete"] = "Retain"
    """Fate of the claim when this resource is deleted: `Retain` keeps it with its blocks, `Delete` removes a
    claim that the operator made."""

    rules = (
        Rule.exactly_one(
            "claim",
            "existingClaim",
            message="give exactly one of spec.volume.claim (the operator makes a claim) and spec.volume.existingClaim "
            "(the name of yours)",
        ),
        _constant(
            "the choice between spec.volume.claim and spec.volume.existingClaim",
            cel="has(self.claim) == has(oldSelf.claim)",
        ),
        Rule.that(
            ~at("deletionPolicy").is_("Delete") | ~at("existingClaim").is_given,
            "Delete removes only a claim that the operator made: with spec.volume.existingClaim set "
            "spec.volume.deletionPolicy to Retain and delete your claim yourself",
            field=".deletionPolicy",
        ),
    )

    @property
    def is_there(self) -> bool:
        """Tell whether there is one at all."""
        return self.claim is not None or self.existing_claim is not None


NO_VOLUME: Final = VolumeSpec.model_construct(claim=None, existing_claim=None, path="", deletion_policy="Retain")
"""Volume of a tier whose connector keeps nothing on one."""
