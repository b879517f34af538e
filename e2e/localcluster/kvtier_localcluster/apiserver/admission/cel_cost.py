# SPDX-License-Identifier: Apache-2.0
"""Estimate the highest cost of the rules of a CustomResourceDefinition, and refuse it where a real API server does.

The estimate follows those of cel-go and of the Kubernetes libraries, for the upper bound only. It works on the
expression that the CEL runtime has parsed. The cost of a rule that runs is not counted. Pure.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from kvtier_localcluster.apiserver.admission.cel import KEY, MAX_REQUEST_BYTES, Declared, compile_rule, declared
from kvtier_localcluster.apiserver.store.objects import Json
from kvtier_localcluster.apiserver.store.protobuf import wire_fields

RULE_LIMIT: Final = 10_000_000
DEFINITION_LIMIT: Final = 100_000_000

_MOST: Final = (1 << 64) - 1
_TRAVERSAL: Final = 0.1
_REGEX: Final = 0.25
_MUCH_TOO_MUCH: Final = 100
_BARELY: Final = 1.5
_TEXT: Final = 6
_TEXTS: Final = {_TEXT: "string", 7: "bytes"}
_CONSTANTS: Final = {1: "null", 2: "bool", 3: "int", 4: "int", 5: "double"}
_SCALARS: Final = frozenset(("bool", "int", "double", "duration", "timestamp"))
_ADVICE: Final = (
    "(try simplifying the rule, or adding maxItems, maxProperties, and maxLength where arrays, maps, and strings are "
    "declared)"
)


@dataclass(frozen=True)
class _Node:
    """The size, type and cost of an expression, as far as they are known."""

    cost: int
    kind: str
    size: int | None = None
    """At most; None where nothing says."""
    declared: Declared | None = None
    """The part of the schema that the value is, if it is one."""
    item_size: int | None = None
    """Of the largest item, in a list or map that the rule itself makes."""
    item_kind: str = "dyn"

    @property
    def at_most(self) -> int:
        return _MOST if self.size is None else self.size


def _times(size: int, factor: float) -> int:
    return _MOST if size >= _MOST else min(_MOST, math.ceil(size * factor))


class _Estimator:
    """Walks one expression."""

    def __init__(self, root: Declared, *, is_old_optional: bool) -> None:
        self._root = root
        self._is_old_optional = is_old_optional
        self._variables: dict[str, _Node] = {}

    def expression(self, encoded: bytes) -> _Node:
        for number, value in wire_fields(encoded):
            match number:
                case 3:
                    return _literal(value)
                case 4:
                    return self._ident(dict(wire_fields(value))[1].decode())
                case 5:
                    return self._select(dict(wire_fields(value)))
                case 6:
                    return self._call(list(wire_fields(value)))
                case 7:
                    return self._list([each for field, each in wire_fields(value) if field == 1])
                case 8:
                    return self._map([each for field, each in wire_fields(value) if field == 2])  # noqa: PLR2004 (the number of the field)
                case 9:
                    return self._comprehension(dict(wire_fields(value)))
        return _Node(0, "dyn")

    def _part(self, cost: int, found: Declared | None) -> _Node:
        """Return the node of a part of the schema."""
        if found is None:
            return _Node(cost, "dyn")
        return _Node(cost, found.kind, found.max_size, found)

    def _ident(self, name: str) -> _Node:
        if name in self._variables:
            return replace(self._variables[name], cost=1)
        if name == "oldSelf" and self._is_old_optional:
            return _Node(1, "optional", self._root.max_size, self._root)
        return self._part(1, self._root) if name in ("self", "oldSelf") else _Node(1, "type", self._root.max_size)

    def _select(self, parts: dict[int, Any]) -> _Node:
        operand = self.expression(parts[1])
        if parts.get(3):
            return _Node(operand.cost, "bool", 1)
        cost = operand.cost + (1 if operand.kind in ("map", "object") else 0)
        if operand.declared is None:
            return _Node(cost, "dyn", self._root.max_size, self._root)
        below = operand.declared.item if operand.kind == "map" else operand.declared.fields.get(parts[2].decode())
        return self._part(cost, below)

    def _list(self, items: Sequence[bytes]) -> _Node:
        nodes = [self.expression(item) for item in items]
        size = max((node.at_most for node in nodes), default=0)
        kind = nodes[0].kind if nodes else "dyn"
        return _Node(_sum(10, *nodes), "list", len(nodes), item_size=size, item_kind=kind)

    def _map(self, entries: Sequence[bytes]) -> _Node:
        parts = [self.expression(dict(wire_fields(entry))[field]) for entry in entries for field in (3, 4)]
        size = max((node.at_most for node in parts[1::2]), default=0)
        return _Node(_sum(30, *parts), "map", len(entries), item_size=size)

    def _comprehension(self, parts: dict[int, Any]) -> _Node:
        over, start = self.expression(parts[2]), self.expression(parts[4])
        accumulator, variable = parts[3].decode(), parts[1].decode()
        outer = dict(self._variables)
        self._variables[accumulator] = start
        self._variables[variable] = self._item(over, is_key=over.kind == "map")
        if second := parts.get(8):
            self._variables[variable] = self._item(over, is_key=True)
            self._variables[second.decode()] = self._item(over, is_key=False)
        step = _sum(0, self.expression(parts[5]), made := self.expression(parts[6]))
        self._variables = {**outer, accumulator: start}
        result = self.expression(parts[7])
        self._variables = outer
        cost = min(_MOST, _sum(0, over, start, result) + over.at_most * step)
        if start.kind in ("list", "map"):
            return _Node(cost, start.kind, over.at_most, item_size=made.item_size, item_kind=made.item_kind)
        return _Node(cost, result.kind, start.size)

    def _item(self, over: _Node, *, is_key: bool) -> _Node:
        if is_key:
            return _Node(1, "int", 1) if over.kind == "list" else self._part(1, KEY)
        if over.declared is not None:
            return self._part(1, over.declared.item)
        return _Node(1, over.item_kind, self._root.max_size, self._root)

    def _call(self, parts: list[tuple[int, Any]]) -> _Node:
        named = dict(parts)
        target = self.expression(named[1]) if 1 in named else None
        name = named[2].decode()
        arguments = [self.expression(value) for field, value in parts if field == 3]  # noqa: PLR2004 (the number of the field)
        before = _sum(target.cost if target else 0, *arguments)
        if name in ("_&&_", "_||_"):
            return _Node(before, "bool", 1)
        if name == "_?_:_":
            condition, *ways = arguments
            most = max(ways, key=lambda way: way.at_most)
            cost = condition.cost + max(way.cost for way in ways)
            return replace(most, cost=cost, size=most.at_most, declared=None)
        if name == "_[_]":
            return self._index(before + 1, arguments[0])
        if name == "dyn":
            return replace(arguments[0], cost=before + 1, kind="dyn")
        cost, result = _function(name, [*([target] if target else []), *arguments])
        return replace(result, cost=min(_MOST, before + cost))

    def _index(self, cost: int, container: _Node) -> _Node:
        if container.declared is not None:
            return self._part(cost, container.declared.item)
        return _Node(cost, container.item_kind, container.item_size)


def _sum(first: int, *nodes: _Node | int) -> int:
    return min(_MOST, first + sum(node if isinstance(node, int) else node.cost for node in nodes))


def _literal(encoded: bytes) -> _Node:
    for number, value in wire_fields(encoded):
        if isinstance(value, bytes) and number in _TEXTS:
            return _Node(0, _TEXTS[number], len(value.decode()) if number == _TEXT else len(value))
        return _Node(0, _CONSTANTS.get(number, "dyn"), 1)
    return _Node(0, "null", 1)


_BOOL: Final = _Node(0, "bool", 1)
_INT: Final = _Node(0, "int", 1)
_COMPARISONS: Final = ("_<_", "_<=_", "_>_", "_>=_")
_REMAKERS: Final = ("lowerAscii", "upperAscii", "substring", "trim")


def _function(name: str, given: list[_Node]) -> tuple[int, _Node]:
    """Return what a function costs by itself, and its result; a target comes first among what is given."""
    if name in _BY_NAME:
        return _BY_NAME[name](given)
    if name in _COMPARISONS:
        is_text = all(node.kind in ("string", "bytes", "dyn") for node in given)
        return (_compared(given)[0] if is_text else 1), _BOOL
    if name == "_+_" and any(node.kind in ("string", "bytes", "list") for node in given):
        return _joined(given)
    if name in _REMAKERS:
        return _traversed(given[0]), _Node(0, "string", given[0].at_most)
    return 1, _result(name, given)


def _traversed(node: _Node, factor: float = _TRAVERSAL) -> int:
    return _times(node.at_most, factor)


def _matched(given: list[_Node]) -> int:
    text, expression = given[0].at_most, given[1].at_most
    return min(_MOST, _times(min(_MOST, text + 1), _TRAVERSAL) * _times(expression, _REGEX))


def _compared(given: list[_Node]) -> tuple[int, _Node]:
    if given[0].kind == given[1].kind and given[0].kind == "quantity":
        return 1, _BOOL
    return _times(min(node.at_most for node in given), _TRAVERSAL), _BOOL


def _joined(given: list[_Node]) -> tuple[int, _Node]:
    """Return texts or lists, one after the other."""
    size = min(_MOST, sum(node.at_most for node in given))
    largest = max((node.item_size for node in given if node.item_size is not None), default=None)
    kind = next(node.kind for node in given if node.kind != "dyn")
    item_kind = next((node.item_kind for node in reversed(given) if node.item_kind != "dyn"), "dyn")
    made = _Node(0, kind, size, item_size=largest, item_kind=item_kind)
    return (1 if kind == "list" else _times(size, _TRAVERSAL)), made


def _one_text(given: list[_Node]) -> tuple[int, _Node]:
    """Return the items of a list as one text."""
    items, item = given[0], given[0].declared.item if given[0].declared else None
    longest = item.max_size if item else _MOST if items.item_size is None else items.item_size
    separators = max(0, items.at_most - 1) * given[1].at_most if len(given) > 1 else 0
    size = min(_MOST, items.at_most * longest + separators)
    return _times(size, _TRAVERSAL), _Node(0, "string", size)


_BY_NAME: Final[dict[str, Callable[[list[_Node]], tuple[int, _Node]]]] = {
    "startsWith": lambda given: (_traversed(given[1]), _BOOL),
    "endsWith": lambda given: (_traversed(given[1]), _BOOL),
    "contains": lambda given: (min(_MOST, _traversed(given[0]) * _traversed(given[1])), _BOOL),
    "matches": lambda given: (_matched(given), _BOOL),
    "find": lambda given: (_matched(given), _Node(0, "string", given[0].at_most)),
    "_==_": _compared,
    "_!=_": _compared,
    "@in": lambda given: (1 if given[1].kind == "map" else given[1].at_most, _BOOL),
    "split": lambda given: (
        _traversed(given[0], 2 * _TRAVERSAL),
        _Node(0, "list", given[0].at_most, item_kind="string"),
    ),
    "replace": lambda given: (_traversed(given[0], 2 * _TRAVERSAL), _Node(0, "string", _replaced_size(given))),
    "join": _one_text,
    "format": lambda given: (_traversed(given[0]), _Node(0, "string")),
    "indexOf": lambda given: (_traversed(given[0]), _INT),
    "lastIndexOf": lambda given: (_traversed(given[0]), _INT),
    "quantity": lambda given: (_traversed(given[0]), _Node(0, "quantity")),
    "isQuantity": lambda given: (_traversed(given[0]), _BOOL),
}


def _replaced_size(given: list[_Node]) -> int:
    """Return the longest length of a text after one text in it is replaced by another; both are usually literals."""
    text, old, new = (node.at_most for node in given[:3])
    if new <= old:
        return text
    return min(_MOST, math.ceil(text / old) * new if old else (text + 1) * new + text)


def _result(name: str, given: list[_Node]) -> _Node:
    """Return what comes of a function whose cost does not depend on it."""
    if name in ("_?._", "_[?_]", "optional.of", "optional.ofNonZeroValue"):
        inside = given[0].declared
        if name == "_[?_]" and inside is not None:
            return _Node(0, "optional", item_kind=inside.item.kind if inside.item else "dyn")
        return _Node(0, "optional", item_kind="dyn" if name.startswith("_") else given[0].kind)
    if name in ("orValue", "value"):
        kind = given[-1].kind if name == "orValue" else given[0].item_kind
        return _Node(0, kind, 1 if kind in _SCALARS else None)
    if name in ("string", "type", "bytes"):
        return _Node(0, name)
    kind = given[0].kind if name in ("_+_", "_-_", "_*_", "_/_", "_%_", "-_") and given[0].kind in _SCALARS else "bool"
    return _Node(0, kind, 1)


@functools.lru_cache(maxsize=4096)
def _parsed(text: str) -> bytes:
    """Return the encoded expression that a rule is."""
    checked = dict(wire_fields(compile_rule(text).serialize()))[2]
    found: bytes = dict(wire_fields(checked))[4]
    return found


def rule_cost(text: str, root: Declared, *, is_old_optional: bool = False) -> int:
    """Return what one evaluation of a rule costs at most."""
    return _Estimator(root, is_old_optional=is_old_optional).expression(_parsed(text)).cost


def is_no_truth(text: str, schema: Json, *, is_root: bool) -> bool:
    """Tell whether a rule certainly yields something other than true or false."""
    root = declared(schema, is_root=is_root)
    estimator = _Estimator(root or Declared("dyn"), is_old_optional=False)
    return estimator.expression(_parsed(text)).kind not in ("bool", "dyn")


def costs(schema: Json) -> Iterator[tuple[str, int]]:
    """Yield the path of each rule and message expression in a schema, and what it costs over a whole object."""
    root = declared(schema, is_root=True)
    if root is not None:
        yield from _costs(schema, root, 1, "")


def _costs(schema: Json, of: Declared, repeats: int | None, path: str) -> Iterator[tuple[str, int]]:
    for index, rule in enumerate(schema.get("x-kubernetes-validations") or []):
        times = MAX_REQUEST_BYTES // (of.min_bytes + 1) if repeats is None else repeats
        is_optional = bool(rule.get("optionalOldSelf"))
        here = f"{path}.x-kubernetes-validations[{index}]"
        yield f"{here}.rule", min(_MOST, times * rule_cost(rule["rule"], of, is_old_optional=is_optional))
        if rule.get("messageExpression"):
            yield f"{here}.messageExpression", rule_cost(rule["messageExpression"], of, is_old_optional=is_optional)
    for name, below in (schema.get("properties") or {}).items():
        found = declared(below)
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
