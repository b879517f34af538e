# SPDX-License-Identifier: Apache-2.0
"""What a tier says about itself, for every situation that a user meets."""

from __future__ import annotations

from dataclasses import replace

import pytest
from healthy_tier import (
    LATER,
    NOON,
    READY,
    READY_POD,
    REF,
    UNREADY_POD,
    VIEW,
    changed,
    check_problem,
    check_verdict,
    conditions,
    varied,
    with_claim,
    with_container,
    with_engines,
    with_pod,
)
from tiers import tier

from kvtier_operator import status
from kvtier_operator.api import parse
from kvtier_operator.api.reasons import Reason
from kvtier_operator.conditions import Progress
from kvtier_operator.errors import ClusterForbidden, ClusterUnavailable, SpecInvalid
from kvtier_operator.plan import Refusal
from kvtier_operator.snapshot import ContainerStatus, Pod


def test_a_healthy_tier_is_ready_and_nothing_is_left_to_do() -> None:
    found = conditions(VIEW)
    assert {kind: each["status"] for kind, each in found.items()} == {
        "Ready": "True",
        "Available": "True",
        "VolumeBound": "True",
        "SizingFits": "True",
        "EnginesReady": "True",
        "HashSeedConsistent": "True",
        "StorageChecked": "Unknown",
        "DiskWithinBudget": "True",
        "DiskHealthy": "True",
        "JanitorHealthy": "True",
        "RoutingReady": "True",
        "StoreReady": "Unknown",
        "SharedCacheVerified": "Unknown",
        "DiskEffective": "Unknown",
        "UpToDate": "True",
        "ClaimShared": "False",
        "Paused": "False",
        "Reconciling": "False",
        "Stalled": "False",
    }
    assert {each["observedGeneration"] for each in found.values()} == {3}


@pytest.mark.parametrize(
    ("view", "condition", "reason", "words"),
    [
        (changed(claim=None), "VolumeBound", Reason.CLAIM_MISSING, "llama-blocks"),
        (with_claim(phase="Pending"), "VolumeBound", Reason.CLAIM_PENDING, "kubectl describe pvc llama-blocks"),
        (with_claim(phase="Lost"), "VolumeBound", Reason.CLAIM_LOST, "delete the claim"),
        (with_claim(is_terminating=True), "VolumeBound", Reason.CLAIM_TERMINATING, "spec.replicas to 0"),
        (
            with_pod(is_scheduled=False, scheduling_message="0/3 nodes are available: 3 Insufficient memory."),
            "SizingFits",
            Reason.DOES_NOT_FIT,
            "needs 84736Mi of memory, 4 CPUs and 1 nvidia.com/gpu: 0/3 nodes",
        ),
        (
            with_pod(is_scheduled=False, scheduling_message="0/3 nodes: untolerated taint"),
            "EnginesReady",
            Reason.NOT_SCHEDULED,
            "tolerations",
        ),
        (
            with_engines(problem="exceeded quota: gpus"),
            "EnginesReady",
            Reason.PODS_REFUSED,
            "exceeded quota: gpus; raise the quota",
        ),
        (
            with_container(waiting_reason="ImagePullBackOff", waiting_message="not found", image="vllm:typo"),
            "EnginesReady",
            Reason.IMAGE_PULL_FAILED,
            "cannot pull vllm:typo (ImagePullBackOff: not found): correct spec.engine.image",
        ),
        (
            with_container(waiting_reason="CreateContainerConfigError", waiting_message='secret "hf" not found'),
            "EnginesReady",
            Reason.CONFIG_MISSING,
            'secret "hf" not found: create the object',
        ),
        (
            with_container(name="install-connector", exit_code=1, exit_reason="Error"),
            "EnginesReady",
            Reason.INSTALL_FAILED,
            "-c install-connector",
        ),
        (
            with_container(exit_code=137, exit_reason="OOMKilled", restarts=1),
            "EnginesReady",
            Reason.OUT_OF_MEMORY,
            "killed at 84736Mi of memory (spec.engine.memory 16Gi",
        ),
        (
            with_container(waiting_reason="CrashLoopBackOff", exit_code=1, exit_reason="Error", restarts=4),
            "EnginesReady",
            Reason.ENGINE_CRASHED,
            "exit code 1 and was restarted 4 times: `kubectl logs llama-engine-0 -c engine --previous`",
        ),
        (
            with_pod(is_scheduled=False, scheduling_message="0/3 nodes are available: 3 Insufficient nvidia.com/gpu."),
            "SizingFits",
            Reason.DEVICE_MISSING,
            "needs 1 nvidia.com/gpu on one node: 0/3 nodes",
        ),
        (
            with_engines(problem='pod rejected: RuntimeClass "nvidia" not found'),
            "EnginesReady",
            Reason.RUNTIME_CLASS_MISSING,
            "create that RuntimeClass",
        ),
        (
            with_pod(mount_problem='FailedAttachVolume: Multi-Attach error for volume "pvc-1"'),
            "EnginesReady",
            Reason.MULTI_ATTACH,
            "spec.replicas to 1",
        ),
        (
            with_pod(mount_problem="FailedMount: MountVolume.SetUp failed: rpc error"),
            "EnginesReady",
            Reason.VOLUME_NOT_MOUNTED,
            "driver runs there",
        ),
        (with_engines(is_stalled=True), "EnginesReady", Reason.ROLLOUT_STALLED, "kubectl logs deployment/llama-engine"),
        (with_pod(), "EnginesReady", Reason.ENGINES_STARTING, "0 of 2 engines"),
        (
            with_engines(READY, observed_generation=0),
            "EnginesReady",
            Reason.ENGINES_STARTING,
            "the latest change is yet to reach the pods",
        ),
        (with_engines(READY, updated=1), "EnginesReady", Reason.ENGINES_STARTING, "1 of 2 run the latest spec"),
        (
            changed(pods=(READY_POD, replace(READY_POD, name="old", hash_seed="7"))),
            "HashSeedConsistent",
            Reason.SEEDS_DIFFER,
            "old (7, sha256_cbor)",
        ),
        (
            changed(pods=(replace(READY_POD, hash_seed=None),)),
            "HashSeedConsistent",
            Reason.SEEDS_DIFFER,
            "something else sets PYTHONHASHSEED",
        ),
    ],
)
def test_a_problem_is_told_in_its_condition_and_in_ready(
    view: Progress, condition: str, reason: Reason, words: str
) -> None:
    check_problem(view, condition, reason, words)


