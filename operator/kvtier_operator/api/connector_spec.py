# SPDX-License-Identifier: Apache-2.0
"""``spec.connector`` of a KVCacheTier, and the table of connectors: settings, fields that each honours, devices. Pure.

`type` selects a connector, and only its own settings may stand beside it. A field of the spec that a connector would
ignore is refused by name. `parts.connectors` renders them.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from pydantic import Field, StrictBool, StrictInt, StrictStr

from kvtier_connector.contract.engine import REDIS_PASSWORD_VARIABLE
from kvtier_connector.contract.janitor import BLOCKS_LAYOUT, VLLM_FS_LAYOUT
from kvtier_operator import quantity
from kvtier_operator.api.engine_spec import CLAIMED, NO_ACCELERATOR, refuse_flags
from kvtier_operator.api.pod_template import Anything, OpenObject
from kvtier_operator.api.rules import (
    TEXT,
    ApiModel,
    BlockTokens,
    ByteQuantity,
    Checked,
    Converted,
    ObjectName,
    Pasted,
    Rule,
    Term,
    Word,
    at,
    cel_literal,
)

BUNDLED: Final = "Bundled"
VLLM_OFFLOADING: Final = "VLLMOffloading"
VLLM_TIERING: Final = "VLLMTiering"
SIMPLE_CPU: Final = "SimpleCPU"
LMCACHE: Final = "LMCache"
HYBRID: Final = "Hybrid"
FLEX_KV: Final = "FlexKV"
MOONCAKE: Final = "Mooncake"
CUSTOM: Final = "Custom"

_Threads = Annotated[StrictInt, Field(ge=1, le=256, json_schema_extra={"format": "int32"})]


class VLLMOffloading(ApiModel):
    """vLLM's OffloadingConnector: a tier in host memory, and no other."""

    store_threshold: Annotated[StrictInt, Field(ge=0, le=1000, json_schema_extra={"format": "int32"})] = 0
    """Keep a block when it is offered for this many-th time. `0` and `1` keep every block."""
    max_tracker_size: Annotated[StrictInt, Field(ge=1, le=100_000_000, json_schema_extra={"format": "int32"})] = 64_000
    """Blocks whose offers are counted for `storeThreshold`; the least recently offered are forgotten first."""
    self_describing_events: StrictBool = False
    """Whether KV events name the tokens of each block, for routers that do not see the requests. Events are published
    with `spec.kvEvents`."""


class VLLMTiering(ApiModel):
    """vLLM's tiers: host memory, then files on the shared volume (its `fs` tier)."""

    read_threads: _Threads = 16
    """Threads of one engine that prefer to read. One request's blocks are read by one of them."""
    write_threads: _Threads = 16
    """Threads of one engine that prefer to write."""
    self_describing_events: StrictBool = False
    """Whether KV events name the tokens of each block, and blocks on the volume have events of their own. Events are
    published with `spec.kvEvents`."""


class SimpleCpu(ApiModel):
    """vLLM's SimpleCPUOffloadConnector. NVIDIA devices only."""

    mode: Literal["Eager", "Lazy"] = "Eager"
    """`Eager` copies each block when it is full, `Lazy` only those that are about to be evicted."""
    medium: Literal["Memory", "Disk"] = "Memory"
    """Where blocks go: `Memory` is host memory. `Disk` is a file of each pod on its node's disk, in the place of host
    memory. It has `spec.cpu.size`, is made whole when the engine starts, and goes with the pod."""
    use_page_cache: StrictBool = False
    """Whether the kernel's page cache stands between the engine and that file. Only with `Disk`."""

    rules = (
        Rule.that(
            at("usePageCache").is_(False) | at("medium").is_("Disk"),
            "is about the file of medium Disk: set medium to Disk, or leave it out",
            field=".usePageCache",
        ),
    )


_LABEL: Final = "[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_PORT: Final = "([1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])"
_IS_REDIS: Final = Rule.that(
    # No name that cannot be looked up and no port that cannot exist: LMCache would raise on them.
    TEXT.matches(f"rediss?://{_LABEL}([.]{_LABEL})*[.]?:{_PORT}"),
    "must be redis://HOST:PORT, or rediss:// for TLS, with a port of 1 to 65535 and no empty part between the dots of "
    "the name. Write no user, password or path: LMCache writes its URL to the log; the password comes from "
    "passwordSecretRef",
)


