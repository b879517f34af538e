# SPDX-License-Identifier: Apache-2.0
"""Building blocks of the KVCacheTier models: rules, the base model, and bounded texts and numbers. Pure.

A `Rule` is written once and enforced twice, with one message: as CEL by the API server, and as a predicate in `parse`.
So clusters with an older CRD and offline rendering refuse the same values. Every text has a greatest length, because
the API server estimates the cost of its rules from it and refuses unbounded ones.
"""

from __future__ import annotations

import functools
import json
import re
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final, Generic, Self, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    StrictInt,
    StrictStr,
    StringConstraints,
    model_validator,
)
from pydantic.alias_generators import to_camel
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import PydanticCustomError, core_schema

from kvtier_operator import quantity

Value = TypeVar("Value")
Result = TypeVar("Result")

RULE_BROKEN: Final = "kvtier_rule"
"""Type of the pydantic error that carries the message of a `Rule`."""


@dataclass(frozen=True)
class Term:
    """A statement about a value, which becomes part of a `Rule`; combine terms with ``|``, ``&`` and ``~``."""

    to_cel: Callable[[type[ApiModel] | None], str]
    """Returns the statement as CEL about ``self``, an object of the given model."""
    holds: Callable[[Any], bool]
    """Tests a parsed value."""

    def __or__(self, other: Term) -> Term:
        """Return the statement that one of the two holds."""
        return Term(
            lambda model: f"({self.to_cel(model)} || {other.to_cel(model)})",
            lambda value: self.holds(value) or other.holds(value),
        )

    def __and__(self, other: Term) -> Term:
        """Return the statement that both hold."""
        return Term(
            lambda model: f"({self.to_cel(model)} && {other.to_cel(model)})",
            lambda value: self.holds(value) and other.holds(value),
        )

    def __invert__(self) -> Term:
        """Return the opposite."""
        return Term(lambda model: f"!({self.to_cel(model)})", lambda value: not self.holds(value))


@dataclass(frozen=True)
class At:
    """A field by its path in the API, from which terms are made: ``at("connector.type").is_("Bundled")``.

    An absent field counts as its default. The CEL says so itself for objects that may be defaults: the API server
    checks those before it fills in the fields below them.
    """

    path: tuple[str, ...]

    def test(self, to_cel: Callable[[str], str], holds: Callable[[Any], bool]) -> Term:
        """Return a term about the field: its test in CEL where it is present, and that of its value, None if absent."""
        return Term(lambda model: self.guard(model, to_cel, holds), lambda value: holds(_resolve(value, self.path)))

    def guard(self, root: type[ApiModel] | None, to_cel: Callable[[str], str], holds: Callable[[Any], bool]) -> str:
        """Write a test of the field with a look at each field of the path that may be absent; see `test`."""

        def below(model: type[ApiModel] | None, depth: int) -> str:
            reference = ".".join(("self", *self.path[:depth]))
            if depth == len(self.path):
                return to_cel(reference)
            assert model is not None
            assert root is not None
            field = model.model_fields[_attribute(model, self.path[depth])]
            test = below(_model_of(field.annotation), depth + 1)
            default = field.get_default(call_default_factory=True)
            # These two kinds of defaults are not in the schema.
            is_filled_in = not (default is None or default in ((), {}) or callable(field.json_schema_extra))
            if field.is_required() or (root.is_filled_in and is_filled_in):
                return test
            has = f"has({reference}.{self.path[depth]})"
            if holds(_resolve(default, self.path[depth + 1 :])):
                return "true" if test == "true" else f"(!{has} || {test})"
            return has if test == "true" else f"{has} && {test}"

        return below(root, 0)

    @property
    def is_given(self) -> Term:
        """The field has a value."""
        return self.test(lambda _: "true", lambda found: found is not None)

    def is_(self, *values: str | int | bool) -> Term:
        """Return the statement that the field has one of the values."""
        if len(values) > 1:
            return self.test(lambda field: f"{field} in {cel_literal(list(values))}", lambda found: found in values)
        (value,) = values
        if isinstance(value, bool):
            return self.test(lambda field: field if value else f"!{field}", lambda found: found is value)
        return self.test(lambda field: f"{field} == {cel_literal(value)}", lambda found: found == value)

    def matches(self, pattern: str) -> Term:
        """Return the statement that all of the text matches."""
        return self.test(
            lambda field: f"{field}.matches({_raw(f'^({pattern})$')})",
            lambda found: isinstance(found, str) and re.fullmatch(pattern, found, re.ASCII) is not None,
        )

    def has_no_word(self, pattern: str) -> Term:
        """Return the statement that no word of a list begins with the pattern."""
        return self.test(
            lambda field: f"{field}.all(word, !word.matches('{pattern}'))",
            lambda found: not any(re.match(pattern, word) for word in found),
        )

    def is_at_most(self, other: At, *, is_less: bool = False) -> Term:
        """Return the statement that one quantity is not more than the other, where both are given and readable."""
        sign = "<" if is_less else "<="

        def to_cel(model: type[ApiModel] | None) -> str:
            def compared(mine: str, its: str) -> str:
                readable = f"!isQuantity({mine}) || !isQuantity({its})"
                return f"({readable} || quantity({mine}).compareTo(quantity({its})) {sign} 0)"

            return self.guard(
                model, lambda mine: other.guard(model, lambda its: compared(mine, its), lambda _: True), lambda _: True
            )

        return Term(
            to_cel, lambda value: _is_at_most(_resolve(value, self.path), _resolve(value, other.path), is_less=is_less)
        )


