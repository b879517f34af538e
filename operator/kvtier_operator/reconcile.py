# SPDX-License-Identifier: Apache-2.0
"""One reconcile of one tier: read, plan, apply each part, report.

Level-based: a reconcile gets a name, not a change, and looks at everything again. Every trigger may call it, in any
order and any number of times; twice is the same as once. Whatever one reconcile leaves undone, the next one repairs.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Final

from kvtier_operator import names, status
from kvtier_operator.api import TierSpec, parse
from kvtier_operator.api.parse import Asked, read_annotations
from kvtier_operator.api.reasons import Reason, Refusal
from kvtier_operator.apply import Changes, Deletion, apply_live_settings, apply_parts, release_claim, try_engines
from kvtier_operator.conditions import AppliedStage, Observation, PlannedStage, Progress, ReadStage
from kvtier_operator.errors import ClusterError, SpecInvalid
from kvtier_operator.gather import JANITOR_PATIENCE, MOUNT_PATIENCE, gather
from kvtier_operator.inventory import FRESH_SECONDS, Inventory
from kvtier_operator.kube.cluster import Cluster
from kvtier_operator.names import Manifest, ObjectKey, TierName, TierRef
from kvtier_operator.observe.canary import Chunk
from kvtier_operator.observe.monitor import Monitor
from kvtier_operator.observe.poller import Poller
from kvtier_operator.observe.targets import make_observation_plan
from kvtier_operator.parts import routing
from kvtier_operator.parts.edit_impact import applicable_spec, keep_pods
from kvtier_operator.parts.external.pods import PodClaims, live_settings
from kvtier_operator.parts.preflight import ALWAYS
from kvtier_operator.plan import decide, decisions, make_plan, nodes
from kvtier_operator.plan.capacity import make_capacity
from kvtier_operator.plan.decisions import Decisions
from kvtier_operator.plan.janitor_config import JANITOR_IMAGE
from kvtier_operator.snapshot import Nodes, Snapshot

logger = logging.getLogger(__name__)

Clock = Callable[[], datetime]

_UNTIL_NODES_CHANGE: Final = frozenset({Reason.NODES_UNKNOWN, Reason.NO_NODE_MATCHES, Reason.DOES_NOT_FIT})

PATIENCE: Final = 3
"""Failures in a row after which a failure that may pass by itself is shown in the status."""


EXTERNAL_SECONDS: Final = 15.0
"""How often pods of other owners are listed: no watch reports those without a label of ours."""

FOREIGN_SECONDS: Final = 5.0
"""How often it is checked whether an object that is in the way of a tier is still there."""


@dataclass(frozen=True, kw_only=True)
class ReconcileResult:
    """The result of one reconcile."""

    exists: bool
    """False where there is no such tier, or it is being deleted: nothing more is to be done for it."""
    written: tuple[ObjectKey, ...] = ()
    """Objects that were created or changed."""
    deleted: tuple[Deletion, ...] = ()
    failure: ClusterError | None = None
    """Why the reconcile is to be repeated soon."""
    requeue_after: float | None = None
    """Seconds until the next reconcile, for changes that no watch reports."""
    poll_after: float | None = None
    """Delay before polling again for a condition that may clear by itself; doubles each time. None: do not poll."""
    is_left: bool = False
    """The tier belongs to another operator."""
    waits_for_nodes: bool = False
    """Whether another node may end what holds the tier up."""
    is_idle: bool = False
    """Whether nothing was left to do, and nothing is but to wait for a change."""


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Everything that a reconcile decides by besides the cluster."""

    connector_image: str
    """Image that brings the connector into the engine pods."""
    janitor_image: str = JANITOR_IMAGE
    """Image of the janitor, where the tier names none."""
    listen_host: str = names.EVERY_IPV4_ADDRESS
    """Address that the servers in the pods listen on."""
    clock: Clock
    """For the times in the status."""
    inventory: Inventory | None = None
    """The nodes; None where the operator may not read them."""
    poller: Poller[TierName] | None = None
    """Asks pods for their reports; None asks no pod."""
    monitor: Monitor | None = None
    """Asks the engines; None asks no engine."""
    claims: PodClaims = field(default_factory=PodClaims)
    """The pods that the selectors of tiers have found."""
    may_work: Callable[[Manifest], bool] = lambda _body: True
    """Tells whether a tier belongs to this operator."""

    def read(self, cluster: Cluster, body: Manifest) -> Snapshot:
        """Read everything but the nodes."""
        return _with_lease(cluster, gather(cluster, body, now=self.clock(), poller=self.poller, claims=self.claims))