class PasswordKey(ApiModel):
    """One key of a Secret in the same namespace."""

    name: ObjectName
    """Name of the Secret."""
    key: Annotated[StrictStr, Field(min_length=1, max_length=253)] = "password"
    """Key in it."""


class TrialRedis(ApiModel):
    """A Redis of one pod, in memory only, for trying LMCache out. Production wants a managed one, with `url`."""

    image: Word = "docker.io/library/redis:7.4-alpine"
    """Image with `redis-server`; one of Valkey will do with `command`."""
    command: Literal["redis-server", "valkey-server"] = "redis-server"
    """Program of that image."""
    memory: ByteQuantity = "4Gi"
    """Memory of its contents. The least recently used go first. The pod asks for a quarter more."""

    memory_bytes = Converted("memory", quantity.parse_bytes)


class LMCacheRedis(ApiModel):
    """A Redis that all engines share."""

    url: Annotated[StrictStr, Field(max_length=256), Checked((_IS_REDIS,))] | None = None
    """Address, such as `redis://redis.cache:6379`. Keys name neither the revision of the model nor its weights: give
    each cache generation a Redis of its own, or empty it when one of these changes."""
    password_secret_ref: PasswordKey | None = None
    """Secret with its password."""
    trial: TrialRedis | None = None
    """A Redis that the operator makes. It is emptied when a new cache generation starts."""

    rules = (
        Rule.exactly_one("url", "trial"),
        Rule.that(
            ~at("passwordSecretRef").is_given | at("url").matches("redis://.*"),
            "is given to LMCache for redis:// URLs only: with rediss:// it takes a password in the URL alone, and logs "
            "it. Use redis:// in a network that you trust, or a proxy for TLS",
            field=".passwordSecretRef",
        ),
    )


class LMCacheDisk(ApiModel):
    """A directory of each pod on its node's disk. LMCache's index of it goes with the process."""

    size: ByteQuantity
    """Size of the directory, for all ranks of one engine together."""

    size_bytes = Converted("size", quantity.parse_bytes)


class LMCache(ApiModel):
    """LMCache, of the package `lmcache` in the engine's image. Experimental."""

    mode: Literal["InProcess", "MultiProcess"] = "InProcess"
    """`InProcess` (`LMCacheConnectorV1`): each rank of the engine has its part of the host memory. `MultiProcess`
    (`LMCacheMPConnector`): the engine starts and ends a cache server in the same container."""
    chunk_tokens: BlockTokens = 256
    """Tokens of one chunk."""
    serde: Literal["naive", "cachegen", "kivi"] = "naive"
    """How chunks are written to Redis: `naive` as they are; `cachegen` and `kivi` lose precision."""
    local_disk: LMCacheDisk | None = None
    """A tier on the node's disk. With the mode `InProcess` only, and one engine core in each pod."""
    redis: LMCacheRedis | None = None
    """A Redis that all engines share. Without it, no engine reads what another one computed."""

    rules = (
        Rule.that(
            at("serde").is_("naive")
            | (at("redis").is_given & at("mode").is_("InProcess") & ~at("redis.passwordSecretRef").is_given),
            "is honoured by LMCache for a Redis without a password and in the mode InProcess only: set naive",
            field=".serde",
        ),
        Rule.that(
            at("mode").is_("InProcess") | ~at("redis.url").is_given | at("redis.url").matches("redis://.*"),
            "must be a redis:// one with the mode MultiProcess: the cache server speaks no TLS",
            field=".redis.url",
        ),
        Rule.that(
            at("mode").is_("InProcess") | ~at("localDisk").is_given,
            "is bounded by LMCache with the mode InProcess only: the cache server of MultiProcess writes until the "
            "node's disk is full; set mode to InProcess, or remove it",
            field=".localDisk",
        ),
    )


class Nixl(ApiModel):
    """NIXL beside kvtier's own connector: prefill engines hand blocks to decode engines. Experimental."""

    role: Literal["Prefill", "Decode", "Both"] = "Both"
    """Role of the engines of this tier. A router sends a prompt to a `Prefill` tier first and its answer's
    `kv_transfer_params` to a `Decode` tier."""
    blocks_of: ObjectName | None = None
    """Another KVCacheTier of this namespace and claim whose blocks these engines read and write, with whose budget and
    janitor: the other role of the same model. The specs must agree in what decides the cache generation."""
    backend: Literal["UCX", "GDS", "LIBFABRIC"] = "UCX"
    """NIXL's way from pod to pod."""


