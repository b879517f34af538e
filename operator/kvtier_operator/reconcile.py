# SPDX-License-Identifier: Apache-2.0
"""One pass over one tier: gather, plan, apply each part, prune, report.

Level-based: it is given a name, not a change, and looks at everything again, so every trigger may call it, in any order
and any number of times; twice is the same as once. Whatever one pass leaves undone, the next one repairs.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Final

from kvtier_operator import names, status
from kvtier_operator.api import TierSpec, parse
from kvtier_operator.api.parse import Asked, read_annotations
from kvtier_operator.api.reasons import Reason
from kvtier_operator.apply import (
    Changes,
    Deletion,
    apply_live_settings,
    apply_parts,
    apply_pool,
    apply_preflight,
    try_engines,
)
from kvtier_operator.conditions import PreflightState
from kvtier_operator.errors import ClusterError, SpecInvalid
from kvtier_operator.gather import JANITOR_PATIENCE, MOUNT_PATIENCE, gather
from kvtier_operator.inventory import FRESH_SECONDS, Inventory
from kvtier_operator.kube.cluster import Cluster
from kvtier_operator.names import Manifest, ObjectKey, TierName, TierRef
from kvtier_operator.observe.canary import Chunk
from kvtier_operator.observe.monitor import Monitor
from kvtier_operator.observe.poller import Poller
from kvtier_operator.observe.targets import make_observation_plan
from kvtier_operator.parts.edit_impact import applicable_spec, keep_pods
from kvtier_operator.parts.engine import outdated
from kvtier_operator.plan import Decisions, Refusal, decide, decisions, make_plan, nodes
from kvtier_operator.plan.capacity import make_capacity
from kvtier_operator.plan.janitor_config import JANITOR_IMAGE
from kvtier_operator.snapshot import Nodes, Snapshot

logger = logging.getLogger(__name__)

Clock = Callable[[], datetime]

_UNTIL_NODES_CHANGE: Final = frozenset({Reason.NODES_UNKNOWN, Reason.NO_NODE_MATCHES, Reason.DOES_NOT_FIT})

PATIENCE: Final = 3
"""Failures in a row after which a failure that may pass by itself is shown in the status."""


@dataclass(frozen=True, kw_only=True)
class ReconcileResult:
    """What one pass did."""

    exists: bool
    """False where there is no such tier, or it is going: nothing more is to be done for it."""
    written: tuple[ObjectKey, ...] = ()
    """Objects that the pass created or changed."""
    deleted: tuple[Deletion, ...] = ()
    failure: ClusterError | None = None
    """Why the pass is to be repeated soon."""
    existing_claim: str | None = None
    """The claim of the user's own that the tier names."""
    again_after: float | None = None
    """Seconds until something is to be looked at that no watch tells of."""
    recheck_after: float | None = None
    """Seconds until something is tried again that nothing waits for; later each time, as long as it does not pass."""
    is_left: bool = False
    """It is another operator's to work on, for now or for good."""
    waits_for_nodes: bool = False
    """Whether another node may end what holds the tier up."""


def reconcile(  # noqa: PLR0913  what a pass works with, each by its name
    cluster: Cluster,
    tier: TierName,
    *,
    connector_image: str,
    janitor_image: str = JANITOR_IMAGE,
    clock: Clock,
    inventory: Inventory | None = None,
    probes: Poller[TierName] | None = None,
    proofs: Monitor | None = None,
    attempt: int = 1,
    listen_host: str = names.EVERY_IPV4_ADDRESS,
    may_work: Callable[[Manifest], bool] = lambda _body: True,
) -> ReconcileResult:
    """Bring one tier closer to its spec and report how far it is.

    Args:
        cluster: what is read and written.
        tier: which one.
        connector_image: image that brings the connector into the engine pods.
        clock: for the times in the status.
        janitor_image: image of the janitor, where the tier names none.
        inventory: the nodes; None where the operator may not read them.
        probes: what pods say about themselves; None asks no pod.
        proofs: who asks the engines; None asks nobody.
        listen_host: address that the servers in the pods listen on.
        attempt: 1, and one more for each failure in a row before this pass.
        may_work: tells whether this operator is the one that works on the tier.

    Returns:
        What was done. A failure of the cluster is part of it: raising would lose what was done before.
    """
    try:
        body = cluster.get(ObjectKey(api_version=names.API_VERSION, kind=names.KIND, name=tier.name), tier.namespace)
    except ClusterError as error:
        return ReconcileResult(exists=True, failure=error)
    # Children of a tier that is going are going with it; whoever makes them anew holds up its namespace.
    if body is None or "deletionTimestamp" in body["metadata"]:
        if proofs is not None:
            proofs.forget(tier)
        return ReconcileResult(exists=False)
    if not may_work(body):
        if proofs is not None:
            proofs.forget(tier)
        return ReconcileResult(exists=True, is_left=True)
    sources = _Sources(
        connector_image=connector_image,
        janitor_image=janitor_image,
        listen_host=listen_host,
        inventory=inventory,
        probes=probes,
        clock=clock,
    )
    act = _act(cluster, body, sources)
    outcome = ReconcileResult(
        exists=True,
        written=act.written,
        deleted=act.deleted,
        failure=act.failure,
        existing_claim=None if act.view.spec is None else act.view.spec.volume.existing_claim,
        again_after=_again_after(act.view),
        recheck_after=act.view.pool_retry_after,
        waits_for_nodes=_waits_for_nodes(act.view),
    )
    _tell_of_deletions(cluster, body, act.deleted, clock)
    is_worth_telling = act.told is None or not _passes_soon(act.told) or attempt >= PATIENCE
    if act.failure is not None and not is_worth_telling:
        return outcome
    try:
        _report(cluster, body, _asked(act.view, body, proofs), clock)
    except ClusterError as error:
        return replace(outcome, failure=act.failure or error)
    return outcome


