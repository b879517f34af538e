# SPDX-License-Identifier: Apache-2.0
"""``spec.connector`` of a KVCacheTier: who moves blocks out of the accelerator, and with which settings. Pure.

One field of several kinds: `type` says which, and only the block of that kind may stand beside it.

Which fields of a KVCacheTier which connector cannot honour: rules for the API server and the operator alike. Pure.

A field that is quietly ignored is the worst answer, so each of them is refused by name where it says something else
than its default. What a connector does of its own accord is in its documentation.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from pydantic import Field, StrictBool, StrictInt, StrictStr

from kvtier_connector.contract.engine import REDIS_PASSWORD_VARIABLE
from kvtier_operator import quantity
from kvtier_operator.api.engine_spec import CLAIMED, NO_ACCELERATOR
from kvtier_operator.api.pod_template import Anything
from kvtier_operator.api.rules import ApiModel, ByteQuantity, Checked, ObjectName, Rule, Word

BUNDLED: Final = "Bundled"
VLLM_OFFLOADING: Final = "VLLMOffloading"
VLLM_TIERING: Final = "VLLMTiering"
SIMPLE_CPU: Final = "SimpleCPU"
LMCACHE: Final = "LMCache"
HYBRID: Final = "Hybrid"
FLEX_KV: Final = "FlexKV"
MOONCAKE: Final = "Mooncake"

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
    """Where blocks go: `Memory` is host memory. `Disk` is a file of each pod on its node's disk, of `spec.cpu.size` in
    the place of host memory; it is made whole when the engine starts, and goes with the pod."""
    use_page_cache: StrictBool = False
    """Whether the kernel's page cache stands between the engine and that file. Only with `Disk`."""

    rules = (
        Rule(
            cel="!has(self.usePageCache) || !self.usePageCache || (has(self.medium) && self.medium == 'Disk')",
            message="is about the file of medium Disk: set medium to Disk, or leave it out",
            check=lambda simple: not simple.use_page_cache or simple.medium == "Disk",
            field=".usePageCache",
        ),
    )


_LABEL: Final = "[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_PORT: Final = "([1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])"
_REDIS: Final = re.compile(f"^rediss?://{_LABEL}([.]{_LABEL})*[.]?:{_PORT}$")
"""No name that cannot be looked up, and no port that no one can connect to: LMCache would raise on them."""

