# SPDX-License-Identifier: Apache-2.0
"""What engines and janitors are given: a field of another type is named with what it must be."""

from __future__ import annotations

import json
from dataclasses import fields

import pytest

from kvtier_connector import contract, contract_janitor
from kvtier_connector.errors import ConfigInvalid

CONNECTOR = contract.encode(
    contract.ConnectorConfig(tier="ns/llama", root="/kv/0a1b", digest="0a1b", identity={}, max_bytes=0)
)
JANITOR = contract_janitor.encode(contract_janitor.JanitorConfig(tier="ns/llama", tier_dir="/kv", current="0a1b"))


@pytest.mark.parametrize("name", [each.name for each in fields(contract.ConnectorConfig)])
def test_a_connector_field_of_another_type_is_named(name: str) -> None:
    with pytest.raises(ConfigInvalid, match=rf"^connector\.json: {name}=\[\] must be (a|an|true) "):
        contract.decode(json.dumps({**json.loads(CONNECTOR), name: []}))


@pytest.mark.parametrize("name", [each.name for each in fields(contract_janitor.JanitorConfig)])
def test_a_janitor_field_of_another_type_is_named(name: str) -> None:
    with pytest.raises(ConfigInvalid, match=rf"^janitor\.json: {name}=\[\] must be (a|an|true) "):
        contract_janitor.decode(json.dumps({**json.loads(JANITOR), name: []}))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"io_threads": "16"}, "io_threads='16' must be a whole number"),
        ({"io_processes": True}, "io_processes=True must be a whole number, or null"),
        ({"direct_io": 1}, "direct_io=1 must be true or false, or null"),
        ({"tenant_quotas": {"alice": "1Gi"}}, "tenant_quotas=.* must be an object of whole numbers"),
        ({"refresh_seconds": "1s"}, "refresh_seconds='1s' must be a number"),
    ],
)
def test_a_value_of_another_type_is_told_from_one_out_of_range(change: dict[str, object], complaint: str) -> None:
    with pytest.raises(ConfigInvalid, match=complaint):
        contract.decode(json.dumps({**json.loads(CONNECTOR), **change}))


@pytest.mark.parametrize("change", [{"refresh_seconds": 2}, {"direct_io": None}, {"identity": {"layers": [1, 2]}}])
def test_what_json_writes_in_another_way_is_read(change: dict[str, object]) -> None:
    (name,) = change
    assert getattr(contract.decode(json.dumps({**json.loads(CONNECTOR), **change})), name) == change[name]
