# SPDX-License-Identifier: Apache-2.0
"""The operator's own settings, from its environment, as one frozen object."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from kvtier_operator import __version__, names
from kvtier_operator.errors import SettingsInvalid


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How this operator runs; each field is set by the variable named after it: ``KVTIER_<FIELD>``."""

    namespaces: tuple[str, ...] = ()
    """Namespaces that are served, separated by commas; none means all of them."""
    connector_image: str = f"ghcr.io/kvtier/connector:{__version__}"
    """Image whose init container brings the connector into engine pods."""
    janitor_image: str = f"ghcr.io/kvtier/janitor:{__version__}"
    """Image of the janitors, where a tier names none."""
    listen_host: str = names.EVERY_IPV4_ADDRESS
    """Address that engines and janitors listen on: IPv6, too, where the cluster's own Service has such an address."""
    workers: int = 4
    """Tiers that are reconciled at the same time."""
    resync_seconds: float = 600.0
    """After how long a tier is reconciled again without any event."""
    debounce_seconds: float = 0.2
    """How long a tier waits after an event, so that a burst of events makes one reconcile."""
    probe_seconds: float = 15.0
    """Shortest time between two requests for the report of a pod."""
    liveness_endpoint: str = ""
    """``http://ADDRESS:PORT`` that answers the kubelet at ``/healthz`` and ``/readyz``; empty serves none."""
    operator_class: str = ""
    """Class of the tiers that are worked on, as their ``spec.operatorClassName`` says; empty for those without one."""
    leader_elect: bool = False
    """Whether to wait for the Lease of this installation before doing anything: needed with more than one replica."""
    lease_namespace: str = ""
    """Where the Lease is; empty for the namespace of this pod."""
    lease_name: str = "kvtier-operator"
    """Name of the Lease, which stands for this installation: its replicas alone have the same."""
    lease_seconds: float = 12.0
    """How long after its last sign of life the leader is followed by another operator."""
    metrics_port: int = 0
    """Port of ``/metrics``; 0 serves none."""
    canary_delay_seconds: float = 5.0
    """How long after a rollout the first canary prompt is sent."""
    stop_seconds: float = 20.0
    """How long running reconciles may take to end when the operator stops."""


_API_SERVER: Final = "KUBERNETES_SERVICE_HOST"
"""Set by the kubelet: the IP address of the API server's Service, of the family that the cluster prefers."""


def parse(environ: Mapping[str, str]) -> Settings:
    """Read the settings from environment variables.

    Raises:
        SettingsInvalid: names the first variable that cannot be used.
    """
    defaults = Settings()
    return Settings(
        namespaces=tuple(filter(None, (part.strip() for part in environ.get("KVTIER_NAMESPACES", "").split(",")))),
        connector_image=environ.get("KVTIER_CONNECTOR_IMAGE") or defaults.connector_image,
        janitor_image=environ.get("KVTIER_JANITOR_IMAGE") or defaults.janitor_image,
        listen_host=names.EVERY_ADDRESS if ":" in environ.get(_API_SERVER, "") else defaults.listen_host,
        workers=int(_number(environ, "KVTIER_WORKERS", defaults.workers, least=1, most=64)),
        resync_seconds=_number(environ, "KVTIER_RESYNC_SECONDS", defaults.resync_seconds, least=1, most=86400),
        debounce_seconds=_number(environ, "KVTIER_DEBOUNCE_SECONDS", defaults.debounce_seconds, least=0, most=60),
        probe_seconds=_number(environ, "KVTIER_PROBE_SECONDS", defaults.probe_seconds, least=1, most=3600),
        liveness_endpoint=environ.get("KVTIER_LIVENESS_ENDPOINT", defaults.liveness_endpoint),
        operator_class=environ.get("KVTIER_OPERATOR_CLASS", defaults.operator_class),
        leader_elect=_flag(environ, "KVTIER_LEADER_ELECT", default=defaults.leader_elect),
        lease_namespace=environ.get("KVTIER_LEASE_NAMESPACE", defaults.lease_namespace),
        lease_name=environ.get("KVTIER_LEASE_NAME") or defaults.lease_name,
        lease_seconds=_number(environ, "KVTIER_LEASE_SECONDS", defaults.lease_seconds, least=2, most=300),
        metrics_port=int(_number(environ, "KVTIER_METRICS_PORT", defaults.metrics_port, least=0, most=65535)),
        canary_delay_seconds=_number(
            environ, "KVTIER_CANARY_DELAY_SECONDS", defaults.canary_delay_seconds, least=0, most=3600
        ),
        stop_seconds=_number(environ, "KVTIER_STOP_SECONDS", defaults.stop_seconds, least=0, most=600),
    )


def _flag(environ: Mapping[str, str], name: str, *, default: bool) -> bool:
    text = environ.get(name, "").lower()
    if text not in {"", "true", "false"}:
        raise SettingsInvalid(f"{name}={text!r} must be true or false")
    return text == "true" if text else default


def _number(environ: Mapping[str, str], name: str, default: float, *, least: float, most: float) -> float:
    text = environ.get(name, "")
    if not text:
        return default
    try:
        value = float(text)
    except ValueError as error:
        raise SettingsInvalid(f"{name}={text!r} is not a number") from error
    if not least <= value <= most:
        raise SettingsInvalid(f"{name}={text!r} must be between {least:g} and {most:g}")
    return value
