# SPDX-License-Identifier: Apache-2.0
"""What pods say reaches the status, is asked of the right ones, and never holds up a pass."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from asking_pods import ScriptedAsker
from fake_cluster import FakeCluster, condition, status
from tiers import DEPLOYMENT, JANITOR, JANITOR_SERVICE, LEASE, NOON, RUNNING, TIER, TIER_KEY, made_by, pod, tier
from waiting import until

from kvtier_connector.contract.usage import GenerationUsage, Usage, encode
from kvtier_operator.names import TierName
from kvtier_operator.observe.http_client import Address
from kvtier_operator.observe.poller import Poller
from kvtier_operator.reconcile import Inputs, reconcile

USAGE = Usage(
    tier="serving/llama",
    is_active=True,
    is_counted=True,
    used_bytes=1 << 40,
    generations=[GenerationUsage(digest="aaaa", used_bytes=1 << 40, created=86400.0)],
)


class Pods:
    """Answers for the pods of a tier."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.usage = USAGE

    def __call__(self, address: Address) -> bytes:
        self.asked.append(str(address))
        if address.port == 9400:
            return encode(self.usage).encode()
        if address.host == "10.1.0.2":
            return b'vllm:kvtier_disk_refused{engine="0",field="dtype"} 1.0\n'
        return b""


class Rig:
    def __init__(self) -> None:
        self.pods, self.woken, self.seconds = Pods(), list[TierName](), 0.0
        self.ask_with(self.pods)
        self.cluster = FakeCluster(tier())
        self.run()
        self.cluster.edit(JANITOR_SERVICE, {"spec": {"clusterIP": "10.0.0.9"}})
        template = self.cluster.look(DEPLOYMENT)["spec"]["template"]
        for name, ip in (("a", "10.1.0.1"), ("b", "10.1.0.2")):
            self.cluster.put(pod(name, template, **RUNNING, podIP=ip))
        starting = {**RUNNING, "conditions": [{"type": "Ready", "status": "False"}], "podIP": "10.1.0.3"}
        self.cluster.put(pod("c", template, **starting))
        self.cluster.put(pod("j", self.cluster.look(JANITOR)["spec"]["template"], **RUNNING, podIP="10.1.0.4"))

    def ask_with(self, ask: Callable[[Address], bytes]) -> None:
        self.asker = ScriptedAsker(ask)
        self.asker.start()
        self.probes: Poller[TierName] = Poller(
            self.asker, self.woken.append, now=lambda: self.seconds, interval_seconds=15
        )

    def run(self) -> None:
        inputs = Inputs(connector_image="connector:test", clock=lambda: NOON, poller=self.probes)
        assert reconcile(self.cluster, TIER, inputs).failure is None

    def answers(self) -> None:
        """Ask all pods, and reconcile once they have answered."""
        self.run()
        until(lambda: len(self.woken) == 3)
        self.run()


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    assert made.asker.close(timeout=60)


def test_what_pods_say_reaches_the_status(rig: Rig) -> None:
    rig.run()
    assert condition(rig.cluster, "DiskWithinBudget")["reason"] == "JanitorStarting"
    rig.answers()
    assert set(rig.woken) == {TIER}
    assert condition(rig.cluster, "DiskWithinBudget")["status"] == "True"
    assert status(rig.cluster)["generations"][0]["digest"] == "aaaa"
    assert status(rig.cluster)["tiers"][1]["usedBytes"] == 1 << 40
    assert condition(rig.cluster, "DiskHealthy")["reason"] == "Stranger"
    assert "pod b serves" in condition(rig.cluster, "DiskHealthy")["message"]
    # The janitor through its Service, and only engines that serve.
    engines = {"http://10.1.0.1:8000/metrics", "http://10.1.0.2:8000/metrics"}
    assert set(rig.pods.asked) == {"http://10.0.0.9:9400/usage", *engines}


def test_an_idle_tier_is_not_written(rig: Rig) -> None:
    rig.answers()
    version = rig.cluster.look(TIER_KEY)["metadata"]["resourceVersion"]
    rig.pods.usage = Usage(**{**vars(USAGE), "used_bytes": (1 << 40) + 4096, "evicted_blocks": 7})
    rig.seconds = 100
    rig.run()
    until(lambda: len(rig.pods.asked) == 6)
    rig.run()
    assert len(rig.woken) == 3
    assert rig.cluster.look(TIER_KEY)["metadata"]["resourceVersion"] == version


