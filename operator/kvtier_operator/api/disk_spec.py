# SPDX-License-Identifier: Apache-2.0
"""The volume of a KVCacheTier, its use and upkeep: spec.volume, spec.disk and spec.janitor. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import Field, StrictBool, StrictInt, StrictStr, StringConstraints

from kvtier_connector.contract.engine import KEY_ID_PATTERN, TENANT_PATTERN
from kvtier_operator import quantity
from kvtier_operator.api.rules import (
    TEXT,
    ApiModel,
    BlockTokens,
    ByteQuantity,
    Checked,
    Converted,
    CpuQuantity,
    Keyed,
    ObjectName,
    Pasted,
    Rule,
    Word,
    at,
    quantity_range,
)

_IS_TENANT: Final = Rule.that(
    TEXT.matches(TENANT_PATTERN),
    "must be 1 to 32 lower-case letters, digits, '.', '_' and '-', starting with a letter or a digit: it is the name "
    "of a directory",
)


class Quota(ApiModel):
    """Storage for the blocks of one tenant."""

    tenant: Annotated[StrictStr, StringConstraints(min_length=1, max_length=64), Checked((_IS_TENANT,))]
    """Name of the tenant: what requests say, or the first 16 digits of the SHA-256 of its `cache_salt`."""
    max_size: Annotated[ByteQuantity, Field(alias="maxBytes")]
    """Storage that its blocks may take, of all generations together."""


class Tenants(ApiModel):
    """Who the requests come from, so that each has a directory and a quota of its own on the volume."""

    source: Annotated[Literal["None", "CacheSalt", "Parameter"], Field(alias="from")] = "None"
    """How a request names its tenant: `CacheSalt` by its `cache_salt`, `Parameter` by `kvtier_tenant` in its
    `kv_transfer_params`; with `None` all blocks are common. Only a salt keeps tenants apart in the memory of an engine,
    too."""
    quotas: Annotated[tuple[Annotated[dict[str, Any], Pasted(Quota)], ...], Field(max_length=256), Keyed("tenant")] = ()
    """Storage for the blocks of single tenants. Changing it restarts nothing."""
    default_max_size: Annotated[ByteQuantity | None, Field(alias="defaultMaxBytes")] = None
    """Storage for the blocks of every other tenant; no limit if left out. Changing it restarts nothing."""

    rules = (
        Rule.that(
            ~at("from").is_("None")
            | (
                at("quotas").test(lambda each: f"{each}.size() == 0", lambda each: not each)
                & ~at("defaultMaxBytes").is_given
            ),
            "must be CacheSalt or Parameter where quotas or defaultMaxBytes are given: without it no block belongs to "
            "a tenant",
            field=".from",
        ),
    )

    @property
    def quota_bytes(self) -> Mapping[str, int]:
        """Return `quotas` in bytes, by tenant."""
        return {entry["tenant"]: quantity.parse_bytes(entry["maxBytes"]) for entry in self.quotas}

    default_bytes = Converted[int | None]("default_max_size", quantity.parse_bytes)


class AdmissionSpec(ApiModel):
    """Which blocks are worth writing to the volume and reading from it."""

    min_reuse: Annotated[StrictInt, Field(ge=1, le=100, json_schema_extra={"format": "int32"})] = 1
    """Write a block when an engine offers it for this many-th time. With `1`, every block is written. With `2`, a
    fraction is: that pays only where the budget is small or writes are scarce. A block that is not written the first
    time cannot be read the second time."""
    min_tokens: Annotated[StrictInt, Field(ge=0, le=10_000_000, json_schema_extra={"format": "int32"})] = 0
    """Hits on the volume of fewer tokens are computed again. `0` leaves it to what engines measure."""


_PERCENTAGE: Final = "(100|[1-9][0-9]?)%"
_DAYS: Final = "[1-9][0-9]{0,4}d"
_DURATION: Final = f"{_DAYS}|([0-9]{{1,6}}h)?([0-9]{{1,6}}m)?([0-9]{{1,6}}s)?"

_IS_PERCENTAGE: Final = Rule.that(
    TEXT.matches(_PERCENTAGE), 'is not a percentage; write a whole number from 1 to 100 and the sign, such as "90%"'
)
_IS_FREE_SPACE: Final = Rule.that(
    TEXT.matches("[1-9]?[0-9]%") | TEXT.test(lambda text: f"isQuantity({text})", quantity.is_quantity),
    'is neither a percentage below 100% nor a quantity; write such as "5%" or "50Gi"',
)
_IS_DURATION: Final = Rule.that(
    TEXT.matches(_DURATION),
    'is not a duration; write days, or hours, minutes and seconds, such as "7d", "168h" or "1h30m"',
)
_AT_LEAST_1M: Final = Rule.that(
    ~TEXT.matches(_DURATION)
    | TEXT.matches(_DAYS)
    | TEXT.test(lambda text: f"duration({text}) >= duration('1m')", lambda text: quantity.parse_seconds(text) >= 60),  # noqa: PLR2004  1m
    "must be at least 1m, or blocks would be gone before they are read; to keep them for good, write a long time, such "
    'as "87600h" (ten years)',
)
_IS_KEY_ID: Final = Rule.that(
    TEXT.matches(KEY_ID_PATTERN),
    "must be the name of an entry of the Secret, of letters, digits, '.', '_' and '-', starting with a letter or a "
    "digit, such as 2026-11",
)

_ShortText = Annotated[StrictStr, StringConstraints(min_length=2, max_length=24)]

Percentage = Annotated[_ShortText, Checked((_IS_PERCENTAGE,))]
"""A whole percentage, from 1% to 100%."""

FreeSpace = Annotated[
    StrictStr,
    StringConstraints(min_length=1, max_length=32),
    Checked(
        (
            _IS_FREE_SPACE,
            quantity_range(
                "1Mi",
                'must be at least 1Mi where it is no percentage: write the sign or the unit, such as "5%" or "50Gi"; '
                '"0%" leaves it to others',
            ),
        )
    ),
]
"""A whole percentage, from 0% to 99%, or an amount of storage."""

Duration = Annotated[_ShortText, Checked((_IS_DURATION, _AT_LEAST_1M))]
"""A time of at least a minute."""


def _percent(text: str) -> int:
    return int(text.removesuffix("%"))


class Budget(ApiModel):
    """How much of the volume the blocks may take, and for how long."""

    max_size: Annotated[ByteQuantity | None, Field(alias="maxBytes")] = None
    """Storage that the blocks of this tier may take, of all generations together, such as `1800Gi`; at most the size of
    the claim. Engines stop storing there. No limit if left out: then `minFree` is.
    Changing it restarts nothing."""
    high_watermark: Percentage = "90%"
    """Share of `maxBytes` above which the janitor evicts blocks, the least recently used first."""
    low_watermark: Percentage = "75%"
    """Share of `maxBytes` down to which it evicts. Less than `highWatermark`."""
    ttl: Duration = "168h"
    """Age at which a block is removed, however often it is read: the longest that anything derived from a prompt is
    kept."""
    min_free: FreeSpace = "5%"
    """Share of the volume that stays free, such as `5%`, or an amount such as `50Gi`. The janitor evicts when less is
    left, and has engines stop storing where that does not help. `0%` leaves it to others."""
    min_size: Annotated[ByteQuantity | None, Field(alias="minBytes")] = None
    """Share that this tier keeps when others fill the volume: for the sake of `minFree`, the janitor does not evict
    below it. At most `maxBytes`."""

    rules = (
        Rule(
            cel="!has(self.highWatermark) || !has(self.lowWatermark) "
            f"|| !self.highWatermark.matches('^{_PERCENTAGE}$') || !self.lowWatermark.matches('^{_PERCENTAGE}$') "
            "|| int(self.lowWatermark.replace('%', '')) < int(self.highWatermark.replace('%', ''))",
            message="must be less than spec.disk.budget.highWatermark: lower it, so that an eviction makes room for "
            "more than the next block",
            check=lambda budget: _percent(budget.low_watermark) < _percent(budget.high_watermark),
            field=".lowWatermark",
        ),
        Rule.that(
            at("minBytes").is_at_most(at("maxBytes")),
            "is more than spec.disk.budget.maxBytes, which the tier may never take: lower minBytes or raise maxBytes",
            field=".minBytes",
        ),
    )

    max_bytes = Converted[int | None]("max_size", quantity.parse_bytes)
    min_bytes = Converted[int | None]("min_size", quantity.parse_bytes)
    high_fraction = Converted("high_watermark", lambda text: _percent(text) / 100)
    low_fraction = Converted("low_watermark", lambda text: _percent(text) / 100)
    min_free_fraction = Converted("min_free", lambda text: _percent(text) / 100 if text.endswith("%") else 0.0)
    min_free_bytes = Converted("min_free", lambda text: 0 if text.endswith("%") else quantity.parse_bytes(text))
    ttl_seconds = Converted("ttl", quantity.parse_seconds)


class EncryptionSpec(ApiModel):
    """Encryption of the blocks on the volume, with AES-256-GCM."""

    secret_name: ObjectName
    """Secret in the same namespace with a key in each entry: 32 bytes, as they are, or in hexadecimal or base64. Blocks
    are read with whichever of them they were written with. Without the Secret no engine starts."""
    active_key: Annotated[StrictStr, StringConstraints(min_length=1, max_length=64), Checked((_IS_KEY_ID,))]
    """Entry of the Secret that new blocks are written with. To rotate, add an entry and name it here: nothing restarts,
    and the old entry can go when no block needs it any more, after `budget.ttl` at the latest."""


class Disk(ApiModel):
    """The tier on the volume."""

    mode: Literal["ReadWrite", "ReadOnly", "Bypass"] = "ReadWrite"
    """How engines use the volume: `ReadOnly` loads blocks and stores none, `Bypass` does not touch it. Engines follow
    within a minute or two, as fast as the kubelet refreshes a ConfigMap; none restarts."""
    budget: Budget = Budget()
    """How much of the volume the blocks may take, and for how long."""
    block_tokens: BlockTokens | None = None
    """Tokens of one file, a multiple of vLLM's own block size. Left out, it is chosen so that a file has 4 to 8 MiB,
    or is one block of vLLM for a model whose KV is unknown. Changing it starts a new cache generation."""
    canonical_layout: StrictBool = False
    """Whether blocks are laid out as without parallelism (vLLM's `canonical_layout`), so that engines of any
    `engine.tensorParallel` read the same ones. Each layer is then copied by itself, which takes longer on devices. It
    is refused where vLLM does not certify it: layers that keep a state, pipeline or context parallelism, KV heads that
    cannot be dealt out evenly. Changing it starts a new cache generation; after that, changing `tensorParallel` does
    not."""
    admission: AdmissionSpec = AdmissionSpec()
    """Which blocks are worth writing to the volume and reading from it."""
    split_hits: Literal["Auto", "Off"] = "Auto"
    """Whether an engine computes the head of a prompt while it reads the tail from the volume. `Auto` does so wherever
    that is quicker and the model allows it. It sets vLLM's `--scheduler-cls`. With `"Off"`, a hit is read or computed
    as a whole, and `engine.args` may name another scheduler. Changing it keeps the cache, and restarts the engines."""
    tenants: Tenants = Tenants()
    """Who the requests come from, so that each has a directory and a quota of its own on the volume."""
    compression: Literal["Off", "Auto", "Always"] = "Off"
    """Whether blocks are compressed when they are written, without a loss. bfloat16 takes about a third less. With
    `Auto`, they are where the volume, as `proof.preflight` measured it, is slower than half of an engine's processors
    would be. With `Always`, they are wherever it saves bytes. Engines read both, whatever this is; those of a release
    before compression compute such blocks again. Changing it keeps the cache, and restarts the engines."""
    encryption: EncryptionSpec | None = None
    """Encryption of the blocks on the volume. Without it they lie there as they are."""


class JanitorResources(ApiModel):
    """Resources of the janitor's container."""

    cpu: CpuQuantity = "100m"
    """Processors that it asks for; it may use more when others do not."""
    memory: Annotated[
        ByteQuantity,
        Checked(
            (
                quantity_range(
                    "64Mi",
                    "must be at least 64Mi, which the janitor takes before it knows a block; a million blocks take "
                    "less than 300Mi",
                ),
            )
        ),
    ] = "512Mi"
    """Memory that it requests and is limited to. A million blocks take less than 300Mi."""


class Janitor(ApiModel):
    """The process that keeps the volume inside its budget: one small pod per tier."""

    enabled: StrictBool = True
    """Whether it runs. Without it nothing is ever removed from the volume, and `disk.budget` bounds nothing."""
    image: Word | None = None
    """Image with the janitor in it; the operator's own choice if left out."""
    resources: JanitorResources = JanitorResources()
    """Resources of its container."""


SHARED: Final = "ReadWriteMany"
OF_ONE_NODE: Final = "ReadWriteOnce"

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
    """How pods mount the claim. With `ReadWriteOnce`, all replicas and the janitor run on one node, which needs room
    for them. Cannot change."""

    rules = (
        _constant(
            "spec.volume.claim.storageClassName",
            cel="has(self.storageClassName) == has(oldSelf.storageClassName) && (!has(self.storageClassName) || "
            "self.storageClassName == oldSelf.storageClassName)",
        ),
    )

    size_bytes = Converted("size", quantity.parse_bytes)


class VolumeSpec(ApiModel):
    """The volume that all replicas share: exactly one of `claim` and `existingClaim`."""

    claim: ClaimSpec | None = None
    """A PersistentVolumeClaim that the operator makes."""
    existing_claim: Annotated[ObjectName, Checked((_constant("spec.volume.existingClaim"),))] | None = None
    """Name of a PersistentVolumeClaim in the same namespace, which the operator never changes or deletes. Cannot
    change."""
    path: Annotated[StrictStr, Field(max_length=256), Checked((_PATH_IS_RELATIVE, _constant("spec.volume.path")))] = ""
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
