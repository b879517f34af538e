# SPDX-License-Identifier: Apache-2.0
"""YAML as kubectl reads it: its parser takes other words for numbers and booleans than PyYAML does. Pure."""

from __future__ import annotations

import math
import re
from typing import Any, Final

import yaml

_RESOLVED: Final = (
    ("null", "~nN", "|~|null|Null|NULL"),
    ("bool", "yYnNtTfFoO", "y|Y|yes|Yes|YES|n|N|no|No|NO|true|True|TRUE|false|False|FALSE|on|On|ON|off|Off|OFF"),
    ("int", "-+0", "[-+]?0([xX]_*[0-9a-fA-F][0-9a-fA-F_]*|[oO]_*[0-7][0-7_]*|[bB]_*[01][01_]*)"),
    ("float", "-+.0123456789", r"[-+]?(\.[0-9]|[0-9][0-9_]*\.?)[0-9_]*([eE][-+]?_*[0-9][0-9_]*)?"),
    ("float", "-+.", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"),
    ("merge", "<", "<<"),
)
"""Words that are no text, by resolve.go of go-yaml 2: their tag, their first letters, and a pattern."""

# Subclasses, so that other users of the library keep theirs. Repeated values are written in full.
Reader: Any = type("Reader", (yaml.SafeLoader,), {"yaml_implicit_resolvers": {}})
Writer: Any = type("Writer", (yaml.SafeDumper,), {"ignore_aliases": lambda *_: True})


def _number(reader: yaml.SafeLoader, node: yaml.ScalarNode) -> float | str:
    if not any(re.fullmatch(pattern, str(node.value)) for _, _, pattern in _RESOLVED[2:5]):
        raise yaml.constructor.ConstructorError(None, None, "a number is expected", node.start_mark)
    try:
        return int(re.sub(r"^([-+]?)0(?=[0-7]+$)", r"\g<1>0o", node.value.replace("_", "")), 0)
    except ValueError:
        found: float = reader.construct_yaml_float(node)
    if abs(found) < 2**63 and found.is_integer():
        return int(found)
    # Commits such as 12e99999 are texts, unlike 12e99.
    return str(node.value) if math.isinf(found) and node.value[-1].isdigit() else found


def _text(writer: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # In a block, these would become other ends of lines.
    style = '"' if re.search("[\x85\u2028\u2029]", text) else "|" if "\n" in text else None
    return writer.represent_scalar("tag:yaml.org,2002:str", text, style=style)


for _tag, _first, _pattern in _RESOLVED:
    for _class in (Reader, Writer):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"(?:{_pattern})\Z"), ["", *_first])
Reader.add_constructor("tag:yaml.org,2002:int", _number)
Reader.add_constructor("tag:yaml.org,2002:float", _number)
Reader.add_constructor("tag:yaml.org,2002:bool", lambda _, node: str(node.value).lower() in {"y", "yes", "true", "on"})
Writer.add_representer(str, _text)
