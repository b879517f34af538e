# SPDX-License-Identifier: Apache-2.0
"""Election of the operator that acts: the one that holds the Lease. The others wait, and only read it.

An operator that loses the Lease ends at once, and the kubelet starts it again as one that waits. It writes nothing
until it has ended: `Leadership.is_leader` says no as soon as the Lease was not renewed in time, seconds before another
operator may take it.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import threading
import uuid
from collections.abc import Callable
from typing import Final

from kvtier_connector.contract.errors import LeaseConflict, LeaseUnavailable
from kvtier_connector.contract.lease import Elector, LeaseApi, LeaseObject, LeaseSettings
from kvtier_operator.errors import ClusterConflict, ClusterError, KindMissing
from kvtier_operator.kube.client import KubernetesCluster, own_namespace

logger = logging.getLogger(__name__)

REQUEST_SECONDS: Final = 2.5
"""To connect and to read, for each request about the Lease: several must fit into its deadline."""


def end_process() -> None:
    """End this process without another request to the cluster: another operator may act by now."""
    logger.critical("Lost the lease: another operator may lead from now on. This one ends.")
    logging.shutdown()
    os._exit(1)


class Leadership:
    """The campaign of this process for the Lease of the operators.

    Threads: `wait` is for the main thread; `is_leader` for any.
    """

    def __init__(  # noqa: PLR0913  what it is wired to
        self,
        cluster: KubernetesCluster,
        *,
        namespace: str,
        name: str,
        seconds: float,
        on_change: Callable[[bool], None] = lambda _is_leader: None,
        on_loss: Callable[[], None] = end_process,
    ) -> None:
        """Store the settings; `start` starts the campaign.

        The client has short time-outs, `REQUEST_SECONDS`. The function `on_loss` must not return to any work.
        """
        self._on_change = on_change
        self._on_loss = on_loss
        self._moved = threading.Condition()
        self._is_closing = False
        self.identity = f"{socket.gethostname()}_{uuid.uuid4()}"
        """Name of this process that no other one has, nor a later one."""
        settings = LeaseSettings(
            namespace=namespace or own_namespace(),
            name=name,
            identity=self.identity,
            duration_seconds=math.ceil(seconds),
            deadline_seconds=seconds * 2 / 3,
            renew_seconds=seconds / 3,
            retry_seconds=seconds / 8,
        )
        self._elector = Elector(lease_api(cluster, settings), settings, on_change=self._changed)

    def start(self) -> None:
        """Start to campaign."""
        self._elector.start()

    def is_leader(self) -> bool:
        """Tell whether this process leads at this moment."""
        return self._elector.is_leader()

    def wait(self, stop: threading.Event) -> bool:
        """Wait for the lead and return True, or False when told to stop meanwhile."""
        logger.info("Waiting for the lease as %s.", self.identity)
        while not stop.is_set():
            if self.is_leader():
                return True
            with self._moved:
                self._moved.wait(0.2)  # a signal only sets the flag
        return False

    def close(self) -> None:
        """Give the Lease back. All work of the leader must have ended before."""
        self._is_closing = True
        self._elector.close()

    def _changed(self, leads: bool) -> None:
        self._on_change(leads)
        with self._moved:
            self._moved.notify_all()
        if not leads and not self._is_closing:
            self._on_loss()


def lease_api(cluster: KubernetesCluster, settings: LeaseSettings) -> LeaseApi:
    """Return how that Lease is read and written through that client."""
    collection = f"/apis/coordination.k8s.io/v1/namespaces/{settings.namespace}/leases"

    def send(method: str, path: str, body: LeaseObject | None = None) -> LeaseObject:
        try:
            return cluster.request(method, path, what=f"{method} the Lease {settings.name}", body=body)
        except (ClusterConflict, KindMissing) as error:
            raise LeaseConflict(str(error)) from error
        except ClusterError as error:
            raise LeaseUnavailable(str(error)) from error

    def get() -> LeaseObject | None:
        try:
            return send("GET", f"{collection}/{settings.name}")
        except LeaseConflict:
            return None

    return LeaseApi(
        get=get,
        create=lambda lease: send("POST", collection, lease),
        update=lambda lease: send("PUT", f"{collection}/{settings.name}", lease),
    )
