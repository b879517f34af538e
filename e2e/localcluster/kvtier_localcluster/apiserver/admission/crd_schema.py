# SPDX-License-Identifier: Apache-2.0
"""Prune, default and validate custom resources by the structural schema of their definition. Pure."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any

import jsonschema

from kvtier_localcluster.apiserver.store.objects import Json, compact_json

_OBJECT_FIELDS = ("apiVersion", "kind", "metadata")
_UNCHECKED_FORMATS = ("int32", "int64", "byte", "password", "double", "float")
_TYPE_NAMES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}
_OPENAPI_ONLY = ("nullable", "example", "externalDocs")


def prune(value: Any, schema: Any, *, is_root: bool = True, path: str = "") -> list[str]:
    """Remove, in place, the fields that the schema does not know; return their paths."""
    if not isinstance(schema, dict):
        return []
    dropped: list[str] = []
    if isinstance(value, list):
        for index, item in enumerate(value):
            dropped += prune(item, schema.get("items", {}), is_root=False, path=f"{path}[{index}]")
    elif isinstance(value, dict) and not schema.get("x-kubernetes-int-or-string"):
        known, others = schema.get("properties") or {}, schema.get("additionalProperties")
        keeps_unknown = others is True or schema.get("x-kubernetes-preserve-unknown-fields")
        is_object = is_root or schema.get("x-kubernetes-embedded-resource")
        for name in list(value):
            here = f"{path}.{name}".lstrip(".")
            if is_object and name in _OBJECT_FIELDS:
                continue
            if name in known:
                dropped += prune(value[name], known[name], is_root=False, path=here)
            elif isinstance(others, dict):
                dropped += prune(value[name], others, is_root=False, path=here)
            elif not keeps_unknown:
                del value[name]
                dropped.append(here)
    return dropped


def set_defaults(value: Any, schema: Json) -> None:
    """Fill in, in place, the defaults of the schema; a null where null is not allowed counts as absent."""
    if isinstance(value, list):
        for item in value:
            set_defaults(item, schema.get("items") or {})
    elif isinstance(value, dict):
        known = schema.get("properties") or {}
        for name, below in known.items():
            is_refused_null = name in value and value[name] is None and not below.get("nullable")
            if "default" in below and (name not in value or is_refused_null):
                value[name] = copy.deepcopy(below["default"])
            if name in value:
                set_defaults(value[name], below)
        if isinstance(schema.get("additionalProperties"), dict):
            for name in value:
                if name not in known:
                    set_defaults(value[name], schema["additionalProperties"])


def to_jsonschema(schema: Any) -> Any:
    """Return a structural schema (OpenAPI v3 of Kubernetes' kind) as JSON schema 2020-12."""
    if not isinstance(schema, dict):
        return schema
    result = {name: v for name, v in schema.items() if not name.startswith("x-") and name not in _OPENAPI_ONLY}
    if result.get("format") in _UNCHECKED_FORMATS:
        del result["format"]
    if schema.get("x-kubernetes-int-or-string"):
        result.pop("type", None)
        result["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    for flag, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if isinstance(result.get(flag), bool) and result.pop(flag):
            result[flag] = result.pop(bound)
    if schema.get("nullable") and "type" in result:
        result["type"] = [result["type"], "null"]
    return {name: _nested(name, value) for name, value in result.items()}


def _nested(keyword: str, value: Any) -> Any:
    """Translate the schemas inside a keyword's value."""
    if keyword == "properties":
        return {name: to_jsonschema(below) for name, below in value.items()}
    if keyword in ("items", "additionalProperties", "not"):
        return to_jsonschema(value)
    if keyword in ("allOf", "anyOf", "oneOf"):
        return [to_jsonschema(below) for below in value]
    return value


def make_validator(schema: Json) -> jsonschema.Draft202012Validator:
    """Return a validator for a structural schema; it is worth keeping, since making it costs more than using it."""
    return jsonschema.Draft202012Validator(to_jsonschema(schema))


def schema_problems(
    value: Any, schema: Json, *, validator: jsonschema.Draft202012Validator, old: Any = None
) -> list[str]:
    """Return what the schema refuses, one text each, as the real server words it.

    A stored value that has not changed may stay: the schema may have become stricter since.
    """
    problems = [
        problem
        for error in validator.iter_errors(value)
        if old is None or _value_at(old, value, schema, error.absolute_path) != error.instance
        for problem in _describe(error)
    ]
    return problems + list(_duplicates(value, schema, ""))


def old_item(item: Any, old: Any, schema: Json) -> Any:
    """Return what an item of a list map was before; items of other lists cannot be told apart from one another."""
    keys = schema.get("x-kubernetes-list-map-keys")
    if not keys or not isinstance(old, list) or not isinstance(item, dict):
        return None
    return next((each for each in old if all(each.get(key) == item.get(key) for key in keys)), None)


def _value_at(old: Any, new: Any, schema: Json, path: Iterable[str | int]) -> Any:
    for step in path:
        if isinstance(step, int):
            old, new = old_item(new[step], old, schema), new[step]
            schema = schema.get("items") or {}
        else:
            old, new = old.get(step) if isinstance(old, dict) else None, new[step]
            others = schema.get("additionalProperties")
            below = (schema.get("properties") or {}).get(step, others)
            schema = below if isinstance(below, dict) else {}
    return old


def _duplicates(value: Any, schema: Json, path: str) -> Iterator[str]:
    """Yield what occurs twice in a set or a list map."""
    if isinstance(value, list):
        keys = schema.get("x-kubernetes-list-map-keys")
        seen: list[Any] = []
        for index, item in enumerate(value):
            identity = {key: item.get(key) for key in keys} if keys and isinstance(item, dict) else item
            if (keys or schema.get("x-kubernetes-list-type") == "set") and identity in seen:
                yield f"{path}[{index}]: Duplicate value: {compact_json(identity)}"
            seen.append(identity)
            yield from _duplicates(item, schema.get("items") or {}, f"{path}[{index}]")
    elif isinstance(value, dict):
        known, others = schema.get("properties") or {}, schema.get("additionalProperties")
        for name, item in value.items():
            below = known.get(name, others)
            if isinstance(below, dict) and isinstance(item, dict | list):
                yield from _duplicates(item, below, f"{path}.{name}".lstrip("."))


def _describe(error: jsonschema.ValidationError) -> Iterable[str]:
    path = dotted(error.absolute_path)
    if error.validator == "required" and isinstance(error.instance, dict):
        missing = [name for name in error.validator_value if name not in error.instance]
        return [f"{path}.{name}".lstrip(".") + ": Required value" for name in missing[:1]]
    if error.validator == "enum":
        allowed = ", ".join(compact_json(value) for value in error.validator_value)
        return [f"{path}: Unsupported value: {compact_json(error.instance)}: supported values: {allowed}"]
    return [f"{path or '<root>'}: Invalid value: {_worded(error, path)}"]


def _worded(error: jsonschema.ValidationError, path: str) -> str:
    """Return what is wrong in the real server's words, where operators and their users meet them."""
    limit, found = error.validator_value, compact_json(error.instance)
    match error.validator:
        case "type" if isinstance(limit, str):
            name = _TYPE_NAMES.get(type(error.instance), "null")
            return f'"{name}": {path} in body must be of type {limit}: "{name}"'
        case "minimum":
            return f"{found}: {path} in body should be greater than or equal to {limit}"
        case "maximum":
            return f"{found}: {path} in body should be less than or equal to {limit}"
        case "pattern":
            return f"{found}: {path} in body should match '{limit}'"
    return str(error.message)


def dotted(path: Iterable[str | int]) -> str:
    """Return `spec.items[0].name` for the steps of a path."""
    text = ""
    for step in path:
        text += f"[{step}]" if isinstance(step, int) else f".{step}"
    return text.lstrip(".")
