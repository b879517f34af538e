# SPDX-License-Identifier: Apache-2.0
"""Effects of an edit of a tier on its pods and on its cache. Pure.

Two specs ask for the same pods where today's code renders the same from both. No list of fields is kept beside that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

from kvtier_operator import names
from kvtier_operator.api import TierSpec
from kvtier_operator.api.parse import document, read_leniently, with_value
from kvtier_operator.errors import SpecInvalid
from kvtier_operator.names import TierRef
from kvtier_operator.parts.engine import deployment, drift, template_of
from kvtier_operator.plan import TierPlan, decide, diff, make_kept_plan, make_plan, make_unchecked_plan
from kvtier_operator.plan import decisions as decided
from kvtier_operator.plan.decisions import Decisions, decode_rendered
from kvtier_operator.snapshot import Snapshot


def keep_pods(plan: TierPlan, snapshot: Snapshot) -> TierPlan:
    """Return the plan with the pods that run, where the spec still asks for what they were made from."""
    pods = decode_rendered(snapshot.engines.rendered)
    if pods is None or pods.restart != plan.restart:
        return plan
    affinity = str(pods.template["spec"].get("affinity"))
    if plan.is_on_one_node and plan.spec.replicas > 1 and names.LABEL_COMPONENT not in affinity:
        return plan  # a second replica of them would wait on another node for the volume
    if pods.spec != document(plan.spec):
        made_from = read_leniently(pods.spec, instead={})
        kept = None if made_from is None else decide(made_from, plan.tier, snapshot, may_assume=True, is_running=True)
        if made_from is None or not isinstance(kept, Decisions) or not _ask_for_the_same(made_from, plan, kept):
            return plan
        # The decisions for the spec that the pods were made from stay, and are noted for this one.
        plan = make_plan(
            plan.spec,
            snapshot,
            replace(kept, cpu_for=plan.decisions.cpu_for, model_for=plan.decisions.model_for),
            connector_image=plan.connector_image,
            janitor_image=plan.janitor_image,
            restart=plan.restart,
        )
    return make_kept_plan(plan, pods)


def _ask_for_the_same(before: TierSpec, plan: TierPlan, kept: Decisions) -> bool:
    """Tell whether today's code makes the same pods of both specs, with what it knows of the model today."""
    rendered = []
    for spec, decisions in ((before, kept), (plan.spec, plan.decisions)):
        chunking, weight_bytes, _ = decided.decide_model(spec, decided.read(""))
        fresh = make_plan(
            spec,
            Snapshot(tier=plan.tier),
            replace(decisions, chunking=chunking, weight_bytes=weight_bytes),
            connector_image=plan.connector_image,
            restart=plan.restart,
        )
        rendered.append((template_of(fresh), fresh.config_text))
    return bool(rendered[0] == rendered[1])


def applicable_spec(stored: object, snapshot: Snapshot, *, connector_image: str, restart: str) -> TierSpec | None:
    """Return what of a refused spec can be carried out without another pod: the rest is as the engines were made.

    A stricter release may have begun to refuse the stored spec. None where no engine runs, or where it is not known
    what they were made from.
    """
    pods = decode_rendered(snapshot.engines.rendered)
    runs = None if pods is None else read_leniently(pods.spec, instead={})
    if pods is None or runs is None or not isinstance(stored, Mapping):
        return None

    def keeps(spec: TierSpec) -> bool:
        found = decide(spec, snapshot.tier, snapshot, may_assume=True, is_running=True)
        if not isinstance(found, Decisions):
            return False
        made = make_plan(spec, snapshot, found, connector_image=connector_image, restart=restart)
        return keep_pods(made, snapshot).rendered is not None

    wanted = read_leniently(stored, instead=document(runs))
    if wanted is None or keeps(wanted):
        return wanted
    return _merged(runs, wanted, keeps)


def _merged(runs: TierSpec, wanted: TierSpec, keeps: Callable[[TierSpec], bool]) -> TierSpec:
    """Return the spec that runs with each field of the wanted one that replaces no pod."""
    found = runs
    for path, _, value in diff.differences(document(runs), document(wanted)):
        try:
            changed = TierSpec.model_validate(with_value(document(found), path, value))
        except ValueError:
            continue
        found = changed if keeps(changed) else found
    return found


def explain_edit(  # noqa: PLR0913  each by its name
    before: TierSpec,
    after: TierSpec,
    tier: TierRef,
    *,
    connector_image: str,
    snapshot: Snapshot | None = None,
    restart: str = "",
    warm_bytes: int | None = None,
) -> diff.Diff:
    """Say what replacing one spec by the other does.

    The Deployment of the snapshot notes what the pods were made from; without a snapshot there is no cluster.

    Raises:
        SpecInvalid: one of the specs cannot be carried out whatever the nodes are.
    """

    def plan_of(spec: TierSpec) -> TierPlan:
        return _plan(spec, tier, connector_image=connector_image, snapshot=snapshot, restart=restart)

    def effect_of(spec: TierSpec) -> diff.Effect:
        plan = plan_of(spec)
        return diff.Effect(generation=plan.generation.digest, template=deployment(plan)["spec"]["template"])

    found = diff.make_diff(before, after, effect_of=effect_of, running=_running(snapshot), warm_bytes=warm_bytes)
    is_for_ranks = any(change.field == _RANKS and change.is_new_generation for change in found.changes)
    return replace(
        found, upgrade=drift(plan_of(before)), ranks_hint=decided.advise_ranks(after) if is_for_ranks else ""
    )


def _running(snapshot: Snapshot | None) -> diff.Effect | None:
    """Return what the engines that run were made from; None where there are none, or they do not say."""
    pods = None if snapshot is None else decode_rendered(snapshot.engines.rendered)
    return None if pods is None else diff.Effect(generation=pods.generation, template=pods.template)


_RANKS: Final = "spec.engine.tensorParallel"


def _plan(spec: TierSpec, tier: TierRef, *, connector_image: str, snapshot: Snapshot | None, restart: str) -> TierPlan:
    """Return the plan of a spec; a share of unknown nodes is planned as an amount of its own."""
    try:
        plan = make_unchecked_plan(spec, tier, connector_image=connector_image, snapshot=snapshot)
    except SpecInvalid:
        if spec.cpu.percent is None:
            raise
        assumed = spec.cpu.model_copy(update={"size": f"{spec.cpu.percent}Mi", "fraction": None})
        return make_unchecked_plan(
            spec.model_copy(update={"cpu": assumed}), tier, connector_image=connector_image, snapshot=snapshot
        )
    if snapshot is None or not snapshot.engines.generation:
        return plan
    made = make_plan(spec, snapshot, plan.decisions, connector_image=connector_image, restart=restart)
    return keep_pods(made, snapshot)
