# SPDX-License-Identifier: Apache-2.0
"""The operator as a process: what it serves, the wait for the lead, and the order in which it all starts and ends."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
import time
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

import kopf

from kvtier_operator.admission import Admission
from kvtier_operator.cluster import check_access, connect
from kvtier_operator.errors import SettingsInvalid
from kvtier_operator.handlers import Operator
from kvtier_operator.health import Health
from kvtier_operator.inventory import Inventory
from kvtier_operator.leadership import REQUEST_SECONDS, Leadership
from kvtier_operator.metrics import OperatorMetrics
from kvtier_operator.settings import Settings
from kvtier_operator.webhook import WebhookServer

logger = logging.getLogger(__name__)


def run(settings: Settings, *, log_format: str, is_verbose: bool) -> int:
    """Run until a signal comes and return the exit status.

    Raises:
        OperatorError: the settings or the cluster do not allow to start.
    """
    kopf.configure(verbose=is_verbose, log_format=kopf.LogFormat[log_format.upper()])
    if not is_verbose:
        # kopf reports every event of every pod as a handler that succeeded; ours only say what they wrote.
        logging.getLogger("kopf.objects").setLevel(logging.WARNING)
    metrics, health, stop = OperatorMetrics(), Health(), threading.Event()
    with contextlib.ExitStack() as stack:
        if settings.metrics_port:
            stack.callback(metrics.serve(settings.metrics_port))
        if settings.liveness_endpoint:
            host, port = _address(settings.liveness_endpoint)
            stack.callback(health.serve(port, host=host))
        for name in (signal.SIGTERM, signal.SIGINT):
            signal.signal(name, lambda *_: stop.set())
        leadership = stack.enter_context(_campaign(settings, metrics)) if settings.leader_elect else None
        cluster = connect(
            may_write=leadership.is_leader if leadership is not None else lambda: True,
            on_answer=metrics.count_request,
        )
        check_access(cluster, settings.namespaces)
        if settings.webhook_cert or settings.webhook_key:
            _serve_webhook(settings, health, stack)
        operator = Operator(
            settings, cluster=cluster, metrics=metrics, health=health, login=lambda: connect().credentials()
        )
        if leadership is not None and not leadership.wait(stop):
            return 0
        metrics.set_leader(is_leader=True)
        operator.run(stop_flag=stop)
    return 0


def _serve_webhook(settings: Settings, health: Health, stack: contextlib.ExitStack) -> None:
    if not (settings.webhook_cert and settings.webhook_key):
        raise SettingsInvalid("--webhook-cert and --webhook-key: the webhook needs both")
    cluster = connect(timeout_seconds=(1.0, 3.0), may_write=lambda: False)
    inventory = Inventory(cluster, is_allowed=not settings.namespaces, clock=time.monotonic)
    admission = Admission(cluster, inventory=inventory, connector_image=settings.connector_image)
    stack.callback(admission.close)
    server = WebhookServer(
        admission.judge,
        port=settings.webhook_port,
        certificate=Path(settings.webhook_cert),
        key=Path(settings.webhook_key),
    )
    server.start()
    stack.callback(server.close)
    health.ready_if("webhook-certificate", server.problem)


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


def _address(url: str) -> tuple[str, int]:
    found = urllib.parse.urlsplit(url)
    if found.scheme != "http" or not found.hostname or not found.port:
        raise SettingsInvalid(f"--liveness={url!r} must be http://ADDRESS:PORT")
    return found.hostname, found.port
