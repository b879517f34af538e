# SPDX-License-Identifier: Apache-2.0
"""The process around the sweeper follows settings and election; volumes that hang and wrong clocks do no harm."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from plain_http import PlainHttp, has_ipv6, is_answered
from prometheus_client.parser import text_string_to_metric_families
from store_faults import GatedFs
from tier_dir import BLOCK_BYTES, DAMAGED, Clock, Engine, Rig, key
from waiting import until, until_the_next_tick

from kvtier_connector.contract.errors import LeaseUnavailable
from kvtier_connector.contract.janitor import encode
from kvtier_connector.contract.usage import Usage, decode
from kvtier_connector.janitor.loop import Loop, make_elector
from kvtier_connector.janitor.metrics import METRICS, JanitorReport, Server, make_pages
from kvtier_connector.janitor.sweep import Sweeper
from kvtier_connector.store.fs import new_token
from kvtier_connector.store.journal import Op
from kvtier_connector.store.layout import JOURNAL, block_path, partial_path
from kvtier_localcluster.apiserver import ApiServerThread

DEADLINE_SECONDS = 120.0


@contextmanager
def running(loop: Loop) -> Iterator[Loop]:
    thread = threading.Thread(target=loop.run, daemon=True)
    thread.start()
    try:
        yield loop
    finally:
        loop.stop()
        thread.join(DEADLINE_SECONDS)
        assert not thread.is_alive()


def test_other_settings_are_followed_while_it_runs(rig: Rig, engine: Engine, tmp_path: Path) -> None:
    engine.put(*range(10))
    file = tmp_path / "janitor.json"
    file.write_text(encode(rig.config))
    with running(Loop(rig.config, config_file=file, tick_seconds=0.05)) as loop:
        until(lambda: loop.report().usage.blocks == 10, "the count")
        file.write_text(encode(replace(rig.config, max_bytes=4 * BLOCK_BYTES)))
        until(lambda: loop.report().usage.blocks == 3, "the eviction")


def test_settings_that_are_refused_are_stated_and_those_of_a_new_process_end_this(rig: Rig, tmp_path: Path) -> None:
    file = tmp_path / "janitor.json"
    file.write_text("{}")
    with running(Loop(rig.config, config_file=file, tick_seconds=0.05)) as loop:
        until(lambda: "settings" in loop.report().problems, "the problem")
        file.write_text(encode(rig.config))
        until(lambda: "settings" not in loop.report().problems, "its end")
    file.write_text(encode(replace(rig.config, tier_dir="/elsewhere")))
    assert Loop(rig.config, config_file=file, tick_seconds=0.05).run()


def test_only_the_elected_one_acts(rig: Rig, engine: Engine) -> None:
    engine.put(*range(10))
    leads = threading.Event()
    assert make_elector(rig.config) is None, "without a lease it is alone"
    config = replace(rig.config, max_bytes=4 * BLOCK_BYTES, sweep_seconds=0.05)
    with running(Loop(config, is_leader=leads.is_set, tick_seconds=0.05)) as loop:
        assert not loop.report().usage.is_active
        assert engine.there(range(10)) == list(range(10))
        leads.set()
        until(lambda: len(engine.there(range(10))) == 3, "the eviction")
        until(lambda: loop.report().usage.is_active, "the report")
        leads.clear()
        assert not loop.report().usage.is_active


def test_a_loop_that_does_not_turn_is_unhealthy(rig: Rig) -> None:
    now = [0.0]
    loop = Loop(rig.config, now=lambda: now[0])
    assert loop.health() == ""
    now[0] = 1000.0
    assert "has not turned" in loop.health()


def test_a_janitor_that_fails_unexpectedly_begins_anew_and_a_volume_that_hangs_is_stated(rig: Rig) -> None:
    rig.engine()
    made: list[Sweeper] = []
    go_on, fs = threading.Event(), GatedFs(lambda *_: len(made) > 1)

    class Broken(Sweeper):
        def step(self) -> float:
            if len(made) < 2 and self.is_idle:
                raise ZeroDivisionError("a bug")
            return super().step()

    def make(config: object, may_act: Callable[[], bool]) -> Sweeper:
        assert not made or go_on.wait(DEADLINE_SECONDS)
        made.append(Broken(replace(rig.config, sweep_seconds=0.05), fs=fs, may_act=may_act))
        return made[-1]

    config = replace(rig.config, sweep_seconds=0.05)
    with running(Loop(config, make=make, hang_seconds=0.1, tick_seconds=0.05)) as loop:
        until(lambda: {"failure", "hang"} <= set(loop.report().problems), "the second one hangs as it is made")
        assert not loop.report().usage.is_counted, "the first one counted"
        assert loop.report().problems["hang"] == f"{rig.config.tier_dir}: the volume has not answered for a while"
        go_on.set()
        until(lambda: fs.waiting and "hang" in loop.report().problems, "it hangs as it begins")
        assert loop.health() == ""
        fs.open_gate()
        until(lambda: loop.report().usage.is_counted and not loop.report().problems, "its end")


def test_it_serves_metrics_usage_and_health(rig: Rig) -> None:
    rig.engine().put(1, 2, tenant="alice")
    loop = Loop(rig.config, tick_seconds=0.05)
    server = Server("127.0.0.1", 0, make_pages(loop.report, health=loop.health))
    server.start()
    try:
        with running(loop):
            until(lambda: loop.report().usage.is_counted, "the count")
            client = PlainHttp(f"http://127.0.0.1:{server.port}", seconds=DEADLINE_SECONDS)
            assert client.send("GET", "/healthz") == (200, "ok\n")
            usage = decode(json.dumps(client.send("GET", "/usage")[1]))
            assert (usage.blocks, usage.tenants[0].tenant) == (2, "alice")
            families = {each.name for each in text_string_to_metric_families(client.send("GET", "/metrics")[1])}
            ours = {name for name in families if not name.startswith("process_")}
            assert ours == {metric.name for metric in METRICS}
            assert client.send("GET", "/other")[0] == 404
    finally:
        server.close()


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
@pytest.mark.parametrize(
    ("host", "over_4", "over_6"),
    [("", True, False), ("0.0.0.0", True, False), ("::", True, True), ("::1", False, True)],
)
def test_it_serves_the_addresses_that_it_is_told(host: str, over_4: bool, over_6: bool) -> None:
    server = Server(host, 0, make_pages(lambda: JanitorReport(usage=Usage(tier="ns/llama")), health=str))
    server.start()
    try:
        assert is_answered(f"http://127.0.0.1:{server.port}/healthz") is over_4
        assert is_answered(f"http://[::1]:{server.port}/healthz") is over_6
    finally:
        server.close()


def test_one_of_two_leads_and_then_the_other(rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ApiServerThread() as server:
        monkeypatch.setenv("KUBECONFIG", str(server.write_kubeconfig(tmp_path / "kubeconfig")))
        config = replace(rig.config, lease_name="llama-janitor", lease_namespace="default")
        first, second = make_elector(config), make_elector(config)
        assert first is not None
        assert second is not None
        try:
            first.start()
            until(first.is_leader)
            second.start()
            assert not second.is_leader()
            first.close()
            assert not first.is_leader()
            until(second.is_leader)
        finally:
            first.close()
            second.close()


def test_a_lease_without_a_cluster_names_its_field(rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "missing"))
    with pytest.raises(LeaseUnavailable, match="lease_name='x': no cluster is configured"):
        make_elector(replace(rig.config, lease_name="x", lease_namespace="default"))


HOUR, DAY = 3600.0, 86_400.0


def look_on(rig: Rig, sweeper: Sweeper, seconds: float) -> None:
    ends = rig.clock.seconds + seconds
    while rig.clock.seconds < ends:
        rig.clock.move(300)
        rig.sweep(sweeper)


def jump(rig: Rig, seconds: float) -> None:
    """Set the clock of all hosts, and of the volume, without time going by."""
    rig.clock.ns += int(seconds * 1e9)


def problems(sweeper: Sweeper) -> str:
    return "; ".join(sweeper.report.usage.problems)


@pytest.mark.parametrize("is_back", [True, False])
def test_a_clock_that_jumps_ahead_is_believed_after_an_hour(rig: Rig, engine: Engine, *, is_back: bool) -> None:
    engine.put(*range(10))
    sweeper = rig.sweeper(ttl_seconds=DAY)
    look_on(rig, sweeper, 2 * HOUR)
    jump(rig, 30 * DAY)
    look_on(rig, sweeper, HOUR / 2)
    assert len(engine.there(range(10))) == 10
    assert "clock: the volume's jumped ahead by 30 days" in problems(sweeper)
    jump(rig, -30 * DAY if is_back else 0)
    look_on(rig, sweeper, 2 * HOUR)
    assert (len(engine.there(range(10))), problems(sweeper)) == (10 if is_back else 0, "")


def test_a_clock_that_jumped_keeps_no_rule_but_the_time_to_live_from_making_room(rig: Rig, engine: Engine) -> None:
    engine.put(*range(10))
    sweeper = rig.sweeper(ttl_seconds=DAY, max_bytes=100 * BLOCK_BYTES)
    look_on(rig, sweeper, 2 * HOUR)
    jump(rig, 30 * DAY)
    sweeper.configure(rig.sweeper(ttl_seconds=DAY, max_bytes=8 * BLOCK_BYTES, low_watermark=0.5).config)
    look_on(rig, sweeper, HOUR / 2)
    assert engine.there(range(10)) == [6, 7, 8, 9]


def test_what_grows_old_day_by_day_goes_in_time(rig: Rig, engine: Engine) -> None:
    sweeper = rig.sweeper(ttl_seconds=2 * DAY)
    for number in range(6):
        # The days go by within a second, and some volumes tell no shorter times.
        until_the_next_tick(engine.root / JOURNAL)
        engine.put(number)
        look_on(rig, sweeper, HOUR)
        rig.clock.move(DAY - HOUR)
    look_on(rig, sweeper, HOUR)
    assert (engine.there(range(6)), problems(sweeper)) == ([5], "")
    # Also where all of it is old at once.
    rig.clock.move(2 * DAY)
    rig.sweep(sweeper)
    assert (engine.there(range(6)), problems(sweeper)) == ([], "")


@pytest.mark.parametrize(
    ("ahead_seconds", "young_seconds", "then_seconds"),
    [(0.0, HOUR / 2, HOUR), (30 * DAY, DAY - 2 * HOUR, 3 * HOUR)],
    ids=["of the volume", "of the host alone"],
)
def test_a_new_janitor_believes_ages_of_the_volume_after_an_hour_and_those_of_its_host_never(
    rig: Rig, engine: Engine, ahead_seconds: float, young_seconds: float, then_seconds: float
) -> None:
    engine.put(*range(10))
    jump(rig, 30 * DAY)
    rig.ahead_ns = int(ahead_seconds * 1e9)
    sweeper = rig.sweeper(ttl_seconds=DAY)
    look_on(rig, sweeper, young_seconds)
    assert len(engine.there(range(10))) == 10
    assert ahead_seconds or "kvtier purge" in problems(sweeper)
    look_on(rig, sweeper, then_seconds)
    assert engine.there(range(10)) == []


@pytest.mark.parametrize("ahead_seconds", [25 * HOUR, -25 * HOUR, 60.0])
def test_a_host_of_another_time_removes_nothing_that_is_young(rig: Rig, engine: Engine, ahead_seconds: float) -> None:
    engine.put(*range(5))
    partial = engine.root / partial_path(block_path(key(77)), new_token())
    partial.parent.mkdir(exist_ok=True)
    partial.write_bytes(b"half of it")
    journals = sorted(engine.root.glob("journal/*.kvj"))
    # The files have the real time, and so has this volume.
    jump(rig, ahead_seconds)
    sweeper = Sweeper(replace(rig.config, ttl_seconds=DAY), clock=lambda: rig.clock.ns, now=lambda: rig.clock.seconds)
    sweeper.open()
    rig.sweep(sweeper)
    rig.clock.move(60)
    rig.sweep(sweeper)
    assert partial.exists()
    assert sorted(engine.root.glob("journal/*.kvj"))[: len(journals)] == journals
    assert (engine.there(range(5)), problems(sweeper)) == (list(range(5)), "")
    assert sorted(path.name for path in rig.dir.iterdir()) == ["aa", "janitor.catalog", "permit.json"]


def test_a_volume_that_does_not_say_what_time_it_is_loses_nothing_by_age(rig: Rig, engine: Engine) -> None:
    engine.put(*range(5))
    rig.clock.move(400 * DAY)
    silent = rig.sweeper(parts={"ask_volume": lambda: None}, ttl_seconds=DAY)
    look_on(rig, silent, 2 * HOUR)
    assert len(engine.there(range(5))) == 5
    assert "does not tell its time" in problems(silent)


@pytest.mark.parametrize("ahead_seconds", [120.0, -120.0, 60.0, -60.0, -2 * DAY, 2 * DAY])
def test_a_block_stored_anew_is_known_whatever_any_clock_says(rig: Rig, engine: Engine, ahead_seconds: float) -> None:
    engine.clock = Clock(ns=rig.clock.ns + int(ahead_seconds * 1e9))
    engine.put(*range(10))
    sweeper = rig.swept(max_bytes=10 * BLOCK_BYTES, low_watermark=0.5, ttl_seconds=DAY)
    gone = [number for number in range(10) if not engine.has(number)]
    assert len(gone) == 5
    other = rig.engine()
    other.clock = engine.clock
    other.put(*gone[:3])
    look_on(rig, sweeper, HOUR)
    assert sweeper.catalog.total.blocks == len(engine.there(range(10))) == 8
    look_on(rig, sweeper, DAY)
    assert engine.there(range(10)) == []


@pytest.mark.parametrize("ahead_seconds", [HOUR, -HOUR])
def test_the_order_of_uses_is_that_in_which_they_were_heard(rig: Rig, ahead_seconds: float) -> None:
    engine, other = rig.engine(), rig.engine()
    engine.put(*range(10))
    sweeper = rig.swept(max_bytes=20 * BLOCK_BYTES)
    rig.clock.move(100)
    other.clock = Clock(ns=rig.clock.ns + int(ahead_seconds * 1e9))
    for user, number in ((other, 0), (engine, 1)):
        user.use(number)
        rig.sweep(sweeper)
        rig.clock.move(100)
    sweeper.configure(replace(sweeper.config, max_bytes=2 * BLOCK_BYTES, high_watermark=0.6, low_watermark=0.5))
    rig.sweep(sweeper)
    assert engine.there(range(10)) == [1]


@pytest.mark.parametrize("is_back", [True, False])
def test_no_leftover_and_no_generation_goes_while_a_jump_is_doubted(rig: Rig, *, is_back: bool) -> None:
    engine, old = rig.engine(), rig.engine("bb")
    old.put(1)
    quarantined = engine.root / DAMAGED
    quarantined.parent.mkdir()
    quarantined.write_bytes(b"1")
    sweeper = rig.swept(keep_previous=0)
    for path in [quarantined, old.root / "tier.json", *old.root.glob("journal/*")]:
        os.utime(path, ns=(rig.clock.ns, rig.clock.ns))
    jump(rig, 30 * DAY)
    look_on(rig, sweeper, HOUR / 2)
    assert quarantined.exists()
    assert old.has(1)
    if is_back:
        jump(rig, -30 * DAY)
    look_on(rig, sweeper, 2 * HOUR)
    assert (quarantined.exists(), old.has(1)) == (is_back, False)


def test_an_engine_whose_clock_is_far_ahead_costs_no_block_of_another(rig: Rig) -> None:
    engine, ahead = rig.engine(), rig.engine()
    ahead.clock = type(rig.clock)(ns=rig.clock.ns + int(30 * DAY * 1e9))
    engine.put(*range(5))
    sweeper = rig.swept(ttl_seconds=DAY)
    ahead.put(*range(5, 10))
    ahead.use(0)
    look_on(rig, sweeper, 2 * HOUR)
    assert engine.there(range(10)) == list(range(10))
    rig.clock.move(DAY)
    rig.sweep(sweeper)
    assert engine.there(range(10)) == []


def test_nobody_retains_a_block_for_longer_than_a_month(rig: Rig, engine: Engine) -> None:
    engine.put(0, 1)
    engine.note(Op.RETAINED, 0, ahead_seconds=1e9)
    sweeper = rig.swept(max_bytes=100 * BLOCK_BYTES)
    rig.clock.move(31 * DAY)
    engine.put(2)
    engine.use(1)
    sweeper.configure(replace(sweeper.config, max_bytes=3 * BLOCK_BYTES, high_watermark=0.9, low_watermark=0.7))
    rig.sweep(sweeper)
    assert engine.there(range(3)) == [1, 2]