class Hybrid(ApiModel):
    """Two connectors of one engine (vLLM's MultiConnector): both store a block, the first that has it loads it.

    Exactly one of `lmcache` and `nixl`.
    """

    vllm_offloading: VLLMOffloading | None = None
    """Settings of vLLM's own tier in host memory, for what is preempted or evicted here. Beside `lmcache` only."""
    lmcache: LMCache | None = None
    """LMCache behind it, for sharing. It gets `lmcacheMemory` of host memory beside `spec.cpu`."""
    lmcache_memory: ByteQuantity = "4Gi"
    """Host memory of LMCache in one engine, beside `spec.cpu`: chunks pass through it on their way."""
    nixl: Nixl | None = None
    """NIXL, with kvtier's own connector on the volume behind it."""

    rules = (
        Rule.exactly_one("lmcache", "nixl"),
        Rule.that(
            ~at("vllmOffloading").is_given | ~at("nixl").is_given,
            "stands beside lmcache only: beside nixl, kvtier's own connector has the host memory; remove it",
            field=".vllmOffloading",
        ),
        Rule.that(
            ~at("lmcache").is_given | at("lmcache.mode").is_("InProcess"),
            "must be InProcess in a Hybrid connector: vLLM counts the MultiProcess one's answers differently",
            field=".lmcache.mode",
        ),
    )

    lmcache_bytes = Converted("lmcache_memory", quantity.parse_bytes)


class FlexKV(ApiModel):
    """FlexKV, of an image of yours. Experimental.

    No engine has been run with it: the command line is read by vLLM's own parser, and vLLM finds the connector's class.
    """

    config: Anything
    """FlexKV's own configuration (`FLEXKV_CONFIG_PATH`), written to a file of the pods. Left out, `cpu_cache_gb` is
    `spec.cpu.size` in whole GiB. `ssd_cache_gb` without `ssd_cache_dir` gets a directory of that size on the node's
    disk; FlexKV wants it larger than `cpu_cache_gb`."""

    @property
    def disk_bytes(self) -> int:
        """Return the size of the directory that the operator makes on the node's disk."""
        size = self.config.get("ssd_cache_gb", 0)
        return size << 30 if "ssd_cache_dir" not in self.config and type(size) is int and size > 0 else 0


class MooncakeMaster(ApiModel):
    """Mooncake's master service, one pod."""

    image: Word | None = None
    """Image with `mooncake_master`; the engine's if left out."""
    port: Annotated[StrictInt, Field(ge=1024, le=65535)] = 50051
    """Its port."""
    args: Annotated[
        tuple[Annotated[StrictStr, Field(min_length=1, max_length=1024)], ...],
        Field(max_length=32),
        Checked(refuse_flags({"--port": "set spec.connector.mooncake.master.port"})),
    ] = ()
    """More flags for it, one word each."""


class Mooncake(ApiModel):
    """Mooncake's store, of an image of yours. Experimental.

    One engine has been run with it, on vLLM's CPU build, with a stand-in for what that lacks of CUDA; no GPU has.
    """

    config: Anything
    """Mooncake's own configuration (`MOONCAKE_CONFIG_PATH`), written to a file of the pods. With `master`, the operator
    sets `master_server_address`. Left out, `global_segment_size` is each rank's share of `spec.cpu.size`, and 0 in the
    mode `standalone-store`, where a `mooncake_client` of yours has memory and disk. With `enable_offload`,
    the master gets its flag, too."""
    master: MooncakeMaster | None = None
    """The master service is made by the operator. Without it, `config.master_server_address` names yours."""
    load_async: StrictBool = True
    """Whether blocks are loaded while other requests are computed."""


class TransferConfig(OpenObject):
    """A document of vLLM's `--kv-transfer-config`, with every field that vLLM's KVTransferConfig has."""

    kv_connector: Annotated[Word, Field(alias="kv_connector")]
    """Class of the connector, by its name in vLLM or in `kv_connector_module_path`."""


class Custom(ApiModel):
    """Any other KV connector of the engine's image. Experimental."""

    transfer_config: Annotated[dict[str, Any], Pasted(TransferConfig)]
    """Document for `--kv-transfer-config`, passed on as it is. Left out in it, `kv_role` is `kv_both` and
    `kv_load_failure_policy` is `recompute`. The memory that it takes belongs into `spec.cpu.size`; files, variables and
    volumes into `spec.engine`."""


