# SPDX-License-Identifier: Apache-2.0
"""What every model of the KVCacheTier API is built from: validation rules and the base model. Pure.

A `Rule` is written once and enforced twice: as CEL by the API server, with the same message, and as a predicate when
the operator reads the resource, so that clusters with an older CRD and offline rendering refuse the same things.

Texts and numbers that fields of the KVCacheTier API hold: quantities, names, labels. Pure.

Every text has a greatest length: the API server estimates the cost of its rules from it and refuses unbounded ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Self, TypeVar

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

RULE_BROKEN = "kvtier_rule"
"""Type of the pydantic error that carries the message of a `Rule`."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One sentence about a field that the API server and the operator both enforce."""

    cel: str
    """The rule for the API server; a rule that names ``oldSelf`` is checked on updates only."""
    message: str
    """What a user reads when the rule is broken: what is wrong, and which field to change."""
    check: Callable[[Any], bool] | None
    """The same rule for the operator, given the parsed value. None where only the API server sees the old object."""
    field: str = ""
    """Path of the field at fault, below the object that carries the rule: ``.claim.size``."""

    @classmethod
    def not_both(cls, first: str, second: str) -> Rule:
        """Return the rule that of two fields, by their names in Python, one may be given."""
        return cls(
            cel=f"!has(self.{to_camel(first)}) || !has(self.{to_camel(second)})",
            message=f"give {to_camel(first)} or {to_camel(second)}, not both",
            check=lambda value: getattr(value, first) is None or getattr(value, second) is None,
        )

    @classmethod
    def exactly_one(cls, first: str, second: str, *, message: str = "") -> Rule:
        """Return the rule that of two fields, by their names in Python, one must be given; it may say more of them."""
        return cls(
            cel=f"has(self.{to_camel(first)}) != has(self.{to_camel(second)})",
            message=message or f"give exactly one of {to_camel(first)} and {to_camel(second)}",
            check=lambda value: (getattr(value, first) is None) != (getattr(value, second) is None),
        )

    def enforce(self, value: object) -> None:
        """Raise the error that `parse` turns into SpecInvalid, unless the value keeps to the rule."""
        if self.check is not None and not self.check(value):
            context = {"text": self.message, "field": self.field}
            raise PydanticCustomError(RULE_BROKEN, "{text}", context)

    def to_schema(self) -> dict[str, str]:
        """Return the entry of ``x-kubernetes-validations``."""
        entry = {"rule": self.cel, "message": self.message}
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
        return _with_rules(handler(schema), self.rules)


class ApiModel(BaseModel):
    """An object of the API: immutable, camelCase outside, unknown fields refused, every field described."""

    model_config = ConfigDict(frozen=True, extra="forbid", alias_generator=to_camel, use_attribute_docstrings=True)

    rules: ClassVar[tuple[Rule, ...]] = ()
    """Rules about several fields of the object; a rule about one field sits on that field."""

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
        _with_rules(handler.resolve_ref_schema(reference), cls.rules)
        return reference

    def to_manifest(self) -> dict[str, Any]:
        """Return the object as it stands in a manifest: camelCase, without what was left out."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_unset=True)


def _with_rules(schema: JsonSchemaValue, rules: tuple[Rule, ...]) -> JsonSchemaValue:
    """Append rules to a JSON schema, in place."""
    if rules:
        schema["x-kubernetes-validations"] = [
            *schema.get("x-kubernetes-validations", []),
            *(rule.to_schema() for rule in rules),
        ]
    return schema


@dataclass(frozen=True)
class Keyed:
    """Marks a list of `Pasted` objects of which no two have the same value under the key."""

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

    Such objects are copied into manifests and never read by us, so a second set of attribute names would only be
    another thing to keep in step.
    """

    model: type[ApiModel]

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        """Validate as the model, then keep the JSON."""
        return core_schema.no_info_after_validator_function(
            self.model.to_manifest,
            handler.generate_schema(self.model),
            serialization=core_schema.plain_serializer_function_ser_schema(dict),
        )


IS_QUANTITY = Rule(
    cel="isQuantity(self)",
    message='is not a quantity; write a number and a unit, such as "64Gi", or "64G" for what is sold as 64GB',
    check=quantity.is_quantity,
)

AT_LEAST_ONE_MEBIBYTE = Rule(
    cel="!isQuantity(self) || quantity(self).compareTo(quantity('1Mi')) >= 0",
    message='must be at least 1Mi; a number without a unit counts bytes, so write the unit, such as "64Gi"',
    check=lambda text: not quantity.is_quantity(text) or quantity.parse_quantity(text) >= 1 << 20,
)

_FEWEST_CPUS = quantity.parse_quantity("10m")
_MOST_CPUS = quantity.parse_quantity("4096")

IS_CPU_QUANTITY = Rule(
    cel="isQuantity(self)",
    message='is not a quantity; write a number of CPUs, such as "4" or "500m"',
    check=quantity.is_quantity,
)

CPU_RANGE = Rule(
    cel="!isQuantity(self) || (quantity(self).compareTo(quantity('10m')) >= 0"
    " && quantity(self).compareTo(quantity('4096')) <= 0)",
    message='must be between 10m and 4096 CPUs; write a number of CPUs, such as "4" or "500m"',
    check=lambda text: not quantity.is_quantity(text) or _FEWEST_CPUS <= quantity.parse_quantity(text) <= _MOST_CPUS,
)

_QuantityText = Annotated[StrictStr, StringConstraints(min_length=1, max_length=32)]

ByteQuantity = Annotated[_QuantityText, Checked((IS_QUANTITY, AT_LEAST_ONE_MEBIBYTE))]
"""An amount of memory or storage."""

CpuQuantity = Annotated[_QuantityText, Checked((IS_CPU_QUANTITY, CPU_RANGE))]
"""An amount of processors."""

Word = Annotated[StrictStr, StringConstraints(min_length=1, max_length=512, pattern=r"^\S+$")]
"""Text without white space."""

ObjectName = Annotated[
    StrictStr, StringConstraints(min_length=1, max_length=253, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")
]
"""The name of another Kubernetes object in the same namespace."""

LabelKey = Annotated[StrictStr, StringConstraints(max_length=317)]
LabelValue = Annotated[
    StrictStr, StringConstraints(max_length=63, pattern=r"^(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?$")
]

Amount = Annotated[StrictInt, Field(ge=0, json_schema_extra={"format": "int64"})]
"""A number of bytes, seconds or events that the operator reports."""

Count = Annotated[StrictInt, Field(ge=0, json_schema_extra={"format": "int32"})]
"""A number of pods."""
