# SPDX-License-Identifier: Apache-2.0
"""``spec`` of a KVCacheTier. Pure.

The models are the API, written once: the CustomResourceDefinition with its defaults, descriptions and CEL rules is
generated from them, and so is its reference page.
"""

from __future__ import annotations

import re
from typing import Annotated, Final, Literal

from pydantic import Field, StrictBool, StrictInt, StrictStr

from kvtier_operator import quantity
from kvtier_operator.api import connector_spec
from kvtier_operator.api.connector_spec import BUNDLED, Connector
from kvtier_operator.api.disk_spec import NO_VOLUME, Disk, Janitor, VolumeSpec
from kvtier_operator.api.engine_spec import NO_ACCELERATOR, EngineSpec
from kvtier_operator.api.external_spec import EXTERNAL_RULES
from kvtier_operator.api.generations_spec import Generations
from kvtier_operator.api.model_spec import ONE_PLACE, ModelSpec
from kvtier_operator.api.routing_spec import KvEvents, NetworkPolicySpec, Routing
from kvtier_operator.api.rules import TEXT, ApiModel, ByteQuantity, Checked, Converted, ObjectName, Rule, at


class Canary(ApiModel):
    """A prompt of random tokens that one replica computes and another one must find on the volume."""

    enabled: StrictBool = True
    """Whether it is sent: after each rollout, and once in each interval. It costs two short prompts with one token of
    answer each, and a few blocks on the volume. It costs as much again for an adapter on a claim, and for a picture
    where the model takes them. `SharedCacheVerified` tells how it ended."""
    interval_seconds: Annotated[StrictInt, Field(ge=60, le=2_592_000)] = 21600
    """Seconds from one proof to the next while the engines stay the same; six hours by default."""


class ProofSpec(ApiModel):
    """How the operator finds out whether the tier works."""

    canary: Canary = Canary()
    """A prompt that one replica computes and another one must find on the volume."""
    preflight: Literal["Always", "Never"] = "Always"
    """Whether a Job tries a new claim before the first engine starts on it: permissions, atomic renames, free space,
    speed. It takes a minute at most and writes up to 256 MiB for that time. `status.storage` and the condition
    `StorageChecked` show the result. Engines that run already are never held up. Nothing is tried while `disk.mode`
    keeps engines from writing."""


LONGEST_NAME: Final = 40
"""Characters in ``metadata.name``: leaves the suffixes of child objects, those of later releases included, room within
the 63 of a DNS label."""

_NAME: Final = "[a-z]([-a-z0-9]*[a-z0-9])?"

NAME_FITS_CHILDREN: Final = Rule(
    cel=f"self.metadata.name.size() <= {LONGEST_NAME} && self.metadata.name.matches('^{_NAME}$')",
    message=f"metadata.name must be at most {LONGEST_NAME} lower-case letters, digits and '-', starting with a letter: "
    "Services and pods are named after it",
    check=lambda name: len(name) <= LONGEST_NAME and re.fullmatch(_NAME, name) is not None,
)
"""Rule about the whole resource, not its spec."""

BLOCKS_OF_ANOTHER: Final = Rule(
    cel="!has(self.spec.connector.hybrid) || !has(self.spec.connector.hybrid.nixl) || "
    "!has(self.spec.connector.hybrid.nixl.blocksOf) || "
    "self.spec.connector.hybrid.nixl.blocksOf != self.metadata.name",
    message="spec.connector.hybrid.nixl.blocksOf must name another tier: the one whose blocks are used has the "
    "janitor; leave it out for blocks of its own",
    check=lambda pair: pair[1].connector.blocks_of is None or pair[1].connector.blocks_of != pair[0],
)
"""Rule about the whole resource; its check is given the name and the `TierSpec`."""

_SEED: Final = "(0|[1-9][0-9]{0,9})"
_LARGEST_SEED: Final = 2**32 - 1