@dataclass(frozen=True, kw_only=True)
class _Act:
    view: status.View
    written: tuple[ObjectKey, ...] = ()
    deleted: tuple[Deletion, ...] = ()
    failure: ClusterError | None = None
    """After which the pass is tried again."""
    told: ClusterError | None = None
    """What is worth telling, if it lasts."""


@dataclass(frozen=True, kw_only=True)
class _Sources:
    """What decisions of a pass are made from, besides the cluster."""

    connector_image: str
    janitor_image: str
    listen_host: str
    inventory: Inventory | None
    probes: Poller[TierName] | None
    clock: Clock

    def look(self, cluster: Cluster, body: Manifest) -> Snapshot:
        """Read everything but the nodes."""
        tier, existing = names.tier_ref(body), names.existing_claim_of(body)
        return _with_lease(
            cluster, gather(cluster, tier, existing_claim=existing, now=self.clock(), probes=self.probes)
        )


def _act(cluster: Cluster, body: Manifest, sources: _Sources) -> _Act:
    """Do everything but report."""
    tier = names.tier_ref(body)
    view = status.View(generation=body["metadata"].get("generation", 0), tier=tier, spec=None, snapshot=None)
    spec: TierSpec | None = None
    try:
        asked = read_annotations(body)
        spec = _paused_as_asked(parse(body), asked)
    except SpecInvalid as error:
        view = replace(view, invalid=error)
        if error.field.startswith("metadata."):
            return _Act(view=view)
    view = replace(view, spec=spec)
    try:
        snapshot = sources.look(cluster, body)
    except ClusterError as error:
        return _Act(view=replace(view, failure=error), failure=error, told=error)
    if spec is None and (spec := _applicable(body, snapshot, asked, sources)) is None:
        return _Act(view=view)
    snapshot = replace(snapshot, nodes=_look(sources.inventory, spec, snapshot))
    view = replace(view, spec=spec, snapshot=snapshot)
    decided = decide(spec, tier, snapshot, may_assume=True)
    if isinstance(decided, Refusal):
        view = replace(view, refusal=decided)
        runs = _applicable(body, snapshot, asked, sources)
        again = decided if runs is None else decide(runs, tier, snapshot, may_assume=True, is_running=True)
        if runs is None or isinstance(again, Refusal):
            done = Changes()
            if not spec.paused:
                apply_live_settings(cluster, spec, snapshot, done)
            return _concluded(view, done)
        spec, decided = runs, again
        view = replace(view, spec=spec)
    return _carry_out(cluster, body, spec, decided, asked, view, sources)


