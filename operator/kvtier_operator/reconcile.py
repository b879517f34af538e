# SPDX-License-Identifier: Apache-2.0
"""One pass over one tier: gather, plan, render, apply, prune, report.

Level-based: it is given a name, not a change, and looks at everything again, so every trigger may call it, in any order
and any number of times; twice is the same as once. Whatever one pass leaves undone, the next one repairs. Knows neither
kopf nor the Kubernetes client.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Final

from kvtier_operator import manifests, names, preflights, status
from kvtier_operator.cluster import Cluster
from kvtier_operator.errors import ClusterError, ClusterForbidden, ClusterRejected, SpecInvalid
from kvtier_operator.gather import MOUNT_PATIENCE, gather
from kvtier_operator.inventory import FRESH_SECONDS, Inventory
from kvtier_operator.names import Manifest, ObjectKey, TierName, TierRef
from kvtier_operator.plan import (
    Refusal,
    RefusalReason,
    TierPlan,
    decide,
    decisions,
    make_generation,
    make_plan,
    shares,
    sizing_of,
)
from kvtier_operator.plan.capacity import make_capacity
from kvtier_operator.plan.chunks import Chunking
from kvtier_operator.plan.janitor import JANITOR_IMAGE
from kvtier_operator.plan.preflight import State
from kvtier_operator.probes import Probes
from kvtier_operator.proof.asking import make_ask
from kvtier_operator.proof.canary import Chunk
from kvtier_operator.proof.monitor import Proofs
from kvtier_operator.snapshot import Live, Nodes, Snapshot
from kvtier_operator.spec import TierSpec, parse
from kvtier_operator.spec.annotations import read_annotations

Clock = Callable[[], datetime]

JOB_SECONDS: Final = 15.0
"""How often the Job that tries a volume is looked at; what its pods do is heard of at once."""

_UNTIL_NODES_CHANGE: Final = frozenset(
    {RefusalReason.NODES_UNKNOWN, RefusalReason.NO_NODE_MATCHES, RefusalReason.DOES_NOT_FIT}
)

PATIENCE: Final = 3
"""Failures in a row after which a failure that may pass by itself is shown in the status."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one pass did."""

    exists: bool
    """False where there is no such tier, or it is going: nothing more is to be done for it."""
    written: tuple[ObjectKey, ...] = ()
    """Objects that the pass created, changed or deleted."""
    failure: ClusterError | None = None
    """Why the pass is to be repeated soon."""
    existing_claim: str | None = None
    """The claim of the user's own that the tier names."""
    again_after: float | None = None
    """Seconds until something is to be looked at that no watch tells of."""