@dataclass(frozen=True, kw_only=True)
class ConnectorKind:
    """A row of the table of connectors."""

    type: str
    settings: str = ""
    """Field of ``spec.connector`` with its settings, as the API writes it."""
    needs_settings: bool = False
    variant: str = ""
    """Field that tells this row from another one of the same type."""
    honours: frozenset[str] = frozenset()
    """Fields of `LIMITED` that it honours."""
    devices: Literal["any", "accelerators", "nvidia"] = "any"
    uses_volume: bool = False
    is_in_shm: bool = False
    """Whether its host memory is a file in /dev/shm, and not memory that each process pins for itself."""
    cleaner: str = "host memory has one size, and goes with the pod"
    """Who bounds its blocks where no janitor does, as the end of a sentence."""


LIMITED: Final[Mapping[str, tuple[str | int | bool | None, str]]] = {
    "disk.mode": ("ReadWrite", "its engines read and write as they please"),
    "disk.compression": ("Off", "blocks would lie there as they are"),
    "disk.encryption": (None, "blocks would lie there as they are"),
    "disk.tenants.from": ("None", "blocks of all tenants would lie together, without quotas"),
    "disk.admission.minReuse": (
        1,
        "every block would be written (VLLMOffloading counts offers with its own storeThreshold)",
    ),
    "disk.admission.minTokens": (0, "hits of any length are loaded"),
    "disk.splitHits": ("Auto", "it never splits one, and every hit is loaded"),
    "disk.budget.maxBytes": (None, "no janitor looks after what it keeps"),
    "disk.budget.minBytes": (None, "no janitor looks after what it keeps"),
    "disk.budget.ttl": ("168h", "blocks are kept until the room is needed"),
    "disk.canonicalLayout": (False, "its blocks are laid out for one tensorParallel"),
    "disk.blockTokens": (None, "it has units of its own (LMCache: spec.connector.lmcache.chunkTokens)"),
    "generations.acrossReleases": ("Never", "its blocks are not compared"),
    "cpu.evictionPolicy": ("lru", "it evicts the least recently used, and nothing else can be set"),
}
"""Fields that only some connectors honour, their defaults, and what the others would do, as the end of a sentence."""

_ALL: Final = frozenset(LIMITED)
_HOST_MEMORY: Final = frozenset({"disk.blockTokens", "cpu.evictionPolicy"})
_VLLM_FILES: Final = _HOST_MEMORY | {path for path in LIMITED if path.startswith(("disk.budget", "disk.canonical"))}

KINDS: Final = (
    ConnectorKind(type=BUNDLED, honours=_ALL, uses_volume=True, is_in_shm=True),
    ConnectorKind(type=VLLM_TIERING, settings="vllmTiering", honours=_VLLM_FILES, uses_volume=True, is_in_shm=True),
    ConnectorKind(type=VLLM_OFFLOADING, settings="vllmOffloading", honours=_HOST_MEMORY, is_in_shm=True),
    ConnectorKind(type=SIMPLE_CPU, settings="simpleCPU", devices="nvidia"),
    ConnectorKind(type=LMCACHE, settings="lmcache", devices="accelerators"),
    ConnectorKind(
        type=HYBRID,
        settings="hybrid",
        needs_settings=True,
        honours=_HOST_MEMORY,
        devices="accelerators",
        is_in_shm=True,
    ),
    ConnectorKind(type=HYBRID, variant="hybrid.nixl", honours=_ALL, uses_volume=True, is_in_shm=True),
    ConnectorKind(
        type=FLEX_KV,
        settings="flexKV",
        needs_settings=True,
        devices="nvidia",
        cleaner="FlexKV keeps to the sizes of its own configuration",
    ),
    ConnectorKind(
        type=MOONCAKE,
        settings="mooncake",
        needs_settings=True,
        devices="accelerators",
        cleaner="Mooncake's master evicts within the segments that the engines give it",
    ),
    # It may map /dev/shm or pin memory: the pod has room for either.
    ConnectorKind(
        type=CUSTOM, settings="custom", needs_settings=True, is_in_shm=True, cleaner="its own configuration bounds it"
    ),
)
"""Every connector; rules list types in this order."""

_WITH_SETTINGS: Final = tuple(kind for kind in KINDS if kind.settings)


