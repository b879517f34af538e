# SPDX-License-Identifier: Apache-2.0
"""The definition of our resource, read once in a process: two hundred servers of the suites are told of it."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import yaml

FILE = Path(__file__).parents[2] / "crds" / "kvcachetier.yaml"


@functools.cache
def _read() -> dict[str, Any]:
    found: dict[str, Any] = yaml.load(FILE.read_text(), Loader=yaml.CSafeLoader)
    return found


def tier_definition() -> dict[str, Any]:
    """Return the CustomResourceDefinition; the caller may change it."""
    return copy.deepcopy(_read())


def open_definition(group: str, kind: str, version: str) -> dict[str, Any]:
    """Return a definition that takes any field: what others define is theirs to check."""
    plural = f"{kind.lower().removesuffix('y')}{'ies' if kind.endswith('y') else 's'}"
    schema = {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{group}"},
        "spec": {
            "group": group,
            "scope": "Namespaced",
            "names": {"kind": kind, "plural": plural, "singular": kind.lower(), "listKind": f"{kind}List"},
            "versions": [{"name": version, "served": True, "storage": True, "schema": schema}],
        },
    }
