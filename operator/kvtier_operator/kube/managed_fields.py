# SPDX-License-Identifier: Apache-2.0
"""Whether what was applied to an object still stands, as its ``managedFields`` tell. Pure.

The API server keeps a tree of the fields that each writer owns. A field may have two owners. Fields that others add
beside ours stay theirs.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any, Final

from kvtier_operator import names, quantity
from kvtier_operator.names import Manifest

_keys: Final = functools.lru_cache(maxsize=1024)(json.loads)
"""Reads the keys that tell an item of a list from others; there are few of them."""


def is_applied(manifest: Manifest, live: Manifest) -> bool:
    """Tell whether applying this would change nothing: all of it is there, and nothing else of it is ours."""
    fields = _ours(live)
    return fields is not None and _covers(live, manifest, fields) and _is_wanted(fields, manifest)


def _ours(live: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the fields that we have applied; None where that cannot be told."""
    found = [
        each["fieldsV1"]
        for each in live["metadata"].get("managedFields") or ()
        if (each.get("manager"), each.get("operation")) == (names.FIELD_MANAGER, "Apply")
        and not each.get("subresource")
    ]
    return found[0] if len(found) == 1 else None


def _covers(live: Any, wanted: Any, fields: Mapping[str, Any] | None) -> bool:
    """Tell whether everything wanted is there and ours; others may have added to it.

    A map or list that the API server takes for one value is not ours once another writer has changed it, and has no
    field beside those that we apply.

    Args:
        live: the object, or a part of it.
        wanted: the same part, as we apply it.
        fields: our fields in it; None where it is part of such a value.
    """
    if isinstance(wanted, dict):
        if not isinstance(live, dict) or (fields is None and wanted and live.keys() - wanted.keys() - _DEFAULTED):
            return False
        return all(_covers_field(live.get(name), value, f"f:{name}", fields) for name, value in wanted.items())
    if isinstance(wanted, list):
        found = live or []
        if wanted and isinstance(wanted[0], dict):
            is_one_value = not any(step.startswith("k:") for step in fields or ())
            if is_one_value and len(found) != len(wanted):
                return False
            return all(any(_covers(each, item, _of_item(fields, item)) for each in found) for item in wanted)
        return bool(found == wanted)
    # The API server leaves out what says nothing.
    return live == wanted or (live is None and wanted in {"", False}) or _is_same_amount(live, wanted)


_DEFAULTED: Final = frozenset({"apiGroup", "apiVersion", "divisor", "expirationSeconds"})
"""Fields that the API server fills in within such values: of subjects, references to fields and tokens."""


def _covers_field(live: Any, wanted: Any, step: str, fields: Mapping[str, Any] | None) -> bool:
    if fields is None or not wanted or not isinstance(wanted, (dict, list)):
        return _covers(live, wanted, None)
    return step in fields and _covers(live, wanted, fields[step] or None)


def _of_item(fields: Mapping[str, Any] | None, item: Any) -> Mapping[str, Any] | None:
    """Return our fields of one item of a list."""
    for step, inner in (fields or {}).items():
        if step.startswith("k:") and _has_keys(item, _keys(step[2:])):
            return inner or None
    return None


def _is_same_amount(live: Any, wanted: Any) -> bool:
    """Tell whether the API server wrote an amount in other words: 1Gi for 1024Mi."""
    texts = [str(each) for each in (live, wanted)]
    return (
        live is not None
        and all(map(quantity.is_quantity, texts))
        and len(set(map(quantity.parse_quantity, texts))) == 1
    )


def _is_wanted(fields: Mapping[str, Any], wanted: Any) -> bool:
    """Tell whether each field that is ours, in the notation of managedFields, is still applied."""
    for step, inner in fields.items():
        kind, _, rest = step.partition(":")
        if kind == "f":
            if not isinstance(wanted, dict) or rest not in wanted or not _is_wanted(inner, wanted[rest]):
                return False
        elif kind == "k":
            item = _find(wanted, _keys(rest))
            if item is None or not _is_wanted(inner, item):
                return False
        elif kind == "v" and (not isinstance(wanted, list) or _keys(rest) not in wanted):
            return False
    return True


def _find(items: Any, keys: Mapping[str, Any]) -> Any:
    """Return the item of a list with these keys; a key that is left out has its default, which is not known here."""
    return next((each for each in items if _has_keys(each, keys)), None) if isinstance(items, list) else None


def _has_keys(item: Mapping[str, Any], keys: Mapping[str, Any]) -> bool:
    return all(item.get(name, value) == value for name, value in keys.items())
