# SPDX-License-Identifier: Apache-2.0
"""The janitor from step to step: new settings, clocks that jump, and what it asks for between two steps."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tier_dir import BLOCK_BYTES, Clock, Rig, key, payload

from kvtier_connector.store.layout import Lineage

DAY = 86_400.0


def test_other_settings_hold_from_the_next_step(rig: Rig) -> None:
    engine = rig.engine()
    engine.put(*range(10))
    keeper = rig.keeper()
    assert rig.sweep(keeper).blocks == 10
    keeper.configure(replace(keeper.config, max_bytes=4 * BLOCK_BYTES))
    assert rig.sweep(keeper).blocks == 3


def test_a_block_of_an_engine_whose_clock_is_far_ahead_goes_like_any_other(rig: Rig) -> None:
    engine = rig.engine()
    engine.clock = Clock(ns=rig.clock.ns + int(400 * DAY * 1e9))
    engine.put(1)
    keeper = rig.keeper(ttl_seconds=DAY)
    rig.sweep(keeper)
    assert engine.has(1)
    rig.clock.move(2 * DAY)
    rig.sweep(keeper)
    assert not engine.has(1)


@pytest.mark.parametrize(("is_counted", "opened"), [(True, [3, 2, 1]), (False, [3])])
def test_what_comes_before_a_block_is_asked_for_while_there_is_time_and_by_the_walk_before_that(
    rig: Rig, *, is_counted: bool, opened: list[int]
) -> None:
    engine = rig.engine()
    engine.put(100)
    keeper = rig.keeper()
    if is_counted:
        rig.sweep(keeper)
    for number in range(1, 4):
        engine.store.put(key(number), payload(number), Lineage(key(number - 1).hash if number > 1 else b"", number - 1))
    digest = engine.root.name
    ask, met = iter([True, False, True]), []
    wanted = [key(3)]
    while wanted:
        met.append(wanted)
        wanted = keeper._patrol.meet(digest, wanted, lambda: next(ask))
    generation = keeper.ledger.generation(digest)
    assert [number for number in (3, 2, 1) if keeper.ledger.find(generation, key(number)) >= 0] == opened
    assert met == ([[key(3)], [key(1)]] if is_counted else [[key(3)]])