TEXT: Final = At(())
"""The value itself, for rules of one field."""


def at(path: str) -> At:
    """Return a field by its path below the object that has the rule: ``disk.budget.maxBytes``."""
    return At(tuple(path.split(".")))


def _is_at_most(first: str | None, second: str | None, *, is_less: bool) -> bool:
    if first is None or second is None or not (quantity.is_quantity(first) and quantity.is_quantity(second)):
        return True
    mine, its = quantity.parse_quantity(first), quantity.parse_quantity(second)
    return mine < its if is_less else mine <= its


def cel_literal(value: object) -> str:
    """Write a text, number or list of texts in CEL."""
    return json.dumps(value).replace('"', "'")


def _raw(pattern: str) -> str:
    return f"r'{pattern}'" if "\\" in pattern else f"'{pattern}'"


def _resolve(value: Any, path: tuple[str, ...]) -> Any:
    """Return what a parsed object has at a path; None where an object on the way is absent."""
    for name in path:
        if value is None:
            return None
        value = getattr(value, _attribute(typing.cast("Any", type(value)), name))
    return value


@functools.cache
def _attribute(model: type[ApiModel], alias: str) -> str:
    """Return the Python name of a field of the API."""
    return next(name for name, field in model.model_fields.items() if (field.alias or name) == alias)


def _model_of(annotation: Any) -> type[ApiModel] | None:
    """Return the model of a field that holds an object; None for other fields."""
    options = (annotation, *typing.get_args(annotation))
    return next((each for each in options if isinstance(each, type) and issubclass(each, ApiModel)), None)


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One sentence about a field that the API server and the operator both enforce."""

    cel: str | Callable[[type[ApiModel] | None], str] = ""
    """The rule for the API server; a rule that names ``oldSelf`` is checked on updates only. Empty where the schema
    does not declare the fields: then `parse` alone refuses."""
    message: str
    """Text for users: the mistake, and the field to change."""
    check: Callable[[Any], bool] | None
    """The same rule for the operator, given the parsed value. None where only the API server sees the old object."""
    field: str = ""
    """Path of the field at fault, below the object that carries the rule: ``.claim.size``."""

    @classmethod
    def that(cls, term: Term, message: str, *, field: str = "") -> Rule:
        """Return the rule that a term holds."""
        return cls(cel=term.to_cel, message=message, check=term.holds, field=field)

    @classmethod
    def exactly_one(cls, first: str, second: str, *, message: str = "") -> Rule:
        """Return the rule that one of two fields must be given, and not both."""
        return cls(
            cel=f"has(self.{first}) != has(self.{second})",
            message=message or f"give exactly one of {first} and {second}",
            check=lambda value: (_resolve(value, (first,)) is None) != (_resolve(value, (second,)) is None),
        )

    def enforce(self, value: object) -> None:
        """Raise the error that `parse` turns into SpecInvalid, unless the value keeps to the rule."""
        if self.check is not None and not self.check(value):
            raise PydanticCustomError(RULE_BROKEN, "{text}", {"text": self.message, "field": self.field})

    def to_schema(self, model: type[ApiModel] | None = None) -> dict[str, str]:
        """Return the entry of ``x-kubernetes-validations`` for an object of a model."""
        entry = {"rule": (self.cel if isinstance(self.cel, str) else self.cel(model)), "message": self.message}
        return {**entry, "fieldPath": self.field} if self.field else entry


@dataclass(frozen=True)
class Checked:
    """Marks a field whose value must keep to the rules: ``Annotated[str, Checked((RULE, ...))]``."""

    rules: tuple[Rule, ...]

    def enforce(self, value: Value) -> Value:
        """Return the value, or raise the error of the first broken rule."""
        for rule in self.rules:
            rule.enforce(value)
        return value

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        """Enforce the rules after the type was checked."""
        return core_schema.no_info_after_validator_function(self.enforce, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Add the rules to the schema of the field."""
        return _with_rules(handler(schema), self.rules, None)


