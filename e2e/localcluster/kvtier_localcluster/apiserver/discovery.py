# SPDX-License-Identifier: Apache-2.0
"""Discovery documents, and OpenAPI v3 documents for each group and version.

kubectl looks there for the parameters of writes, and `kubectl explain` prints the schemas of custom resources.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from kvtier_localcluster.apiserver.store.objects import Json
from kvtier_localcluster.apiserver.store.resources import Registry, Resource
from kvtier_localcluster.apiserver.store.schemas import KUBERNETES_VERSION

_WRITE_PARAMETERS: Final = [
    {"name": name, "in": "query", "schema": {"type": "string", "uniqueItems": True}}
    for name in ("dryRun", "fieldManager", "fieldValidation", "force")
]


def openapi_index(registry: Registry) -> Json:
    """Return the list of documents; the hash in a path changes with its content, so that clients may cache."""
    paths = {}
    for group_version in {resource.group_version for resource in registry}:
        path = _root(group_version)
        paths[path] = {"serverRelativeURL": f"/openapi/v3/{path}?revision={registry.revision}"}
    return {"paths": paths}


def _root(group_version: str) -> str:
    return f"{'apis' if '/' in group_version else 'api'}/{group_version}"


def openapi_document(registry: Registry, group_version: str) -> Json | None:
    """Return the document of a group and version, or None where nothing is served there."""
    resources = [resource for resource in registry if resource.group_version == group_version]
    if not resources:
        return None
    return {
        "openapi": "3.0.0",
        "info": {"title": "Kubernetes", "version": f"v{KUBERNETES_VERSION}.0"},
        "paths": {path: item for resource in resources for path, item in _paths(resource).items()},
        "components": {"schemas": {each.kind: _component(each) for each in resources if each.is_custom}},
    }


LEGACY_MEDIA_TYPE: Final = "application/com.github.proto-openapi.spec.v2.v1.0+protobuf"
LEGACY_DOCUMENT: Final = b"\n\x032.0\x12\x0e\n\nKubernetes\x12\x00"
"""OpenAPI 2 without any definition: kubectl asks for it before it sends a v1 List, and then leaves checking to us."""


def _paths(resource: Resource) -> Json:
    kind = {"group": resource.group, "version": resource.version, "kind": resource.kind}
    scope = "namespaces/{namespace}/" if resource.is_namespaced else ""
    one_list = f"/{_root(resource.group_version)}/{scope}{resource.plural}"

    def operation(action: str, parameters: Iterable[Json] = ()) -> Json:
        return {
            "x-kubernetes-action": action,
            "x-kubernetes-group-version-kind": kind,
            "parameters": list(parameters),
            "responses": {"200": {"description": "OK"}},
        }

    return {
        one_list: {"get": operation("list"), "post": operation("post", _WRITE_PARAMETERS)},
        f"{one_list}/{{name}}": {
            "get": operation("get"),
            "put": operation("put", _WRITE_PARAMETERS),
            "patch": operation("patch", _WRITE_PARAMETERS),
        },
    }


def _component(resource: Resource) -> Json:
    kind = {"group": resource.group, "version": resource.version, "kind": resource.kind}
    return {**resource.custom_schema, "x-kubernetes-group-version-kind": [kind]}


_VERBS: Final = ["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"]
_SUBRESOURCE_VERBS: Final = ["get", "patch", "update"]
_REVIEWS: Final = "authorization.k8s.io/v1"


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


def _groups(registry: Registry) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for resource in registry:
        versions = groups.setdefault(resource.group, [])
        if resource.version not in versions:
            versions.append(resource.version)
    groups.setdefault("authorization.k8s.io", ["v1"])
    return groups


def _group(name: str, versions: list[str]) -> Json:
    listed = [{"groupVersion": f"{name}/{version}", "version": version} for version in versions]
    return {"name": name, "versions": listed, "preferredVersion": listed[0]}


def discovery_document(registry: Registry, path: str) -> Json | None:
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
    if group_version == _REVIEWS:
        kind = "SelfSubjectAccessReview"
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
        entries += [
            {"name": "pods/log", "kind": "Pod", "verbs": ["get"], **below},
            {"name": "pods/exec", "kind": "PodExecOptions", "verbs": ["create", "get"], **below},
            {"name": "pods/portforward", "kind": "PodPortForwardOptions", "verbs": ["create", "get"], **below},
        ]
    return entries
