# SPDX-License-Identifier: Apache-2.0
"""What a structural schema says to CEL: the type of each value, how large it can get, and how few bytes it takes. Pure.

Where the schema gives no bound, the largest request is one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from kvtier_localcluster.apiserver.cel import escaped
from kvtier_localcluster.apiserver.objects import Json

MAX_REQUEST_BYTES: Final = 3 << 20
_BYTES_PER_CHARACTER: Final = 4
_MIN_BYTES: Final = {"boolean": 4, "integer": 1, "number": 1}
_SCALARS: Final = {"boolean": "bool", "integer": "int", "number": "double"}
# Kind, largest size and fewest bytes of texts with a format.
_TIMES: Final = {
    "duration": ("duration", 32, 3),
    "date": ("timestamp", 12, 12),
    "date-time": ("timestamp", 32, 21),
}


@dataclass(frozen=True)
class Declared:
    """The type of a value."""

    kind: str
    max_size: int = 0
    """Characters, items or entries; 0 for what has none of these."""
    min_bytes: int = 0
    item: Declared | None = None
    fields: Mapping[str, Declared] = field(default_factory=dict)


KEY: Final = Declared("string", min_bytes=2)
_TEXT: Final = Declared("string", MAX_REQUEST_BYTES - 2, 2)
_OBJECT_META: Final = Declared("object", min_bytes=2, fields={"name": _TEXT, "generateName": _TEXT})


def declared(schema: Json, *, is_root: bool = False) -> Declared | None:
    """Return the type that a schema declares, or None where CEL cannot see its values."""
    if schema.get("x-kubernetes-int-or-string"):
        return Declared("dyn", _text_size(schema), 1)
    match schema.get("type"):
        case "array":
            return _array(schema)
        case "object":
            return _object(schema, is_root=is_root or bool(schema.get("x-kubernetes-embedded-resource")))
        case "string":
            return _text(schema)
        case "boolean" | "integer" | "number" as name:
            return Declared(_SCALARS[name], min_bytes=_MIN_BYTES[name])
    return None


def _text_size(schema: Json) -> int:
    if "maxLength" in schema:
        return int(schema["maxLength"]) * _BYTES_PER_CHARACTER
    return MAX_REQUEST_BYTES - 2


def _text(schema: Json) -> Declared:
    if schema.get("format") in _TIMES:
        return Declared(*_TIMES[schema["format"]])
    if schema.get("format") == "byte":
        return Declared("bytes", int(schema.get("maxLength", MAX_REQUEST_BYTES - 2)), 2)
    if "maxLength" not in schema and schema.get("enum"):
        return Declared("string", max(len(str(value).encode()) for value in schema["enum"]), 2)
    return Declared("string", _text_size(schema), 2)


def _array(schema: Json) -> Declared | None:
    item = declared(schema.get("items") or {})
    if item is None:
        return None
    largest = (MAX_REQUEST_BYTES - 2) // (item.min_bytes + 1)
    return Declared("list", int(schema.get("maxItems", largest)), 2, item)


def _object(schema: Json, *, is_root: bool) -> Declared | None:
    if isinstance(schema.get("additionalProperties"), dict):
        value = declared(schema["additionalProperties"])
        if value is None:
            return None
        largest = (MAX_REQUEST_BYTES - 2) // (value.min_bytes + 6)
        return Declared("map", int(schema.get("maxProperties", largest)), 2, value)
    fields: dict[str, Declared] = {}
    min_bytes = 2
    for name, below in (schema.get("properties") or {}).items():
        found = declared(below)
        if found is None:
            continue
        fields[escaped(name)] = found
        if name in (schema.get("required") or []) and "default" not in below:
            min_bytes += len(name) + found.min_bytes + 4
    if is_root:
        fields |= {"apiVersion": _TEXT, "kind": _TEXT, "metadata": _OBJECT_META}
    return Declared("object", min_bytes=min_bytes, fields=fields)
