# SPDX-License-Identifier: Apache-2.0
"""Set the defaults of built-in kinds, without which a comparison of desired and live objects would always succeed.

defaults.yaml has those that depend on no other field. Every function changes a fresh object in place.
"""

from __future__ import annotations

import base64
import copy
import importlib.resources
from typing import Any, Final

import yaml

from kvtier_localcluster.apiserver.store.objects import Json, field_at
from kvtier_localcluster.apiserver.store.resources import Resource

_DEFAULTS: Final[dict[str, Json]] = yaml.safe_load(
    (importlib.resources.files(__package__) / "defaults.yaml").read_text()
)
"""Fields and their defaults, by what has them."""
_CLIENT_IP_TIMEOUT_SECONDS = 10800
_FILE_MODE = 0o644


def set_builtin_defaults(resource: Resource, manifest: Json) -> None:
    """Set the defaults of one object of a built-in kind."""
    spec = manifest.get("spec")
    if resource.kind == "Secret":
        manifest.setdefault("type", "Opaque")
        encode_string_data(manifest)
    if not isinstance(spec, dict):
        return
    template = field_at(spec, "template.spec")
    if resource.group in ("apps", "batch") and isinstance(template, dict):
        _set_pod_defaults(template)
    if resource.kind in _SETTERS:
        _SETTERS[resource.kind](spec)
    else:
        _fill(spec, _DEFAULTS.get(resource.kind, {}))


def encode_string_data(secret: Json) -> None:
    """Move a Secret's stringData into data, as the API does on every write."""
    texts = secret.pop("stringData", None)
    if texts:
        data = secret.setdefault("data", {})
        data.update({name: base64.b64encode(text.encode()).decode() for name, text in texts.items()})


def _fill(target: Json, defaults: Json) -> None:
    for name, value in defaults.items():
        if name not in target:
            target[name] = copy.deepcopy(value)


def _set_pod_defaults(spec: Json) -> None:
    _fill(spec, _DEFAULTS["PodSpec"])
    if "serviceAccountName" in spec:
        spec.setdefault("serviceAccount", spec["serviceAccountName"])
    for container in (spec.get("containers") or []) + (spec.get("initContainers") or []):
        _set_container_defaults(container)
    for volume in spec.get("volumes") or []:
        _set_volume_defaults(volume)


def _set_container_defaults(container: Json) -> None:
    image = container.get("image", "")
    tag = image.rsplit("/", 1)[-1].partition(":")[2]
    is_latest = tag in ("", "latest") and "@" not in image
    _fill(container, {"imagePullPolicy": "Always" if is_latest else "IfNotPresent", **_DEFAULTS["Container"]})
    for port in container.get("ports") or []:
        port.setdefault("protocol", "TCP")
    resources = container["resources"]
    for name, limit in (resources.get("limits") or {}).items():
        resources.setdefault("requests", {}).setdefault(name, limit)
    for variable in container.get("env") or []:
        field = (variable.get("valueFrom") or {}).get("fieldRef")
        if field is not None:
            field.setdefault("apiVersion", "v1")
    for name in ("livenessProbe", "readinessProbe", "startupProbe"):
        if isinstance(container.get(name), dict):
            _set_probe_defaults(container[name])


def _set_probe_defaults(probe: Json) -> None:
    _fill(probe, _DEFAULTS["Probe"])
    if isinstance(probe.get("httpGet"), dict):
        _fill(probe["httpGet"], {"scheme": "HTTP", "path": "/"})


def _set_volume_defaults(volume: Json) -> None:
    for source in ("configMap", "secret", "downwardAPI", "projected"):
        if isinstance(volume.get(source), dict):
            volume[source].setdefault("defaultMode", _FILE_MODE)
    if isinstance(volume.get("hostPath"), dict):
        volume["hostPath"].setdefault("type", "")
    if not any(name != "name" for name in volume):
        volume["emptyDir"] = {}


def _set_deployment_defaults(spec: Json) -> None:
    _fill(spec, _DEFAULTS["Deployment"])
    strategy = spec.setdefault("strategy", {})
    strategy.setdefault("type", "RollingUpdate")
    if strategy["type"] == "RollingUpdate":
        _fill(strategy.setdefault("rollingUpdate", {}), {"maxSurge": "25%", "maxUnavailable": "25%"})


def _set_service_defaults(spec: Json) -> None:
    _fill(spec, _DEFAULTS["Service"])
    if spec["sessionAffinity"] == "ClientIP":
        client = spec.setdefault("sessionAffinityConfig", {}).setdefault("clientIP", {})
        client.setdefault("timeoutSeconds", _CLIENT_IP_TIMEOUT_SECONDS)
    for port in spec.get("ports") or []:
        _fill(port, {"protocol": "TCP", "targetPort": port.get("port")})


_SETTERS: Final[dict[str, Any]] = {
    "Pod": _set_pod_defaults,
    "Deployment": _set_deployment_defaults,
    "Service": _set_service_defaults,
}
"""Kinds with defaults that depend on other fields."""
