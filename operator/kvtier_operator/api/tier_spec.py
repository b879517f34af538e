# SPDX-License-Identifier: Apache-2.0
"""``spec`` of a KVCacheTier, and the one function that reads it. Pure.

The models are the API, written once: the CustomResourceDefinition with its defaults, descriptions and CEL rules is
generated from them, and so is its reference page.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Final, Literal

from pydantic import Field, StrictBool, StrictInt, StrictStr, field_validator
from pydantic_core import PydanticCustomError

from kvtier_operator import quantity
from kvtier_operator.api import connector_spec
from kvtier_operator.api.connector_spec import BUNDLED, Connector
from kvtier_operator.api.disk_spec import Disk, Generations, Janitor
from kvtier_operator.api.engine_spec import NO_ACCELERATOR, Engine
from kvtier_operator.api.model_spec import ONE_PLACE, LoraRank, Loras, MostAtOnce
from kvtier_operator.api.pod_template import Anything
from kvtier_operator.api.routing_spec import KvEvents, Routing
from kvtier_operator.api.rules import RULE_BROKEN, ApiModel, ByteQuantity, Checked, ObjectName, Rule, Word
from kvtier_operator.api.volume_spec import NO_VOLUME, SHARED, Volume


class Canary(ApiModel):
    """A prompt of random tokens that one replica computes and another one must find on the volume."""

    enabled: StrictBool = True
    """Whether it is sent: after each rollout, and once in each interval. It costs two short prompts with one token of
    answer each, and a few blocks on the volume; as much again for one of the adapters that lie on a claim, and for a
    picture where the model takes them. `SharedCacheVerified` tells how it ended."""
    interval_seconds: Annotated[StrictInt, Field(ge=60, le=2_592_000)] = 21600
    """Seconds from one proof to the next while the engines stay the same; six hours by default."""


class Proof(ApiModel):
    """How the operator finds out whether the tier works."""

    canary: Canary = Canary()
    """A prompt that one replica computes and another one must find on the volume."""
    preflight: Literal["Always", "Never"] = "Always"
    """Whether a Job tries a new claim before the first engine starts on it: permissions, atomic renames, free space,
    speed. It takes a minute at most and writes up to 256 MiB for that time. `status.storage` and the condition
    `StorageChecked` show what it found; engines that run already are never held up. Nothing is tried while `disk.mode`
    keeps engines from writing."""


LONGEST_NAME: Final = 40
"""Characters in ``metadata.name``: leaves the suffixes of child objects, those of later releases included, room within
the 63 of a DNS label."""

_NAME: Final = re.compile(r"^[a-z]([-a-z0-9]*[a-z0-9])?$")

NAME_FITS_CHILDREN: Final = Rule(
    cel=f"self.metadata.name.size() <= {LONGEST_NAME} && self.metadata.name.matches('{_NAME.pattern}')",
    message=f"metadata.name must be at most {LONGEST_NAME} lower-case letters, digits and '-', starting with a letter: "
    "Services and pods are named after it",
    check=lambda name: len(name) <= LONGEST_NAME and _NAME.fullmatch(name) is not None,
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

_SEED: Final = re.compile(r"^(0|[1-9][0-9]{0,9})$")
_LARGEST_SEED: Final = 2**32 - 1


_FRACTION: Final = re.compile(r"^([1-9]|[1-8][0-9]|9[0-5])%$")

IS_FRACTION: Final = Rule(
    cel=f"self.matches('{_FRACTION.pattern}')",
    message='must be a whole percentage from "1%" to "95%": the engine itself needs some of the node, too',
    check=lambda text: _FRACTION.fullmatch(text) is not None,
)


class SecretKey(ApiModel):
    """One key of a Secret in the same namespace."""

    name: ObjectName
    """Name of the Secret."""
    key: Annotated[StrictStr, Field(min_length=1, max_length=253)] = "token"
    """Key in it."""


NO_PREFIXES: Final = (
    "is that of an encoder-decoder model: vLLM has no prefix cache for one and starts none with a KV connector; serve "
    "it without a KVCacheTier"
)


class Model(ApiModel):
    """The model that every replica serves."""

    name: Word
    """Name on the Hugging Face hub, such as `meta-llama/Llama-3.1-8B-Instruct`, or an absolute directory in the pod.
    Another model starts a new cache generation."""
    revision: Word = "main"
    """Branch, tag or commit of the model on the hub. Name a commit to be sure that blocks and weights never part."""
    token_secret_ref: SecretKey | None = None
    """Secret with the Hugging Face token for a gated model."""
    loras: Loras = ()
    """Adapters (LoRA) that the engines serve beside the model, each under its name. Their blocks lie beside those of
    the model. Changing the list restarts the engines and keeps the cache."""
    max_lora_rank: LoraRank = 16
    """Highest rank of the adapters. Memory on the devices is set aside for it; an adapter of a higher one keeps the
    engine from starting."""
    max_loras_at_once: MostAtOnce | None = None
    """Adapters whose requests the engine computes together (vLLM's `--max-loras`). All of them, 8 at most, if left
    out."""
    config: Anything | None = None
    """The fields of the model's config.json that say how large its KV is (layers, heads, head sizes, attention types),
    or all of it, for a model that the operator does not know by its name. Only sizes follow from it; where that of the
    files on the volume changes, a new cache generation starts."""

    @field_validator("config")
    @classmethod
    def _refuse_encoder_decoders(cls, config: Anything | None) -> Anything | None:
        # The API server's rules cannot look into what has no schema.
        if isinstance(config, Mapping) and config.get("is_encoder_decoder"):
            raise PydanticCustomError(RULE_BROKEN, "{text}", {"text": NO_PREFIXES, "field": ""})
        return config


class Hash(ApiModel):
    """How blocks are named. The same in every pod, or no pod finds what another one stored."""

    seed: Annotated[
        StrictStr,
        Field(min_length=1, max_length=10),
        Checked(
            (
                Rule(
                    cel=f"self.matches('{_SEED.pattern}') && int(self) <= {_LARGEST_SEED}",
                    message=f'must be a decimal number from "0" to "{_LARGEST_SEED}": with "random" no two engines '
                    "would share a block",
                    check=lambda seed: _SEED.fullmatch(seed) is not None and int(seed) <= _LARGEST_SEED,
                ),
            )
        ),
    ] = "0"
    """Seed of the block hashes (`PYTHONHASHSEED` of every engine), in quotes. Another seed starts a new cache
    generation; tenants that must not guess each other's blocks get different seeds."""
    algorithm: Literal["sha256_cbor", "sha256", "xxhash_cbor", "xxhash"] = "sha256_cbor"
    """Hash of the blocks (vLLM's `--prefix-caching-hash-algo`). The `_cbor` ones give the same names under every
    version of Python. xxhash is faster, not safe against forged prompts, and needs the xxhash package in the image."""


class CpuTier(ApiModel):
    """The tier in host memory, between the accelerator and the volume."""

    size: ByteQuantity | None = None
    """Pinned host memory of one engine over all its workers, such as `64Gi`. The pod's shared memory and memory limit
    follow from it. Less than the accelerator's own KV cache adds nothing. Exactly one of `size` and `fraction`."""
    fraction: Annotated[StrictStr, Field(min_length=2, max_length=4), Checked((IS_FRACTION,))] | None = None
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

    @property
    def size_bytes(self) -> int | None:
        """Return `size` in bytes; None where a fraction is given instead."""
        return None if self.size is None else quantity.parse_bytes(self.size)

    @property
    def percent(self) -> int | None:
        """Return `fraction` as a number; None where a size is given instead."""
        return None if self.fraction is None else int(self.fraction.removesuffix("%"))


class TierSpec(ApiModel):
    """What the user wants: the model, where it runs, and where its KV cache is kept."""

    model: Model
    """The model that every replica serves."""
    replicas: Annotated[StrictInt, Field(ge=0, le=1000, json_schema_extra={"format": "int32"})] = 1
    """Engine pods. The scale subresource sets it, so `kubectl scale`, HPA and KEDA work. More than one needs a
    `ReadWriteMany` volume."""
    engine: Engine = Engine()
    """The vLLM engine of one replica."""
    hash: Hash = Hash()
    """How blocks are named."""
    connector: Connector = Connector()
    """Who moves blocks between the accelerator, host memory and storage."""
    cpu: CpuTier
    """The tier in host memory."""
    # Without a default in the schema: the API server would fill it in, and it is no volume.
    volume: Annotated[Volume, Field(json_schema_extra=lambda schema: schema.pop("default", None))] = NO_VOLUME
    """The volume that all replicas share. Required where `connector` keeps blocks on it."""
    disk: Disk = Disk()
    """The tier on the volume."""
    generations: Generations = Generations()
    """What becomes of the blocks of earlier specs."""
    janitor: Janitor = Janitor()
    """The process that keeps the volume inside its budget."""
    routing: Routing = Routing()
    """How a request comes to the replica that has its cache. Changing it replaces no engine."""
    kv_events: KvEvents | None = None
    """Has engines and the janitor publish what they store and remove, for routers; nothing is published if left out.
    Changing it restarts the engines and keeps the cache."""
    proof: Proof = Proof()
    """How the operator finds out whether the tier works."""
    operator_class_name: ObjectName | None = None
    """Class of the operator that works on this tier: of one that runs with `--operator-class` of that name. Left out,
    those do that have none. Cannot change: until one operator has let go, another one must not begin."""
    paused: StrictBool = False
    """Whether the operator leaves everything as it is, for maintenance by hand. Status is still reported. The
    annotation `kvtier.dev/paused: "true"` on the resource does the same."""

    rules = (
        ONE_PLACE,
        *connector_spec.RULES,
        Rule(
            cel=f"!has(self.kvEvents) || self.connector.type != '{BUNDLED}' || !has(self.janitor) || "
            "!has(self.janitor.enabled) || self.janitor.enabled",
            message="needs the janitor, which publishes for the volume: set spec.janitor.enabled to true, or remove "
            "spec.kvEvents",
            check=lambda spec: spec.kv_events is None or spec.connector.type != BUNDLED or spec.janitor.enabled,
            field=".kvEvents",
        ),
        Rule(
            cel="has(self.operatorClassName) == has(oldSelf.operatorClassName) && (!has(self.operatorClassName) || "
            "self.operatorClassName == oldSelf.operatorClassName)",
            message="cannot change after creation: restore it; to give a tier to another operator, delete the tier and "
            "create it anew, which keeps its claim unless spec.volume.claim.deletionPolicy says Delete",
            check=None,
            field=".operatorClassName",
        ),
        Rule(
            cel=f"self.replicas <= 1 || !{connector_spec.USES_VOLUME} || !has(self.volume) || "
            f"!has(self.volume.claim) || '{SHARED}' in self.volume.claim.accessModes",
            message=f"more than one replica needs {SHARED} in spec.volume.claim.accessModes: set spec.replicas to 1, "
            "or use a storage class whose volumes several nodes can mount",
            check=lambda spec: (
                spec.replicas <= 1
                # A claim that is kept and not mounted limits nothing.
                or not spec.connector.uses_volume
                or spec.volume.claim is None
                or SHARED in spec.volume.claim.access_modes
            ),
            field=".replicas",
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
        Rule(
            cel=f"self.engine.accelerator.resource != '{NO_ACCELERATOR}' || !has(self.engine.accelerator.perPod) || "
            "self.engine.accelerator.perPod == 1",
            message="counts devices, and spec.engine.accelerator.resource is none: remove perPod or name a resource",
            check=lambda spec: (
                spec.engine.accelerator.resource != NO_ACCELERATOR or spec.engine.accelerator.per_pod == 1
            ),
            field=".engine.accelerator.perPod",
        ),
        Rule(
            cel="!has(self.disk.budget.maxBytes) || !has(self.volume) || !has(self.volume.claim) "
            "|| !isQuantity(self.disk.budget.maxBytes) "
            "|| !isQuantity(self.volume.claim.size) || "
            "quantity(self.disk.budget.maxBytes).compareTo(quantity(self.volume.claim.size)) <= 0",
            message="is more than spec.volume.claim.size: the volume would be full before the budget is reached; lower "
            "spec.disk.budget.maxBytes or raise spec.volume.claim.size",
            check=lambda spec: (
                spec.disk.budget.max_bytes is None
                or spec.volume.claim is None
                or spec.disk.budget.max_bytes <= spec.volume.claim.size_bytes
            ),
            field=".disk.budget.maxBytes",
        ),
        Rule(
            cel="!has(self.disk.budget.minBytes) || has(self.disk.budget.maxBytes) || !has(self.volume) "
            "|| !has(self.volume.claim) "
            "|| !isQuantity(self.disk.budget.minBytes) || !isQuantity(self.volume.claim.size) || "
            "quantity(self.disk.budget.minBytes).compareTo(quantity(self.volume.claim.size)) <= 0",
            message="is more than spec.volume.claim.size: no tier can keep more than the volume holds; lower "
            "spec.disk.budget.minBytes or raise spec.volume.claim.size",
            check=lambda spec: (
                spec.disk.budget.min_bytes is None
                or spec.disk.budget.max_bytes is not None
                or spec.volume.claim is None
                or spec.disk.budget.min_bytes <= spec.volume.claim.size_bytes
            ),
            field=".disk.budget.minBytes",
        ),
        Rule(
            cel="!has(self.disk.budget.minFree) || !has(self.volume) || !has(self.volume.claim) "
            "|| !isQuantity(self.disk.budget.minFree) || !isQuantity(self.volume.claim.size) || "
            "quantity(self.disk.budget.minFree).compareTo(quantity(self.volume.claim.size)) < 0",
            message="must be less than spec.volume.claim.size, or no block could ever stay: lower "
            "spec.disk.budget.minFree or raise spec.volume.claim.size",
            check=lambda spec: (
                spec.volume.claim is None or spec.disk.budget.min_free_bytes < spec.volume.claim.size_bytes
            ),
            field=".disk.budget.minFree",
        ),
    )
