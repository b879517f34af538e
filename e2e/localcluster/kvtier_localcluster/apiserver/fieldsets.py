# SPDX-License-Identifier: Apache-2.0
"""Which fields an object has, as server-side apply counts them: sets of paths, and their FieldsV1 encoding. Pure.

A path is a tuple of steps: `("f", name)` a field, `("k", keys-as-JSON)` an item of a list map, `("v", value-as-JSON)`
an item of a set. Atomic lists and maps are one leaf. A list-map item stands in the set itself, with the value `ITEM`.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any, Final

from kvtier_localcluster.apiserver import schemas
from kvtier_localcluster.apiserver.objects import Json, compact_json

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


def encode(paths: Collection[Path]) -> Json:
    """Return a set of paths as FieldsV1."""
    root: Json = {}
    for path in sorted(paths, key=len):
        here = root
        for kind, name in path:
            here = here.setdefault(f"{kind}:{name}", {})
        if path and path[-1][0] == "k":
            here.setdefault(".", {})
    return root


def decode(fields: Json, path: Path = ()) -> set[Path]:
    """Return the set of paths of a FieldsV1 document."""
    found: set[Path] = set()
    for name, below in fields.items():
        if name == ".":
            found.add(path)
            continue
        here = (*path, (name[0], name[2:]))
        if below:
            found |= decode(below, here)
        else:
            found.add(here)
    return found


def describe(path: Path) -> str:
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


def remove(target: Any, path: Path, schema: Json | None) -> None:
    """Remove the field at a path from an object, in place, and the parents that it leaves empty."""
    (kind, name), rest = path[0], path[1:]
    if kind == "f":
        if not isinstance(target, dict) or name not in target:
            return
        if rest:
            remove(target[name], rest, schemas.child(schema, name))
        if not rest or target[name] in ({}, []):
            del target[name]
    elif isinstance(target, list) and kind == "v":
        target[:] = [item for item in target if compact_json(item) != name]
    elif isinstance(target, list):
        keys = json.loads(name)
        for index, item in enumerate(target):
            if dict(schemas.item_key(item, list(keys), schema)) == keys:
                if rest:
                    remove(item, rest, schemas.items(schema))
                else:
                    del target[index]
                return
