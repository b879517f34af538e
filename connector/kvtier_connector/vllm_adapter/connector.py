# SPDX-License-Identifier: Apache-2.0
"""The connector that vLLM loads by name (``kv_connector_module_path``), or one that does nothing.

Apart from `offloading_connector`, which imports what another release of vLLM may lack. The scheduler, every worker and
the API server import this module and must choose alike, so the choice depends on nothing but vLLM. The connector that
does nothing uses vLLM's public interface of connectors only.
"""

from __future__ import annotations

import importlib
from typing import Any

import prometheus_client
from vllm.distributed.kv_transfer.kv_connector import v1
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.logger import init_logger

from kvtier_connector.vllm_adapter import supported
from kvtier_connector.vllm_adapter.supported import Support

logger = init_logger("vllm.kvtier.connector")


def choose() -> type:
    """Return the connector for this vLLM; either has a metric that tells the version and the support."""
    found = supported.check()
    if not found.problem:
        return _reporting(importlib.import_module(supported.CONNECTOR_MODULE).KVTierConnector, found)
    logger.error("kvtier serves WITHOUT the shared volume and without its CPU tier: %s", found.problem)
    return _reporting(idle_connector(), found)


def idle_connector() -> type:
    """Return a connector that answers every call of vLLM and changes nothing."""

    def nothing(*_: Any, **__: Any) -> None:
        """Do nothing."""

    def no_tokens(*_: Any, **__: Any) -> tuple[int, bool]:
        return 0, False

    def not_held(*_: Any, **__: Any) -> tuple[bool, None]:
        return False, None

    def no_orders(*_: Any, **__: Any) -> Any:
        return KVConnectorMetadata()

    # vLLM refuses hybrid models without SupportsHMA, which a connector that moves nothing supports trivially.
    bases = (v1.KVConnectorBase_V1, *filter(None, [getattr(v1, "SupportsHMA", None)]))
    # Includes methods that a later release has made abstract.
    abstract = {name: nothing for base in bases for name in getattr(base, "__abstractmethods__", ())}
    answers = {
        "requires_kv_delivery": False,
        "get_num_new_matched_tokens": no_tokens,
        "build_connector_meta": no_orders,
        "request_finished": not_held,
        "request_finished_all_groups": not_held,
    }
    return type("IdleConnector", bases, {**abstract, **answers})


def _reporting(connector: Any, found: Support) -> type:
    class KVTierConnector(connector):
        @classmethod
        def build_prom_metrics(
            cls, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any
        ) -> Any:
            """Declare the metrics in the API server, where ours has its value already."""
            try:
                _report(found, metric_types, labelnames, per_engine_labelvalues)
            except Exception:
                logger.exception("No %s: this vLLM declares metrics in another way", supported.RELEASE_METRIC)
            return super().build_prom_metrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    return KVTierConnector


def _report(found: Support, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any) -> None:
    gauge = metric_types[prometheus_client.Gauge](
        name=supported.RELEASE_METRIC,
        documentation=supported.RELEASE_DOCUMENTATION,
        labelnames=[*labelnames, *supported.RELEASE_LABELS],
        multiprocess_mode="mostrecent",
    )
    for values in per_engine_labelvalues.values():
        gauge.labels(*values, found.version, found.label).set(1)


def _register() -> None:
    """Have vLLM find the class by its name alone: MultiConnector looks its children's classes up so.

    Without it the API server ends with the first statistics of an engine.
    """
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory  # noqa: PLC0415 - see below

        KVConnectorFactory.register_connector(KVTierConnector.__name__, __name__, KVTierConnector.__name__)
    except ValueError:
        return  # registered already
    except (ImportError, AttributeError, TypeError):
        # Another release of vLLM.
        logger.exception("kvtier cannot be used in a MultiConnector: this vLLM registers connectors in another way")


KVTierConnector = choose()
_register()