def _carry_out(  # noqa: PLR0913, PLR0917  what was found out, each by its name
    cluster: Cluster,
    body: Manifest,
    spec: TierSpec,
    decided: Decisions,
    asked: Asked,
    view: status.View,
    sources: _Sources,
    *,
    rejected: ClusterError | None = None,
) -> _Act:
    """Plan what the spec asks for and apply it; `rejected` is why that is not the spec as it is stored."""
    snapshot = view.snapshot
    assert snapshot is not None
    plan = make_plan(
        spec,
        snapshot,
        decided,
        connector_image=sources.connector_image,
        janitor_image=sources.janitor_image,
        restart=asked.restart,
    )
    plan = keep_pods(plan, snapshot, janitor_image=sources.janitor_image)
    plan = replace(plan, listen_host=sources.listen_host)
    decided = plan.decisions
    view = replace(
        view,
        assumed=decided.assumed,
        sizing=plan.sizing,
        capacity=make_capacity(spec, decided, snapshot),
        node_bytes=decided.node_bytes,
        current=plan.generation,
        keeps_pods=plan.pin is not None,
        outdated=outdated(plan),
        chunking=decided.chunking,
    )
    done = Changes(failures=[snapshot.unreadable["Pod"]] if "Pod" in snapshot.unreadable else [])
    if rejected is not None:
        done.failures.append(rejected)
    elif not spec.paused and (refusal := try_engines(cluster, plan, snapshot)) is not None:
        # Nothing else moves to a spec that no engine can follow: what runs goes on as it is.
        runs = _applicable(body, snapshot, asked, sources)
        again = None if runs is None else decide(runs, view.tier, snapshot, may_assume=True, is_running=True)
        if runs is not None and isinstance(again, Decisions):
            view = replace(view, spec=runs)
            return _carry_out(cluster, body, runs, again, asked, view, sources, rejected=refusal)
        done.failures.append(refusal)
        return _concluded(view, done)
    try:
        view = replace(view, preflight=apply_preflight(cluster, plan, snapshot, body.get("status") or {}, done))
    except ClusterError as error:
        done.failures.append(error)
    tried = view.preflight
    if spec.paused:
        return _concluded(view, done)
    apply_parts(
        cluster,
        plan,
        snapshot,
        done,
        starts_engines=tried is not None and tried.state in {PreflightState.OFF, PreflightState.PASSED},
    )
    view = apply_pool(cluster, view, plan, body.get("status") or {}, done)
    if (done.written or done.deleted) and not done.failures:
        try:
            # Report what stands now: the pass that made it is the one to tell.
            view = replace(view, snapshot=replace(sources.look(cluster, body), nodes=snapshot.nodes))
            done.failures += (view.snapshot or snapshot).unreadable.values()
        except ClusterError as error:
            done.failures.append(error)
    return _concluded(view, done)


def _applicable(body: Manifest, snapshot: Snapshot, asked: Asked, sources: _Sources) -> TierSpec | None:
    """Return what of a refused spec replaces no engine; None where no engine runs."""
    spec = applicable_spec(body.get("spec"), snapshot, connector_image=sources.connector_image, restart=asked.restart)
    return None if spec is None else _paused_as_asked(spec, asked)


def _paused_as_asked(spec: TierSpec, asked: Asked) -> TierSpec:
    return spec.model_copy(update={"paused": True}) if asked.is_paused else spec


def _concluded(view: status.View, done: Changes) -> _Act:
    """Return the view with everything that went wrong."""
    refusals = [*done.refusals, *([] if view.refusal is None else [view.refusal])]
    refusal = None
    if refusals:
        messages = dict.fromkeys(each.message for each in refusals)
        refusal = replace(refusals[0], message="; ".join(messages))
    failures = done.failures
    # What passes soon is tried again soon; what lasts is what is told.
    soonest = min(failures, key=_patience, default=None)
    lasting = [each for each in failures if not _passes_soon(each)] or failures
    told = lasting[0] if lasting else None
    if len(lasting) > 1:
        told = type(lasting[0])("; ".join(dict.fromkeys(map(str, lasting))))
    return _Act(
        view=replace(view, refusal=refusal, failure=told),
        written=tuple(done.written),
        deleted=tuple(done.deleted),
        failure=soonest,
        told=told,
    )


def _patience(failure: ClusterError) -> float:
    return math.inf if failure.retry_after is None else failure.retry_after


def _again_after(view: status.View) -> float | None:
    """Return when something is to be judged again that no watch tells of: pods of others, Events, how long it lasts."""
    if _waits_for_nodes(view):
        return FRESH_SECONDS  # for what runs on them, which is not watched
    if view.snapshot is None:
        return None
    if any(pod.is_held_up for pod in view.snapshot.pods):
        return MOUNT_PATIENCE.total_seconds()
    is_judged_later = view.snapshot.janitor.is_missing and not view.snapshot.janitor.is_overdue
    return JANITOR_PATIENCE.total_seconds() * 1.2 if is_judged_later else None


def _waits_for_nodes(view: status.View) -> bool:
    return view.assumed is not None or (view.refusal is not None and view.refusal.reason in _UNTIL_NODES_CHANGE)


