# SPDX-License-Identifier: Apache-2.0
"""What the policy never does, whatever the blocks are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier_connector.janitor.policy import BlockColumns, Choice, EvictionReason, Limits, choose, link, spread


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
            before=link(names, parents, np.array(positions, np.int64)),
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
    lambda high, low, other, free, floor, quota: Limits(
        high_bytes=high,
        low_bytes=min(low, high),
        other_bytes=other,
        wanted_free_bytes=free,
        floor_bytes=floor,
        quotas={} if quota is None else {1: (quota, quota // 2)},
    ),
    st.integers(0, 300),
    st.integers(0, 300),
    st.integers(0, 30),
    st.integers(0, 200),
    st.integers(0, 300),
    st.none() | st.integers(1, 100),
)


def taken(choice: Choice, *reasons: EvictionReason) -> set[int]:
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
    if taken(choice, EvictionReason.BUDGET) and gone != everything:
        assert left + limits.other_bytes <= limits.low_bytes
    if not limits.quotas and not limits.wanted_free_bytes:
        assert bool(rows) <= (limits.high_bytes > 0 and total > limits.high_bytes)
        assert not rows or sum(tree.size[row] for row in rows[:-1]) < total - limits.low_bytes, "no block too many"
    assert not taken(choice, EvictionReason.VOLUME) or left >= limits.floor_bytes
    assert {tree.tenant[row] for row in taken(choice, EvictionReason.QUOTA)} <= {1}
    for victim in taken(choice, EvictionReason.BUDGET, EvictionReason.VOLUME):
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
    spread_used = spread(blocks.used, blocks.before, blocks.position)
    for row in range(len(tree.parents)):
        assert spread_used[row] == max(tree.used[other] for other in (row, *tree.continued_by(row)))


def test_links_in_a_circle_are_no_links() -> None:
    name = np.array([1, 2], np.uint64)
    assert link(name, np.array([2, 1], np.uint64), np.array([5, 5], np.int64)).tolist() == [-1, -1]


def test_the_least_recently_used_goes_first() -> None:
    tree = Tree([-1, -1, -1], [30, 10, 20], [0, 0, 0], [1, 1, 1], [0, 0, 0], [0, 0, 0])
    ((_, rows),) = choose(tree.blocks(), Limits(high_bytes=2, low_bytes=1))
    assert rows.tolist() == [1, 2]


def test_no_block_at_all_is_no_problem() -> None:
    tree = Tree([], [], [], [], [], [])
    assert choose(tree.blocks(), Limits(high_bytes=1, expire_before=5)) == []