def _only_with(kind: ConnectorKind) -> Rule:
    return Rule.that(
        ~at(kind.settings).is_given | at("type").is_(kind.type),
        f"holds the settings of {kind.type}, and spec.connector.type is another: remove it, or set type to {kind.type}",
        field=f".{kind.settings}",
    )


def _needed_by(kind: ConnectorKind) -> Rule:
    return Rule.that(
        ~at("type").is_(kind.type) | at(kind.settings).is_given,
        f"is required with type {kind.type}",
        field=f".{kind.settings}",
    )


class Connector(ApiModel):
    """Who moves blocks between the accelerator, host memory and storage.

    Changing `type` starts a new cache generation.
    """

    type: Literal[
        "Bundled", "VLLMOffloading", "VLLMTiering", "SimpleCPU", "LMCache", "Hybrid", "FlexKV", "Mooncake", "Custom"
    ] = BUNDLED
    """`Bundled` is kvtier's own: host memory and the shared volume, verified, encrypted on request, within a budget.
    The others are what vLLM can do besides; a field that they do not honour is refused."""
    vllm_offloading: VLLMOffloading | None = None
    """Settings of `VLLMOffloading`."""
    vllm_tiering: VLLMTiering | None = None
    """Settings of `VLLMTiering`."""
    simple_cpu: Annotated[SimpleCpu | None, Field(alias="simpleCPU")] = None
    """Settings of `SimpleCPU`."""
    lmcache: LMCache | None = None
    """Settings of `LMCache`. Experimental: it ran on vLLM's CPU build, where a class of a test copies for it, and on no
    GPU yet."""
    hybrid: Hybrid | None = None
    """Settings of `Hybrid`. Experimental: with LMCache none has answered yet, with NIXL on vLLM's CPU build."""
    flex_kv: Annotated[FlexKV | None, Field(alias="flexKV")] = None
    """Settings of `FlexKV`. Experimental: no engine has been run with it."""
    mooncake: Mooncake | None = None
    """Settings of `Mooncake`. Experimental: one engine has been run with it, on vLLM's CPU build."""
    custom: Custom | None = None
    """Settings of `Custom`. Experimental: nothing is known of the connector but its document."""

    rules = (*map(_only_with, _WITH_SETTINGS), *(_needed_by(kind) for kind in _WITH_SETTINGS if kind.needs_settings))

    @property
    def kind(self) -> ConnectorKind:
        """Return its row of the table."""
        variant = "hybrid.nixl" if self.hybrid is not None and self.hybrid.nixl is not None else ""
        return next(kind for kind in KINDS if (kind.type, kind.variant) == (self.type, variant))

    @property
    def is_ours(self) -> bool:
        """Tell whether kvtier's own connector keeps the blocks."""
        return self.kind.honours is _ALL

    @property
    def uses_volume(self) -> bool:
        """Tell whether blocks lie on the shared volume."""
        return self.kind.uses_volume

    @property
    def is_on_node_disk(self) -> bool:
        """Tell whether ``spec.cpu`` is a file on the node's disk, and no memory."""
        return self.simple_cpu is not None and self.simple_cpu.medium == "Disk"

    @property
    def blocks_of(self) -> str | None:
        """Return the other tier whose blocks these engines use; None where they are its own."""
        nixl = None if self.hybrid is None else self.hybrid.nixl
        return None if nixl is None else nixl.blocks_of

    @property
    def label(self) -> str:
        """Return its name for people."""
        return self.type if self.type != HYBRID else f"{HYBRID} ({'NIXL' if self.is_ours else LMCACHE})"

    @property
    def used_lmcache(self) -> LMCache | None:
        """Return the settings of LMCache where it takes part."""
        if self.type == LMCACHE:
            return self.lmcache or LMCache()
        return None if self.hybrid is None else self.hybrid.lmcache

    @property
    def identity(self) -> dict[str, Any]:
        """Return the part of the cache identity that depends on it; empty for kvtier's own."""
        if self.type == BUNDLED:
            return {}
        lmcache = self.used_lmcache
        chunks = {} if lmcache is None else {"chunk_tokens": lmcache.chunk_tokens, "serde": lmcache.serde}
        return {"type": self.type, **chunks}

    @property
    def passing_bytes(self) -> int | None:
        """Return the memory of one engine that blocks pass through; None for kvtier's own I/O workers."""
        if self.is_ours:
            return None
        return 0 if self.hybrid is None else self.hybrid.lmcache_bytes

    def file_bytes(self, cpu_bytes: int) -> int:
        """Return the bytes that blocks of one engine take on the node's disk."""
        if self.is_on_node_disk:
            return cpu_bytes
        lmcache = self.used_lmcache
        if self.flex_kv is not None:
            return self.flex_kv.disk_bytes
        return 0 if lmcache is None or lmcache.local_disk is None else lmcache.local_disk.size_bytes

    @property
    def has_janitor(self) -> bool:
        """Tell whether a janitor of this tier removes its blocks."""
        return self.uses_volume and self.blocks_of is None

    @property
    def layout(self) -> str:
        """Return how the files on the volume lie."""
        return BLOCKS_LAYOUT if self.is_ours else VLLM_FS_LAYOUT

    @property
    def cleaner(self) -> str:
        """Return who bounds its blocks where it has no janitor, as the end of a sentence."""
        if self.blocks_of is not None:
            return f"the blocks are those of the tier {self.blocks_of}, whose janitor looks after them"
        if self.is_on_node_disk:
            return "its file on the node's disk has one size, and goes with the pod"
        if self.used_lmcache is not None and self.used_lmcache.redis is not None:
            return "LMCache keeps host memory and disk within their sizes, and Redis evicts by its own maxmemory-policy"
        return self.kind.cleaner