def _asked(view: status.View, body: Manifest, proofs: Monitor | None) -> status.View:
    """Add what is known from asking the engines; a tier that is held up before them is not asked."""
    if proofs is None or view.spec is None or view.snapshot is None or view.current is None:
        return view
    chunk = Chunk(tokens=view.chunking.tokens, blocks=view.chunking.blocks or 1)
    ask = make_observation_plan(view.spec, view.snapshot, generation=view.current.digest, chunk=chunk)
    known = ((body.get("status") or {}).get("proof") or {}).get("rollout")
    tier = TierName(namespace=view.tier.namespace, name=view.tier.name)
    return replace(view, ask=ask, findings=proofs.look(tier, ask, proven_rollout=known))


def _with_lease(cluster: Cluster, snapshot: Snapshot) -> Snapshot:
    """Read the Lease of a janitor that waits for it: nobody watches it, and it may have been deleted."""
    key = ObjectKey(api_version=names.COORDINATION, kind=names.LEASE_KIND, name=names.janitor(snapshot.tier))
    usage = snapshot.janitor.usage
    if usage is None or usage.is_active or key not in snapshot.live:
        return snapshot
    if cluster.refresh(key, snapshot.tier.namespace) is not None:
        return snapshot
    return replace(snapshot, live={each: live for each, live in snapshot.live.items() if each != key})


def _look(inventory: Inventory | None, spec: TierSpec, snapshot: Snapshot) -> Nodes | None:
    """Return the nodes, with what runs on them where that decides something."""
    if inventory is None:
        return None
    return inventory.look(with_pods=nodes.needs_pods(spec, decisions.read(snapshot.engines.decisions)))


def _report(cluster: Cluster, body: Manifest, view: status.View, clock: Clock) -> None:
    """Write the status where it changed, and post an Event for each transition."""
    previous: Mapping[str, Any] = body.get("status") or {}
    now = _timestamp(clock)
    wanted = status.report(view, previous, now=now)
    changes = status.changes(previous, wanted)
    is_another_failure = isinstance(view.failure, ClusterError) and not _passes_soon(view.failure)
    if not changes or (view.failure is not None and _differs_in_words_only(previous, wanted, is_another_failure)):
        return
    cluster.patch_status(view.tier, changes, resource_version=body["metadata"]["resourceVersion"])
    for transition in status.transitions(previous, wanted):
        cluster.post_event(_event(body, view.tier, transition, now=now))


def _differs_in_words_only(previous: Mapping[str, Any], wanted: Mapping[str, Any], lasts: bool) -> bool:
    """Tell whether only messages changed; of a failure that lasts, whether only numbers in them did.

    A failure whose text is new each time (a port, an address) would otherwise change the status in each pass, and each
    change wakes the tier at once instead of after its back-off.
    """
    return _without_messages(previous, lasts=lasts) == _without_messages(wanted, lasts=lasts)


def _without_messages(status_: Mapping[str, Any], *, lasts: bool) -> dict[str, Any]:
    conditions = [
        {**condition, "message": _NUMBERED.sub("", condition["message"]) if lasts else ""}
        for condition in status_.get("conditions", ())
    ]
    return {**status_, "conditions": conditions}


_NUMBERED: Final = re.compile(r"\S*\d\S*")


def _tell_of_deletions(cluster: Cluster, body: Manifest, deleted: tuple[Deletion, ...], clock: Clock) -> None:
    """Post an Event for each deletion. One that cannot be posted is logged: the deletion is done in any case."""
    now = _timestamp(clock)
    for key, why in deleted:
        told = status.Transition(level="Normal", reason="Deleted", message=f"deleted {key}: {why}")
        try:
            cluster.post_event(_event(body, names.tier_ref(body), told, now=now))
        except ClusterError as error:
            logger.warning("%s: no Event says that %s was deleted: %s", names.tier_ref(body), key, error)


def _timestamp(clock: Clock) -> str:
    return clock().astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _event(body: Manifest, tier: TierRef, transition: status.Transition, *, now: str) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"generateName": f"{tier.name}.", "namespace": tier.namespace},
        "involvedObject": {
            "apiVersion": names.API_VERSION,
            "kind": names.KIND,
            "name": tier.name,
            "namespace": tier.namespace,
            "uid": tier.uid,
            "resourceVersion": body["metadata"]["resourceVersion"],
        },
        "type": transition.level,
        "reason": transition.reason,
        # The API server takes no longer one.
        "message": transition.message[:1024],
        "source": {"component": names.FIELD_MANAGER},
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
    }


def _passes_soon(failure: ClusterError) -> bool:
    return failure.retry_after is not None and failure.retry_after <= 5  # noqa: PLR2004  seconds
