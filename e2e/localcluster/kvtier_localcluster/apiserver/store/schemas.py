# SPDX-License-Identifier: Apache-2.0
"""Schemas of the built-in kinds, read from the package kubernetes-validate, and how to walk them.

The definitions keep the `x-kubernetes-*` keys, so list-map keys and patch strategies come from the same source as the
real server's. A schema is a plain dict; `{}` stands for "unknown", and every walk over it stays unknown.
"""

from __future__ import annotations

import functools
import importlib.resources
import json
from typing import Any

from kvtier_localcluster.apiserver.store.objects import Json

KUBERNETES_VERSION = "1.34"
"""The minor version that the server claims to be, and whose schemas it uses."""

_OBJECT_META = "io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"
_REFERENCE_DEPTH = 4


@functools.cache
def definitions() -> dict[str, Json]:
    """Return every definition of the built-in API by its full name."""
    package = importlib.resources.files("kubernetes_validate")
    folder = package / "kubernetes-json-schema" / f"v{KUBERNETES_VERSION}.0-local-strict"
    document = json.loads((folder / "_definitions.json").read_text())
    found: dict[str, Json] = document["$defs"]
    return found


@functools.cache
def _names_by_kind() -> dict[tuple[str, str, str], str]:
    return {
        (kind.get("group", ""), kind["version"], kind["kind"]): name
        for name, definition in definitions().items()
        for kind in definition.get("x-kubernetes-group-version-kind", [])
    }


def builtin_schema(group: str, version: str, kind: str) -> Json:
    """Return the schema of a built-in kind, or `{}`."""
    return definitions().get(_names_by_kind().get((group, version, kind), ""), {})


def with_object_meta(schema: Json) -> Json:
    """Return a custom resource's schema with the true schema of its metadata, so that list maps in there merge."""
    properties = {
        "apiVersion": {"type": "string"},
        "kind": {"type": "string"},
        **schema.get("properties", {}),
        "metadata": {"$ref": f"#/$defs/{_OBJECT_META}"},
    }
    return {**schema, "properties": properties}


def deref(schema: Json | None) -> Json:
    """Follow references (and the one-element allOf around them) to the schema they name."""
    for _ in range(_REFERENCE_DEPTH):
        if not schema:
            return {}
        if "$ref" in schema:
            schema = definitions().get(schema["$ref"].rsplit("/", 1)[-1], {})
        elif len(schema.get("allOf", [])) == 1 and "properties" not in schema:
            schema = schema["allOf"][0]
        else:
            break
    return schema or {}


def child(schema: Json | None, name: str) -> Json:
    """Return the schema of a field, be it a property or a value of a map."""
    resolved = deref(schema)
    found = (resolved.get("properties") or {}).get(name)
    if found is None and isinstance(resolved.get("additionalProperties"), dict):
        found = resolved["additionalProperties"]
    return found or {}


def items(schema: Json | None) -> Json:
    """Return the schema of the items of a list."""
    found = deref(schema).get("items")
    return found if isinstance(found, dict) else {}


def merge_keys(schema: Json | None) -> list[str]:
    """Return the keys by which a strategic merge patch joins list items; empty where the list is replaced."""
    resolved = deref(schema)
    if "merge" in resolved.get("x-kubernetes-patch-strategy", "") and resolved.get("x-kubernetes-patch-merge-key"):
        return [resolved["x-kubernetes-patch-merge-key"]]
    return map_keys(schema)


def merges_primitives(schema: Json | None) -> bool:
    """Tell whether a strategic merge patch adds to a list of scalars instead of replacing it."""
    resolved = deref(schema)
    return "merge" in resolved.get("x-kubernetes-patch-strategy", "") and not merge_keys(schema)


def map_keys(schema: Json | None) -> list[str]:
    """Return the keys that identify items of a list map in server-side apply; empty for other lists."""
    resolved = deref(schema)
    if resolved.get("x-kubernetes-list-map-keys"):
        return list(resolved["x-kubernetes-list-map-keys"])
    if resolved.get("x-kubernetes-list-type"):
        return []
    if "merge" in resolved.get("x-kubernetes-patch-strategy", "") and resolved.get("x-kubernetes-patch-merge-key"):
        return [resolved["x-kubernetes-patch-merge-key"]]
    return []


def is_set(schema: Json | None) -> bool:
    """Tell whether a list is a set of scalars."""
    return deref(schema).get("x-kubernetes-list-type") == "set"


def is_atomic_map(schema: Json | None) -> bool:
    """Tell whether an object is owned and replaced as a whole."""
    return deref(schema).get("x-kubernetes-map-type") == "atomic"


def item_key(item: Any, keys: list[str], list_schema: Json | None) -> tuple[tuple[str, Any], ...]:
    """Return the identity of a list-map item; defaults such as a port's protocol take part in it."""
    item_schema = items(list_schema)
    found = []
    for key in keys:
        default = deref(child(item_schema, key)).get("default", "TCP" if key == "protocol" else None)
        found.append((key, item.get(key, default) if isinstance(item, dict) else None))
    return tuple(found)
