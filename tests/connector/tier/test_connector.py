# SPDX-License-Identifier: Apache-2.0
"""vLLM loads the connector where it is supported and one that changes nothing elsewhere; at the end it drains."""

from __future__ import annotations

import itertools
import os
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import prometheus_client
import pytest
import yaml
from engine_fleet import Engines
from engine_parts import prompt_of
from rig import TOKENS_PER_BLOCK, Rig, Rigs, key, keys, offloading_config, wait_until
from store_faults import GatedFs
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1, KVConnectorRole, supports_hma
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.utils.func_utils import supports_kw

from kvtier_connector.cascade import drain
from kvtier_connector.cascade.drain import Drain
from kvtier_connector.contract.engine import SUPPORTED_VLLM, vllm_release
from kvtier_connector.pod_tools.ready import why_not_decided
from kvtier_connector.vllm_adapter import connector, metrics, offloading_connector
from kvtier_connector.vllm_adapter.connector import choose, idle_connector
from kvtier_connector.vllm_adapter.fingerprint import Declared
from kvtier_connector.vllm_adapter.offloading_connector import KVTierConnector
from kvtier_connector.vllm_adapter.worker import KVTierMetadata, KVTierWorkerMetadata, WorkerQuestion

TABLES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())

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


@pytest.mark.parametrize(("version", "release"), TABLES["releases"])
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


def test_answers_of_several_workers_are_put_together_without_those_that_were_dropped() -> None:
    question = WorkerQuestion(1)
    dropped = question.ask()
    question.drop()
    assert question.take({0: (dropped, FIRST)}) is None
    question.ask()
    assert question.take({0: (dropped, FIRST)}) is None
    assert question.take({0: (question.number, SECOND)}) == [SECOND]
    one = KVTierWorkerMetadata(declared={0: (1, FIRST)})
    assert one.aggregate(KVTierWorkerMetadata(declared={1: (1, SECOND)})).declared == {0: (1, FIRST), 1: (1, SECOND)}


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


DRAINED = "vllm:kvtier_disk_drained_blocks"


def of_blocks(call: str, path: str) -> bool:
    return call == "pwritev" and ".kvb" in path


@pytest.fixture
def slow() -> GatedFs:
    """A volume on which no write of a block comes to an end until the gate opens."""
    return GatedFs(of_blocks)


def set_seconds(made: Drain, seconds: float) -> None:
    made.__dict__["_seconds"] = seconds


def order(rig: Rig, count: int = 20, groups: int = 1) -> None:
    """Have chunks stored whose stores begin with later steps."""
    context, wanted = rig.request("writer"), [key(number, group) for group in range(groups) for number in range(count)]
    rig.manager.complete_store(rig.manager.prepare_store(wanted, context).keys_to_store, context)


@pytest.mark.parametrize(
    ("tokens", "rows_and_groups", "begun"),
    [
        (2 * TOKENS_PER_BLOCK, (64, 1), [6, 6, 6, 2]),
        (2 * TOKENS_PER_BLOCK, (128, 2), [8, 8, 8, 8, 8]),
        (0, (64, 1), [20]),
        # More than half of the rows wait.
        (1, (32, 1), [20]),
    ],
)
def test_a_step_handles_as_many_chunks_of_stores_as_the_one_before_computes_and_a_few_more(
    rigs: Rigs, monkeypatch: pytest.MonkeyPatch, tokens: int, rows_and_groups: tuple[int, int], begun: list[int]
) -> None:
    rows, groups = rows_and_groups
    rig = rigs.make(chunks=rows, config=offloading_config(groups=offloading_config().groups * groups))
    workers, counted, left = rig.tier.attachment.workers, list[int](), [sum(begun)]
    submit = workers.submit
    monkeypatch.setattr(workers, "submit", lambda tasks: counted.append(len(tasks)) or submit(tasks))
    rig.tier.tokens_under_way = tokens
    order(rig, 20, groups)
    wait_until(lambda: rig.end_step() or left.append(rig.tier.transfers.storing) or left[-1] == 0, "all are written")
    assert counted == begun
    assert max(before - after for before, after in itertools.pairwise(left)) <= max(begun)
    assert rig.metric("vllm:kvtier_disk_written_blocks") == sum(begun)


@pytest.mark.parametrize("cause", [metrics.SHUTDOWN, metrics.INERT])
def test_chunks_whose_stores_have_not_begun_end_when_nothing_more_is_written(rigs: Rigs, cause: str) -> None:
    rig = rigs.make()
    rig.tier.tokens_under_way = TOKENS_PER_BLOCK
    order(rig)
    if cause == metrics.SHUTDOWN:
        set_seconds(rig.tier.drain, 0.0)
        rig.tier.drain.begin()
    else:
        rig.tier.transfers.withdraw(cause)
    rig.settle()
    written = rig.metric("vllm:kvtier_disk_written_blocks")
    assert rig.metric("vllm:kvtier_disk_shed_stores", cause) == 20 - written
    assert rig.primary.room == 64


def test_what_waits_to_be_written_is_written_before_the_engine_ends(rigs: Rigs, slow: GatedFs) -> None:
    rig = rigs.make(fs=slow)
    set_seconds(rig.tier.drain, 60.0)
    rig.finish(rig.begin_offload(keys(12)))
    wait_until(lambda: slow.waiting > 0, "the volume holds up writes")
    rig.tier.drain.begin()
    rig.end_step()
    assert rig.manager.has_pending_work(), "vLLM would end the engine with blocks in its hands"
    slow.open_gate()
    rig.settle()
    rig.close()
    assert (rig.tier.drain.written, rig.tier.drain.lost) == (12, 0)
    assert rig.metric(DRAINED, metrics.WRITTEN) == 12
    assert rigs.make().serve(keys(12)).hit_blocks == 12


