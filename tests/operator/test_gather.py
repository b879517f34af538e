# SPDX-License-Identifier: Apache-2.0
"""What pods say reaches the status with news only, is asked of the right ones, and never holds up a pass."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from asking_pods import ScriptedAsker
from fake_cluster import FakeCluster, condition, status
from hypothesis import given
from hypothesis import strategies as st
from tiers import DEPLOYMENT, JANITOR, JANITOR_SERVICE, LEASE, NOON, RUNNING, TIER, TIER_KEY, made_by, pod, tier
from waiting import until

from kvtier_connector.contract.usage import GenerationUsage, TenantUsage, Usage, encode
from kvtier_operator.names import TierName
from kvtier_operator.observe import findings, pod_reports
from kvtier_operator.observe.findings import CounterSample, EffectOutcome
from kvtier_operator.observe.http_client import Address
from kvtier_operator.observe.pod_reports import EngineCounters
from kvtier_operator.observe.poller import Poller
from kvtier_operator.reconcile import Inputs, reconcile
from kvtier_operator.snapshot import EngineReport

TABLES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())

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


@pytest.mark.parametrize("news", ["none", "none of one that is full", "the volume is full"])
def test_a_new_operator_changes_nothing_until_it_was_answered_and_tells_what_is_new_then(rig: Rig, news: str) -> None:
    is_full = "one that is full" in news
    rig.cluster.edit(TIER_KEY, {"spec": {"disk": {"budget": {"maxBytes": "100Gi" if is_full else "1500Gi"}}}})
    rig.answers()
    told = status(rig.cluster)
    assert condition(rig.cluster, "DiskWithinBudget")["status"] == ("False" if is_full else "True")
    assert condition(rig.cluster, "DiskHealthy")["reason"] == "Stranger"
    events = len(rig.cluster.posted)
    rig.pods.usage = Usage(**{**vars(USAGE), "store_pause": "" if "none" in news else news})
    with restarted(rig) as others:
        rig.run()
        assert status(rig.cluster) == told
        others.set()
        until(lambda: len(rig.woken) == 6)
        rig.run()
    if "none" in news:
        assert (status(rig.cluster), len(rig.cluster.posted)) == (told, events)
    else:
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


HOUR = 3600.0


def read(**changes: Any) -> Usage:
    return pod_reports.read_usage(encode(Usage(**{"tier": "ns/llama", **changes})).encode())


@given(st.integers(min_value=0, max_value=2**63))
def test_a_rounded_number_is_less_than_a_percent_off_and_stays_as_it_is(number: int) -> None:
    found = pod_reports.rounded(number)
    assert 0 <= number - found <= number / 100
    assert pod_reports.rounded(found) == found


def test_small_changes_are_not_told_nor_the_names_of_tenants_nor_all_of_long_problems() -> None:
    def told(extra: int) -> Usage:
        generation = GenerationUsage(digest="a", used_bytes=(1 << 40) + extra, blocks=1000, last_used=10 * HOUR + extra)
        return read(
            used_bytes=(1 << 40) + extra, oldest=9 * HOUR + extra, evicted_blocks=extra, generations=[generation]
        )

    assert told(0) == told(1000)
    assert told(0) != told(1 << 34)
    pair = [GenerationUsage(digest="b"), GenerationUsage(digest="a")]
    problems = [f"{number}" + "x" * 5000 for number in range(9)]
    found = read(generations=pair, tenants=[TenantUsage(tenant="customer")], problems=problems)
    assert [each.digest for each in found.generations] == ["a", "b"]
    assert found.tenants == ()
    assert [len(problem) for problem in found.problems] == [200] * 3


@pytest.mark.parametrize("body", [b"", b"<html>", b"{}", b"\xff"])
def test_what_is_no_report_is_refused(body: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  of whatever the reader stumbles over
        pod_reports.read_usage(body)


METRICS = TABLES["metrics"].encode()


ACTIVE = b'vllm:kvtier_disk_active{engine="0",model_name="m"} %d.0\n'
MODE = b'vllm:kvtier_disk_mode{engine="0",model_name="m"} %d.0\n'


RELEASE = b'vllm:kvtier_vllm_release{engine="0",version="0.40.0",support="%s"} 1.0\n'
SUPPORTED = "and this release of kvtier supports 0.32.0 and 0.33.0: set spec.engine.image to one of these"
NOT_IMPORTED = "the connector cannot be imported with this build of vLLM 0.33.0: see the engine's log"
SIZES = b"""\
vllm:kvtier_chunk_bytes{engine="0",model_name="m"} 1.835008e+06
vllm:kvtier_token_bytes{engine="0",model_name="m"} %s
"""
KEY_MISSING = METRICS + b'vllm:kvtier_disk_key_missing{engine="0",model_name="m"} %s\n'
REFUSED = {"refused": ("dtype", "model_name")}
CHUNK = {"chunk_bytes": 1835008}


@pytest.mark.parametrize(
    ("body", "report"),
    [
        *((body, {}) for body in (b"", b"\xff\xfe", b"vllm:kvtier_disk_refused{} 1.0\n", b"vllm:other 1\n")),
        (METRICS, REFUSED),
        *((KEY_MISSING % value, {**REFUSED, "is_key_missing": True}) for value in (b"1.0", b"1")),
        *((KEY_MISSING % value, REFUSED) for value in (b"0.0", b"10.0")),
        (ACTIVE % 1 + MODE % 0, {}),
        *((ACTIVE % 0 + MODE % mode, {"is_detached": True}) for mode in (0, 1)),
        # One of two engines, one that was told to bypass, and one that is refused.
        (ACTIVE % 1 + (ACTIVE % 0).replace(b'"0"', b'"1"') + MODE % 0, {"is_detached": True}),
        (ACTIVE % 0 + MODE % 2, {}),
        (ACTIVE % 0 + METRICS, REFUSED),
        (RELEASE % b"supported", {}),
        (RELEASE % b"unsupported", {"unsupported": f"its vLLM is 0.40.0, {SUPPORTED}"}),
        ((RELEASE % b"unsupported").replace(b"0.40", b"0.33"), {"unsupported": NOT_IMPORTED}),
        (SIZES % b"14336.0", {**CHUNK, "token_bytes": 14336}),
        *((SIZES % token, CHUNK) for token in (b"1e+999", b"nan", b"-1.0")),
    ],
)
def test_metrics_of_an_engine_say_how_it_uses_the_volume(body: bytes, report: dict[str, Any]) -> None:
    assert pod_reports.read_metrics(body) == EngineReport(**report)


COUNTERS = TABLES["counters"]


def test_the_numbers_that_matter_are_read_and_the_rest_is_left() -> None:
    assert pod_reports.read_counters(COUNTERS) == EngineCounters(**TABLES["counted"])
    assert pod_reports.read_counters("") == EngineCounters()


def samples(*readings: EngineCounters, step: float = 600.0) -> tuple[CounterSample, ...]:
    return tuple(CounterSample(at=number * step, readings={"a": reading}) for number, reading in enumerate(readings))


FAST = {"load_rate": 40_000.0, "compute_rate": 10_000.0}


@pytest.mark.parametrize(
    ("after", "outcome"), [(after, EffectOutcome[outcome]) for after, outcome in TABLES["effects"]]
)
def test_the_volume_is_of_use_where_most_hits_are_read(after: dict[str, float], outcome: EffectOutcome) -> None:
    found = findings.judge_effect(samples(EngineCounters(), EngineCounters(**after)))
    assert (found.outcome, found.loaded_tokens) == (outcome, after.get("disk_tokens", 0))
    assert (found.load_rate, found.compute_rate) == (after.get("load_rate", 0), after.get("compute_rate", 0))


def test_the_last_hour_counts_of_an_engine_from_its_start() -> None:
    idle = EngineCounters(disk_tokens=7, **FAST)
    assert findings.judge_effect(samples(idle, idle)) is None
    found = findings.judge_effect(samples(*[idle] * 7))
    assert found.outcome is EffectOutcome.NO_HITS
    found = findings.judge_effect(
        samples(*(EngineCounters(disk_tokens=tokens, **FAST) for tokens in (90_000, 2_000, 3_000)))
    )
    assert found.loaded_tokens == 3_000
    kept: tuple[CounterSample, ...] = ()
    for number in range(20):
        kept = findings.keep_sample(kept, CounterSample(at=number * 600.0, readings={}))
    assert len(kept) == 7
    assert kept[-1].at - kept[0].at == 3600


def test_numbers_that_move_a_little_are_no_news() -> None:
    first = findings.judge_effect(samples(EngineCounters(**FAST), EngineCounters(disk_tokens=50_000, **FAST)))
    second = findings.judge_effect(
        samples(EngineCounters(**FAST), EngineCounters(disk_tokens=61_000, load_rate=43_000, compute_rate=9_500))
    )
    assert first.verdict == second.verdict
