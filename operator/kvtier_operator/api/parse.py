# SPDX-License-Identifier: Apache-2.0
"""The one reader of raw KVCacheTier bodies: their spec, and requests made by annotations. Pure.

Messages about wrong types are written here, in the words of the API and not of the library that finds the mistakes. A
restart and a pause are annotations, and not only fields, because they are of the moment: a spec that is kept in git
stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from kvtier_operator import names
from kvtier_operator.api.rules import RULE_BROKEN
from kvtier_operator.api.tier_spec import BLOCKS_OF_ANOTHER, NAME_FITS_CHILDREN, TierSpec
from kvtier_operator.errors import SpecInvalid

_TYPES: Final = {
    "string_type": "a string (in YAML, a number or a boolean needs quotes to be one)",
    "int_type": "a whole number without quotes",
    "bool_type": "true or false without quotes",
    "tuple_type": "a list",
    "model_type": "an object",
    "mapping_type": "an object",
    "dict_type": "an object",
}


def parse(body: Mapping[str, Any]) -> TierSpec:
    """Read a KVCacheTier body.

    Raises:
        SpecInvalid: names the first field that we cannot honour, and the remedy.
    """
    found = _read(body)
    if isinstance(found, TierSpec):
        return found
    raise found[0]


def problems(body: Mapping[str, Any]) -> tuple[SpecInvalid, ...]:
    """Return every field of a KVCacheTier body that we cannot honour, with its remedy."""
    found = _read(body)
    return () if isinstance(found, TierSpec) else found


def _read(body: Mapping[str, Any]) -> TierSpec | tuple[SpecInvalid, ...]:
    metadata = body.get("metadata")
    name = metadata.get("name") if isinstance(metadata, Mapping) else None
    found: list[SpecInvalid] = []
    if isinstance(name, str) and NAME_FITS_CHILDREN.check is not None and not NAME_FITS_CHILDREN.check(name):
        found.append(SpecInvalid("metadata.name", NAME_FITS_CHILDREN.message))
    spec = body.get("spec")
    if not isinstance(spec, Mapping):
        return (*found, SpecInvalid("spec", "must be an object with at least model, cpu and volume"))
    try:
        read = TierSpec.model_validate(dict(spec))
    except ValidationError as invalid:
        return (*found, *(SpecInvalid(_path(each), _message(each)) for each in invalid.errors(include_url=False)))
    if BLOCKS_OF_ANOTHER.check is not None and not BLOCKS_OF_ANOTHER.check((name, read)):
        found.append(SpecInvalid("spec.connector.hybrid.nixl.blocksOf", BLOCKS_OF_ANOTHER.message))
    return tuple(found) or read


def document(spec: TierSpec) -> dict[str, Any]:
    """Return a spec as JSON that `TierSpec` reads again, defaults included."""
    found = spec.model_dump(mode="json", by_alias=True, exclude_none=True)
    # NO_VOLUME has no JSON that can be read again.
    return found if spec.volume.is_there else {name: value for name, value in found.items() if name != "volume"}


def read_leniently(spec: Mapping[str, Any], *, instead: Mapping[str, Any]) -> TierSpec | None:
    """Read a spec that another release may refuse in part; None where it cannot be read even so.

    The value of a refused field is taken from `instead`; a field that is missing there gets its default.
    """
    found = dict(spec)
    while True:
        try:
            return TierSpec.model_validate(found)
        except ValidationError as invalid:
            first = invalid.errors(include_url=False)[0]
        below = str(first["ctx"]["field"]).split(".") if first["type"] == RULE_BROKEN else []
        repaired = _with_value_of(found, instead, tuple(filter(None, (*first["loc"], *below))))
        if repaired is None:
            return None
        found = repaired


def _with_value_of(
    found: Mapping[str, Any], instead: Mapping[str, Any], path: tuple[int | str, ...]
) -> dict[str, Any] | None:
    """Return the document with the value of `instead` at a path, or at the nearest one above where they differ."""
    keys = [key for key in path if isinstance(key, str)]
    for length in range(len(keys), 0, -1):
        *above, last = keys[:length]
        old, new = _object_at(found, above), _object_at(instead, above)
        if old is None or last not in old or (new is not None and new.get(last, ABSENT) == old[last]):
            continue
        return with_value(found, keys[:length], ABSENT if new is None else new.get(last, ABSENT))
    return None


ABSENT: Final = object()
"""Value of a field that is left out."""


def _object_at(document: Mapping[str, Any], path: Sequence[str]) -> Mapping[str, Any] | None:
    found: Any = document
    for key in path:
        found = found.get(key) if isinstance(found, Mapping) else None
    return found if isinstance(found, Mapping) else None


def with_value(document: Mapping[str, Any], path: Sequence[str], value: object) -> dict[str, Any]:
    """Return a document with one field set, or left out with `ABSENT`."""
    first, *rest = path
    if rest:
        return {**document, first: with_value(document.get(first, {}), rest, value)}
    kept = {name: item for name, item in document.items() if name != first}
    return kept if value is ABSENT else {**kept, first: value}


def _path(error: ErrorDetails) -> str:
    """Write the place of an error as the API server does: ``spec.engine.args[0]``."""
    path = "spec"
    for part in error["loc"]:
        # The key of a map stands between brackets in the place of an error about the key itself.
        if part != "[key]":
            path += f"[{part}]" if isinstance(part, int) else f".{part}"
    return path + (error["ctx"]["field"] if error["type"] == RULE_BROKEN else "")


def _message(error: ErrorDetails) -> str:
    """Say in a user's words what is wrong."""
    kind, context = error["type"], error.get("ctx", {})
    if kind == "missing":
        return "is required"
    if kind == "extra_forbidden":
        return "is not a field of KVCacheTier; see kubectl explain kvcachetier.spec"
    if kind in _TYPES:
        return f"must be {_TYPES[kind]}"
    if kind == "literal_error" and isinstance(error["input"], bool) and "'Off'" in context["expected"]:
        return f"must be {context['expected']} in quotes: YAML takes On and Off without them for booleans"
    if kind == "too_short":
        return f"must have at least {context['min_length']} valid item"
    if kind == "string_pattern_mismatch":
        return f"must match {context['pattern']}"
    # The other messages are sentences about the value ("Input should be less than or equal to 64").
    return error["msg"].replace("Input should be", "must be", 1)


LONGEST_RESTART: Final = 253


@dataclass(frozen=True, kw_only=True)
class Asked:
    """Requests made by annotations."""

    restart: str = ""
    """Any text; another one rolls the engines once."""
    is_paused: bool = False


def read_annotations(body: Mapping[str, Any]) -> Asked:
    """Read the annotations of a KVCacheTier body.

    Raises:
        SpecInvalid: names the annotation that cannot be honoured.
    """
    metadata = body.get("metadata")
    found = (metadata.get("annotations") if isinstance(metadata, Mapping) else None) or {}
    restart, paused = (str(found.get(key, "")) for key in (names.ANNOTATION_RESTART, names.ANNOTATION_PAUSED))
    if len(restart) > LONGEST_RESTART:
        raise SpecInvalid(
            f"metadata.annotations[{names.ANNOTATION_RESTART}]", f"must be at most {LONGEST_RESTART} characters"
        )
    if paused.lower() not in {"", "true", "false"}:
        raise SpecInvalid(
            f"metadata.annotations[{names.ANNOTATION_PAUSED}]", f'must be "true" or "false", found {paused!r}'
        )
    return Asked(restart=restart, is_paused=paused.lower() == "true")
