# SPDX-License-Identifier: Apache-2.0
"""The prompts of ``spec.warm``: whether they are to be sent, what their Job has shown, what is kept of that. Pure.

They are sent once for each cache generation: what came of it is kept in the status, under a key that changes with the
prompts and with the generation. Engines serve meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from kvtier_operator import names
from kvtier_operator.api import TierSpec
from kvtier_operator.api.reasons import Reason
from kvtier_operator.names import Manifest
from kvtier_operator.parts import warm_job
from kvtier_operator.plan import TierPlan
from kvtier_operator.plan.digest import digest
from kvtier_operator.problems import Condition, Problem, State, View, Warming, met, not_checked, unknown
from kvtier_operator.snapshot import SeenJob, Snapshot

_MINUTES_TOLD: Final = 120
"""From here on in hours."""
_COUNTS: Final = ("prompts", "warm", "blocks", "bytes", "missing")


def key_of(spec: TierSpec, generation: str) -> str:
    """Return what a result is valid for."""
    assert spec.warm is not None
    return digest({"generation": generation, "warm": spec.warm.to_manifest()})


def remembered(plan: TierPlan, snapshot: Snapshot, kept: Mapping[str, Any], *, is_replaced: bool) -> Warming | None:
    """Return what is known without looking at any Job; None where one must be looked at.

    Args:
        plan: what the tier becomes.
        snapshot: what stood before this pass.
        kept: what the status says of it so far.
        is_replaced: whether this pass has written other engines than the snapshot has.
    """
    if plan.spec.warm is None:
        return Warming(state=State.OFF, detail="spec.warm names no prompts")
    key = key_of(plan.spec, plan.generation.digest)
    if kept.get("key") == key and not kept.get("problem"):
        return Warming(state=State.PASSED, key=key)
    if plan.spec.replicas == 0:
        return Warming(state=State.OFF, key=key, detail="nobody sends the prompts of spec.warm: spec.replicas is 0")
    if plan.spec.disk.mode != "ReadWrite":
        mode = f"spec.disk.mode is {plan.spec.disk.mode}, so that engines write no blocks"
        return Warming(state=State.OFF, key=key, detail=f"nobody sends the prompts of spec.warm: {mode}")
    if is_replaced or not _serves(plan, snapshot):
        return Warming(state=State.WAITING, key=key, detail="no engine of this spec serves yet")
    return None


def _serves(plan: TierPlan, snapshot: Snapshot) -> bool:
    """Tell whether all engines are of this plan, and one of them answers: others keep blocks of another generation."""
    engines, standing = snapshot.engines, snapshot.live.get(names.engine_key(snapshot.tier))
    if standing is None or not engines.ready:
        return False
    if engines.updated < engines.replicas or engines.observed_generation < engines.generation:
        return False
    annotations = standing.content["spec"]["template"]["metadata"].get("annotations") or {}
    return bool(annotations.get(names.ANNOTATION_CONFIG_DIGEST) == plan.config_digest)


def job(plan: TierPlan, snapshot: Snapshot, key: str, kept: Mapping[str, Any]) -> Manifest:
    """Return the Job, made from the engines as they stand; `kept` is what the status says of the one before."""
    spec, tier = plan.spec, snapshot.tier
    assert spec.warm is not None
    wanted = warm_job.Prompts(
        volume=spec.warm.prompts.volume, file=spec.warm.prompts.file, concurrency=spec.warm.concurrency
    )
    template = snapshot.live[names.engine_key(tier)].content["spec"]["template"]
    service = snapshot.live.get(names.service_key(tier))
    address = "" if service is None else service.content.get("spec", {}).get("clusterIP", "")
    host = f"{names.engine(tier)}.{tier.namespace}.svc" if address in {"", "None"} else address
    return warm_job.job(
        tier,
        template,
        wanted,
        name=names.warm(tier),
        host=host,
        deadline_seconds=spec.warm.timeout_seconds,
        key=key,
        attempt=1 + _failures(kept) if kept.get("key") == key else 1,
        generation=plan.generation.digest,
        is_on_one_node=plan.is_on_one_node,
    )


def _failures(kept: Mapping[str, Any]) -> int:
    return int(kept.get("failures", 0)) if kept.get("problem") else 0


def outcome(key: str, kept: Mapping[str, Any], seen: SeenJob) -> Warming:
    """Return what a Job has shown; a failure is told until the next Job has ended."""
    if seen.is_foreign:
        return Warming(state=State.FAILED, key=key, detail="a Job of its name belongs to somebody else: delete it")
    # What is no document may be anything, prompts too, and is not repeated.
    told = seen.told
    counts = {name: told[name] for name in _COUNTS if type(told.get(name)) is int and told[name] >= 0}
    if seen.key == key and seen.exit_code == 0:
        return Warming(state=State.PASSED, key=key, counts=counts)
    if seen.key == key and (seen.exit_code is not None or seen.failure):
        problem = str(told.get("problem") or seen.failure or f"it ended with exit code {seen.exit_code}")
        counts["failures"] = seen.attempt
        return Warming(state=State.FAILED, key=key, detail=problem[:1000], counts=counts)
    if kept.get("key") == key and kept.get("problem"):
        return Warming(state=State.FAILED, key=key, detail=str(kept["problem"]), is_held_up=seen.is_held_up)
    return Warming(state=State.RUNNING, key=key, detail=seen.waiting, is_held_up=seen.is_held_up)


def told_off(found: Warming) -> Problem:
    """Return what is said where nobody sends prompts."""
    return unknown(Reason.PROMPTS_HELD if found.key else Reason.PROMPTS_NONE, found.detail)


def document(view: View, previous: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the status keeps; nothing where no prompts are to be sent."""
    before, found = dict(previous.get("warm") or {}), view.warming
    if found is None:
        return before
    if found.state is State.OFF:
        return before if found.key else {}
    if found.state is State.PASSED:
        return before if found.counts is None else {"key": found.key, **found.counts}
    if found.state is State.FAILED:
        return {**before, "key": found.key, **(found.counts or {}), "problem": found.detail}
    return before


