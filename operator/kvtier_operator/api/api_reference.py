# SPDX-License-Identifier: Apache-2.0
"""Write the reference page of the API from its CustomResourceDefinition. Pure.

The page says nothing that the cluster does not know: the same descriptions answer ``kubectl explain``, and the same
sentences are what the API server answers to a resource that it refuses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

Schema = Mapping[str, Any]

CONDITIONS: Final[Mapping[str, str]] = {
    "Ready": "The summary: all engines serve and share the volume, and somebody clears it. Its reason is that of the "
    "first problem below.",
    "Available": "At least one engine serves, be it of this spec or of an earlier one: what alerts should watch.",
    "VolumeBound": "The volume that holds the blocks is there.",
    "SizingFits": "Nodes have room for the memory and devices of every engine.",
    "EnginesReady": "As many engines as asked for serve, all of them with the current spec.",
    "HashSeedConsistent": "All engines name blocks alike, so that they find each other's.",
    "StorageChecked": "The volume was tried before engines started on it: they may write, renames are atomic, there is "
    "room. `status.storage` shows how fast it is.",
    "DiskWithinBudget": "The blocks take no more of the volume than `spec.disk.budget` allows. Unknown until the "
    "janitor has counted.",
    "DiskHealthy": "Engines and janitor can use the volume. Unknown while the janitor does not report.",
    "JanitorHealthy": "The janitor runs and can do its work. Unknown until it has reported.",
    "RoutingReady": "Requests come to the engines as `spec.routing` says: the router serves, the `InferencePool` that "
    "was asked for is there.",
    "SharedCacheVerified": "A canary prompt that one replica computed was found on the volume by another one.",
    "DiskEffective": "Over the last hour, loading from the volume was quicker than computing again. `Ready` does not "
    "depend on it.",
    "UpToDate": "Pods are what this operator would make, and of a vLLM that the connector is tested with. `Ready` "
    "does not depend on it.",
    "ClaimShared": "Other tiers keep their blocks on the same claim; the reason says whether all budgets fit it. "
    "`Ready` does not depend on it.",
    "Paused": "`spec.paused` is true and the operator changes nothing.",
    "Reconciling": "The operator or the cluster is still working towards the spec (kstatus).",
    "Stalled": "Nothing more will happen until a person acts (kstatus).",
}
"""Condition type to what it means when it is true."""

_INTRODUCTION: Final = """\
<!-- SPDX-License-Identifier: Apache-2.0 -->
<!-- Generated from operator/kvtier_operator/api: edit the models there, then run
     python -m kvtier_operator.api.crd --write crds -->

# KVCacheTier

{description}

`apiVersion: {api_version}`, `kind: {kind}`, short name `{short}`. {scope}. `kubectl explain {singular}.spec
--recursive` shows the same in a terminal. The shortest useful resource is in
[samples/minimal.yaml](samples/minimal.yaml), one with every field in [samples/full.yaml](samples/full.yaml).

A *quantity* is a number with a unit, in quotes: `"64Gi"` (1024³ bytes each), `"64G"` (1000³), `"500m"` (thousandths). A
field marked **required** must be given; every other one has the default shown, or none.
"""

_RULES: Final = """
## What is refused

The API server answers `kubectl apply` with these sentences, after the path of the field; the operator says the same in
the `Ready` condition where a cluster has an older definition.

| Field | Message | When |
|---|---|---|
"""

_CONDITIONS: Final = """
## Conditions

`kubectl wait --for=condition=Ready {short}/NAME` waits for the summary. Every condition carries a reason for programs
and a message for people that says what to do.

| Type | True means |
|---|---|
"""

_REASONS: Final = """
## Reasons

| Reason | Meaning |
|---|---|
"""

_COLUMNS: Final = """
## Columns of `kubectl get`