class Converted(Generic[Result]):
    """Another form of a field of an `ApiModel`; None where the field is left out."""

    def __init__(self, field: str, convert: Callable[[str], Result]) -> None:
        """Note the field, and what its text is converted by."""
        self._field, self._convert = field, convert

    def __get__(self, instance: object, _owner: type) -> Result:
        """Return the value."""
        text = getattr(instance, self._field)
        return typing.cast("Result", None) if text is None else self._convert(text)


class ApiModel(BaseModel):
    """An object of the API: immutable, camelCase outside, unknown fields refused, every field described."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", alias_generator=to_camel, use_attribute_docstrings=True, ignored_types=(Converted,)
    )

    rules: ClassVar[tuple[Rule, ...]] = ()
    """Rules about several fields of the object; a rule about one field sits on that field."""
    is_filled_in: ClassVar[bool] = False
    """Whether the API server has filled in all defaults before it checks the rules: no default is such an object."""

    @model_validator(mode="before")
    @classmethod
    def _read_null_as_absent(cls, value: object) -> object:
        # The API server drops a null before it fills in defaults; files rendered offline deserve the same.
        if isinstance(value, Mapping):
            return {name: item for name, item in value.items() if item is not None}
        return value

    @model_validator(mode="after")
    def _enforce_rules(self) -> Self:
        for rule in self.rules:
            rule.enforce(self)
        return self

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Add the rules of the class to its schema."""
        reference = handler(schema)
        _with_rules(handler.resolve_ref_schema(reference), cls.rules, cls)
        return reference

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        """Return itself: nothing changes it, and each tier would get copies of all defaults otherwise."""
        return self

    def to_manifest(self) -> dict[str, Any]:
        """Return the object as it stands in a manifest: camelCase, without what was left out."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_unset=True)


def _with_rules(schema: JsonSchemaValue, rules: tuple[Rule, ...], model: type[ApiModel] | None) -> JsonSchemaValue:
    """Append rules to a JSON schema, in place."""
    if any(rule.cel for rule in rules):
        schema["x-kubernetes-validations"] = [
            *schema.get("x-kubernetes-validations", []),
            *(rule.to_schema(model) for rule in rules if rule.cel),
        ]
    return schema


@dataclass(frozen=True)
class Keyed:
    """Marks a list of `Pasted` objects that must differ in the value under the key."""

    key: str

    def refuse_twins(self, items: tuple[Mapping[str, Any], ...]) -> tuple[Mapping[str, Any], ...]:
        """Return the items, or raise an error that names the first value given twice."""
        seen = set()
        for item in items:
            if item[self.key] in seen:
                context = {"text": f"{self.key} {item[self.key]!r} is given twice; keep one of them", "field": ""}
                raise PydanticCustomError(RULE_BROKEN, "{text}", context)
            seen.add(item[self.key])
        return items

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        """Look for twins after the items were checked."""
        return core_schema.no_info_after_validator_function(self.refuse_twins, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Declare the list a map, so that server-side apply merges it item by item."""
        found = handler(schema)
        found.update({"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [self.key]})
        return found


@dataclass(frozen=True)
class Pasted:
    """Marks a field that holds an object of Kubernetes' own API: validated as `model`, kept as the JSON it came as.

    Such objects are copied into manifests as they are, so they need no second set of attribute names.
    """

    model: type[ApiModel]

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        """Validate as the model, then keep the JSON."""
        return core_schema.no_info_after_validator_function(
            self.model.to_manifest,
            handler.generate_schema(self.model),
            serialization=core_schema.plain_serializer_function_ser_schema(dict),
        )


def is_quantity(message: str) -> Rule:
    """Return the rule that a text is a quantity."""
    return Rule(cel="isQuantity(self)", message=message, check=quantity.is_quantity)


def quantity_range(least: str, message: str, *, most: str = "") -> Rule:
    """Return the rule that a text, where it is a quantity, is neither too small nor too large."""
    bounds = [(">=", least), *([("<=", most)] if most else [])]
    compared = " && ".join(f"quantity(self).compareTo(quantity('{bound}')) {sign} 0" for sign, bound in bounds)
    low, high = quantity.parse_quantity(least), quantity.parse_quantity(most) if most else None

    def check(text: str) -> bool:
        if not quantity.is_quantity(text):
            return True
        found = quantity.parse_quantity(text)
        return low <= found and (high is None or found <= high)

    return Rule(cel=f"!isQuantity(self) || ({compared})", message=message, check=check)


_IS_AMOUNT: Final = is_quantity(
    'is not a quantity; write a number and a unit, such as "64Gi", or "64G" for what is sold as 64GB'
)
_AT_LEAST_1MI: Final = quantity_range(
    "1Mi", 'must be at least 1Mi; a number without a unit counts bytes, so write the unit, such as "64Gi"'
)
_CPUS: Final = (
    is_quantity('is not a quantity; write a number of CPUs, such as "4" or "500m"'),
    quantity_range(
        "10m", 'must be between 10m and 4096 CPUs; write a number of CPUs, such as "4" or "500m"', most="4096"
    ),
)

_QuantityText = Annotated[StrictStr, StringConstraints(min_length=1, max_length=32)]

ByteQuantity = Annotated[_QuantityText, Checked((_IS_AMOUNT, _AT_LEAST_1MI))]
"""An amount of memory or storage."""

CpuQuantity = Annotated[_QuantityText, Checked(_CPUS)]
"""An amount of processors."""

_WHOLE_BLOCKS: Final = Rule(
    cel="self % 16 == 0",
    message="must be a multiple of 16, the smallest block of vLLM",
    check=lambda tokens: tokens % 16 == 0,
)

BlockTokens = Annotated[StrictInt, Field(ge=16, le=65536), Checked((_WHOLE_BLOCKS,))]
"""A number of tokens that whole blocks of vLLM hold."""

Word = Annotated[StrictStr, StringConstraints(min_length=1, max_length=512, pattern=r"^\S+$")]
"""Text without white space."""

ObjectName = Annotated[
    StrictStr, StringConstraints(min_length=1, max_length=253, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")
]
"""The name of another Kubernetes object in the same namespace."""

_KEY: Final = r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_ARE_KEYS: Final = Rule(
    cel=f"self.all(key, key.matches('^({_KEY})$'))",
    message="has a key that Kubernetes does not take: write letters, digits, '-', '_' and '.', with a prefix such as "
    "example.com/ where it belongs to a program",
    check=lambda found: all(re.fullmatch(_KEY, key, re.ASCII) for key in found),
)

LabelKey = Annotated[StrictStr, StringConstraints(max_length=317)]
_LabelValue = Annotated[
    StrictStr, StringConstraints(max_length=63, pattern=r"^(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?$")
]
Labels = Annotated[Mapping[LabelKey, _LabelValue], Field(max_length=64), Checked((_ARE_KEYS,))]
"""Labels of Kubernetes objects."""
Annotations = Annotated[
    Mapping[LabelKey, Annotated[StrictStr, Field(max_length=16384)]], Field(max_length=64), Checked((_ARE_KEYS,))
]
"""Annotations of Kubernetes objects."""

Amount = Annotated[StrictInt, Field(ge=0, json_schema_extra={"format": "int64"})]
"""A number of bytes, seconds or events that the operator reports."""

Count = Annotated[StrictInt, Field(ge=0, json_schema_extra={"format": "int32"})]
"""A number of pods."""