def _is_one_of(kinds: Iterable[ConnectorKind]) -> Term:
    """Return the term that the connector of a spec has one of the rows."""
    rows = tuple(kinds)
    types = dict.fromkeys(kind.type for kind in rows if not kind.variant)
    variants = [at(f"connector.{kind.variant}").is_given for kind in rows if kind.variant and kind.type not in types]
    return functools.reduce(operator.or_, variants, at("connector.type").is_(*types))


def _honoured(path: str, default: str | int | bool | None, consequence: str) -> Rule:
    kinds = [kind for kind in KINDS if path in kind.honours]
    *others, last = dict.fromkeys(kind.type for kind in kinds if not kind.variant)
    return Rule.that(
        _is_one_of(kinds) | (~at(path).is_given if default is None else at(path).is_(default)),
        f"is not honoured by this spec.connector.type: {consequence}; remove it, or set spec.connector.type to "
        f"{', '.join(others)}{' or ' if others else ''}{last}",
        field=f".{path}",
    )


LMCACHE_ENV: Final = (
    *("LMCACHE_CHUNK_SIZE", "LMCACHE_CONFIG_FILE", "LMCACHE_LOCAL_CPU", "LMCACHE_LOCAL_DISK"),
    *("LMCACHE_MAX_LOCAL_CPU_SIZE", "LMCACHE_MAX_LOCAL_DISK_SIZE", "LMCACHE_PRE_CACHING_HASH_ALGORITHM"),
    *("LMCACHE_REMOTE_SERDE", "LMCACHE_REMOTE_URL", REDIS_PASSWORD_VARIABLE, "LMCACHE_SAVE_DECODE_CACHE"),
)
"""Variables of LMCache that the operator renders."""

LMCACHE_PASSWORD_ENV: Final = ("LMCACHE_EXTRA_CONFIG", "LMCACHE_REMOTE_STORAGE_PLUGINS")
"""Variables that it renders only for a Redis with a password."""

_OLD_LMCACHE: Final = "(.*/)?lmcache/vllm-openai:v?0[.]([0-4]|5[.][0-5])([^0-9].*)?"
"""LMCache's own images whose tags name a release before `lmcache.mp.autostart`."""

_USES_LMCACHE: Final = at("connector.type").is_(LMCACHE) | at("connector.hybrid.lmcache").is_given
_HAS_PASSWORD: Final = (
    at("connector.lmcache.redis.passwordSecretRef").is_given
    | at("connector.hybrid.lmcache.redis.passwordSecretRef").is_given
)
_RESOURCE: Final = at("engine.accelerator.resource")


def _sets_none_of(names: Iterable[str]) -> Term:
    """Return the term that ``spec.engine.env`` has none of the variables."""
    return at("engine.env").test(
        lambda env: f"!{env}.exists(variable, variable.name in {cel_literal(list(names))})",
        lambda env: not any(each["name"] in names for each in env),
    )


