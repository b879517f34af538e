# SPDX-License-Identifier: Apache-2.0
"""Tables for `kubectl get`: printer columns of custom resources and of built-in kinds. Pure except for the clock.

Columns of built-in kinds are described in columns.yaml. Of JSONPath, columns use fields and filters by equality.
"""

from __future__ import annotations

import datetime as dt
import functools
import importlib.resources
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

import yaml

from kvtier_localcluster.apiserver.store.objects import Json, compact_json, field_at
from kvtier_localcluster.apiserver.store.resources import Resource

_STEP: Final = re.compile(r"""\.([\w-]+)|\[\?\(@\.(\w+)==["'](.*?)["']\)\]""")


def first_match(document: Any, path: str) -> Any:
    """Return the value at a path such as `.status.conditions[?(@.type=="Ready")].status`, or None."""
    for name, key, wanted in _STEP.findall(path):
        if name:
            document = document.get(name) if isinstance(document, dict) else None
        else:
            document = next((item for item in document or () if item.get(key) == wanted), None)
    return document


Cell = Callable[[Json], Any]

_NONE: Final = "<none>"
_ACCESS_MODES: Final = {
    "ReadWriteOnce": "RWO",
    "ReadOnlyMany": "ROX",
    "ReadWriteMany": "RWX",
    "ReadWriteOncePod": "RWOP",
}
_MINUTE, _HOUR, _DAY = 60, 3600, 86400


def elapsed(since: str | None) -> str:
    """Return the time since a time stamp, as kubectl writes it: 45s, 12m, 3h, 2d."""
    if not since:
        return "<unknown>"
    moment = dt.datetime.fromisoformat(since)
    seconds = max(0, int((dt.datetime.now(dt.UTC) - moment).total_seconds()))
    for limit, unit, letter in ((2 * _MINUTE, 1, "s"), (3 * _HOUR, _MINUTE, "m"), (2 * _DAY, _HOUR, "h")):
        if seconds < limit:
            return f"{seconds // unit}{letter}"
    return f"{seconds // _DAY}d"


def age(manifest: Json) -> str:
    """Return the age of an object."""
    return elapsed(manifest["metadata"].get("creationTimestamp"))


def _field(path: str, default: Any = _NONE) -> Cell:
    def cell(manifest: Json) -> Any:
        value = field_at(manifest, path)
        return default if value is None or value == "" else value

    return cell


def _count(path: str) -> Cell:
    return lambda manifest: int(field_at(manifest, path) or 0)


def _size(*paths: str) -> Cell:
    return lambda manifest: sum(len(field_at(manifest, path) or ()) for path in paths)


def _ready_of(ready: str, wanted: str) -> Cell:
    return lambda manifest: f"{field_at(manifest, ready) or 0}/{field_at(manifest, wanted) or 0}"


def _pod_statuses(pod: Json) -> list[Json]:
    return field_at(pod, "status.containerStatuses") or []


def _pod_ready(pod: Json) -> str:
    return f"{sum(bool(c.get('ready')) for c in _pod_statuses(pod))}/{len(pod['spec'].get('containers') or [])}"


def _pod_status(pod: Json) -> str:
    if pod["metadata"].get("deletionTimestamp"):
        return "Terminating"
    init = field_at(pod, "status.initContainerStatuses") or []
    for index, status in enumerate(init):
        state = status.get("state") or {}
        if (state.get("terminated") or {}).get("exitCode") == 0:
            continue
        reason = _state_reason(state)
        shown = reason if reason not in ("", "PodInitializing") else f"{index}/{len(init)}"
        return f"Init:{shown}"
    for status in reversed(_pod_statuses(pod)):
        reason = _state_reason(status.get("state") or {})
        if reason:
            return reason
    return str(field_at(pod, "status.reason") or field_at(pod, "status.phase") or "Unknown")


def _state_reason(state: Json) -> str:
    terminated = state.get("terminated")
    if terminated:
        return str(terminated.get("reason") or f"ExitCode:{terminated.get('exitCode')}")
    return str((state.get("waiting") or {}).get("reason") or "")


def _pod_restarts(pod: Json) -> str:
    return str(sum(status.get("restartCount", 0) for status in _pod_statuses(pod)))


