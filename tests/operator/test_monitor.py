# SPDX-License-Identifier: Apache-2.0
"""The proofs of a tier: asked in the background, told once, kept over a restart of the operator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from asking_pods import Clock, ScriptedEngine, SharedVolume, nothing, on_loop
from healthy_tier import HEALTHY, LATER, NOON, READY_POD, VIEW, varied
from tiers import tier
from waiting import until

from kvtier_operator import status
from kvtier_operator.api import parse
from kvtier_operator.conditions import Observation
from kvtier_operator.names import TierName
from kvtier_operator.observe.canary import Chunk, Subjects
from kvtier_operator.observe.engine_client import EngineLocked, KeySource
from kvtier_operator.observe.findings import CanaryOutcome, CanaryResult, EffectOutcome, EffectResult, Findings
from kvtier_operator.observe.http_client import HttpClient
from kvtier_operator.observe.monitor import Monitor
from kvtier_operator.observe.targets import EngineTarget, NoCanary, ObservationPlan, make_observation_plan
from kvtier_operator.snapshot import EngineReport

TABLES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())

TIER = TierName(namespace="serving", name="llama")
TARGETS = (EngineTarget(pod="a", address="10.0.0.1"), EngineTarget(pod="b", address="10.0.0.2"))
ASK = ObservationPlan(rollout="r1", targets=TARGETS, refusal=None, interval_seconds=3600, min_reuse=1, chunk=Chunk())


class Bench:
    """Proofs over two scripted engines, in a time of its own."""

    def __init__(self, asker: HttpClient) -> None:
        self.asker, self.clock = asker, Clock()
        volume = SharedVolume()
        self.engines = {target.address: ScriptedEngine(volume) for target in TARGETS}
        self.woken: list[TierName] = []
        self.keys: list[str] = []
        self.secrets: dict[str, str] = {}
        self.monitor = Monitor(
            asker,
            self.woken.append,
            connect=self.connect,
            read_key=self.read_key,
            now=self.clock.now,
            pause=self.clock.pause,
            delay_seconds=0,
        )

    def connect(self, tier: TierName, address: str, key: str) -> ScriptedEngine:
        assert tier == TIER
        self.keys.append(key)
        return self.engines[address]

    def read_key(self, tier: TierName, source: KeySource) -> str:
        assert tier == TIER
        if source.secret not in self.secrets:
            raise EngineLocked(f"the operator may not read Secret {source.secret}")
        return self.secrets[source.secret]

    def look(self, ask: ObservationPlan = ASK, proven: str | None = None) -> Findings:
        return self.monitor.findings(TIER, ask, proven_rollout=proven)

    def canary(self, ask: ObservationPlan = ASK) -> CanaryResult:
        found = until(lambda: self.look(ask).canary)
        on_loop(self.asker, nothing)  # which wakes the tier once that can be seen
        return found

    def asked(self) -> int:
        return sum(len(engine.asked) for engine in self.engines.values())


@pytest.fixture
def made(asker: HttpClient) -> Bench:
    return Bench(asker)


def test_each_rollout_is_proven_once_and_wakes_its_tier_once(made: Bench) -> None:
    for number, ask in enumerate((ASK, replace(ASK, rollout="r2")), 1):
        assert made.look(ask).canary is None
        assert made.canary(ask).outcome is CanaryOutcome.LOADED
        asked = made.asked()
        for _ in range(50):
            made.look(ask)
        assert made.asked() == asked == 2 * number
        assert made.woken == [TIER] * number


def test_engines_that_do_not_answer_are_told_once(made: Bench) -> None:
    for engine in made.engines.values():
        engine.failure = "answers /v1/models with 401"
    assert made.canary().outcome is CanaryOutcome.UNANSWERED
    assert made.woken == [TIER]


def test_what_a_status_speaks_of_already_is_not_proven_at_once_again(made: Bench) -> None:
    made.look(proven="r1")
    made.look(replace(ASK, targets=TARGETS[:1]), proven="r1")
    on_loop(made.asker, nothing)
    assert made.asked() == 0


@pytest.mark.parametrize("refusal", list(NoCanary))
def test_a_refusal_sends_nothing(made: Bench, refusal: NoCanary) -> None:
    made.look(replace(ASK, refusal=refusal))
    until(lambda: made.engines["10.0.0.1"].read)
    assert made.asked() == 0


def test_engines_are_asked_with_their_key_for_metrics_without_and_not_at_all_if_it_is_unread(made: Bench) -> None:
    locked = replace(ASK, key=KeySource(secret="s", entry="k"))
    found = made.canary(locked)
    assert (found.outcome, found.problem) == (CanaryOutcome.LOCKED, "the operator may not read Secret s")
    assert made.asked() == 0
    made.secrets["s"] = "sesame"
    assert made.canary(replace(locked, rollout="r2")).outcome is CanaryOutcome.LOADED
    assert made.keys.count("sesame") == 2
    assert set(made.keys) == {"", "sesame"}


def test_a_tier_that_is_gone_is_forgotten(made: Bench) -> None:
    made.canary()
    made.monitor.forget(TIER)
    assert made.look(replace(ASK, targets=())).canary is None


def snapshot(*addresses: str, **changes: Any) -> Any:
    pods = tuple(
        replace(READY_POD, name=f"p{number}", address=address, template_hash="h")
        for number, address in enumerate(addresses)
    )
    return replace(HEALTHY, pods=pods, **changes)


@pytest.mark.parametrize(("body", "pods", "report", "refusal"), TABLES["sent"])
def test_a_canary_is_sent_only_where_it_can_prove_something(
    body: Mapping[str, Any], pods: list[str], report: Mapping[str, int] | None, refusal: str | None
) -> None:
    seen = snapshot(*pods)
    told = None if report is None else EngineReport(**report)
    seen = replace(seen, pods=tuple(replace(pod, report=told) for pod in seen.pods))
    ask = make_observation_plan(parse(tier(**body)), seen, generation="g", chunk=Chunk())
    assert ask.refusal is (None if refusal is None else NoCanary[refusal])
    assert len(ask.targets) == len(pods)


@pytest.mark.parametrize(("body", "adapters", "has_pictures"), TABLES["subjects"])
def test_a_canary_covers_adapters_and_pictures_of_the_tier(
    body: Mapping[str, Any], adapters: list[str], has_pictures: bool
) -> None:
    plan = make_observation_plan(parse(tier(**body)), snapshot("1.1.1.1"), generation="g", chunk=Chunk())
    assert plan.subjects == Subjects(adapters=tuple(adapters), has_pictures=has_pictures)


def test_scaling_keeps_the_proof_and_other_blocks_or_other_pods_void_it() -> None:
    def rollout(*addresses: str, generation: str = "g", template: str = "h") -> str:
        found = snapshot(*addresses)
        pods = tuple(replace(pod, template_hash=template) for pod in found.pods)
        return make_observation_plan(
            parse(tier()), replace(found, pods=pods), generation=generation, chunk=Chunk()
        ).rollout

    two = rollout("1.1.1.1", "1.1.1.2")
    assert two == rollout("1.1.1.1", "1.1.1.2", "1.1.1.3")
    assert len({two, rollout("1.1.1.1", generation="x"), rollout("1.1.1.1", template="y")}) == 3


LOADED = CanaryResult(outcome=CanaryOutcome.LOADED, first="a", second="b", prompt_tokens=257, cached_tokens=256)


def report(
    previous: Mapping[str, Any] | None = None, *, ask: ObservationPlan | None = ASK, **found: Any
) -> dict[str, Any]:
    observation = None if ask is None else Observation(plan=ask, findings=Findings(**found))
    return status.report(varied(VIEW, observation=observation), previous or {}, now=NOON)


def condition(found: Mapping[str, Any], kind: str) -> dict[str, Any]:
    return next(each for each in found["conditions"] if each["type"] == kind)


@pytest.mark.parametrize(("outcome", "verdict", "reason"), TABLES["outcomes"])
def test_the_canary_is_told_and_a_disproof_takes_ready_away(outcome: str, verdict: str, reason: str) -> None:
    found = report(canary=replace(LOADED, outcome=CanaryOutcome[outcome], problem="pod a answers 401"))
    told = condition(found, "SharedCacheVerified")
    assert (told["status"], told["reason"]) == (verdict, reason)
    assert told["message"]
    assert condition(found, "Ready")["status"] == ("False" if verdict == "False" else "True")
    assert condition(found, "Stalled")["status"] == ("True" if verdict == "False" else "False")
    assert condition(found, "Reconciling")["status"] == "False"


def test_what_a_canary_covered_and_what_it_left_open_is_told() -> None:
    found = replace(LOADED, covered=("the adapter sql",), open=("a picture",))
    told = condition(report(canary=found), "SharedCacheVerified")["message"]
    assert told.endswith("from the volume; the same with the adapter sql; not proven with a picture")
    missed = CanaryResult(
        outcome=CanaryOutcome.MISSED, first="a", second="b", prompt_tokens=257, subject="the adapter sql"
    )
    told = condition(report(canary=missed), "SharedCacheVerified")["message"]
    assert "pod a had computed with the adapter sql, pod b found nothing" in told


@pytest.mark.parametrize("refusal", sorted(set(NoCanary) - {NoCanary.ROLLING}, key=lambda each: each.name))
def test_what_cannot_be_proven_is_unknown_and_says_why(refusal: NoCanary) -> None:
    told = condition(report(ask=replace(ASK, refusal=refusal), canary=None), "SharedCacheVerified")
    assert told["status"] == "Unknown"
    assert told["message"]


def test_what_was_proven_outlives_the_operator_and_what_cannot_be_looked_at_but_not_its_rollout() -> None:
    before = report(canary=LOADED)
    assert before["proof"] == {"rollout": "r1"}
    after = status.report(varied(VIEW, observation=Observation(plan=ASK, findings=Findings())), before, now=LATER)
    assert status.changes(before, after) == {}
    before = report(canary=LOADED, effect=EffectResult(outcome=EffectOutcome.PAYS))
    unseen = report(before, ask=None)
    for kind in ("SharedCacheVerified", "DiskEffective"):
        assert condition(unseen, kind) == condition(before, kind)
    rolled = report(before, ask=replace(ASK, rollout="r2"))
    assert condition(rolled, "SharedCacheVerified")["reason"] == "CanaryPending"
    assert "proof" not in rolled


@pytest.mark.parametrize(("outcome", "verdict", "reason"), TABLES["effects"])
def test_the_effect_is_advice_and_never_takes_ready_away(outcome: str, verdict: str, reason: str) -> None:
    effect = EffectResult(outcome=EffectOutcome[outcome], loaded_tokens=51_234, load_rate=41_000, compute_rate=9_600)
    found = report(canary=LOADED, effect=effect)
    told = condition(found, "DiskEffective")
    assert (told["status"], told["reason"]) == (verdict, reason)
    assert condition(found, "Ready")["status"] == "True"
    if verdict != "Unknown":
        assert "it gives an engine 40,000 tokens a second, which computes 10,000" in told["message"]
