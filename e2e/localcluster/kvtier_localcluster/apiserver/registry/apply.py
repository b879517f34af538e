# SPDX-License-Identifier: Apache-2.0
"""Server-side apply and the bookkeeping of field managers. Pure except for the times in managedFields.

`apply_configuration` merges the fields that one manager applies; `record_update` notes the changes of any other write.
Both return new objects; stored ones never change in place.

Fields are sets of paths. A path is a tuple of steps: `("f", name)` for a field, `("k", keys-as-JSON)` for an item of a
list map, `("v", value-as-JSON)` for an item of a set. Atomic lists and maps are one leaf. An item of a list map is in
the set itself, with the value `ITEM`.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Final

from kvtier_localcluster.apiserver.store import schemas
from kvtier_localcluster.apiserver.store.api_errors import ApiError
from kvtier_localcluster.apiserver.store.objects import Json, compact_json, timestamp

Step = tuple[str, str]
Path = tuple[Step, ...]

ITEM: Final = object()
"""The value of a path that only says "this list item exists"."""


def field_values(value: Any, schema: Json | None, path: Path = ()) -> dict[Path, Any]:
    """Return every leaf of an object with its value."""
    if isinstance(value, dict) and value and not schemas.is_atomic_map(schema):
        found: dict[Path, Any] = {}
        for name, item in value.items():
            found |= field_values(item, schemas.child(schema, name), (*path, ("f", name)))
        return found
    if isinstance(value, list):
        keys = schemas.map_keys(schema)
        if keys:
            return _list_map_values(value, keys, schema, path)
        if schemas.is_set(schema):
            return {(*path, ("v", compact_json(item))): item for item in value}
    return {path: value}


def _list_map_values(value: list[Any], keys: list[str], schema: Json | None, path: Path) -> dict[Path, Any]:
    found: dict[Path, Any] = {}
    for item in value:
        here = (*path, ("k", compact_json(dict(schemas.item_key(item, keys, schema)))))
        found[here] = ITEM
        found |= field_values(item, schemas.items(schema), here)
    return found


def encode_fields(paths: Collection[Path]) -> Json:
    """Return a set of paths as FieldsV1."""
    root: Json = {}
    for path in sorted(paths, key=len):
        here = root
        for kind, name in path:
            here = here.setdefault(f"{kind}:{name}", {})
        if path and path[-1][0] == "k":
            here.setdefault(".", {})
    return root


def decode_fields(fields: Json, path: Path = ()) -> set[Path]:
    """Return the set of paths of a FieldsV1 document."""
    found: set[Path] = set()
    for name, below in fields.items():
        if name == ".":
            found.add(path)
            continue
        here = (*path, (name[0], name[2:]))
        if below:
            found |= decode_fields(below, here)
        else:
            found.add(here)
    return found


def describe_path(path: Path) -> str:
    """Return a path as a conflict message shows it: `.spec.containers[name="a"].image`."""
    text = ""
    for kind, name in path:
        if kind == "f":
            text += f".{name}"
        elif kind == "k":
            text += "[" + ",".join(f"{key}={json.dumps(value)}" for key, value in json.loads(name).items()) + "]"
        else:
            text += f"[={name}]"
    return text


def is_key_field(path: Path) -> bool:
    """Tell whether a path is a field by which its list-map item is found: it lives and goes with the item."""
    return len(path) > 1 and path[-2][0] == "k" and path[-1][1] in json.loads(path[-2][1])


def remove_field(target: Any, path: Path, schema: Json | None) -> None:
    """Remove the field at a path from an object, in place, and the parents that it leaves empty."""
    (kind, name), rest = path[0], path[1:]
    if kind == "f":
        if not isinstance(target, dict) or name not in target:
            return
        if rest:
            remove_field(target[name], rest, schemas.child(schema, name))
        if not rest or target[name] in ({}, []):
            del target[name]
    elif isinstance(target, list) and kind == "v":
        target[:] = [item for item in target if compact_json(item) != name]
    elif isinstance(target, list):
        keys = json.loads(name)
        for index, item in enumerate(target):
            if dict(schemas.item_key(item, list(keys), schema)) == keys:
                if rest:
                    remove_field(item, rest, schemas.items(schema))
                else:
                    del target[index]
                return


_OWNED_METADATA = ("labels", "annotations", "finalizers", "ownerReferences")


@dataclass(frozen=True, kw_only=True)
class FieldManager:
    """Who writes, through which version and subresource."""

    name: str
    group_version: str
    subresource: str | None = None

    def owns(self, entry: Json, operation: str) -> bool:
        """Tell whether a managedFields entry is this manager's for an operation (Apply or Update)."""
        return (entry["manager"], entry["operation"], entry.get("subresource")) == (
            self.name,
            operation,
            self.subresource,
        )

    def entry(self, operation: str, paths: set[Path], previous: Json | None) -> Json:
        """Return a managedFields entry; the time of the previous one stays where nothing moved."""
        entry = {
            "manager": self.name,
            "operation": operation,
            "apiVersion": self.group_version,
            "time": timestamp(),
            "fieldsType": "FieldsV1",
            "fieldsV1": encode_fields(paths),
        }
        if self.subresource:
            entry["subresource"] = self.subresource
        if previous is not None and entry["fieldsV1"] == previous["fieldsV1"]:
            entry["time"] = previous.get("time", entry["time"])
        return entry


