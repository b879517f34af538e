# SPDX-License-Identifier: Apache-2.0
"""What ``kvtier status`` tells, problems first, and what a report leaves out: secrets, prompts, names of tenants."""

from __future__ import annotations

import json
from typing import Any

import click
import pytest
from command import Command

from kvtier_cli import report, status
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


SECRETS = ("hunter2", "hf_abcdefghijkl", "sk-abcdefghijkl", "eyJhbGciOiJI.eyJzdWIiOiIx.sig", "once upon a time", "acme")


LEAKS = (*SECRETS, "s3cret", "pw1", "patient")


@pytest.mark.parametrize(
    "line",
    [
        "using token hf_abcdefghijkl for the hub",
        "api_key: sk-abcdefghijkl",
        "Authorization: Bearer eyJhbGciOiJI.eyJzdWIiOiIx.sig",
        "fetching https://user:hunter2@example.org/x",
        "password=hunter2",
        "Received request cmpl-1: prompt: 'once upon a time'",
        '{"prompt": "once upon a time"}',
        'kvtier_janitor_tenant_used_bytes{tenant="acme"} 5',
        "/var/lib/kvtier/a/tenants/acme/blocks/000/00/x.kvb: No such file",
        "export VLLM_API_KEY=s3cret; export AWS_SECRET_ACCESS_KEY=s3cret",
        "MY_KEY=s3cret vllm serve",
        '{"api_key": "s3cret","token":"abc"}',
        r'"{\"api_key\": \"s3cret and more s3cret\"}"',
        'args: [sh, -c, "vllm serve m --api-key s3cret"]',
        "argv: ['--api-key', 's3cret']",
        "non-default args: {'api_key': ['s3cret', 'abc'], 'port': 8000}",
        "Namespace(ssl_keyfile_password='pw1')",
        "password: 'one s3cret of two words'",
        "Authorization: Token s3cret",
        "Cookie: a=1; session=s3cret",
        "https://s3cret@example.org/m",
        "Generated response chatcmpl-1: output: 'the patient is ill', output_token_ids: None",
        'Request chatcmpl-1 JSON body: {"input": "the patient is ill"}',
        '{"input": ["the patient is ill"]}',
        r'"{\"messages\": [{\"content\": \"the patient\"}]}"',
        "validation error [type=string_type, input_value='the patient is ill', input_type=str]",
        "api_key=s3cret prompt: 'the patient is ill'",
        "token=prompt:'of the patient'",
    ],
)
def test_a_line_leaves_out_what_may_be_a_secret_or_a_prompt(line: str) -> None:
    assert not any(leak in report.redact_line(line) for leak in LEAKS)
    held = {"metadata": {"annotations": {"said": line}}, "spec": {"args": ["sh", "-c", line]}}
    assert not any(leak in json.dumps(report.redact_manifest(held)) for leak in LEAKS)


@pytest.mark.parametrize(
    "line",
    [
        'vllm:prompt_tokens_total{engine="0"} 5.0',
        'vllm:kvtier_disk_misses_total{cause="key_missing"} 5.0',
        "tokenizer='Qwen/Qwen3-8B', max_num_batched_tokens=8192, tokenizer_mode=auto",
        "Avg prompt throughput: 5.0 tokens/s, Avg generation throughput: 3.0 tokens/s",
        "KeyError: 'layers.0'",
        "INFO 11-22 engine.py:1 ready in 5 s",
        "kvtier_disk_active 1.0",
        "",
    ],
)
def test_a_line_that_only_looks_like_one_stays(line: str) -> None:
    assert report.redact_line(line) == line


def test_variables_flags_and_documents_of_a_manifest_lose_what_may_be_secret() -> None:
    env = [{"name": "MY_THING", "value": "hunter2"}, {"name": "VLLM_LOGGING_LEVEL", "value": "DEBUG"}]
    found = report.redact_manifest(
        {
            "metadata": {"annotations": {"rendered": json.dumps({"env": env, "args": ["--api-key", "hunter2"]})}},
            "spec": {"env": [*env, {"name": "VLLM_API_KEY", "value": "hunter2"}], "args": ["--api-key=hunter2", "-v"]},
            "data": {"janitor.json": json.dumps({"quotas": {"acme": 5}, "max_bytes": 7})},
        }
    )
    text = json.dumps(found)
    assert not any(secret in text for secret in SECRETS)
    assert found["spec"]["env"][1] == {"name": "VLLM_LOGGING_LEVEL", "value": "DEBUG"}
    assert found["spec"]["args"][1] == "-v"
    assert json.loads(found["data"]["janitor.json"])["max_bytes"] == 7


def test_a_tenant_has_the_same_mark_everywhere() -> None:
    mark = report.tenant_mark("acme")
    assert report.redact_manifest({"tenants": [{"tenant": "acme", "blocks": 1}]})["tenants"][0]["tenant"] == mark
    assert mark in report.redact_line('x{tenant="acme"} 1')
    assert report.tenant_mark("other") != mark


VLLM = "(APIServer pid=1) INFO 11-22 07:43:17 [logger.py:47] "


@pytest.mark.parametrize("repeated", ["", VLLM, "  "])
def test_a_prompt_of_several_lines_goes_with_its_record(repeated: str) -> None:
    told = [
        f"{VLLM}Received request cmpl-1: prompt: 'once upon",
        f"{repeated}a time hunter2",
        f"{repeated}",
        f"{repeated}and so acme'",
    ]
    after = "(APIServer pid=1) INFO 11-22 07:43:18 [engine.py:1] Added request"
    kept = report.redact_log("\n".join([f"{VLLM}starting", *told, after]), is_cut=False).splitlines()
    assert kept[0] == f"{VLLM}starting"
    assert not any(word in "\n".join(kept) for word in ("once", "hunter2", "acme"))
    assert kept[-1] == after


@pytest.mark.parametrize(
    "next_record",
    [
        "INFO 11-22 07:43:18 [engine.py:1] Added request",
        'INFO:     10.0.0.1:1 - "POST /v1/completions HTTP/1.1" 200 OK',
        "[2026-11-22 07:43:18,001] kvtier_operator [INFO    ] wrote",
        "2026-11-22T07:43:18.001Z wrote",
    ],
)
def test_what_follows_a_prompt_of_several_lines_stays(next_record: str) -> None:
    told = f"INFO 11-22 07:43:17 [a.py:1] prompt: once\nupon a time\n{next_record}\n"
    state = {"terminated": {"message": told}}
    last_words = report.redact_manifest({"status": {"containerStatuses": [{"name": "engine", "state": state}]}})
    message = last_words["status"]["containerStatuses"][0]["state"]["terminated"]["message"]
    for found in (report.redact_log(told, is_cut=False), message):
        assert "upon" not in found
        assert next_record in found


def test_records_of_json_are_each_by_themselves() -> None:
    found = report.redact_log('{"message": "a", "prompt": "once"}\n{"message": "wrote"}\n', is_cut=False)
    assert "once" not in found
    assert '{"message": "wrote"}' in found


def test_the_rest_of_a_record_whose_beginning_was_cut_off_is_left_out() -> None:
    lines = "upon a time\nINFO 11-22 07:43:17 [a.py:1] ready\n"
    assert "upon" not in report.redact_log(lines, is_cut=True)
    assert report.redact_log(lines, is_cut=False) == lines
    assert report.redact_log("Traceback:\nKeyError: 'layers.0'\n", is_cut=True).startswith("Traceback")
