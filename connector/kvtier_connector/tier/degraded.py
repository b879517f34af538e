# SPDX-License-Identifier: Apache-2.0
"""Connectors that serve without the tier, for a vLLM that looks different inside from what the tier knows.

Of vLLM they use what is public: its own CPU tier, where the platform has one, and else the interface of a connector,
with an answer to each question that changes nothing. Scheduler and workers must not differ in the choice, so it
depends on nothing but vLLM and the platform.
"""

from __future__ import annotations

import copy
from typing import Any

from vllm.distributed.kv_transfer.kv_connector import v1
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.platforms import current_platform

from kvtier_connector.tier.reliance import Reliance, differences

_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector:OffloadingConnector"
_CPU_TIER = (
    Reliance(
        _CONNECTOR,
        overridden=(
            "__init__(vllm_config, role, kv_cache_config)",
            "build_prom_metrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)",
        ),
    ),
    Reliance("vllm.v1.kv_offload.cpu.spec:CPUOffloadingSpec"),
)
_POLICIES = ("lru", "arc")
_KEPT = ("cpu_bytes_to_use", "block_size", "blocks_per_chunk", "offload_prompt_only", "eviction_policy")
"""Settings of the tier that vLLM's CPU tier has too."""


def connector_without_tier() -> type:
    """Return vLLM's CPU tier alone, or a connector that does nothing where there is none to be had."""
    if current_platform.is_cuda_alike() and not differences(_CPU_TIER):
        return _cpu_tier_alone()
    return _idle()


def _cpu_tier_alone() -> type:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import (  # noqa: PLC0415 - if it is there
        OffloadingConnector,
    )

    class CPUTierConnector(OffloadingConnector):
        def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
            super().__init__(without_tier(vllm_config), role, kv_cache_config)

        @classmethod
        def build_prom_metrics(cls, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
            return super().build_prom_metrics(without_tier(vllm_config), *args, **kwargs)

    return CPUTierConnector


def without_tier(vllm_config: Any) -> Any:
    """Return a copy of vLLM's configuration in which the CPU tier is the last one."""
    config = copy.copy(vllm_config)
    config.kv_transfer_config = copy.copy(config.kv_transfer_config)
    extra = config.kv_transfer_config.kv_connector_extra_config
    kept = {name: extra[name] for name in _KEPT if name in extra}
    if kept.get("eviction_policy") not in _POLICIES:
        kept.pop("eviction_policy", None)
    config.kv_transfer_config.kv_connector_extra_config = {**kept, "spec_name": "CPUOffloadingSpec"}
    return config


def _idle() -> type:
    def nothing(*_: Any, **__: Any) -> None:
        """Do nothing."""

    def no_tokens(*_: Any, **__: Any) -> tuple[int, bool]:
        return 0, False

    def not_held(*_: Any, **__: Any) -> tuple[bool, None]:
        return False, None

    def no_orders(*_: Any, **__: Any) -> Any:
        return KVConnectorMetadata()

    # Hybrid models want a connector that says it knows several groups of layers; of nothing there is one kind.
    bases = (v1.KVConnectorBase_V1, *filter(None, [getattr(v1, "SupportsHMA", None)]))
    # Whatever else this release has made abstract.
    asked = {name: nothing for base in bases for name in getattr(base, "__abstractmethods__", ())}
    answers = {
        "requires_kv_delivery": False,
        "get_num_new_matched_tokens": no_tokens,
        "build_connector_meta": no_orders,
        "request_finished": not_held,
        "request_finished_all_groups": not_held,
    }
    return type("IdleConnector", bases, {**asked, **answers})
