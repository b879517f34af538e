# SPDX-License-Identifier: Apache-2.0
"""The triggers: each change of a tier or of one of its objects puts the tier into the work queue.

A reconcile decides by the tier as it then is, never by the event.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Final

from kvtier_operator import names
from kvtier_operator.errors import ClusterError, ClusterForbidden, KindMissing, OperatorError
from kvtier_operator.inventory import Inventory
from kvtier_operator.kube.cache import NODES, Cache
from kvtier_operator.kube.cached_cluster import CachedCluster
from kvtier_operator.kube.client import KubernetesCluster
from kvtier_operator.kube.http_server import Health
from kvtier_operator.kube.idle import IdleTiers
from kvtier_operator.kube.work_queue import Priority, Requeue, WorkQueue
from kvtier_operator.metrics import OperatorMetrics
from kvtier_operator.names import Manifest, TierName
from kvtier_operator.observe.engine_client import read_key
from kvtier_operator.observe.http_client import HttpClient
from kvtier_operator.observe.monitor import Monitor
from kvtier_operator.observe.poller import Poller
from kvtier_operator.reconcile import Inputs, reconcile
from kvtier_operator.settings import Settings

logger = logging.getLogger(__name__)

EVERY_TIER: Final = TierName(namespace="", name="")
"""Key of the work that counts all tiers."""

COUNT_SECONDS: Final = 60.0
"""How often all tiers are counted, in memory."""

STUCK_SECONDS: Final = 600.0
"""After how long without any progress the operator calls itself dead; longer than any reconcile can take."""

DEAD_WATCH_SECONDS: Final = 300.0
"""For how long a kind may not be watched although nothing forbids it."""


def _is_edit_of_serving(tier: Manifest) -> bool:
    """Tell whether a tier whose engines serve was edited since its status was written."""
    status = tier.get("status") or {}
    is_edited = status.get("observedGeneration") != tier["metadata"].get("generation")
    return is_edited and bool(status.get("readyReplicas"))


class Operator:
    """Connects the watches with reconciles of tiers.

    Threads: those of kopf and of the informers only add keys; the queue's threads do the work.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        cluster: KubernetesCluster,
        metrics: OperatorMetrics,
        health: Health | None = None,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """Store; the cache and `begin` start everything."""
        self._settings = settings
        self._cluster = cluster
        self._metrics = metrics
        self._has_begun = False
        self.cache = Cache(
            cluster, self._on_change, namespaces=settings.namespaces, list_seconds=settings.resync_seconds
        )
        self._wait_for_nodes: set[TierName] = set()
        # A Role in a few namespaces gives no right to look at nodes.
        inventory = Inventory(
            CachedCluster(cluster, self.cache, EVERY_TIER),
            is_allowed=not settings.namespaces,
            clock=time.monotonic,
            node_stamp=lambda: self.cache.stamp(NODES),
        )
        self._queue: WorkQueue[TierName] = WorkQueue(
            self._work,
            workers=settings.workers,
            resync_seconds=settings.resync_seconds,
            debounce_seconds=settings.debounce_seconds,
        )
        self._http = HttpClient()
        # Answers of pods hold up no tier that was edited.
        poller: Poller[TierName] = Poller(self._http, self._queue.add_routine, interval_seconds=settings.probe_seconds)
        monitor = Monitor(
            self._http,
            self._queue.add_routine,
            # Past the memory of objects: no key may stay there.
            read_key=lambda tier, source: read_key(cluster, tier, source),
            delay_seconds=settings.canary_delay_seconds,
        )
        self._inputs = Inputs(
            connector_image=settings.connector_image,
            janitor_image=settings.janitor_image,
            listen_host=settings.listen_host,
            clock=clock,
            inventory=inventory,
            monitor=monitor,
            poller=poller,
            may_work=self._may_work,
        )
        self._idle = IdleTiers(self.cache, settings)
        metrics.watch_queue(depth=self._queue.depth, overdue_seconds=self._queue.seconds_late)
        if health is not None:
            health.alive_if("queue", self._stuck_queue)
            health.alive_if("watches", self._dead_watch)
            health.ready_if("tiers", self._unreadable_tiers)

    def begin(self) -> None:
        """Begin to reconcile tiers, unless that was begun."""
        if self._has_begun:
            return
        self._has_begun = True
        self._http.start()
        self._queue.start()
        self._queue.add(EVERY_TIER)

    def on_tier_event(self, tier: Manifest, *, is_deleted: bool) -> None:
        """Take in an event of the watch of the tiers."""
        self.cache.on_tier_event(tier, is_deleted=is_deleted)
        if not is_deleted and _is_edit_of_serving(tier):
            metadata = tier["metadata"]
            key = TierName(namespace=metadata["namespace"], name=metadata["name"])
            self._queue.add(key, priority=Priority.EDIT_OF_SERVING)

    def end(self) -> None:
        """Reconcile no tier any more; running reconciles may end."""
        if not self._has_begun:
            return
        self._has_begun = False
        if not self._http.close(timeout=self._settings.stop_seconds):
            logger.warning("Stopped while a pod was being asked; the next operator asks again.")
        if not self._queue.close(timeout=self._settings.stop_seconds):
            logger.warning("Stopped before every running reconcile had ended; the next operator repeats them.")

    def _stuck_queue(self) -> str | None:
        overdue = self._queue.seconds_overdue()
        return f"no reconcile has ended for {overdue:.0f} s although tiers wait" if overdue > STUCK_SECONDS else None

    def _dead_watch(self) -> str | None:
        age, why = self.cache.trouble()
        return f"changes have not been reported for {age:.0f} s: {why}" if age > DEAD_WATCH_SECONDS else None

    def readable_scopes(self) -> tuple[str, ...]:
        """Return the namespaces whose tiers may be read; the empty one is all of them."""
        return tuple(each for each in self._settings.namespaces or ("",) if self._refusal(each) is None)

    def _refusal(self, namespace: str) -> ClusterError | None:
        """Return why the tiers of a namespace cannot be read."""
        try:
            self.cache.store(names.API_VERSION, names.KIND, namespace)
        except ClusterError as error:
            return error
        return None

    def _unreadable_tiers(self) -> str | None:
        """Return the missing right without which nothing can be done; a restart would not help.

        While it waits for the Lease, or the API server is away, nothing is missing.
        """
        refusals = map(self._refusal, self._settings.namespaces or ("",))
        return next((str(each) for each in refusals if isinstance(each, (ClusterForbidden, KindMissing))), None)

    def _on_change(self, kind: str, tiers: frozenset[TierName]) -> None:
        """Queue the tiers that a change concerns."""
        for tier in self._wait_for_nodes.copy() if kind == NODES.kind else tiers:
            self._queue.add(tier)

    def _work(self, key: TierName, attempt: int) -> Requeue:
        """Run one key; the one place where a result becomes the next run."""
        try:
            return self._count_tiers() if key == EVERY_TIER else self._reconcile(key, attempt)
        except OperatorError as error:
            logger.warning("%s", error)
            return Requeue(retry_after=error.retry_after or STUCK_SECONDS)

    def _count_tiers(self) -> Requeue:
        self._metrics.count_tiers(self.cache.tiers.all())
        return Requeue(requeue_after=min(COUNT_SECONDS, self._settings.resync_seconds))

    def _reconcile(self, key: TierName, attempt: int) -> Requeue:
        start = time.monotonic()
        if (seconds := self._idle.put_off(key)) is not None:
            self._metrics.count_reconcile(outcome="unchanged", seconds=time.monotonic() - start, written_kinds=())
            return Requeue(requeue_after=seconds)
        cluster, mark = CachedCluster(self._cluster, self.cache, key), self._idle.read(key)
        outcome = reconcile(cluster, key, self._inputs, attempt=attempt)
        (self._wait_for_nodes.add if outcome.waits_for_nodes else self._wait_for_nodes.discard)(key)
        if not outcome.exists:
            self.cache.forget_foreign(key)
            self._idle.forget(key)
        elif outcome.is_idle and mark is not None:
            self._idle.confirm(cluster, key, mark)
        ended = "left" if outcome.is_left else "ok" if outcome.exists else "gone"
        if outcome.failure is not None:
            ended = "failed"
        kinds = tuple(key.kind for key in (*outcome.written, *(each.key for each in outcome.deleted)))
        self._metrics.count_reconcile(outcome=ended, seconds=time.monotonic() - start, written_kinds=kinds)
        if outcome.written:
            logger.info("%s: wrote %s", key, ", ".join(str(each) for each in outcome.written))
        for deleted, why in outcome.deleted:
            logger.info("%s: deleted %s: %s", key, deleted, why)
        if outcome.failure is not None:
            logger.warning("%s: %s (attempt %d)", key, outcome.failure, attempt)
            return Requeue(retry_after=outcome.failure.retry_after)
        return Requeue(is_gone=not outcome.exists, requeue_after=outcome.requeue_after, poll_after=outcome.poll_after)

    def _may_work(self, body: Manifest) -> bool:
        spec = body.get("spec")
        wanted = spec.get("operatorClassName") if isinstance(spec, Mapping) else None
        return (wanted or "") == self._settings.operator_class