def reconcile(cluster: Cluster, tier: TierName, inputs: Inputs, *, attempt: int = 1) -> ReconcileResult:
    """Bring one tier closer to its spec and report how far it is.

    A failure of the cluster is part of the result: raising would lose what was done before.
    """
    try:
        body = cluster.get(ObjectKey(api_version=names.API_VERSION, kind=names.KIND, name=tier.name), tier.namespace)
    except ClusterError as error:
        return ReconcileResult(exists=True, failure=error)
    # Children of a deleted tier go with it; a child that is made anew would hold up its namespace.
    exists = body is not None and "deletionTimestamp" not in body["metadata"]
    if body is None or not exists or not inputs.may_work(body):
        inputs.claims.note(TierRef(namespace=tier.namespace, name=tier.name, uid=""), ())
        if inputs.monitor is not None:
            inputs.monitor.forget(tier)
        return ReconcileResult(exists=exists, is_left=exists)
    done = _Attempt(cluster, body, inputs)
    done.run()
    result = ReconcileResult(
        exists=True,
        written=tuple(done.changes.written),
        deleted=tuple(done.changes.deleted),
        failure=done.failure,
        requeue_after=_requeue_after(done.progress, done.changes),
        poll_after=done.changes.poll_after,
        waits_for_nodes=_waits_for_nodes(done.progress),
    )
    _report_deletions(cluster, body, result.deleted, inputs.clock)
    reported = done.progress.failure
    is_reported = reported is None or not reported.passes_soon or attempt >= PATIENCE
    if done.failure is not None and not is_reported:
        return result
    try:
        is_same = _report(cluster, body, _observed(done.progress, body, inputs.monitor), inputs.clock)
    except ClusterError as error:
        return replace(result, failure=done.failure or error)
    return replace(result, is_idle=is_same and _is_idle(result, done.progress, body))


