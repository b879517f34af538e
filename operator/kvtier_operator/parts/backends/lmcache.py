# SPDX-License-Identifier: Apache-2.0
"""LMCache, in the engine's process or beside it, and connectors that stand behind one another. Pure."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from typing import Any, Final
from urllib.parse import urlsplit

from kvtier_connector.contract.engine import LMCACHE_PLUGIN, LMCACHE_URL_SETTING, REDIS_PASSWORD_VARIABLE
from kvtier_operator import names
from kvtier_operator.api.connector_spec import LMCache, LMCacheRedis, Nixl, VLLMOffloading
from kvtier_operator.names import Manifest
from kvtier_operator.parts import pods
from kvtier_operator.parts.backends import native
from kvtier_operator.parts.backends import redis as trial
from kvtier_operator.parts.backends.rendered import (
    BOTH,
    OFFLOAD_MOUNT,
    Rendered,
    connector,
    multi,
    node_disk,
    variable,
)
from kvtier_operator.parts.backends.rendered import (
    alone as alone_,
)
from kvtier_operator.plan import TierPlan

MP_PORT: Final = 5555
"""Of LMCache's cache server, which nobody outside the container reaches."""

SIDE_CHANNEL_PORT: Final = 5600
"""Where NIXL's engines tell each other of their memory."""

_GIB: Final = 1 << 30
_PIN_SECONDS: Final = 90
_PLUGIN_CLASS: Final = {
    f"remote_storage_plugin.{LMCACHE_PLUGIN}.module_path": "kvtier_connector.pod_tools.lmcache_redis",
    f"remote_storage_plugin.{LMCACHE_PLUGIN}.class_name": "PasswordRedisConnector",
}
"""Where LMCache finds the connector for a Redis with a password."""

_SERVER_PLUGIN: Final = {
    "type": "native_plugin",
    "module_path": "kvtier_connector.pod_tools.lmcache_server_redis",
    "class_name": "RedisClient",
}
"""Where its cache server finds the one for any Redis."""
_NIXL_ROLES: Final = {"Prefill": "kv_producer", "Decode": "kv_consumer", "Both": BOTH}


def alone(plan: TierPlan) -> Rendered:
    """Return LMCache as the engine's only connector."""
    settings = plan.spec.connector.used_lmcache()
    assert settings is not None
    if settings.mode == "MultiProcess":
        return _multi_process(plan, settings)
    return _in_process(plan, settings, memory_bytes=plan.decisions.cpu_bytes)


def hybrid(plan: TierPlan) -> Rendered:
    """Return two connectors, one behind the other."""
    settings = plan.spec.connector.hybrid
    assert settings is not None
    if settings.nixl is not None:
        return _with_nixl(plan, settings.nixl)
    assert settings.lmcache is not None
    behind = _in_process(plan, settings.lmcache, memory_bytes=settings.lmcache_bytes)
    first = native.offloading_connector(plan, settings.vllm_offloading or VLLMOffloading())
    children = [first, connector("LMCacheConnectorV1")]
    return replace(behind, transfer=multi(*children))