IS_REDIS: Final = Rule(
    cel=f"self.matches('{_REDIS.pattern}')",
    message="must be redis://HOST:PORT, or rediss:// for TLS, with a port of 1 to 65535 and no empty part between the "
    "dots of the name, without user, password or path: LMCache writes its URL to the log; the password comes from "
    "passwordSecretRef",
    check=lambda url: _REDIS.fullmatch(url) is not None,
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
    """What it may hold. The least recently used go first. The pod asks for a quarter more."""

    @property
    def memory_bytes(self) -> int:
        """Return `memory` in bytes."""
        return quantity.parse_bytes(self.memory)


class LMCacheRedis(ApiModel):
    """A Redis that all engines share."""

    url: Annotated[StrictStr, Field(max_length=256), Checked((IS_REDIS,))] | None = None
    """Address, such as `redis://redis.cache:6379`. Keys name neither the revision of the model nor its weights: give
    each cache generation a Redis of its own, or empty it when one of these changes."""
    password_secret_ref: PasswordKey | None = None
    """Secret with its password."""
    trial: TrialRedis | None = None
    """A Redis that the operator makes. It is emptied when a new cache generation starts."""

    rules = (
        Rule.exactly_one("url", "trial"),
        Rule(
            cel="!has(self.passwordSecretRef) || (has(self.url) && self.url.startsWith('redis://'))",
            message="is given to LMCache for redis:// URLs only: with rediss:// it takes one in the URL alone, which "
            "it writes to the log; use redis:// in a network that you trust, or a proxy for TLS",
            check=lambda redis: redis.password_secret_ref is None or (redis.url or "").startswith("redis://"),
            field=".passwordSecretRef",
        ),
    )


class LMCacheDisk(ApiModel):
    """A directory of each pod on its node's disk. LMCache's index of it goes with the process."""

    size: ByteQuantity
    """What each rank's share of the directory may take, all ranks of one engine together."""

    @property
    def size_bytes(self) -> int:
        """Return `size` in bytes."""
        return quantity.parse_bytes(self.size)


WHOLE_CHUNKS: Final = Rule(
    cel="self % 16 == 0",
    message="must be a multiple of 16, the smallest block of vLLM",
    check=lambda tokens: tokens % 16 == 0,
)


class LMCache(ApiModel):
    """LMCache, of the package `lmcache` in the engine's image. Experimental."""

    mode: Literal["InProcess", "MultiProcess"] = "InProcess"
    """`InProcess` is `LMCacheConnectorV1`: each rank of the engine has its part of the host memory. `MultiProcess` is
    `LMCacheMPConnector`: a cache server in the same container, which the engine starts and ends."""
    chunk_tokens: Annotated[StrictInt, Field(ge=16, le=65536), Checked((WHOLE_CHUNKS,))] = 256
    """Tokens of one chunk."""
    serde: Literal["naive", "cachegen", "kivi"] = "naive"
    """How chunks are written to Redis: `naive` as they are; `cachegen` and `kivi` lose precision."""
    local_disk: LMCacheDisk | None = None
    """A tier on the node's disk. With the mode `InProcess` only, and one engine core in each pod."""
    redis: LMCacheRedis | None = None
    """A Redis that all engines share. Without it, no engine reads what another one computed."""

    rules = (
        Rule(
            cel="!has(self.serde) || self.serde == 'naive' || (has(self.redis) && (!has(self.mode) || "
            "self.mode == 'InProcess') && !has(self.redis.passwordSecretRef))",
            message="is honoured by LMCache for a Redis without a password and in the mode InProcess only: set naive",
            check=lambda lmcache: (
                lmcache.serde == "naive"
                or (
                    lmcache.redis is not None
                    and lmcache.mode == "InProcess"
                    and lmcache.redis.password_secret_ref is None
                )
            ),
            field=".serde",
        ),
        Rule(
            cel="!has(self.mode) || self.mode == 'InProcess' || !has(self.redis) || !has(self.redis.url) || "
            "self.redis.url.startsWith('redis://')",
            message="must be a redis:// one with the mode MultiProcess: the cache server speaks no TLS",
            check=lambda lmcache: (
                lmcache.mode == "InProcess"
                or lmcache.redis is None
                or (lmcache.redis.url or "redis://").startswith("redis://")
            ),
            field=".redis.url",
        ),
        Rule(
            cel="!has(self.mode) || self.mode == 'InProcess' || !has(self.localDisk)",
            message="is bounded by LMCache with the mode InProcess only: the cache server of MultiProcess writes until "
            "the node's disk is full; set mode to InProcess, or remove it",
            check=lambda lmcache: lmcache.mode == "InProcess" or lmcache.local_disk is None,
            field=".localDisk",
        ),
    )


class Nixl(ApiModel):
    """NIXL beside kvtier's own connector: prefill engines hand blocks to decode engines. Experimental."""

    role: Literal["Prefill", "Decode", "Both"] = "Both"
    """What the engines of this tier do. A router sends a prompt to a `Prefill` tier first and its answer's
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
        Rule(
            cel="!has(self.vllmOffloading) || !has(self.nixl)",
            message="stands beside lmcache only: beside nixl, kvtier's own connector has the host memory; remove it",
            check=lambda hybrid: hybrid.vllm_offloading is None or hybrid.nixl is None,
            field=".vllmOffloading",
        ),
        Rule(
            cel="!has(self.lmcache) || !has(self.lmcache.mode) || self.lmcache.mode == 'InProcess'",
            message="must be InProcess in a Hybrid connector: vLLM counts the MultiProcess one's answers differently",
            check=lambda hybrid: hybrid.lmcache is None or hybrid.lmcache.mode == "InProcess",
            field=".lmcache.mode",
        ),
    )

    @property
    def lmcache_bytes(self) -> int:
        """Return `lmcache_memory` in bytes."""
        return quantity.parse_bytes(self.lmcache_memory)


class FlexKV(ApiModel):
    """FlexKV, of an image of yours. Experimental.

    No engine has been run with it: the command line is read by vLLM's own parser, and vLLM finds the connector's class.
    """

    config: Anything
    """FlexKV's own configuration (`FLEXKV_CONFIG_PATH`), written as it is to a file of the pods. The host memory it
    takes belongs into `spec.cpu.size`."""


class MooncakeMaster(ApiModel):
    """Mooncake's master service, one pod."""

    image: Word | None = None
    """Image with `mooncake_master`; the engine's if left out."""
    port: Annotated[StrictInt, Field(ge=1024, le=65535)] = 50051
    """Its port."""
    args: Annotated[tuple[Annotated[StrictStr, Field(min_length=1, max_length=1024)], ...], Field(max_length=32)] = ()
    """More flags for it, one word each."""


class Mooncake(ApiModel):
    """Mooncake's store, of an image of yours. Experimental.

    One engine has been run with it, on vLLM's CPU build, with a stand-in for what that lacks of CUDA; no GPU has.
    """

    config: Anything
    """Mooncake's own configuration (`MOONCAKE_CONFIG_PATH`), written to a file of the pods. `master_server_address` is
    the operator's with `master`; `global_segment_size` is `spec.cpu.size` for each rank's share where it is left out
    and the mode is embedded."""
    master: MooncakeMaster | None = None
    """The master service is made by the operator. Without it, `config.master_server_address` names yours."""
    load_async: StrictBool = True
    """Whether blocks are loaded while other requests are computed."""


_BLOCKS: Final = {
    "vllm_offloading": ("vllmOffloading", VLLM_OFFLOADING),
    "vllm_tiering": ("vllmTiering", VLLM_TIERING),
    "simple_cpu": ("simpleCPU", SIMPLE_CPU),
    "lmcache": ("lmcache", LMCACHE),
    "hybrid": ("hybrid", HYBRID),
    "flex_kv": ("flexKV", FLEX_KV),
    "mooncake": ("mooncake", MOONCAKE),
}
"""Field in Python to its name in the API, and the type whose settings it holds."""

_REQUIRED: Final = ("hybrid", "flex_kv", "mooncake")
"""Blocks without which their type has nothing to go by."""


def _only_with(field: str) -> Rule:
    alias, kind = _BLOCKS[field]
    return Rule(
        cel=f"!has(self.{alias}) || (has(self.type) && self.type == '{kind}')",
        message=f"holds the settings of {kind}, and spec.connector.type is another: remove it, or set type to {kind}",
        check=lambda connector: getattr(connector, field) is None or connector.type == kind,
        field=f".{alias}",
    )


def _needed_by(field: str) -> Rule:
    alias, kind = _BLOCKS[field]
    return Rule(
        cel=f"!has(self.type) || self.type != '{kind}' || has(self.{alias})",
        message=f"is required with type {kind}",
        check=lambda connector: connector.type != kind or getattr(connector, field) is not None,
        field=f".{alias}",
    )


class Connector(ApiModel):
    """Who moves blocks between the accelerator, host memory and storage.

    Changing `type` starts a new cache generation.
    """

    type: Literal[
        "Bundled", "VLLMOffloading", "VLLMTiering", "SimpleCPU", "LMCache", "Hybrid", "FlexKV", "Mooncake"
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

    rules = (*map(_only_with, _BLOCKS), *map(_needed_by, _REQUIRED))

    @property
    def is_ours(self) -> bool:
        """Tell whether kvtier's own connector keeps the blocks."""
        return self.type == BUNDLED or (self.hybrid is not None and self.hybrid.nixl is not None)

    @property
    def uses_volume(self) -> bool:
        """Tell whether blocks lie on the shared volume."""
        return self.is_ours or self.type == VLLM_TIERING

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
        """Return what a person calls it."""
        return self.type if self.type != HYBRID else f"{HYBRID} ({'NIXL' if self.is_ours else LMCACHE})"

    def used_lmcache(self) -> LMCache | None:
        """Return the settings of LMCache where it takes part."""
        if self.type == LMCACHE:
            return self.lmcache or LMCache()
        return None if self.hybrid is None else self.hybrid.lmcache

    def identity(self) -> dict[str, Any]:
        """Return what of it decides which blocks are readable; empty for kvtier's own, which always was."""
        if self.type == BUNDLED:
            return {}
        lmcache = self.used_lmcache()
        chunks = {} if lmcache is None else {"chunk_tokens": lmcache.chunk_tokens, "serde": lmcache.serde}
        return {"type": self.type, **chunks}


_OURS: Final = frozenset({BUNDLED})
_ON_VOLUME: Final = frozenset({BUNDLED, VLLM_TIERING})
_NATIVE: Final = frozenset({BUNDLED, VLLM_OFFLOADING, VLLM_TIERING, HYBRID})
_NIXL: Final = "(has(self.connector.hybrid) && has(self.connector.hybrid.nixl))"


@dataclass(frozen=True, kw_only=True)
class _Field:
    """A field that not every connector honours."""

    path: str
    """Below the spec, as the API writes it."""
    cel: str
    """True where it says nothing beyond its default."""
    is_default: Callable[[Any], bool]
    """The same of the parsed spec."""
    honoured_by: frozenset[str]
    what: str
    """What nobody would do, as the end of a sentence."""

    def to_rule(self) -> Rule:
        # Where kvtier's own connector stands behind NIXL, it honours what it always does.
        named = ", ".join(f"'{kind}'" for kind in sorted(self.honoured_by))
        ours = f" || {_NIXL}" if BUNDLED in self.honoured_by else ""
        return Rule(
            cel=f"self.connector.type in [{named}]{ours} || {self.cel}",
            message=f"is not honoured by this spec.connector.type: {self.what}; remove it, or set spec.connector.type "
            f"to {_either(self.honoured_by)}",
            check=lambda spec: _honours(spec, self.honoured_by) or self.is_default(spec),
            field=f".{self.path}",
        )


def _honours(spec: Any, honoured_by: frozenset[str]) -> bool:
    is_behind_nixl = BUNDLED in honoured_by and spec.connector.is_ours
    return spec.connector.type in honoured_by or is_behind_nixl


def _either(names: Iterable[str]) -> str:
    order = (BUNDLED, VLLM_TIERING, VLLM_OFFLOADING, HYBRID)
    *first, last = [name for name in order if name in set(names)]
    return f"{', '.join(first)} or {last}" if first else last


_FIELDS: Final = (
    _Field(
        path="disk.mode",
        cel="self.disk.mode == 'ReadWrite'",
        is_default=lambda spec: spec.disk.mode == "ReadWrite",
        honoured_by=_OURS,
        what="its engines read and write as they please",
    ),
    _Field(
        path="disk.compression",
        cel="self.disk.compression == 'Off'",
        is_default=lambda spec: not spec.disk.compresses,
        honoured_by=_OURS,
        what="blocks would lie there as they are",
    ),
    _Field(
        path="disk.encryption",
        cel="!has(self.disk.encryption)",
        is_default=lambda spec: spec.disk.encryption is None,
        honoured_by=_OURS,
        what="blocks would lie there as they are",
    ),
    _Field(
        path="disk.tenants",
        cel="(self.disk.tenants.from == 'None')",
        is_default=lambda spec: spec.disk.tenants.source == "None",
        honoured_by=_OURS,
        what="blocks of all tenants would lie together, without quotas",
    ),
    _Field(
        path="disk.admission.minReuse",
        cel="self.disk.admission.minReuse == 1",
        is_default=lambda spec: spec.disk.admission.min_reuse == 1,
        honoured_by=_OURS,
        what="every block would be written (VLLMOffloading counts offers with its own storeThreshold)",
    ),
    _Field(
        path="disk.admission.costAware",
        cel="self.disk.admission.costAware",
        is_default=lambda spec: spec.disk.admission.cost_aware,
        honoured_by=_OURS,
        what="nothing measures whether loading pays, and every hit is loaded",
    ),
    _Field(
        path="disk.admission.minTokens",
        cel="self.disk.admission.minTokens == 0",
        is_default=lambda spec: spec.disk.admission.min_tokens == 0,
        honoured_by=_OURS,
        what="hits of any length are loaded",
    ),
    _Field(
        path="disk.budget.maxBytes",
        cel="!has(self.disk.budget.maxBytes)",
        is_default=lambda spec: spec.disk.budget.max_bytes is None,
        honoured_by=_ON_VOLUME,
        what="no janitor looks after what it keeps",
    ),
    _Field(
        path="disk.budget.minBytes",
        cel="!has(self.disk.budget.minBytes)",
        is_default=lambda spec: spec.disk.budget.min_bytes is None,
        honoured_by=_ON_VOLUME,
        what="no janitor looks after what it keeps",
    ),
    _Field(
        path="disk.budget.ttl",
        cel="self.disk.budget.ttl == '168h'",
        is_default=lambda spec: spec.disk.budget.ttl == "168h",
        honoured_by=_ON_VOLUME,
        what="blocks are kept until the room is needed",
    ),
    _Field(
        path="disk.blockTokens",
        cel="!has(self.disk.blockTokens)",
        is_default=lambda spec: spec.disk.block_tokens is None,
        honoured_by=_NATIVE,
        what="it has units of its own (LMCache: spec.connector.lmcache.chunkTokens)",
    ),
    _Field(
        path="disk.canonicalLayout",
        cel="!self.disk.canonicalLayout",
        is_default=lambda spec: not spec.disk.canonical_layout,
        honoured_by=_ON_VOLUME,
        what="its blocks are laid out for one tensorParallel",
    ),
    _Field(
        path="cpu.evictionPolicy",
        cel="self.cpu.evictionPolicy == 'lru'",
        is_default=lambda spec: spec.cpu.eviction_policy == "lru",
        honoured_by=_NATIVE,
        what="it evicts the least recently used, and nothing else can be set",
    ),
)

_OLD_LMCACHE: Final = "(^|/)lmcache/vllm-openai:v?0[.]([0-4]|5[.][0-5])([^0-9].*)?$"
"""LMCache's own images whose tags name a release before `lmcache.mp.autostart`."""

LMCACHE_ENV: Final = (
    "LMCACHE_CHUNK_SIZE",
    "LMCACHE_CONFIG_FILE",
    "LMCACHE_LOCAL_CPU",
    "LMCACHE_LOCAL_DISK",
    "LMCACHE_MAX_LOCAL_CPU_SIZE",
    "LMCACHE_MAX_LOCAL_DISK_SIZE",
    "LMCACHE_PRE_CACHING_HASH_ALGORITHM",
    "LMCACHE_REMOTE_SERDE",
    "LMCACHE_REMOTE_URL",
    REDIS_PASSWORD_VARIABLE,
    "LMCACHE_SAVE_DECODE_CACHE",
)
"""Variables of LMCache that the operator renders."""

LMCACHE_PASSWORD_ENV: Final = ("LMCACHE_EXTRA_CONFIG", "LMCACHE_REMOTE_STORAGE_PLUGINS")
"""Those that it renders for a Redis with a password alone."""

_PASSWORD: Final = " || ".join(
    "(" + " && ".join(f"has(self.connector.{'.'.join(steps[:end])})" for end in range(1, len(steps) + 1)) + ")"
    for steps in (("lmcache", "redis", "passwordSecretRef"), ("hybrid", "lmcache", "redis", "passwordSecretRef"))
)


def _has_password(spec: Any) -> bool:
    lmcache = spec.connector.used_lmcache()
    return lmcache is not None and lmcache.redis is not None and lmcache.redis.password_secret_ref is not None


_NVIDIA: Final = "nvidia.com/"
_NEEDS_NVIDIA: Final = (SIMPLE_CPU, FLEX_KV)


def _is_nvidia(spec: Any) -> bool:
    resource = spec.engine.accelerator.resource
    return resource == CLAIMED or str(resource).startswith(_NVIDIA)


def _has_device(spec: Any) -> bool:
    return bool(spec.engine.accelerator.resource != NO_ACCELERATOR)


_ENGINES: Final = r"^--?(data[-_]parallel[-_]size|dp)($|=)"
_ENGINES_HERE: Final = r"^--?(data[-_]parallel[-_]size[-_]local|dpl)($|=)"
_ONE: Final = "=1"


def _has_one_engine(spec: Any) -> bool:
    """Tell whether a pod runs one engine core, as far as single words of the command line tell; in CEL, too."""
    more = [word for word in spec.engine.args if not word.endswith(_ONE)]
    if any(re.match(_ENGINES_HERE, word) for word in more):
        return False
    is_one_here = any(re.match(_ENGINES_HERE, word) and word.endswith(_ONE) for word in spec.engine.args)
    return is_one_here or not any(re.match(_ENGINES, word) for word in more)


def _one_engine_for_its_disk(field: str, find: Callable[[Any], Any]) -> Rule:
    """Return the rule that engine cores do not write into one directory of LMCache's, of whose files each has a list.

    Args:
        field: path of the settings of LMCache, below the spec.
        find: those settings, of a parsed connector.
    """
    steps = field.split(".")
    has = " && ".join(f"has(self.{'.'.join(steps[:end])})" for end in range(2, len(steps) + 1))
    here, anywhere = (
        f"word.matches(r'{pattern}') && !word.endsWith('{_ONE}')" for pattern in (_ENGINES_HERE, _ENGINES)
    )
    is_one_here = f"word.matches(r'{_ENGINES_HERE}') && word.endsWith('{_ONE}')"
    return Rule(
        cel=f"!({has} && has(self.{field}.localDisk)) || !has(self.engine.args) || "
        f"!(self.engine.args.exists(word, {here}) || (self.engine.args.exists(word, {anywhere}) && "
        f"!self.engine.args.exists(word, {is_one_here})))",
        message="is one directory of the pod, and with --data-parallel-size in spec.engine.args several engine cores "
        "would write into it and remove each other's files: raise spec.replicas instead, set "
        "--data-parallel-size-local=1, or remove it",
        check=lambda spec: (
            (settings := find(spec.connector)) is None or settings.local_disk is None or _has_one_engine(spec)
        ),
        field=f".{field}.localDisk",
    )


USES_VOLUME: Final = f"(self.connector.type in ['{BUNDLED}', '{VLLM_TIERING}'] || {_NIXL})"
"""As `Connector.uses_volume`."""


RULES: Final = (
    Rule(
        cel=f"has(self.volume) || !{USES_VOLUME}",
        message="is required: spec.connector.type keeps blocks on it; give spec.volume.claim or "
        "spec.volume.existingClaim",
        check=lambda spec: spec.volume.is_there or not spec.connector.uses_volume,
        field=".volume",
    ),
    Rule(
        cel="!has(oldSelf.volume) || has(self.volume)",
        message="cannot be removed: the claim holds blocks; leave it, a spec.connector.type that does not use it does "
        "not mount it",
        check=None,
        field=".volume",
    ),
    *(field.to_rule() for field in _FIELDS),
    Rule(
        cel=f"!(self.connector.type in [{', '.join(repr(kind) for kind in _NEEDS_NVIDIA)}]) || "
        f"self.engine.accelerator.resource == '{CLAIMED}' || "
        f"self.engine.accelerator.resource.startsWith('{_NVIDIA}')",
        message=f"must be one of {_NVIDIA}…, or claim, with this spec.connector.type, which copies with CUDA: use "
        "Bundled, or VLLMOffloading for memory alone",
        check=lambda spec: spec.connector.type not in _NEEDS_NVIDIA or _is_nvidia(spec),
        field=".engine.accelerator.resource",
    ),
    Rule(
        cel="!has(self.cpu.fraction) || !has(self.connector.simpleCPU) || self.connector.simpleCPU.medium != 'Disk'",
        message="is a share of the node's memory, and spec.connector.simpleCPU.medium is Disk: set spec.cpu.size, the "
        "size of the file",
        check=lambda spec: spec.cpu.fraction is None or not spec.connector.is_on_node_disk,
        field=".cpu.fraction",
    ),
    Rule(
        cel=f"!(self.connector.type in ['{LMCACHE}', '{HYBRID}']) || !has(self.engine.env) || "
        "!self.engine.env.exists(variable, "
        f"variable.name in [{', '.join(repr(name) for name in LMCACHE_ENV)}])",
        message=f"must not set what spec.connector says: {', '.join(LMCACHE_ENV)} are rendered from it; set the field "
        "there",
        check=lambda spec: (
            spec.connector.used_lmcache() is None or not any(each["name"] in LMCACHE_ENV for each in spec.engine.env)
        ),
        field=".engine.env",
    ),
    Rule(
        cel=f"!({_PASSWORD}) || !has(self.engine.env) || !self.engine.env.exists(variable, "
        f"variable.name in [{', '.join(repr(name) for name in LMCACHE_PASSWORD_ENV)}])",
        message=f"must not set {' or '.join(LMCACHE_PASSWORD_ENV)} beside passwordSecretRef, for which they name a "
        "connector of kvtier's: remove it, or give a Redis without a password",
        check=lambda spec: (
            not _has_password(spec) or not any(each["name"] in LMCACHE_PASSWORD_ENV for each in spec.engine.env)
        ),
        field=".engine.env",
    ),
    Rule(
        cel=f"!(self.connector.type in ['{LMCACHE}', '{MOONCAKE}', '{HYBRID}']) || {_NIXL} || "
        f"self.engine.accelerator.resource != '{NO_ACCELERATOR}'",
        message="is none, vLLM's CPU build, with which this spec.connector.type does not work: use Bundled, "
        "VLLMOffloading, VLLMTiering or Hybrid with nixl, or name the resource of a device",
        check=lambda spec: (
            spec.connector.type not in {LMCACHE, MOONCAKE, HYBRID} or spec.connector.is_ours or _has_device(spec)
        ),
        field=".engine.accelerator.resource",
    ),
    Rule(
        cel="!has(self.connector.lmcache) || self.connector.lmcache.mode != 'MultiProcess' || "
        f"!self.engine.image.matches('{_OLD_LMCACHE}')",
        message="is of an LMCache that cannot start the cache server of mode MultiProcess by itself, so that each "
        "engine would wait for it and end: use an image with LMCache 0.5.6, or set spec.connector.lmcache.mode to "
        "InProcess",
        check=lambda spec: (
            spec.connector.lmcache is None
            or spec.connector.lmcache.mode != "MultiProcess"
            or re.search(_OLD_LMCACHE, spec.engine.image) is None
        ),
        field=".engine.image",
    ),
    _one_engine_for_its_disk("connector.lmcache", lambda connector: connector.lmcache),
    _one_engine_for_its_disk(
        "connector.hybrid.lmcache", lambda connector: connector.hybrid and connector.hybrid.lmcache
    ),
)
"""What `TierSpec` adds to its own rules."""
