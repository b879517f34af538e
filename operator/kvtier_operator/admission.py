# SPDX-License-Identifier: Apache-2.0
"""What only a look into the cluster can tell of a tier that is about to be written: refusals, and warnings.

The rules that one object can be judged by are in the CRD, as CEL. Here is what needs others: the nodes, the other tiers
of the namespace, the claim and who uses it, and what the edit costs. It refuses only what would never work; what may be
meant, or may pass, is a warning that kubectl prints. Reads, and never writes.

Whoever writes waits for the answer, and the API server does not wait for long: what was not read in time is left out of
the answer, which says so.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final

from kvtier_operator import names
from kvtier_operator.api import TierSpec, parse
from kvtier_operator.api.parse import unknown_fields
from kvtier_operator.api.reasons import Reason
from kvtier_operator.errors import ClusterError, SpecInvalid
from kvtier_operator.gather import read_claim, read_neighbours
from kvtier_operator.inventory import Inventory
from kvtier_operator.kube.cluster import Cluster
from kvtier_operator.kube.webhook import Verdict
from kvtier_operator.names import Manifest, ObjectKey, TierRef
from kvtier_operator.parts import pod_security
from kvtier_operator.parts.claim import claim_is_shared
from kvtier_operator.parts.edits import explain_edit
from kvtier_operator.parts.engine_checks import a_node_is_large_enough
from kvtier_operator.plan import Refusal, decide, diff, sizing_of
from kvtier_operator.problems import Look
from kvtier_operator.snapshot import Engines, Snapshot

LONGEST_WARNING: Final = 800
"""Characters; the API server cuts all of them down to 256 each where they are more than 4096 together."""

LAST_APPLIED: Final = "kubectl.kubernetes.io/last-applied-configuration"

_MOST_NAMED: Final = 3

WORKERS: Final = 8
"""Writes that are looked into at the same time; while the API server hangs, more of them are answered unseen."""


@dataclass(frozen=True, kw_only=True)
class _Write:
    tier: TierRef
    spec: TierSpec
    old: Manifest | None
    old_spec: TierSpec | None


@dataclass
class _Looked:
    """What a look into the cluster has shown so far; the thread that looks adds to it until it is told to stop."""

    refusal: str = ""
    warnings: list[str] = field(default_factory=list)
    is_over: threading.Event = field(default_factory=threading.Event)


class Admission:
    """Judges writes of tiers. Safe to use from several threads; the reading is done by threads of its own."""

    def __init__(self, cluster: Cluster, *, inventory: Inventory, connector_image: str) -> None:
        """Store what is read; nothing is read before a write is judged."""
        self._cluster = cluster
        self._inventory = inventory
        self._connector_image = connector_image
        self._pool = ThreadPoolExecutor(WORKERS, thread_name_prefix="admission")

    def close(self) -> None:
        """Look into nothing any more; a read that goes on ends with the time-out of its connection."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def judge(self, new: Manifest, old: Manifest | None, seconds: float) -> Verdict:
        """Judge a tier that is created (`old` is None) or updated; a cluster that cannot be read refuses nothing.

        Args:
            new: the tier as it is to be.
            old: as it is.
            seconds: what reading the cluster may take.
        """
        if "deletionTimestamp" in new["metadata"] or (old is not None and old.get("spec") == new.get("spec")):
            return Verdict()
        try:
            write = _Write(tier=names.tier_ref(new), spec=parse(new), old=old, old_spec=_parsed(old))
        except SpecInvalid as error:
            return Verdict(refusal=str(error))
        looked = _Looked()
        future = self._pool.submit(self._look, write, looked)
        try:
            future.result(seconds)
        except TimeoutError:
            future.cancel()
            looked.is_over.set()
            late = f"not everything could be checked: the cluster was not read within {seconds:g} s"
            looked.warnings = [*looked.warnings, late]
        if looked.refusal:
            return Verdict(refusal=looked.refusal)
        left_open = pod_security.warning(write.spec.engine.pod_template)
        warnings = [*_dropped(new), *filter(None, (left_open,)), *looked.warnings, *self._cost(write)]
        return Verdict(warnings=tuple(text[:LONGEST_WARNING] for text in warnings))

    def _look(self, write: _Write, looked: _Looked) -> None:
        """Do the checks that read the cluster, as far as there is time."""
        checks: tuple[Callable[[_Write], Iterator[str]], ...] = (self._neighbours, self._strangers, self._nodes)
        try:
            looked.refusal = self._claim_of_another(write)
            for check in checks:
                if looked.refusal or looked.is_over.is_set():
                    return
                found = list(check(write))
                looked.warnings += found
        except ClusterError as error:
            looked.warnings.append(f"not everything could be checked: {error}")

    def _claim_of_another(self, write: _Write) -> str:
        """Refuse to live on a claim that goes with another tier."""
        existing = write.spec.volume.existing_claim
        if existing is None:
            return ""
        claim = self._claim(write)
        references = (claim or {}).get("metadata", {}).get("ownerReferences") or ()
        owner = next((each["name"] for each in references if each.get("kind") == names.KIND), None)
        if owner is None or owner == write.tier.name:
            return ""
        return (
            f"spec.volume.existingClaim: {existing} is deleted together with the tier {owner}: set deletionPolicy "
            "Retain there first, or name another claim"
        )

    def _neighbours(self, write: _Write) -> Iterator[str]:
        """Warn of other tiers on the same claim: each keeps to its own directory, but they share the room."""
        found, tiers = self._claim(write), self._cluster.tiers_on(_claim_name(write), write.tier.namespace)
        snapshot = Snapshot(
            tier=write.tier,
            claim=None if found is None else read_claim(found),
            engines=Engines(),
            pods=(),
            live={},
            neighbours=read_neighbours(tiers, write.tier),
        )
        shared = claim_is_shared(write.spec, snapshot)
        if shared.reason is Reason.BUDGETS_OVERLAP:
            yield f"spec.volume: {shared.message}"

    def _strangers(self, write: _Write) -> Iterator[str]:
        """Warn of pods on the claim that are no engines of this tier: their files are not in its budget."""
        name = write.spec.volume.existing_claim
        if name is None:
            return
        users = []
        for pod in self._cluster.list("v1", "Pod", namespace=write.tier.namespace, selector=""):
            labels = pod["metadata"].get("labels") or {}
            volumes = pod.get("spec", {}).get("volumes") or ()
            claims = {(volume.get("persistentVolumeClaim") or {}).get("claimName") for volume in volumes}
            if name in claims and names.LABEL_TIER not in labels:
                users.append(pod["metadata"]["name"])
        if users:
            yield (
                f"spec.volume.existingClaim: {name} is mounted by {_named(sorted(users), 'pod')}, not by tiers only: "
                "what they write takes room that no budget counts; leave room for it in spec.disk.budget.maxBytes"
            )

    def _nodes(self, write: _Write) -> Iterator[str]:
        """Warn when no node that is there now could hold an engine."""
        found = self._inventory.look(with_pods=False)
        if found is None or write.spec.cpu.fraction is not None:
            return  # a fraction is taken of what there is
        snapshot = Snapshot(tier=write.tier, claim=None, engines=Engines(), pods=(), live={}, nodes=found)
        decided = decide(write.spec, write.tier, snapshot)
        if isinstance(decided, Refusal):
            yield decided.message
            return
        look = Look(spec=write.spec, snapshot=snapshot, sizing=sizing_of(write.spec, decided))
        problem = a_node_is_large_enough(look)
        if problem is not None:
            yield problem.message

    def _cost(self, write: _Write) -> Iterator[str]:
        """Warn of what the edit discards and restarts."""
        if write.old is None or write.old_spec is None:
            return
        try:
            effect = explain_edit(
                write.old_spec,
                write.spec,
                write.tier,
                connector_image=self._connector_image,
                warm_bytes=diff.warm_bytes(write.old.get("status") or {}),
            )
        except SpecInvalid:
            return  # it cannot be carried out at all, which is told where it fits nothing
        yield from diff.warnings(effect)

    def _claim(self, write: _Write) -> Manifest | None:
        key = ObjectKey(api_version="v1", kind=names.CLAIM_KIND, name=_claim_name(write))
        return self._cluster.get(key, write.tier.namespace)


def _dropped(new: Manifest) -> Iterator[str]:
    """Warn of fields that the API server took out before anybody saw them: kubectl notes what it was given."""
    try:
        applied = json.loads((new["metadata"].get("annotations") or {}).get(LAST_APPLIED, "{}"))
    except ValueError:
        return
    if isinstance(applied, Mapping):
        yield from (f"{each.field}: was dropped: it {each.message}" for each in unknown_fields(applied))


def _parsed(body: Mapping[str, Any] | None) -> TierSpec | None:
    if body is None:
        return None
    try:
        return parse(body)
    except SpecInvalid:
        return None  # an older CRD let it through; it says so itself


def _claim_name(write: _Write) -> str:
    return write.spec.volume.existing_claim or names.claim(write.tier)


def _named(found: list[str], what: str = "tier") -> str:
    shown = ", ".join(found[:_MOST_NAMED])
    more = f" and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
    return f"{what}{'s' if len(found) > 1 else ''} {shown}{more}"
