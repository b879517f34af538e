# SPDX-License-Identifier: Apache-2.0
"""The kopf operator: kopf runs it, logs in to the cluster, starts and ends it, and watches the tiers.

The only user of kopf. No handler changes an object through it, so it keeps no state in annotations, puts no finalizer
on anything, and a tier can always be deleted, with the operator up, down or gone for good.

kopf ends where tiers may not be watched, or where the API server fails for long. What it started goes on then, and
kopf runs anew, in those namespaces whose tiers may be read.

Threads: kopf's event loop has one of its own; its handlers only enter what it tells into memory.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import threading
from collections.abc import Callable, Iterable
from typing import Any, Final

import kopf

from kvtier_operator import names
from kvtier_operator.controller import Operator
from kvtier_operator.kube.client import Credentials
from kvtier_operator.kube.informer import LONGEST_PAUSE_SECONDS, PAGE, WATCH_SECONDS

logger = logging.getLogger(__name__)

LOOK_SECONDS: Final = 0.5
"""How often it is seen to that kopf runs, and where it may."""


def serve(operator: Operator, stop: threading.Event, *, login: Callable[[], Credentials]) -> None:
    """Run the operator until the flag is set; passes that run then may end."""
    failures = 0
    operator.start_reading()
    try:
        operator.is_read(stop.is_set)
        while not stop.is_set():
            scopes = operator.readable_scopes()
            if scopes and _run(operator, scopes, stop, login):
                failures = 0
                continue
            failures += bool(scopes)
            stop.wait(min(LOOK_SECONDS * 2**failures, LONGEST_PAUSE_SECONDS))
    finally:
        operator.end()
        operator.stop_reading()


def _run(operator: Operator, scopes: tuple[str, ...], stop: threading.Event, login: Callable[[], Credentials]) -> bool:
    """Run kopf until it is to stop or other namespaces are to be watched; False where it ended by itself."""
    # Not an Event: kopf waits for that on a thread, which would outlive a failure.
    stop_kopf: concurrent.futures.Future[None] = concurrent.futures.Future()
    problems: list[BaseException] = []

    def target() -> None:
        try:
            kopf.run(
                registry=_registry(operator, stop, login),
                settings=_settings(),
                namespaces=[each for each in scopes if each],
                clusterwide=scopes == ("",),
                # Who may run is settled by a Lease before: kopf's own peering needs a second CRD and freezes on a tie.
                standalone=True,
                stop_flag=stop_kopf,
            )
        except Exception as error:  # noqa: BLE001  an edge: whatever ends kopf, it runs anew
            problems.append(error)

    thread = threading.Thread(target=target, name="kopf")
    thread.start()
    while thread.is_alive() and operator.readable_scopes() == scopes:
        if stop.wait(LOOK_SECONDS):
            break
    has_ended = not thread.is_alive()
    with contextlib.suppress(concurrent.futures.InvalidStateError):
        stop_kopf.set_result(None)
    thread.join()
    if problems or has_ended:
        logger.warning("kopf has ended and runs anew: %s", problems[0] if problems else "it does not say why")
    return not has_ended


def _registry(operator: Operator, stop: threading.Event, login: Callable[[], Credentials]) -> kopf.OperatorRegistry:
    registry = kopf.OperatorRegistry()

    @kopf.on.login(registry=registry)
    def _log_in(**_: Any) -> kopf.ConnectionInfo:
        found = login()
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

    @kopf.on.startup(registry=registry)
    def _start_up(**_: Any) -> None:
        operator.begin()

    @kopf.on.cleanup(registry=registry)
    def _clean_up(**_: Any) -> None:
        if stop.is_set():  # else kopf runs anew
            operator.end()

    @kopf.on.event(names.GROUP, names.VERSION, names.PLURAL, registry=registry)
    async def _on_tier(event: kopf.RawEvent, **_: Any) -> None:
        operator.heard(dict(event["object"]), is_deleted=event["type"] == "DELETED")

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
    # Read in pages, and let go by workers as soon as it is told, all tiers at a start take a third of the memory.
    settings.watching.chunk_size = PAGE
    settings.queueing.idle_timeout = 0.2
    return settings
