# SPDX-License-Identifier: Apache-2.0
"""The triggers: whatever happens to a tier or to one of its objects puts the tier into the work queue.

The only user of kopf, and of kopf only its watching: no handler of ours changes an object through it, so it keeps no
state in annotations, puts no finalizer on anything, and a tier can always be deleted, with the operator up, down or
gone for good. What to do is decided by a pass over the tier as it then is, never from the event.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, Final

import kopf

from kvtier_operator import names
from kvtier_operator.claim_users import ClaimUsers
from kvtier_operator.cluster import Cluster, Credentials
from kvtier_operator.engine_keys import read_key
from kvtier_operator.errors import OperatorError
from kvtier_operator.health import LOOP_SECONDS, Beat, Health
from kvtier_operator.inventory import Inventory
from kvtier_operator.lookout import Lookout, WatchfulCluster
from kvtier_operator.metrics import OperatorMetrics
from kvtier_operator.names import Manifest, TierName
from kvtier_operator.probes import Probes
from kvtier_operator.proof.monitor import Proofs
from kvtier_operator.recent import Recent
from kvtier_operator.reconcile import Outcome, reconcile
from kvtier_operator.settings import Settings
from kvtier_operator.workqueue import Done, WorkQueue

logger = logging.getLogger(__name__)

EVERY_TIER: Final = TierName(namespace="", name="")
"""Key of the pass that lists all tiers, in case a watch has missed one."""

LIST_SECONDS: Final = 60.0
"""How often all tiers are listed."""

STUCK_SECONDS: Final = 600.0
"""After how long without any progress the operator calls itself dead; longer than any pass can take."""

FRESH_SECONDS: Final = 120.0
"""For how long what was read of a tier, and watched since, is not read again."""

DEAF_SECONDS: Final = 300.0
"""For how long a change may stand that no watch told of; several lists must have shown it."""

WATCH_PAGE: Final = 250
"""Objects of one kind that are read at a time when a watch of it begins."""

_WATCHED: Final = (
    ("", "v1", "configmaps"),
    ("", "v1", "pods"),
    ("", "v1", "serviceaccounts"),
    ("", "v1", "services"),
    ("apps", "v1", "deployments"),
    ("policy", "v1", "poddisruptionbudgets"),
    ("rbac.authorization.k8s.io", "v1", "rolebindings"),
    ("rbac.authorization.k8s.io", "v1", "roles"),
)
"""What a tier is made of: a change of any of it, by anybody, is looked at."""

_CLAIMS: Final = ("", "v1", "persistentvolumeclaims")
"""Watched without a selector: a tier may use a claim that carries no label of ours."""

_WATCHED_KINDS: Final = frozenset(
    {
        names.KIND,
        "ConfigMap",
        "Deployment",
        "PersistentVolumeClaim",
        "Pod",
        "PodDisruptionBudget",
        "Role",
        "RoleBinding",
        "Service",
        "ServiceAccount",
    }
)


_KEPT_KINDS: Final = _WATCHED_KINDS - {names.KIND, "Deployment", "Pod"} | {names.LEASE_KIND}
"""What a pass need not read again each time.

