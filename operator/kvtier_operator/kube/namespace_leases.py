# SPDX-License-Identifier: Apache-2.0
"""One writer for the tiers of a namespace: the operator that holds the Lease `kvtier-tiers` there.

Whoever works on tiers, for the whole cluster, for some namespaces or from somebody's own machine, takes that Lease in
each namespace in which it has one to work on. Another operator waits, says so in its log and in an Event on the Lease,
and goes on when the Lease is given back or has run out. An operator of a class has a Lease of its own beside it.

Replicas of one installation elect a leader among themselves and hold these Leases under the installation's name, so
that the next leader need not wait for them.

Threads: one campaigns in all namespaces; every method may be called from any thread. One lock guards the fields.
"""

from __future__ import annotations

import heapq
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final

from kvtier_connector.lease import Elector, LeaseObject, LeaseSettings
from kvtier_operator import names
from kvtier_operator.errors import ClusterError
from kvtier_operator.kube.client import KubernetesCluster
from kvtier_operator.kube.leadership import lease_api
from kvtier_operator.names import TierName

logger = logging.getLogger(__name__)

LEASE: Final = "kvtier-tiers"


def lease_name(operator_class: str) -> str:
    """Return the name of the Lease for tiers of that class; the empty one is theirs that name none."""
    return f"{LEASE}.{operator_class}" if operator_class else LEASE


