# SPDX-License-Identifier: Apache-2.0
"""What vLLM loads by name: our connector where it fits, one without the tier elsewhere; log and metric say which."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import prometheus_client
import pytest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager

from kvtier_connector.contract.engine import SUPPORTED_VLLM
from kvtier_connector.vllm_adapter import connector, supported
from kvtier_connector.vllm_adapter.connector import choose, connector_without_tier
from kvtier_connector.vllm_adapter.offloading_connector import KVTierConnector

CONFIG = KVTransferConfig(
    kv_connector="KVTierConnector",
    kv_connector_module_path="kvtier_connector.vllm_adapter.connector",
    kv_role="kv_both",
)


def reported(connector: type[Any]) -> dict[tuple[str, ...], float]:
    """Return the labels of the metric that says how we get on with vLLM, with its value, as an API server shows it."""
    registry = prometheus_client.CollectorRegistry()

    class Gauge(prometheus_client.Gauge):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, registry=registry, **kwargs)

    kinds = {
        prometheus_client.Gauge: Gauge,
        prometheus_client.Counter: prometheus_client.Counter,
        prometheus_client.Histogram: prometheus_client.Histogram,
    }
    connector.build_prom_metrics(SimpleNamespace(kv_transfer_config=CONFIG), kinds, ["engine"], {0: ["0"]})
    return {
        tuple(sample.labels.values()): sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name == supported.RELEASE_METRIC
    }


def test_a_tested_vllm_gets_our_connector_and_nothing_is_said(caplog: pytest.LogCaptureFixture) -> None:
    assert issubclass(choose(), KVTierConnector)
    assert not caplog.records


def test_vllm_loads_what_was_chosen_and_constructs_it() -> None:
    loaded = KVConnectorFactory.get_connector_class(CONFIG)
    assert loaded is connector.KVTierConnector
    assert issubclass(loaded, KVTierConnector)


def test_another_release_that_looks_the_same_gets_our_connector_and_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("vllm.__version__", "0.99.0")
    assert issubclass(choose(), KVTierConnector)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "this is 0.99.0" in record.message
    assert all(release in record.message for release in SUPPORTED_VLLM)


def test_a_vllm_that_looks_different_inside_is_served_without_the_tier_and_the_log_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(SecondaryTierManager, "drain_jobs")
    chosen = choose()
    assert not issubclass(chosen, KVTierConnector)
    assert chosen.__mro__[2:] == connector_without_tier().__mro__[1:]
    (record,) = caplog.records
    assert record.levelname == "ERROR"
    assert "WITHOUT the shared volume" in record.message
    assert "base.SecondaryTierManager has no drain_jobs" in record.message


def test_a_vllm_that_our_connector_cannot_even_be_imported_with_is_served_without_the_tier(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "kvtier_connector.vllm_adapter.offloading_connector", None)
    assert not issubclass(choose(), KVTierConnector)
    assert "cannot be imported" in caplog.records[0].message


@pytest.mark.parametrize(("version", "standing"), [("0.32.1", "tested"), ("0.99.0", "untested"), ("0.99.0", "foreign")])
def test_the_metric_names_the_version_and_how_we_get_on(
    monkeypatch: pytest.MonkeyPatch, version: str, standing: str
) -> None:
    monkeypatch.setattr("vllm.__version__", version)
    if standing == "foreign":
        monkeypatch.delattr(SecondaryTierManager, "drain_jobs")
    monkeypatch.setattr(KVTierConnector, "build_prom_metrics", lambda *_: None)
    assert reported(choose()) == {("0", version, standing): 1.0}


def test_a_vllm_that_counts_otherwise_serves_without_the_metric(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(SecondaryTierManager, "drain_jobs")
    monkeypatch.delattr("vllm.distributed.kv_transfer.kv_connector.v1.metrics.KVConnectorPromMetrics")
    assert reported(choose()) == {}
    assert supported.RELEASE_METRIC in caplog.records[-1].message