RECOVERED = replace(READY_POD, containers=(ContainerStatus(name="engine", image="v", restarts=3, exit_code=1),))
LEAVING = replace(UNREADY_POD, is_terminating=True, hash_seed="7")


@pytest.mark.parametrize("pods", [(RECOVERED,), (READY_POD, LEAVING)], ids=["a crash that is over", "a pod that goes"])
def test_what_is_over_is_no_problem(pods: tuple[Pod, ...]) -> None:
    assert conditions(changed(pods=pods))["Ready"]["status"] == "True"


def test_an_invalid_spec_names_its_field_and_stalls() -> None:
    view = Progress(generation=3, tier=REF, invalid=SpecInvalid("spec.cpu.size", "must be at least 1Mi"))
    found = conditions(view)
    assert (found["Ready"]["reason"], found["Ready"]["message"]) == (
        "SpecInvalid",
        "spec.cpu.size: must be at least 1Mi",
    )
    assert found["Stalled"]["status"] == "True"
    assert found["EnginesReady"]["status"] == "Unknown"


PASSING = {Reason.CLAIM_MISSING}
"""Refusals that end without an edit of the tier."""


@pytest.mark.parametrize(
    "reason",
    [
        Reason.OBJECT_NOT_OURS,
        Reason.CLAIM_MISSING,
        Reason.CLAIM_NOT_SHARED,
        Reason.CLAIM_IMMUTABLE,
        Reason.CLAIM_CANNOT_SHRINK,
        Reason.BLOCKS_NOT_WHOLE,
        Reason.LAYOUT_NOT_CANONICAL,
        Reason.HEADS_NOT_DIVISIBLE,
        Reason.NODES_UNKNOWN,
        Reason.NO_NODE_MATCHES,
        Reason.DOES_NOT_FIT,
    ],
)
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


def test_a_paused_tier_says_so_and_reconciles_nothing() -> None:
    paused = varied(with_pod(), spec=parse(tier(paused=True)))
    found = conditions(paused)
    assert (found["Paused"]["status"], found["Reconciling"]["status"]) == ("True", "False")
    assert found["Ready"]["reason"] == "EnginesStarting"


def test_a_time_moves_only_when_the_status_flips() -> None:
    first = status.report(with_pod(), {}, now=NOON)
    other_reason = with_container(waiting_reason="CrashLoopBackOff", exit_code=1)
    second = status.report(other_reason, first, now=LATER)
    third = status.report(VIEW, second, now=LATER)
    times = [
        {each["type"]: each["lastTransitionTime"] for each in report["conditions"]}["Ready"]
        for report in (first, second, third)
    ]
    assert times == [NOON, NOON, LATER]


def test_only_what_changed_is_written_and_a_field_that_is_gone_is_removed() -> None:
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
    assert told == [
        [("Normal", "EnginesStarting")],
        [("Warning", "EngineCrashed")],
        [],
        [("Normal", "Ready")],
        [("Normal", "Paused")],
    ]


def test_what_an_invalid_spec_cannot_tell_stays_as_it_was() -> None:
    before = status.report(VIEW, {}, now=NOON)
    view = Progress(generation=4, tier=REF, invalid=SpecInvalid("spec", "is wrong"))
    after = status.report(view, before, now=LATER)
    assert (after["sizing"], after["generation"]) == (before["sizing"], before["generation"])
    assert after["observedGeneration"] == 4


GROWS = with_claim(capacity_bytes=1 << 40)
WAITS = with_claim(capacity_bytes=1 << 40, resizing="FileSystemResizePending: waiting for a pod")


@pytest.mark.parametrize(("view", "words"), [(GROWS, "from 1Ti to 2Ti"), (WAITS, "when a pod mounts it next")])
def test_a_claim_that_grows_is_bound_and_says_so(view: Progress, words: str) -> None:
    found = check_verdict(view, "VolumeBound", "True", "ClaimExpanding", words)
    assert (found["Ready"]["status"], found["Reconciling"]["status"]) == ("True", "False")
