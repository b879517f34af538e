# SPDX-License-Identifier: Apache-2.0
"""What a tier says about its volume, from what the janitor and the engines reported."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from healthy_tier import (
    DECISIONS,
    HEALTHY,
    NOON,
    READY,
    READY_POD,
    USAGE,
    VIEW,
    changed,
    check_problem,
    check_verdict,
    conditions,
    varied,
)
from tiers import tier

from kvtier_connector.contract.engine import REPLACED_WEIGHTS
from kvtier_connector.contract.usage import GenerationUsage, Usage
from kvtier_operator import status
from kvtier_operator.api import parse
from kvtier_operator.api.reasons import Reason
from kvtier_operator.api.status_schema import TierStatus
from kvtier_operator.conditions import Progress
from kvtier_operator.observe.pod_reports import read_metrics
from kvtier_operator.plan import make_generation
from kvtier_operator.snapshot import EngineReport, LiveJanitor, Pod

LIMITED = parse(tier(disk={"budget": {"maxBytes": "1Ti"}}))
CURRENT = make_generation(LIMITED, VIEW.tier, DECISIONS).digest
VOLUME = 2 << 40
DAY = 86400.0


def view(usage: Usage | None = USAGE, *, silence: str = "", pods: tuple[Pod, ...] = (), **changes: Any) -> Progress:
    snapshot = replace(HEALTHY, janitor=LiveJanitor(pods=pods, usage=usage, silence=silence))
    return varied(VIEW, **{"spec": LIMITED, "snapshot": snapshot, **changes})


def usage(**changes: Any) -> Usage:
    return replace(USAGE, **changes)


def report(seen: Progress, previous: dict[str, Any] | None = None) -> dict[str, Any]:
    return status.report(seen, previous or {}, now=NOON)


@pytest.mark.parametrize(
    ("seen", "condition", "reason", "words"),
    [
        (
            view(usage(used_bytes=(1 << 40) + (1 << 36))),
            "DiskWithinBudget",
            Reason.OVER_BUDGET,
            "blocks take 1.06 TiB of spec.disk.budget.maxBytes (1Ti)",
        ),
        (
            view(usage(store_pause="ENOSPC at /var/lib/kvtier")),
            "DiskWithinBudget",
            Reason.STORES_PAUSED,
            "ENOSPC at /var/lib/kvtier; it ends by itself",
        ),
        (
            view(usage(volume_bytes=VOLUME, volume_free_bytes=VOLUME // 50)),
            "DiskWithinBudget",
            Reason.VOLUME_FULL,
            "41 GiB of 2 TiB are free on the volume, less than spec.disk.budget.minFree (5%)",
        ),
        (
            view(
                usage(volume_bytes=VOLUME, volume_free_bytes=45 << 30),
                spec=parse(tier(disk={"budget": {"maxBytes": "1Ti", "minFree": "50Gi"}})),
            ),
            "DiskWithinBudget",
            Reason.VOLUME_FULL,
            "45 GiB of 2 TiB are free on the volume, less than spec.disk.budget.minFree (50Gi)",
        ),
        (
            view(usage(problems=("unlink /var/lib/kvtier/x: Permission denied",))),
            "DiskHealthy",
            Reason.JANITOR_HINDERED,
            "unlink /var/lib/kvtier/x: Permission denied",
        ),
    ],
)
def test_a_problem_of_the_volume_is_told_in_its_condition_and_in_ready(
    seen: Progress, condition: str, reason: Reason, words: str
) -> None:
    check_problem(seen, condition, reason, words)


ENCRYPTED = parse(tier(disk={"encryption": {"secretName": "kv-keys", "activeKey": "2026-11"}}))
WITHOUT = "pod llama-engine-1 serves without the volume"


@pytest.mark.parametrize(
    ("report", "reason", "words"),
    [
        (EngineReport(refused=("dtype", "model_name")), "Stranger", WITHOUT),
        (EngineReport(refused=("dtype", "model_name")), "Stranger", "another dtype, model_name"),
        (EngineReport(refused=("generation",)), "Stranger", "The rollout replaces it"),
        (EngineReport(refused=(REPLACED_WEIGHTS,)), "Stranger", "its weights were replaced"),
        (EngineReport(is_detached=True), "Detached", WITHOUT),
        (EngineReport(is_detached=True), "Detached", "kubectl logs llama-engine-1 -c engine"),
        (EngineReport(is_key_missing=True), "KeyMissing", "Secret kv-keys has no entry 2026-11"),
        (EngineReport(is_key_missing=True), "KeyMissing", "openssl rand"),
    ],
    ids=str,
)
def test_an_engine_that_does_without_the_volume_is_named_with_the_reason(
    report: EngineReport, reason: str, words: str
) -> None:
    pods = (replace(READY_POD, report=EngineReport()), replace(READY_POD, name="llama-engine-1", report=report))
    check_verdict(varied(changed(pods=pods), spec=ENCRYPTED), "DiskHealthy", "False", reason, words)


@pytest.mark.parametrize(("release", "reason"), [(1, "ReleaseCompared"), (2, "ReleaseRefused")])
def test_an_engine_of_another_release_is_healthy_and_named(release: int, reason: str) -> None:
    active = f'vllm:kvtier_disk_active{{engine="0"}} {release - 1}\n'
    metrics = f'{active}vllm:kvtier_disk_release{{engine="0"}} {release}.0\n'
    pods = (replace(READY_POD, report=read_metrics(metrics.encode())),)
    check_verdict(varied(changed(pods=pods)), "DiskHealthy", "True", reason, f"pod {READY_POD.name}")


@pytest.mark.parametrize(
    ("seen", "reason", "words"),
    [
        (view(None), "JanitorStarting", "see JanitorHealthy"),
        (view(usage(is_active=False)), "JanitorWaiting", "Lease/llama-janitor"),
        (view(spec=parse(tier(janitor={"enabled": False}))), "JanitorDisabled", "nothing is ever removed"),
    ],
)
@pytest.mark.parametrize("condition", ["DiskWithinBudget", "DiskHealthy"])
def test_without_a_report_nothing_is_known_and_the_engines_are_ready_all_the_same(
    condition: str, seen: Progress, reason: str, words: str
) -> None:
    assert check_verdict(seen, condition, "Unknown", reason, words)["Ready"]["status"] == "True"


def test_the_budget_is_judged_when_everything_was_counted() -> None:
    seen = view(usage(is_counted=False, used_bytes=1 << 50))
    assert check_verdict(seen, "DiskWithinBudget", "Unknown", "Counting", "")["DiskHealthy"]["status"] == "True"


def test_what_engines_had_begun_to_write_is_not_over_the_budget() -> None:
    found = conditions(view(usage(used_bytes=int((1 << 40) * 1.01))))
    assert found["DiskWithinBudget"]["status"] == "True"


def test_without_a_budget_the_volume_is_the_measure() -> None:
    seen = view(usage(used_bytes=1 << 50, volume_bytes=1 << 51, volume_free_bytes=1 << 50), spec=VIEW.spec)
    assert conditions(seen)["DiskWithinBudget"]["status"] == "True"
    assert report(seen)["tiers"][1]["used"] == "50%"


GENERATIONS = (
    GenerationUsage(digest="aaaa", used_bytes=10, blocks=1, created=DAY, last_used=2 * DAY),
    GenerationUsage(digest=CURRENT, used_bytes=30, blocks=3, created=3 * DAY),
    GenerationUsage(digest="bbbb", used_bytes=20, blocks=2, created=2 * DAY, last_used=3 * DAY),
)


def test_generations_are_shown_the_current_one_first_and_the_others_as_they_were_used() -> None:
    found = report(view(usage(generations=GENERATIONS)))["generations"]
    assert [(each["digest"], each["role"], each["usedBytes"]) for each in found] == [
        (CURRENT, "Current", 30),
        ("bbbb", "Previous", 20),
        ("aaaa", "Previous", 10),
    ]
    assert (found[2]["created"], found[2]["lastUsed"]) == ("1970-01-02T00:00:00Z", "1970-01-03T00:00:00Z")
    assert "lastUsed" not in found[0]


def test_the_use_of_each_tier_is_shown() -> None:
    assert report(view(usage(used_bytes=1 << 39, blocks=9)))["tiers"] == [
        {"name": "cpu", "capacityBytes": 64 << 30},
        {"name": "disk", "capacityBytes": 1 << 40, "usedBytes": 1 << 39, "blocks": 9, "used": "50%"},
    ]


def test_what_was_counted_last_stays_while_the_janitor_is_away() -> None:
    before = report(view(usage(generations=GENERATIONS)))
    after = report(view(None, silence="refused"), before)
    assert (after["tiers"], after["generations"]) == (before["tiers"], before["generations"])
    assert report(view(usage(is_counted=False, used_bytes=1)), before)["tiers"] == before["tiers"]


def test_the_same_report_fits_the_schema_and_changes_nothing() -> None:
    before = report(view(usage(generations=GENERATIONS)))
    assert TierStatus.model_validate(before).tiers[1]["used"] == "100%"
    assert status.changes(before, report(view(usage(generations=GENERATIONS)), before)) == {}


def test_blocks_of_one_engine_alone_are_no_generation_to_roll_back_to() -> None:
    current = GENERATIONS[0]
    updated = replace(current, digest=f"{current.digest}.p0123456789abcdef")
    roles = {
        each["digest"]: each["role"] for each in report(view(usage(generations=(*GENERATIONS, updated))))["generations"]
    }
    assert roles[updated.digest] == "Unshared"
    assert "Previous" in roles.values()


def test_a_missing_secret_of_the_keys_is_named_with_the_command_that_makes_it() -> None:
    reason = 'MountVolume.SetUp failed for volume "kvtier-keys": secret "kv-keys" not found'
    waiting = replace(READY_POD, is_ready=False, mount_problem=f"FailedMount: {reason}")
    found = conditions(varied(changed(pods=(waiting,), engines=replace(READY, ready=0)), spec=ENCRYPTED))
    assert found["EnginesReady"]["reason"] == "KeyMissing"
    assert "kubectl create secret generic kv-keys -n serving" in found["EnginesReady"]["message"]
    assert found["Stalled"]["status"] == "True"
