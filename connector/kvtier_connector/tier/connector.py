# SPDX-License-Identifier: Apache-2.0
"""What vLLM loads by name (``kv_connector_module_path``): our connector, or one that serves without the tier.

Apart from the connector itself because that imports what another release of vLLM may not have. Imported in the
scheduler, in every worker and in the API server, which thus choose alike; importing it starts nothing.
"""

from __future__ import annotations

from typing import Any

from vllm.logger import init_logger

from kvtier_connector.contract import SUPPORTED_VLLM
from kvtier_connector.tier import compat
from kvtier_connector.tier.degraded import connector_without_tier

logger = init_logger("vllm.kvtier.connector")


def choose() -> type:
    """Return the connector for this vLLM, with a metric that says which vLLM that is and how kvtier gets on with it."""
    found = compat.examine()
    ours: type | None = None
    if found.standing is not compat.Standing.FOREIGN:
        try:
            from kvtier_connector.tier.offloading_connector import KVTierConnector  # noqa: PLC0415 - see the module
        except (ImportError, AttributeError, TypeError) as error:
            # A name to import is in no table, and neither is what it takes to derive from a class.
            lacking = (f"the connector cannot be imported ({error})",)
            found = found._replace(standing=compat.Standing.FOREIGN, missing=lacking)
        else:
            ours = KVTierConnector
    _tell(found)
    return _reporting(ours or connector_without_tier(), found)


def _tell(found: compat.Finding) -> None:
    tested = " and ".join(SUPPORTED_VLLM)
    if found.standing is compat.Standing.FOREIGN:
        logger.error(
            "kvtier serves WITHOUT the shared volume: vLLM %s looks different inside from %s, which it knows: %s",
            found.version,
            tested,
            "; ".join(found.missing),
        )
    elif found.standing is compat.Standing.UNTESTED:
        logger.warning("kvtier is tested with vLLM %s, and this is %s", tested, found.version)


def _reporting(connector: Any, found: compat.Finding) -> type:
    class KVTierConnector(connector):
        @classmethod
        def build_prom_metrics(
            cls, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any
        ) -> Any:
            """Declare the metrics, in the API server, where ours is known already."""
            try:
                _report(found, vllm_config, metric_types, labelnames, per_engine_labelvalues)
            except Exception:
                logger.exception("No %s: this vLLM keeps its metrics in another way", compat.RELEASE_METRIC)
            return super().build_prom_metrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    return KVTierConnector


def _report(
    found: compat.Finding, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (  # noqa: PLC0415 - see the module
        KVConnectorPromMetrics,
    )

    # Whatever vLLM counts with, it gives to classes derived from this one.
    made = KVConnectorPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
    gauge = made._gauge_cls(  # noqa: SLF001 - as those do
        name=compat.RELEASE_METRIC,
        documentation=compat.RELEASE_DOCUMENTATION,
        labelnames=[*labelnames, *compat.RELEASE_LABELS],
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
