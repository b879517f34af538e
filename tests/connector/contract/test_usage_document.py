# SPDX-License-Identifier: Apache-2.0
"""What a janitor says about its volume is read back as it was written, and nonsense is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier_connector.contract.usage import GenerationUsage, TenantUsage, Usage, decode, encode

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
    assert decode(encode(usage)) == usage


def test_fields_of_a_later_release_are_ignored_and_missing_ones_have_their_defaults() -> None:
    assert decode('{"tier": "ns/llama", "mood": {"is": "good"}}') == Usage(tier="ns/llama")


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
        decode(document if isinstance(document, str) else json.dumps(document))


def test_a_document_never_holds_more_than_a_reader_takes() -> None:
    many = Usage(tier="t", problems=[f"problem {number}" for number in range(2000)])
    assert len(decode(encode(many)).problems) == 1000
