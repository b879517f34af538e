# SPDX-License-Identifier: Apache-2.0
"""Encodes dataclasses as the JSON documents that the operator writes and pods read, and decodes them.

Pure and stdlib only, as the contracts are that use it. ``file`` is what messages call the document.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, TypeVar

from kvtier_connector.contract.errors import ConfigInvalid

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

AnyDocument = TypeVar("AnyDocument", bound="DataclassInstance")
"""A dataclass whose fields have the types of `_KINDS`, or such a type or None."""

Requirement = tuple[bool, str, str]
"""Whether it holds, the field that it is about, and what that field must be."""

_KINDS: Final[Mapping[str, tuple[Any, str]]] = {
    "bool": (bool, "true or false"),
    "str": (str, "a string"),
    "int": (int, "a whole number"),
    "float": (int | float, "a number"),
    "Mapping[str, int]": (dict, "an object of whole numbers"),
    "Mapping[str, Any]": (dict, "an object"),
}
_OR_NONE = " | None"

ADDED: Final = MappingProxyType({"kvtier_added": True})
"""``metadata`` of a field that was added later: it is written only if it differs from its default.

A pod of an earlier release refuses a field that it does not know, and behaves as the default says without it.
"""


def encode(record: DataclassInstance, *, version: int) -> str:
    """Return the document as canonical JSON: the same record gives the same bytes; see `ADDED`."""
    said = {
        each.name: value
        for each in fields(record)
        if (value := getattr(record, each.name)) != each.default or "kvtier_added" not in each.metadata
    }
    return encode_object({"version": version, **said})


def encode_object(document: dict[str, Any]) -> str:
    """Return the object as canonical JSON."""
    return json.dumps(document, sort_keys=True, indent=2) + "\n"


def decode(kind: type[AnyDocument], text: str, *, file: str, version: int, image: str) -> AnyDocument:
    """Read a document written by `encode`; ``image`` is of the process that reads it.

    Raises:
        ConfigInvalid: the text is not JSON, of another contract version, or a field is missing, unknown or unusable.
    """
    document = decode_object(text, file=file)
    found = document.pop("version", None)
    if found != version:
        raise ConfigInvalid(
            f"{file}: version {found!r} is not {version}; run the {image} image of the same release as the operator"
        )
    types = {each.name: str(each.type) for each in fields(kind)}
    for name, value in document.items():
        if name not in types:
            raise ConfigInvalid(f"{file}: unknown field {name!r}")
        if not fits(types[name], value):
            _, wanted = _KINDS[types[name].removesuffix(_OR_NONE)]
            or_null = ", or null" if types[name].endswith(_OR_NONE) else ""
            raise ConfigInvalid(f"{file}: {name}={value!r} must be {wanted}{or_null}")
    try:
        return kind(**document)
    except TypeError as error:
        raise ConfigInvalid(f"{file}: {error}") from error


def decode_object(text: str, *, file: str) -> dict[str, Any]:
    """Return the JSON object that the text is.

    Raises:
        ConfigInvalid: it is something else.
    """
    try:
        document = json.loads(text)
    except ValueError as error:
        raise ConfigInvalid(f"{file}: not JSON: {error}") from error
    if not isinstance(document, dict):
        raise ConfigInvalid(f"{file}: must be a JSON object, found {type(document).__name__}")
    return document


def refuse_unusable(record: DataclassInstance, claims: Iterable[Requirement], *, file: str) -> None:
    """Raise ConfigInvalid for the first claim about a field that does not hold."""
    for is_valid, name, remedy in claims:
        if not is_valid:
            raise ConfigInvalid(f"{file}: {name}={getattr(record, name)!r} {remedy}")


def fits(kind: str, value: Any) -> bool:
    """Return whether a value of a document has the type of a field."""
    if kind.endswith(_OR_NONE):
        return value is None or fits(kind.removesuffix(_OR_NONE), value)
    if not isinstance(value, _KINDS[kind][0]) or (isinstance(value, bool) and kind != "bool"):
        return False
    return kind != "Mapping[str, int]" or all(fits("int", each) for each in value.values())
