# SPDX-License-Identifier: Apache-2.0
"""Estimate the highest cost of the rules of a CustomResourceDefinition, and refuse it where a real API server does.

The estimate follows those of cel-go and of the Kubernetes libraries, for the upper bound only. It works on the
expression that the CEL runtime has parsed, with the sizes that the structural schema declares. A value without a bound
is limited by the largest request. The cost of a rule that runs is not counted. Pure.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from kvtier_localcluster.apiserver.admission.cel import compile_rule, escaped
from kvtier_localcluster.apiserver.store.objects import Json
from kvtier_localcluster.apiserver.store.protobuf import wire_fields

RULE_LIMIT: Final = 10_000_000
DEFINITION_LIMIT: Final = 100_000_000

_MAX_REQUEST_BYTES: Final = 3 << 20
_BYTES_PER_CHARACTER: Final = 4
_UNKNOWN: Final = 1 << 64
"""The size of a value that no schema and no literal bounds."""
_TRAVERSAL: Final = 0.1
_REGEX: Final = 0.25
_MUCH_TOO_MUCH: Final = 100
_BARELY: Final = 1.5
_ADVICE: Final = (
    "(try simplifying the rule, or adding maxItems, maxProperties, and maxLength where arrays, maps, and strings are "
    "declared)"
)


@dataclass(frozen=True)
class _Value:
    """The size of a value: characters, items or entries. A value that has none of these counts as 1."""

    size: int = 1
    kind: str = ""
    """`list`, `map` or `object`; empty for anything else."""
    min_bytes: int = 1
    item: _Value | None = None
    fields: Mapping[str, _Value] = field(default_factory=dict)


_KEY: Final = _Value(0, min_bytes=2)
_TEXT: Final = _Value(_MAX_REQUEST_BYTES - 2, min_bytes=2)
_DYNAMIC: Final = _Value(_UNKNOWN)
_OBJECT_META: Final = _Value(0, "object", 2, fields={"name": _TEXT, "generateName": _TEXT})
_MIN_BYTES: Final = {"boolean": 4, "integer": 1, "number": 1}


def _declared(schema: Json, *, is_root: bool = False) -> _Value | None:
    """Return the value that a schema declares, or None where CEL cannot see it."""
    if schema.get("x-kubernetes-int-or-string"):
        return _Value(_text_size(schema))
    match schema.get("type"):
        case "array":
            item = _declared(schema.get("items") or {})
            largest = (_MAX_REQUEST_BYTES - 2) // (item.min_bytes + 1) if item else 0
            return item and _Value(int(schema.get("maxItems", largest)), "list", 2, item)
        case "object":
            return _object(schema, is_root=is_root or bool(schema.get("x-kubernetes-embedded-resource")))
        case "string":
            return _Value(_text_size(schema), min_bytes=2)
        case "boolean" | "integer" | "number" as name:
            return _Value(min_bytes=_MIN_BYTES[name])
    return None


def _text_size(schema: Json) -> int:
    if "maxLength" in schema:
        return int(schema["maxLength"]) * _BYTES_PER_CHARACTER
    return max((len(str(value).encode()) for value in schema.get("enum") or ()), default=_MAX_REQUEST_BYTES - 2)


def _object(schema: Json, *, is_root: bool) -> _Value | None:
    if isinstance(schema.get("additionalProperties"), dict):
        value = _declared(schema["additionalProperties"])
        largest = (_MAX_REQUEST_BYTES - 2) // (value.min_bytes + 6) if value else 0
        return value and _Value(int(schema.get("maxProperties", largest)), "map", 2, value)
    fields: dict[str, _Value] = {}
    min_bytes = 2
    for name, below in (schema.get("properties") or {}).items():
        found = _declared(below)
        if found is None:
            continue
        fields[escaped(name)] = found
        if name in (schema.get("required") or []) and "default" not in below:
            min_bytes += len(name) + found.min_bytes + 4
    if is_root:
        fields |= {"apiVersion": _TEXT, "kind": _TEXT, "metadata": _OBJECT_META}
    return _Value(0, "object", min_bytes, fields=fields)


class _Estimator:
    """Walks one expression and returns cost and value of each part."""

    def __init__(self, root: _Value) -> None:
        self._variables = {"self": root, "oldSelf": root}

    def expression(self, encoded: bytes) -> tuple[int, _Value]:
        [(number, value)] = [part for part in wire_fields(encoded) if part[0] > 2]  # noqa: PLR2004 (the id comes first)
        parts = [] if number == 3 else list(wire_fields(value))  # noqa: PLR2004 (a literal)
        match number:
            case 3:
                return 0, _literal(value)
            case 4:
                return 1, self._variables.get(parts[0][1].decode(), _Value())
            case 5:
                return self._select(dict(parts))
            case 6:
                return self._call(parts)
            case 7:
                return self._made(10, "list", [each for field, each in parts if field == 1])
            case 8:
                entries = [dict(wire_fields(entry)) for field, entry in parts if field == 2]  # noqa: PLR2004 (its entries)
                keys = sum(self.expression(entry[3])[0] for entry in entries)
                return self._made(30 + keys, "map", [entry[4] for entry in entries])
        return self._comprehension(dict(parts))

    def _made(self, cost: int, kind: str, items: Sequence[bytes]) -> tuple[int, _Value]:
        found = [self.expression(item) for item in items]
        largest = max((value for _, value in found), key=lambda value: value.size, default=None)
        return cost + sum(each for each, _ in found), _Value(len(items), kind, item=largest)

    def _select(self, parts: dict[int, Any]) -> tuple[int, _Value]:
        cost, operand = self.expression(parts[1])
        if parts.get(3):
            return cost, _Value()
        found = operand.item if operand.kind == "map" else operand.fields.get(parts[2].decode())
        return cost + (1 if operand.kind else 0), found or _DYNAMIC

    def _comprehension(self, parts: dict[int, Any]) -> tuple[int, _Value]:
        over_cost, over = self.expression(parts[2])
        start_cost, start = self.expression(parts[4])
        outer = self._variables
        variable, accumulator = parts[1].decode(), parts[3].decode()
        item = _KEY if over.kind == "map" else over.item or _DYNAMIC
        self._variables = {**outer, accumulator: start, variable: item}
        condition_cost, _ = self.expression(parts[5])
        step_cost, made = self.expression(parts[6])
        self._variables = {**outer, accumulator: start}
        result_cost, result = self.expression(parts[7])
        self._variables = outer
        cost = over_cost + start_cost + result_cost + over.size * (condition_cost + step_cost)
        if start.kind:
            return cost, replace(start, size=over.size, item=made.item)
        return cost, result

    def _call(self, parts: list[tuple[int, Any]]) -> tuple[int, _Value]:
        name = dict(parts)[2].decode()
        found = [self.expression(value) for field, value in parts if field in (1, 3)]
        costs, given = [cost for cost, _ in found], [value for _, value in found]
        if name == "_?_:_":
            return costs[0] + max(costs[1:]), max(given[1:], key=lambda value: value.size)
        cost, value = _FUNCTIONS.get(name, _one_step)(given)
        return sum(costs) + cost, value


def _literal(encoded: bytes) -> _Value:
    for number, value in wire_fields(encoded):
        if number == 6:  # noqa: PLR2004 (a text)
            return _Value(len(value.decode()))
    return _Value()


def _traversed(value: _Value, factor: float = _TRAVERSAL) -> int:
    return math.ceil(value.size * factor)


_Given = Sequence[_Value]
_NO_SIZE: Final = _Value()


def _one_step(_: _Given) -> tuple[int, _Value]:
    return 1, _NO_SIZE


def _compared(given: _Given) -> tuple[int, _Value]:
    return min(map(_traversed, given)), _NO_SIZE


def _matched(given: _Given) -> int:
    return math.ceil((given[0].size + 1) * _TRAVERSAL) * _traversed(given[1], _REGEX)


def _joined(given: _Given) -> tuple[int, _Value]:
    made = _Value(given[0].size + given[1].size, given[0].kind, item=given[0].item or given[1].item)
    return _traversed(made), made


def _one_text(given: _Given) -> tuple[int, _Value]:
    separator = given[1].size if len(given) > 1 else 0
    made = _Value(given[0].size * ((given[0].item or _DYNAMIC).size + separator))
    return _traversed(made), made


def _replaced(given: _Given) -> tuple[int, _Value]:
    return _traversed(given[0], 2 * _TRAVERSAL), _Value((given[0].size + 1) * given[-1].size + given[0].size)


_FUNCTIONS: Final[dict[str, Callable[[_Given], tuple[int, _Value]]]] = {
    **dict.fromkeys(("_&&_", "_||_"), lambda _: (0, _NO_SIZE)),
    **dict.fromkeys(("_==_", "_!=_", "_<_", "_<=_", "_>_", "_>=_"), _compared),
    **dict.fromkeys(("startsWith", "endsWith"), lambda given: (_traversed(given[1]), _NO_SIZE)),
    **dict.fromkeys(("lowerAscii", "upperAscii", "substring", "trim"), lambda given: (_traversed(given[0]), given[0])),
    **dict.fromkeys(("indexOf", "lastIndexOf", "quantity", "isQuantity"), lambda it: (_traversed(it[0]), _NO_SIZE)),
    **dict.fromkeys(("dyn", "optional.of", "optional.ofNonZeroValue"), lambda given: (1, given[0])),
    **dict.fromkeys(("string", "bytes", "orValue", "value", "_?._", "_[?_]"), lambda _: (1, _DYNAMIC)),
    "_+_": _joined,
    "_[_]": lambda given: (1, given[0].item or _DYNAMIC),
    "@in": lambda given: (1 if given[1].kind == "map" else given[1].size, _NO_SIZE),
    "contains": lambda given: (_traversed(given[0]) * _traversed(given[1]), _NO_SIZE),
    "matches": lambda given: (_matched(given), _NO_SIZE),
    "find": lambda given: (_matched(given), given[0]),
    "split": lambda given: (_traversed(given[0], 2 * _TRAVERSAL), _Value(given[0].size, "list", item=given[0])),
    "replace": _replaced,
    "join": _one_text,
    "format": lambda given: (_traversed(given[0]), _DYNAMIC),
}
"""The cost of each function by itself, and its result; a target is the first argument."""


@functools.lru_cache(maxsize=4096)
def _parsed(text: str) -> bytes:
    """Return the encoded expression that a rule is."""
    checked = dict(wire_fields(compile_rule(text).serialize()))[2]
    found: bytes = dict(wire_fields(checked))[4]
    return found


def costs(schema: Json) -> Iterator[tuple[str, int]]:
    """Yield the path of each rule and message expression in a schema, and what it costs over a whole object."""
    root = _declared(schema, is_root=True)
    if root is not None:
        yield from _costs(schema, root, 1, "")


def _costs(schema: Json, of: _Value, repeats: int | None, path: str) -> Iterator[tuple[str, int]]:
    for index, rule in enumerate(schema.get("x-kubernetes-validations") or []):
        times = _MAX_REQUEST_BYTES // (of.min_bytes + 1) if repeats is None else repeats
        here = f"{path}.x-kubernetes-validations[{index}]"
        yield f"{here}.rule", times * _Estimator(of).expression(_parsed(rule["rule"]))[0]
        if rule.get("messageExpression"):
            yield f"{here}.messageExpression", _Estimator(of).expression(_parsed(rule["messageExpression"]))[0]
    for name, below in (schema.get("properties") or {}).items():
        found = _declared(below)
        if found is not None and name not in ("apiVersion", "kind", "metadata"):
            yield from _costs(below, found, repeats, f"{path}.properties[{name}]")
    for keyword, bound in (("items", "maxItems"), ("additionalProperties", "maxProperties")):
        if isinstance(schema.get(keyword), dict) and of.item is not None:
            inside = None if repeats is None or bound not in schema else repeats * int(schema[bound])
            yield from _costs(schema[keyword], of.item, inside, f"{path}.{keyword}")


def cost_problems(crd: Json) -> Iterator[str]:
    """Yield what an API server refuses of a CustomResourceDefinition for its rules' cost."""
    versions = crd["spec"]["versions"]
    for index, version in enumerate(versions):
        schema = (version.get("schema") or {}).get("openAPIV3Schema") or {}
        path = "spec.validation" if len(versions) == 1 else f"spec.versions[{index}].schema"
        total = 0
        for place, cost in costs(schema):
            total += cost
            if cost > RULE_LIMIT:
                what = "estimated rule cost" if place.endswith(".rule") else "estimated messageExpression cost"
                yield f"{path}.openAPIV3Schema{place}: Forbidden: {_over(what, cost, RULE_LIMIT)}"
        if total > DEFINITION_LIMIT:
            what = "x-kubernetes-validations estimated rule cost total for entire OpenAPIv3 schema"
            yield f"{path}.openAPIV3Schema: Forbidden: {_over(what, total, DEFINITION_LIMIT)}"


def _over(what: str, cost: int, limit: int) -> str:
    factor = cost / limit
    shown = f"{factor:f}x" if factor < _BARELY else f"{factor:.1f}x"
    shown = "more than 100x" if factor > _MUCH_TOO_MUCH else shown
    return f"{what} exceeds budget by factor of {shown} {_ADVICE}"
