# SPDX-License-Identifier: Apache-2.0
"""Clocks that are wrong: what is young stays, what is old goes all the same, and somebody is told."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
from tier_dir import BLOCK_BYTES, PAYLOAD_BYTES, Rig, key
from waiting import until_the_next_tick

from kvtier_connector.janitor.keeper import Keeper
from kvtier_connector.store.layout import JOURNAL

HOUR, DAY = 3600.0, 86_400.0


def look_on(rig: Rig, keeper: Keeper, seconds: float) -> None:
    ends = rig.clock.seconds + seconds
    while rig.clock.seconds < ends:
        rig.clock.move(300)
        rig.sweep(keeper)


def jump(rig: Rig, seconds: float) -> None:
    """Set the clock of all hosts, and of the volume, without time going by."""
    rig.clock.ns += int(seconds * 1e9)


def problems(keeper: Keeper) -> str:
    assert keeper.report is not None
    return "; ".join(keeper.report.usage.problems)


def test_a_clock_that_jumps_ahead_and_back_removes_nothing(rig: Rig) -> None:
    engine = rig.engine()
    engine.put(*range(10))
    keeper = rig.keeper(ttl_seconds=DAY)
    look_on(rig, keeper, 2 * HOUR)
    jump(rig, 30 * DAY)
    look_on(rig, keeper, HOUR / 2)
    assert len(engine.there(range(10))) == 10
    assert "clock: it jumped ahead" in problems(keeper)
    assert "ttl: nearly all blocks" in problems(keeper)
    jump(rig, -30 * DAY)
    look_on(rig, keeper, 2 * HOUR)
    assert (len(engine.there(range(10))), problems(keeper)) == (10, "")


def test_a_clock_that_stays_ahead_is_believed_after_an_hour(rig: Rig) -> None:
    engine = rig.engine()
    engine.put(*range(10))
    keeper = rig.keeper(ttl_seconds=DAY)
    look_on(rig, keeper, 2 * HOUR)
    jump(rig, 30 * DAY)
    look_on(rig, keeper, 2 * HOUR)
    assert (engine.there(range(10)), problems(keeper)) == ([], "")


def test_a_clock_that_jumped_keeps_no_rule_but_the_time_to_live_from_making_room(rig: Rig) -> None:
    engine = rig.engine()
    engine.put(*range(10))
    keeper = rig.keeper(ttl_seconds=DAY, max_bytes=100 * BLOCK_BYTES)
    look_on(rig, keeper, 2 * HOUR)
    jump(rig, 30 * DAY)
    keeper.configure(rig.keeper(ttl_seconds=DAY, max_bytes=8 * BLOCK_BYTES, low_watermark=0.5).config)
    look_on(rig, keeper, HOUR / 2)
    assert engine.there(range(10)) == [6, 7, 8, 9]


def test_what_grows_old_day_by_day_goes_in_time(rig: Rig) -> None:
    engine = rig.engine()
    keeper = rig.keeper(ttl_seconds=2 * DAY)
    for number in range(6):
        # The days go by within a second, and some volumes tell no shorter times.
        until_the_next_tick(engine.root / JOURNAL)
        engine.put(number)
        look_on(rig, keeper, HOUR)
        rig.clock.move(DAY - HOUR)
    look_on(rig, keeper, HOUR)
    assert (engine.there(range(6)), problems(keeper)) == ([5], "")


def test_everything_goes_in_time_once_all_of_it_is_old(rig: Rig) -> None:
    engine = rig.engine()
    engine.put(*range(10))
    keeper = rig.keeper(ttl_seconds=DAY)
    look_on(rig, keeper, 2 * HOUR)
    rig.clock.move(DAY - HOUR)
    rig.sweep(keeper)
    assert (engine.there(range(10)), problems(keeper)) == ([], "")


def test_a_new_janitor_does_not_believe_for_an_hour_that_all_is_old(rig: Rig) -> None:
    engine = rig.engine()
    engine.put(*range(10))
    jump(rig, 30 * DAY)
    keeper = rig.keeper(ttl_seconds=DAY)
    look_on(rig, keeper, HOUR / 2)
    assert len(engine.there(range(10))) == 10
    assert "kvtier purge --older-than" in problems(keeper)
    look_on(rig, keeper, HOUR)
    assert engine.there(range(10)) == []


def test_the_earlier_time_counts_where_the_host_is_ahead_of_the_volume(rig: Rig) -> None:
    engine = rig.engine()
    engine.put(*range(10))
    jump(rig, 30 * DAY)
    rig.ahead_ns = int(30 * DAY * 1e9)
    keeper = rig.keeper(ttl_seconds=DAY)
    look_on(rig, keeper, DAY - 2 * HOUR)
    assert len(engine.there(range(10))) == 10
    assert "30 days ahead of the volume" in problems(keeper)
    look_on(rig, keeper, 3 * HOUR)
    assert engine.there(range(10)) == []


def test_a_host_behind_the_volume_is_stated(rig: Rig) -> None:
    rig.engine().put(1)
    rig.ahead_ns = -int(2 * HOUR * 1e9)
    keeper = rig.keeper()
    rig.sweep(keeper)
    assert "2 hours behind the volume" in problems(keeper)


def test_the_volume_is_asked_by_a_file_of_its_own(rig: Rig) -> None:
    rig.engine().put(1)
    # These clocks are the rig's, and the volume has the real time.
    keeper = Keeper(rig.config, clock=lambda: rig.clock.ns, now=lambda: rig.clock.seconds)
    keeper.open()
    rig.sweep(keeper)
    assert problems(keeper) == ""
    rig.clock.move(3 * HOUR)
    rig.sweep(keeper)
    assert "3 hours ahead of the volume" in problems(keeper)
    before = (rig.dir / "brake.json").read_bytes()
    jump(rig, -3 * HOUR)
    rig.clock.move(61)
    rig.sweep(keeper)
    assert (problems(keeper), (rig.dir / "brake.json").read_bytes()) == ("", before)


@pytest.mark.parametrize("is_back", [True, False])
def test_no_leftover_and_no_generation_goes_while_a_jump_is_doubted(rig: Rig, *, is_back: bool) -> None:
    engine, old = rig.engine(), rig.engine("bb")
    old.put(1)
    quarantined = engine.root / "quarantine" / "x"
    quarantined.parent.mkdir()
    quarantined.write_bytes(b"1")
    keeper = rig.keeper(keep_previous=0)
    rig.sweep(keeper)
    for path in [quarantined, old.root / "tier.json", *old.root.glob("journal/*")]:
        os.utime(path, ns=(rig.clock.ns, rig.clock.ns))
    jump(rig, 30 * DAY)
    look_on(rig, keeper, HOUR / 2)
    assert quarantined.exists()
    assert old.has(1)
    if is_back:
        jump(rig, -30 * DAY)
    look_on(rig, keeper, HOUR)
    assert (quarantined.exists(), old.has(1)) == (is_back, False)


def test_an_engine_whose_clock_is_far_ahead_costs_no_block_of_another(rig: Rig) -> None:
    engine, ahead = rig.engine(), rig.engine()
    ahead.clock = type(rig.clock)(ns=rig.clock.ns + int(30 * DAY * 1e9))
    engine.put(*range(5))
    keeper = rig.keeper(ttl_seconds=DAY)
    rig.sweep(keeper)
    ahead.put(*range(5, 10))
    ahead.use(0)
    ahead.store.rescan()
    look_on(rig, keeper, 2 * HOUR)
    assert engine.there(range(10)) == list(range(10))
    rig.clock.move(DAY)
    rig.sweep(keeper)
    assert engine.there(range(10)) == []


def test_nobody_retains_a_block_for_longer_than_a_month(rig: Rig) -> None:
    engine = rig.engine()
    engine.put(0, 1)
    engine.store.note_retained(key(0), PAYLOAD_BYTES, 1e9)
    engine.store.synchronize()
    keeper = rig.keeper(max_bytes=100 * BLOCK_BYTES)
    rig.sweep(keeper)
    rig.clock.move(31 * DAY)
    engine.put(2)
    engine.use(1)
    keeper.configure(replace(keeper.config, max_bytes=3 * BLOCK_BYTES, high_watermark=0.9, low_watermark=0.7))
    rig.sweep(keeper)
    assert engine.there(range(3)) == [1, 2]
