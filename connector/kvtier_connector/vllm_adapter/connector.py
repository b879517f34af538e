# SPDX-License-Identifier: Apache-2.0
"""What vLLM loads by name (``kv_connector_module_path``): our connector, or one that serves without the tier.

Apart from the connector itself because that imports what another release of vLLM may not have. Imported in the
scheduler, in every worker and in the API server, which must choose alike: the choice depends on nothing but vLLM and
the platform. Importing it starts nothing.

What serves without the tier uses what is public of vLLM: its own CPU tier, where the platform has one, and else the
interface of a connector, with an answer to each question that changes nothing.
"""

from __future__ import annotations

import copy
from typing import Any

from vllm.distributed.kv_transfer.kv_connector import v1
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.logger import init_logger
from vllm.platforms import current_platform

from kvtier_connector.contract.engine import SUPPORTED_VLLM
from kvtier_connector.vllm_adapter import supported
from kvtier_connector.vllm_adapter.supported import Reliance, differences

logger = init_logger("vllm.kvtier.connector")

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


def choose() -> type:
    """Return the connector for this vLLM, with a metric that says which vLLM that is and how kvtier gets on with it."""
    found = supported.examine()
    ours: type | None = None
    if found.standing is not supported.Standing.FOREIGN:
        try:
            from kvtier_connector.vllm_adapter.offloading_connector import KVTierConnector  # noqa: PLC0415 - see the module
        except (ImportError, AttributeError, TypeError) as error:
            # A name to import is in no table, and neither is what it takes to derive from a class.
            lacking = (f"the connector cannot be imported ({error})",)
            found = found._replace(standing=supported.Standing.FOREIGN, missing=lacking)
        else:
            ours = KVTierConnector
    _tell(found)
    return _reporting(ours or connector_without_tier(), found)


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


def _tell(found: supported.Finding) -> None:
    tested = " and ".join(SUPPORTED_VLLM)
    if found.standing is supported.Standing.FOREIGN:
        logger.error(
            "kvtier serves WITHOUT the shared volume: vLLM %s looks different inside from %s, which it knows: %s",
            found.version,
            tested,
            "; ".join(found.missing),
        )
    elif found.standing is supported.Standing.UNTESTED:
        logger.warning("kvtier is tested with vLLM %s, and this is %s", tested, found.version)


def _reporting(connector: Any, found: supported.Finding) -> type:
    class KVTierConnector(connector):
        @classmethod
        def build_prom_metrics(
            cls, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any
        ) -> Any:
            """Declare the metrics, in the API server, where ours is known already."""
            try:
                _report(found, vllm_config, metric_types, labelnames, per_engine_labelvalues)
            except Exception:
                logger.exception("No %s: this vLLM keeps its metrics in another way", supported.RELEASE_METRIC)
            return super().build_prom_metrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    return KVTierConnector


def _report(
    found: supported.Finding, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (  # noqa: PLC0415 - see the module
        KVConnectorPromMetrics,
    )

    # Whatever vLLM counts with, it gives to classes derived from this one.
    made = KVConnectorPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
    gauge = made._gauge_cls(  # noqa: SLF001 - as those do
        name=supported.RELEASE_METRIC,
        documentation=supported.RELEASE_DOCUMENTATION,
        labelnames=[*labelnames, *supported.RELEASE_LABELS],
        multiprocess_mode="mostrecent",
    )
    for values in per_engine_labelvalues.values():
        gauge.labels(*values, found.version, found.standing.value).set(1)


def _make_known() -> None:
    """Have vLLM find the class by its name alone, as MultiConnector looks for those of its children.

    Where it does not, its API server ends with the first statistics of an engine.
    """
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory  # noqa: PLC0415 - see the module

        KVConnectorFactory.register_connector(KVTierConnector.__name__, __name__, KVTierConnector.__name__)
    except ValueError:
        return  # known already
    except (ImportError, AttributeError, TypeError):
        logger.exception("kvtier cannot be used in a MultiConnector: this vLLM keeps its connectors in another way")


KVTierConnector = choose()
_make_known()