def _place(spec: TierSpec) -> str:
    """Return where the prompts are, in words."""
    assert spec.warm is not None
    given = spec.warm.prompts
    if given.config_map is not None:
        return f"key {given.config_map.key} of ConfigMap {given.config_map.name}"
    assert given.claim is not None
    return f"file {given.claim.path} on claim {given.claim.name}"


def _wait(kept: Mapping[str, Any]) -> str:
    minutes = warm_job.kept_seconds(max(1, _failures(kept))) // 60
    return f"{minutes} minutes" if minutes < _MINUTES_TOLD else f"{minutes // 60} hours"


def is_required(view: View) -> bool:
    """Tell whether Ready waits for it."""
    return view.spec is not None and view.spec.warm is not None and view.spec.warm.required


def _judge(view: View, previous: Mapping[str, Any]) -> Problem:
    """Each block of the prompts was seen on the volume."""
    found = view.warming
    if found is None or view.spec is None:
        return not_checked()
    kept = document(view, previous)
    job_name = f"Job {names.warm(view.tier)}"
    match found.state:
        case State.OFF:
            return told_off(found)
        case State.WAITING:
            message = f"the prompts of spec.warm are not sent yet: {found.detail}"
            return Problem(reason=Reason.PROMPTS_PENDING, message=message, is_known=is_required(view))
        case State.PASSED:
            return met(
                Reason.PROMPTS_WARM,
                f"each of {kept.get('blocks', 0)} blocks of {kept.get('prompts', 0)} prompts was seen on the volume",
            )
        case State.FAILED:
            again = f"again {_wait(kept)} after it has ended, or at once with another spec.warm.revision"
            return Problem(
                reason=Reason.PROMPTS_FAILED, message=f"{found.detail}; {job_name} sends the prompts {again}"
            )
        case _:
            message = f"{job_name} sends the prompts of spec.warm; its log says how far it is"
            if found.detail:
                message = f"{job_name} cannot send the prompts of spec.warm, which names {_place(view.spec)}, yet"
                message += f": {found.detail}"
            return Problem(reason=Reason.PROMPTS_PENDING, message=message, is_known=is_required(view))


WARM: Final = Condition("Warm", _judge)
