# SPDX-License-Identifier: Apache-2.0
"""The metrics of the tier as vLLM takes them."""

from __future__ import annotations

from collections import Counter

import pytest
from engine_fleet import Engines
from engine_parts import PAGE_BYTES, Shape
from prompts import PROMPT, finish, restart
from vllm.v1.kv_offload.base import OffloadingCounterMetadata, OffloadingGaugeMetadata

from kvtier_connector.vllm_adapter import metrics


def test_every_declared_metric_is_declared_as_vllm_wants_it() -> None:
    declared = metrics.definitions()
    assert len(declared) == len(metrics.METRICS)
    for metric in metrics.METRICS:
        kind = OffloadingGaugeMetadata if metric.is_gauge else OffloadingCounterMetadata
        assert isinstance(declared[metric.name], kind)
        assert declared[metric.name].labelnames == metric.labels
        assert metric.name.startswith("vllm:"), "vLLM unregisters only such names when an engine is built anew"


def test_an_undeclared_metric_cannot_be_observed() -> None:
    with pytest.raises(ValueError, match="declare it in METRICS"):
        metrics.Stats().count(metrics.Metric("vllm:kvtier_new", "New."))
    with pytest.raises(ValueError, match="with the labels"):
        metrics.Stats().count(metrics.MISSES)


def test_statistics_are_taken_once() -> None:
    stats = metrics.Stats()
    stats.count(metrics.MISSES, cause="absent")
    stats.count(metrics.MISSES, 2, cause="absent")
    stats.set(metrics.ACTIVE, 1)

    assert stats.take().reduce() == {f"{metrics.MISSES.name}:('absent',)": 3, metrics.ACTIVE.name: 1}
    assert stats.take().is_empty()


COPIES = {f"vllm:kv_offload_{way}_{what}" for way in ("load", "store") for what in ("bytes", "time")}


def test_vllm_counts_bytes_and_seconds_of_copies_by_direction(engines: Engines) -> None:
    for way, other in (("store", "load"), ("load", "store")):
        engine = restart(engines, Shape(log_stats=True))
        engine.ask(way, PROMPT)
        finish(engine)
        counted: Counter[str] = Counter()
        for told in engine.told:
            if told.scheduler_stats and (stats := told.scheduler_stats.kv_connector_stats):
                values = stats["data"].items()
                counted.update({name: of[()] for name, of in values if name in COPIES})
        assert counted[f"vllm:kv_offload_{way}_bytes"] >= 20 * PAGE_BYTES
        assert counted[f"vllm:kv_offload_{way}_time"] > 0
        assert f"vllm:kv_offload_{other}_bytes" not in counted
        engine.close()
