# SPDX-License-Identifier: Apache-2.0
"""The scale subresource: the replicas of an object as a `Scale`. Pure."""

from __future__ import annotations

from kvtier_localcluster.apiserver.store.api_errors import bad_request
from kvtier_localcluster.apiserver.store.objects import Json, field_at
from kvtier_localcluster.apiserver.store.resources import Resource, ScalePaths

_METADATA = ("name", "namespace", "uid", "resourceVersion", "creationTimestamp")


def view(resource: Resource, manifest: Json) -> Json:
    """Return the Scale of an object."""
    paths = resource.scale or ScalePaths()
    if paths.selector:
        selector = field_at(manifest, paths.selector) or ""
    else:
        labels = field_at(manifest, "spec.selector.matchLabels") or {}
        selector = ",".join(f"{key}={value}" for key, value in labels.items())
    metadata = manifest["metadata"]
    status: Json = {"replicas": field_at(manifest, paths.status) or 0}
    if isinstance(selector, str) and selector:
        status["selector"] = selector
    return {
        "kind": "Scale",
        "apiVersion": "autoscaling/v1",
        "metadata": {name: metadata[name] for name in _METADATA if name in metadata},
        "spec": {"replicas": field_at(manifest, paths.spec) or 0},
        "status": status,
    }


def patch_for(resource: Resource, scale: Json) -> Json:
    """Return the merge patch of an object that makes it as a Scale wants it."""
    paths = resource.scale or ScalePaths()
    replicas = field_at(scale, "spec.replicas")
    if not isinstance(replicas, int) or replicas < 0:
        raise bad_request(f"spec.replicas must be a number of 0 or more, found {replicas!r}")
    patch: Json = {}
    here = patch
    *parents, last = paths.spec.strip(".").split(".")
    for name in parents:
        here = here.setdefault(name, {})
    here[last] = replicas
    version = field_at(scale, "metadata.resourceVersion")
    if version:
        patch["metadata"] = {"resourceVersion": version}
    return patch
