# SPDX-License-Identifier: Apache-2.0
"""What leaves a cluster in a report: no value that may be secret, no prompt, no tenant's name."""

from __future__ import annotations

import json

import pytest

from kvtier_cli import report

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
