# SPDX-License-Identifier: Apache-2.0
"""Rendering of each connector: the document of ``--kv-transfer-config``, and what the engine's pod needs for it. Pure.

`api.connector_spec` has the table of their settings and limits; `_RENDERERS` has a function for each type.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final
from urllib.parse import urlsplit

from kvtier_connector.contract.engine import CONFIG_FILE, LMCACHE_PLUGIN, LMCACHE_URL_SETTING, REDIS_PASSWORD_VARIABLE
from kvtier_operator import names, quantity
from kvtier_operator.api import connector_spec as kinds
from kvtier_operator.api.connector_spec import LMCache, LMCacheRedis, Nixl, SimpleCpu, VLLMOffloading, VLLMTiering
from kvtier_operator.api.engine_spec import NO_ACCELERATOR
from kvtier_operator.names import Manifest
from kvtier_operator.parts import pods
from kvtier_operator.parts.connectors import stores
from kvtier_operator.plan import TierPlan, engine_args

OFFLOAD_MOUNT: Final = "/var/cache/kvtier"
"""Directory on the node's disk for connectors that keep blocks there; it goes with the pod."""

ON_DEVICE: Final = {"spec_name": "CPUOffloadingSpec"}
"""vLLM's own tier in host memory."""
ON_CPU_BUILD: Final = {
    "spec_name": "CpuBuildOffloadingSpec",
    "spec_module_path": "kvtier_connector.vllm_adapter.cpu_build",
}
"""The same for vLLM's CPU build, where vLLM refuses to offload: a class of ours copies with memcpy."""
_SPLIT_SCHEDULER: Final = "--scheduler-cls=kvtier_connector.vllm_adapter.split_scheduler.SplitScheduler"
_OUR_SPEC: Final = {"spec_name": "KVTierSpec", "spec_module_path": "kvtier_connector.vllm_adapter.spec"}

MP_PORT: Final = 5555
"""Port of LMCache's cache server, inside the container only."""
SIDE_CHANNEL_PORT: Final = 5600
"""Port on which NIXL's engines exchange the addresses of their memory."""

FLEXKV_FILE: Final = "flexkv.json"
MOONCAKE_FILE: Final = "mooncake.json"
_RESULT_FILE: Final = "/dev/termination-log"
_PIN_SECONDS: Final = 90
_BOTH: Final = "kv_both"
_NIXL_ROLES: Final = {"Prefill": "kv_producer", "Decode": "kv_consumer", "Both": _BOTH}
_NO_WINDOW_GROUPS: Final = "disable-hybrid-kv-cache-manager"
_HYBRID_FLAGS: Final = (_NO_WINDOW_GROUPS, f"no-{_NO_WINDOW_GROUPS}")

_PLUGIN_CLASS: Final = {
    f"remote_storage_plugin.{LMCACHE_PLUGIN}.module_path": "kvtier_connector.pod_tools.lmcache_redis",
    f"remote_storage_plugin.{LMCACHE_PLUGIN}.class_name": "PasswordRedisConnector",
}
"""Where LMCache finds the client for a Redis with a password."""
_SERVER_PLUGIN: Final = {
    "type": "native_plugin",
    "module_path": "kvtier_connector.pod_tools.lmcache_server_redis",
    "class_name": "RedisClient",
}
"""Where its cache server finds the client for any Redis."""


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """The engine's settings for its connector."""

    transfer: Mapping[str, Any]
    """Document of ``--kv-transfer-config``."""
    args: tuple[str, ...] = ()
    """More flags."""
    env: tuple[Manifest, ...] = ()
    ports: tuple[Manifest, ...] = ()
    volumes: tuple[Manifest, ...] = ()
    mounts: tuple[Manifest, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    """Entries of the ConfigMap beside those of kvtier's own connector."""
    init: tuple[Manifest, ...] = ()
    """Containers that run before the engine."""
    needs_package: bool = False
    """Whether the engine imports a module of kvtier's package."""

    @property
    def transfer_text(self) -> str:
        """Return the value of ``--kv-transfer-config``."""
        # A block that cannot be loaded costs its computing; vLLM's default ends the request.
        document = {"kv_load_failure_policy": "recompute", **self.transfer}
        return json.dumps(document, sort_keys=True, separators=(",", ":"), default=dict)


def render(plan: TierPlan) -> Rendered:
    """Return what the engine of this plan is started with for its connector."""
    return _RENDERERS[plan.spec.connector.type](plan)


def _connector(name: str, extra: Mapping[str, Any] | None = None, *, role: str = _BOTH) -> dict[str, Any]:
    """Return one of vLLM's connectors by its name, alone or as a child of MultiConnector."""
    return {"kv_connector": name, "kv_role": role, **({"kv_connector_extra_config": dict(extra)} if extra else {})}


def _multi(*children: Mapping[str, Any]) -> dict[str, Any]:
    """Return several connectors as one: all store a block, and the first that has it loads it."""
    return _connector("MultiConnector", {"connectors": [dict(child) for child in children]})


def _variable(name: str, value: str) -> Manifest:
    return {"name": name, "value": value}


def _pod_address(name: str) -> Manifest:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}