_ENGINES: Final = r"^--?(data[-_]parallel[-_]size|dp)($|=)"
_ENGINES_HERE: Final = r"^--?(data[-_]parallel[-_]size[-_]local|dpl)($|=)"


def _has_one_engine(args: Iterable[str]) -> bool:
    """Tell whether a pod runs one engine core, as far as single words of the command line tell; in CEL, too."""
    here = [word for word in args if re.match(_ENGINES_HERE, word)]
    if here:
        return all(word.endswith("=1") for word in here)
    return not any(re.match(_ENGINES, word) and not word.endswith("=1") for word in args)


_ONE_ENGINE: Final = at("engine.args").test(
    lambda args: (
        f"{args}.all(word, !word.matches(r'{_ENGINES_HERE}') || word.endsWith('=1')) && "
        f"({args}.exists(word, word.matches(r'{_ENGINES_HERE}')) || "
        f"{args}.all(word, !word.matches(r'{_ENGINES}') || word.endsWith('=1')))"
    ),
    _has_one_engine,
)

USES_VOLUME: Final = _is_one_of(kind for kind in KINDS if kind.uses_volume)
"""As `Connector.uses_volume`, of a spec."""

RULES: Final = (
    Rule.that(
        at("volume").test(lambda _: "true", lambda volume: volume.is_there) | ~USES_VOLUME,
        "is required: spec.connector.type keeps blocks on it; give spec.volume.claim or spec.volume.existingClaim",
        field=".volume",
    ),
    Rule(
        cel="!has(oldSelf.volume) || has(self.volume)",
        message="cannot be removed: the claim holds blocks; leave it, a spec.connector.type that does not use it does "
        "not mount it",
        check=None,
        field=".volume",
    ),
    *(_honoured(path, *limit) for path, limit in LIMITED.items()),
    Rule.that(
        ~_is_one_of(kind for kind in KINDS if kind.devices == "nvidia")
        | _RESOURCE.matches(f"{CLAIMED}|nvidia[.]com/.*"),
        "must be one of nvidia.com/…, or claim, with this spec.connector.type, which copies with CUDA: use Bundled, or "
        "VLLMOffloading for memory alone",
        field=".engine.accelerator.resource",
    ),
    Rule.that(
        ~at("cpu.fraction").is_given | ~at("connector.simpleCPU.medium").is_("Disk"),
        "is a share of the node's memory, and spec.connector.simpleCPU.medium is Disk: set spec.cpu.size, the size of "
        "the file",
        field=".cpu.fraction",
    ),
    Rule.that(
        ~_USES_LMCACHE | _sets_none_of(LMCACHE_ENV),
        f"must not set what spec.connector says: {', '.join(LMCACHE_ENV)} are rendered from it; set the field there",
        field=".engine.env",
    ),
    Rule.that(
        ~_HAS_PASSWORD | _sets_none_of(LMCACHE_PASSWORD_ENV),
        f"must not set {' or '.join(LMCACHE_PASSWORD_ENV)} beside passwordSecretRef, for which they name a connector "
        "of kvtier's: remove it, or give a Redis without a password",
        field=".engine.env",
    ),
    Rule.that(
        ~_is_one_of(kind for kind in KINDS if kind.devices == "accelerators")
        | at("connector.hybrid.nixl").is_given
        | ~_RESOURCE.is_(NO_ACCELERATOR),
        "is none, vLLM's CPU build, with which this spec.connector.type does not work: use Bundled, VLLMOffloading, "
        "VLLMTiering or Hybrid with nixl, or name the resource of a device",
        field=".engine.accelerator.resource",
    ),
    Rule.that(
        ~at("connector.lmcache.mode").is_("MultiProcess") | ~at("engine.image").matches(_OLD_LMCACHE),
        "has an LMCache that cannot start the cache server of mode MultiProcess, so each engine would wait and end: "
        "use an image with LMCache 0.5.6, or set spec.connector.lmcache.mode to InProcess",
        field=".engine.image",
    ),
    *(
        Rule.that(
            ~at(f"{path}.localDisk").is_given | _ONE_ENGINE,
            "is one directory of the pod, and --data-parallel-size in spec.engine.args has several engine cores remove "
            "each other's files there: raise spec.replicas instead, set --data-parallel-size-local=1, or remove it",
            field=f".{path}.localDisk",
        )
        for path in ("connector.lmcache", "connector.hybrid.lmcache")
    ),
)
"""Rules of `TierSpec` about its connector."""