A Deployment and its pods are compared with each other, and each watch tells in its own time: they are read one after
the other. Of a Lease only its being there matters, so no watch need tell of it.
"""


class Operator:
    """Connects kopf's events with passes over tiers.

    Threads: kopf's event loop calls the handlers, which only add keys; the queue's threads do the work.
    """

    def __init__(  # noqa: PLR0913  what it is wired to
        self,
        settings: Settings,
        *,
        cluster: Cluster,
        metrics: OperatorMetrics,
        login: Callable[[], Credentials],
        health: Health | None = None,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """Store what a pass needs; `run` starts everything."""
        self._settings = settings
        self._recent = Recent(_KEPT_KINDS, seconds=min(FRESH_SECONDS, settings.resync_seconds / 4))
        self._lookout = Lookout(_WATCHED_KINDS, recent=self._recent)
        self._cluster = WatchfulCluster(cluster, self._lookout)
        self._beat = Beat()
        self._stop_flag: threading.Event | None = None
        self._metrics = metrics
        self._login = login
        self._clock = clock
        self._claim_users = ClaimUsers()
        # A Role in a few namespaces gives no right to look at nodes.
        self._inventory = Inventory(cluster, is_allowed=not settings.namespaces, clock=time.monotonic)
        self._queue: WorkQueue[TierName] = WorkQueue(
            self._pass,
            workers=settings.workers,
            resync_seconds=settings.resync_seconds,
            settle_seconds=settings.settle_seconds,
        )
        self._probes: Probes[TierName] = Probes(self._queue.add, interval_seconds=settings.probe_seconds)
        self._proofs = Proofs(
            self._queue.add,
            # Past what is remembered of objects: nothing of a key is to stay.
            read_key=lambda tier, source: read_key(cluster, tier, source),
            settle_seconds=settings.canary_settle_seconds,
        )
        metrics.watch_queue(depth=self._queue.depth, overdue_seconds=self._queue.seconds_late)
        if health is not None:
            health.alive_if("queue", self._stuck_queue)
            health.alive_if("event-loop", self._stuck_loop)
            health.alive_if("watches", self._deaf_watch)

    def run(self, *, stop_flag: threading.Event | None = None) -> None:
        """Serve until a signal or the flag says stop; passes that run then may end."""
        self._stop_flag = stop_flag
        kopf.run(
            registry=self._registry(),
            settings=_kopf_settings(),
            namespaces=self._settings.namespaces,
            clusterwide=not self._settings.namespaces,
            # Who may run is settled by a Lease before: kopf's own peering needs a second CRD and freezes on a tie.
            standalone=True,
            stop_flag=stop_flag,
        )

    def _registry(self) -> kopf.OperatorRegistry:
        registry = kopf.OperatorRegistry()
        kopf.on.login(registry=registry)(self._on_login)
        kopf.on.startup(registry=registry)(self._on_startup)
        kopf.on.cleanup(registry=registry)(self._on_cleanup)
        kopf.on.event(names.GROUP, names.VERSION, names.PLURAL, registry=registry)(self._on_tier)
        for group, version, plural in _WATCHED:
            kopf.on.event(group, version, plural, registry=registry)(self._on_child)
        kopf.on.event(*_CLAIMS, registry=registry)(self._on_claim)
        return registry

    def _on_login(self, **_: Any) -> kopf.ConnectionInfo:
        found = self._login()
        scheme, _separator, token = (found.authorization or "").rpartition(" ")
        return kopf.ConnectionInfo(
            server=found.server,
            ca_path=found.ca_path,
            insecure=found.is_insecure,
            username=found.username,
            password=found.password,
            scheme=scheme or None,
            token=token or None,
            certificate_path=found.certificate_path,
            private_key_path=found.private_key_path,
        )

    async def _on_startup(self, **_: Any) -> None:
        self._queue.start()
        self._proofs.start()
        self._queue.add(EVERY_TIER)
        self._beat_again(asyncio.get_running_loop())

    def _beat_again(self, loop: asyncio.AbstractEventLoop) -> None:
        self._beat.mark()
        loop.call_later(LOOP_SECONDS / 10, self._beat_again, loop)

    def _on_cleanup(self, **_: Any) -> None:
        self._probes.close()
        if self._stop_flag is not None:
            # kopf waits for it on a thread, which a signal does not end.
            self._stop_flag.set()
        if not self._proofs.close(timeout=self._settings.stop_seconds):
            logger.warning("Stopped while an engine was being asked; the next operator asks again.")
        if not self._queue.close(timeout=self._settings.stop_seconds):
            logger.warning("Stopped before every running pass had ended; the next operator repeats them.")

    def _stuck_queue(self) -> str | None:
        overdue = self._queue.seconds_overdue()
        return f"no pass has ended for {overdue:.0f} s although tiers wait" if overdue > STUCK_SECONDS else None

    def _stuck_loop(self) -> str | None:
        age = self._beat.seconds_since()
        return f"the event loop has not moved for {age:.0f} s" if age > LOOP_SECONDS else None

    def _deaf_watch(self) -> str | None:
        age, what = self._lookout.longest_unheard()
        is_deaf = age > max(DEAF_SECONDS, 3 * self._settings.resync_seconds)
        return f"no watch has told in {age:.0f} s that {what} changed" if is_deaf else None

    async def _on_tier(self, namespace: str | None, name: str, body: Mapping[str, Any], **details: Any) -> None:
        self._lookout.heard(body, is_deleted=details["type"] == "DELETED")
        self._queue.add(TierName(namespace=namespace or "", name=name))

    async def _on_child(
        self, namespace: str | None, labels: Mapping[str, str], body: Mapping[str, Any], **details: Any
    ) -> None:
        if details["type"] is None:
            # From the list that a watch begins with: what was deleted before it is told by nobody.
            self._recent.forget_all()
        self._lookout.heard(body, is_deleted=details["type"] == "DELETED")
        tier = labels.get(names.LABEL_TIER)
        if tier is not None:
            self._queue.add(TierName(namespace=namespace or "", name=tier))

    async def _on_claim(
        self, namespace: str | None, name: str, labels: Mapping[str, str], body: Mapping[str, Any], **details: Any
    ) -> None:
        if names.LABEL_TIER in labels:  # of the claims that are not ours, nothing is remembered
            await self._on_child(namespace, labels, body, **details)
        for tier in self._claim_users.users(namespace or "", name):
            self._queue.add(tier)

    def _pass(self, key: TierName, attempt: int) -> Done:
        """Do one pass; the one place where an outcome becomes what the queue does next."""
        try:
            return self._list_tiers() if key == EVERY_TIER else self._reconcile(key, attempt)
        except OperatorError as error:
            logger.warning("%s", error)
            return Done(retry_after=error.retry_after or STUCK_SECONDS)

    def _list_tiers(self) -> Done:
        self._recent.forget_old()
        self._metrics.count_conditions(self._each_tier())
        return Done(again_after=min(LIST_SECONDS, self._settings.resync_seconds))

    def _each_tier(self) -> Iterator[Manifest]:
        """Return all tiers, a page of them at a time in memory, and look after those that nobody knows yet."""
        for scope in self._settings.namespaces or ("",):
            for page in self._cluster.pages(names.API_VERSION, names.KIND, namespace=scope):
                for found in page:
                    metadata = found["metadata"]
                    self._queue.add_if_unknown(TierName(namespace=metadata["namespace"], name=metadata["name"]))
                    yield found

    def _reconcile(self, key: TierName, attempt: int) -> Done:
        start = time.monotonic()
        outcome = reconcile(
            self._cluster,
            key,
            connector_image=self._settings.connector_image,
            janitor_image=self._settings.janitor_image,
            listen_host=self._settings.listen_host,
            clock=self._clock,
            inventory=self._inventory,
            proofs=self._proofs,
            attempt=attempt,
            probes=self._probes,
        )
        if outcome.failure is not None or not outcome.exists:
            # What a failed pass took for true may be why it failed.
            self._recent.forget(key.namespace, key.name)
        self._claim_users.note(key, outcome.existing_claim)
        self._count(outcome, time.monotonic() - start)
        if outcome.written:
            logger.info("%s: wrote %s", key, ", ".join(str(each) for each in outcome.written))
        if outcome.failure is not None:
            logger.warning("%s: %s (attempt %d)", key, outcome.failure, attempt)
            return Done(retry_after=outcome.failure.retry_after)
        return Done(is_gone=not outcome.exists, again_after=outcome.again_after)

    def _count(self, outcome: Outcome, seconds: float) -> None:
        ended = "failed" if outcome.failure is not None else "ok" if outcome.exists else "gone"
        kinds = tuple(key.kind for key in outcome.written)
        self._metrics.count_pass(outcome=ended, seconds=seconds, written_kinds=kinds)


class _NoDiffs(kopf.AnnotationsDiffBaseStorage):
    """Compares nothing: no handler of ours asks what changed, and kopf would copy each object twice to tell."""

    def build(self, *, body: kopf.Body, extra_fields: Iterable[Any] | None = None) -> kopf.BodyEssence:  # noqa: ARG002  kopf's signature
        """Return nothing."""
        return kopf.BodyEssence()

    def fetch(self, *, body: kopf.Body) -> None:
        """Know nothing."""


def _kopf_settings() -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    # Nothing is kept in the objects, so these prefixes only matter should a handler ever need them: none of kopf's own.
    settings.persistence.finalizer = f"{names.GROUP}/finalizer"
    settings.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix=names.GROUP)
    settings.persistence.diffbase_storage = _NoDiffs(prefix=names.GROUP)
    settings.posting.enabled = False
    # Namespaces are given and the CRD comes with the operator: no right to watch either is needed.
    settings.scanning.disabled = True
    settings.networking.connect_timeout = 10
    settings.networking.request_timeout = 60
    # Load balancers drop quiet connections without a word.
    settings.watching.server_timeout = 300
    settings.watching.connect_timeout = 10
    # At a start there is everything at once: read in pages, and let go by workers as soon as it is told, it takes a
    # third of the memory. Pages are long enough to follow each other quickly: one that comes after the API server has
    # compacted what it belongs to, which takes minutes, ends kopf, and the kubelet starts it again.
    settings.watching.chunk_size = WATCH_PAGE
    settings.queueing.idle_timeout = 0.2
    for group, version, plural in _WATCHED:
        settings.watching.label_selectors[group, version, plural] = names.LABEL_TIER
    return settings