def test_the_lease_that_a_janitor_waits_for_is_made_anew_where_it_is_gone(rig: Rig) -> None:
    rig.pods.usage = Usage(tier="serving/llama", is_active=False, is_counted=False)
    rig.answers()
    assert condition(rig.cluster, "DiskWithinBudget")["reason"] == "JanitorWaiting"
    before = rig.cluster.look(LEASE)
    rig.run()
    assert rig.cluster.look(LEASE) == before
    rig.cluster.remove(LEASE)
    rig.run()
    assert rig.cluster.look(LEASE) is not None


def test_pods_that_only_carry_the_labels_are_neither_counted_nor_asked(rig: Rig) -> None:
    template = rig.cluster.look(DEPLOYMENT)["spec"]["template"]
    bare = pod("bare", template, **RUNNING, podIP="10.1.0.8")
    del bare["metadata"]["ownerReferences"]
    copied = pod("copied", template, **RUNNING, podIP="10.1.0.9")
    copied["metadata"]["ownerReferences"] = [made_by("llama-engine-copy-5f")]
    with_other_seed = copied["spec"]["containers"][0]["env"]
    with_other_seed[:] = [{**each, "value": "7"} for each in with_other_seed]
    for stranger in (bare, copied):
        rig.cluster.put(stranger)
    rig.answers()
    assert not [url for url in rig.pods.asked if "10.1.0.8" in url or "10.1.0.9" in url]
    assert condition(rig.cluster, "HashSeedConsistent")["status"] == "True"


def test_a_pod_of_another_rollout_of_the_same_deployment_is_counted(rig: Rig) -> None:
    template = rig.cluster.look(DEPLOYMENT)["spec"]["template"]
    before = pod("before", {**template, "of": "yesterday"}, **RUNNING, podIP="10.1.0.8")
    before["spec"]["containers"][0]["env"] = [{"name": "PYTHONHASHSEED", "value": "7"}]
    rig.cluster.put(before)
    rig.run()
    assert condition(rig.cluster, "HashSeedConsistent")["reason"] == "SeedsDiffer"


@pytest.mark.parametrize("full", [False, True], ids=["healthy", "over-budget"])
def test_a_new_operator_changes_nothing_and_tells_no_news_until_it_was_answered(rig: Rig, full: bool) -> None:
    rig.cluster.edit(TIER_KEY, {"spec": {"disk": {"budget": {"maxBytes": "100Gi" if full else "1500Gi"}}}})
    rig.answers()
    told = status(rig.cluster)
    assert condition(rig.cluster, "DiskWithinBudget")["status"] == ("False" if full else "True")
    assert condition(rig.cluster, "DiskHealthy")["reason"] == "Stranger"
    events = len(rig.cluster.posted)
    with restarted(rig) as others:
        rig.run()
        assert status(rig.cluster) == told
        others.set()
        until(lambda: len(rig.woken) == 6)
        rig.run()
    assert status(rig.cluster) == told
    assert len(rig.cluster.posted) == events


def test_what_the_first_answer_says_after_a_restart_is_told(rig: Rig) -> None:
    rig.answers()
    assert condition(rig.cluster, "DiskWithinBudget")["status"] == "True"
    rig.pods.usage = Usage(**{**vars(USAGE), "store_pause": "the volume is full"})
    with restarted(rig) as others:
        rig.run()
        assert condition(rig.cluster, "DiskWithinBudget")["status"] == "True"
        others.set()
        until(lambda: len(rig.woken) == 6)
        rig.run()
    assert condition(rig.cluster, "DiskWithinBudget")["reason"] == "StoresPaused"


def test_a_spec_that_changed_is_not_judged_by_what_was_told_of_another(rig: Rig) -> None:
    rig.answers()
    with restarted(rig):
        rig.cluster.edit(TIER_KEY, {"spec": {"replicas": 3}})
        rig.run()
        assert condition(rig.cluster, "DiskWithinBudget")["reason"] == "JanitorStarting"


@contextmanager
def restarted(rig: Rig) -> Iterator[threading.Event]:
    """Let another operator take over, whose questions are answered when the event is set."""
    may_answer, answers = threading.Event(), rig.pods
    assert rig.asker.close(timeout=60)

    def ask(address: Address) -> bytes:
        may_answer.wait()
        return answers(address)

    rig.ask_with(ask)
    try:
        yield may_answer
    finally:
        may_answer.set()