_IS_SEED: Final = Rule(
    cel=f"self.matches('^{_SEED}$') && int(self) <= {_LARGEST_SEED}",
    message=f'must be a decimal number from "0" to "{_LARGEST_SEED}": with "random" no two engines would share a block',
    check=lambda seed: re.fullmatch(_SEED, seed) is not None and int(seed) <= _LARGEST_SEED,
)
_IS_FRACTION: Final = Rule.that(
    TEXT.matches("([1-9]|[1-8][0-9]|9[0-5])%"),
    'must be a whole percentage from "1%" to "95%": the engine itself needs some of the node, too',
)


class Hash(ApiModel):
    """How blocks are named. The same in every pod, or no pod finds what another one stored."""

    seed: Annotated[StrictStr, Field(min_length=1, max_length=10), Checked((_IS_SEED,))] = "0"
    """Seed of the block hashes (`PYTHONHASHSEED` of every engine), in quotes. Another seed starts a new cache
    generation; tenants that must not guess each other's blocks get different seeds."""
    algorithm: Literal["sha256_cbor", "sha256", "xxhash_cbor", "xxhash"] = "sha256_cbor"
    """Hash of the blocks (vLLM's `--prefix-caching-hash-algo`). The `_cbor` ones give the same names under every
    version of Python. xxhash is faster, not safe against forged prompts, and needs the xxhash package in the image."""


class CpuSpec(ApiModel):
    """The tier in host memory, between the accelerator and the volume."""

    size: ByteQuantity | None = None
    """Pinned host memory of one engine over all its workers, such as `64Gi`. The pod's shared memory and memory limit
    follow from it. Less than the accelerator's own KV cache adds nothing. Exactly one of `size` and `fraction`."""
    fraction: Annotated[StrictStr, Field(min_length=2, max_length=4), Checked((_IS_FRACTION,))] | None = None
    """The same as a share, such as `60%`: of the memory that the smallest matching node has left for one pod. Decided
    once, and again when this field, the placement or `engine` changes; not when other pods come and go."""
    eviction_policy: Literal["lru", "arc"] = "lru"
    """Which blocks make room: `lru` the least recently used, `arc` weighs recency against frequency."""
    offload_prompt_only: StrictBool = True
    """Whether only blocks of prompts are kept. Generated text is rarely read again, except in chats: set `false` for
    those."""

    rules = (
        Rule.exactly_one(
            "size",
            "fraction",
            message="give exactly one of spec.cpu.size (an amount, such as 64Gi) and spec.cpu.fraction (a share of the "
            "node, such as 60%)",
        ),
    )

    size_bytes = Converted[int | None]("size", quantity.parse_bytes)
    percent = Converted[int | None]("fraction", lambda text: int(text.removesuffix("%")))


