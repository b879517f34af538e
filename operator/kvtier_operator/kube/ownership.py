# SPDX-License-Identifier: Apache-2.0
"""Who wrote which field of an object, as its ``managedFields`` tell: what of ours stands, and what others added. Pure.

The API server keeps, for each writer, a tree of the fields that are its own. What two have written is of both.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvtier_operator import names, quantity
from kvtier_operator.names import Manifest

_keys: Final = functools.lru_cache(maxsize=1024)(json.loads)
"""Reads the keys that tell an item of a list from others; there are few of them."""
_CONTROLLERS: Final = frozenset({names.FIELD_MANAGER, "kube-controller-manager"})
_RESTARTED: Final = "/spec/template/metadata/annotations/kubectl.kubernetes.io~1restartedAt"
"""What asks for a restart, whoever does: it is done with."""


@dataclass(frozen=True, kw_only=True)
class Added:
    """One field that somebody else has added to an object of ours."""

    path: str
    """As people write it."""
    pointer: str
    """As a JSON Patch names it."""
    manager: str

    def __str__(self) -> str:
        """Return the field and who it was."""
        return f"{self.path} ({self.manager})"


def stands(manifest: Manifest, live: Manifest) -> bool:
    """Tell whether applying this would change nothing: all of it is there, and nothing else of it is ours."""
    fields = _ours(live)
    return fields is not None and _covers(live, manifest, fields) and _is_wanted(fields, manifest)


def added_by_others(live: Mapping[str, Any]) -> tuple[Added, ...]:
    """Return the fields that others have added below what we apply.

    What an admission webhook adds to our own write is ours, to the API server, too.
    """
    ours, found = _ours(live) or {}, list[Added]()
    for entry in live["metadata"].get("managedFields") or ():
        manager = str(entry.get("manager"))
        if manager in _CONTROLLERS or entry.get("subresource"):
            continue
        fields = {step: inner for step, inner in (entry.get("fieldsV1") or {}).items() if step != "f:metadata"}
        found += [
            Added(path=path[1:], pointer=pointer, manager=manager)
            for path, pointer in _leaves(fields, ours, live)
            if pointer != _RESTARTED
        ]
    return tuple(sorted(found, key=str))


def _ours(live: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the fields that we have applied; None where that cannot be told."""
    found = [
        each["fieldsV1"]
        for each in live["metadata"].get("managedFields") or ()
        if (each.get("manager"), each.get("operation")) == (names.FIELD_MANAGER, "Apply")
        and not each.get("subresource")
    ]
    return found[0] if len(found) == 1 else None


def _leaves(fields: Mapping[str, Any], ours: Mapping[str, Any], live: Any) -> Iterator[tuple[str, str]]:
    """Return path and pointer of the fields that are not ours; a whole item of a list counts as one."""
    for step, inner in fields.items():
        place = _place(step, live)
        if place is None:
            continue
        name, key, below = place
        is_whole = not inner or (step.startswith("k:") and "." in inner)
        pointer = "/" + str(key).replace("~", "~0").replace("/", "~1")
        if step not in ours and is_whole:
            yield name, pointer
        elif not is_whole or ours.get(step):
            yield from ((name + path, pointer + rest) for path, rest in _leaves(inner, ours.get(step) or {}, below))


def _place(step: str, live: Any) -> tuple[str, str | int, Any] | None:
    """Return how people call one step of a path, its key or index, and what is there; None where nothing is."""
    kind, _, rest = step.partition(":")
    if kind == "f" and isinstance(live, Mapping) and rest in live:
        return f".{rest}", rest, live[rest]
    if kind not in {"k", "v"} or not isinstance(live, list):
        return None
    value = _keys(rest)
    found = _find(live, value) if kind == "k" else next((each for each in live if each == value), None)
    if found is None:
        return None
    text = ",".join(str(each) for each in value.values()) if kind == "k" else str(value)
    return f"[{text}]", live.index(found), found


def _covers(live: Any, wanted: Any, fields: Mapping[str, Any] | None) -> bool:
    """Tell whether everything wanted is there and ours; others may have added to it.

    A map or list that the API server takes for one value is not ours any more once somebody has changed it. `fields`
    are those of ours in it; None where it is part of such a value.
    """
    if isinstance(wanted, dict):
        return isinstance(live, dict) and all(
            _covers_field(live.get(name), value, f"f:{name}", fields) for name, value in wanted.items()
        )
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