class _Attempt:
    """Everything of one reconcile but its report. A spec that cannot be carried out falls back to a part of it."""

    def __init__(self, cluster: Cluster, body: Manifest, inputs: Inputs) -> None:
        self.cluster, self.body, self.inputs = cluster, body, inputs
        self.changes, self.asked = Changes(), Asked()
        self.progress = Progress(tier=names.tier_ref(body), generation=body["metadata"].get("generation", 0))
        self.failure: ClusterError | None = None
        """The failure after which the reconcile is tried again; `progress` has the one that is reported."""

    def run(self) -> None:
        self._read()
        refusals = [*self.changes.refusals, *([] if self.progress.refusal is None else [self.progress.refusal])]
        refusal = None
        if refusals:
            refusal = replace(refusals[0], message="; ".join(dict.fromkeys(each.message for each in refusals)))
        failures = self.changes.failures
        # The failure that passes first says when to try again; the one that lasts is reported.
        self.failure = min(failures, key=lambda each: each.retry_after, default=None)
        lasting = [each for each in failures if not each.passes_soon] or failures
        reported = lasting[0] if lasting else None
        if len(lasting) > 1:
            reported = type(lasting[0])("; ".join(dict.fromkeys(map(str, lasting))))
        self.progress = replace(self.progress, refusal=refusal, failure=reported)

    def _read(self) -> None:
        spec: TierSpec | None = None
        try:
            self.asked = read_annotations(self.body)
            spec = self._as_asked(parse(self.body))
        except SpecInvalid as error:
            self.progress = replace(self.progress, invalid=error)
        self.progress = replace(self.progress, spec=spec)
        try:
            snapshot = self.inputs.read(self.cluster, self.body)
            if release_claim(self.cluster, self.body, snapshot, self.changes):
                snapshot = self.inputs.read(self.cluster, self.body)
        except ClusterError as error:
            self.changes.failures.append(error)
            return
        if self.progress.invalid is not None and self.progress.invalid.field.startswith("metadata."):
            return
        if spec is None and (spec := self._applicable(snapshot)) is None:
            if (live := live_settings(self.body)) is not None and not self._as_asked(live).paused:
                apply_live_settings(self.cluster, live, snapshot, self.changes)
            return
        snapshot = replace(snapshot, nodes=_read_nodes(self.inputs.inventory, spec, snapshot))
        self._reach(ReadStage(generation=self.progress.generation, spec=spec, snapshot=snapshot))
        decided = decide(spec, snapshot.tier, snapshot, may_assume=True)
        if not isinstance(decided, Refusal):
            self._carry_out(spec, decided, snapshot)
            return
        self.progress = replace(self.progress, refusal=decided)
        if (applicable := self._fall_back(spec, snapshot)) is not None:
            self._carry_out(*applicable, snapshot)

    def _carry_out(self, spec: TierSpec, decided: Decisions, snapshot: Snapshot) -> None:
        stage = self._plan(spec, decided, snapshot)
        if "Pod" in snapshot.unreadable:
            self.changes.failures.append(snapshot.unreadable["Pod"])
        if not spec.paused and (rejection := try_engines(self.cluster, stage.plan, snapshot)) is not None:
            # Nothing else moves to a spec that no engine can follow: everything that runs goes on as it is.
            self.changes.failures.append(rejection)
            if (applicable := self._fall_back(spec, snapshot)) is None:
                return
            spec, decided = applicable
            stage = self._plan(spec, decided, snapshot)
        if spec.paused:
            return
        changes = self.changes
        apply_parts(self.cluster, stage.plan, snapshot, self.body.get("status") or {}, changes)
        if (changes.written or changes.deleted) and not changes.failures:
            try:
                # Report the new state: the reconcile that made it is the one to report it.
                snapshot = replace(self.inputs.read(self.cluster, self.body), nodes=snapshot.nodes)
                changes.failures += [error for kind, error in snapshot.unreadable.items() if kind in changes.kinds]
            except ClusterError as error:
                changes.failures.append(error)
        applied = AppliedStage(
            generation=stage.generation,
            spec=spec,
            snapshot=snapshot,
            plan=stage.plan,
            capacity=stage.capacity,
            problems=changes.problems,
        )
        self._reach(applied)

    def _plan(self, spec: TierSpec, decided: Decisions, snapshot: Snapshot) -> PlannedStage:
        plan = make_plan(
            spec,
            snapshot,
            decided,
            connector_image=self.inputs.connector_image,
            janitor_image=self.inputs.janitor_image,
            restart=self.asked.restart,
        )
        plan = replace(keep_pods(plan, snapshot), listen_host=self.inputs.listen_host)
        capacity = make_capacity(spec, plan.decisions, snapshot, plan.config_digest)
        generation = self.progress.generation
        stage = PlannedStage(generation=generation, spec=spec, snapshot=snapshot, plan=plan, capacity=capacity)
        self._reach(stage)
        return stage

    def _reach(self, stage: ReadStage) -> None:
        self.progress = replace(self.progress, spec=stage.spec, stage=stage)

    def _applicable(self, snapshot: Snapshot) -> TierSpec | None:
        """Return the part of a refused spec that replaces no engine; None where no engine runs."""
        image, restart = self.inputs.connector_image, self.asked.restart
        spec = applicable_spec(self.body.get("spec"), snapshot, connector_image=image, restart=restart)
        return None if spec is None else self._as_asked(spec)

    def _fall_back(self, refused: TierSpec, snapshot: Snapshot) -> tuple[TierSpec, Decisions] | None:
        """Return the same with its decisions. Where it cannot be carried out either, write the live settings alone."""
        spec = self._applicable(snapshot)
        decided = None if spec is None else decide(spec, snapshot.tier, snapshot, may_assume=True, is_running=True)
        if spec is not None and isinstance(decided, Decisions):
            return spec, decided
        if not refused.paused:
            apply_live_settings(self.cluster, refused, snapshot, self.changes)
        return None

    def _as_asked(self, spec: TierSpec) -> TierSpec:
        return spec.model_copy(update={"paused": True}) if self.asked.is_paused else spec


def _requeue_after(progress: Progress, changes: Changes) -> float | None:
    """Return when to look again for changes that no watch reports: objects of others, Events, how long a state lasts.

    None for the usual interval.
    """
    if _waits_for_nodes(progress):
        return FRESH_SECONDS  # for the pods on them, which are not watched
    if progress.stage is None:
        return None
    spec, snapshot = progress.stage.spec, progress.stage.snapshot
    is_in_the_way = any(each.reason is Reason.OBJECT_NOT_OURS for each in changes.refusals)
    if is_in_the_way or (snapshot.preflight.is_foreign and spec.proof.preflight == ALWAYS):
        return FOREIGN_SECONDS
    if spec.engine.external is not None:
        return EXTERNAL_SECONDS
    if any(pod.is_held_up for pod in snapshot.pods):
        return MOUNT_PATIENCE.total_seconds()
    is_judged_later = snapshot.janitor.is_missing and not snapshot.janitor.is_overdue
    return JANITOR_PATIENCE.total_seconds() * 1.2 if is_judged_later else None