def awake_seconds() -> float:
    """Return seconds that go on while the machine sleeps: a laptop that wakes up must not believe in its Leases."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


@dataclass(eq=False)
class _Namespace:
    name: str
    elector: Elector
    tiers: set[TierName] = field(default_factory=set)
    waiting: set[TierName] = field(default_factory=set)
    told_of: str = ""
    """Whose Lease was complained about."""


class NamespaceLeases:
    """The Leases of all namespaces that this operator has tiers in."""

    def __init__(  # noqa: PLR0913  what it is wired to
        self,
        cluster: KubernetesCluster,
        *,
        identity: str,
        operator_class: str,
        seconds: float,
        is_kept: bool,
        may_campaign: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = awake_seconds,
    ) -> None:
        """Hold none; `start` starts the campaign.

        Args:
            cluster: one with short time-outs, and nobody else's.
            identity: holder of the Leases.
            operator_class: of the tiers that this operator works on.
            seconds: how long a holder that went silent is waited for.
            is_kept: at the end the Leases stay with this identity, which another process goes on with.
            may_campaign: whether this process acts for its identity.
            clock: seconds that only grow.
        """
        self._cluster = cluster
        self._identity = identity
        self._lease = lease_name(operator_class)
        self._seconds = seconds
        self._is_kept = is_kept
        self._wake: Callable[[TierName], None] = lambda _tier: None
        self._may_campaign = may_campaign
        self._clock = clock
        self._changed = threading.Condition()
        self._namespaces: dict[str, _Namespace] = {}
        self._due: list[tuple[float, str]] = []
        self._is_closed = False
        self._thread = threading.Thread(target=self._campaign, name="namespace-leases", daemon=True)

    def start(self, wake: Callable[[TierName], None]) -> None:
        """Start to campaign; `wake` is told which tier may be worked on now, of those that could not."""
        self._wake = wake
        self._thread.start()

    def close(self, *, timeout: float) -> None:
        """Stop, and give the Leases back unless they are kept. What they allowed must have ended before."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join(timeout)

    def admits(self, tier: TierName) -> bool:
        """Tell whether a tier may be worked on now; where not, it is told of as soon as it may."""
        with self._changed:
            known = self._namespaces.get(tier.namespace)
            if known is None:
                known = self._namespaces[tier.namespace] = _Namespace(tier.namespace, self._elector(tier.namespace))
                heapq.heappush(self._due, (self._clock(), tier.namespace))
                self._changed.notify_all()
            known.tiers.add(tier)
            if known.elector.is_leader():
                return True
            known.waiting.add(tier)
            return False

    def forget(self, tier: TierName) -> None:
        """Take note that there is no such tier any more; the Lease of its namespace goes with the last one."""
        with self._changed:
            known = self._namespaces.get(tier.namespace)
            if known is not None:
                known.tiers.discard(tier)
                known.waiting.discard(tier)

    def may_write(self, namespace: str) -> bool:
        """Tell whether this process may write in a namespace at this moment."""
        known = self._namespaces.get(namespace)
        return known is not None and known.elector.is_leader() and self._may_campaign()

    def problem(self) -> str | None:
        """Return why no Lease can be had, and in how many namespaces, where the API server is what keeps it away."""
        with self._changed:
            kept = [known.elector.problem for known in self._namespaces.values() if not known.elector.is_leader()]
        found = [each for each in kept if each]
        return f"the tiers of {len(found)} namespaces are not worked on: {found[0]}" if found else None

    def counts(self) -> tuple[int, int]:
        """Return in how many namespaces this operator may work, and in how many it waits for another one."""
        with self._changed:
            held = sum(known.elector.is_leader() for known in self._namespaces.values())
            return held, len(self._namespaces) - held

    def _elector(self, namespace: str) -> Elector:
        settings = LeaseSettings(
            namespace=namespace,
            name=self._lease,
            identity=self._identity,
            duration_seconds=max(2, round(self._seconds)),
            deadline_seconds=self._seconds * 2 / 3,
            renew_seconds=self._seconds / 3,
            retry_seconds=min(5.0, self._seconds / 8),
            labels={names.LABEL_MANAGED_BY: names.FIELD_MANAGER},
        )
        return Elector(lease_api(self._cluster, settings), settings, clock=self._clock)

    def _campaign(self) -> None:
        while (known := self._take()) is not None:
            if not known.tiers:
                self._give_back(known)
                continue
            pause = 1.0
            try:
                if self._may_campaign():
                    pause = known.elector.step()
                    self._tell(known)
            except Exception:
                # The edge of the thread: a bug of a client must not silence the campaign in all other namespaces.
                logger.exception("A round of the election in namespace %s failed; it is tried again.", known.name)
            with self._changed:
                heapq.heappush(self._due, (self._clock() + pause, known.name))
        for known in () if self._is_kept else tuple(self._namespaces.values()):
            known.elector.release()

    def _take(self) -> _Namespace | None:
        with self._changed:
            while not self._is_closed:
                now = self._clock()
                if self._due and self._due[0][0] <= now:
                    return self._namespaces[heapq.heappop(self._due)[1]]
                # A clock that goes on while the machine sleeps is not the one that a wait goes by.
                self._changed.wait(min(5.0, self._due[0][0] - now) if self._due else None)
            return None

    def _give_back(self, known: _Namespace) -> None:
        known.elector.release()
        with self._changed:
            if known.tiers:  # there is one again: as if it were new
                known.waiting |= known.tiers
                heapq.heappush(self._due, (self._clock(), known.name))
            else:
                del self._namespaces[known.name]

    def _tell(self, known: _Namespace) -> None:
        if not known.elector.is_leader():
            self._complain(known)
            return
        with self._changed:
            waiting, known.waiting = known.waiting, set()
        if known.told_of:
            logger.info("Works on the tiers of namespace %s from now on.", known.name)
            known.told_of = ""
        for tier in waiting:
            self._wake(tier)

    def _complain(self, known: _Namespace) -> None:
        lease = known.elector.lease
        holder = str(((lease or {}).get("spec") or {}).get("holderIdentity") or "")
        if lease is None or holder in {"", self._identity, known.told_of}:
            return
        known.told_of = holder
        message = (
            f"{self._identity} does not work on the tiers of namespace {known.name}: {holder} does, which holds the "
            f"Lease {self._lease}. It waits until that one stops. Run one operator for a namespace, or give each of "
            "several a class of its own (--operator-class, spec.operatorClassName)."
        )
        logger.warning("%s", message)
        try:
            self._cluster.post_event(_event(lease, message))
        except ClusterError as error:
            logger.info("%s", error)


def _event(lease: LeaseObject, message: str) -> names.Manifest:
    metadata, now = lease["metadata"], datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"generateName": f"{metadata['name']}.", "namespace": metadata["namespace"]},
        "involvedObject": {
            "apiVersion": names.COORDINATION,
            "kind": names.LEASE_KIND,
            "name": metadata["name"],
            "namespace": metadata["namespace"],
            "uid": metadata["uid"],
        },
        "type": "Warning",
        "reason": "AnotherOperatorWorks",
        "message": message[:1024],
        "source": {"component": names.FIELD_MANAGER},
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
    }
