# SPDX-License-Identifier: Apache-2.0
"""What an update may change and what it carries over from the stored object. Pure: stored objects are copied first."""

from __future__ import annotations

import copy
from typing import Final

from kvtier_localcluster.apiserver import patches
from kvtier_localcluster.apiserver.api_errors import ApiError, bad_request, conflict, invalid
from kvtier_localcluster.apiserver.objects import Json, without_nulls
from kvtier_localcluster.apiserver.patches import APPLY, JSON_PATCH, MERGE, STRATEGIC, Patch
from kvtier_localcluster.apiserver.resources import Resource

_SERVER_OWNED: Final = (
    "uid",
    "creationTimestamp",
    "generation",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
    "namespace",
    "name",
)


def check_identity(resource: Resource, manifest: Json, *, current: Json) -> None:
    """Refuse a write that is based on another state or another object."""
    metadata, known = manifest.get("metadata") or {}, current["metadata"]
    if metadata.get("resourceVersion") not in (None, "", known["resourceVersion"]):
        raise conflict(resource.plural, resource.group, known["name"])
    if metadata.get("uid") not in (None, "", known["uid"]):
        why = f"Precondition failed: UID in precondition: {metadata['uid']}, UID in object meta: {known['uid']}"
        raise conflict(resource.plural, resource.group, known["name"], why)
    if metadata.get("name") not in (None, known["name"]):
        raise bad_request(
            f"the name of the object ({metadata['name']}) does not match the name on the URL ({known['name']})"
        )


def check_finalizers(resource: Resource, new: Json, *, current: Json) -> None:
    """Refuse new finalizers on an object that is being deleted."""
    metadata = new["metadata"]
    added = set(metadata.get("finalizers") or []) - set(current["metadata"].get("finalizers") or [])
    if added and metadata.get("deletionTimestamp"):
        problem = (
            "metadata.finalizers: Forbidden: no new finalizers can be added if the object is being deleted, "
            f"found new finalizers {sorted(added)}"
        )
        raise invalid(resource.kind, resource.group, metadata["name"], [problem])


def desired_part(manifest: Json) -> Json:
    """Return what counts for the generation."""
    return {name: value for name, value in manifest.items() if name not in ("apiVersion", "kind", "metadata", "status")}


def carried_over(resource: Resource, manifest: Json, *, current: Json, subresource: str | None, is_apply: bool) -> Json:
    """Return the new state with everything that this write may not change taken from the current one."""
    written = copy.deepcopy(manifest) if resource.is_custom else without_nulls(manifest)
    metadata = written.setdefault("metadata", {})
    if subresource == "status":
        new = copy.deepcopy(current)
        new["status"] = written.get("status") or {}
        if is_apply:
            new["metadata"]["managedFields"] = metadata.get("managedFields", [])
        return resource.view(new)
    if resource.has_status:
        written.pop("status", None)
        if "status" in current:
            written["status"] = copy.deepcopy(current["status"])
    for name in _SERVER_OWNED:
        metadata.pop(name, None)
        if name in current["metadata"]:
            metadata[name] = current["metadata"][name]
    if "managedFields" not in metadata and "managedFields" in current["metadata"]:
        metadata["managedFields"] = current["metadata"]["managedFields"]
    for name in ("finalizers", "ownerReferences", "labels", "annotations"):
        if name in metadata and not metadata[name]:
            del metadata[name]
    return resource.view(written)


def patched(resource: Resource, current: Json, patch: Patch) -> Json:
    """Return what a patch makes of an object; its resourceVersion stays in only where the patch itself changed it.

    Raises:
        ApiError: the patch cannot be applied (400, 422) or its media type is not known for the kind (415).
    """
    media_type, body = patch.media_type, patch.body
    base = resource.view(current)
    version = base["metadata"]["resourceVersion"]
    if media_type == JSON_PATCH:
        result = patches.json_patch(base, body)
    elif not isinstance(body, dict):
        raise bad_request("a merge patch must be an object")
    elif media_type == MERGE:
        result = patches.merge_patch(base, body)
    elif media_type == STRATEGIC and not resource.is_custom:
        result = patches.strategic_merge_patch(base, body, resource.schema)
    else:
        accepted = [JSON_PATCH, MERGE, APPLY] + ([] if resource.is_custom else [STRATEGIC])
        message = "the body of the request was in an unknown format - accepted media types include: " + ", ".join(
            accepted
        )
        raise ApiError(415, "UnsupportedMediaType", message)
    if not isinstance(result.get("metadata"), dict):
        raise bad_request("a patch may not remove metadata")
    if result["metadata"].get("resourceVersion") != version:
        return result
    metadata = {name: value for name, value in result["metadata"].items() if name != "resourceVersion"}
    return {**result, "metadata": metadata}
