# SPDX-License-Identifier: Apache-2.0
"""The operator as a process, and its handlers: kopf logs in to the cluster and watches the tiers.

The only user of kopf. No handler changes an object through kopf, so it keeps no state in annotations and puts no
finalizer on anything. A tier can always be deleted, with the operator up, down or gone for good.

kopf ends where tiers may not be watched, or where the API server fails for long. Reconciles go on then, and kopf runs
anew, in those namespaces whose tiers may be read.

Threads: kopf's event loop has a thread of its own; its handlers only write into memory.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import gc
import logging
import os
import resource
import signal
import threading
import urllib.parse
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import kopf

from kvtier_operator import names
from kvtier_operator.controller import Operator
from kvtier_operator.errors import ClusterError, ClusterForbidden, KindMissing, SettingsInvalid
from kvtier_operator.kube.client import KubernetesCluster, connect
from kvtier_operator.kube.cluster import Cluster
from kvtier_operator.kube.http_server import Health
from kvtier_operator.kube.informer import LONGEST_PAUSE_SECONDS, PAGE, WATCH_SECONDS
from kvtier_operator.kube.leadership import REQUEST_SECONDS, Leadership
from kvtier_operator.metrics import OperatorMetrics
from kvtier_operator.settings import Settings

logger = logging.getLogger(__name__)

LOOK_SECONDS: Final = 0.2
"""How often it is checked that kopf runs, and where it may."""


def serve(operator: Operator, stop: threading.Event) -> None:
    """Run the operator until the flag is set; running reconciles may end."""
    failures = 0
    operator.cache.start()
    try:
        if operator.cache.wait(stop.is_set):
            operator.begin()
        while not stop.is_set():
            scopes = operator.readable_scopes()
            if scopes and _run(operator, scopes, stop):
                failures = 0
                continue
            failures += bool(scopes)
            stop.wait(min(LOOK_SECONDS * 2**failures, LONGEST_PAUSE_SECONDS))
    finally:
        operator.end()
        operator.cache.close()


def _run(operator: Operator, scopes: tuple[str, ...], stop: threading.Event) -> bool:
    """Run kopf until it is to stop or other namespaces are to be watched; False where it ended by itself."""

    async def watch() -> str | None:
        """Return why kopf has ended by itself; None where it was told to."""
        # Cancelled rather than told by a flag, for which a kopf that fails would wait.
        running = asyncio.create_task(
            kopf.operator(
                registry=_registry(operator),
                settings=_settings(),
                namespaces=[each for each in scopes if each],
                clusterwide=scopes == ("",),
                # A Lease decides who may run: kopf's own peering needs a second CRD and freezes on a tie.
                standalone=True,
            )
        )
        while not running.done() and not stop.is_set() and operator.readable_scopes() == scopes:
            await asyncio.wait((running,), timeout=LOOK_SECONDS)
        if not running.done():
            running.cancel()
        (problem,) = await asyncio.gather(running, return_exceptions=True)
        return None if isinstance(problem, asyncio.CancelledError) else str(problem or "it does not say why")

    # On the main thread kopf would take the signals.
    with concurrent.futures.ThreadPoolExecutor(1, "kopf") as thread:
        problem = thread.submit(asyncio.run, watch()).result()
    if problem is not None:
        logger.warning("kopf has ended and runs anew: %s", problem)
    return problem is None


def _registry(operator: Operator) -> kopf.OperatorRegistry:
    registry = kopf.OperatorRegistry()
    kopf.on.login(registry=registry)(kopf.login_via_client)

    @kopf.on.event(names.GROUP, names.VERSION, names.PLURAL, registry=registry)
    async def _on_tier(event: kopf.RawEvent, **_: Any) -> None:
        operator.on_tier_event(dict(event["object"]), is_deleted=event["type"] == "DELETED")

    return registry


class _NoDiffs(kopf.AnnotationsDiffBaseStorage):
    """Compares nothing: no handler of ours asks what changed, and kopf would copy each object twice to tell."""

    def build(self, *, body: kopf.Body, extra_fields: Iterable[Any] | None = None) -> kopf.BodyEssence:  # noqa: ARG002  kopf's signature
        """Return nothing."""
        return kopf.BodyEssence()

    def fetch(self, *, body: kopf.Body) -> None:
        """Know nothing."""


def _settings() -> kopf.OperatorSettings:
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
    settings.watching.server_timeout = WATCH_SECONDS
    settings.watching.connect_timeout = 10
    # Read in pages, and dropped by workers at once, all tiers at a start take a third of the memory.
    settings.watching.chunk_size = PAGE
    settings.queueing.idle_timeout = 0.2
    return settings


MOST_OPEN_FILES: Final = 4096


def run(settings: Settings, *, log_format: str, is_verbose: bool) -> int:
    """Run until a signal comes and return the exit status.

    Raises:
        OperatorError: the settings or the cluster do not allow to start.
    """
    _log(log_format, is_verbose=is_verbose)
    _open_many_files()
    _collect_seldom()
    metrics, health, stop = OperatorMetrics(), Health(), threading.Event()
    with contextlib.ExitStack() as stack:
        if settings.metrics_port:
            stack.callback(_listening("KVTIER_METRICS_PORT", settings.metrics_port, metrics.serve))
        if settings.liveness_endpoint:
            host, port = _address(settings.liveness_endpoint)
            stack.callback(_listening("--liveness", port, lambda port: health.serve(port, host=host)))
        for name in (signal.SIGTERM, signal.SIGINT):
            signal.signal(name, lambda *_: stop.set())
        leadership = stack.enter_context(_campaign(settings, metrics)) if settings.leader_elect else None
        cluster = connect(
            may_write=leadership.is_leader if leadership is not None else lambda: True, on_answer=metrics.count_request
        )
        if leadership is None:
            _refuse_another(cluster, settings)
        try:
            check_access(cluster, settings.namespaces)
        except ClusterForbidden as error:
            # Once the right is granted, this process goes on; until then it says that it is not ready.
            logger.error("%s; it is asked for again", error)  # noqa: TRY400  no traceback for a missing right
        operator = Operator(settings, cluster=cluster, metrics=metrics, health=health)
        if leadership is not None and not leadership.wait(stop):
            return 0
        metrics.set_leader(is_leader=True)
        serve(operator, stop)
    return 0


def _listening(setting: str, port: int, serve_at: Callable[[int], Callable[[], None]]) -> Callable[[], None]:
    """Begin to serve at a port and return what ends it.

    Raises:
        SettingsInvalid: the port cannot be used.
    """
    try:
        return serve_at(port)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise SettingsInvalid(f"{setting}: cannot listen on port {port} ({reason}): choose a free port") from error


def check_access(cluster: Cluster, namespaces: tuple[str, ...]) -> None:
    """List tiers once, so that a missing CRD or a missing permission is said at once and in words.

    Raises:
        ClusterError: they cannot be listed.
    """
    for namespace in namespaces or ("",):
        try:
            next(cluster.pages(names.API_VERSION, names.KIND, namespace=namespace))
        except KindMissing as error:
            raise KindMissing(
                f"the cluster does not know {names.KIND} resources: kubectl apply -f crds/kvcachetier.yaml ({error})"
            ) from error


def _log(log_format: str, *, is_verbose: bool) -> None:
    kopf.configure(verbose=is_verbose, log_format=kopf.LogFormat[log_format.upper()])
    # Signals are this process's own, and of what kopf tells of each event, ours say what they wrote.
    logging.getLogger("kopf").setLevel(logging.DEBUG if is_verbose else logging.WARNING)
    logging.getLogger("kopf._core.reactor.running").setLevel(logging.ERROR)


@contextlib.contextmanager
def _campaign(settings: Settings, metrics: OperatorMetrics) -> Iterator[Leadership]:
    leadership = Leadership(
        connect(timeout_seconds=(REQUEST_SECONDS, REQUEST_SECONDS), on_answer=metrics.count_request),
        namespace=settings.lease_namespace,
        name=settings.lease_name,
        seconds=settings.lease_seconds,
        on_change=lambda leads: metrics.set_leader(is_leader=leads),
    )
    leadership.start()
    try:
        yield leadership
    finally:
        leadership.close()


def _refuse_another(cluster: KubernetesCluster, settings: Settings) -> None:
    """Refuse to run beside an operator that is installed in the cluster: both would write to the same tiers.

    Raises:
        SettingsInvalid: one is installed for the same class of tiers.
    """
    selector = "app.kubernetes.io/component=operator,app.kubernetes.io/part-of=kvtier"
    try:
        found = cluster.list("apps/v1", "Deployment", namespace="", selector=selector)
    except ClusterError:
        return  # without the right to look, the person who runs it has to know
    for each in found:
        containers = each["spec"]["template"]["spec"]["containers"]
        words = [word for container in containers for word in container.get("args") or ()]
        option = "--operator-class="
        theirs = next((word.removeprefix(option) for word in words if word.startswith(option)), "")
        if theirs == settings.operator_class and each["spec"].get("replicas", 1):
            name = f"{each['metadata']['namespace']}/{each['metadata']['name']}"
            raise SettingsInvalid(
                f"the operator {name} works on these tiers: scale its Deployment to 0, or give this one a class of its "
                "own (--operator-class, spec.operatorClassName)"
            )


def _open_many_files() -> None:
    """Open as many files as are allowed: each pod that is asked is one, and containers often begin with 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_OPEN_FILES if hard == resource.RLIM_INFINITY else min(MOST_OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _collect_seldom() -> None:
    """Look for garbage in cycles after many more objects than by default, and never among what was imported.

    Parsed lists have no cycles, and looking through them again and again took more time than all else of a start.
    """
    gc.freeze()
    gc.set_threshold(MOST_UNCOLLECTED)


MOST_UNCOLLECTED: Final = 100_000
"""Objects that are made before the collector looks through them; most are gone by then."""


def _address(url: str) -> tuple[str, int]:
    found = urllib.parse.urlsplit(url)
    if found.scheme != "http" or not found.hostname or not found.port:
        raise SettingsInvalid(f"--liveness={url!r} must be http://ADDRESS:PORT")
    return found.hostname, found.port
