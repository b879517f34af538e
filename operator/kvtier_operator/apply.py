# SPDX-License-Identifier: Apache-2.0
"""Write the objects of all parts of a tier, unless what was applied still stands, as their ``managedFields`` tell.

A part that is refused or fails holds up the parts that need it, and no others. The live settings of engines are written
in any case. A field may have two owners; fields that others add beside ours stay theirs.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from kvtier_operator import names, parts, quantity
from kvtier_operator.api import TierSpec
from kvtier_operator.api.reasons import Reason, Refusal
from kvtier_operator.conditions import Problem, Status
from kvtier_operator.errors import ClusterError, ClusterRejected, ClusterUnavailable, KindMissing
from kvtier_operator.kube.cluster import Cluster
from kvtier_operator.names import Manifest, ObjectKey
from kvtier_operator.parts import claim
from kvtier_operator.parts.engine import deployment
from kvtier_operator.parts.external.pods import live_manifests
from kvtier_operator.parts.part import Part, Work
from kvtier_operator.plan import TierPlan
from kvtier_operator.snapshot import Live, Snapshot

_keys: Final = functools.lru_cache(maxsize=1024)(json.loads)
"""Reads the keys that tell an item of a list from others; there are few of them."""


def is_applied(manifest: Manifest, live: Manifest) -> bool:
    """Tell whether applying this would change nothing: all of it is there, and nothing else of it is ours."""
    fields = _ours(live)
    return fields is not None and _stands(manifest, live, fields)


def _ours(live: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the fields that we have applied; None where that cannot be told."""
    found = [
        each["fieldsV1"]
        for each in live["metadata"].get("managedFields") or ()
        if (each.get("manager"), each.get("operation")) == (names.FIELD_MANAGER, "Apply")
        and not each.get("subresource")
    ]
    return found[0] if len(found) == 1 else None


def _stands(wanted: Any, live: Any, fields: Mapping[str, Any]) -> bool:
    """Tell whether everything wanted is there and ours, and nothing else is ours; others may have added to it.

    Loops, and no generators: a start compares a thousand values of each tier. Our fields are empty for a map or list
    that the API server takes for one value. Such a value is not ours once another writer has changed it, and has no
    field beside those that we apply.
    """
    if not isinstance(wanted, (dict, list)):
        # The API server leaves out what says nothing.
        return bool(live == wanted) or (live is None and wanted in {"", False}) or _is_same_amount(live, wanted)
    if live is None or (not fields and (not wanted or live == wanted)):
        return not wanted or live is not None
    return (_stands_in_list if isinstance(wanted, list) else _stands_in_object)(wanted, live, fields)


def _stands_in_object(wanted: Any, live: Any, fields: Mapping[str, Any]) -> bool:
    """Tell the same of an object."""
    for step in fields:
        if step[:2] == "f:" and step[2:] not in wanted:
            return False
    if not fields and live.keys() - _DEFAULTED - wanted.keys():
        return False
    for name, value in wanted.items():
        there = live.get(name)
        if isinstance(value, (dict, list)):
            inner = fields.get(f"f:{name}")
            if (inner is None and fields and value) or not _stands(value, there, inner or {}):
                return False
        elif value != there and not _stands(value, there, {}):
            return False
    return True


_DEFAULTED: Final = frozenset({"apiGroup", "apiVersion", "divisor", "expirationSeconds"})
"""Fields that the API server fills in within such values: of subjects, references to fields and tokens."""


def _stands_in_list(wanted: Any, live: Any, fields: Mapping[str, Any]) -> bool:
    """Tell the same of a list, whose items are told apart by their keys if they have fields."""
    steps = [step for step in fields if step[:2] == "k:"]
    if len(steps or live) != len(wanted):
        return False
    if not steps:
        return all(_stands(each, there, {}) for each, there in zip(wanted, live, strict=True))
    for step in steps:
        keys = _keys(step[2:])
        each = _find(wanted, keys)
        if each is None or not _stands(each, _find(live, keys), fields[step]):
            return False
    return True


def _is_same_amount(live: Any, wanted: Any) -> bool:
    """Tell whether the API server wrote an amount in other words: 1Gi for 1024Mi."""
    texts = [str(each) for each in (live, wanted)]
    return (
        live is not None
        and all(map(quantity.is_quantity, texts))
        and len(set(map(quantity.parse_quantity, texts))) == 1
    )


