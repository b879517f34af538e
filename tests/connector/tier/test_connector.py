# SPDX-License-Identifier: Apache-2.0
"""vLLM loads the connector where it is supported, and elsewhere one that changes nothing; log and metric say which."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import prometheus_client
import pytest
from engine_fleet import Engines
from engine_parts import prompt_of
from rig import Rigs
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1, KVConnectorRole, supports_hma
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.utils.func_utils import supports_kw

from kvtier_connector.contract.engine import SUPPORTED_VLLM, vllm_release
from kvtier_connector.pod_tools.ready import why_not_decided
from kvtier_connector.vllm_adapter import connector
from kvtier_connector.vllm_adapter.connector import choose, idle_connector
from kvtier_connector.vllm_adapter.fingerprint import Declared
from kvtier_connector.vllm_adapter.offloading_connector import KVTierConnector
from kvtier_connector.vllm_adapter.worker import KVTierMetadata, KVTierWorkerMetadata, WorkerQuestion

MODULE = "kvtier_connector.vllm_adapter.connector"
CONFIG = KVTransferConfig(kv_connector="KVTierConnector", kv_connector_module_path=MODULE, kv_role="kv_both")


def engine_config(*, prefix_caching: bool = True, config_file: str = "") -> Any:
    """Return the part of vLLM's configuration that the choice depends on."""
    transfer = CONFIG
    if config_file:
        transfer = replace(CONFIG, kv_connector_extra_config={"secondary_tiers": [{"config_file": config_file}]})
    return SimpleNamespace(
        kv_transfer_config=transfer, cache_config=SimpleNamespace(enable_prefix_caching=prefix_caching)
    )


def reported(chosen: type[Any], config: Any = None) -> dict[tuple[str, ...], float]:
    """Return the labels and the value of the release metric, as an API server shows it."""
    registry = prometheus_client.CollectorRegistry()

    class Gauge(prometheus_client.Gauge):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, registry=registry, **kwargs)

    kinds = {
        prometheus_client.Gauge: Gauge,
        prometheus_client.Counter: prometheus_client.Counter,
        prometheus_client.Histogram: prometheus_client.Histogram,
    }
    chosen.build_prom_metrics(config or engine_config(), kinds, ["engine"], {0: ["0"]})
    return {
        tuple(sample.labels.values()): sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name == connector.RELEASE_METRIC
    }


@pytest.mark.parametrize(
    ("version", "release"),
    [
        ("0.33.0", "0.33.0"),
        ("v0.33.1", "0.33.1"),
        ("v0.33.0-x86_64", "0.33.0"),
        ("0.33.0+cpu", "0.33.0"),
        ("0.33.0rc1+cpu", "0.33.0rc1"),
        ("0.33.1.dev7+g0123abc", "0.33.1.dev7"),
        ("0.33", None),
        ("latest", None),
        ("nightly-0.33.0", None),
        ("", None),
    ],
)
def test_a_version_or_the_tag_of_an_image_names_its_release(version: str, release: str | None) -> None:
    assert vllm_release(version) == release


@pytest.mark.parametrize("release", SUPPORTED_VLLM)
def test_a_supported_release_gets_the_connector_whatever_its_build(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, release: str
) -> None:
    monkeypatch.setattr("vllm.__version__", f"{release}+cu130")
    assert issubclass(choose(), KVTierConnector)
    assert not caplog.records
    monkeypatch.setattr(KVTierConnector, "build_prom_metrics", lambda *_: None)
    assert reported(choose()) == {("0", f"{release}+cu130", "supported"): 1.0}


@pytest.mark.parametrize("version", ["0.32.1", "0.33.0rc1", "0.34.0", "dev"])
def test_another_release_serves_without_kvtier_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, version: str
) -> None:
    monkeypatch.setattr("vllm.__version__", version)
    chosen = choose()
    assert not issubclass(chosen, KVTierConnector)
    (record,) = caplog.records
    assert record.levelname == "ERROR"
    assert f"kvtier supports vLLM {' and '.join(SUPPORTED_VLLM)}, and this is {version}" in record.message
    assert reported(chosen) == {("0", version, "unsupported"): 1.0}


def test_a_build_that_cannot_import_the_connector_serves_without_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, connector.CONNECTOR_MODULE, None)
    assert not issubclass(choose(), KVTierConnector)
    assert "cannot be imported" in caplog.records[0].message


def test_a_vllm_that_declares_metrics_otherwise_serves_without_the_metric(caplog: pytest.LogCaptureFixture) -> None:
    assert idle_connector("another release").build_prom_metrics(None, {}, [], {}) is None
    chosen = connector._reporting(idle_connector("another release"), connector.Support("1", "another"))
    assert chosen.build_prom_metrics(None, {}, [], {}) is None
    assert connector.RELEASE_METRIC in caplog.records[-1].message


def test_vllm_loads_the_chosen_class_by_name() -> None:
    loaded = KVConnectorFactory.get_connector_class(CONFIG)
    assert loaded is connector.KVTierConnector
    assert issubclass(loaded, KVTierConnector)


