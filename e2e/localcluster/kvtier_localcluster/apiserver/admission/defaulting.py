# SPDX-License-Identifier: Apache-2.0
"""Set the defaults of built-in kinds, without which a comparison of desired and live objects would always succeed.

Every function changes a fresh object in place; nothing here reads the cluster.
"""

from __future__ import annotations

import base64
import copy
from typing import Any, Final

from kvtier_localcluster.apiserver.store.objects import Json, field_at
from kvtier_localcluster.apiserver.store.resources import Resource

_POD: Final[Json] = {
    "restartPolicy": "Always",
    "dnsPolicy": "ClusterFirst",
    "schedulerName": "default-scheduler",
    "terminationGracePeriodSeconds": 30,
    "securityContext": {},
}
_CONTAINER: Final[Json] = {
    "terminationMessagePath": "/dev/termination-log",
    "terminationMessagePolicy": "File",
    "resources": {},
}
_PROBE: Final[Json] = {"timeoutSeconds": 1, "periodSeconds": 10, "successThreshold": 1, "failureThreshold": 3}
_SERVICE: Final[Json] = {
    "type": "ClusterIP",
    "sessionAffinity": "None",
    "internalTrafficPolicy": "Cluster",
    "ipFamilyPolicy": "SingleStack",
    "ipFamilies": ["IPv4"],
}
_CLIENT_IP_TIMEOUT_SECONDS = 10800
_ROLLING = "RollingUpdate"
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
    setter = _SETTERS.get(resource.kind)
    if setter is not None:
        setter(spec)


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
    _fill(spec, _POD)
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
    _fill(container, {"imagePullPolicy": "Always" if is_latest else "IfNotPresent", **_CONTAINER})
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
    _fill(probe, _PROBE)
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


def _set_rollout_defaults(spec: Json, field: str, rolling: Json) -> None:
    strategy = spec.setdefault(field, {})
    strategy.setdefault("type", _ROLLING)
    if strategy["type"] == _ROLLING:
        _fill(strategy.setdefault("rollingUpdate", {}), rolling)


def _set_deployment_defaults(spec: Json) -> None:
    _fill(spec, {"replicas": 1, "revisionHistoryLimit": 10, "progressDeadlineSeconds": 600})
    _set_rollout_defaults(spec, "strategy", {"maxSurge": "25%", "maxUnavailable": "25%"})


def _set_replica_set_defaults(spec: Json) -> None:
    spec.setdefault("replicas", 1)


def _set_job_defaults(spec: Json) -> None:
    _fill(spec, {"backoffLimit": 6, "completions": 1, "parallelism": 1, "completionMode": "NonIndexed"})
    _fill(spec, {"suspend": False})


def _set_claim_defaults(spec: Json) -> None:
    spec.setdefault("volumeMode", "Filesystem")


def _set_service_defaults(spec: Json) -> None:
    _fill(spec, _SERVICE)
    if spec["sessionAffinity"] == "ClientIP":
        client = spec.setdefault("sessionAffinityConfig", {}).setdefault("clientIP", {})
        client.setdefault("timeoutSeconds", _CLIENT_IP_TIMEOUT_SECONDS)
    for port in spec.get("ports") or []:
        _fill(port, {"protocol": "TCP", "targetPort": port.get("port")})


_SETTERS: Final[dict[str, Any]] = {
    "Pod": _set_pod_defaults,
    "Deployment": _set_deployment_defaults,
    "ReplicaSet": _set_replica_set_defaults,
    "Job": _set_job_defaults,
    "PersistentVolumeClaim": _set_claim_defaults,
    "Service": _set_service_defaults,
}
