# SPDX-License-Identifier: Apache-2.0
"""Discovery documents: which groups, versions and resources there are, one by one and aggregated."""

from __future__ import annotations

from typing import Final

from kvtier_localcluster.apiserver.objects import Json
from kvtier_localcluster.apiserver.resources import Registry, Resource
from kvtier_localcluster.apiserver.schemas import KUBERNETES_VERSION

AGGREGATED_MEDIA_TYPE: Final = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"

_VERBS: Final = ["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"]
_SUBRESOURCE_VERBS: Final = ["get", "patch", "update"]
_REVIEWS: Final = "authorization.k8s.io/v1"
_REVIEW_KINDS: Final = ("SelfSubjectAccessReview", "SelfSubjectRulesReview", "SubjectAccessReview")
_USER_REVIEWS: Final = "authentication.k8s.io/v1"


def version_info() -> Json:
    """Return what /version answers."""
    major, minor = KUBERNETES_VERSION.split(".")
    return {
        "major": major,
        "minor": minor,
        "gitVersion": f"v{KUBERNETES_VERSION}.0",
        "gitCommit": "0" * 40,
        "gitTreeState": "clean",
        "buildDate": "2025-01-01T00:00:00Z",
        "goVersion": "none",
        "compiler": "none",
        "platform": "linux/amd64",
    }


def wants_aggregated(accept: str) -> bool:
    """Tell whether a client takes all of discovery in one document."""
    parts = accept.replace(" ", "").split(",")
    return any("as=APIGroupDiscoveryList" in part and "v=v2;" in f"{part};" for part in parts)


def _groups(registry: Registry) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for resource in registry:
        versions = groups.setdefault(resource.group, [])
        if resource.version not in versions:
            versions.append(resource.version)
    groups.setdefault("authorization.k8s.io", ["v1"])
    groups.setdefault("authentication.k8s.io", ["v1"])
    return groups


def _group(name: str, versions: list[str]) -> Json:
    listed = [{"groupVersion": f"{name}/{version}", "version": version} for version in versions]
    return {"name": name, "versions": listed, "preferredVersion": listed[0]}


def document(registry: Registry, path: str) -> Json | None:
    """Return the discovery document at a path, or None where there is none."""
    groups = _groups(registry)
    parts = path.strip("/").split("/")
    match parts:
        case ["version"]:
            return version_info()
        case ["api"]:
            return {"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []}
        case ["apis"]:
            listed = [_group(name, versions) for name, versions in groups.items() if name]
            return {"kind": "APIGroupList", "apiVersion": "v1", "groups": listed}
        case ["apis", group] if group in groups:
            return {"kind": "APIGroup", "apiVersion": "v1", **_group(group, groups[group])}
        case ["api", "v1"]:
            return _resource_list(registry, "v1")
        case ["apis", group, version] if version in groups.get(group, ()):
            return _resource_list(registry, f"{group}/{version}")
    return None


def _resource_list(registry: Registry, group_version: str) -> Json:
    listed: list[Json] = []
    for resource in registry:
        if resource.group_version == group_version:
            listed += _entries(resource)
    reviews = {_REVIEWS: _REVIEW_KINDS, _USER_REVIEWS: ("SelfSubjectReview",)}
    for kind in reviews.get(group_version, ()):
        names = {"name": f"{kind.lower()}s", "singularName": kind.lower(), "kind": kind}
        listed.append({**names, "namespaced": False, "verbs": ["create"]})
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": group_version, "resources": listed}


def _entries(resource: Resource) -> list[Json]:
    entry: Json = {
        "name": resource.plural,
        "singularName": resource.singular,
        "namespaced": resource.is_namespaced,
        "kind": resource.kind,
        "verbs": _VERBS,
    }
    if resource.short_names:
        entry["shortNames"] = list(resource.short_names)
    if resource.categories:
        entry["categories"] = list(resource.categories)
    below = {"singularName": "", "namespaced": resource.is_namespaced}
    entries = [entry]
    if resource.has_status:
        name = f"{resource.plural}/status"
        entries.append({"name": name, "kind": resource.kind, "verbs": _SUBRESOURCE_VERBS, **below})
    if resource.scale is not None:
        scale = {"group": "autoscaling", "version": "v1", "kind": "Scale", "verbs": _SUBRESOURCE_VERBS}
        entries.append({"name": f"{resource.plural}/scale", **scale, **below})
    if resource.kind == "Pod" and not resource.is_custom:
        eviction = {"group": "policy", "version": "v1", "kind": "Eviction", "verbs": ["create"]}
        entries += [
            {"name": "pods/eviction", **eviction, **below},
            {"name": "pods/log", "kind": "Pod", "verbs": ["get"], **below},
            {"name": "pods/exec", "kind": "PodExecOptions", "verbs": ["create", "get"], **below},
            {"name": "pods/portforward", "kind": "PodPortForwardOptions", "verbs": ["create", "get"], **below},
        ]
    return entries


def aggregated(registry: Registry, *, is_core: bool) -> Json:
    """Return the aggregated document of /api (the core group) or /apis (all others)."""
    listed = []
    for group, versions in _groups(registry).items():
        if (group == "") is not is_core:
            continue
        metadata = {"creationTimestamp": None, **({"name": group} if group else {})}
        found = [_aggregated_version(registry, group, version) for version in versions]
        listed.append({"metadata": metadata, "versions": found})
    return {
        "kind": "APIGroupDiscoveryList",
        "apiVersion": "apidiscovery.k8s.io/v2",
        "metadata": {},
        "items": listed,
    }


def _aggregated_version(registry: Registry, group: str, version: str) -> Json:
    group_version = f"{group}/{version}" if group else version
    resources: dict[str, Json] = {}
    for entry in _resource_list(registry, group_version)["resources"]:
        name, _, subresource = entry["name"].partition("/")
        kind = {
            "group": entry.get("group", group),
            "version": entry.get("version", version),
            "kind": entry["kind"],
        }
        if subresource:
            below = {"subresource": subresource, "responseKind": kind, "verbs": entry["verbs"]}
            resources[name].setdefault("subresources", []).append(below)
            continue
        resources[name] = {
            "resource": name,
            "responseKind": kind,
            "scope": "Namespaced" if entry["namespaced"] else "Cluster",
            "singularResource": entry["singularName"],
            "verbs": entry["verbs"],
            **{field: entry[field] for field in ("shortNames", "categories") if field in entry},
        }
    return {"version": version, "freshness": "Current", "resources": list(resources.values())}
