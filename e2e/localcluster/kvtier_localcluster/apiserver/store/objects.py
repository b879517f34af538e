# SPDX-License-Identifier: Apache-2.0
"""Helpers for Kubernetes objects: metadata, times, dotted fields, and quantities such as `500m`.

Pure except for the clock. Stored objects never change in place: copy one before changing it.
"""

from __future__ import annotations

import datetime as dt
import json
import re
from collections.abc import Mapping
from typing import Any

Json = dict[str, Any]
"""A JSON object: a manifest, a schema, a patch."""

ObjectKey = tuple[str | None, str]
"""Namespace (None for cluster-scoped kinds) and name."""

StorageKey = tuple[str, str]
"""Group and plural: all versions of a kind share one storage."""


def timestamp(offset_seconds: float = 0) -> str:
    """Return the current time, plus an offset, as the API writes it."""
    moment = dt.datetime.now(dt.UTC) + dt.timedelta(seconds=offset_seconds)
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


def compact_json(value: Any) -> str:
    """Return JSON without spaces."""
    return json.dumps(value, separators=(",", ":"))


def field_at(value: Any, path: str) -> Any:
    """Return the field at a dotted path such as `.spec.replicas`, or None where any step is missing."""
    for name in path.strip(".").split("."):
        if not isinstance(value, dict):
            return None
        value = value.get(name)
    return value


def object_key(manifest: Mapping[str, Any]) -> ObjectKey:
    """Return namespace and name."""
    return manifest["metadata"].get("namespace"), manifest["metadata"]["name"]


def without_nulls(value: Any) -> Any:
    """Return a copy in which object fields that are null are absent, as typed decoding leaves them."""
    if isinstance(value, dict):
        return {name: without_nulls(item) for name, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


def owner_uids(manifest: Mapping[str, Any]) -> list[str]:
    """Return the uids of the owners of an object."""
    return [reference.get("uid", "") for reference in manifest["metadata"].get("ownerReferences") or []]


_SUFFIXES: dict[str, float] = {
    "": 1,
    **{suffix: 10.0**power for suffix, power in (("n", -9), ("u", -6), ("m", -3))},
    **{suffix: 10.0 ** (3 * power) for power, suffix in enumerate("kMGTPE", start=1)},
    **{f"{suffix}i": 2.0 ** (10 * power) for power, suffix in enumerate("KMGTPE", start=1)},
}
_QUANTITY = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+))(?:([eE][+-]?\d+)|(n|u|m|k|M|G|T|P|E|[KMGTPE]i))?")


def parse_quantity(text: object) -> float:
    """Return the number that a quantity stands for; raise ValueError for anything else."""
    found = _QUANTITY.fullmatch(str(text))
    if found is None:
        raise ValueError(f"not a quantity: {text!r}")
    return float(found[1] + (found[2] or "")) * _SUFFIXES[found[3] or ""]


def is_quantity(text: object) -> bool:
    """Tell whether a text is a quantity."""
    return _QUANTITY.fullmatch(str(text)) is not None
