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
    return fields is not None and _stands(manifest, live, fields)


def _ours(live: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the fields that we have applied; None where that cannot be told."""
    found = [
        each["fieldsV1"]
        for each in live["metadata"].get("managedFields") or ()
        if (each.get("manager"), each.get("operation")) == (names.FIELD_MANAGER, "Apply")
        and not each.get("subresource")
    ]
    return found[0] if len(found) == 1 else None


def _stands(wanted: Any, live: Any, fields: Mapping[str, Any]) -> bool:
    """Tell whether everything wanted is there and ours, and nothing else is ours; others may have added to it.

    Loops, and no generators: a start compares a thousand values of each tier.

    Args:
        wanted: the object as we apply it, or a part of it.
        live: the same part, as it is.
        fields: our fields in it; empty for a map or list that the API server takes for one value. Such a value is not
            ours once another writer has changed it, and has no field beside those that we apply.
    """
    if not isinstance(wanted, (dict, list)):
        # The API server leaves out what says nothing.
        return bool(live == wanted) or (live is None and wanted in {"", False}) or _is_same_amount(live, wanted)
    if live is None or (not fields and (not wanted or live == wanted)):
        return not wanted or live is not None
    return (_stands_in_list if isinstance(wanted, list) else _stands_in_object)(wanted, live, fields)


def _stands_in_object(wanted: Any, live: Any, fields: Mapping[str, Any]) -> bool:
    """Tell the same of an object."""
    for step in fields:
        if step[:2] == "f:" and step[2:] not in wanted:
            return False
    if not fields and live.keys() - _DEFAULTED - wanted.keys():
        return False
    for name, value in wanted.items():
        there = live.get(name)
        if isinstance(value, (dict, list)):
            inner = fields.get(f"f:{name}")
            if (inner is None and fields and value) or not _stands(value, there, inner or {}):
                return False
        elif value != there and not _stands(value, there, {}):
            return False
    return True


_DEFAULTED: Final = frozenset({"apiGroup", "apiVersion", "divisor", "expirationSeconds"})
"""Fields that the API server fills in within such values: of subjects, references to fields and tokens."""


def _stands_in_list(wanted: Any, live: Any, fields: Mapping[str, Any]) -> bool:
    """Tell the same of a list, whose items are told apart by their keys if they have fields."""
    steps = [step for step in fields if step[:2] == "k:"]
    if len(steps or live) != len(wanted):
        return False
    if not steps:
        return all(_stands(each, there, {}) for each, there in zip(wanted, live, strict=True))
    for step in steps:
        keys = _keys(step[2:])
        each = _find(wanted, keys)
        if each is None or not _stands(each, _find(live, keys), fields[step]):
            return False
    return True


def _is_same_amount(live: Any, wanted: Any) -> bool:
    """Tell whether the API server wrote an amount in other words: 1Gi for 1024Mi."""
    texts = [str(each) for each in (live, wanted)]
    return (
        live is not None
        and all(map(quantity.is_quantity, texts))
        and len(set(map(quantity.parse_quantity, texts))) == 1
    )


def _find(items: list[Any], keys: Mapping[str, Any]) -> Any:
    """Return the item of a list with these keys; a key that is left out has its default, which is not known here."""
    for each in items:
        if keys.items() <= each.items():
            return each
    for each in items:
        if all(each.get(name, value) == value for name, value in keys.items()):
            return each
    return None