def reconcile(  # noqa: PLR0913  what a pass works with, each by its name
    cluster: Cluster,
    tier: TierName,
    *,
    connector_image: str,
    janitor_image: str = JANITOR_IMAGE,
    clock: Clock,
    inventory: Inventory | None = None,
    probes: Probes[TierName] | None = None,
    proofs: Proofs | None = None,
    attempt: int = 1,
    listen_host: str = names.EVERY_IPV4_ADDRESS,
) -> Outcome:
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

    Returns:
        What was done. A failure of the cluster is part of it: raising would lose what was done before.
    """
    try:
        body = cluster.get(ObjectKey(api_version=names.API_VERSION, kind=names.KIND, name=tier.name), tier.namespace)
    except ClusterError as error:
        return Outcome(exists=True, failure=error)
    # Children of a tier that is going are going with it; whoever makes them anew holds up its namespace.
    if body is None or "deletionTimestamp" in body["metadata"]:
        if proofs is not None:
            proofs.forget(tier)
        return Outcome(exists=False)
    sources = _Sources(
        connector_image=connector_image,
        janitor_image=janitor_image,
        listen_host=listen_host,
        inventory=inventory,
        probes=probes,
        clock=clock,
    )
    act = _act(cluster, body, sources)
    outcome = Outcome(
        exists=True,
        written=act.written,
        failure=act.failure,
        existing_claim=None if act.view.spec is None else act.view.spec.volume.existing_claim,
        again_after=_again_after(act.view),
    )
    is_worth_telling = act.failure is None or not _passes_soon(act.failure) or attempt >= PATIENCE
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
    failure: ClusterError | None = None


@dataclass(frozen=True, kw_only=True)
class _Sources:
    """What decisions of a pass are made from, besides the cluster."""

    connector_image: str
    janitor_image: str
    listen_host: str
    inventory: Inventory | None
    probes: Probes[TierName] | None
    clock: Clock

    def look(self, cluster: Cluster, tier: TierRef, spec: TierSpec) -> Snapshot:
        """Read everything but the nodes."""
        return gather(cluster, tier, existing_claim=spec.volume.existing_claim, now=self.clock(), probes=self.probes)


def _act(cluster: Cluster, body: Manifest, sources: _Sources) -> _Act:
    """Do everything but report."""
    tier = names.tier_ref(body)
    view = status.View(generation=body["metadata"].get("generation", 0), tier=tier, spec=None, snapshot=None)
    try:
        spec, asked = parse(body), read_annotations(body)
    except SpecInvalid as error:
        return _Act(view=replace(view, invalid=error))
    if asked.is_paused:
        spec = spec.model_copy(update={"paused": True})
    view = replace(view, spec=spec)
    try:
        snapshot = sources.look(cluster, tier, spec)
    except ClusterError as error:
        return _Act(view=replace(view, failure=error), failure=error)
    snapshot = replace(snapshot, nodes=_look(sources.inventory, spec, snapshot))
    view = _sized(replace(view, snapshot=snapshot), spec, snapshot)
    plan = make_plan(
        spec,
        snapshot,
        connector_image=sources.connector_image,
        janitor_image=sources.janitor_image,
        restart=asked.restart,
    )
    if isinstance(plan, Refusal):
        return _Act(view=replace(view, refusal=plan))
    plan = replace(plan, listen_host=sources.listen_host)
    view = replace(view, current=plan.generation)
    try:
        tried = preflights.advance(cluster, plan, snapshot, body.get("status") or {})
    except ClusterError as error:
        return _Act(view=replace(view, failure=error), failure=error)
    view = replace(view, preflight=tried)
    if spec.paused:
        return _Act(view=view)
    written, failure = _write(cluster, plan, snapshot, starts_engines=tried.state in {State.OFF, State.PASSED})
    if written and failure is None:
        try:
            # Report what stands now: the pass that made it is the one to tell.
            view = replace(view, snapshot=replace(sources.look(cluster, tier, spec), nodes=snapshot.nodes))
        except ClusterError as error:
            failure = error
    return _Act(view=replace(view, failure=failure), written=written, failure=failure)


def _again_after(view: status.View) -> float | None:
    """Jobs and nodes are not watched, and neither are the Events that say why a pod does not start."""
    is_paused = view.spec is not None and view.spec.paused
    if view.preflight is not None and view.preflight.state in {State.RUNNING, State.FAILED} and not is_paused:
        return JOB_SECONDS
    if view.refusal is not None and view.refusal.reason in _UNTIL_NODES_CHANGE:
        return FRESH_SECONDS
    pods = () if view.snapshot is None else view.snapshot.pods
    return MOUNT_PATIENCE.total_seconds() if any(pod.is_held_up for pod in pods) else None


def _asked(view: status.View, body: Manifest, proofs: Proofs | None) -> status.View:
    """Add what is known from asking the engines; a tier that is held up before them is not asked."""
    if proofs is None or view.spec is None or view.snapshot is None or view.current is None or view.refusal is not None:
        return view
    found = decide(view.spec, view.tier, view.snapshot)
    chunking = Chunking() if isinstance(found, Refusal) else found.chunking
    chunk = Chunk(tokens=chunking.tokens, blocks=chunking.blocks or 1)
    ask = make_ask(view.spec, view.snapshot, generation=view.current.digest, chunk=chunk)
    known = ((body.get("status") or {}).get("proof") or {}).get("rollout")
    tier = TierName(namespace=view.tier.namespace, name=view.tier.name)
    return replace(view, ask=ask, findings=proofs.look(tier, ask, proven_rollout=known))


def _look(inventory: Inventory | None, spec: TierSpec, snapshot: Snapshot) -> Nodes | None:
    """Return the nodes, with what runs on them where that decides something."""
    if inventory is None:
        return None
    return inventory.look(with_pods=shares.needs_pods(spec, decisions.read(snapshot.engines.decisions)))


def _sized(view: status.View, spec: TierSpec, snapshot: Snapshot) -> status.View:
    """Add what a tier of this spec takes and holds; a share that cannot be decided leaves it as it was reported."""
    found = decide(spec, snapshot.tier, snapshot)
    if isinstance(found, Refusal):
        return view
    return replace(
        view,
        sizing=sizing_of(spec, found),
        capacity=make_capacity(spec, found, snapshot),
        node_bytes=found.node_bytes,
        current=make_generation(spec, snapshot.tier, found),
    )


def _write(
    cluster: Cluster, plan: TierPlan, snapshot: Snapshot, *, starts_engines: bool
) -> tuple[tuple[ObjectKey, ...], ClusterError | None]:
    """Apply every object in order, then delete what is not rendered any more; stop at the first failure.

    Engines that do not run yet are left out until they may start.

    A claim that stands and cannot become what is asked for is no reason to stop: a storage class that does not let it
    grow would otherwise hold up every other change, and the API refuses the old size.
    """
    written: list[ObjectKey] = []
    refused: ClusterError | None = None
    rendered = manifests.render(plan)
    try:
        for manifest in rendered:
            key = names.key_of(manifest)
            live = snapshot.live.get(key)
            if live is None and key.kind == "Deployment" and key.name == names.engine(plan.tier) and not starts_engines:
                continue
            if live is not None and key.kind == names.LEASE_KIND:
                continue  # its holder renews it all the time, and there is nothing of ours in it
            try:
                applied = cluster.apply(manifest, over=None if live is None else live.uid)
            except (ClusterForbidden, ClusterRejected) as error:
                if live is None or key.kind != names.CLAIM_KIND:
                    raise
                refused = error
                continue
            if live is None or not _is_as_before(live, applied):
                written.append(key)
        for key in _obsolete(snapshot, {names.key_of(manifest) for manifest in rendered}):
            cluster.delete(key, plan.tier.namespace, uid=snapshot.live[key].uid)
            written.append(key)
    except ClusterError as error:
        return tuple(written), error
    return tuple(written), refused


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


def _report(cluster: Cluster, body: Manifest, view: status.View, clock: Clock) -> None:
    """Write the status where it changed, and post an Event for each transition."""
    previous: Mapping[str, Any] = body.get("status") or {}
    now = clock().astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    wanted = status.report(view, previous, now=now)
    changes = status.changes(previous, wanted)
    if not changes or (view.failure is not None and _differs_in_words_only(previous, wanted)):
        return
    cluster.patch_status(view.tier, changes, resource_version=body["metadata"]["resourceVersion"])
    for transition in status.transitions(previous, wanted):
        cluster.post_event(_event(body, view.tier, transition, now=now))


def _differs_in_words_only(previous: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """Tell whether only messages changed.

    A failure whose text is new each time (a port, an address) would otherwise change the status in each pass, and each
    change wakes the tier at once instead of after its back-off.
    """
    return _without_messages(previous) == _without_messages(wanted)


def _without_messages(status_: Mapping[str, Any]) -> dict[str, Any]:
    conditions = [
        {name: value for name, value in condition.items() if name != "message"}
        for condition in status_.get("conditions", ())
    ]
    return {**status_, "conditions": conditions}


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
