# SPDX-License-Identifier: Apache-2.0
"""The janitor's document: it reads back as written, and what cannot be used is refused by field with a remedy."""

from __future__ import annotations

import json
from dataclasses import fields, replace

import pytest

from kvtier_connector.contract.errors import ConfigInvalid
from kvtier_connector.contract.janitor import FIXED_FIELDS, JanitorConfig, decode, encode

CONFIG = JanitorConfig(tier="ns/llama", tier_dir="/var/lib/kvtier/ns.llama", current="0a1b")


def test_a_document_reads_back_as_it_was_written() -> None:
    config = replace(CONFIG, max_bytes=10, ttl_seconds=3600, quotas={"alice": 5})
    assert decode(encode(config)) == config
    assert encode(decode(encode(config))) == encode(config)


def test_fields_that_need_a_new_process_exist() -> None:
    assert set(FIXED_FIELDS) <= {field.name for field in fields(JanitorConfig)}


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"version": 2}, "run the janitor image of the same release"),
        ({"colour": "blue"}, "unknown field 'colour'"),
        ({"tier_dir": "kv"}, "tier_dir='kv' must be an absolute path"),
        ({"current": ""}, "current='' must be a generation digest"),
        ({"current": "../x"}, "current='../x' must be a generation digest"),
        ({"max_bytes": -1}, "max_bytes=-1 must be 0"),
        ({"max_bytes": "90Gi"}, "max_bytes='90Gi' must be a whole number"),
        ({"max_bytes": True}, "max_bytes=True must be a whole number"),
        ({"high_watermark": 1.5}, "high_watermark=1.5 must be more than 0 and at most 1"),
        ({"low_watermark": 0.95}, "low_watermark=0.95 must be below high_watermark=0.9"),
        ({"min_free_fraction": 1}, "min_free_fraction=1 must be 0 or more and below 1"),
        ({"max_bytes": 5, "min_bytes": 6}, "min_bytes=6 must not exceed max_bytes=5"),
        ({"ttl_seconds": 0}, "ttl_seconds=0 must be more than 0; leave it out"),
        ({"keep_previous": -1}, "keep_previous=-1 must be 0 or more"),
        ({"quotas": {"alice": 0}}, "quotas=.* must all be more than 0"),
        ({"quotas": {"alice": "1Gi"}}, "quotas=.* must be an object of whole numbers"),
        ({"sweep_seconds": 0}, "sweep_seconds=0 must be more than 0"),
        ({"lease_name": "a"}, "lease_namespace='' must be set where lease_name is"),
        ({"http_port": 70000}, "http_port=70000 must be between"),
        ({"threads": 0}, "threads=0 must be between"),
    ],
)
def test_a_setting_that_cannot_be_used_is_named_with_its_remedy(change: dict[str, object], complaint: str) -> None:
    document = {**json.loads(encode(CONFIG)), **change}
    with pytest.raises(ConfigInvalid, match=complaint):
        decode(json.dumps(document))


@pytest.mark.parametrize("text", ["tier: x", "[]", '{"version": 1}'])
def test_a_text_that_is_no_document_is_refused(text: str) -> None:
    with pytest.raises(ConfigInvalid, match=r"janitor\.json: "):
        decode(text)
