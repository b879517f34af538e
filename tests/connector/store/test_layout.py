# SPDX-License-Identifier: Apache-2.0
"""Keys and paths, both ways."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier_connector.contract.engine import TENANT_PATTERN
from kvtier_connector.store.layout import (
    MAX_GROUP,
    BlockKey,
    block_path,
    is_partial,
    is_quarantined,
    parse_block_path,
    partial_path,
    quarantine_path,
)

tenants = st.just("") | st.from_regex(TENANT_PATTERN, fullmatch=True)
keys = st.builds(BlockKey, st.binary(min_size=3, max_size=32), st.integers(0, MAX_GROUP), tenants)
TOKEN = "0123456789abcdef" * 2


@given(keys)
def test_a_path_gives_the_key_back(key: BlockKey) -> None:
    assert parse_block_path(block_path(key)) == key


@given(keys, keys)
def test_different_blocks_have_different_paths(one: BlockKey, other: BlockKey) -> None:
    assert (block_path(one) == block_path(other)) == (one == other)


@given(st.text() | st.from_regex(r"blocks/[0-9a-f]{3}/[0-9a-f]{3,9}_g[0-9]{1,11}\.kvb\n?"))
def test_only_paths_that_are_made_are_understood(path: str) -> None:
    key = parse_block_path(path)
    assert key is None or block_path(key) == path


def test_a_path_is_as_documented() -> None:
    key = BlockKey(bytes.fromhex("abcdef0123456789"), 12)
    assert block_path(key) == "blocks/abc/abcdef0123456789_g12.kvb"
    assert block_path(key._replace(tenant="acme")) == "tenants/acme/blocks/abc/abcdef0123456789_g12.kvb"
    moved = quarantine_path(key._replace(tenant="acme"), "checksum", TOKEN)
    assert moved == f"tenants/acme/quarantine/abcdef0123456789_g12.kvb.checksum.{TOKEN}"


@pytest.mark.parametrize(
    "path",
    [
        "blocks/abc/abcdef0123456789_g12.kvb.old",
        "blocks/abc/df/abcdef0123456789_g12.kvb",
        "blocks/abd/de/abcdef0123456789_g12.kvb",
        "blocks/abc/abcdef012345678_g12.kvb",
        "blocks/abc/de/ABCDEF0123456789_g12.kvb",
        "blocks/abc/abcdef0123456789_g012.kvb",
        "blocks/abc/abcdef0123456789_g4294967296.kvb",
        "blocks/abc/abcdef0123456789_g-1.kvb",
        "blocks/abc/abcdef0123456789_g12.kvb\n",
        "blocks/abc/abcdef0123456789_g\u0661.kvb",
        "blocks/abc/de/" + "abcde" + "0" * 61 + "_g0.kvb",
        "abc/de/abcdef0123456789_g12.kvb",
        "tenants//blocks/abc/de/abcdef0123456789_g12.kvb",
        "tenants/../blocks/abc/de/abcdef0123456789_g12.kvb",
        "tenants/A/blocks/abc/de/abcdef0123456789_g12.kvb",
        "tenants/a/b/blocks/abc/de/abcdef0123456789_g12.kvb",
        "/blocks/abc/de/abcdef0123456789_g12.kvb",
        "",
    ],
)
def test_a_path_that_is_almost_right_is_not_a_block(path: str) -> None:
    assert parse_block_path(path) is None


@pytest.mark.parametrize(
    "key",
    [BlockKey(b"", 0), BlockKey(b"ab", 0), BlockKey(bytes(33), 0), BlockKey(b"abc", -1), BlockKey(b"abc", 2**32)]
    + [BlockKey(b"abc", 0, tenant) for tenant in ["..", ".", "a/b", "../x", "A", "a b", "x" * 33, "a\n", "\u0661"]],
)
def test_a_key_that_does_not_fit_is_refused(key: BlockKey) -> None:
    with pytest.raises(ValueError, match="hash must have"):
        block_path(key)


@given(keys)
def test_partial_and_quarantined_names_are_no_blocks(key: BlockKey) -> None:
    partial = partial_path(block_path(key), TOKEN)
    assert is_partial(partial)
    assert is_partial(partial.rpartition("/")[2])
    assert parse_block_path(partial) is None
    assert parse_block_path(quarantine_path(key, "checksum", TOKEN)) is None
    assert not is_partial(block_path(key))
    assert not is_partial(quarantine_path(key, "checksum", TOKEN))
    assert is_quarantined(quarantine_path(key, "checksum", TOKEN))
    assert not is_quarantined(block_path(key))


def test_a_partial_name_leads_glusterfs_to_the_server_of_the_final_name() -> None:
    name = partial_path("blocks/000/00/x_g0.kvb", TOKEN).rpartition("/")[2]
    # What GlusterFS calls rsync-hash-regex, by default.
    found = re.fullmatch(r"\.(.+)\.[^.]+", name)
    assert found[1] == "x_g0.kvb"


@pytest.mark.parametrize(
    "name", [".partial", "x.partial", f".{TOKEN}.partial", f"x.{TOKEN[1:]}.partial", f"x.{TOKEN}-partial", "y.kvb"]
)
def test_other_names_are_not_partial(name: str) -> None:
    assert not is_partial(name)
