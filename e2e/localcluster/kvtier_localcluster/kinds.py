# SPDX-License-Identifier: Apache-2.0
"""The kinds that the node and the controllers read and write, and helpers for any object.

Pure. Objects are JSON as the API sends it; nothing here changes one.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]
"""A JSON object."""

Key = tuple[str, str]
"""Namespace (empty for cluster-scoped kinds) and name."""

TIME_FORMAT = "%Y-%m-%dT%H:%M:%SZ"


@dataclass(frozen=True)
class Kind:
    """One kind in the version we speak."""

    api_version: str
    name: str
    plural: str
    is_namespaced: bool = True

    def path(self, key: Key | None = None, subresource: str = "") -> str:
        """Return the URL path of one object, or of all objects of all namespaces."""
        root = f"/apis/{self.api_version}" if "/" in self.api_version else f"/api/{self.api_version}"
        if key is None:
            return f"{root}/{self.plural}"
        namespace, name = key
        scope = f"{root}/namespaces/{namespace}/{self.plural}" if self.is_namespaced else f"{root}/{self.plural}"
        return "/".join(part for part in (scope, name, subresource) if part)


CONFIG_MAP = Kind("v1", "ConfigMap", "configmaps")
DEPLOYMENT = Kind("apps/v1", "Deployment", "deployments")
ENDPOINT_SLICE = Kind("discovery.k8s.io/v1", "EndpointSlice", "endpointslices")
EVENT = Kind("v1", "Event", "events")
JOB = Kind("batch/v1", "Job", "jobs")
NODE = Kind("v1", "Node", "nodes", is_namespaced=False)
PERSISTENT_VOLUME_CLAIM = Kind("v1", "PersistentVolumeClaim", "persistentvolumeclaims")
POD = Kind("v1", "Pod", "pods")
REPLICA_SET = Kind("apps/v1", "ReplicaSet", "replicasets")
SECRET = Kind("v1", "Secret", "secrets")
SERVICE = Kind("v1", "Service", "services")


def timestamp() -> str:
    """Return the current time as the API writes it."""
    return datetime.datetime.now(datetime.UTC).strftime(TIME_FORMAT)


def seconds_since(text: str) -> float:
    """Return how long ago a time of the API was."""
    then = datetime.datetime.strptime(text, TIME_FORMAT).replace(tzinfo=datetime.UTC)
    return (datetime.datetime.now(datetime.UTC) - then).total_seconds()


def key_of(manifest: Mapping[str, Any]) -> Key:
    """Return namespace and name of an object."""
    metadata = manifest["metadata"]
    return metadata.get("namespace", ""), metadata["name"]


def uid_of(manifest: Mapping[str, Any]) -> str:
    """Return the identity that no later object of the same name shares."""
    return str(manifest["metadata"]["uid"])


def is_deleting(manifest: Mapping[str, Any]) -> bool:
    """Tell whether deletion was asked for and has not finished."""
    return bool(manifest["metadata"].get("deletionTimestamp"))


def controller_uid(manifest: Mapping[str, Any]) -> str | None:
    """Return the uid of the object that controls this one."""
    references = manifest["metadata"].get("ownerReferences") or []
    return next((str(each["uid"]) for each in references if each.get("controller")), None)


def controlled_by(kind: Kind, owner: Mapping[str, Any]) -> Json:
    """Return the owner reference that a child of this object carries."""
    return {
        "apiVersion": kind.api_version,
        "kind": kind.name,
        "name": owner["metadata"]["name"],
        "uid": owner["metadata"]["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }


def matches(selector: Mapping[str, str], labels: Mapping[str, str] | None) -> bool:
    """Tell whether labels satisfy an equality selector; an empty selector matches nothing here."""
    return bool(selector) and all((labels or {}).get(name) == value for name, value in selector.items())


def is_ready(pod: Mapping[str, Any]) -> bool:
    """Tell whether a pod has the Ready condition."""
    return ready_since(pod) is not None


def ready_since(pod: Mapping[str, Any]) -> str | None:
    """Return when a pod became Ready, or None."""
    for condition in (pod.get("status") or {}).get("conditions") or []:
        if condition["type"] == "Ready" and condition["status"] == "True":
            return str(condition.get("lastTransitionTime") or pod["metadata"]["creationTimestamp"])
    return None


def phase_of(manifest: Mapping[str, Any]) -> str:
    """Return the phase in the status, or an empty text."""
    return str((manifest.get("status") or {}).get("phase") or "")


def is_finished(pod: Mapping[str, Any]) -> bool:
    """Tell whether a pod has ended for good."""
    return phase_of(pod) in ("Succeeded", "Failed")


def merge_difference(old: Any, new: Mapping[str, Any]) -> Json:
    """Return the JSON merge patch that turns old into new; empty where nothing moves."""
    before = old if isinstance(old, Mapping) else {}
    patch: Json = {name: None for name, value in before.items() if name not in new and value is not None}
    for name, value in new.items():
        present = before.get(name)
        if name in before and present == value:
            continue
        if isinstance(value, Mapping) and isinstance(present, Mapping):
            patch[name] = merge_difference(present, value)
        else:
            patch[name] = value
    return patch
