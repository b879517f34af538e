# SPDX-License-Identifier: Apache-2.0
"""The CEL rules of a CustomResourceDefinition (`x-kubernetes-validations`), evaluated with Google's CEL runtime.

Of the Kubernetes libraries, quantities (as doubles), `find` and `isURL` are emulated. Text functions and optionals come
with the runtime. The time budget of rules is not emulated, and the fields of `self` are dynamic: a misspelt one fails
when the rule runs. `structural_problems` finds such fields before.
"""

from __future__ import annotations

import functools
import re
from typing import Any

from cel_expr_python import cel
from cel_expr_python.ext import ext_optional, ext_strings

from kvtier_localcluster.apiserver.admission.crd_schema import old_item
from kvtier_localcluster.apiserver.store.objects import Json, is_quantity, parse_quantity

_USES_OLD_SELF = re.compile(r"\boldSelf\b")
_RESERVED = frozenset(
    (
        *("true", "false", "null", "in", "as", "break", "const", "continue", "else", "for", "function", "if"),
        *("import", "let", "loop", "package", "namespace", "return", "var", "void", "while"),
    )
)
_ESCAPES = (("__", "__underscores__"), (".", "__dot__"), ("-", "__dash__"), ("/", "__slash__"))
_VISIBLE_METADATA = ("name", "generateName")


def _find(text: str, pattern: str) -> str:
    found = re.search(pattern, text)
    return found[0] if found else ""


@functools.cache
def _environment() -> Any:
    kind = cel.Type

    def function(name: str, result: Any, implementation: Any) -> Any:
        overload = cel.Overload(f"{name}_string", return_type=result, parameters=[kind.STRING], impl=implementation)
        return cel.FunctionDecl(name, [overload])

    def member(name: str, result: Any, parameters: list[Any], implementation: Any) -> Any:
        overload = cel.Overload(
            f"{name}_member", return_type=result, parameters=parameters, is_member=True, impl=implementation
        )
        return cel.FunctionDecl(name, [overload])

    two = [kind.DOUBLE, kind.DOUBLE]
    library = cel.CelExtension(
        "kubernetes",
        [
            function("isQuantity", kind.BOOL, is_quantity),
            function("quantity", kind.DOUBLE, parse_quantity),
            member("isGreaterThan", kind.BOOL, two, lambda a, b: a > b),
            member("isLessThan", kind.BOOL, two, lambda a, b: a < b),
            member("compareTo", kind.INT, two, lambda a, b: (a > b) - (a < b)),
            member("find", kind.STRING, [kind.STRING, kind.STRING], _find),
        ],
    )
    return cel.NewEnv(
        variables={"self": kind.DYN, "oldSelf": kind.DYN},
        extensions=[ext_strings.ExtStrings(), ext_optional.ExtOptional(), library],
    )


@functools.lru_cache(maxsize=4096)
def compile_rule(rule: str) -> Any:
    """Return a compiled rule; raises what the runtime raises when the text is not CEL."""
    return _environment().compile(rule)


def escaped(name: str) -> str:
    """Return a property's name as CEL rules write it."""
    if name in _RESERVED:
        return f"__{name}__"
    if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) and "__" not in name:
        return name
    for plain, escape in _ESCAPES:
        name = name.replace(plain, escape)
    return name


def to_cel(value: Any, schema: Json, *, is_root: bool = False) -> Any:
    """Return a value as rules see it: property names escaped, and of the root's metadata only the names."""
    if isinstance(value, list):
        return [to_cel(item, schema.get("items") or {}) for item in value]
    if not isinstance(value, dict):
        return value
    known, others = schema.get("properties") or {}, schema.get("additionalProperties")
    seen = {}
    for name, item in value.items():
        if is_root and name == "metadata":
            seen[name] = {key: item[key] for key in _VISIBLE_METADATA if key in item}
        elif name in known:
            seen[escaped(name)] = to_cel(item, known[name])
        else:
            seen[name] = to_cel(item, others) if isinstance(others, dict) else item
    return seen


def rule_problems(new: Any, old: Any, schema: Json, path: str = "") -> list[str]:
    """Return what the rules of a schema, at every depth, refuse; rules that name oldSelf are skipped without one."""
    problems: list[str] = []
    for rule in schema.get("x-kubernetes-validations") or []:
        is_transition = _USES_OLD_SELF.search(rule["rule"]) is not None
        if (old is None and not rule.get("optionalOldSelf")) if is_transition else (old is not None and new == old):
            continue  # there was nothing before, or it was stored like that before the rule came
        data = {"self": to_cel(new, schema, is_root=not path), "oldSelf": to_cel(old, schema, is_root=not path)}
        problem = _evaluate(rule, data)
        if problem is not None:
            problems.append(f"{path or '<root>'}{rule.get('fieldPath', '')}: Invalid value: {problem}")
    if isinstance(new, dict):
        known, others = schema.get("properties") or {}, schema.get("additionalProperties")
        for name, value in new.items():
            below = known.get(name, others)
            if isinstance(below, dict):
                before = old.get(name) if isinstance(old, dict) else None
                problems += rule_problems(value, before, below, f"{path}.{name}".lstrip("."))
    elif isinstance(new, list) and isinstance(schema.get("items"), dict):
        for index, value in enumerate(new):
            before = old_item(value, old, schema)
            problems += rule_problems(value, before, schema["items"], f"{path}[{index}]")
    return problems


def _evaluate(rule: Json, data: Json) -> str | None:
    message = rule.get("message") or f"failed rule: {rule['rule']}"
    try:
        result = compile_rule(rule["rule"]).eval(data=data).value()
        if result is True:
            return None
        if rule.get("messageExpression"):
            message = str(compile_rule(rule["messageExpression"]).eval(data=data).value())
    except Exception as error:  # noqa: BLE001 (the runtime raises several types; each means "the rule does not hold")
        return f"{message} [{error}]"
    return message if result is False else f"{message} [{result}]"
