# SPDX-License-Identifier: Apache-2.0
"""``kvtier status``: hits by tier and the computing time that the volume saved; problems first."""

from __future__ import annotations

from typing import Any

import click
import pytest
from command import Command

from kvtier_cli import status
from kvtier_cli.client import Where
from kvtier_operator.observe import engine_view

METRICS = """
vllm:prompt_tokens_total{engine="0"} 100000
vllm:prompt_tokens_cached_by_source_total{engine="0",source="disk"} 72000
vllm:prompt_tokens_cached_by_source_total{engine="0",source="device"} 8000
vllm:kvtier_disk_compute_tokens_per_second{engine="0"} 20
vllm:kvtier_disk_load_tokens_per_second{engine="0"} 200
vllm:kvtier_disk_saved_seconds_total{engine="0",tenant="acme"} 2400
vllm:kvtier_disk_saved_seconds_total{engine="0",tenant=""} 1200
"""


def document(**changes: Any) -> dict[str, Any]:
    engine = {"pod": "a", "node": "n", "phase": "Running", "ready": True, "restarts": 0}
    return {
        "tier": "ns/llama",
        "model": "m",
        "mode": "ReadWrite",
        "wanted": 1,
        "engines": [{**engine, "started": "2026-11-22T02:00:00Z"}],
        "conditions": [],
        "sizing": None,
        "generations": [],
        "tiers": [{"name": "disk", "usedBytes": 73 << 30, "capacityBytes": 1 << 40}],
        "hits": engine_view.hits([METRICS]),
        **changes,
    }


def condition(kind: str, status: str, reason: str) -> dict[str, str]:
    return {"type": kind, "status": status, "reason": reason, "message": f"about {kind}"}


CONDITIONS = [
    condition("Ready", "False", "NotReady"),
    condition("VolumeBound", "True", "Bound"),
    condition("DiskHealthy", "Unknown", "NotApplicable"),
    condition("DiskEffective", "Unknown", "NoDiskHits"),
    condition("Stalled", "False", "Idle"),
    condition("EnginesReady", "False", "EngineCrashed"),
]


def test_tokens_from_the_volume_are_time_that_accelerators_did_not_spend() -> None:
    hits = engine_view.hits([METRICS])
    assert hits["bySource"] == {"disk": 72000, "device": 8000}
    assert hits["prefillSecondsNotSpent"] == 3600
    assert engine_view.hits([METRICS, METRICS])["prefillSecondsNotSpent"] == 7200
    assert engine_view.hits([]) == {}
    sizing = {"kvBytesPerToken": 14336, "kvFormula": "reported by the engine llama-engine-0"}
    page = status.one(document(sizing=sizing))
    assert "disk      72,000 tokens  72.0%" in page
    assert "computed  20,000 tokens  20.0%" in page
    assert "the disk saved 1.0 h of prefill" in page
    assert "KV    14 KiB" in page
    assert "for each token reported by the engine llama-engine-0" in page


def test_problems_come_first_and_conditions_without_one_are_only_counted() -> None:
    page = click.unstyle(status.one(document(conditions=CONDITIONS)))
    conditions, steps = page.partition("ENGINES")[0], page.partition("NEXT")[2]
    assert [line.split()[0] for line in conditions.splitlines()[3:6]] == ["Ready", "EnginesReady", "DiskEffective"]
    assert "3 without a problem: -v shows them" in conditions
    assert steps.split() == ["EnginesReady:", "about", "EnginesReady", "DiskEffective:", "about", "DiskEffective"]
    everything = status.one(document(conditions=CONDITIONS), is_verbose=True)
    assert all(each["type"] in click.unstyle(everything) for each in CONDITIONS)
    for reason, text, color in (
        ("EngineCrashed", "False", "red"),
        ("Idle", "False", "green"),
        ("Bound", "True", "green"),
    ):
        assert click.style(text, fg=color) in next(line for line in everything.splitlines() if reason in line)


ENGINE = """
vllm:kvtier_vllm_release{engine="0",version="0.33.0",support="supported"} 1.0
vllm:num_requests_running{engine="0"} 3.0
vllm:num_requests_waiting{engine="0"} 1.0
vllm:kv_cache_usage_perc{engine="0"} 0.41
vllm:kv_offload_cpu_cache_usage_perc{engine="0"} 0.625
vllm:kvtier_disk_active{engine="0"} 1.0
vllm:kvtier_disk_mode{engine="0"} 0.0
vllm:kvtier_disk_io_processes{engine="0"} 4.0
vllm:kvtier_disk_load_breaker{engine="0"} 1.0
vllm:kvtier_disk_read_blocks_total{engine="0"} 120.0
vllm:kvtier_disk_read_bytes_total{engine="0"} 2.147483648e+09
vllm:kvtier_disk_read_seconds_total{engine="0"} 2.0
vllm:kvtier_disk_written_blocks_total{engine="0"} 80.0
vllm:kvtier_disk_verdicts_total{engine="0",verdict="load"} 40.0
vllm:kvtier_disk_verdicts_total{engine="0",verdict="split"} 3.0
vllm:kvtier_disk_split_joins_total{engine="0"} 2.0
vllm:kvtier_disk_split_tokens_total{engine="0",cause="computed"} 900.0
vllm:kvtier_disk_queued_jobs{engine="0"} 2.0
vllm:kvtier_disk_queued_load_bytes{engine="0"} 1.2582912e+07
vllm:kvtier_disk_oldest_job_seconds{engine="0"} 0.2
vllm:kvtier_disk_misses_total{engine="0",cause="absent"} 7.0
vllm:kvtier_disk_misses_total{engine="0",cause="min_tokens"} 0.0
vllm:kvtier_disk_shed_stores_total{engine="0",cause="no_permit"} 5.0
vllm:kvtier_chunk_bytes{engine="0"} 1835008.0
vllm:kvtier_token_bytes{engine="0"} 14336.0
"""
CONFIG = '{"kv_connector_extra_config":{"secondary_tiers":[{"generation":"5a3dcba1ca2aa94d"}]}}'


