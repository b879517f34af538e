# SPDX-License-Identifier: Apache-2.0
"""What a tier says about itself, for every situation that a user meets, and which cause an engine's last words have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from healthy_tier import (
    HEALTHY,
    LATER,
    NOON,
    READY,
    READY_POD,
    REF,
    UNREADY_POD,
    USAGE,
    VIEW,
    changed,
    check_problem,
    check_verdict,
    conditions,
    progress,
    varied,
    with_claim,
    with_container,
    with_engines,
    with_pod,
)
from tiers import tier

from kvtier_operator import names, status
from kvtier_operator.api import parse
from kvtier_operator.api.reasons import CONDITIONS, Reason
from kvtier_operator.conditions import Progress
from kvtier_operator.errors import ClusterForbidden, ClusterUnavailable, SpecInvalid
from kvtier_operator.parts import crash_causes
from kvtier_operator.plan import Refusal
from kvtier_operator.snapshot import ContainerStatus, Engines, Live, LiveJanitor, Pod

TABLES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())


def with_seeds(**seeds: str | None) -> Progress:
    """Return the view of a tier whose engines were given these hash seeds."""
    return changed(pods=tuple(replace(READY_POD, name=name, hash_seed=seed) for name, seed in seeds.items()))


def spec_view(view: Progress = VIEW, **spec: Any) -> Progress:
    return varied(view, spec=parse(tier(**spec)))


def with_janitor(usage: Any = None, **changes: Any) -> Progress:
    return changed(janitor=LiveJanitor(usage=usage, **changes))


def janitor_pod(**container: Any) -> Pod:
    made = ContainerStatus(name="janitor", image="ghcr.io/kvtier/janitor:9", **container)
    return replace(UNREADY_POD, name="llama-janitor-0", containers=(made,))


def crashed_janitor(**container: Any) -> Progress:
    return with_janitor(pods=(janitor_pod(**container),))


VIEWS: dict[str, Callable[..., Progress]] = {
    "claim": with_claim,
    "container": with_container,
    "crashed janitor": crashed_janitor,
    "janitor": with_janitor,
    "no claim": partial(changed, claim=None),
    "plan": progress,
    "pod": with_pod,
    "ready engines": partial(with_engines, READY),
    "seeds": with_seeds,
    "spec": spec_view,
    "starting engines": with_engines,
}


def seen(given: dict[str, Any]) -> Progress:
    """Return the view that a table names, with what differs in it."""
    ((kind, changes),) = given.items()
    return VIEWS[kind](**changes)


def test_a_healthy_tier_is_ready_and_nothing_is_left_to_do() -> None:
    found = conditions(VIEW)
    no = ("ClaimShared", "Paused", "Reconciling", "Stalled")
    unknown = ("StorageChecked", "StoreReady", "SharedCacheVerified", "DiskEffective")
    told = {**dict.fromkeys(CONDITIONS, "True"), **dict.fromkeys(no, "False"), **dict.fromkeys(unknown, "Unknown")}
    assert {kind: each["status"] for kind, each in found.items()} == told
    assert {each["observedGeneration"] for each in found.values()} == {3}


@pytest.mark.parametrize(
    ("condition", "view", "reason", "words"),
    [
        (kind, seen(given), Reason(reason), words)
        for kind, rows in TABLES["problems"].items()
        for given, reason, words in rows
    ],
)
def test_a_problem_shows_in_its_condition_and_ready(condition: str, view: Progress, reason: Reason, words: str) -> None:
    check_problem(view, condition, reason, words)


RECOVERED = replace(READY_POD, containers=(ContainerStatus(name="engine", image="v", restarts=3, exit_code=1),))
LEAVING = replace(UNREADY_POD, is_terminating=True, hash_seed="7")


@pytest.mark.parametrize("pods", [(RECOVERED,), (READY_POD, LEAVING)], ids=["a crash that is over", "a pod that goes"])
def test_what_is_over_is_no_problem(pods: tuple[Pod, ...]) -> None:
    assert conditions(changed(pods=pods))["Ready"]["status"] == "True"


PASSING = {Reason.CLAIM_MISSING}
"""Refusals that end without an edit of the tier."""


@pytest.mark.parametrize("reason", [Reason(each) for each in TABLES["refusals"]])
def test_every_refusal_has_a_reason_of_its_own_and_stalls_only_if_the_tier_must_change(reason: Reason) -> None:
    found = conditions(varied(VIEW, refusal=Refusal(reason, "do this")))
    assert found["Ready"]["reason"] == reason.value
    told, silent = ("Reconciling", "Stalled") if reason in PASSING else ("Stalled", "Reconciling")
    assert (found[told]["status"], found[told]["message"]) == ("True", "do this")
    assert found[silent]["status"] == "False"


def test_a_failure_that_passes_reconciles_and_one_that_does_not_stalls() -> None:
    passing = conditions(varied(VIEW, failure=ClusterUnavailable("500")))
    lasting = conditions(varied(VIEW, failure=ClusterForbidden("403")))
    assert (passing["Reconciling"]["status"], passing["Stalled"]["status"]) == ("True", "False")
    assert (lasting["Reconciling"]["status"], lasting["Stalled"]["status"]) == ("False", "True")
    assert passing["Ready"]["reason"] == lasting["Ready"]["reason"] == "ApplyFailed"


def test_only_what_changed_is_written_and_a_time_moves_only_when_the_status_flips() -> None:
    first = status.report(with_pod(), {}, now=NOON)
    second = status.report(with_container(waiting_reason="CrashLoopBackOff", exit_code=1), first, now=LATER)
    times = [
        {each["type"]: each["lastTransitionTime"] for each in report["conditions"]}["Ready"]
        for report in (first, second, status.report(VIEW, second, now=LATER))
    ]
    assert times == [NOON, NOON, LATER]
    first = status.report(VIEW, {}, now=NOON)
    assert status.changes(first, status.report(VIEW, first, now=LATER)) == {}
    assert status.transitions(first, status.report(VIEW, first, now=LATER)) == []
    previous = {"replicas": 2, "old": 1, "sizing": {"shmBytes": 1, "other": 2}}
    wanted = {"replicas": 2, "sizing": {"shmBytes": 3}}
    assert status.changes(previous, wanted) == {"old": None, "sizing": {"other": None, "shmBytes": 3}}


def test_events_tell_transitions_once_and_only_problems_are_warnings() -> None:
    starting = status.report(with_pod(), {}, now=NOON)
    crashed = status.report(with_container(waiting_reason="CrashLoopBackOff", exit_code=1), starting, now=NOON)
    ready = status.report(VIEW, crashed, now=NOON)
    paused = status.report(varied(VIEW, spec=parse(tier(paused=True))), ready, now=NOON)
    steps = [({}, starting), (starting, crashed), (crashed, crashed), (crashed, ready), (ready, paused)]
    told = [[(each.level, each.reason) for each in status.transitions(before, after)] for before, after in steps]
    normal, warning = [("Normal", "EnginesStarting")], [("Warning", "EngineCrashed")]
    assert told == [normal, warning, [], [("Normal", "Ready")], [("Normal", "Paused")]]
    assert ("Warning", "Unavailable") in {(each.level, each.reason) for each in status.transitions(ready, crashed)}


def test_what_a_spec_that_cannot_be_read_does_not_tell_stays_as_it_was() -> None:
    before = status.report(VIEW, {}, now=NOON)
    after = status.report(INVALID, before, now=LATER)
    assert (after["sizing"], after["generation"]) == (before["sizing"], before["generation"])
    assert after["observedGeneration"] == 4
    assert told(INVALID, "Available", before)[:2] == ("True", "Serving")
    assert told(INVALID, "Available")[:2] == ("Unknown", "NotChecked")


GROWS = with_claim(capacity_bytes=1 << 40)
WAITS = with_claim(capacity_bytes=1 << 40, resizing="FileSystemResizePending: waiting for a pod")


@pytest.mark.parametrize(("view", "words"), [(GROWS, "from 1Ti to 2Ti"), (WAITS, "when a pod mounts it next")])
def test_a_claim_that_grows_is_bound_and_says_so(view: Progress, words: str) -> None:
    found = check_verdict(view, "VolumeBound", "True", "ClaimExpanding", words)
    assert (found["Ready"]["status"], found["Reconciling"]["status"]) == ("True", "False")


INVALID = Progress(generation=4, tier=REF, invalid=SpecInvalid("spec", "is wrong"))


def told(view: Progress, kind: str, previous: dict[str, Any] | None = None) -> tuple[str, str, str]:
    found = conditions(view, previous)[kind]
    return found["status"], found["reason"], found["message"]


@pytest.mark.parametrize(
    ("view", "verdict", "reason", "words"),
    [
        *((seen(given), *told) for given, *told in TABLES["available"]),
        (spec_view(changed(engines=Engines()), replicas=0), "False", "ScaledToZero", "is 0"),
    ],
)
def test_a_tier_is_available_while_one_engine_serves(view: Progress, verdict: str, reason: str, words: str) -> None:
    check_verdict(view, "Available", verdict, reason, words)


NEW_POD = replace(
    UNREADY_POD, name="llama-engine-2", containers=(ContainerStatus(name="engine", image="vllm", is_started=False),)
)
GROWING_ENGINES = replace(READY, replicas=3, updated=3)
GROWING = varied(changed(engines=GROWING_ENGINES, pods=(READY_POD, READY_POD, NEW_POD)), spec=parse(tier(replicas=3)))


def test_a_ready_tier_stays_ready_while_it_is_scaled_up() -> None:
    before = status.report(VIEW, {}, now=NOON)
    # The pods of a larger tier are there later.
    assert told(varied(VIEW, spec=parse(tier(replicas=3))), "Ready", before)[0] == "True"
    found = conditions(GROWING, before)
    assert (found["Ready"]["status"], found["Reconciling"]["status"]) == ("True", "False")
    assert (found["EnginesReady"]["status"], found["EnginesReady"]["reason"]) == ("False", "EnginesAdded")
    assert "2 of 3 engines are ready" in found["EnginesReady"]["message"]
    after = status.report(GROWING, before, now=LATER)
    assert conditions(GROWING, after)["Ready"]["status"] == "True"
    assert status.transitions(before, after) == []
    assert told(GROWING, "Ready")[:2] == ("False", "EnginesStarting"), "a new tier is ready when all its engines are"


@pytest.mark.parametrize(("made_by", "verdict"), [("c:2", "True"), ("", "False")], ids=["scaled", "edited"])
def test_a_change_that_nobody_has_seen_takes_ready_away_only_where_pods_change(made_by: str, verdict: str) -> None:
    before = status.report(VIEW, {}, now=NOON)
    view = varied(changed(engines=replace(READY, generation=2)), spec=parse(tier(replicas=3)), made_by=made_by)
    assert told(view, "Ready", before)[0] == verdict


CRASHED = ContainerStatus(name="engine", image="vllm", restarts=1, exit_code=1, is_started=False)


@pytest.mark.parametrize(
    "view",
    [
        changed(engines=GROWING_ENGINES, pods=(READY_POD, READY_POD, replace(NEW_POD, containers=(CRASHED,)))),
        with_engines(READY, ready=1),
        with_engines(READY, updated=1),
        with_engines(READY, ready=0),
    ],
    ids=["an engine crashed", "an engine that served does not", "a rollout", "none serves"],
)
def test_what_is_no_growth_takes_ready_away(view: Progress) -> None:
    snapshot = view.stage.snapshot
    if snapshot.pods == HEALTHY.pods:
        view = varied(view, snapshot=replace(snapshot, pods=(replace(READY_POD, is_ready=False),)))
    assert told(view, "Ready", status.report(VIEW, {}, now=NOON))[0] == "False"


HOMELESS = replace(janitor_pod(), is_scheduled=False, scheduling_message="0/3 nodes are available", containers=())
QUOTA = {"type": "ReplicaFailure", "status": "True", "message": "exceeded quota: small"}
REFUSED_BY_QUOTA = {
    names.deployment_key(names.janitor(REF)): Live(
        uid="u", resource_version="1", content={"status": {"conditions": [QUOTA]}}
    )
}


@pytest.mark.parametrize(
    ("view", "verdict", "reason", "words"),
    [
        *((seen(given), *told) for given, *told in TABLES["janitors"]),
        (with_janitor(pods=(HOMELESS,)), "False", "JanitorNotScheduled", "0/3 nodes"),
        (changed(janitor=LiveJanitor(), live=REFUSED_BY_QUOTA), "False", "JanitorRefused", "small"),
        (with_janitor(usage=replace(USAGE, problems=("remove /x: EACCES",))), "False", "JanitorHindered", "remove /x"),
        (with_janitor(usage=replace(USAGE, is_active=False)), "Unknown", "JanitorWaiting", "Lease/llama-janitor"),
    ],
)
def test_a_janitor_that_fails_is_told_with_remedy(view: Progress, verdict: str, reason: str, words: str) -> None:
    found = check_verdict(view, "JanitorHealthy", verdict, reason, words)
    assert found["Available"]["status"] == "True"
    assert found["Ready"]["status"] == ("False" if verdict == "False" else "True")


def test_a_janitor_that_dies_and_recovers_is_told_in_events() -> None:
    dead = crashed_janitor(waiting_reason="CrashLoopBackOff", exit_code=1)
    healthy = status.report(VIEW, {}, now=NOON)
    failing = status.report(dead, healthy, now=LATER)
    again = status.report(VIEW, failing, now=LATER)
    assert [each.reason for each in status.transitions(healthy, failing)] == ["JanitorFailing"]
    assert [(each.level, each.reason) for each in status.transitions(failing, again)] == [
        ("Normal", "Ready"),
        ("Normal", "JanitorRuns"),
    ]


@pytest.mark.parametrize(
    ("view", "verdict", "reason", "words"), [(seen(given), *told) for given, *told in TABLES["up_to_date"]]
)
def test_engines_are_up_to_date_or_the_command_is_told(view: Progress, verdict: str, reason: str, words: str) -> None:
    found = check_verdict(view, "UpToDate", verdict, reason, words)
    assert found["Ready"]["status"] == ("False" if reason == "EnginesReplaced" else "True")


@pytest.mark.parametrize(
    ("kind", "view", "message"), [(kind, seen(given), message) for kind, given, message in TABLES["messages"]]
)
def test_a_message_says_what_is_awaited_and_nothing_else(kind: str, view: Progress, message: str) -> None:
    assert told(view, kind)[2] == message
    assert kind != "Reconciling" or told(view, kind)[:2] == ("False", "Idle")


@pytest.mark.parametrize(
    ("line", "reason"), [(line, reason) for reason, lines in TABLES["crash_causes"].items() for line in lines]
)
def test_the_last_words_of_an_engine_name_the_cause_and_the_remedy(line: str, reason: str) -> None:
    message = f"INFO 01-01 12:00:00 starting\n{line}\nEngine core initialization failed. See root cause above."
    found = crash_causes.explain(message, 1)
    assert found.reason is Reason(reason)
    assert found.quote in line
    assert found.remedy


def what_vllm_says_of_encoder_decoder_models() -> str:
    source = Path(find_spec("vllm").origin).with_name("v1") / "core" / "sched" / "scheduler.py"
    return next(line for line in source.read_text().splitlines() if "Encoder-decoder" in line).strip()


UNDER_THE_CAUSE = "401 Client Error\nRepositoryNotFoundError: 404 Client Error\nunrecognized arguments"


@pytest.mark.parametrize(
    ("message", "code", "reason"),
    [
        # A page of shared memory that is not there.
        ("", 135, Reason.SHM_TOO_SMALL),
        # The cause, and not what followed from it.
        (UNDER_THE_CAUSE, 1, Reason.TOKEN_REFUSED),
        (f"AssertionError: {what_vllm_says_of_encoder_decoder_models()}", 1, Reason.MODEL_UNSUPPORTED),
        *((text, 1, None) for text in ("", "Traceback (most recent call last):\nKeyError: 'x'", "\n\n")),
    ],
)
def test_the_cause_is_found_and_unknown_words_explain_nothing(message: str, code: int, reason: Reason | None) -> None:
    found = crash_causes.explain(message, code)
    assert (found and found.reason) is reason


def test_a_long_line_is_quoted_by_its_end() -> None:
    found = crash_causes.explain("x" * 5000 + " CUDA out of memory", 1)
    assert len(found.quote) <= 200
    assert found.quote.endswith("CUDA out of memory")
