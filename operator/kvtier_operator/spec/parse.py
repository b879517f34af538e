# SPDX-License-Identifier: Apache-2.0
"""The one reader of raw KVCacheTier bodies. Pure.

Kept apart from the models so that what a user reads about a wrong type is written in one place, in the words of the API
and not of the library that found it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from kvtier_operator.errors import SpecInvalid
from kvtier_operator.spec.rules import RULE_BROKEN
from kvtier_operator.spec.tier import NAME_FITS_CHILDREN, TierSpec

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
    metadata = body.get("metadata")
    name = metadata.get("name") if isinstance(metadata, Mapping) else None
    if isinstance(name, str) and NAME_FITS_CHILDREN.check is not None and not NAME_FITS_CHILDREN.check(name):
        raise SpecInvalid("metadata.name", NAME_FITS_CHILDREN.message)
    spec = body.get("spec")
    if not isinstance(spec, Mapping):
        raise SpecInvalid("spec", "must be an object with at least model, cpu and volume")
    try:
        return TierSpec.model_validate(dict(spec))
    except ValidationError as invalid:
        first = invalid.errors(include_url=False)[0]
        raise SpecInvalid(_path(first), _message(first)) from invalid


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
    if kind == "string_pattern_mismatch":
        return f"must match {context['pattern']}"
    # The other messages are sentences about the value ("Input should be less than or equal to 64").
    return error["msg"].replace("Input should be", "must be", 1)