def _blocks(plan: TierPlan) -> tuple[Manifest, Manifest]:
    """Return the volume with the blocks, and its mount."""
    return (
        {"name": "blocks", "persistentVolumeClaim": {"claimName": plan.claim_name}},
        {"name": "blocks", "mountPath": names.VOLUME_MOUNT},
    )


def _own_files(plan: TierPlan) -> tuple[Manifest, Manifest]:
    """Return the volume with the files of the tier's ConfigMap, and its mount."""
    return (
        {"name": "config", "configMap": {"name": names.config(plan.tier)}},
        {"name": "config", "mountPath": names.CONFIG_MOUNT, "readOnly": True},
    )


def _node_disk(plan: TierPlan, size_bytes: int) -> tuple[Manifest, Manifest]:
    """Return a volume on the node's disk for so many bytes of blocks of each engine in the pod, and its mount."""
    # The directory's own bytes must not end the pod.
    limit = quantity.format_bytes(plan.sizing.engines_per_pod * size_bytes + (1 << 30))
    return (
        {"name": "kvtier-offload", "emptyDir": {"sizeLimit": limit}},
        {"name": "kvtier-offload", "mountPath": OFFLOAD_MOUNT},
    )


def _host_memory(plan: TierPlan) -> dict[str, Any]:
    """Return the settings of the tier in host memory, which kvtier's connector and vLLM's share."""
    cpu = plan.spec.cpu
    return {
        "cpu_bytes_to_use": plan.decisions.cpu_bytes,
        **plan.decisions.chunking.settings(),
        "eviction_policy": cpu.eviction_policy,
        "offload_prompt_only": cpu.offload_prompt_only,
    }


def _is_cpu_build(plan: TierPlan) -> bool:
    return plan.spec.engine.accelerator.resource == NO_ACCELERATOR


def _bundled_connector(plan: TierPlan) -> dict[str, Any]:
    extra = {
        **_OUR_SPEC,
        **_host_memory(plan),
        **({"canonical_layout": True} if plan.spec.disk.canonical_layout else {}),
        # Events of the CPU tier name the tokens. The janitor publishes the volume's, once for all engines.
        **({} if plan.spec.kv_events is None else {"self_describing_kv_events": True}),
        "secondary_tiers": [
            {
                "type": "SharedVolumeTier",
                "module_path": "kvtier_connector.vllm_adapter.secondary_tier",
                "config_file": f"{names.CONFIG_MOUNT}/{CONFIG_FILE}",
                # The file follows the spec while a pod of an earlier one may still be restarted.
                "generation": plan.generation.digest,
                **({"image": plan.spec.engine.image} if plan.generation.identity["engine_image"] == "any" else {}),
            }
        ],
    }
    return {
        **_connector("KVTierConnector", extra),
        "kv_connector_module_path": "kvtier_connector.vllm_adapter.connector",
    }


def _bundled(plan: TierPlan) -> Rendered:
    blocks, config = _blocks(plan), _own_files(plan)
    return Rendered(
        transfer=_bundled_connector(plan),
        args=() if plan.spec.disk.split_hits == "Off" else (_SPLIT_SCHEDULER,),
        volumes=(blocks[0], config[0]),
        mounts=(blocks[1], config[1]),
        needs_package=True,
    )


def _offloading_connector(plan: TierPlan, settings: VLLMOffloading) -> dict[str, Any]:
    gate = {"store_threshold": settings.store_threshold, "max_tracker_size": settings.max_tracker_size}
    extra = {
        **(ON_CPU_BUILD if _is_cpu_build(plan) else ON_DEVICE),
        **_host_memory(plan),
        **(gate if settings.store_threshold > 1 else {}),
        **({"self_describing_kv_events": True} if settings.self_describing_events else {}),
    }
    return _connector("OffloadingConnector", extra)


