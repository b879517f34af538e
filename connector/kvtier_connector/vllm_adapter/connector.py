# SPDX-License-Identifier: Apache-2.0
"""The connector that vLLM loads by name (``kv_connector_module_path``), or one that does nothing.

The connector derives from classes of vLLM that have no stable interface, so kvtier supports an exact list of releases.
The tests of the surface (tests/connector/tier/test_spec.py) hold every name and parameter that it uses against each.
Any other release serves without kvtier, with a connector that uses vLLM's public interface only. This module imports
nothing else of vLLM before the check. The scheduler, every worker and the API server import it and must choose alike,
so the choice depends on nothing but vLLM.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import prometheus_client
from typing_extensions import override
from vllm.distributed.kv_transfer.kv_connector import v1
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.logger import init_logger

from kvtier_connector.contract.engine import SUPPORTED_VLLM, decode, vllm_release
from kvtier_connector.pod_tools.ready import Phase, StartupReport

logger = init_logger("vllm.kvtier.connector")

RELEASE_METRIC = "vllm:kvtier_vllm_release"
RELEASE_LABELS = ("version", "support")
RELEASE_DOCUMENTATION = (
    "1, with the version of vLLM and whether kvtier supports it: supported, unsupported, or no_prefix_caching (a "
    "supported one that has it off). In the last two cases the engine serves without the volume and without the CPU "
    "tier."
)

CONNECTOR_MODULE = "kvtier_connector.vllm_adapter.offloading_connector"

NO_PREFIX_CACHING = (
    "prefix caching is off, because vLLM cannot compute from a cached prefix of this model (MLA on the CPU build) or "
    "because of --no-enable-prefix-caching"
)
_WITHOUT = "kvtier serves WITHOUT the shared volume and without its CPU tier"


class Support(NamedTuple):
    """The installed vLLM, and why kvtier cannot be used with it."""

    version: str
    problem: str
    """Empty for a supported release."""


def check_release() -> Support:
    """Compare the version of vLLM with the supported ones, and import the connector."""
    version = str(getattr(importlib.import_module("vllm"), "__version__", "unknown"))
    if vllm_release(version) not in SUPPORTED_VLLM:
        return Support(version, f"kvtier supports vLLM {' and '.join(SUPPORTED_VLLM)}, and this is {version}")
    try:
        importlib.import_module(CONNECTOR_MODULE)
    except (ImportError, AttributeError, TypeError) as error:
        # A build of a supported release that lacks a name, or a class that cannot be derived from any more.
        return Support(version, f"the connector cannot be imported with this build of vLLM {version}: {error}")
    return Support(version, "")


def choose() -> type:
    """Return the connector for this vLLM; either has a metric that tells the version and the support."""
    found = check_release()
    if not found.problem:
        return _reporting(importlib.import_module(CONNECTOR_MODULE).KVTierConnector, found)
    logger.error("%s: %s", _WITHOUT, found.problem)
    return _reporting(idle_connector(found.problem), found)


def idle_connector(problem: str, make_orders: Callable[[], Any] = KVConnectorMetadata) -> type:
    """Return a connector that answers every call of vLLM and changes nothing.

    Args:
        problem: Reason for the startup probe, which lets an engine serve without the volume.
        make_orders: Makes the orders of a step to the workers, which may have another connector.
    """

    def init(self: Any, vllm_config: Any, role: Any, *args: Any, **kwargs: Any) -> None:
        v1.KVConnectorBase_V1.__init__(self, vllm_config, role, *args, **kwargs)
        if role is v1.KVConnectorRole.SCHEDULER:
            _report_startup(vllm_config, problem)

    def answer(value: Any) -> Callable[..., Any]:
        return lambda *_, **__: value

    # vLLM refuses hybrid models without SupportsHMA, which a connector that moves nothing supports trivially.
    bases = (v1.KVConnectorBase_V1, *filter(None, [getattr(v1, "SupportsHMA", None)]))
    # Includes methods that a later release has made abstract.
    abstract = {name: answer(None) for base in bases for name in getattr(base, "__abstractmethods__", ())}
    answers = {
        "__init__": init,
        "requires_kv_delivery": False,
        "get_num_new_matched_tokens": answer((0, False)),
        "build_connector_meta": lambda *_, **__: make_orders(),
        "request_finished": answer((False, None)),
        "request_finished_all_groups": answer((False, None)),
    }
    return type("IdleConnector", bases, {**abstract, **answers})


def _report_startup(vllm_config: Any, problem: str) -> None:
    """Write the report that the startup probe of the pod waits for."""
    try:
        for tier in vllm_config.kv_transfer_config.kv_connector_extra_config.get("secondary_tiers", ()):
            config = decode(Path(tier["config_file"]).read_text(encoding="utf-8"))
            report = StartupReport(config.state_dir, config.tier)
            report.begin(problem)
            report.say(Phase.WITHOUT, problem)
    except Exception:
        logger.exception("The startup probe cannot be told that this engine serves without the volume")


def _reporting(connector: Any, found: Support) -> type:
    class KVTierConnector(connector):
        def __new__(cls, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
            """Make an idle connector where requests cannot go on from loaded blocks."""
            if found.problem or vllm_config.cache_config.enable_prefix_caching:
                return super().__new__(cls)
            logger.error("%s: %s", _WITHOUT, NO_PREFIX_CACHING)
            metadata = importlib.import_module("kvtier_connector.vllm_adapter.worker").KVTierMetadata
            return idle_connector(NO_PREFIX_CACHING, lambda: metadata({}, {}, set()))(vllm_config, *args, **kwargs)

        @classmethod
        @override
        def build_prom_metrics(
            cls, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any
        ) -> Any:
            """Declare the metrics in the API server, where ours has its value already."""
            try:
                support = "unsupported"
                if not found.problem:
                    has_prefix_caching = vllm_config.cache_config.enable_prefix_caching
                    support = "supported" if has_prefix_caching else "no_prefix_caching"
                gauge = metric_types[prometheus_client.Gauge](
                    name=RELEASE_METRIC,
                    documentation=RELEASE_DOCUMENTATION,
                    labelnames=[*labelnames, *RELEASE_LABELS],
                    multiprocess_mode="mostrecent",
                )
                for values in per_engine_labelvalues.values():
                    gauge.labels(*values, found.version, support).set(1)
            except Exception:
                logger.exception("No %s: this vLLM declares metrics in another way", RELEASE_METRIC)
            return super().build_prom_metrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    return KVTierConnector


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