def test_an_engine_gives_up_what_is_not_taken(rigs: Rigs, slow: GatedFs, caplog: pytest.LogCaptureFixture) -> None:
    rigs.write(keys(4, first=100))
    rig = rigs.make(fs=slow, min_reuse=1)
    rig.finish(rig.begin_offload(keys(12)))
    wait_until(lambda: slow.waiting > 0, "the volume holds up writes")
    set_seconds(rig.tier.drain, 0.05)
    rig.tier.drain.begin()
    rig.settle()
    # A second signal buys no time.
    rig.tier.drain.begin()
    rig.offload(keys(1, first=50), "late")
    assert rig.serve(keys(4, first=100)).hit_blocks == 4
    rig.close()
    slow.open_gate()
    assert (rig.tier.drain.written, rig.tier.drain.lost) == (0, 13)
    assert rig.metric(DRAINED, metrics.LOST) == 13
    assert rig.metric("vllm:kvtier_disk_shed_stores", metrics.SHUTDOWN) == 13
    assert "0 blocks written, 13 lost" in caplog.text


def test_what_was_not_written_before_is_offered_again_at_once(rigs: Rigs) -> None:
    fs = GatedFs(of_blocks)
    rig = rigs.make(fs=fs, chunks=64)
    set_seconds(rig.tier.drain, 60.0)
    # Half of the CPU tier waits: what comes then is not written.
    for number in range(4):
        rig.finish(rig.begin_offload(keys(12, first=12 * number), f"writer-{number}"))
    assert rig.metric("vllm:kvtier_disk_shed_stores", metrics.QUEUE_FULL) > 0
    rig.tier.drain.begin()
    fs.open_gate()
    rig.settle()
    assert rig.tier.drain.lost == 0
    rig.close()
    assert rigs.make().serve(keys(48)).hit_blocks == 48


def test_most_of_the_time_that_vllm_leaves_is_for_writing_and_enough_for_the_end() -> None:
    assert drain.seconds_to_write(60) == 48
    assert drain.seconds_to_write(10) == 5
    assert drain.seconds_to_write(0) == 0


@pytest.fixture
def heard() -> Iterator[list[int]]:
    found: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: found.append(number))
    yield found
    signal.signal(signal.SIGTERM, before)


def in_a_thread(function: Callable[[], None]) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(function).result()


def test_each_signal_reaches_vllm_and_the_first_one_alone_begins_the_drain(heard: list[int]) -> None:
    of_vllm = signal.getsignal(signal.SIGTERM)
    made = Drain(0.1, metrics.Stats(), name="ns/tier")
    made.watch()
    os.kill(os.getpid(), signal.SIGTERM)
    assert made.is_begun
    wait_until(lambda: made.is_over, "the time is over")
    os.kill(os.getpid(), signal.SIGTERM)
    assert made.is_over
    assert heard == [signal.SIGTERM] * 2
    made.close()
    assert signal.getsignal(signal.SIGTERM) is of_vllm


@pytest.mark.parametrize("is_watching", [True, False])
@pytest.mark.usefixtures("heard")
def test_signals_stay_as_vllm_has_them_where_it_listens_to_none_or_later_otherwise(*, is_watching: bool) -> None:
    made = Drain(60, metrics.Stats(), name="ns/tier")
    if is_watching:
        made.watch()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if is_watching:
        made.close()
    else:
        made.watch()
        in_a_thread(made.watch)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def lost_since(stats: metrics.Stats) -> float:
    taken = stats.take().data["data"].get(DRAINED, {})
    return sum(value for labels, value in taken.items() if metrics.LOST in labels)


def test_what_was_lost_and_is_written_after_all_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    stats = metrics.Stats()
    made = Drain(0, stats, name="ns/tier")
    made.begin()
    made.note(key(1), is_written=False)
    made.note(key(2), is_written=False)
    made.tell()
    assert lost_since(stats) == 2
    made.note(key(1), is_written=True)
    made.tell()
    assert lost_since(stats) == 0
    for number in range(3, 8):
        made.note(key(number), is_written=False)
        made.tell()
    assert lost_since(stats) == 4
    made.close()
    made.close()
    told = [each for each in caplog.messages if "drained in" in each]
    assert len(told) == 2
    assert "0 blocks written, 2 lost" in told[0]
    assert "1 blocks written, 6 lost" in told[1]


@pytest.mark.parametrize(("name", "layout"), [("LlamaForCausalLM", "BLHNC"), ("MiniMaxM3SparseForCausalLM", "LBHNC")])
def test_kv_lies_by_layer_where_a_kernel_of_vllm_expects_that(
    monkeypatch: pytest.MonkeyPatch, name: str, layout: str
) -> None:
    monkeypatch.setattr(offloading_connector.current_platform, "is_cpu", lambda: False)
    config = engine_config()
    config.model_config = SimpleNamespace(architectures=[name])
    config.attention_config = SimpleNamespace(hisparse_config=None)
    assert KVTierConnector.get_required_kvcache_layout(config) == layout
