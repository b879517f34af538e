# SPDX-License-Identifier: Apache-2.0
"""The catalog agrees with a plain dict of blocks, whatever is added and forgotten, in whatever order."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from tier_dir import BLOCK_BYTES, Engine, Rig

from kvtier_connector.contract.usage import GenerationUsage, Usage, encode
from kvtier_connector.janitor import policy
from kvtier_connector.janitor.catalog import Catalog, Sum
from kvtier_connector.janitor.metrics import MOST_TENANTS, OTHER, JanitorReport, Tallies, make_pages, report_of
from kvtier_connector.janitor.policy import BlockColumns, Limits, choose
from kvtier_connector.store.layout import NO_LINEAGE, BlockKey, Lineage

SIZE = 5000


def key(number: int, tenant: str = "", group: int = 0) -> BlockKey:
    return BlockKey(number.to_bytes(4, "little") * 8, group, tenant)


def add(  # noqa: PLR0913 - keywords
    catalog: Catalog, number: int, digest: str = "aa", *, tenant: str = "", parent: int | None = None, used_ns: int = 1
) -> int:
    lineage = NO_LINEAGE if parent is None else Lineage(key(parent).hash, parent + 1)
    return catalog.add(catalog.generation(digest), key(number, tenant), size=SIZE, created_ns=used_ns, lineage=lineage)


changes = st.lists(
    st.tuples(st.booleans(), st.integers(0, 9), st.sampled_from(["", "alice"]), st.sampled_from(["aa", "bb"])),
    max_size=60,
)


@given(changes)
@settings(max_examples=100, deadline=None)
def test_blocks_are_counted_until_forgotten_also_after_a_restart(changed: list[tuple[bool, int, str, str]]) -> None:
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
    assert catalog.parent_of(catalog.find(generation, key(2001, "t998"))) == catalog.find(generation, key(998, "t998"))
    add(catalog, 1, tenant="t1")
    assert catalog.key(catalog.find(generation, key(1, "t1"))) == key(1, "t1")


@dataclass
class Tree:
    """Prefixes as people think of them: each block names the one before it by its number, -1 for none."""

    parents: list[int]
    used: list[int]
    created: list[int]
    size: list[int]
    tenant: list[int]
    age: list[int]

    def blocks(self) -> BlockColumns:
        positions: list[int] = []
        for parent in self.parents:
            positions.append(0 if parent < 0 else positions[parent] + 1)
        names = np.arange(1, len(self.parents) + 1, dtype=np.uint64)
        parents = np.array([parent + 1 for parent in self.parents], np.uint64)
        return BlockColumns(
            before=policy.link(names, parents, np.array(positions, np.int64)),
            position=np.array(positions, np.int64),
            size=np.array(self.size, np.int64),
            created=np.array(self.created, np.int64),
            used=np.array(self.used, np.int64),
            tenant=np.array(self.tenant, np.int64),
            age=np.array(self.age, np.int64),
        )

    def before(self, row: int) -> list[int]:
        found = []
        while (row := self.parents[row]) >= 0:
            found.append(row)
        return found

    def continued_by(self, row: int) -> list[int]:
        return [other for other in range(len(self.parents)) if row in self.before(other)]


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    count = draw(st.integers(1, 25))
    parents = [draw(st.integers(-1, row - 1)) for row in range(count)]
    tenant: list[int] = []
    age: list[int] = []
    for parent in parents:
        # A prefix lies in one tree of one tenant in one generation.
        tenant.append(draw(st.integers(0, 2)) if parent < 0 else tenant[parent])
        age.append(draw(st.integers(0, 2)) if parent < 0 else age[parent])
    numbers = st.lists(st.integers(0, 100), min_size=count, max_size=count)
    sizes = st.lists(st.integers(1, 20), min_size=count, max_size=count)
    return Tree(parents, draw(numbers), draw(numbers), draw(sizes), tenant, age)


limits = st.builds(
    Limits,
    high_bytes=st.integers(0, 300),
    low_bytes=st.integers(0, 300),
    other_bytes=st.integers(0, 30),
    wanted_free_bytes=st.integers(0, 200),
    floor_bytes=st.integers(0, 300),
    quotas=st.just({}) | st.integers(1, 100).map(lambda quota: {1: (quota, quota // 2)}),
).map(lambda each: replace(each, low_bytes=min(each.low_bytes, each.high_bytes)))


def taken(choice: policy.Choice, *reasons: policy.EvictionReason) -> set[int]:
    return {row for reason, rows in choice if not reasons or reason in reasons for row in rows.tolist()}


@given(trees(), limits)
@settings(max_examples=250, deadline=None)
def test_a_decision_leaves_no_hole_at_any_moment_and_takes_what_is_needed_in_order(tree: Tree, limits: Limits) -> None:
    choice = choose(tree.blocks(), limits)
    everything, rows = set(range(len(tree.parents))), [row for _, rows in choice for row in rows.tolist()]
    gone: set[int] = set()
    for row in rows:
        assert set(tree.continued_by(row)) <= gone, "the end of a prefix goes first"
        gone.add(row)
    assert not any(gone & set(tree.before(row)) for row in everything - gone), "what stays has lost no block before it"
    left = sum(tree.size[row] for row in everything - gone)
    total = sum(tree.size) + limits.other_bytes
    if limits.high_bytes and left + limits.other_bytes > limits.high_bytes:
        assert gone == everything
    if taken(choice, policy.EvictionReason.BUDGET) and gone != everything:
        assert left + limits.other_bytes <= limits.low_bytes
    if not limits.quotas and not limits.wanted_free_bytes:
        assert bool(rows) <= (limits.high_bytes > 0 and total > limits.high_bytes)
        assert not rows or sum(tree.size[row] for row in rows[:-1]) < total - limits.low_bytes, "no block too many"
    assert not taken(choice, policy.EvictionReason.VOLUME) or left >= limits.floor_bytes
    assert {tree.tenant[row] for row in taken(choice, policy.EvictionReason.QUOTA)} <= {1}
    for victim in taken(choice, policy.EvictionReason.BUDGET, policy.EvictionReason.VOLUME):
        assert {row for row in everything if tree.age[row] > tree.age[victim]} <= gone, "older generations go first"


@given(trees(), st.integers(0, 100))
@settings(max_examples=40, deadline=None)
def test_an_expired_block_goes_used_or_not(tree: Tree, before: int) -> None:
    choice = choose(tree.blocks(), Limits(expire_before=before))
    assert taken(choice) == {row for row, created in enumerate(tree.created) if created < before}


@given(trees())
@settings(max_examples=40, deadline=None)
def test_a_prefix_is_as_young_as_the_youngest_that_continues_it(tree: Tree) -> None:
    blocks = tree.blocks()
    spread_used = policy.spread(blocks.used, blocks.before, blocks.position)
    for row in range(len(tree.parents)):
        assert spread_used[row] == max(tree.used[other] for other in (row, *tree.continued_by(row)))


def report_on(count: int) -> JanitorReport:
    """Return a report on `count` tenants; each has a few bytes more than the one before."""
    catalog = Catalog()
    generation = catalog.generation("aa")
    for number in range(count):
        catalog.add(generation, BlockKey(number.to_bytes(8, "big"), 0, f"t{number}"), size=4096 + number, created_ns=1)
    base = JanitorReport(usage=Usage(tier="ns/llama", generations=(GenerationUsage(digest="aa", created=1.0),)))
    return report_of(catalog, Tallies(), base, last_used_ns={})


def samples_of(report: JanitorReport, name: str) -> dict[str, float]:
    text = make_pages(lambda: report, health=lambda: "")["/metrics"]()[2].decode()
    return {
        sample.labels.get("tenant", ""): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name
    }


def test_the_largest_tenants_have_a_sample_each_and_are_those_of_the_document() -> None:
    report = report_on(3000)
    samples = samples_of(report, "kvtier_janitor_tenant_used_bytes")
    assert len(samples) == MOST_TENANTS + 1
    assert OTHER in samples
    assert {"t2999", "t2900"} <= samples.keys()
    assert sum(samples.values()) == report.usage.used_bytes
    assert samples_of(report, "kvtier_janitor_tenants") == {"": 3000}
    report = report_on(3000)
    document = json.loads(encode(report.usage))
    assert (len(document["tenants"]), document["tenants"][0]["tenant"]) == (1000, "t2999")
    listed_bytes = sum(each["used_bytes"] for each in document["tenants"])
    assert report.other_tenants_bytes + listed_bytes == document["used_bytes"]


def limited(rig: Rig, used: dict[int, int], default_quota_bytes: int) -> dict[int, tuple[int, int]]:
    config = rig.sweeper(default_quota_bytes=default_quota_bytes).config
    tenants = ["", *(f"t{number}" for number in used)]
    return dict(policy.make_limits(config, policy.Space(), tenants=tenants, used=used, other_bytes=0, now_ns=0).quotas)


def test_a_decision_looks_at_the_tenants_above_their_quotas_and_first_at_the_largest(rig: Rig) -> None:
    assert limited(rig, dict.fromkeys(range(1, 1000), 10), 100) == {}
    quotas = limited(rig, {number: number for number in range(1, 1000)}, 100)
    assert (len(quotas), min(quotas)) == (256, 744)


def test_tenants_that_went_are_forgotten_when_the_ledger_is_saved(rig: Rig, engine: Engine) -> None:
    for number in range(20):
        engine.put(number, tenant=f"t{number}")
    rig.swept(max_bytes=20 * BLOCK_BYTES, high_watermark=0.5, low_watermark=0.2).close()
    document = (rig.dir / "janitor.catalog").read_bytes()
    assert [f't{number}"'.encode() in document for number in range(20)] == [False] * 16 + [True] * 4


def test_quotas_of_very_many_tenants_hold_in_the_end(rig: Rig, engine: Engine) -> None:
    for number in range(300):
        engine.put(number, tenant=f"t{number}")
    sweeper = rig.sweeper(default_quota_bytes=BLOCK_BYTES, high_watermark=0.5, low_watermark=0.2)
    assert any(rig.sweep(sweeper).blocks == 0 for _ in range(5))


def test_links_in_a_circle_are_none_and_many_blocks_are_all_found_again() -> None:
    name = np.array([1, 2], np.uint64)
    assert policy.link(name, np.array([2, 1], np.uint64), np.array([5, 5], np.int64)).tolist() == [-1, -1]
    catalog = Catalog()
    count = 70_000
    for number in range(count):
        add(catalog, number)
    generation = catalog.generation("aa")
    assert catalog.total.blocks == count
    assert all(catalog.key(catalog.find(generation, key(number))) == key(number) for number in range(0, count, 997))
