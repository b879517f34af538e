# SPDX-License-Identifier: Apache-2.0
"""One active janitor per tier: by a Lease in a cluster, and always where there is none."""

from __future__ import annotations

import json
import os
import socket
import uuid
from collections.abc import Callable
from typing import Any, Protocol

from kvtier_connector.contract_janitor import JanitorConfig
from kvtier_connector.errors import LeaseConflict, LeaseUnavailable
from kvtier_connector.lease import Elector, LeaseApi, LeaseObject, LeaseSettings

REQUEST_SECONDS = 2.5
"""For each request about the Lease: several must fit into its deadline."""

_CONFLICT = {404, 409}


class Leader(Protocol):
    """Says whether this process is the one that acts. Every method may be called from any thread."""

    def start(self) -> None:
        """Begin to campaign."""

    def is_leader(self) -> bool:
        """Say so at this moment, without a request."""

    def close(self) -> None:
        """Give way to another one."""


class Alone:
    """The only janitor, as on a laptop."""

    def start(self) -> None:
        """Do nothing."""

    def is_leader(self) -> bool:
        """Say yes."""
        return True

    def close(self) -> None:
        """Do nothing."""


def make_leader(config: JanitorConfig) -> Leader:
    """Return who decides, as the settings say.

    Raises:
        LeaseUnavailable: there is a Lease to hold, and no way to reach the cluster.
    """
    if not config.lease_name:
        return Alone()
    settings = LeaseSettings(
        namespace=config.lease_namespace,
        name=config.lease_name,
        identity=f"{config.identity or socket.gethostname()}_{uuid.uuid4()}",
    )
    return Elector(lease_api(settings), settings)


def lease_api(settings: LeaseSettings) -> LeaseApi:
    """Return how the Lease is read and written, with the account of the pod or of the person."""
    # A second and 25 MB that a laptop does without.
    from kubernetes import client  # noqa: PLC0415 - takes a second
    from kubernetes import config as kubernetes_config  # noqa: PLC0415 - takes a second
    from kubernetes.config.config_exception import ConfigException  # noqa: PLC0415 - takes a second
    from urllib3.exceptions import HTTPError  # noqa: PLC0415 - takes a second

    try:
        try:
            kubernetes_config.load_incluster_config()
        except ConfigException:
            # Named here, since the library looks at the environment once only, when it is imported.
            kubernetes_config.load_kube_config(config_file=os.environ.get("KUBECONFIG"))
    except ConfigException as error:
        raise LeaseUnavailable(f"lease_name={settings.name!r}: no cluster is configured: {error}") from error
    leases: Any = client.CoordinationV1Api()
    common: dict[str, Any] = {"_preload_content": False, "_request_timeout": REQUEST_SECONDS}

    def send(request: Callable[[], Any]) -> LeaseObject:
        try:
            lease: LeaseObject = json.loads(request().data)
        except client.ApiException as error:
            kind = LeaseConflict if error.status in _CONFLICT else LeaseUnavailable
            raise kind(f"{error.status} {error.reason}") from error
        except (HTTPError, OSError, ValueError) as error:
            raise LeaseUnavailable(str(error)) from error
        return lease

    def get() -> LeaseObject | None:
        try:
            return send(lambda: leases.read_namespaced_lease(settings.name, settings.namespace, **common))
        except LeaseConflict:
            return None

    return LeaseApi(
        get=get,
        create=lambda lease: send(lambda: leases.create_namespaced_lease(settings.namespace, lease, **common)),
        update=lambda lease: send(
            lambda: leases.replace_namespaced_lease(settings.name, settings.namespace, lease, **common)
        ),
    )