def _find(items: list[Any], keys: Mapping[str, Any]) -> Any:
    """Return the item of a list with these keys; a key that is left out has its default, which is not known here."""
    for each in items:
        if keys.items() <= each.items():
            return each
    for each in items:
        if all(each.get(name, value) == value for name, value in keys.items()):
            return each
    return None


class Deletion(NamedTuple):
    """One deleted object."""

    key: ObjectKey
    why: str
    """End of a sentence that begins with the object."""


@dataclass
class Changes:
    """Everything that one reconcile has done to the parts of a tier so far."""

    written: list[ObjectKey] = field(default_factory=list)
    deleted: list[Deletion] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    failures: list[ClusterError] = field(default_factory=list)
    problems: dict[str, Problem] = field(default_factory=dict)
    """Problems that only a part's own condition reports, by part."""
    poll_after: float | None = None
    """Seconds until a part with such a problem is tried again; None where there is none."""
    missing: set[str] = field(default_factory=set)
    """Parts that others cannot rely on."""
    kinds: set[str] = field(default_factory=lambda: {"Pod"})
    """Kinds whose objects must be read for what is reported in Ready."""

    def fail(self, part: Part, error: ClusterError | Refusal, status: Status) -> None:
        """Note a failure or a refusal of a part."""
        if part.own_problem is not None:
            self.problems[part.name] = part.own_problem(error, status)
            retry_after = None if isinstance(error, (Refusal, KindMissing)) else error.retry_after
            self.poll_after = retry_after or _POLL_SECONDS
        elif isinstance(error, Refusal):
            self.refusals.append(error)
        else:
            self.failures.append(error)


_LEAVES_NOTHING: Final = claim.UNUSABLE | {Reason.OBJECT_NOT_OURS}
"""Refusals after which a part does not exist; after any other one it stays as it was."""

_MOST_OUTAGES: Final = 2

_POLL_SECONDS: Final = 5.0
"""Delay before a kind is looked for again that the cluster lacks, or an object that is in the way."""


def apply_parts(cluster: Cluster, plan: TierPlan, snapshot: Snapshot, status: Status, changes: Changes) -> None:
    """Apply each part that nothing holds up, then delete the objects that no part wants."""
    kept: set[ObjectKey] = set()
    for part in parts.PARTS:
        work = Work(plan=plan, snapshot=snapshot, status=status, missing=frozenset(changes.missing))
        objects = part.objects(work)
        if part.own_problem is None:
            changes.kinds |= _kinds(part, objects, plan)
        kept |= set(map(names.key_of, objects))
        kept |= {key for key in part.keys(plan.tier) if part.leaves(work)}
        if not part.waits(work) or any(names.key_of(each) in snapshot.live for each in objects):
            _apply_part(cluster, part, objects, work, changes)
        if sum(isinstance(each, ClusterUnavailable) for each in changes.failures) > _MOST_OUTAGES:
            return  # each further part would only wait for its time-out
    work = Work(plan=plan, snapshot=snapshot, status=status)
    for part in parts.PARTS:
        for key in (key for key in part.keys(plan.tier) if key in snapshot.live and key not in kept):
            try:
                _delete(cluster, work, snapshot.live[key].content, changes, why=part.why_deleted(work))
            except ClusterError as error:
                changes.fail(part, error, status)
                if part.own_problem is None:
                    return


def _apply_part(cluster: Cluster, part: Part, objects: tuple[Manifest, ...], work: Work, changes: Changes) -> None:
    snapshot = work.snapshot
    refusal = parts.refuse_foreign(objects, snapshot) or part.refuse(work.plan.spec, snapshot)
    unreadable = sorted(_kinds(part, objects, work.plan) & snapshot.unreadable.keys())
    for kind in unreadable:
        changes.fail(part, snapshot.unreadable[kind], work.status)
    if refusal is not None and not unreadable:
        changes.fail(part, refusal, work.status)
    if refusal is not None or unreadable or work.missing & set(part.needs):
        if unreadable or refusal is None or refusal.reason in _LEAVES_NOTHING:
            changes.missing.add(part.name)
        return
    for manifest in objects:
        try:
            _apply(cluster, manifest, snapshot, changes)
        except ClusterError as error:
            changes.fail(part, error, work.status)
            stands = part.serves_as_it_was and all(names.key_of(each) in snapshot.live for each in objects)
            if not stands:
                changes.missing.add(part.name)
            return


