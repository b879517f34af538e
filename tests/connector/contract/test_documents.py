# SPDX-License-Identifier: Apache-2.0
"""What engines and janitors are given: a field of another type is named with what it must be."""

from __future__ import annotations

import json
from dataclasses import fields, replace

import pytest

from kvtier_connector.contract import engine, janitor
from kvtier_connector.contract.errors import ConfigInvalid

CONNECTOR = engine.encode(engine.ConnectorConfig(tier="ns/llama", root="/kv/0a1b", digest="0a1b", identity={}))
JANITOR = janitor.encode(janitor.JanitorConfig(tier="ns/llama", tier_dir="/kv", current="0a1b"))


@pytest.mark.parametrize("name", [each.name for each in fields(engine.ConnectorConfig)])
def test_a_connector_field_of_another_type_is_named(name: str) -> None:
    with pytest.raises(ConfigInvalid, match=rf"^connector\.json: {name}=\[\] must be (a|an|true) "):
        engine.decode(json.dumps({**json.loads(CONNECTOR), name: []}))


@pytest.mark.parametrize("name", [each.name for each in fields(janitor.JanitorConfig)])
def test_a_janitor_field_of_another_type_is_named(name: str) -> None:
    with pytest.raises(ConfigInvalid, match=rf"^janitor\.json: {name}=\[\] must be (a|an|true) "):
        janitor.decode(json.dumps({**json.loads(JANITOR), name: []}))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"min_tokens": "16"}, "min_tokens='16' must be a whole number"),
        ({"io_processes": True}, "io_processes=True must be a whole number, or null"),
        ({"direct_io": 1}, "direct_io=1 must be true or false, or null"),
        ({"refresh_seconds": "1s"}, "refresh_seconds='1s' must be a number"),
    ],
)
def test_a_value_of_another_type_is_told_from_one_out_of_range(change: dict[str, object], complaint: str) -> None:
    with pytest.raises(ConfigInvalid, match=complaint):
        engine.decode(json.dumps({**json.loads(CONNECTOR), **change}))


@pytest.mark.parametrize("change", [{"refresh_seconds": 2}, {"direct_io": None}, {"identity": {"layers": [1, 2]}}])
def test_what_json_writes_in_another_way_is_read(change: dict[str, object]) -> None:
    (name,) = change
    assert getattr(engine.decode(json.dumps({**json.loads(CONNECTOR), **change})), name) == change[name]


_ALWAYS_WRITTEN = {
    CONNECTOR: "attach_grace_seconds cost_aware digest direct_io identity io_processes keys_dir live_file "
    "load_deadline_seconds min_reuse min_tokens refresh_seconds root state_dir tenant_from tier version",
    JANITOR: "current default_quota_bytes generation_idle_seconds high_watermark http_port identity "
    "journal_age_seconds keep_previous lease_name lease_namespace low_watermark max_bytes min_bytes min_free_bytes "
    "min_free_fraction partial_age_seconds quarantine_age_seconds quotas sweep_seconds threads tier tier_dir "
    "ttl_seconds verify_seconds version",
}
"""What pods of every release know."""


@pytest.mark.parametrize("document", _ALWAYS_WRITTEN, ids=["connector", "janitor"])
def test_a_field_that_came_later_is_written_only_where_it_says_something(document: str) -> None:
    """A pod of an earlier release refuses what it does not know: give a new field ``metadata=documents.ADDED``."""
    assert " ".join(json.loads(document)) == _ALWAYS_WRITTEN[document]


def test_what_a_later_field_says_is_written_and_read() -> None:
    base = janitor.decode(JANITOR)
    added = [each for each in fields(base) if each.metadata]
    assert {"events_port", "layout"} <= {each.name for each in added}
    said = replace(base, events_port=5557, layout=janitor.VLLM_FS_LAYOUT)
    written = json.loads(janitor.encode(said))
    assert written["events_port"] == 5557
    assert "block_tokens" not in written
    assert janitor.decode(json.dumps(written)) == said