| Column | From | Shown |
|---|---|---|
"""


def render(crd: Schema, *, reasons: Mapping[str, str] | None = None) -> str:
    """Return the page in Markdown; `reasons` maps each reason of a condition to its sentence."""
    spec = crd["spec"]
    version = spec["versions"][0]
    root = version["schema"]["openAPIV3Schema"]
    parts = [
        _INTRODUCTION.format(
            description=root["description"],
            api_version=f"{spec['group']}/{version['name']}",
            kind=spec["names"]["kind"],
            singular=spec["names"]["singular"],
            short=spec["names"]["shortNames"][0],
            scope=spec["scope"],
        )
    ]
    for top in ("spec", "status"):
        parts += [_object(path, schema) for path, schema in _objects(root["properties"][top], top)]
    parts.append(_RULES)
    parts += [_row(*row) for row in _rules(root, "")]
    parts.append(_CONDITIONS.format(short=spec["names"]["shortNames"][0]))
    parts += [_row(f"`{name}`", meaning) for name, meaning in CONDITIONS.items()]
    if reasons:
        parts.append(_REASONS)
        parts += [_row(f"`{name}`", meaning) for name, meaning in sorted(reasons.items())]
    parts.append(_COLUMNS)
    for column in version["additionalPrinterColumns"]:
        shown = "with `-o wide`" if column.get("priority") else "always"
        parts.append(_row(column["name"], f"`{column['jsonPath']}`", shown))
    return "".join(parts)


def _objects(schema: Schema, path: str) -> Iterator[tuple[str, Schema]]:
    """Yield every object with fields, parents before children."""
    if schema.get("properties"):
        yield path, schema
        for name, child in schema["properties"].items():
            yield from _objects(child, f"{path}.{name}")
    elif "items" in schema:
        yield from _objects(schema["items"], f"{path}[]")


def _object(path: str, schema: Schema) -> str:
    required = schema.get("required", ())
    rows = [
        _row(
            f"`{name}`",
            _type(child, f"{path}.{name}"),
            "**required**" if name in required else _default(child),
            child["description"],
        )
        for name, child in schema["properties"].items()
    ]
    more = "\nAny other field of the Kubernetes object of this kind is passed on as it is.\n"
    return (
        f"\n## {path}\n\n{schema['description']}\n\n| Field | Type | Default | Description |\n|---|---|---|---|\n"
        + "".join(rows)
        + (more if schema.get("x-kubernetes-preserve-unknown-fields") else "")
    )


def _type(schema: Schema, path: str) -> str:
    """Describe what a field takes, bounds included."""
    if "enum" in schema:
        return " or ".join(f"`{value}`" for value in schema["enum"])
    if "x-kubernetes-int-or-string" in schema:
        return "integer or string"
    if schema["type"] == "array":
        return f"list of {_type(schema['items'], f'{path}[]')}"
    if schema["type"] == "object":
        if schema.get("properties"):
            return f"[object](#{_anchor(path)})"
        return "map of strings" if "additionalProperties" in schema else "object"
    if any(rule["rule"] == "isQuantity(self)" for rule in schema.get("x-kubernetes-validations", ())):
        return "quantity"
    if schema["type"] == "integer" and "maximum" in schema:
        return f"integer, {schema['minimum']} to {schema['maximum']}"
    return "time" if schema.get("format") == "date-time" else str(schema["type"])


def _default(schema: Schema) -> str:
    default = schema.get("default")
    if default is None or default == {}:
        return ""
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    if isinstance(default, list):
        return ", ".join(f"`{value}`" for value in default)
    return f"`{default}`" if default != "" else '`""`'


def _rules(schema: Schema, path: str) -> Iterator[tuple[str, str, str]]:
    """Yield field, message and occasion of every rule."""
    for rule in schema.get("x-kubernetes-validations", ()):
        occasion = "on a change" if "oldSelf" in rule["rule"] else "always"
        field = f"{path}{rule.get('fieldPath', '')}".lstrip(".") or "the resource"
        yield f"`{field}`" if " " not in field else field, rule["message"], occasion
    for name, child in schema.get("properties", {}).items():
        yield from _rules(child, f"{path}.{name}")
    if "items" in schema:
        yield from _rules(schema["items"], f"{path}[]")


def _anchor(path: str) -> str:
    """Return the anchor that GitHub gives a heading."""
    return "".join(letter for letter in path.lower() if letter.isalnum() or letter in "-_")


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"