def test_an_engine_without_prefix_caching_serves_without_kvtier_and_tells_its_startup_probe(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path, rigs: Rigs
) -> None:
    # vLLM switches it off for models whose attention cannot go on from a cached prefix, as MLA on the CPU build.
    file = rigs.config_file(state_dir=str(tmp_path / "s"))
    config = engine_config(prefix_caching=False, config_file=str(file))
    chosen = choose()
    made = chosen(config, KVConnectorRole.SCHEDULER, None)
    assert not isinstance(made, KVTierConnector)
    assert isinstance(made.build_connector_meta("output"), KVTierMetadata), "its worker may have found it on"
    assert why_not_decided(tmp_path / "s") == ""
    assert "MLA on the CPU build" in caplog.text
    monkeypatch.setattr(KVTierConnector, "build_prom_metrics", lambda *_: None)
    ((labels, value),) = reported(chosen, config).items()
    assert (labels[-1], value) == ("no_prefix_caching", 1.0)


def make_idle(role: KVConnectorRole = KVConnectorRole.SCHEDULER) -> Any:
    return idle_connector("another release")(engine_config(), role, None)


def test_an_idle_connector_looks_nothing_up_and_holds_no_block() -> None:
    idle = make_idle()
    assert isinstance(idle, KVConnectorBase_V1)
    # vLLM takes it for models with several groups, too.
    assert supports_hma(type(idle))
    assert supports_kw(type(idle), "kv_cache_config")
    assert idle.get_num_new_matched_tokens("request", 0) == (0, False)
    assert isinstance(idle.build_connector_meta("output"), KVConnectorMetadata)
    assert idle.request_finished("request", [1]) == (False, None)
    assert idle.request_finished_all_groups("request", ([1],)) == (False, None)
    assert not idle.requires_kv_delivery
    assert not idle.has_pending_push_work()
    assert not idle.reset_cache()
    assert list(idle.take_events()) == []


def test_an_idle_worker_takes_every_call_of_a_step() -> None:
    idle = make_idle(KVConnectorRole.WORKER)
    idle.register_kv_caches({})
    idle.handle_preemptions(KVConnectorMetadata())
    idle.bind_connector_metadata(KVConnectorMetadata())
    idle.start_load_kv("context", request_ids=[])
    idle.wait_for_layer_load("layer")
    idle.save_kv_layer("layer", None, None)
    idle.wait_for_save()
    results = idle.get_transfer_results(set())
    idle.clear_connector_metadata()
    assert not results.finished_sending
    assert not results.finished_recving
    assert not idle.get_block_ids_with_load_errors()


def test_an_idle_connector_implements_abstract_methods_of_a_later_release(monkeypatch: pytest.MonkeyPatch) -> None:
    def warm_up(self: object, blocks: int) -> int: ...

    warm_up.__isabstractmethod__ = True  # type: ignore[attr-defined]  # as the decorator does
    monkeypatch.setattr(KVConnectorBase_V1, "warm_up", warm_up, raising=False)
    abstract = KVConnectorBase_V1.__abstractmethods__ | {"warm_up"}
    monkeypatch.setattr(KVConnectorBase_V1, "__abstractmethods__", abstract)
    assert make_idle().warm_up(3) is None


FIRST = Declared(("attention",), "one", "weights of the first")
SECOND = Declared(("attention",), "one", "weights of the second")


def test_workers_are_asked_with_the_steps_until_each_has_answered_and_in_the_order_of_their_ranks() -> None:
    question = WorkerQuestion(2)
    asked = question.ask()
    assert asked
    assert question.take({}) is None
    assert question.take({1: (asked, SECOND)}) is None
    assert question.number == asked
    assert question.take({0: (asked, FIRST)}) == [FIRST, SECOND]
    assert not question.number
    assert question.take({0: (asked, FIRST), 1: (asked, SECOND)}) is None


def test_answers_to_a_question_that_was_dropped_count_for_nothing() -> None:
    question = WorkerQuestion(1)
    dropped = question.ask()
    question.drop()
    assert question.take({0: (dropped, FIRST)}) is None
    question.ask()
    assert question.take({0: (dropped, FIRST)}) is None
    assert question.take({0: (question.number, SECOND)}) == [SECOND]


def test_the_answers_of_several_workers_are_put_together() -> None:
    one = KVTierWorkerMetadata(declared={0: (1, FIRST)})
    both = one.aggregate(KVTierWorkerMetadata(declared={1: (1, SECOND)}))
    assert both.declared == {0: (1, FIRST), 1: (1, SECOND)}


def test_an_engine_whose_declaration_is_not_passed_on_shares_the_volume_with_others(engines: Engines) -> None:
    prompt = prompt_of(12, seed=1)
    alone = engines.make()
    alone.ask("stores", prompt)
    alone.run()
    assert engines.count()
    child = engines.make(is_child=True)
    # Nothing is known of the volume before a step has asked the worker.
    assert child.ask("asks the worker", prompt_of(3, seed=2)) == len(prompt_of(3, seed=2))
    child.run()
    child.wait_until_attached()
    assert child.ask("reads", prompt) < len(prompt)
    another = prompt_of(12, seed=3)
    child.ask("stores", another)
    child.run()
    assert engines.assert_volume_holds(child, another)
    third = engines.make()
    third.wait_until_attached()
    assert third.ask("reads", another) < len(another)


def test_weights_replaced_before_the_worker_was_asked_are_told_from_the_first(engines: Engines) -> None:
    prompt = prompt_of(12, seed=1)
    child = engines.make(is_child=True)
    child.update_weights(7)
    # As while the first request waits for another child.
    child.step()
    child.ask("asks of the weights", prompt_of(3, seed=2))
    child.ask("stores", prompt)
    child.run()
    assert child.metric("vllm:kvtier_disk_active") == 0
    assert engines.count() == 0, "blocks of other weights have no name"
