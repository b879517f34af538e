# SPDX-License-Identifier: Apache-2.0
"""The part of JSONPath that printer columns use: fields, indexes, wildcards and filters by equality. Pure."""

from __future__ import annotations

import functools
import json
import re
from typing import Any, Final

_STEP: Final = re.compile(
    r"""\.(?P<field>(?:[\w-]|\\.)+)          # .name, with dots escaped
      | \['(?P<quoted>[^']+)'\]              # ['name']
      | \[(?P<index>-?\d+)\]                 # [0]
      | (?P<every>\[\*\]|\.\*)               # [*]
      | \[\?\(\s*@\.(?P<key>[\w.-]+)\s*==\s*(?P<value>"[^"]*"|'[^']*'|[\w.-]+)\s*\)\]""",
    re.VERBOSE,
)


@functools.lru_cache(maxsize=1024)
def _steps(path: str) -> tuple[re.Match[str], ...]:
    path = path.strip().strip("{}").removeprefix("$")
    path = path if path.startswith((".", "[")) else f".{path}"
    steps, place = [], 0
    while place < len(path):
        step = _STEP.match(path, place)
        if step is None:
            return ()
        steps.append(step)
        place = step.end()
    return tuple(steps)


def first_match(document: Any, path: str) -> Any:
    """Return the first value at a path, or None where there is none or the path is beyond what is supported."""
    steps = _steps(path)
    found = [document] if steps else []
    for step in steps:
        found = [below for value in found for below in _descend(value, step)]
    return found[0] if found else None


def _descend(value: Any, step: re.Match[str]) -> list[Any]:
    name = step["quoted"] or (step["field"] or "").replace("\\", "")
    if name:
        return [value[name]] if isinstance(value, dict) and value.get(name) is not None else []
    if step["every"]:
        return list(value.values()) if isinstance(value, dict) else list(value) if isinstance(value, list) else []
    if not isinstance(value, list):
        return []
    if step["index"]:
        index = int(step["index"])
        return [value[index]] if -len(value) <= index < len(value) else []
    wanted = step["value"].strip("'\"")
    return [item for item in value if _plain(first_match(item, step["key"])) == wanted]


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
