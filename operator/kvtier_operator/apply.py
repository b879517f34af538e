# SPDX-License-Identifier: Apache-2.0
"""Write what the parts of a tier want, each as far as nothing holds it up.

A part that fails or is held up holds up those that need it, and no others; what engines follow while they run goes out
in any case.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

from kvtier_operator import names, parts
from kvtier_operator.api import TierSpec
from kvtier_operator.api.reasons import Reason
from kvtier_operator.conditions import Preflight, PreflightState, Problem, View, unknown
from kvtier_operator.errors import ClusterError, ClusterUnavailable, KindMissing
from kvtier_operator.gather import read_preflight
from kvtier_operator.kube.cluster import Cluster
from kvtier_operator.kube.managed_fields import is_applied
from kvtier_operator.names import Manifest, ObjectKey, TierRef
from kvtier_operator.parts import claim, preflight, routing
from kvtier_operator.parts.engine import deployment
from kvtier_operator.parts.engine_config import with_live_settings
from kvtier_operator.plan import Refusal, TierPlan
from kvtier_operator.snapshot import Live, Snapshot


class Deletion(NamedTuple):
    """One object that a pass deleted."""

    key: ObjectKey
    why: str
    """End of a sentence that begins with the object."""


@dataclass
class Changes:
    """What a pass has done to the parts of a tier so far."""

    written: list[ObjectKey] = field(default_factory=list)
    deleted: list[Deletion] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    failures: list[ClusterError] = field(default_factory=list)
    missing: set[str] = field(default_factory=set)
    """Parts that cannot be relied on by those that need them."""


def apply_parts(cluster: Cluster, plan: TierPlan, snapshot: Snapshot, done: Changes, *, starts_engines: bool) -> None:
    """Apply each part that is not held up, then delete what is not rendered any more."""
    rendered: set[ObjectKey] = set()
    for part in parts.PARTS:
        objects = part.objects(plan)
        rendered |= set(map(names.key_of, objects))
        if part.name == parts.ENGINE and names.engine_key(plan.tier) not in snapshot.live and not starts_engines:
            continue  # what keeps them from starting is the preflight's to tell
        if part.name == parts.CONFIG and "claim" in done.missing and names.engine_key(plan.tier) in snapshot.live:
            # Engines stay what they are, and so does what they were made for.
            apply_live_settings(cluster, plan.spec, snapshot, done)
            continue
        refusal = parts.refuse_foreign(objects, snapshot) or part.refuse(plan.spec, snapshot)
        unreadable = [kind for kind in part.kinds if kind in snapshot.unreadable and (objects or part.serves_as_it_was)]
        done.failures += [snapshot.unreadable[kind] for kind in sorted(unreadable)]
        if refusal is not None and not unreadable:
            done.refusals.append(refusal)
        if refusal is not None or unreadable or done.missing & set(part.needs):
            is_lost = unreadable or refusal is None or refusal.reason in _LEAVES_NOTHING
            done.missing |= {part.name} if is_lost else set()
            continue
        if not _apply(cluster, objects, snapshot, done) and not _serves(part, objects, snapshot):
            done.missing.add(part.name)
        if sum(isinstance(each, ClusterUnavailable) for each in done.failures) > _MOST_OUTAGES:
            return  # nobody is there: each further part would only wait
    try:
        for key in _obsolete(snapshot, rendered):
            _delete(cluster, plan.tier, snapshot.live[key].content, done, why="the spec does not ask for it any more")
    except ClusterError as error:
        done.failures.append(error)


def try_engines(cluster: Cluster, plan: TierPlan, snapshot: Snapshot) -> ClusterError | None:
    """Return why the engines of a plan cannot be applied; None where they run already, or where they can."""
    key = names.engine_key(plan.tier)
    live = snapshot.live.get(key)
    if plan.pin is not None or key in snapshot.foreign or key.kind in snapshot.unreadable:
        return None
    wanted = deployment(plan)
    if live is not None and is_applied(wanted, live.content):
        return None
    try:
        cluster.try_apply(wanted, over=None if live is None else live.uid)
    except ClusterError as error:
        return error
    return None


_LEAVES_NOTHING: Final = claim.UNUSABLE | {Reason.OBJECT_NOT_OURS}
"""Refusals of what others need; any other one leaves a part as it was, and that serves."""

_MOST_OUTAGES: Final = 2


def _delete(cluster: Cluster, tier: TierRef, found: Mapping[str, Any], done: Changes, *, why: str) -> None:
    """Delete an object, unless the tier does not control it: what people made stays, whatever its labels are."""
    if not names.is_controlled(found, tier):
        return
    key = names.key_of(found)
    cluster.delete(key, tier.namespace, uid=found["metadata"]["uid"])
    done.deleted.append(Deletion(key, why))


def _serves(part: parts.Part, objects: tuple[Manifest, ...], snapshot: Snapshot) -> bool:
    return part.serves_as_it_was and all(names.key_of(each) in snapshot.live for each in objects)


def _apply(cluster: Cluster, manifests: tuple[Manifest, ...], snapshot: Snapshot, done: Changes) -> bool:
    """Apply the objects of one part in their order, up to the first that fails, and tell whether none did."""
    for manifest in manifests:
        key = names.key_of(manifest)
        live = snapshot.live.get(key)
        if live is not None and key.kind == names.LEASE_KIND:
            continue  # its holder renews it all the time, and there is nothing of ours in it
        try:
            applied = live.content if live is not None and is_applied(manifest, live.content) else None
            applied = applied or cluster.apply(manifest, over=None if live is None else live.uid)
        except ClusterError as error:
            done.failures.append(error)
            return False
        if live is None or not _is_as_before(live, applied):
            done.written.append(key)
    return True


def apply_preflight(
    cluster: Cluster, plan: TierPlan, snapshot: Snapshot, status: Mapping[str, Any], done: Changes
) -> Preflight:
    """Bring the preflight of a tier a step further and return how far it is.

    Args:
        cluster: what is read and written; not at all once a claim was found good, or is known not to be tried.
        plan: what the tier becomes.
        snapshot: what stands.
        status: what the status says so far.
        done: what this pass does.

    Raises:
        ClusterError: the Job could not be read or written.
    """
    if snapshot.claim is not None and snapshot.claim.is_terminating and not plan.spec.paused:
        # Its pod, ended or not, holds the claim.
        _delete_job(cluster, plan, names.preflight_key(plan.tier), done, why="the claim was deleted")
        return Preflight(state=PreflightState.WAITING)
    storage = status.get("storage") or {}
    known = preflight.remembered(plan.spec, snapshot, storage)
    if known is not None and known.state is PreflightState.OFF:
        return _end_preflight(cluster, plan, known, status, done)
    if known is not None or plan.spec.paused:
        return known or Preflight(state=PreflightState.RUNNING, detail="the tier is paused")
    key = preflight.key_of(plan.spec, snapshot)
    job = read_preflight(cluster, plan.tier)
    if job.key and job.key != key and not job.is_foreign:
        _delete_job(cluster, plan, names.preflight_key(plan.tier), done, why="another claim is to be tried")
    elif not job.uid:
        is_bound = snapshot.claim is not None and snapshot.claim.phase == "Bound"
        cluster.apply(preflight.job(plan, key, places_volume=plan.is_on_one_node and not is_bound), over=None)
    return preflight.outcome(key, storage, job)


def apply_pool(cluster: Cluster, view: View, plan: TierPlan, status: Mapping[str, Any], done: Changes) -> View:
    """Make the InferencePool as it is asked for, or remove the one that was; return the view with how that went.

    Its kind is not ours, and a cluster need not have it: nothing else waits for it, and no watch tells of it.
    """
    try:
        problem, retry_after = _pool(cluster, plan, status, done), _POOL_SECONDS
    except KindMissing:
        problem, retry_after = _no_pool_kind(), _POOL_SECONDS
    except ClusterError as error:
        problem, retry_after = routing.pool_failed(error, status), error.retry_after
    if problem is None:
        return replace(view, has_pool=plan.spec.routing.inference_pool is not None)
    return replace(view, pool=problem, pool_retry_after=retry_after)


_POOL_SECONDS: Final[float | None] = 5.0
"""After which a person may have seen to what stands in the way."""


def _no_pool_kind() -> Problem:
    return Problem(
        reason=Reason.POOL_KIND_MISSING,
        message=f"the cluster has no {names.POOL_KIND} of {names.INFERENCE_POOL}: install the definitions of "
        "Gateway API's inference extension, or remove spec.routing.inferencePool; it is tried again soon, less often "
        "each time; everything else goes on",
    )


def _pool(cluster: Cluster, plan: TierPlan, status: Mapping[str, Any], done: Changes) -> Problem | None:
    manifest, key = routing.pool(plan.spec, plan.tier), names.pool_key(plan.tier)
    if manifest is None and not (status.get("routing") or {}).get("inferencePool"):
        return None
    found = cluster.get(key, plan.tier.namespace)
    is_ours = found is not None and names.is_ours(found, plan.tier)
    if manifest is None:
        if found is not None and is_ours:
            _delete(cluster, plan.tier, found, done, why="spec.routing.inferencePool does not ask for it any more")
        return None
    if found is not None and not is_ours:
        return Problem(
            reason=Reason.POOL_FAILED,
            message=f"{key} exists and does not belong to this tier; it is left as it is: delete or rename it, or "
            "remove spec.routing.inferencePool; it is looked at again soon, less often each time",
        )
    if found is not None and is_applied(manifest, found):
        return None
    applied = cluster.apply(manifest, over=None if found is None else found["metadata"]["uid"])
    if found is None or applied["metadata"]["resourceVersion"] != found["metadata"]["resourceVersion"]:
        done.written.append(key)
    return None


def _delete_job(cluster: Cluster, plan: TierPlan, key: ObjectKey, done: Changes, *, why: str) -> None:
    found = cluster.get(key, plan.tier.namespace)
    if found is not None:
        _delete(cluster, plan.tier, found, done, why=why)


def _is_told(status: Mapping[str, Any], kind: str, problem: Problem) -> bool:
    conditions = status.get("conditions", ())
    told: Mapping[str, Any] = next((each for each in conditions if each["type"] == kind), {})
    return (told.get("reason"), told.get("message")) == (problem.reason.value, problem.message)


def _end_preflight(
    cluster: Cluster, plan: TierPlan, off: Preflight, status: Mapping[str, Any], done: Changes
) -> Preflight:
    """Delete a Job that nobody waits for any more. That it is off is told afterwards, so it is looked for once."""
    if _is_told(status, preflight.CHECKED.kind, unknown(Reason.PREFLIGHT_OFF, off.detail)):
        return off
    if plan.spec.paused:
        return replace(off, detail=f"{off.detail}; the tier is paused, and a Job that runs goes on")
    _delete_job(cluster, plan, names.preflight_key(plan.tier), done, why=off.detail)
    return off


def apply_live_settings(cluster: Cluster, spec: TierSpec, snapshot: Snapshot, done: Changes) -> None:
    """Tell engines that run what they are to follow at once, whatever else cannot be carried out."""
    standing = snapshot.live.get(ObjectKey(api_version="v1", kind="ConfigMap", name=names.config(snapshot.tier)))
    if standing is not None:
        _apply(cluster, (with_live_settings(standing.content, spec, snapshot.tier),), snapshot, done)


def _is_as_before(live: Live, applied: Manifest) -> bool:
    """Tell whether applying changed nothing of ours: a controller may have written a status meanwhile."""
    if applied["metadata"]["resourceVersion"] == live.resource_version:
        return True
    return _ours_of(live.content) == _ours_of(applied)


def _ours_of(manifest: Mapping[str, Any]) -> dict[str, Any]:
    metadata = manifest["metadata"]
    annotations = metadata.get("annotations") or {}
    return {
        **{field: value for field, value in manifest.items() if field not in {"metadata", "status"}},
        "labels": metadata.get("labels"),
        "owners": metadata.get("ownerReferences"),
        "annotations": {key: value for key, value in annotations.items() if key.startswith(f"{names.GROUP}/")},
    }


def _obsolete(snapshot: Snapshot, rendered: set[ObjectKey]) -> list[ObjectKey]:
    """Return what we own and render no more. Never a claim: no edit of a tier may cost anybody their data."""
    return sorted(key for key in snapshot.live if key not in rendered and key.kind != names.CLAIM_KIND)
