# SPDX-License-Identifier: Apache-2.0
"""The objects that an API server makes for itself when it starts: namespaces, and the ClusterRoles for people. Pure.

Of what the real roles allow, only the kinds that are served here are named.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from kvtier_localcluster.apiserver.objects import Json

_NAMESPACES: Final = ("default", "kube-system", "kube-public", "kube-node-lease")
_RBAC: Final = "rbac.authorization.k8s.io"
_READ: Final = ["get", "list", "watch"]
_WRITE: Final = ["create", "delete", "deletecollection", "patch", "update"]
_OF_PEOPLE: Final = {
    "": ["configmaps", "endpoints", "persistentvolumeclaims", "pods", "serviceaccounts", "services"],
    "apps": ["daemonsets", "deployments", "deployments/scale", "replicasets", "replicasets/scale", "statefulsets"],
    "autoscaling": ["horizontalpodautoscalers"],
    "batch": ["cronjobs", "jobs"],
    "networking.k8s.io": ["ingresses", "networkpolicies"],
    "policy": ["poddisruptionbudgets"],
}
_STATUS_READ: Final = [
    "events",
    "limitranges",
    "namespaces",
    "persistentvolumeclaims/status",
    "pods/log",
    "pods/status",
]


def _rule(group: str, resources: list[str], verbs: list[str]) -> Json:
    return {"apiGroups": [group], "resources": resources, "verbs": verbs}


def _role(name: str, labels: tuple[str, ...] = (), **content: object) -> Json:
    marks = {f"{_RBAC}/aggregate-to-{role}": "true" for role in labels}
    metadata = {"name": name, "labels": {"kubernetes.io/bootstrapping": "rbac-defaults", **marks}}
    return {"apiVersion": f"{_RBAC}/v1", "kind": "ClusterRole", "metadata": metadata, **content}


def _aggregated(name: str, part_of: str = "") -> Json:
    rule = {"clusterRoleSelectors": [{"matchLabels": {f"{_RBAC}/aggregate-to-{name}": "true"}}]}
    return _role(name, (part_of,) if part_of else (), aggregationRule=rule, rules=[])


def initial_objects() -> Iterator[Json]:
    """Yield what there is before anybody has made anything."""
    for name in _NAMESPACES:
        yield {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
    everything = [_rule("*", ["*"], ["*"]), {"nonResourceURLs": ["*"], "verbs": ["*"]}]
    reads = [_rule(group, resources, _READ) for group, resources in _OF_PEOPLE.items()]
    writes = [_rule(group, resources, _WRITE) for group, resources in _OF_PEOPLE.items()]
    more = [
        _rule("", ["secrets"], _READ + _WRITE),
        _rule("", ["pods/eviction", "pods/exec", "pods/portforward"], ["create", "get"]),
    ]
    yield _role("cluster-admin", rules=everything)
    yield _aggregated("admin")
    yield _aggregated("edit", part_of="admin")
    yield _aggregated("view", part_of="edit")
    yield _role("system:aggregate-to-view", ("view",), rules=[*reads, _rule("", _STATUS_READ, _READ)])
    yield _role("system:aggregate-to-edit", ("edit",), rules=[*writes, *more])
    administers = [_rule(_RBAC, ["rolebindings", "roles"], _READ + _WRITE)]
    yield _role("system:aggregate-to-admin", ("admin",), rules=administers)
    subject = {"kind": "Group", "apiGroup": _RBAC, "name": "system:masters"}
    reference = {"apiGroup": _RBAC, "kind": "ClusterRole", "name": "cluster-admin"}
    binding = {"apiVersion": f"{_RBAC}/v1", "kind": "ClusterRoleBinding", "metadata": {"name": "cluster-admin"}}
    yield {**binding, "subjects": [subject], "roleRef": reference}
