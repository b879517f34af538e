# SPDX-License-Identifier: Apache-2.0
"""Check objects of built-in kinds against their schema, in one walk that also drops unknown fields.

A general JSON-schema validator takes some 30 ms for a Deployment, because it resolves references anew; the built-in
definitions use so few keywords that this walk does the same in well under one. Pure.
"""

from __future__ import annotations

import re
from typing import Any, Final

from kvtier_localcluster.apiserver import schemas
from kvtier_localcluster.apiserver.objects import Json, compact_json
from kvtier_localcluster.apiserver.quantity import is_quantity

_TYPES: Final[dict[str, tuple[type, ...]]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
}
_TIME: Final = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)")
_QUANTITY: Final = "resource.Quantity"
_INT_OR_STRING: Final = "intstr.IntOrString"


class SchemaWalk:
    """One walk over one object: what is wrong, and which unknown fields it removed."""

    def __init__(self) -> None:
        """Start with nothing found."""
        self.problems: list[str] = []
        self.dropped: list[str] = []

    def check(self, value: Any, schema: Json, path: str = "") -> None:
        """Check a value, removing unknown fields from it in place."""
        reference = schema.get("$ref", "")
        if reference.endswith(_QUANTITY):
            self._check_quantity(value, path)
            return
        if reference.endswith(_INT_OR_STRING):
            if isinstance(value, bool) or not isinstance(value, int | str):
                self.problems.append(f"{path}: Invalid value: {compact_json(value)}: must be an integer or a string")
            return
        schema = schemas.deref(schema)
        if not self._has_type(value, schema, path):
            return
        if "enum" in schema and value not in schema["enum"]:
            allowed = ", ".join(compact_json(item) for item in schema["enum"])
            self.problems.append(f"{path}: Unsupported value: {compact_json(value)}: supported values: {allowed}")
        if isinstance(value, dict):
            self._check_object(value, schema, path)
        elif isinstance(value, list):
            for index, item in enumerate(value):
                self.check(item, schemas.items(schema), f"{path}[{index}]")
        elif schema.get("format") == "date-time" and not _TIME.fullmatch(str(value)):
            self.problems.append(f"{path}: Invalid value: {compact_json(value)}: must be an RFC 3339 time")

    def _check_quantity(self, value: Any, path: str) -> None:
        if isinstance(value, bool) or not isinstance(value, str | int | float) or not is_quantity(value):
            self.problems.append(
                f"{path}: Invalid value: {compact_json(value)}: quantities must match the regular expression "
                "'^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'"
            )

    def _has_type(self, value: Any, schema: Json, path: str) -> bool:
        declared = schema.get("type")
        if declared is None or value is None:
            return value is not None or declared is None
        names = [name for name in ([declared] if isinstance(declared, str) else declared) if name != "null"]
        is_bool_as_number = isinstance(value, bool) and "boolean" not in names
        if not is_bool_as_number and any(isinstance(value, _TYPES[name]) for name in names):
            return True
        found = type(value).__name__
        self.problems.append(f"{path or '<root>'}: Invalid value: {found}: must be of type {' or '.join(names)}")
        return False

    def _check_object(self, value: Json, schema: Json, path: str) -> None:
        known, others = schema.get("properties"), schema.get("additionalProperties")
        for name in schema.get("required") or []:
            if value.get(name) is None:
                self.problems.append(f"{path}.{name}".lstrip(".") + ": Required value")
        for name in list(value):
            here = f"{path}.{name}".lstrip(".")
            if known and name in known:
                self.check(value[name], known[name], here)
            elif isinstance(others, dict):
                self.check(value[name], others, here)
            elif known and not others:
                del value[name]
                self.dropped.append(here)