class OneEngine:
    """A cluster with one attached engine that serves on a port of its own."""

    namespace = "ns"

    def __init__(self, metrics: str) -> None:
        self.metrics = metrics

    def ask(self, path: str, _what: str) -> dict[str, Any]:
        assert path == "/api/v1/namespaces/ns/pods/vllm-0"
        metadata = {"labels": {"kvtier.dev/tier": "llama"}, "annotations": {"kvtier.dev/port": "8080"}}
        engine = {"name": "main", "image": "vllm/vllm-openai", "args": [f"--kv-transfer-config={CONFIG}"]}
        return {"metadata": metadata, "spec": {"containers": [{"name": "proxy", "image": "istio"}, engine]}}

    def fetch(self, _pod: dict[str, Any], port: int, path: str, container: str) -> str:
        assert (port, path, container) == (8080, "/metrics", "main")
        return self.metrics

    def log(self, _pod: dict[str, Any], container: str, *, lines: int) -> str:
        assert container == "main"
        assert lines
        return "INFO kvtier up\nWARNING kvtier ns/llama: the volume hangs\nWARNING another thing\n"


def test_a_look_into_an_engine_says_what_it_is_doing(monkeypatch: pytest.MonkeyPatch, kvtier: Command) -> None:
    monkeypatch.setattr(Where, "client", OneEngine(METRICS + ENGINE))
    page = kvtier("status", "--engine", "vllm-0")
    for line in (
        "ns/vllm-0  tier llama",
        "generation  5a3dcba1ca2aa94d",
        "vLLM        0.33.0 supported",
        "volume      used, mode ReadWrite, 4 processes, loads are on trial",
        "requests    3 running, 1 waiting, 0 of them for room to be loaded",
        "GPU         41% of its KV in use",
        "CPU tier    62% of its KV in use",
        "blocks      120 read, 80 written, 0 were there already; one has 1.75 MiB, a token 14 KiB",
        "prompts     100,000 tokens: 8.0% GPU, 0.0% CPU, 72.0% disk, 20.0% computed",
        "hits        40 load, 3 split",
        "splits      2 met their tail; tokens 900 computed",
        "queue       2 jobs: 12 MiB to load, 0 B to store; the oldest waits 0.2 s",
        "measured    reading 1 GiB/s in a process, loading 200 tokens/s, computing 20 tokens/s",
        "not loaded  7 absent (blocks, by cause)",
        "not stored  5 no_permit (blocks, by cause)",
        "WARNING kvtier ns/llama: the volume hangs",
    ):
        assert line in page
    assert "another thing" not in page
    found = kvtier.json("status", "--engine", "vllm-0")
    assert found["volume"] == {
        "isUsed": True,
        "isKnown": True,
        "isCompared": False,
        "mode": "ReadWrite",
        "refused": [],
        "isKeyMissing": False,
        "processes": 4,
        "stuckProcesses": 0,
        "loads": "on trial",
        "stores": "let through",
    }


@pytest.mark.parametrize(
    ("metrics", "words", "code"),
    [
        ("", "this engine reports none", 0),
        ("vllm:kvtier_chunk_bytes NaN\nvllm:prompt_tokens_cached_by_source_total 3.0", "this engine reports none", 0),
        ("vllm:kvtier_disk_active 0.0\nvllm:kvtier_disk_mode 3.0", "not used, mode unknown: see its log", 1),
        ("vllm:kvtier_disk_active 0.0", "not used, mode ReadWrite: see its log", 1),
        ("vllm:kvtier_disk_active 0.0\nvllm:kvtier_disk_release 1.0", "compares the blocks of another release", 0),
        ('vllm:kvtier_disk_active 0.0\nvllm:kvtier_disk_mode{engine="0"} 2.0', "not used, mode Bypass", 0),
        ('vllm:kvtier_disk_refused{field="dtype"} 1.0', "the directory has another dtype", 1),
    ],
)
def test_an_engine_without_the_volume_says_why(
    metrics: str, words: str, code: int, monkeypatch: pytest.MonkeyPatch, kvtier: Command
) -> None:
    monkeypatch.setattr(Where, "client", OneEngine(metrics))
    assert words in kvtier("status", "--engine", "vllm-0", code=code)