def release_claim(cluster: Cluster, body: Manifest, snapshot: Snapshot, changes: Changes) -> bool:
    """Take the owner reference from a claim that is to be retained, and tell whether that changed it.

    Before anything else, and of a paused or refused spec, too: the garbage collector deletes a claim that still has it
    with the tier. Everything else of the claim stays as it is.
    """
    tier = snapshot.tier
    live = snapshot.live.get(key := names.claim_key(names.claim(tier)))
    if live is None or names.deletes_claim(body) or not names.is_controlled(live.content, tier):
        return False
    spec, fields = live.content["spec"], _ours(live.content)
    if fields is not None:
        # A field that others set is not made ours: the next apply leaves it out, which would remove it.
        spec = {field_: value for field_, value in spec.items() if f"f:{field_}" in fields.get("f:spec", {})}
    try:
        _apply(cluster, claim.of_spec(tier, spec, is_owned=False), snapshot, changes)
    except ClusterError as error:
        changes.failures.append(error)
        return False
    if key not in changes.written:
        # Another field manager has set the reference, too: so it stands.
        owners = [each.get("uid") for each in live.content["metadata"]["ownerReferences"]]
        patch = json.dumps([{"op": "remove", "path": f"/metadata/ownerReferences/{owners.index(tier.uid)}"}])
        remedy = f"`kubectl patch pvc {key.name} -n {tier.namespace} --type=json -p '{patch}'`"
        text = f"claim {key.name} is deleted with the tier, as another writer has set its owner, too: {remedy} mends it"
        changes.failures.append(ClusterRejected(text))
    return key in changes.written


def _kinds(part: Part, objects: tuple[Manifest, ...], plan: TierPlan) -> set[str]:
    """Return the kinds that a part cannot be applied without reading."""
    return {key.kind for key in part.keys(plan.tier)} if objects or part.serves_as_it_was else set()


def _apply(cluster: Cluster, manifest: Manifest, snapshot: Snapshot, changes: Changes) -> None:
    key = names.key_of(manifest)
    live = snapshot.live.get(key)
    if live is not None and (key.kind == names.LEASE_KIND or is_applied(manifest, live.content)):
        return  # a Lease belongs to its holder once it exists
    applied = cluster.apply(manifest, over=None if live is None else live.uid)
    if live is None or not _is_as_before(live, applied):
        changes.written.append(key)


def _delete(cluster: Cluster, work: Work, found: Mapping[str, Any], changes: Changes, *, why: str) -> None:
    """Delete an object that the tier controls; any other object stays, whatever its labels are."""
    if not names.is_controlled(found, work.plan.tier):
        return
    key = names.key_of(found)
    cluster.delete(key, work.plan.tier.namespace, uid=found["metadata"]["uid"])
    changes.deleted.append(Deletion(key, why))


def try_engines(cluster: Cluster, plan: TierPlan, snapshot: Snapshot) -> ClusterError | None:
    """Return why the engines of a plan cannot be applied; None where they can, or run already."""
    key = names.deployment_key(names.engine(plan.tier))
    live = snapshot.live.get(key)
    is_external = plan.spec.engine.external is not None
    if is_external or plan.rendered is not None or key in snapshot.foreign or key.kind in snapshot.unreadable:
        return None
    wanted = deployment(plan)
    if live is not None and is_applied(wanted, live.content):
        return None
    try:
        cluster.try_apply(wanted, over=None if live is None else live.uid)
    except ClusterError as error:
        return error
    return None


def apply_live_settings(cluster: Cluster, spec: TierSpec, snapshot: Snapshot, changes: Changes) -> None:
    """Write the settings that engines and the janitor follow while they run, of a spec that cannot be carried out."""
    for manifest in live_manifests(spec, snapshot):
        try:
            _apply(cluster, manifest, snapshot, changes)
        except ClusterError as error:
            changes.failures.append(error)


def _is_as_before(live: Live, applied: Manifest) -> bool:
    """Tell whether an apply changed none of our fields: a controller may have written a status meanwhile."""
    if applied["metadata"]["resourceVersion"] == live.resource_version:
        return True
    return _ours_of(live.content) == _ours_of(applied)


def _ours_of(manifest: Mapping[str, Any]) -> dict[str, Any]:
    metadata = manifest["metadata"]
    annotations = metadata.get("annotations") or {}
    return {
        **{name: value for name, value in manifest.items() if name not in {"metadata", "status"}},
        "labels": metadata.get("labels"),
        "owners": metadata.get("ownerReferences"),
        "annotations": {key: value for key, value in annotations.items() if key.startswith(f"{names.GROUP}/")},
    }
