# SPDX-License-Identifier: Apache-2.0
"""A bounded memory of blocks: it answers lookups for a while, and never for long about what could not be read."""

from __future__ import annotations

import hashlib

import pytest
from clocks import Clock

from kvtier_connector.cascade.memory import ASIDE_SECONDS, DAMAGED_SECONDS, TRUST_SECONDS, BlockMemory, Presence
from kvtier_connector.store.layout import BlockKey


def key(number: int, tenant: str = "", group: int = 0) -> BlockKey:
    return BlockKey(hashlib.sha256(str(number).encode()).digest(), group, tenant)


@pytest.fixture
def clock() -> Clock:
    return Clock(1000.0)


@pytest.fixture
def memory(clock: Clock) -> BlockMemory:
    return BlockMemory(now=clock)


def test_a_block_that_was_written_or_read_is_present_for_a_while(memory: BlockMemory, clock: Clock) -> None:
    assert memory.state(key(1)) is Presence.UNKNOWN
    memory.add(key(1))
    assert memory.state(key(1)) is Presence.PRESENT
    clock.seconds += TRUST_SECONDS
    assert memory.state(key(1)) is Presence.UNKNOWN
    assert memory.has(key(1))


def test_blocks_of_tenants_and_groups_are_told_apart(memory: BlockMemory) -> None:
    memory.add(key(1, "acme"))
    assert memory.state(key(1)) is Presence.UNKNOWN
    assert memory.state(key(1, "other")) is Presence.UNKNOWN
    assert memory.state(key(1, "acme", group=1)) is Presence.UNKNOWN
    assert memory.state(key(1, "acme")) is Presence.PRESENT


def test_a_block_that_is_gone_is_asked_for_again(memory: BlockMemory) -> None:
    memory.add(key(1))
    memory.discard(key(1))
    assert memory.state(key(1)) is Presence.UNKNOWN
    assert not memory.has(key(1))


@pytest.mark.parametrize(("is_damaged", "seconds"), [(False, ASIDE_SECONDS), (True, DAMAGED_SECONDS)])
def test_a_block_that_the_volume_did_not_give_is_absent_for_a_while_whatever_lookups_see(
    memory: BlockMemory, clock: Clock, is_damaged: bool, seconds: float
) -> None:
    memory.set_aside(key(1), is_damaged=is_damaged)
    memory.see(key(1))
    assert memory.state(key(1)) is Presence.ABSENT
    clock.seconds += seconds
    assert memory.state(key(1)) is Presence.UNKNOWN


def test_lookups_are_quick_again_once_nothing_is_set_aside_any_more(memory: BlockMemory, clock: Clock) -> None:
    memory.set_aside(key(1), is_damaged=True)
    memory.set_aside(key(2))
    assert memory.has_asides
    clock.seconds += max(DAMAGED_SECONDS, ASIDE_SECONDS)
    assert not memory.has_asides
    assert len(memory) == 0


def test_a_block_that_was_written_anew_is_present_at_once(memory: BlockMemory) -> None:
    memory.set_aside(key(1))
    memory.add(key(1))
    assert memory.state(key(1)) is Presence.PRESENT


def test_the_memory_is_bounded_and_keeps_the_last_blocks(clock: Clock) -> None:
    memory = BlockMemory(remembered=100, now=clock)
    for number in range(1000):
        memory.add(key(number))
    assert len(memory) == 100
    assert all(memory.has(key(number)) for number in range(900, 1000))


def test_blocks_that_could_not_be_read_are_bounded_too(memory: BlockMemory) -> None:
    for number in range(40_000):
        memory.set_aside(key(number))
    assert len(memory) <= 1 << 14


def test_nothing_is_known_of_a_directory_that_was_made_anew(memory: BlockMemory) -> None:
    memory.add(key(1))
    memory.set_aside(key(2))
    memory.clear()
    assert memory.state(key(1)) is Presence.UNKNOWN
    assert memory.state(key(2)) is Presence.UNKNOWN
    assert len(memory) == 0
