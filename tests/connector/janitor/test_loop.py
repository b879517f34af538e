# SPDX-License-Identifier: Apache-2.0
"""The process around the sweeper: it follows settings and election, and a hanging volume does not hold it up."""

from __future__ import annotations

import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from plain_http import has_ipv6
from prometheus_client.parser import text_string_to_metric_families
from store_faults import GatedFs
from tier_dir import BLOCK_BYTES, Engine, Rig
from waiting import until

from kvtier_connector.contract.errors import LeaseUnavailable
from kvtier_connector.contract.janitor import encode
from kvtier_connector.contract.usage import decode
from kvtier_connector.janitor.loop import Loop, make_elector
from kvtier_connector.janitor.metrics import METRICS, Server, exposition, make_pages
from kvtier_connector.janitor.sweep import Sweeper
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


def test_settings_that_cannot_be_used_are_stated_and_the_old_ones_stay(rig: Rig, tmp_path: Path) -> None:
    file = tmp_path / "janitor.json"
    file.write_text("{}")
    with running(Loop(rig.config, config_file=file, tick_seconds=0.05)) as loop:
        until(lambda: "settings" in loop.report().problems, "the problem")
        file.write_text(encode(rig.config))
        until(lambda: "settings" not in loop.report().problems, "its end")


def test_settings_that_need_a_new_process_end_this_one(rig: Rig, tmp_path: Path) -> None:
    file = tmp_path / "janitor.json"
    file.write_text(encode(replace(rig.config, tier_dir="/elsewhere")))
    loop = Loop(rig.config, config_file=file, tick_seconds=0.05)
    assert loop.run()


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


def test_a_volume_that_hangs_is_stated_and_the_process_stays_healthy(rig: Rig) -> None:
    rig.engine()
    fs = GatedFs(lambda *_: True)
    loop = Loop(
        rig.config,
        make=lambda config, may_act: Sweeper(config, fs=fs, may_act=may_act),
        hang_seconds=0.1,
        tick_seconds=0.05,
    )
    with running(loop):
        until(lambda: "hang" in loop.report().problems, "the problem")
        assert loop.health() == ""
        fs.open_gate()
        until(lambda: loop.report().usage.is_counted and not loop.report().problems, "its end")


def test_a_loop_that_does_not_turn_is_unhealthy(rig: Rig) -> None:
    now = [0.0]
    loop = Loop(rig.config, now=lambda: now[0])
    assert loop.health() == ""
    now[0] = 1000.0
    assert "has not turned" in loop.health()


def test_a_keeper_that_fails_unexpectedly_is_stated_and_begins_anew(rig: Rig) -> None:
    rig.engine()
    made: list[Sweeper] = []

    class Broken(Sweeper):
        def step(self) -> float:
            if len(made) < 2:
                raise ZeroDivisionError("a bug")
            return super().step()

    def make(config: object, may_act: Callable[[], bool]) -> Sweeper:
        made.append(Broken(replace(rig.config, sweep_seconds=0.05), may_act=may_act))
        return made[-1]

    config = replace(rig.config, sweep_seconds=0.05)
    with running(Loop(config, make=make, tick_seconds=0.05)) as loop:
        until(lambda: loop.report().usage.is_counted, "the second one")
        assert loop.health() == ""


def get(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=DEADLINE_SECONDS) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_it_serves_metrics_usage_and_health(rig: Rig) -> None:
    rig.engine().put(1, 2, tenant="alice")
    loop = Loop(rig.config, tick_seconds=0.05)
    server = Server("127.0.0.1", 0, make_pages(metrics=exposition(loop.report), usage=loop.usage, health=loop.health))
    server.start()
    try:
        with running(loop):
            until(lambda: loop.report().usage.is_counted, "the count")
            assert get(server.port, "/healthz") == (200, "ok\n")
            usage = decode(get(server.port, "/usage")[1])
            assert (usage.blocks, usage.tenants[0].tenant) == (2, "alice")
            families = {each.name for each in text_string_to_metric_families(get(server.port, "/metrics")[1])}
            ours = {name for name in families if not name.startswith("process_")}
            assert ours == {metric.name for metric in METRICS}
            assert get(server.port, "/other")[0] == 404
    finally:
        server.close()


def is_answered(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/healthz", timeout=60) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
@pytest.mark.parametrize(
    ("host", "over_4", "over_6"),
    [("", True, False), ("0.0.0.0", True, False), ("::", True, True), ("::1", False, True)],
)
def test_it_serves_the_addresses_that_it_is_told(host: str, over_4: bool, over_6: bool) -> None:
    server = Server(host, 0, make_pages(metrics=bytes, usage=str, health=str))
    server.start()
    try:
        assert is_answered(f"http://127.0.0.1:{server.port}") is over_4
        assert is_answered(f"http://[::1]:{server.port}") is over_6
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
