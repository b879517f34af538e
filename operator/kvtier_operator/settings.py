# SPDX-License-Identifier: Apache-2.0
"""The operator's own settings, from its environment, as one frozen object."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

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


RANGES: Final = {
    "workers": (1, 64),
    "resync_seconds": (1, 86400),
    "debounce_seconds": (0, 60),
    "probe_seconds": (1, 3600),
    "lease_seconds": (2, 300),
    "metrics_port": (0, 65535),
    "canary_delay_seconds": (0, 3600),
    "stop_seconds": (0, 600),
}
"""Least and greatest value of each number."""


def parse(environ: Mapping[str, str]) -> Settings:
    """Read the settings from environment variables; an empty one counts as unset.

    Raises:
        SettingsInvalid: names the first variable that cannot be used.
    """
    found: dict[str, Any] = {}
    for field in dataclasses.fields(Settings):
        name = f"KVTIER_{field.name.upper()}"
        text = environ.get(name, "")
        if not text:
            continue
        if field.name in RANGES:
            number = _number(name, text, *RANGES[field.name])
            found[field.name] = int(number) if isinstance(field.default, int) else number
        elif isinstance(field.default, bool):
            found[field.name] = _flag(name, text)
        elif isinstance(field.default, tuple):
            found[field.name] = tuple(filter(None, (part.strip() for part in text.split(","))))
        else:
            found[field.name] = text
    # By the family of addresses of the cluster, not by a variable.
    listen_host = names.EVERY_ADDRESS if ":" in environ.get(_API_SERVER, "") else names.EVERY_IPV4_ADDRESS
    return Settings(**{**found, "listen_host": listen_host})


def _flag(name: str, text: str) -> bool:
    if text.lower() not in {"true", "false"}:
        raise SettingsInvalid(f"{name}={text!r} must be true or false")
    return text.lower() == "true"


def _number(name: str, text: str, least: float, most: float) -> float:
    try:
        value = float(text)
    except ValueError as error:
        raise SettingsInvalid(f"{name}={text!r} is not a number") from error
    if not least <= value <= most:
        raise SettingsInvalid(f"{name}={text!r} must be between {least:g} and {most:g}")
    return value