class TierSpec(ApiModel):
    """A model, the engines that serve it, and the places of its KV cache."""

    model: ModelSpec
    """The model that every replica serves."""
    replicas: Annotated[StrictInt, Field(ge=0, le=1000, json_schema_extra={"format": "int32"})] = 1
    """Engine pods. The scale subresource sets it, so `kubectl scale`, HPA and KEDA work. More than one needs a
    `ReadWriteMany` volume, or `ReadWriteOnce` and one node for all."""
    engine: EngineSpec = EngineSpec()
    """The vLLM engine of one replica."""
    hash: Hash = Hash()
    """How blocks are named."""
    connector: Connector = Connector()
    """Who moves blocks between the accelerator, host memory and storage."""
    cpu: CpuSpec
    """The tier in host memory."""
    # Without a default in the schema: the API server would fill it in, and it is no volume.
    volume: Annotated[VolumeSpec, Field(json_schema_extra=lambda schema: schema.pop("default", None))] = NO_VOLUME
    """The volume that all replicas share. Required where `connector` keeps blocks on it."""
    disk: Disk = Disk()
    """The tier on the volume."""
    generations: Generations = Generations()
    """Fate of the blocks of earlier specs."""
    janitor: Janitor = Janitor()
    """The process that keeps the volume inside its budget."""
    routing: Routing = Routing()
    """How a request comes to the replica that has its cache. Changing it replaces no engine."""
    kv_events: KvEvents | None = None
    """Has engines and the janitor publish what they store and remove, for routers; nothing is published if left out.
    Changing it restarts the engines and keeps the cache."""
    network_policy: NetworkPolicySpec | None = None
    """Makes NetworkPolicies for the pods of the tier; none if left out. Changing it replaces no engine."""
    proof: ProofSpec = ProofSpec()
    """How the operator finds out whether the tier works."""
    operator_class_name: ObjectName | None = None
    """Class of the operator that works on this tier, as its `--operator-class` says. Left out, an operator without a
    class does. Cannot change: two operators must not work on one tier."""
    paused: StrictBool = False
    """Whether the operator leaves everything as it is, for maintenance by hand. Status is still reported, and a claim
    is kept from `volume.deletionPolicy: Retain` on. The annotation `kvtier.dev/paused: "true"` does the same."""

    is_filled_in = True
    rules = (
        ONE_PLACE,
        *connector_spec.RULES,
        *EXTERNAL_RULES,
        Rule.that(
            ~at("connector.type").is_(BUNDLED)
            | at("disk.splitHits").is_("Off")
            | at("engine.args").has_no_word("^--scheduler[-_]c"),
            "names a scheduler with --scheduler-cls, and so does spec.disk.splitHits: set that to 'Off', or remove the "
            "flag",
            field=".engine.args",
        ),
        Rule.that(
            ~at("kvEvents").is_given | ~at("connector.type").is_(BUNDLED) | at("janitor.enabled").is_(True),
            "needs the janitor, which publishes for the volume: set spec.janitor.enabled to true, or remove "
            "spec.kvEvents",
            field=".kvEvents",
        ),
        Rule(
            cel="has(self.operatorClassName) == has(oldSelf.operatorClassName) && (!has(self.operatorClassName) || "
            "self.operatorClassName == oldSelf.operatorClassName)",
            message="cannot change after creation: restore it; to give a tier to another operator, delete the tier and "
            "create it anew, which keeps its claim unless spec.volume.deletionPolicy says Delete",
            check=None,
            field=".operatorClassName",
        ),
        Rule(
            cel=f"self.engine.accelerator.resource == '{NO_ACCELERATOR}' || !has(self.engine.accelerator.perPod) || "
            "self.engine.tensorParallel <= self.engine.accelerator.perPod",
            message="is more than spec.engine.accelerator.perPod: a model cannot be split over more devices than its "
            "pod has; raise perPod or lower spec.engine.tensorParallel",
            check=lambda spec: (
                spec.engine.accelerator.resource == NO_ACCELERATOR
                or spec.engine.tensor_parallel <= spec.engine.accelerator.per_pod
            ),
            field=".engine.tensorParallel",
        ),
        Rule.that(
            ~at("engine.accelerator.resource").is_(NO_ACCELERATOR) | at("engine.accelerator.perPod").is_(1),
            "counts devices, and spec.engine.accelerator.resource is none: remove perPod or name a resource",
            field=".engine.accelerator.perPod",
        ),
        Rule.that(
            at("disk.budget.maxBytes").is_at_most(at("volume.claim.size")),
            "is more than spec.volume.claim.size: the volume would be full before the budget is reached; lower "
            "spec.disk.budget.maxBytes or raise spec.volume.claim.size",
            field=".disk.budget.maxBytes",
        ),
        Rule.that(
            at("disk.budget.maxBytes").is_given | at("disk.budget.minBytes").is_at_most(at("volume.claim.size")),
            "is more than spec.volume.claim.size: no tier can keep more than the volume holds; lower "
            "spec.disk.budget.minBytes or raise spec.volume.claim.size",
            field=".disk.budget.minBytes",
        ),
        Rule.that(
            at("disk.budget.minFree").is_at_most(at("volume.claim.size"), is_less=True),
            "must be less than spec.volume.claim.size, or no block could ever stay: lower spec.disk.budget.minFree or "
            "raise spec.volume.claim.size",
            field=".disk.budget.minFree",
        ),
    )
