# SPDX-License-Identifier: Apache-2.0
"""A janitor's answer at ``/usage``, which the operator reads: one JSON document about one tier.

Pure and stdlib only, as the other contracts are. All sizes are bytes, all times seconds since the epoch. A reader of
another release ignores fields that it does not know, and a field that is missing has its default.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeVar

from kvtier_connector.contract import documents

USAGE_PATH = "/usage"

MOST_ENTRIES = 1000
"""Generations, tenants or problems in one document; a writer leaves out the rest."""


@dataclass(frozen=True, kw_only=True)
class GenerationUsage:
    """One generation on the volume."""

    digest: str
    used_bytes: int = 0
    """Bytes of its blocks on the volume."""
    blocks: int = 0
    created: float = 0.0
    """When its ``tier.json`` was made; 0 where that is unknown."""
    last_used: float = 0.0
    """When a block of it was last stored or read, as far as engines reported; 0 where none did."""


@dataclass(frozen=True, kw_only=True)
class TenantUsage:
    """One tenant, over all generations."""

    tenant: str
    """Empty for blocks without a tenant."""
    used_bytes: int = 0
    blocks: int = 0


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Bytes of a tier on its volume, and the state of its janitor."""

    tier: str
    """``<namespace>/<name>`` of the KVCacheTier."""
    is_active: bool = False
    """Whether this janitor holds the Lease; one that waits for it knows nothing of the rest."""
    is_counted: bool = False
    """Whether everything was counted once; before that the numbers only grow."""
    used_bytes: int = 0
    """Bytes of all blocks of the tier on the volume."""
    blocks: int = 0
    volume_bytes: int = 0
    """Size of the file system; 0 where it does not say."""
    volume_free_bytes: int = 0
    oldest: float = 0.0
    """When the oldest block was stored; 0 without one."""
    evicted_blocks: int = 0
    """Blocks removed for room since the process began; those that were too old are not among them."""
    store_pause: str = ""
    """Why engines may not store; empty while they may."""
    quarantined: int = 0
    """Damaged files that wait for a person to look at them."""
    generations: Sequence[GenerationUsage] = ()
    tenants: Sequence[TenantUsage] = ()
    problems: Sequence[str] = ()
    """Present obstacles of the janitor, for people: the system call, the path and the error."""


def encode(usage: Usage) -> str:
    """Return the document as canonical JSON."""
    document = asdict(usage)
    for name in ("generations", "tenants", "problems"):
        document[name] = list(document[name])[:MOST_ENTRIES]
    return json.dumps(document, sort_keys=True, separators=(",", ":"))


def decode(text: str | bytes) -> Usage:
    """Read a document written by `encode`.

    Raises:
        ValueError: the text is not JSON, or a field is missing or of another type; names the field.
    """
    try:
        return _read(Usage, json.loads(text))
    except RecursionError as error:
        raise ValueError("/usage: nested too deeply") from error


AnyUsage = TypeVar("AnyUsage", Usage, GenerationUsage, TenantUsage)
_LISTS: Mapping[str, type] = {"generations": GenerationUsage, "tenants": TenantUsage}


def _read(record: type[AnyUsage], document: Any) -> AnyUsage:
    if not isinstance(document, dict):
        raise ValueError(  # noqa: TRY004  one exception for every document that cannot be read
            f"/usage: {record.__name__} must be a JSON object, found {type(document).__name__}"
        )
    found = {each.name: document[each.name] for each in fields(record) if each.name in document}
    for each in fields(record):
        value = found.get(each.name, each.default)
        is_sequence = str(each.type).startswith("Sequence")
        is_list = is_sequence and isinstance(value, list)
        if is_list and each.name in _LISTS:
            found[each.name] = tuple(_read(_LISTS[each.name], item) for item in value[:MOST_ENTRIES])
        elif is_list and all(isinstance(item, str) for item in value):
            found[each.name] = tuple(value[:MOST_ENTRIES])
        elif each.name in found and (is_sequence or not documents.fits(str(each.type), value)):
            raise ValueError(f"/usage: {each.name} has a value of type {type(value).__name__}")
        elif isinstance(value, (int, float)) and not 0 <= value < 2**63:
            raise ValueError(f"/usage: {each.name}={value!r} is out of range")
    try:
        return record(**found)
    except TypeError as error:
        raise ValueError(f"/usage: {error}") from error
