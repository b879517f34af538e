# SPDX-License-Identifier: Apache-2.0
"""JSON patch, JSON merge patch and strategic merge patch. Pure: the target is never changed in place."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, Final

import jsonpatch

from kvtier_localcluster.apiserver.store import schemas
from kvtier_localcluster.apiserver.store.api_errors import ApiError
from kvtier_localcluster.apiserver.store.objects import Json

APPLY: Final = "application/apply-patch+yaml"
JSON_PATCH: Final = "application/json-patch+json"
MERGE: Final = "application/merge-patch+json"
STRATEGIC: Final = "application/strategic-merge-patch+json"

_REFUSED = "the server rejected our request due to an error in our request"


@dataclass(frozen=True, kw_only=True)
class Patch:
    """The body of a PATCH request and its media type."""

    media_type: str
    body: Any


def json_patch(target: Json, operations: Any) -> Json:
    """Apply an RFC 6902 patch.

    Raises:
        ApiError: an operation cannot be applied or a test does not hold; 422, as the real server says.
    """
    try:
        patched: Json = jsonpatch.apply_patch(target, operations)
    except (jsonpatch.JsonPatchException, jsonpatch.JsonPointerException, TypeError, KeyError) as error:
        raise ApiError(422, "Invalid", f"{_REFUSED}: {error}") from error
    return patched


def merge_patch(target: Any, patch: Any) -> Any:
    """Apply an RFC 7386 patch: null deletes, objects merge, everything else replaces."""
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    merged = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if value is None:
            merged.pop(name, None)
        else:
            merged[name] = merge_patch(merged.get(name), value)
    return merged


def strategic_merge_patch(target: Json | None, patch: Json, schema: Json) -> Json:
    """Apply a strategic merge patch: lists merge by the keys that the schema names, and `$patch` directives count."""
    if patch.get("$patch") == "replace":
        return {name: copy.deepcopy(value) for name, value in patch.items() if name != "$patch"}
    merged = dict(target or {})
    kept = patch.get("$retainKeys")
    if kept is not None:
        merged = {name: value for name, value in merged.items() if name in kept}
    for name, value in patch.items():
        if name.startswith("$deleteFromPrimitiveList/"):
            field = name.split("/", 1)[1]
            merged[field] = [item for item in merged.get(field) or [] if item not in value]
        elif not name.startswith("$"):
            _merge_field(merged, name, value, schemas.child(schema, name))
    return merged


def _merge_field(merged: Json, name: str, value: Any, schema: Json) -> None:
    current = merged.get(name)
    if value is None or (isinstance(value, dict) and value.get("$patch") == "delete"):
        merged.pop(name, None)
    elif isinstance(value, dict):
        merged[name] = strategic_merge_patch(current if isinstance(current, dict) else {}, value, schema)
    elif isinstance(value, list) and schemas.merge_keys(schema) and all(isinstance(item, dict) for item in value):
        merged[name] = _merge_list(current or [], value, schema)
    elif isinstance(value, list) and schemas.merges_primitives(schema):
        merged[name] = (current or []) + [item for item in value if item not in (current or [])]
    else:
        merged[name] = copy.deepcopy(value)


def _merge_list(current: list[Json], patch: list[Json], schema: Json) -> list[Json]:
    keys = schemas.merge_keys(schema)
    merged = list(current)
    if any(item.get("$patch") == "replace" for item in patch):
        merged, patch = [], [item for item in patch if "$patch" not in item]
    for item in patch:
        found = next((i for i, old in enumerate(merged) if all(old.get(k) == item.get(k) for k in keys)), None)
        if item.get("$patch") == "delete":
            if found is not None:
                merged.pop(found)
        elif found is None:
            merged.append(strategic_merge_patch({}, item, schemas.items(schema)))
        else:
            merged[found] = strategic_merge_patch(merged[found], item, schemas.items(schema))
    return merged
