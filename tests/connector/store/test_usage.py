# SPDX-License-Identifier: Apache-2.0
"""Limits of a tier and quotas of tenants, moved together."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from store_contract import BLOCK_BYTES, key, pages, payload, whole_file

from kvtier_connector.store.blockstore import BlockStore, Stored, StoreFault
from kvtier_connector.store.header import Fault
from kvtier_connector.store.layout import block_path
from kvtier_connector.store.usage import Ledger, Quotas, Refusal

QUOTAS = Quotas({"a": 5}, default_bytes=3)


def test_a_quota_is_the_tenants_own_or_the_default_and_common_blocks_have_none() -> None:
    assert [QUOTAS.of(tenant) for tenant in ("a", "b", "")] == [5, 3, 0]


def test_a_refused_claim_takes_no_room_from_anybody() -> None:
    ledger = Ledger(6, QUOTAS)
    assert ledger.reserve(5, "a") is None
    assert ledger.reserve(1, "a") is Refusal.QUOTA
    assert ledger.reserve(2, "b") is Refusal.BUDGET
    assert ledger.total_of("b") == 0
    ledger.cancel(5, "a")
    assert ledger.reserve(3, "b") is None
    assert ledger.total() == 3


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["put", "learn", "forget", "scan"]), st.sampled_from(["", "a", "b"]), st.integers(0, 4)
        )
    )
)
def test_the_tenants_together_are_the_tier_and_no_limit_is_exceeded_by_a_write(
    steps: list[tuple[str, str, int]],
) -> None:
    ledger = Ledger(0, QUOTAS)
    truth = dict.fromkeys(("", "a", "b"), 0)
    for step, tenant, count in steps:
        if step == "put":
            if ledger.reserve(count, tenant) is None:
                ledger.commit(count, tenant, replaced=0)
                truth[tenant] += count
                assert not QUOTAS.of(tenant) or truth[tenant] <= QUOTAS.of(tenant)
        elif step == "learn":
            ledger.learn(count, tenant)
            truth[tenant] += count
        elif step == "forget":
            gone = min(count, truth[tenant])
            ledger.forget(gone, tenant)
            truth[tenant] -= gone
        else:
            ledger.begin_scan()
            for each, found in truth.items():
                ledger.find(found, each)
            ledger.end_scan()
        assert {each: ledger.total_of(each) for each in truth} == truth
        assert ledger.total() == sum(truth.values())


def scan(ledger: Ledger, **found: int) -> None:
    ledger.begin_scan()
    for tenant, count in found.items():
        ledger.find(count, tenant)
    ledger.end_scan()


def test_tenants_without_a_byte_are_forgotten_at_each_scan() -> None:
    ledger = Ledger(0, QUOTAS)
    for number in range(1000):
        assert ledger.reserve(3, f"t{number}") is None
        ledger.commit(3, f"t{number}", replaced=0)
        assert ledger.reserve(1, f"t{number}") is Refusal.QUOTA
    assert ledger.tenants() == 1000
    scan(ledger, t1=3, t2=2)
    scan(ledger, t1=3, t2=2)
    assert ledger.tenants() == 2
    assert [ledger.total_of(f"t{number}") for number in range(4)] == [0, 3, 2, 0]
    assert ledger.reserve(3, "t0") is None


def test_a_claim_ends_where_it_was_made_although_a_scan_forgets_tenants_meanwhile() -> None:
    ledger = Ledger(0, QUOTAS)
    assert ledger.reserve(2, "b") is None
    scan(ledger)
    ledger.commit(2, "b", replaced=0)
    assert (ledger.total_of("b"), ledger.total()) == (2, 2)
    assert ledger.reserve(2, "b") is Refusal.QUOTA


def test_a_tenant_that_is_met_for_the_first_time_has_no_more_than_a_share_either() -> None:
    ledger = Ledger(0, Quotas({}, default_bytes=100))
    ledger.begin_period(writers=5)
    assert ledger.reserve(11, "new") is Refusal.QUOTA
    assert ledger.reserve(10, "new") is None


@pytest.fixture
def store(tmp_path: Path) -> BlockStore:
    return BlockStore(tmp_path / "d1gest", quotas=Quotas({"acme": 2 * BLOCK_BYTES}))


def test_a_store_refuses_what_a_tenant_may_not_take(store: BlockStore, tmp_path: Path) -> None:
    mine = [key(number)._replace(tenant="acme") for number in range(3)]
    assert [store.put(of, payload(1)) for of in mine] == [Stored(BLOCK_BYTES), Stored(BLOCK_BYTES), StoreFault.NO_QUOTA]
    assert store.put(key(1), payload(1)) == Stored(BLOCK_BYTES)
    store.delete(mine[0])
    assert store.put(mine[2], payload(1)) == Stored(BLOCK_BYTES)
    fresh = BlockStore(tmp_path / "d1gest", quotas=Quotas({"acme": 2 * BLOCK_BYTES}))
    assert fresh.refresh_usage() == 3 * BLOCK_BYTES
    assert fresh.put(mine[0], payload(1)) is StoreFault.NO_QUOTA


def test_a_damaged_block_is_moved_within_its_tenants_tree_and_counts_there(store: BlockStore, tmp_path: Path) -> None:
    of = key(1)._replace(tenant="acme")
    path = tmp_path / "d1gest" / block_path(of)
    path.parent.mkdir(parents=True)
    path.write_bytes(whole_file(of, payload(1))[:-1] + b"x")
    assert store.get(of, pages()) is Fault.CHECKSUM
    (moved,) = (tmp_path / "d1gest/tenants/acme/quarantine").iterdir()
    assert moved.stat().st_size == BLOCK_BYTES
    store.refresh_usage()
    outcomes = [store.put(key(number)._replace(tenant="acme"), payload(1)) for number in (2, 3)]
    assert outcomes == [Stored(BLOCK_BYTES), StoreFault.NO_QUOTA]