def _is_idle(result: ReconcileResult, progress: Progress, body: Manifest) -> bool:
    """Tell whether a reconcile that wrote no status depends on nothing but watched objects and the reports of pods."""
    stage, is_stopped = progress.stage, progress.invalid or progress.refusal or result.failure
    if is_stopped or result.written or result.deleted or not isinstance(stage, AppliedStage):
        return False
    pods, janitor = stage.snapshot.pods, stage.snapshot.janitor
    is_awaited = janitor.is_awaited or any(pod.is_awaited for pod in pods)
    return not is_awaited and result.requeue_after is result.poll_after is None and not routing.asks_for_pool(body)


def _waits_for_nodes(progress: Progress) -> bool:
    stage, refusal = progress.stage, progress.refusal
    is_assumed = isinstance(stage, PlannedStage) and stage.plan.decisions.assumed is not None
    return is_assumed or (refusal is not None and refusal.reason in _UNTIL_NODES_CHANGE)


def _observed(progress: Progress, body: Manifest, monitor: Monitor | None) -> Progress:
    """Add the findings of asking the engines; engines of a tier without a plan are not asked."""
    stage = progress.stage
    if monitor is None or not isinstance(stage, PlannedStage):
        return progress
    chunking = stage.plan.decisions.chunking
    chunk = Chunk(tokens=chunking.tokens, blocks=chunking.blocks or 1)
    plan = make_observation_plan(stage.spec, stage.snapshot, generation=stage.plan.generation.digest, chunk=chunk)
    known = ((body.get("status") or {}).get("proof") or {}).get("rollout")
    tier = TierName(namespace=progress.tier.namespace, name=progress.tier.name)
    findings = monitor.findings(tier, plan, proven_rollout=known)
    return replace(progress, stage=replace(stage, observation=Observation(plan=plan, findings=findings)))


def _with_lease(cluster: Cluster, snapshot: Snapshot) -> Snapshot:
    """Read the Lease of a janitor that waits for it: Leases are not watched, and it may have been deleted."""
    key = ObjectKey(api_version=names.COORDINATION, kind=names.LEASE_KIND, name=names.janitor(snapshot.tier))
    usage = snapshot.janitor.usage
    if usage is None or usage.is_active or key not in snapshot.live or cluster.refresh(key, snapshot.tier.namespace):
        return snapshot
    return replace(snapshot, live={each: live for each, live in snapshot.live.items() if each != key})


def _read_nodes(inventory: Inventory | None, spec: TierSpec, snapshot: Snapshot) -> Nodes | None:
    """Return the nodes, with the pods on them where those decide something."""
    with_pods = nodes.needs_pods(spec, decisions.read(snapshot.engines.decisions))
    return None if inventory is None else inventory.look(with_pods=with_pods)


def _report(cluster: Cluster, body: Manifest, progress: Progress, clock: Clock) -> bool:
    """Write the status where it changed, post an Event for each transition, and tell whether it is the same."""
    previous: Mapping[str, Any] = body.get("status") or {}
    now = _timestamp(clock)
    wanted = status.report(progress, previous, now=now)
    changes = status.changes(previous, wanted)
    failure = progress.failure
    if not changes:
        return True
    if failure is not None:
        before, after = (_without_messages(each, lasts=not failure.passes_soon) for each in (previous, wanted))
        if before == after:
            return False
    cluster.patch_status(progress.tier, changes, resource_version=body["metadata"]["resourceVersion"])
    for transition in status.transitions(previous, wanted):
        cluster.post_event(_event(body, progress.tier, transition, now=now))
    return False


def _without_messages(status_: Mapping[str, Any], *, lasts: bool) -> dict[str, Any]:
    """Return a status without messages; of a failure that lasts, without the numbers in them.

    Some failures have a new text each time: a port, an address. Each change of the status wakes the tier at once,
    instead of after its back-off.
    """
    conditions = [
        {**condition, "message": _NUMBERED.sub("", condition["message"]) if lasts else ""}
        for condition in status_.get("conditions", ())
    ]
    return {**status_, "conditions": conditions}


_NUMBERED: Final = re.compile(r"\S*\d\S*")


def _report_deletions(cluster: Cluster, body: Manifest, deleted: tuple[Deletion, ...], clock: Clock) -> None:
    """Post an Event for each deletion. One that cannot be posted is logged: the deletion is done in any case."""
    now = _timestamp(clock)
    for key, why in deleted:
        transition = status.Transition(level="Normal", reason="Deleted", message=f"deleted {key}: {why}")
        try:
            cluster.post_event(_event(body, names.tier_ref(body), transition, now=now))
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
