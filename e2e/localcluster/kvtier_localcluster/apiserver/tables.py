# SPDX-License-Identifier: Apache-2.0
"""What `kubectl get` shows: Tables with the printer columns of custom resources and of the built-in kinds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from kvtier_localcluster.apiserver.columns import BUILTIN_COLUMNS, Cell, age, elapsed
from kvtier_localcluster.apiserver.jsonpath import first_match
from kvtier_localcluster.apiserver.objects import Json, compact_json
from kvtier_localcluster.apiserver.resources import Resource

_NONE: Final = "<none>"


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column: its definition for the client, and how its cell comes from an object."""

    name: str
    type: str = "string"
    format: str = ""
    description: str = ""
    priority: int = 0
    cell: Cell

    def definition(self) -> Json:
        """Return the column as a Table declares it."""
        return {
            "name": self.name,
            "type": self.type,
            "format": self.format,
            "description": self.description,
            "priority": self.priority,
        }


_NAME: Final = Column(name="Name", format="name", cell=lambda manifest: manifest["metadata"]["name"])
_AGE: Final = Column(name="Age", cell=age)


def _custom_column(definition: Json) -> Column:
    path, kind = definition["jsonPath"], definition["type"]

    def cell(manifest: Json) -> Any:
        value = first_match(manifest, path)
        if value is None:
            return None
        if kind == "date":
            return elapsed(str(value))
        return value if isinstance(value, str | int | float | bool) else compact_json(value)

    return Column(
        name=definition["name"],
        type="string" if kind == "date" else kind,
        format=definition.get("format", ""),
        description=definition.get("description", ""),
        priority=definition.get("priority", 0),
        cell=cell,
    )


def columns(resource: Resource) -> list[Column]:
    """Return the columns of a kind, its name first."""
    if resource.crd_version is not None:
        declared = [_custom_column(each) for each in resource.crd_version.get("additionalPrinterColumns") or []]
        return [_NAME, *(declared or [_AGE])]
    declared = [
        Column(name=name.lstrip("+"), priority=int(name.startswith("+")), cell=cell)
        for name, cell in BUILTIN_COLUMNS.get(resource.kind, ())
    ]
    if resource.kind == "Event":  # events have no use for their generated names
        return [*declared, Column(name="Name", format="name", priority=1, cell=_NAME.cell)]
    if not any(column.name in ("Age", "Created At") for column in declared):
        declared.append(_AGE)
    wide = [column for column in declared if column.priority]
    return [_NAME, *(column for column in declared if not column.priority), *wide]


def table(resource: Resource, manifests: Iterable[Json], list_metadata: Json, *, include_object: str) -> Json:
    """Return objects as a Table; `include_object` is None, Metadata or Object, as the client asks."""
    shown = columns(resource)
    rows = []
    for manifest in manifests:
        row: Json = {"cells": [_text(column.cell(manifest)) for column in shown]}
        if include_object == "Object":
            row["object"] = manifest
        elif include_object != "None":
            metadata = {name: value for name, value in manifest["metadata"].items() if name != "managedFields"}
            row["object"] = {"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": metadata}
        rows.append(row)
    return {
        "kind": "Table",
        "apiVersion": "meta.k8s.io/v1",
        "metadata": list_metadata,
        "columnDefinitions": [column.definition() for column in shown],
        "rows": rows,
    }


def _text(value: Any) -> Any:
    return _NONE if value == "" else value