def managed_part(manifest: Json) -> Json:
    """Return the part of an object that field managers own."""
    part = {name: value for name, value in manifest.items() if name not in ("apiVersion", "kind", "metadata")}
    metadata = manifest.get("metadata") or {}
    owned = {name: metadata[name] for name in _OWNED_METADATA if metadata.get(name)}
    return {**part, "metadata": owned} if owned else part


def _values(manifest: Json | None, schema: Json) -> dict[Path, Any]:
    part = managed_part(manifest) if manifest else {}
    return field_values(part, schema) if part else {}


def record_update(new: Json, old: Json | None, schema: Json, manager: FieldManager) -> list[Json]:
    """Return the managedFields after a write that is not an apply: who changes a field takes it over."""
    after, before = _values(new, schema), _values(old, schema)
    changed = {path for path, value in after.items() if path not in before or before[path] != value}
    gone = set(before) - set(after)
    entries: list[Json] = []
    mine: Json | None = None
    for entry in new["metadata"].get("managedFields") or []:
        is_mine = manager.owns(entry, "Update")
        owned = decode_fields(entry["fieldsV1"])
        left = owned - gone if is_mine else owned - gone - changed
        if is_mine:
            mine = entry
            entries.append(manager.entry("Update", left | changed, entry))
        elif left:
            entries.append(entry if left == owned else {**entry, "fieldsV1": encode_fields(left)})
    if mine is None and changed:
        entries.append(manager.entry("Update", changed, None))
    return [entry for entry in entries if entry["fieldsV1"]]


def first_entry(applied: Json, schema: Json, manager: FieldManager) -> Json:
    """Return the managedFields entry of an apply that creates its object."""
    return manager.entry("Apply", set(_values(applied, schema)), None)


def apply_configuration(current: Json, applied: Json, schema: Json, manager: FieldManager, *, is_forced: bool) -> Json:
    """Merge what a manager applies into an object.

    Fields that the manager applied before and leaves out now are removed, unless another manager owns them too.

    Raises:
        ApiError: another manager owns a field with another value, and the apply is not forced; 409.
    """
    wanted = _values(applied, schema)
    present = _values(current, schema)
    entries, conflicts = [], []
    previous: Json | None = None
    for entry in current["metadata"].get("managedFields") or []:
        if manager.owns(entry, "Apply"):
            previous = entry
            continue
        owned = decode_fields(entry["fieldsV1"])
        taken = {
            path for path, value in wanted.items() if path in owned and value is not ITEM and present.get(path) != value
        }
        if taken and not is_forced:
            conflicts += [(entry["manager"], path) for path in sorted(taken)]
        left = owned - taken
        if left:
            entries.append({**entry, "fieldsV1": encode_fields(left)} if taken else entry)
    if conflicts:
        raise _apply_failed(conflicts)
    merged: Json = copy.deepcopy(current)
    if previous is not None:
        _drop_abandoned(merged, previous, set(wanted), entries, schema)
    body = copy.deepcopy(applied)
    for name in ("name", "namespace", "managedFields"):
        (body.get("metadata") or {}).pop(name, None)
    merged = merge_applied(merged, body, schema)
    merged["metadata"]["managedFields"] = [*entries, manager.entry("Apply", set(wanted), previous)]
    return merged


def _drop_abandoned(target: Json, previous: Json, wanted: set[Path], others: list[Json], schema: Json) -> None:
    kept: set[Path] = set()
    for entry in others:
        kept |= decode_fields(entry["fieldsV1"])
    abandoned = decode_fields(previous["fieldsV1"]) - wanted
    for path in sorted(abandoned, key=len):  # an item goes before its fields: without its keys it could not be found
        is_shared_item = path[-1][0] == "k" and any(other[: len(path)] == path for other in kept)
        if path not in kept and not is_shared_item and not is_key_field(path):
            remove_field(target, path, schema)


def _apply_failed(conflicts: list[tuple[str, Path]]) -> ApiError:
    plural = "s" if len(conflicts) > 1 else ""
    listed = ", ".join(f'conflict with "{name}": {describe_path(path)}' for name, path in conflicts)
    causes = [
        {"reason": "FieldManagerConflict", "message": f'conflict with "{name}"', "field": describe_path(path)}
        for name, path in conflicts
    ]
    message = f"Apply failed with {len(conflicts)} conflict{plural}: {listed}"
    return ApiError(409, "Conflict", message, causes=causes)


def merge_applied(target: Any, applied: Any, schema: Json | None) -> Any:
    """Merge an applied value into a current one: objects and list maps merge, sets unite, the rest is replaced."""
    if isinstance(applied, dict) and isinstance(target, dict) and not schemas.is_atomic_map(schema):
        merged = dict(target)
        for name, value in applied.items():
            merged[name] = merge_applied(merged.get(name), value, schemas.child(schema, name))
        return merged
    if isinstance(applied, list) and isinstance(target, list):
        keys = schemas.map_keys(schema)
        if keys:
            return _merge_list_map(target, applied, keys, schema)
        if schemas.is_set(schema):
            return target + [item for item in applied if item not in target]
    return copy.deepcopy(applied)


def _merge_list_map(target: list[Any], applied: list[Any], keys: list[str], schema: Json | None) -> list[Any]:
    merged = list(target)
    places = {schemas.item_key(item, keys, schema): index for index, item in enumerate(merged)}
    for item in applied:
        key = schemas.item_key(item, keys, schema)
        if key in places:
            merged[places[key]] = merge_applied(merged[places[key]], item, schemas.items(schema))
        else:
            places[key] = len(merged)
            merged.append(copy.deepcopy(item))
    return merged
