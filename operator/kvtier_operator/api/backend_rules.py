# SPDX-License-Identifier: Apache-2.0
"""Which fields of a KVCacheTier which connector cannot honour: rules for the API server and the operator alike. Pure.

A field that is quietly ignored is the worst answer, so each of them is refused by name where it says something else
than its default. What a connector does of its own accord is in its documentation.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

from kvtier_connector.contract import REDIS_PASSWORD_VARIABLE
from kvtier_operator.api import connector_spec as kinds
from kvtier_operator.api.engine_spec import CLAIMED, NO_ACCELERATOR
from kvtier_operator.api.rules import Rule

_OURS: Final = frozenset({kinds.BUNDLED})
_ON_VOLUME: Final = frozenset({kinds.BUNDLED, kinds.VLLM_TIERING})
_NATIVE: Final = frozenset({kinds.BUNDLED, kinds.VLLM_OFFLOADING, kinds.VLLM_TIERING, kinds.HYBRID})
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
        ours = f" || {_NIXL}" if kinds.BUNDLED in self.honoured_by else ""
        return Rule(
            cel=f"self.connector.type in [{named}]{ours} || {self.cel}",
            message=f"is not honoured by this spec.connector.type: {self.what}; remove it, or set spec.connector.type "
            f"to {_either(self.honoured_by)}",
            check=lambda spec: _honours(spec, self.honoured_by) or self.is_default(spec),
            field=f".{self.path}",
        )


def _honours(spec: Any, honoured_by: frozenset[str]) -> bool:
    is_behind_nixl = kinds.BUNDLED in honoured_by and spec.connector.is_ours
    return spec.connector.type in honoured_by or is_behind_nixl


def _either(names: Iterable[str]) -> str:
    order = (kinds.BUNDLED, kinds.VLLM_TIERING, kinds.VLLM_OFFLOADING, kinds.HYBRID)
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
_NEEDS_NVIDIA: Final = (kinds.SIMPLE_CPU, kinds.FLEX_KV)


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


USES_VOLUME: Final = f"(self.connector.type in ['{kinds.BUNDLED}', '{kinds.VLLM_TIERING}'] || {_NIXL})"
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
        cel=f"!(self.connector.type in ['{kinds.LMCACHE}', '{kinds.HYBRID}']) || !has(self.engine.env) || "
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
        cel=f"!(self.connector.type in ['{kinds.LMCACHE}', '{kinds.MOONCAKE}', '{kinds.HYBRID}']) || {_NIXL} || "
        f"self.engine.accelerator.resource != '{NO_ACCELERATOR}'",
        message="is none, vLLM's CPU build, with which this spec.connector.type does not work: use Bundled, "
        "VLLMOffloading, VLLMTiering or Hybrid with nixl, or name the resource of a device",
        check=lambda spec: (
            spec.connector.type not in {kinds.LMCACHE, kinds.MOONCAKE, kinds.HYBRID}
            or spec.connector.is_ours
            or _has_device(spec)
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
