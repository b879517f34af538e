# SPDX-License-Identifier: Apache-2.0
"""The documents of engines and janitors: each reads back as written; a wrong field is named with its remedy."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from kvtier_connector.contract import engine, janitor
from kvtier_connector.contract.errors import ConfigInvalid
from kvtier_connector.contract.usage import GenerationUsage, TenantUsage, Usage
from kvtier_connector.contract.usage import decode as decode_usage
from kvtier_connector.contract.usage import encode as encode_usage

TABLES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())

ENGINE_CONFIG = engine.ConnectorConfig(tier="ns/llama", root="/kv/0a1b", digest="0a1b", identity={})
JANITOR_CONFIG = janitor.JanitorConfig(tier="ns/llama", tier_dir="/var/lib/kvtier/ns.llama", current="0a1b")
ENGINE, JANITOR = engine.encode(ENGINE_CONFIG), janitor.encode(JANITOR_CONFIG)


def decode(document: str, change: dict[str, object]) -> object:
    """Read one of the two documents with some fields changed."""
    kind = engine if document == ENGINE else janitor
    return kind.decode(json.dumps({**json.loads(document), **change}))


def test_documents_read_back_as_they_were_written() -> None:
    assert engine.decode(ENGINE) == ENGINE_CONFIG
    config = replace(JANITOR_CONFIG, max_bytes=10, ttl_seconds=3600, quotas={"alice": 5})
    assert janitor.decode(janitor.encode(config)) == config
    assert janitor.encode(janitor.decode(janitor.encode(config))) == janitor.encode(config)


@pytest.mark.parametrize("text", ["tier: x", "[]", '{"version": 1}'])
def test_a_text_that_is_no_document_is_refused(text: str) -> None:
    for kind in (engine, janitor):
        with pytest.raises(ConfigInvalid, match=r"(connector|janitor)\.json: "):
            kind.decode(text)


@pytest.mark.parametrize(
    ("document", "name"),
    [
        *((ENGINE, each.name) for each in fields(engine.ConnectorConfig)),
        *((JANITOR, each.name) for each in fields(janitor.JanitorConfig)),
    ],
)
def test_a_field_of_another_type_is_named(document: str, name: str) -> None:
    with pytest.raises(ConfigInvalid, match=rf"^(connector|janitor)\.json: {name}=\[\] must be (a|an|true) "):
        decode(document, {name: []})


@pytest.mark.parametrize(("document", "change", "complaint"), TABLES["refused"])
def test_a_wrong_setting_is_named_with_its_remedy(document: str, change: dict[str, object], complaint: str) -> None:
    with pytest.raises(ConfigInvalid, match=complaint):
        decode({"engine": ENGINE, "janitor": JANITOR}[document], change)


@pytest.mark.parametrize("change", [{"refresh_seconds": 2}, {"direct_io": None}, {"identity": {"layers": [1, 2]}}])
def test_what_json_writes_in_another_way_is_read(change: dict[str, object]) -> None:
    (name,) = change
    assert getattr(decode(ENGINE, change), name) == change[name]


_ALWAYS_WRITTEN = {
    ENGINE: "attach_grace_seconds digest direct_io identity io_processes keys_dir live_file "
    "load_deadline_seconds min_reuse min_tokens refresh_seconds root state_dir tenant_from tier version",
    JANITOR: "current default_quota_bytes generation_idle_seconds high_watermark http_port identity "
    "journal_age_seconds keep_previous lease_name lease_namespace low_watermark max_bytes min_bytes min_free_bytes "
    "min_free_fraction partial_age_seconds quarantine_age_seconds quotas sweep_seconds threads tier tier_dir "
    "ttl_seconds verify_seconds version",
}


@pytest.mark.parametrize("document", _ALWAYS_WRITTEN, ids=["engine", "janitor"])
def test_a_field_that_came_later_is_written_only_where_it_says_something(document: str) -> None:
    """A pod of an earlier release refuses what it does not know: give a new field ``metadata=documents.ADDED``."""
    assert " ".join(json.loads(document)) == _ALWAYS_WRITTEN[document]


def test_what_a_later_field_says_is_written_and_read() -> None:
    said = replace(JANITOR_CONFIG, events_port=5557, layout=janitor.VLLM_FS_LAYOUT)
    written = json.loads(janitor.encode(said))
    assert written["events_port"] == 5557
    assert "block_tokens" not in written
    assert janitor.decode(json.dumps(written)) == said


SIZES = st.integers(min_value=0, max_value=2**62)
TIMES = st.floats(min_value=0, max_value=2**40)
USAGES = st.builds(
    Usage,
    tier=st.text(),
    is_active=st.booleans(),
    is_counted=st.booleans(),
    used_bytes=SIZES,
    blocks=SIZES,
    volume_bytes=SIZES,
    volume_free_bytes=SIZES,
    oldest=TIMES,
    store_pause=st.text(),
    generations=st.builds(
        GenerationUsage, digest=st.text(), used_bytes=SIZES, blocks=SIZES, created=TIMES, last_used=TIMES
    ).map(lambda one: (one,)),
    tenants=st.builds(TenantUsage, tenant=st.text(), used_bytes=SIZES).map(lambda one: (one, one)),
    problems=st.lists(st.text(), max_size=3).map(tuple),
)


@given(USAGES)
def test_a_document_is_read_back_as_it_was_written(usage: Usage) -> None:
    assert decode_usage(encode_usage(usage)) == usage


def test_fields_of_a_later_release_are_ignored_and_missing_ones_have_their_defaults() -> None:
    assert decode_usage('{"tier": "ns/llama", "mood": {"is": "good"}}') == Usage(tier="ns/llama")


@pytest.mark.parametrize(
    ("document", "says"),
    [
        ("x", "Expecting value"),
        ("[]", "must be a JSON object"),
        ({}, "tier"),
        ({"tier": 1}, "tier"),
        ({"tier": "t", "used_bytes": "1"}, "used_bytes"),
        ({"tier": "t", "used_bytes": -1}, "used_bytes"),
        ({"tier": "t", "used_bytes": True}, "used_bytes"),
        ({"tier": "t", "used_bytes": 1e300}, "used_bytes"),
        ({"tier": "t", "oldest": "yesterday"}, "oldest"),
        ({"tier": "t", "is_active": 1}, "is_active"),
        ({"tier": "t", "generations": {}}, "generations"),
        ({"tier": "t", "generations": [1]}, "GenerationUsage"),
        ({"tier": "t", "generations": [{}]}, "digest"),
        ({"tier": "t", "problems": [1]}, "problems"),
        ("[" * 100_000, "nested"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_nonsense_is_refused_by_name(document: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        decode_usage(document if isinstance(document, str) else json.dumps(document))


def test_a_document_never_holds_more_than_a_reader_takes() -> None:
    many = Usage(tier="t", problems=[f"problem {number}" for number in range(2000)])
    assert len(decode_usage(encode_usage(many)).problems) == 1000
