# SPDX-License-Identifier: Apache-2.0
"""The catalog agrees with a plain dict of blocks, whatever is added and forgotten, in whatever order."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier_connector.janitor.catalog import Catalog, Sum
from kvtier_connector.store.layout import NO_LINEAGE, BlockKey, Lineage

SIZE = 5000


def key(number: int, tenant: str = "", group: int = 0) -> BlockKey:
    return BlockKey(number.to_bytes(4, "little") * 8, group, tenant)


def add(  # noqa: PLR0913 - keywords
    catalog: Catalog, number: int, digest: str = "aa", *, tenant: str = "", parent: int | None = None, used_ns: int = 1
) -> int:
    lineage = NO_LINEAGE if parent is None else Lineage(key(parent).hash, parent + 1)
    generation = catalog.generation(digest)
    return catalog.add(generation, key(number, tenant), size=SIZE, created_ns=used_ns, used_ns=used_ns, lineage=lineage)


changes = st.lists(
    st.tuples(st.booleans(), st.integers(0, 9), st.sampled_from(["", "alice"]), st.sampled_from(["aa", "bb"])),
    max_size=60,
)


@given(changes)
@settings(max_examples=100, deadline=None)
def test_added_and_not_forgotten_blocks_are_counted_also_after_a_restart(
    changed: list[tuple[bool, int, str, str]],
) -> None:
    catalog, model = Catalog(), set()
    for index, (is_added, number, tenant, digest) in enumerate(changed):
        if is_added:
            add(catalog, number, digest, tenant=tenant)
            model.add((digest, key(number, tenant)))
        elif (row := catalog.find(catalog.generation(digest), key(number, tenant))) >= 0:
            catalog.forget([row])
            model.remove((digest, key(number, tenant)))
        if index % 7 == 0:
            catalog.renumber()
    assert catalog.total == Sum(len(model), len(model) * SIZE)
    for digest in ("aa", "bb"):
        for number in range(10):
            for tenant in ("", "alice"):
                row = catalog.find(catalog.generation(digest), key(number, tenant))
                assert (row >= 0) == ((digest, key(number, tenant)) in model)
                assert row < 0 or catalog.key(row) == key(number, tenant)
    other = Catalog()
    catalog.renumber()
    other.restore(catalog.rows.copy(), list(catalog.generations), list(catalog.tenants))
    assert (other.total, other.largest_bytes) == (catalog.total, SIZE if model else 0)
    assert all(other.sums(by) == catalog.sums(by) for by in ("generation", "tenant"))


def test_many_blocks_are_all_found_again() -> None:
    catalog = Catalog()
    count = 70_000
    for number in range(count):
        add(catalog, number)
    generation = catalog.generation("aa")
    assert catalog.total.blocks == count
    assert all(catalog.key(catalog.find(generation, key(number))) == key(number) for number in range(0, count, 997))


def test_a_generation_is_dropped_whole_and_its_number_is_used_again() -> None:
    catalog = Catalog()
    add(catalog, 1, "bb")
    for number in range(1000):
        digest = f"{number:04x}"
        add(catalog, 1, digest)
        assert catalog.total.blocks == 2
        catalog.drop_generation(digest)
    assert catalog.total.blocks == 1
    assert len(catalog.generations) == 2


def test_tenants_without_a_block_are_forgotten_and_the_others_stay_as_they_are() -> None:
    catalog = Catalog()
    for number in range(1000):
        add(catalog, number, tenant=f"t{number}")
    add(catalog, 2001, tenant="t998", parent=998)
    generation = catalog.generation("aa")
    for number in range(998):
        catalog.forget([catalog.find(generation, key(number, f"t{number}"))])
    catalog.renumber()
    assert catalog.tenants == ["", "t998", "t999"]
    used = {catalog.tenants[tenant]: each.blocks for tenant, each in catalog.sums("tenant").items()}
    assert used == {"t998": 2, "t999": 1}
    continued = catalog.find(generation, key(2001, "t998"))
    assert catalog.parent_of(continued) == catalog.find(generation, key(998, "t998"))
    add(catalog, 1, tenant="t1")
    assert catalog.key(catalog.find(generation, key(1, "t1"))) == key(1, "t1")


def test_a_lookup_of_a_tenants_block_does_not_add_the_tenant() -> None:
    catalog = Catalog()
    assert catalog.find(catalog.generation("aa"), key(1, "t1")) == -1
    assert catalog.tenants == [""]