def _offloading(plan: TierPlan) -> Rendered:
    settings = plan.spec.connector.vllm_offloading or VLLMOffloading()
    return Rendered(transfer=_offloading_connector(plan, settings), needs_package=_is_cpu_build(plan))


def _tiering(plan: TierPlan) -> Rendered:
    settings = plan.spec.connector.vllm_tiering or VLLMTiering()
    events = settings.self_describing_events
    files = {
        "type": "fs",
        # vLLM's own directory names neither revision nor weights; the generation's does.
        "root_dir": plan.generation.root,
        "n_read_threads": settings.read_threads,
        "n_write_threads": settings.write_threads,
        **({"enable_kv_events": True, "locality": "REMOTE"} if events else {}),
    }
    extra = {
        **(_OUR_SPEC if _is_cpu_build(plan) else {"spec_name": "TieringOffloadingSpec"}),
        **_host_memory(plan),
        **({"canonical_layout": True} if plan.spec.disk.canonical_layout else {}),
        **({"self_describing_kv_events": True} if events else {}),
        "secondary_tiers": [files],
    }
    volume, mount = _blocks(plan)
    return Rendered(
        transfer=_connector("OffloadingConnector", extra),
        volumes=(volume,),
        mounts=(mount,),
        needs_package=_is_cpu_build(plan),
    )


def _simple_cpu(plan: TierPlan) -> Rendered:
    settings = plan.spec.connector.simple_cpu or SimpleCpu()
    size, extra = plan.decisions.cpu_bytes, dict[str, Any](lazy_offload=settings.mode == "Lazy")
    # Layers of different kinds keep their own blocks; vLLM says so at the start where the model does not let it.
    args = () if engine_args.read(plan.spec.engine.args).has(*_HYBRID_FLAGS) else (f"--no-{_NO_WINDOW_GROUPS}",)
    if settings.medium == "Memory":
        extra = {"cpu_bytes_to_use": size, **extra}
        return Rendered(transfer=_connector("SimpleCPUOffloadConnector", extra), args=args)
    extra |= {
        "kv_offload_backend": "disk",
        "disk_path": f"{OFFLOAD_MOUNT}/blocks",
        # Each rank has a file of its own.
        "disk_capacity_bytes": size // plan.spec.engine.tensor_parallel,
        "use_page_cache": settings.use_page_cache,
    }
    volume, mount = _node_disk(plan, size)
    return Rendered(
        transfer=_connector("SimpleCPUOffloadConnector", extra), args=args, volumes=(volume,), mounts=(mount,)
    )


def _lmcache(plan: TierPlan) -> Rendered:
    settings = plan.spec.connector.used_lmcache
    assert settings is not None
    if settings.mode == "MultiProcess":
        return _lmcache_server(plan, settings)
    return _lmcache_in_process(plan, settings, memory_bytes=plan.decisions.cpu_bytes)


