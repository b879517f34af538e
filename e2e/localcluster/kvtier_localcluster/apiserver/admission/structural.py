# SPDX-License-Identifier: Apache-2.0
"""Find the mistakes for which a real API server refuses a CustomResourceDefinition. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator

import jsonschema

from kvtier_localcluster.apiserver.admission.cel import compile_rule, escaped
from kvtier_localcluster.apiserver.admission.crd_schema import to_jsonschema
from kvtier_localcluster.apiserver.store.objects import Json

_JUNCTORS = ("allOf", "anyOf", "oneOf")
_FORBIDDEN_IN_JUNCTORS = ("type", "description", "default", "additionalProperties", "nullable", "title")
_SELECTION = re.compile(r"\b(self|oldSelf)((?:\.\??[A-Za-z_]\w*)+)(\()?")
_OBJECT_FIELDS = {"apiVersion", "kind", "metadata"}


def structural_problems(crd: Json) -> list[str]:
    """Return everything that makes a CustomResourceDefinition unacceptable; empty where it is fine."""
    spec, names = crd["spec"], crd["spec"]["names"]
    problems = []
    if crd["metadata"].get("name") != f"{names['plural']}.{spec['group']}":
        problems.append(f"metadata.name: must be {names['plural']}.{spec['group']}")
    if names["plural"] != names["plural"].lower():
        problems.append("spec.names.plural: must be lower case")
    if sum(bool(version.get("storage")) for version in spec["versions"]) != 1:
        problems.append("spec.versions: exactly one version must be the storage version")
    for version in spec["versions"]:
        schema = (version.get("schema") or {}).get("openAPIV3Schema")
        if not schema:
            problems.append(f"spec.versions[{version['name']}].schema.openAPIV3Schema: Required value")
            continue
        if schema.get("type") != "object":
            problems.append(f"{version['name']}: the root must have type: object")
        problems += _schema_problems(schema, version["name"], is_root=True)
    return problems


def _schema_problems(schema: Json, path: str, *, in_junctor: bool = False, is_root: bool = False) -> Iterator[str]:
    yield from _keyword_problems(schema, path, in_junctor=in_junctor)
    yield from _default_problems(schema, path)
    if schema.get("x-kubernetes-list-type") == "map":
        yield from _list_map_problems(schema, path)
    for rule in schema.get("x-kubernetes-validations") or []:
        yield from _rule_problems(rule, schema, path, is_root=is_root)
    for below, here, is_junctor in _schemas_below(schema, path, is_root=is_root):
        yield from _schema_problems(below, here, in_junctor=in_junctor or is_junctor)


def _schemas_below(schema: Json, path: str, *, is_root: bool) -> Iterator[tuple[Json, str, bool]]:
    """Yield the schemas inside a schema, where they are, and whether they stand in a junctor."""
    for name, below in (schema.get("properties") or {}).items():
        if not (is_root and name in _OBJECT_FIELDS):
            yield below, f"{path}.{name}", False
    for keyword, suffix in (("items", "[]"), ("additionalProperties", ".*")):
        if isinstance(schema.get(keyword), dict):
            yield schema[keyword], path + suffix, False
    if schema.get("x-kubernetes-int-or-string"):
        return  # its anyOf of integer and string is the one junctor that may name types
    for junctor in _JUNCTORS:
        for index, below in enumerate(schema.get(junctor) or []):
            yield below, f"{path}.{junctor}[{index}]", True
    if isinstance(schema.get("not"), dict):
        yield schema["not"], f"{path}.not", True


def _keyword_problems(schema: Json, path: str, *, in_junctor: bool) -> Iterator[str]:
    is_untyped = not schema.get("type") and not schema.get("x-kubernetes-int-or-string")
    is_open = in_junctor or schema.get("x-kubernetes-preserve-unknown-fields")
    refused = (
        (is_untyped and not is_open, "type is required"),
        (isinstance(schema.get("type"), list), "type must be one name"),
        ("$ref" in schema, "$ref is forbidden"),
        ("definitions" in schema or "$defs" in schema, "definitions are forbidden"),
        (schema.get("additionalProperties") is False, "additionalProperties: false is forbidden"),
        (
            bool(schema.get("properties") and schema.get("additionalProperties")),
            "properties and additionalProperties exclude each other",
        ),
        (
            schema.get("type") == "array" and not isinstance(schema.get("items"), dict),
            "an array needs one schema of its items",
        ),
        (bool(schema.get("uniqueItems")), "uniqueItems is forbidden"),
    )
    yield from (f"{path}: {problem}" for is_refused, problem in refused if is_refused)
    for name in _FORBIDDEN_IN_JUNCTORS:
        if in_junctor and name in schema:
            yield f"{path}: {name} is forbidden inside allOf, anyOf, oneOf and not"


def _default_problems(schema: Json, path: str) -> Iterator[str]:
    if "default" in schema:
        for error in jsonschema.Draft202012Validator(to_jsonschema(schema)).iter_errors(schema["default"]):
            yield f"{path}: default is invalid: {error.message}"


def _list_map_problems(schema: Json, path: str) -> Iterator[str]:
    item = schema.get("items") or {}
    given = set(item.get("required") or []) | {n for n, s in (item.get("properties") or {}).items() if "default" in s}
    if not schema.get("x-kubernetes-list-map-keys"):
        yield f"{path}: a list map needs x-kubernetes-list-map-keys"
    for key in schema.get("x-kubernetes-list-map-keys") or []:
        if key not in given:
            yield f"{path}: list-map key {key} must be required or have a default"


def _rule_problems(rule: Json, schema: Json, path: str, *, is_root: bool) -> Iterator[str]:
    for text in filter(None, (rule["rule"], rule.get("messageExpression"))):
        try:
            result = str(compile_rule(text).return_type())
        except Exception as error:  # noqa: BLE001 (the runtime raises several types; each means "not CEL")
            first_line = str(error).splitlines()[0] if str(error) else repr(error)
            yield f"{path}: CEL: {text}: {first_line[:200]}"
            continue
        is_truth = text != rule["rule"] or result in ("BOOL", "DYN")
        for found in _SELECTION.finditer(text):
            names = found[2].replace("?", "").strip(".").split(".")
            if found[3]:
                names.pop()  # the last name is a method
            selected = _selected(names, schema, is_root=is_root)
            if isinstance(selected, str):
                yield f"{path}: CEL: {text}: undefined field '{selected}'"
            elif found[0] == rule["rule"]:
                is_truth = selected.get("type", "boolean") == "boolean"
        if not is_truth:
            yield f"{path}: CEL: {text}: cel expression must evaluate to a bool"


def _selected(names: list[str], schema: Json, *, is_root: bool) -> Json | str:
    """Return the schema of a field that a rule names, empty where it is open, or the name that is not there."""
    here = schema
    for index, name in enumerate(names):
        if here.get("x-kubernetes-preserve-unknown-fields") or not here.get("properties"):
            return {}
        if is_root and index == 0 and name in _OBJECT_FIELDS:
            return {}
        known = {escaped(plain): below for plain, below in here["properties"].items()}
        if name not in known:
            return name
        here = known[name]
    return here
