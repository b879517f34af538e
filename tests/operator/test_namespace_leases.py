# SPDX-License-Identifier: Apache-2.0
"""One operator works on the tiers of a namespace; another one waits and says so."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from clocks import Clock
from live import APPS, CORE, NAMESPACE, TIERS, Client
from tiers import tier
from waiting import until

from kvtier_localcluster.apiserver import ApiServerThread
from kvtier_operator.kube.client import connect
from kvtier_operator.kube.namespace_leases import NamespaceLeases, lease_name
from kvtier_operator.names import TierName

LEASES = "/apis/coordination.k8s.io/v1"
LLAMA, QWEN = TierName(namespace=NAMESPACE, name="llama"), TierName(namespace=NAMESPACE, name="qwen")
SLOW = 120.0
Make = Callable[..., "Office"]


class Office:
    """One operator's Leases, and the tiers that it was told of."""

    def __init__(self, identity: str, **changes: Any) -> None:
        self.woken: list[TierName] = []
        settings: dict[str, Any] = {"operator_class": "", "seconds": 15.0, "is_kept": False} | changes
        self.leases = NamespaceLeases(connect(), identity=identity, **settings)
        self.leases.start(self.woken.append)

    def works(self, name: TierName = LLAMA) -> None:
        self.leases.admits(name)
        until(lambda: self.leases.admits(name))


@pytest.fixture
def make(api: ApiServerThread) -> Iterator[Make]:
    made: list[Office] = []

    def start(identity: str, **changes: Any) -> Office:
        made.append(Office(identity, **changes))
        return made[-1]

    yield start
    for office in made:
        office.leases.close(timeout=60)


def holder(kubectl: Client, name: str = "kvtier-tiers") -> str:
    lease = kubectl.get(LEASES, "leases", name) or {}
    return str(lease.get("spec", {}).get("holderIdentity") or "")


def complaints(kubectl: Client) -> list[dict[str, Any]]:
    return [each for each in kubectl.items(CORE, "events") if each["reason"] == "AnotherOperatorWorks"]


def test_the_first_operator_works_and_the_second_waits_and_says_so(
    api: ApiServerThread, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    kubectl = Client(api.url)
    first, second = make("first"), make("second")
    first.works()
    assert LLAMA in first.woken
    with caplog.at_level(logging.WARNING):
        assert not second.leases.admits(LLAMA)
        event = until(lambda: complaints(kubectl))[0]
    assert event["involvedObject"]["name"] == "kvtier-tiers"
    for said in (event["message"], caplog.text):
        assert "second does not work on the tiers of namespace default: first does" in said
    assert (first.leases.counts(), second.leases.counts()) == ((1, 0), (0, 1))
    assert [office.leases.may_write(NAMESPACE) for office in (first, second)] == [True, False]


def test_who_waits_is_told_of_its_tiers_when_the_other_one_goes(make: Make) -> None:
    first, second = make("first"), make("second")
    first.works()
    for name in (LLAMA, QWEN):
        assert not second.leases.admits(name)
    first.leases.close(timeout=60)
    until(lambda: set(second.woken) == {LLAMA, QWEN})
    assert second.leases.admits(LLAMA)


def test_the_lease_goes_with_the_last_tier_of_its_namespace(api: ApiServerThread, make: Make) -> None:
    first, second = make("first", seconds=6.0), make("second", seconds=6.0)
    first.works()
    first.works(QWEN)
    second.leases.admits(LLAMA)
    first.leases.forget(LLAMA)
    first.leases.forget(QWEN)
    until(lambda: holder(Client(api.url)) == "second")
    assert first.leases.counts() == (0, 0)


def test_the_next_leader_of_an_installation_goes_on_without_a_wait(api: ApiServerThread, make: Make) -> None:
    first = make("kvtier-system/kvtier-operator", is_kept=True, seconds=300.0)
    first.works()
    first.leases.close(timeout=60)
    assert holder(Client(api.url)) == "kvtier-system/kvtier-operator"
    make("kvtier-system/kvtier-operator", is_kept=True, seconds=300.0).works()


def test_operators_of_different_classes_work_side_by_side(api: ApiServerThread, make: Make) -> None:
    make("first").works()
    make("second", operator_class="canary").works(QWEN)
    assert lease_name("canary") == "kvtier-tiers.canary"
    assert [holder(Client(api.url), name) for name in ("kvtier-tiers", "kvtier-tiers.canary")] == ["first", "second"]


def test_an_operator_that_was_stopped_for_longer_than_its_lease_writes_nothing(make: Make) -> None:
    clock = Clock()
    first = make("first", clock=clock, seconds=300.0)
    first.leases.admits(LLAMA)
    until(lambda: first.leases.may_write(NAMESPACE))
    clock.seconds = 201
    assert not first.leases.may_write(NAMESPACE)


def test_who_does_not_lead_its_installation_does_not_campaign(api: ApiServerThread, make: Make) -> None:
    idle = make("first", may_campaign=lambda: False)
    idle.leases.admits(LLAMA)
    make("second").works()
    assert not idle.leases.may_write(NAMESPACE)
    assert holder(Client(api.url)) == "second"


@pytest.fixture
def spawn(api: ApiServerThread, tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Start operators as a chart and a laptop do."""
    processes: list[subprocess.Popen[bytes]] = []
    environment = {**os.environ, "KUBECONFIG": str(api.write_kubeconfig(tmp_path / "kubeconfig"))}

    def start(*arguments: str, **settings: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "kvtier_cli", "run", *arguments]
        with (tmp_path / f"log-{len(processes)}").open("wb") as log:
            processes.append(
                subprocess.Popen(
                    command, env={**environment, "KVTIER_LEASE_SECONDS": "8", **settings}, stdout=log, stderr=log
                )
            )
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.wait()


def test_two_operators_do_not_fight_over_a_janitor_and_the_second_follows_the_first(
    api: ApiServerThread, spawn: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    """A chart for the whole cluster, and a laptop for one namespace, which would render another image."""
    kubectl = Client(api.url)
    chart = spawn("-A", "--leader-elect", KVTIER_JANITOR_IMAGE="janitor:chart")
    manifest = tier()
    manifest["metadata"]["namespace"] = NAMESPACE
    kubectl.apply_tier(manifest)
    until(lambda: kubectl.get(APPS, "deployments", "llama-janitor"), seconds=SLOW)
    spawn("-n", NAMESPACE, KVTIER_JANITOR_IMAGE="janitor:laptop")
    event = until(lambda: complaints(kubectl), seconds=SLOW)[0]
    assert "default/kvtier-operator does, which holds the Lease kvtier-tiers" in event["message"]
    until(lambda: "It waits until that one stops" in (tmp_path / "log-1").read_text(), seconds=SLOW)
    kubectl.merge(TIERS, "kvcachetiers", "llama", {"spec": {"replicas": 3}})
    until(lambda: (kubectl.get(APPS, "deployments", "llama-engine") or {})["spec"]["replicas"] == 3, seconds=SLOW)
    janitor = kubectl.get(APPS, "deployments", "llama-janitor") or {}
    assert (janitor["metadata"]["generation"], image(janitor)) == (1, "janitor:chart")
    chart.send_signal(signal.SIGKILL)
    until(lambda: image(kubectl.get(APPS, "deployments", "llama-janitor") or {}) == "janitor:laptop", seconds=SLOW)
    assert (kubectl.get(APPS, "deployments", "llama-janitor") or {})["metadata"]["generation"] == 2


def image(deployment: dict[str, Any]) -> str:
    return str(deployment["spec"]["template"]["spec"]["containers"][0]["image"])