def _lmcache_in_process(plan: TierPlan, settings: LMCache, *, memory_bytes: int) -> Rendered:
    ranks = plan.spec.engine.tensor_parallel
    env = [
        _variable("LMCACHE_CHUNK_SIZE", str(settings.chunk_tokens)),
        _variable("LMCACHE_LOCAL_CPU", "True"),
        # Each rank allocates this much for itself.
        _variable("LMCACHE_MAX_LOCAL_CPU_SIZE", _gib(memory_bytes // ranks)),
        _variable("LMCACHE_SAVE_DECODE_CACHE", str(not plan.spec.cpu.offload_prompt_only)),
        # Its own default is Python's hash, under which prompts can be made to collide.
        _variable("LMCACHE_PRE_CACHING_HASH_ALGORITHM", plan.spec.hash.algorithm),
        _variable("LMCACHE_TRACK_USAGE", "false"),
    ]
    disk = () if settings.local_disk is None else (_node_disk(plan, settings.local_disk.size_bytes),)
    if settings.local_disk is not None:
        env += [
            _variable("LMCACHE_LOCAL_DISK", f"file://{OFFLOAD_MOUNT}/"),
            _variable("LMCACHE_MAX_LOCAL_DISK_SIZE", _gib(settings.local_disk.size_bytes // ranks)),
        ]
    if settings.redis is not None:
        env += _lmcache_redis(plan, settings, settings.redis)
    return Rendered(
        # With it, vLLM makes no step one CUDA graph. LMCache loads nothing before such a step, and says that it did.
        transfer=_connector("LMCacheConnectorV1", {"use_layerwise": True}),
        env=tuple(env),
        volumes=tuple(volume for volume, _ in disk),
        mounts=tuple(mount for _, mount in disk),
        init=_redis_check(plan, settings.redis),
        needs_package=settings.redis is not None and settings.redis.password_secret_ref is not None,
    )


def _lmcache_redis(plan: TierPlan, settings: LMCache, redis: LMCacheRedis) -> list[Manifest]:
    url = stores.redis_url(plan, redis)
    serde = _variable("LMCACHE_REMOTE_SERDE", settings.serde)
    if redis.password_secret_ref is None:
        return [_variable("LMCACHE_REMOTE_URL", url), serde]
    # Its redis:// takes a password in the URL alone, which it logs. Its resp:// holds up every request of an engine
    # whose Redis is away. So LMCache loads a client of ours.
    plugin = json.dumps({**_PLUGIN_CLASS, LMCACHE_URL_SETTING: url}, sort_keys=True, separators=(",", ":"))
    return [
        _variable("LMCACHE_REMOTE_STORAGE_PLUGINS", LMCACHE_PLUGIN),
        _variable("LMCACHE_EXTRA_CONFIG", plugin),
        serde,
        *_password(redis),
    ]


def _redis_check(plan: TierPlan, redis: LMCacheRedis | None) -> tuple[Manifest, ...]:
    """Return the container that asks the Redis whether it answers: LMCache says so in its log alone."""
    if redis is None:
        return ()
    container = {
        "name": names.REDIS_CHECK_CONTAINER,
        "image": plan.connector_image,
        "command": ["python3", "-m", "kvtier_connector.pod_tools.redis_check"],
        "args": [f"--url={stores.redis_url(plan, redis)}", f"--result={_RESULT_FILE}"],
        **({"env": secret} if (secret := _password(redis)) else {}),
        "resources": {"requests": {"cpu": "50m", "memory": "64Mi"}, "limits": {"memory": "128Mi"}},
        "terminationMessagePath": _RESULT_FILE,
        "securityContext": pods.hardened(),
    }
    return (container,)


def _password(redis: LMCacheRedis) -> list[Manifest]:
    secret = redis.password_secret_ref
    if secret is None:
        return []
    return [{"name": REDIS_PASSWORD_VARIABLE, "valueFrom": {"secretKeyRef": {"name": secret.name, "key": secret.key}}}]


def _lmcache_server(plan: TierPlan, settings: LMCache) -> Rendered:
    """Return the engine as a client of LMCache's cache server, which the engine starts in its own container."""
    server = [
        f"--l1-size-gb={_gib(plan.decisions.cpu_bytes)}",
        "--eviction-policy=LRU",
        f"--chunk-size={settings.chunk_tokens}",
    ]
    env = [_variable("LMCACHE_TRACK_USAGE", "false")]
    if settings.redis is not None:
        address = urlsplit(stores.redis_url(plan, settings.redis))
        # Its own "resp" holds up every request of an engine whose Redis is away.
        params = {"host": address.hostname, "port": address.port}
        server += ["--l2-adapter", json.dumps({**_SERVER_PLUGIN, "adapter_params": params})]
        env += _password(settings.redis)
    extra: dict[str, Any] = {
        "lmcache.mp.host": "tcp://localhost",
        "lmcache.mp.port": MP_PORT,
        "lmcache.mp.autostart": True,
        "lmcache.mp.autostart.server_args": shlex.join(server),
        "lmcache.mp.autostart.wait_timeout": _PIN_SECONDS + plan.sizing.startup_pin_seconds,
        **({} if plan.spec.cpu.offload_prompt_only else {"lmcache.mp.save_decode_cache": True}),
    }
    return Rendered(
        transfer=_connector("LMCacheMPConnector", extra),
        env=tuple(env),
        init=_redis_check(plan, settings.redis),
        needs_package=settings.redis is not None,
    )


def _gib(size_bytes: int) -> str:
    """Write a size as LMCache reads it: GiB, which it calls GB."""
    return f"{size_bytes / (1 << 30):.6f}".rstrip("0").rstrip(".")


def _hybrid(plan: TierPlan) -> Rendered:
    settings = plan.spec.connector.hybrid
    assert settings is not None
    if settings.nixl is not None:
        return _with_nixl(plan, settings.nixl)
    assert settings.lmcache is not None
    behind = _lmcache_in_process(plan, settings.lmcache, memory_bytes=settings.lmcache_bytes)
    first = _offloading_connector(plan, settings.vllm_offloading or VLLMOffloading())
    return replace(behind, transfer=_multi(first, behind.transfer))


def _with_nixl(plan: TierPlan, settings: Nixl) -> Rendered:
    """Return NIXL before kvtier's own connector: blocks that another engine hands over need no read of the volume."""
    nixl = _connector("NixlConnector", {"backends": [settings.backend]}, role=_NIXL_ROLES[settings.role])
    return replace(
        _bundled(plan),
        transfer=_multi(nixl, _bundled_connector(plan)),
        # Hits are split where kvtier's is the only connector.
        args=(),
        env=(
            _pod_address("VLLM_NIXL_SIDE_CHANNEL_HOST"),
            _variable("VLLM_NIXL_SIDE_CHANNEL_PORT", str(SIDE_CHANNEL_PORT)),
        ),
        ports=({"name": "nixl", "containerPort": SIDE_CHANNEL_PORT, "protocol": "TCP"},),
    )


def _with_file(plan: TierPlan, rendered: Rendered, variable: str, file: str, document: Any) -> Rendered:
    """Add a file of the tier's ConfigMap, which a variable names: the only one that the engine reads of it."""
    volume, mount = _own_files(plan)
    return replace(
        rendered,
        env=(_variable(variable, f"{names.CONFIG_MOUNT}/{file}"), *rendered.env),
        volumes=(volume, *rendered.volumes),
        mounts=(mount, *rendered.mounts),
        files={file: json.dumps(document, indent=2, sort_keys=True, default=dict) + "\n"},
    )


def _flexkv(plan: TierPlan) -> Rendered:
    settings = plan.spec.connector.flex_kv
    assert settings is not None
    # Of whole GiB, and none is refused.
    config = {"cpu_cache_gb": max(1, plan.decisions.cpu_bytes >> 30), **settings.config}
    made = Rendered(transfer=_connector("FlexKVConnectorV1"))
    if settings.disk_bytes:
        volume, mount = _node_disk(plan, settings.disk_bytes)
        config["ssd_cache_dir"] = OFFLOAD_MOUNT
        made = replace(made, volumes=(volume,), mounts=(mount,))
    return _with_file(plan, made, "FLEXKV_CONFIG_PATH", FLEXKV_FILE, config)


def _mooncake(plan: TierPlan) -> Rendered:
    settings = plan.spec.connector.mooncake
    assert settings is not None
    config = {"metadata_server": "P2PHANDSHAKE", **settings.config}
    if settings.master is not None:
        config["master_server_address"] = (
            f"{names.mooncake_master(plan.tier)}.{plan.tier.namespace}.svc:{settings.master.port}"
        )
    if "global_segment_size" not in config:
        # Each rank gives this much of its memory to the pool; vLLM takes no other number than 0 where an owner has it.
        each = plan.decisions.cpu_bytes // plan.spec.engine.tensor_parallel
        config["global_segment_size"] = each if config.get("mode", "embedded") == "embedded" else 0
    made = Rendered(
        transfer=_connector("MooncakeStoreConnector", {"load_async": settings.load_async}),
        env=(_pod_address("MOONCAKE_REQUESTER_LOCAL_HOSTNAME"),),
    )
    return _with_file(plan, made, "MOONCAKE_CONFIG_PATH", MOONCAKE_FILE, config)


def _custom(plan: TierPlan) -> Rendered:
    settings = plan.spec.connector.custom
    assert settings is not None
    return Rendered(transfer={"kv_role": _BOTH, **settings.transfer_config})


_RENDERERS: Final[Mapping[str, Callable[[TierPlan], Rendered]]] = {
    kinds.BUNDLED: _bundled,
    kinds.VLLM_OFFLOADING: _offloading,
    kinds.VLLM_TIERING: _tiering,
    kinds.SIMPLE_CPU: _simple_cpu,
    kinds.LMCACHE: _lmcache,
    kinds.HYBRID: _hybrid,
    kinds.FLEX_KV: _flexkv,
    kinds.MOONCAKE: _mooncake,
    kinds.CUSTOM: _custom,
}