def _service_ports(service: Json) -> str:
    shown = []
    for port in service["spec"].get("ports") or []:
        node_port = f":{port['nodePort']}" if port.get("nodePort") else ""
        shown.append(f"{port['port']}{node_port}/{port.get('protocol', 'TCP')}")
    return ",".join(shown) or _NONE


def _claim_status(claim: Json) -> Any:
    return "Terminating" if claim["metadata"].get("deletionTimestamp") else field_at(claim, "status.phase")


def _access_modes(path: str) -> Cell:
    return lambda claim: ",".join(_ACCESS_MODES.get(mode, mode) for mode in field_at(claim, path) or [])


def _node_status(node: Json) -> str:
    conditions = {c["type"]: c["status"] for c in field_at(node, "status.conditions") or []}
    ready = {"True": "Ready", "False": "NotReady"}.get(conditions.get("Ready", ""), "Unknown")
    return ready + (",SchedulingDisabled" if field_at(node, "spec.unschedulable") else "")


def _event_time(event: Json) -> str:
    times = (event.get("lastTimestamp"), event.get("eventTime"), event["metadata"].get("creationTimestamp"))
    return elapsed(next(filter(None, times), None))


def _event_object(event: Json) -> str:
    about = event.get("involvedObject") or event.get("regarding") or {}
    return f"{about.get('kind', '').lower()}/{about.get('name', '')}"


def _job_status(job: Json) -> str:
    met = [c["type"] for c in field_at(job, "status.conditions") or [] if c.get("status") == "True"]
    return met[-1] if met else "Running"


_MAKERS: Final[dict[str, Callable[..., Cell]]] = {
    "field": _field,
    "count": _count,
    "size": _size,
    "ready_of": _ready_of,
    "access_modes": _access_modes,
}
"""Cells with arguments, by the name that columns.yaml uses."""
_CELLS: Final[dict[str, Cell]] = {
    "age": age,
    "created": lambda manifest: manifest["metadata"].get("creationTimestamp"),
    "pod_ready": _pod_ready,
    "pod_status": _pod_status,
    "pod_restarts": _pod_restarts,
    "job_status": _job_status,
    "service_ports": _service_ports,
    "claim_status": _claim_status,
    "node_status": _node_status,
    "event_time": _event_time,
    "event_object": _event_object,
    "event_message": lambda event: (event.get("message") or event.get("note") or "").strip(),
}


@functools.cache
def _builtin_columns() -> dict[str, list[Column]]:
    described = yaml.safe_load((importlib.resources.files(__package__) / "columns.yaml").read_text())
    return {
        kind: [
            Column(
                name=name.lstrip("+"),
                priority=int(name.startswith("+")),
                cell=_MAKERS[cell](*arguments) if cell in _MAKERS else _CELLS[cell],
            )
            for name, cell, *arguments in columns
        ]
        for kind, columns in described.items()
    }


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column: its definition for the client, and how its cell comes from an object."""

    name: str
    type: str = "string"
    format: str = ""
    priority: int = 0
    cell: Cell

    def definition(self) -> Json:
        """Return the column as a Table declares it."""
        shown = {"name": self.name, "type": self.type, "format": self.format, "priority": self.priority}
        return {**shown, "description": ""}


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
        priority=definition.get("priority", 0),
        cell=cell,
    )


def columns(resource: Resource) -> list[Column]:
    """Return the columns of a kind, its name first."""
    if resource.crd_version is not None:
        declared = [_custom_column(each) for each in resource.crd_version.get("additionalPrinterColumns") or []]
        return [_NAME, *(declared or [_AGE])]
    declared = list(_builtin_columns().get(resource.kind, ()))
    if not any(column.name in ("Age", "Created At", "Last Seen") for column in declared):
        declared.append(_AGE)
    return [_NAME, *sorted(declared, key=lambda column: column.priority)]


def table(resource: Resource, manifests: Iterable[Json], list_metadata: Json, *, include_object: str) -> Json:
    """Return objects as a Table; `include_object` is None, Metadata or Object, as the client asks."""
    shown = columns(resource)
    rows = []
    for manifest in manifests:
        row: Json = {"cells": [_text(column.cell(manifest)) for column in shown]}
        if include_object != "None":
            row["object"] = manifest if include_object == "Object" else _metadata_of(manifest)
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


def _metadata_of(manifest: Json) -> Json:
    metadata = {name: value for name, value in manifest["metadata"].items() if name != "managedFields"}
    return {"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": metadata}
