# SPDX-License-Identifier: Apache-2.0
"""What ``kvtier status`` tells, problems first, and what a report leaves out: secrets, prompts, names of tenants."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from command import Command

from kvtier_cli import report, status
from kvtier_cli.client import Where
from kvtier_operator.observe import engine_view

TABLES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())

METRICS = TABLES["metrics"]


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


CONDITIONS = [condition(*each) for each in TABLES["conditions"]]


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
    assert "4 without a problem: -v shows them" in conditions
    assert steps.split() == ["EnginesReady:", "about", "EnginesReady", "DiskEffective:", "about", "DiskEffective"]
    everything = status.one(document(conditions=CONDITIONS), is_verbose=True)
    assert all(each["type"] in click.unstyle(everything) for each in CONDITIONS)
    for reason, text, color in TABLES["colors"]:
        assert click.style(text, fg=color) in next(line for line in everything.splitlines() if reason in line)


ENGINE = TABLES["engine"]
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
    for line in TABLES["lines"]:
        assert line in page
    assert "another thing" not in page
    assert kvtier.json("status", "--engine", "vllm-0")["volume"] == TABLES["volume"]


@pytest.mark.parametrize(("metrics", "words", "code"), TABLES["without_the_volume"])
def test_an_engine_without_the_volume_says_why(
    metrics: str, words: str, code: int, monkeypatch: pytest.MonkeyPatch, kvtier: Command
) -> None:
    monkeypatch.setattr(Where, "client", OneEngine(metrics))
    assert words in kvtier("status", "--engine", "vllm-0", code=code)


SECRETS = ("hunter2", "hf_abcdefghijkl", "sk-abcdefghijkl", "eyJhbGciOiJI.eyJzdWIiOiIx.sig", "once upon a time", "acme")


LEAKS = (*SECRETS, "s3cret", "pw1", "patient")


@pytest.mark.parametrize("line", TABLES["leaks"])
def test_a_line_leaves_out_what_may_be_a_secret_or_a_prompt(line: str) -> None:
    assert not any(leak in report.redact_line(line) for leak in LEAKS)
    held = {"metadata": {"annotations": {"said": line}}, "spec": {"args": ["sh", "-c", line]}}
    assert not any(leak in json.dumps(report.redact_manifest(held)) for leak in LEAKS)


@pytest.mark.parametrize("line", TABLES["kept"])
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
    assert not any(secret in json.dumps(found) for secret in SECRETS)
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


@pytest.mark.parametrize("next_record", TABLES["next_records"])
def test_what_follows_a_prompt_of_several_lines_stays(next_record: str) -> None:
    told = f"INFO 11-22 07:43:17 [a.py:1] prompt: once\nupon a time\n{next_record}\n"
    state = {"terminated": {"message": told}}
    last_words = report.redact_manifest({"status": {"containerStatuses": [{"name": "engine", "state": state}]}})
    message = last_words["status"]["containerStatuses"][0]["state"]["terminated"]["message"]
    for found in (report.redact_log(told, is_cut=False), message):
        assert "upon" not in found
        assert next_record in found


def test_records_of_json_stand_alone_and_the_rest_of_one_that_was_cut_off_is_left_out() -> None:
    found = report.redact_log('{"message": "a", "prompt": "once"}\n{"message": "wrote"}\n', is_cut=False)
    assert "once" not in found
    assert '{"message": "wrote"}' in found
    lines = "upon a time\nINFO 11-22 07:43:17 [a.py:1] ready\n"
    assert "upon" not in report.redact_log(lines, is_cut=True)
    assert report.redact_log(lines, is_cut=False) == lines
    assert report.redact_log("Traceback:\nKeyError: 'layers.0'\n", is_cut=True).startswith("Traceback")
