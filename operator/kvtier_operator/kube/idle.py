# SPDX-License-Identifier: Apache-2.0
"""Which tiers stand as an operator before this one left them: at a start, their reconciles are put off.

A reconcile that finds nothing to do depends on the tier, on the versions of its objects, and on the operator. Once the
digest of these has stayed the same for some minutes, it is written to `status.idleDigest`. An operator that starts and
computes the same digest knows that no object was changed, made or deleted meanwhile. It reconciles such a tier a little
later, since the reports of its pods are not a part of the digest; a change of anything has it reconciled at once.

Thread-safe: each tier is in the hands of one thread at a time.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import time
from pathlib import Path
from typing import Final, NamedTuple

from kvtier_connector import contract
from kvtier_operator import names
from kvtier_operator.errors import ClusterError
from kvtier_operator.kube.cache import TIERS, WATCHED, Cache
from kvtier_operator.kube.cluster import Cluster
from kvtier_operator.names import Manifest, TierName
from kvtier_operator.settings import Settings

logger = logging.getLogger(__name__)

FIELD: Final = "idleDigest"
"""Field of the status."""

RECONCILES_A_SECOND: Final = 20.0
"""So many of the tiers that were put off are reconciled in a second."""

LOOKS_A_SECOND: Final = 200.0
"""None of them is reconciled before all tiers are looked at, so many in a second."""

STANDS_SECONDS: Final = 300.0
"""A digest that stays the same for so long is written: a tier that changes all the time costs no writes."""


class Mark(NamedTuple):
    """The digest of a tier as it stands, and where it is to be written."""

    digest: str
    written: str
    """The digest in the status."""
    body: Manifest


class IdleTiers:
    """The digests of all tiers."""

    def __init__(self, cache: Cache, settings: Settings) -> None:
        """Store; the settings that decide what the objects of a tier look like belong to each digest."""
        images = settings.connector_image, settings.janitor_image, settings.listen_host
        self._cache = cache
        self._release = _digest([_sources(), images, settings.namespaces, settings.operator_class])
        self._resync_seconds = settings.resync_seconds
        self._order = itertools.count(1)
        self._looks_seconds = 0.0
        self._stood: dict[TierName, tuple[str, float]] = {}
        """The digest of each tier that was looked at, and since when it is the same."""

    def put_off(self, tier: TierName) -> float | None:
        """Return for how many seconds a tier can be left alone; None where it is to be reconciled now."""
        if tier in self._stood:
            return None
        mark = self.read(tier)
        self._stood[tier] = ("", 0.0)
        if mark is None or mark.digest != mark.written:
            return None
        order = next(self._order)
        if order == 1:
            self._looks_seconds = len(self._cache.tiers.places()) / LOOKS_A_SECOND
        return min(self._looks_seconds + order / RECONCILES_A_SECOND, self._resync_seconds)

    def read(self, tier: TierName) -> Mark | None:
        """Return the mark of a tier as it stands; None where there is none, or something cannot be read."""
        namespace, cache = tier.namespace, self._cache
        body = cache.tiers.get(namespace, tier.name)
        if body is None or "deletionTimestamp" in body["metadata"]:
            return None
        claim, states = names.claim_of(body), []
        for kind in WATCHED:
            try:
                store = cache.store(kind.api_version, kind.kind, namespace)
            except ClusterError:
                return None
            if store is None:
                return None
            of_it = store.names_of(namespace, claim if kind is TIERS else tier.name)
            for name in sorted({*of_it, claim} if kind.kind == names.CLAIM_KIND else of_it):
                uid, version = store.state(namespace, name)
                # A Lease has a new version all the time.
                states.append((kind.kind, name, uid, "" if kind.kind == names.LEASE_KIND else version))
        metadata = {name: value for name, value in body["metadata"].items() if name != "resourceVersion"}
        status: Manifest = dict(body.get("status") or {})
        written = status.pop(FIELD, "")
        stands = {**body, "metadata": metadata, "status": status}
        return Mark(_digest([self._release, states, stands]), written, body)

    def confirm(self, cluster: Cluster, tier: TierName, mark: Mark) -> None:
        """Take note that a reconcile found nothing to do in that state, and write that once the state has lasted."""
        digest, since = self._stood.get(tier, ("", 0.0))
        if digest != mark.digest:
            self._stood[tier] = (mark.digest, time.monotonic())
        elif digest != mark.written and time.monotonic() - since >= min(STANDS_SECONDS, self._resync_seconds / 2):
            # Not again before it has stood as long: another operator may write a digest of its own.
            self._stood[tier] = (digest, time.monotonic())
            version = mark.body["metadata"]["resourceVersion"]
            try:
                cluster.patch_status(names.tier_ref(mark.body), {FIELD: digest}, resource_version=version)
            except ClusterError as error:
                logger.debug("%s: it is not noted that nothing is left to do: %s", tier, error)

    def forget(self, tier: TierName) -> None:
        """Forget a tier that is gone."""
        self._stood.pop(tier, None)


def _sources() -> str:
    """Return the digest of the code that reconciles: a build with the same version may do something else."""
    found = hashlib.sha256()
    for folder in (names.__file__, contract.__file__):
        for path in sorted(Path(folder).parent.rglob("*.py")):
            found.update(path.read_bytes())
    return found.hexdigest()


def _digest(fields: object) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:32]
