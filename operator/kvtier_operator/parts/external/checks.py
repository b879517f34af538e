# SPDX-License-Identifier: Apache-2.0
"""Checks behind the conditions of engines of another owner, by the pods that the tier's selector finds. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

from kvtier_operator import names
from kvtier_operator.api.reasons import Reason
from kvtier_operator.conditions import ConditionRule, PlannedStage, Problem, ReadStage, S, Status, checked, listed, met
from kvtier_operator.names import Manifest
from kvtier_operator.observe.targets import is_attached
from kvtier_operator.parts.engine import release_problem
from kvtier_operator.parts.engine_checks import connector_is_installed, volumes_are_mounted
from kvtier_operator.parts.external.attach import AttachRefused, Target, differences, find_engine, variable_of
from kvtier_operator.parts.external.pods import is_alive
from kvtier_operator.parts.part import Work
from kvtier_operator.snapshot import Pod

_OWNERS: Final = {
    "serving.kserve.io/inferenceservice": "inferenceservice",
    "leaderworkerset.sigs.k8s.io/name": "leaderworkerset",
}
"""Label of pods, and the kind of the object that it names."""
_PART_OF, _NAME = "app.kubernetes.io/part-of", "app.kubernetes.io/name"


def by_owner(ours: ConditionRule[S], *, external: ConditionRule[S]) -> ConditionRule[S]:
    """Return the rule of a condition that is judged by other checks where another owner makes the engines."""

    def judge(stage: S, previous: Status) -> Problem:
        return (ours if stage.spec.engine.external is None else external).judge(stage, previous)

    return replace(ours, judge=judge)


def of_our_engines(wants: Callable[[Work], tuple[Manifest, ...]]) -> Callable[[Work], tuple[Manifest, ...]]:
    """Return what a part wants unless another owner makes the engines."""
    return lambda work: wants(work) if work.plan.spec.engine.external is None else ()


def _alive(stage: ReadStage) -> list[Pod]:
    return [pod for pod in stage.snapshot.pods if is_alive(pod)]


def the_selector_finds_pods(stage: PlannedStage) -> Problem | None:
    """The selector finds at least one pod."""
    external = stage.spec.engine.external
    if external is None or _alive(stage):
        return None
    labels = ",".join(f"{key}={value}" for key, value in sorted(external.selector.match_labels.items()))
    command = f"`kubectl get pods -n {stage.tier.namespace} -l {labels}`"
    text = f"spec.engine.external.selector finds no pod: {command} shows the same; correct it, or start the engines"
    return Problem(Reason.NO_PODS, text)


def pods_have_one_tier(stage: PlannedStage) -> Problem | None:
    """No other tier's selector finds these pods."""
    twice = {pod.name: pod.claimed_by for pod in _alive(stage) if pod.claimed_by}
    if not twice:
        return None
    found = listed([f"{pod} (by tier {other})" for pod, other in sorted(twice.items())])
    until = "until spec.engine.external.selector of one of them finds others"
    text = f"another tier claims the same pods: {found}. Neither tier counts as ready {until}"
    return Problem(Reason.PODS_CLAIMED_TWICE, text)


def _command(stage: PlannedStage, pod: Pod) -> str:
    """Return the command that mends a pod, by the object that makes it."""
    metadata = pod.content.get("metadata", {})
    labels = metadata.get("labels") or {}
    owners = (each for each in metadata.get("ownerReferences", ()) if each.get("controller"))
    owner: Mapping[str, str] = next(owners, {})
    found = next((f"{kind}/{labels[label]}" for label, kind in _OWNERS.items() if label in labels), "")
    if labels.get(_PART_OF) == "llminferenceservice":
        found = f"llminferenceservice/{labels.get(_NAME, '')}"
    elif not found and owner.get("kind") == "ReplicaSet":
        found = f"deployment/{owner['name'].removesuffix('-' + labels.get(names.LABEL_TEMPLATE_HASH, ''))}"
    elif not found and owner.get("kind") == "StatefulSet":
        found = f"statefulset/{owner['name']}"
    return f"`kvtier attach {stage.tier.name} -n {stage.tier.namespace} {found or '-f FILE'}` prints what mends it"


def _compare(stage: PlannedStage, pod: Pod) -> tuple[str, str]:
    """Return why a pod is no engine of the tier, and what else differs from the spec; empty for nothing."""
    external, spec, differing = stage.spec.engine.external, pod.content.get("spec", {}), ""
    engine = find_engine(spec, None if external is None else external.container)
    if engine is None:
        why = "which of its containers runs vLLM cannot be told: name it in spec.engine.external.container"
        return f"pod {pod.name}: {why}", ""
    target = Target(pod=spec, container=("containers", ("name", engine["name"])), variable=variable_of(engine))
    try:
        found = differences(stage.plan, target)
        lacking = listed([each for each, serves in found.items() if not serves])
        differing = listed([each for each, serves in found.items() if serves])
        why = f"it lacks {lacking}" if lacking else ""
    except AttachRefused as refused:
        why = str(refused)
    what = f"container {engine['name']} of pod {pod.name} is no engine of this tier: {why}; {_command(stage, pod)}"
    return what if why else "", differing


def pods_are_attached(stage: PlannedStage) -> Problem | None:
    """Every pod has what an engine of the tier needs."""
    text = next(filter(None, (_compare(stage, pod)[0] for pod in _alive(stage))), "")
    return Problem(Reason.NOT_ATTACHED, text) if text else None


def engines_are_ready(stage: PlannedStage) -> Problem | None:
    """All of them serve."""
    engines = stage.snapshot.engines
    if engines.ready == engines.replicas:
        return None
    return Problem(Reason.ENGINES_STARTING, f"{engines.ready} of {engines.replicas} attached engines are ready")


READY: Final = checked(
    "EnginesReady",
    (
        the_selector_finds_pods,
        pods_have_one_tier,
        pods_are_attached,
        volumes_are_mounted,
        connector_is_installed,
        engines_are_ready,
    ),
    ok=Reason.ENGINES_READY,
    text="all attached engines are ready",
)


def _judge_current(stage: PlannedStage, _previous: Status) -> Problem:
    if (problem := release_problem(stage.spec)) is not None:
        return problem
    for pod in filter(is_attached, _alive(stage)):
        why, differing = _compare(stage, pod)
        if why or differing:
            what = f"pod {pod.name} started as an earlier spec, or another release, had it ({differing})"
            return Problem(Reason.ATTACHED_OUTDATED, why or f"{what}: {_command(stage, pod)}")
    return met(Reason.CURRENT, "attached engines have the configuration of this spec")


def _judge_available(stage: ReadStage, _previous: Status) -> Problem:
    """At least one attached engine serves."""
    ready, wanted = stage.snapshot.engines.ready, stage.snapshot.engines.replicas
    others = len(_alive(stage)) - wanted
    beside = f"; {others} more of the selector's pods are no engines of this tier: see EnginesReady" if others else ""
    if ready:
        return met(Reason.SERVING, f"{ready} of {wanted} attached engines serve{beside}")
    if not wanted and not others:
        return Problem(Reason.NO_PODS, "no pod matches spec.engine.external.selector")
    return Problem(Reason.UNAVAILABLE, f"none of {wanted} attached engines serves{beside or ': see Ready'}")


AVAILABLE: Final = ConditionRule(kind="Available", needs=ReadStage, judge=_judge_available, counts=False)
UP_TO_DATE: Final = ConditionRule(kind="UpToDate", needs=PlannedStage, judge=_judge_current, counts=False)
