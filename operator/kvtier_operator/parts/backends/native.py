# SPDX-License-Identifier: Apache-2.0
"""kvtier's own connector, and those that vLLM itself has: memory, memory and files, SimpleCPU. Pure."""

from __future__ import annotations

from typing import Any, Final

from kvtier_connector.contract import engine
from kvtier_operator import names
from kvtier_operator.api.connector_spec import SimpleCpu, VLLMOffloading, VLLMTiering
from kvtier_operator.api.engine_spec import NO_ACCELERATOR
from kvtier_operator.names import Manifest
from kvtier_operator.parts.backends.rendered import (
    OFFLOAD_MOUNT,
    Rendered,
    alone,
    connector,
    node_disk,
    own_files,
)
from kvtier_operator.plan import TierPlan

_OFFLOADING: Final = "OffloadingConnector"

ON_DEVICE: Final = {"spec_name": "CPUOffloadingSpec"}
"""vLLM's own tier in host memory."""
ON_CPU_BUILD: Final = {
    "spec_name": "CpuBuildOffloadingSpec",
    "spec_module_path": "kvtier_connector.vllm_adapter.cpu_build",
}
"""vLLM refuses to offload on its CPU build; a class of ours that copies with memcpy is one module away."""


def bundled(plan: TierPlan) -> Rendered:
    """Return kvtier's own connector: host memory and the volume."""
    config, config_mount = own_files(plan)
    blocks, blocks_mount = volume(plan)
    return Rendered(
        transfer=alone(bundled_connector(plan)),
        volumes=(blocks, config),
        mounts=(blocks_mount, config_mount),
        needs_package=True,
    )


def bundled_connector(plan: TierPlan) -> dict[str, Any]:
    """Return kvtier's connector, with its spec and its tier."""
    extra = {
        "spec_name": "KVTierSpec",
        "spec_module_path": "kvtier_connector.vllm_adapter.spec",
        **_memory(plan),
        **({"canonical_layout": True} if plan.spec.disk.canonical_layout else {}),
        # Those of the CPU tier name the tokens. The volume's are the janitor's to publish, once for all engines.
        **({} if plan.spec.kv_events is None else {"self_describing_kv_events": True}),
        "secondary_tiers": [
            {
                "type": "SharedVolumeTier",
                "module_path": "kvtier_connector.vllm_adapter.secondary_tier",
                "config_file": f"{names.CONFIG_MOUNT}/{engine.CONFIG_FILE}",
                # The file follows the spec while a pod of before it may still be restarted.
                "generation": plan.generation.digest,
            }
        ],
    }
    return {
        **connector("KVTierConnector", extra),
        "kv_connector_module_path": "kvtier_connector.vllm_adapter.connector",
    }


def offloading(plan: TierPlan) -> Rendered:
    """Return vLLM's tier in host memory."""
    settings = plan.spec.connector.vllm_offloading or VLLMOffloading()
    return Rendered(transfer=alone(offloading_connector(plan, settings)), needs_package=_is_cpu_build(plan))


def offloading_connector(plan: TierPlan, settings: VLLMOffloading) -> dict[str, Any]:
    """Return vLLM's connector for host memory alone."""
    spec = ON_CPU_BUILD if _is_cpu_build(plan) else ON_DEVICE
    gate = {"store_threshold": settings.store_threshold, "max_tracker_size": settings.max_tracker_size}
    return connector(
        _OFFLOADING,
        {
            **spec,
            **_memory(plan),
            **(gate if settings.store_threshold > 1 else {}),
            **({"self_describing_kv_events": True} if settings.self_describing_events else {}),
        },
    )


def tiering(plan: TierPlan) -> Rendered:
    """Return vLLM's host memory, and its files on the volume."""
    settings = plan.spec.connector.vllm_tiering or VLLMTiering()
    spec = (
        {"spec_name": "KVTierSpec", "spec_module_path": "kvtier_connector.vllm_adapter.spec"}
        if _is_cpu_build(plan)
        else {"spec_name": "TieringOffloadingSpec"}
    )
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
        **spec,
        **_memory(plan),
        **({"canonical_layout": True} if plan.spec.disk.canonical_layout else {}),
        **({"self_describing_kv_events": True} if events else {}),
        "secondary_tiers": [files],
    }
    blocks, mount = volume(plan)
    return Rendered(
        transfer=alone(connector(_OFFLOADING, extra)),
        volumes=(blocks,),
        mounts=(mount,),
        needs_package=_is_cpu_build(plan),
    )


def simple_cpu(plan: TierPlan) -> Rendered:
    """Return vLLM's SimpleCPUOffloadConnector."""
    settings = plan.spec.connector.simple_cpu or SimpleCpu()
    size, lazy = plan.decisions.cpu_bytes, {"lazy_offload": settings.mode == "Lazy"}
    # Layers of different kinds keep their own blocks; vLLM says so at the start where the model does not let it.
    args = () if _has_hybrid_flag(plan) else ("--no-disable-hybrid-kv-cache-manager",)
    if settings.medium == "Memory":
        extra = {"cpu_bytes_to_use": size, **lazy}
        return Rendered(transfer=alone(connector("SimpleCPUOffloadConnector", extra)), args=args)
    disk = {
        "kv_offload_backend": "disk",
        "disk_path": f"{OFFLOAD_MOUNT}/blocks",
        # Of each rank, which has a file of its own.
        "disk_capacity_bytes": size // plan.spec.engine.tensor_parallel,
        "use_page_cache": settings.use_page_cache,
    }
    on_disk, mount = node_disk(plan, size)
    return Rendered(
        transfer=alone(connector("SimpleCPUOffloadConnector", {**lazy, **disk})),
        args=args,
        volumes=(on_disk,),
        mounts=(mount,),
    )


def volume(plan: TierPlan) -> tuple[Manifest, Manifest]:
    """Return the volume with the blocks, and its mount."""
    return (
        {"name": "blocks", "persistentVolumeClaim": {"claimName": plan.claim_name}},
        {"name": "blocks", "mountPath": names.VOLUME_MOUNT},
    )


def _memory(plan: TierPlan) -> dict[str, Any]:
    """Return what kvtier's connector and vLLM's are told of the tier in host memory alike."""
    cpu = plan.spec.cpu
    return {
        "cpu_bytes_to_use": plan.decisions.cpu_bytes,
        **plan.decisions.chunking.settings(),
        "eviction_policy": cpu.eviction_policy,
        "offload_prompt_only": cpu.offload_prompt_only,
    }


def _is_cpu_build(plan: TierPlan) -> bool:
    return plan.spec.engine.accelerator.resource == NO_ACCELERATOR


def _has_hybrid_flag(plan: TierPlan) -> bool:
    return any("disable-hybrid-kv-cache-manager" in word.replace("_", "-") for word in plan.spec.engine.args)