def _in_process(plan: TierPlan, settings: LMCache, *, memory_bytes: int) -> Rendered:
    ranks = plan.spec.engine.tensor_parallel
    env = [
        variable("LMCACHE_CHUNK_SIZE", str(settings.chunk_tokens)),
        variable("LMCACHE_LOCAL_CPU", "True"),
        # Each rank allocates this much for itself.
        variable("LMCACHE_MAX_LOCAL_CPU_SIZE", _gib(memory_bytes // ranks)),
        variable("LMCACHE_SAVE_DECODE_CACHE", str(not plan.spec.cpu.offload_prompt_only)),
        # Its own default is Python's hash, which prompts can be made to collide under.
        variable("LMCACHE_PRE_CACHING_HASH_ALGORITHM", plan.spec.hash.algorithm),
        variable("LMCACHE_TRACK_USAGE", "false"),
    ]
    volumes: tuple[Manifest, ...] = ()
    mounts: tuple[Manifest, ...] = ()
    if settings.local_disk is not None:
        on_disk, mount = node_disk(plan, settings.local_disk.size_bytes)
        volumes, mounts = (on_disk,), (mount,)
        env += [
            variable("LMCACHE_LOCAL_DISK", f"file://{OFFLOAD_MOUNT}/"),
            variable("LMCACHE_MAX_LOCAL_DISK_SIZE", _gib(settings.local_disk.size_bytes // ranks)),
        ]
    if settings.redis is not None:
        env += _remote(plan, settings, settings.redis)
    return Rendered(
        transfer=alone_(connector("LMCacheConnectorV1")),
        env=tuple(env),
        volumes=volumes,
        mounts=mounts,
        init=_redis_check(plan, settings),
        needs_package=settings.redis is not None and settings.redis.password_secret_ref is not None,
    )


def _remote(plan: TierPlan, settings: LMCache, redis: LMCacheRedis) -> list[Manifest]:
    url = redis_url(plan, redis)
    serde = variable("LMCACHE_REMOTE_SERDE", settings.serde)
    if redis.password_secret_ref is None:
        return [variable("LMCACHE_REMOTE_URL", url), serde]
    # Its redis:// takes a password in the URL alone, which it logs, and its resp:// holds up every request of an engine
    # whose Redis is away. So LMCache is told of a class of ours.
    return [
        variable("LMCACHE_REMOTE_STORAGE_PLUGINS", LMCACHE_PLUGIN),
        variable("LMCACHE_EXTRA_CONFIG", _compact({**_PLUGIN_CLASS, LMCACHE_URL_SETTING: url})),
        serde,
        _password(redis),
    ]


def _compact(document: dict[str, str]) -> str:
    return json.dumps(document, sort_keys=True, separators=(",", ":"))


def _redis_check(plan: TierPlan, settings: LMCache) -> tuple[Manifest, ...]:
    """Return what asks the Redis whether it answers: LMCache says so in its log alone."""
    if settings.redis is None:
        return ()
    url = redis_url(plan, settings.redis)
    container = {
        "name": names.REDIS_CHECK_CONTAINER,
        "image": plan.connector_image,
        "command": ["python3", "-m", "kvtier_connector.pod_tools.redis_check"],
        "args": [f"--url={url}", f"--result={_RESULT_FILE}"],
        **({} if settings.redis.password_secret_ref is None else {"env": [_password(settings.redis)]}),
        "resources": {"requests": {"cpu": "50m", "memory": "64Mi"}, "limits": {"memory": "128Mi"}},
        "terminationMessagePath": _RESULT_FILE,
        "securityContext": pods.hardened(),
    }
    return (container,)


_RESULT_FILE: Final = "/dev/termination-log"


def _password(redis: LMCacheRedis) -> Manifest:
    secret = redis.password_secret_ref
    assert secret is not None
    return {
        "name": REDIS_PASSWORD_VARIABLE,
        "valueFrom": {"secretKeyRef": {"name": secret.name, "key": secret.key}},
    }


def redis_url(plan: TierPlan, redis: LMCacheRedis) -> str:
    """Return the address of the Redis: the user's, or that of the one that the operator makes."""
    if redis.url is not None:
        return redis.url
    return f"redis://{names.redis(plan.tier)}.{plan.tier.namespace}.svc:{trial.port(plan)}"


def _multi_process(plan: TierPlan, settings: LMCache) -> Rendered:
    """Return the engine as a client of LMCache's cache server, which the engine starts in its own container."""
    server = [
        f"--l1-size-gb={_gib(plan.decisions.cpu_bytes)}",
        "--eviction-policy=LRU",
        f"--chunk-size={settings.chunk_tokens}",
    ]
    env = [variable("LMCACHE_TRACK_USAGE", "false")]
    if settings.redis is not None:
        address = urlsplit(redis_url(plan, settings.redis))
        # Its own "resp" holds up every request of an engine whose Redis is away.
        params = {"host": address.hostname, "port": address.port}
        server += ["--l2-adapter", json.dumps({**_SERVER_PLUGIN, "adapter_params": params})]
        env += [] if settings.redis.password_secret_ref is None else [_password(settings.redis)]
    extra: dict[str, Any] = {
        "lmcache.mp.host": "tcp://localhost",
        "lmcache.mp.port": MP_PORT,
        "lmcache.mp.autostart": True,
        "lmcache.mp.autostart.server_args": shlex.join(server),
        "lmcache.mp.autostart.wait_timeout": _PIN_SECONDS + plan.sizing.startup_pin_seconds,
        **({} if plan.spec.cpu.offload_prompt_only else {"lmcache.mp.save_decode_cache": True}),
    }
    return Rendered(
        transfer=alone_(connector("LMCacheMPConnector", extra)),
        env=tuple(env),
        init=_redis_check(plan, settings),
        needs_package=settings.redis is not None,
    )


def _with_nixl(plan: TierPlan, settings: Nixl) -> Rendered:
    """Return NIXL before kvtier's own connector: what another engine hands over is not read from the volume."""
    own = native.bundled(plan)
    nixl = connector("NixlConnector", {"backends": [settings.backend]}, role=_NIXL_ROLES[settings.role])
    return Rendered(
        transfer=multi(nixl, native.bundled_connector(plan)),
        env=(
            {"name": "VLLM_NIXL_SIDE_CHANNEL_HOST", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            variable("VLLM_NIXL_SIDE_CHANNEL_PORT", str(SIDE_CHANNEL_PORT)),
        ),
        ports=({"name": "nixl", "containerPort": SIDE_CHANNEL_PORT, "protocol": "TCP"},),
        volumes=own.volumes,
        mounts=own.mounts,
        needs_package=True,
    )


def _gib(size_bytes: int) -> str:
    """Write a size as LMCache reads it: GiB, which it calls GB."""
    return f"{size_bytes / _GIB:.6f}".rstrip("0").rstrip(".")
