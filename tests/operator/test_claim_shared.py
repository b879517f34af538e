# SPDX-License-Identifier: Apache-2.0
"""Tiers that share a claim: each says whether the budgets of all fit it, and hears when another one's changes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from fake_cluster import FakeCluster, condition, run
from healthy_tier import LATER, NOON, USAGE, VIEW, check_verdict, conditions, varied
from live import TIERS, Client, body, running
from tiers import claim, tier
from waiting import until

from kvtier_localcluster.apiserver import ApiServerThread
from kvtier_operator import names, status
from kvtier_operator.api import parse
from kvtier_operator.conditions import Progress
from kvtier_operator.errors import SpecInvalid
from kvtier_operator.kube.cache import TIERS as WATCHED_TIERS
from kvtier_operator.kube.object_store import ObjectStore
from kvtier_operator.snapshot import LiveJanitor, Neighbour

BUDGET = 900 << 30
LITTLE = LiveJanitor(usage=replace(USAGE, used_bytes=1 << 30))


def of_budget(most: str | None = "900Gi", **others: int | None) -> Progress:
    """Return a tier on its claim of 2Ti, with this budget, beside others with theirs."""
    neighbours = tuple(Neighbour(name=name, max_bytes=budget) for name, budget in others.items())
    budget = {} if most is None else {"maxBytes": most}
    spec = parse(tier(disk={"budget": budget}))
    return varied(VIEW, spec=spec, snapshot=replace(VIEW.stage.snapshot, neighbours=neighbours, janitor=LITTLE))


@pytest.mark.parametrize(
    ("view", "verdict", "reason", "words"),
    [
        (of_budget(), "False", "ClaimAlone", "no other tier is on claim llama-blocks"),
        (of_budget(qwen=BUDGET), "True", "BudgetsFit", "with qwen (900Gi); their budgets are 1800Gi together, of 2Ti"),
        (of_budget(qwen=BUDGET, phi=BUDGET), "True", "BudgetsOverlap", "budgets are 2700Gi together, of 2Ti: the vol"),
        (of_budget(qwen=None), "True", "BudgetsOverlap", "qwen (no limit), and nothing limits the blocks of qwen: set"),
        (of_budget(None, qwen=BUDGET), "True", "BudgetsOverlap", "nothing limits the blocks of llama: set spec.disk"),
    ],
    ids=["alone", "they fit", "too much together", "another has no limit", "this one has no limit"],
)
def test_a_tier_says_whether_the_budgets_of_all_tiers_on_its_claim_fit_it(
    view: Progress, verdict: str, reason: str, words: str
) -> None:
    assert check_verdict(view, "ClaimShared", verdict, reason, words)["Ready"]["status"] == "True"


def test_budgets_that_begin_to_overlap_are_a_warning_and_their_fitting_again_is_not() -> None:
    fits = status.report(of_budget(qwen=1 << 30), {}, now=NOON)
    overlaps = status.report(of_budget(qwen=2 << 40), fits, now=LATER)
    assert [(each.level, each.reason) for each in status.transitions(fits, overlaps)] == [("Warning", "BudgetsOverlap")]
    assert [(each.level, each.reason) for each in status.transitions(overlaps, fits)] == [("Normal", "BudgetsFit")]
    assert status.transitions(fits, status.report(of_budget(), fits, now=LATER)) == []


def test_what_was_said_of_the_claim_stays_while_the_spec_cannot_be_read() -> None:
    before = status.report(of_budget(qwen=2 << 40), {}, now=NOON)
    wrong = Progress(generation=4, tier=VIEW.tier, invalid=SpecInvalid("spec", "is wrong"))
    assert conditions(wrong, before)["ClaimShared"]["reason"] == "BudgetsOverlap"
    assert conditions(wrong)["ClaimShared"]["status"] == "Unknown"


def test_the_others_are_those_of_the_same_claim_whatever_is_wrong_with_them() -> None:
    def on(name: str, claim: str, **spec: Any) -> dict[str, Any]:
        body = tier(volume={"claim": None, "existingClaim": claim}, **spec)
        body["metadata"]["name"] = name
        return body

    mine = tier(disk={"budget": {"maxBytes": "1Ti"}})
    elsewhere = on("elsewhere", "other")
    beside = on("beside", "llama-blocks", disk={"budget": {"maxBytes": "512Gi"}})
    broken = on("broken", "llama-blocks", engine={"args": ["--port=1"]})
    for others, reason, words in (
        ((elsewhere,), "ClaimAlone", "no other"),
        ((elsewhere, beside), "BudgetsFit", "1536Gi together, of 2Ti"),
        ((broken, beside), "BudgetsOverlap", "shared with beside (512Gi), broken (no limit)"),
    ):
        cluster = FakeCluster(mine, *others)
        run(cluster)
        run(cluster)
        assert condition(cluster, "ClaimShared")["reason"] == reason
        assert words in condition(cluster, "ClaimShared")["message"]


def test_only_what_matters_to_the_others_of_a_claim_is_told_to_them() -> None:
    told: list[set[str]] = []
    store = ObjectStore(WATCHED_TIERS, lambda _namespace, _name, groups: told.append(groups))

    def seen(version: int, **changes: Any) -> None:
        body = {**tier(**changes.pop("spec", {})), **changes}
        store.on_update({**body, "metadata": {**body["metadata"], "uid": "u", "resourceVersion": str(version)}})

    seen(1)
    seen(2, status={"replicas": 1})
    seen(3, spec={"replicas": 3})
    seen(4, spec={"disk": {"budget": {"maxBytes": "1Ti"}}})
    store.on_delete(store.get("serving", "llama") or {})
    assert told == [{"llama-blocks"}, set(), set(), {"llama-blocks"}, {"llama-blocks"}]


def test_two_tiers_with_budgets_that_do_not_fit_their_claim_both_say_so_until_one_is_lowered_or_gone(
    api: ApiServerThread,
) -> None:
    kubectl = Client(api.url)
    shared = {**claim("shared", "ReadWriteMany"), "metadata": {"name": "shared"}}
    kubectl.call("POST", kubectl.path("/api/v1", "persistentvolumeclaims"), shared)
    for name in ("one", "two"):
        volume = {"claim": None, "existingClaim": "shared"}
        kubectl.apply_tier(body(name, volume=volume, disk={"budget": {"maxBytes": "900Gi"}}))

    def reasons() -> list[str | None]:
        return [kubectl.condition("ClaimShared", name).get("reason") for name in ("one", "two")]

    with running():
        until(lambda: reasons() == ["BudgetsOverlap"] * 2)

        def overlaps() -> list[dict[str, Any]]:
            return [each for each in kubectl.items("/api/v1", "events") if each["reason"] == "BudgetsOverlap"]

        # An event follows the condition that it tells of.
        until(lambda: {each["involvedObject"]["name"] for each in overlaps()} == {"one", "two"})
        assert {each["type"] for each in overlaps()} == {"Warning"}
        kubectl.merge(TIERS, "kvcachetiers", "two", {"spec": {"disk": {"budget": {"maxBytes": "100Gi"}}}})
        until(lambda: reasons() == ["BudgetsFit"] * 2)
        kubectl.delete(TIERS, "kvcachetiers", "two")
        until(lambda: kubectl.condition("ClaimShared", "one").get("reason") == "ClaimAlone")
    assert names.claim_of({"metadata": {"name": "one"}, "spec": "nonsense"}) == "one-blocks"
