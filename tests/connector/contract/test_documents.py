# SPDX-License-Identifier: Apache-2.0
"""The documents of engines and janitors: each reads back as written; a wrong field is named with its remedy."""

from __future__ import annotations

import json
from dataclasses import fields, replace

import pytest

from kvtier_connector.contract import engine, janitor
from kvtier_connector.contract.errors import ConfigInvalid

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


@pytest.mark.parametrize(
    ("document", "change", "complaint"),
    [
        (ENGINE, {"min_tokens": "16"}, "min_tokens='16' must be a whole number"),
        (ENGINE, {"io_processes": True}, "io_processes=True must be a whole number, or null"),
        (ENGINE, {"direct_io": 1}, "direct_io=1 must be true or false, or null"),
        (ENGINE, {"refresh_seconds": "1s"}, "refresh_seconds='1s' must be a number"),
        (ENGINE, {"refresh_seconds": 0}, "refresh_seconds=0 must be more than 0"),
        (ENGINE, {"refresh_seconds": -1.0}, "refresh_seconds=-1.0 must be more than 0"),
        (ENGINE, {"min_tokens": -1}, "min_tokens=-1 must be 0"),
        (ENGINE, {"min_reuse": 0}, "min_reuse=0 must be between 1 and 100"),
        (ENGINE, {"min_reuse": 101}, "min_reuse=101 must be between"),
        (ENGINE, {"live_file": "live.json"}, "live_file='live.json' must be an absolute path"),
        (ENGINE, {"state_dir": "kvtier"}, "state_dir='kvtier' must be an absolute path"),
        (ENGINE, {"attach_grace_seconds": 0}, "attach_grace_seconds=0 must be more than 0"),
        (ENGINE, {"version": 2}, "run the connector image of the same release"),
        (ENGINE, {"colour": "blue"}, "unknown field 'colour'"),
        (ENGINE, {"root": "kv/0a1b"}, "root='kv/0a1b' must be an absolute path"),
        (ENGINE, {"digest": "0a1c"}, "digest='0a1c' must end root"),
        (ENGINE, {"io_processes": 0}, "io_processes=0 must be between"),
        (JANITOR, {"version": 2}, "run the janitor image of the same release"),
        (JANITOR, {"colour": "blue"}, "unknown field 'colour'"),
        (JANITOR, {"tier_dir": "kv"}, "tier_dir='kv' must be an absolute path"),
        (JANITOR, {"current": ""}, "current='' must be a generation digest"),
        (JANITOR, {"current": "../x"}, "current='../x' must be a generation digest"),
        (JANITOR, {"max_bytes": -1}, "max_bytes=-1 must be 0"),
        (JANITOR, {"high_watermark": 1.5}, "high_watermark=1.5 must be more than 0 and at most 1"),
        (JANITOR, {"low_watermark": 0.95}, "low_watermark=0.95 must be below high_watermark=0.9"),
        (JANITOR, {"min_free_fraction": 1}, "min_free_fraction=1 must be 0 or more and below 1"),
        (JANITOR, {"max_bytes": 5, "min_bytes": 6}, "min_bytes=6 must not exceed max_bytes=5"),
        (JANITOR, {"ttl_seconds": 0}, "ttl_seconds=0 must be more than 0; leave it out"),
        (JANITOR, {"keep_previous": -1}, "keep_previous=-1 must be 0 or more"),
        (JANITOR, {"quotas": {"alice": 0}}, "quotas=.* must all be more than 0"),
        (JANITOR, {"quotas": {"alice": "1Gi"}}, "quotas=.* must be an object of whole numbers"),
        (JANITOR, {"sweep_seconds": 0}, "sweep_seconds=0 must be more than 0"),
        (JANITOR, {"lease_name": "a"}, "lease_namespace='' must be set where lease_name is"),
        (JANITOR, {"http_port": 70000}, "http_port=70000 must be between"),
        (JANITOR, {"threads": 0}, "threads=0 must be between"),
    ],
)
def test_a_setting_that_cannot_be_used_is_named_with_its_remedy(
    document: str, change: dict[str, object], complaint: str
) -> None:
    with pytest.raises(ConfigInvalid, match=complaint):
        decode(document, change)


@pytest.mark.parametrize("change", [{"refresh_seconds": 2}, {"direct_io": None}, {"identity": {"layers": [1, 2]}}])
def test_what_json_writes_in_another_way_is_read(change: dict[str, object]) -> None:
    (name,) = change
    assert getattr(decode(ENGINE, change), name) == change[name]


def test_fields_that_need_a_new_process_exist() -> None:
    assert set(janitor.FIXED_FIELDS) <= {field.name for field in fields(janitor.JanitorConfig)}


_ALWAYS_WRITTEN = {
    ENGINE: "attach_grace_seconds digest direct_io identity io_processes keys_dir live_file "
    "load_deadline_seconds min_reuse min_tokens refresh_seconds root state_dir tenant_from tier version",
    JANITOR: "current default_quota_bytes generation_idle_seconds high_watermark http_port identity "
    "journal_age_seconds keep_previous lease_name lease_namespace low_watermark max_bytes min_bytes min_free_bytes "
    "min_free_fraction partial_age_seconds quarantine_age_seconds quotas sweep_seconds threads tier tier_dir "
    "ttl_seconds verify_seconds version",
}
"""What pods of every release know."""


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
