# SPDX-License-Identifier: Apache-2.0
"""Generate the CustomResourceDefinition and its reference page from the models of the API.

``python -m kvtier_operator.api.crd --write`` writes the files, ``--check`` exits with 1 when one is stale. Only `main`
touches files.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import yaml

from kvtier_connector.contract import generated_page
from kvtier_operator import names
from kvtier_operator.api.rules import ApiModel
from kvtier_operator.api.status_schema import TierStatus
from kvtier_operator.api.tier_spec import BLOCKS_OF_ANOTHER, NAME_FITS_CHILDREN, TierSpec

ROOT: Final = Path(__file__).parents[3]

SHORT_NAME: Final = "kvt"
_DESCRIPTION: Final = (
    "A group of vLLM engines whose KV cache outlives them, in host memory and on a shared volume: "
    "any replica, and any later restart, reads what one replica computed."
)

Schema = dict[str, Any]

_INTRODUCTION: Final = f"""\
<!-- SPDX-License-Identifier: Apache-2.0 -->
<!-- Generated from operator/kvtier_operator/api: edit the models there, then run
     python -m kvtier_operator.api.crd --write -->

# KVCacheTier

{_DESCRIPTION}

`apiVersion: {names.API_VERSION}`, `kind: {names.KIND}`, short name `{SHORT_NAME}`. Namespaced.
`kubectl explain kvcachetier.spec --recursive` shows the same in a terminal. The shortest useful resource is in
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

_COLUMNS: Final = """
## Columns of `kubectl get`

| Column | From | Shown |
|---|---|---|
"""


def render_page(crd: Schema) -> str:
    """Return the reference page in Markdown."""
    version = crd["spec"]["versions"][0]
    root = version["schema"]["openAPIV3Schema"]
    parts = [_INTRODUCTION]
    for top in ("spec", "status"):
        parts += [_object(path, schema) for path, schema in _objects(root["properties"][top], top)]
    parts.append(_RULES)
    parts += [_row(*row) for row in _rules(root, "")]
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
    rows = [
        _row(
            f"`{name}`",
            _type(child, f"{path}.{name}"),
            "**required**" if name in schema.get("required", ()) else _default(child),
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


HEADER: Final = (
    "# SPDX-License-Identifier: Apache-2.0\n"
    "# Generated from operator/kvtier_operator/api: edit the models there, then run\n"
    "# python -m kvtier_operator.api.crd --write\n"
)

# In the order in which they are written; what is not listed (titles, closed-object marks) has no place in a structural
# schema.
_KEPT: Final = (
    *("description", "type", "format", "enum", "pattern", "minimum", "maximum", "minLength", "maxLength"),
    *("minItems", "maxItems", "maxProperties", "default", "x-kubernetes-list-type", "x-kubernetes-list-map-keys"),
    *("x-kubernetes-int-or-string", "x-kubernetes-preserve-unknown-fields", "x-kubernetes-validations"),
    *("required", "properties", "additionalProperties", "items"),
)


def definition() -> Schema:
    """Return the CustomResourceDefinition."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{names.PLURAL}.{names.GROUP}"},
        "spec": {
            "group": names.GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": names.KIND,
                "listKind": f"{names.KIND}List",
                "plural": names.PLURAL,
                "singular": names.KIND.lower(),
                "shortNames": [SHORT_NAME],
                "categories": ["all"],
            },
            "versions": [
                {
                    "name": names.VERSION,
                    "served": True,
                    "storage": True,
                    "subresources": {
                        "status": {},
                        "scale": {
                            "specReplicasPath": ".spec.replicas",
                            "statusReplicasPath": ".status.replicas",
                            "labelSelectorPath": ".status.selector",
                        },
                    },
                    "additionalPrinterColumns": _columns(),
                    "schema": {"openAPIV3Schema": _resource()},
                }
            ],
        },
    }


def structural_schema(model: type[ApiModel]) -> Schema:
    """Return the structural schema of one model, with everything it refers to written out in place."""
    schema = model.model_json_schema(by_alias=True)
    return _structural(schema, schema.get("$defs", {}))


def render(crd: Schema) -> str:
    """Return the definition as the YAML file that is committed."""
    return HEADER + yaml.dump(crd, Dumper=_Plain, sort_keys=False, width=118, allow_unicode=True)


def generate() -> dict[str, str]:
    """Return every generated file: its path in the repository to its text."""
    crd = definition()
    return {"crds/kvcachetier.yaml": render(crd), "crds/API.md": render_page(crd)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the generated files, or say whether those on disk are up to date."""
    files = generate()
    return max(
        generated_page.run(arguments, prog="crd", file=ROOT / name, render=functools.partial(files.__getitem__, name))
        for name in files
    )


def _columns() -> list[Schema]:
    def column(name: str, path: str, kind: str = "string", **more: object) -> Schema:
        return {"name": name, "type": kind, "jsonPath": path, **more}

    def of_condition(kind: str, field: str) -> str:
        return f'.status.conditions[?(@.type=="{kind}")].{field}'

    up_to_date = "Whether engines are as the operator that runs would make them."
    return [
        column("Ready", of_condition("Ready", "status")),
        column("Available", of_condition("Available", "status")),
        column("Model", ".spec.model.name"),
        column("Replicas", ".spec.replicas", "integer"),
        column("Engines", ".status.readyReplicas", "integer", description="Ready engines."),
        column("CPU-Tier", ".status.sizing.cpuSize"),
        column("Disk", '.status.tiers[?(@.name=="disk")].used'),
        column("Up-To-Date", of_condition("UpToDate", "status"), description=up_to_date),
        column("Reason", of_condition("Ready", "reason")),
        column("Age", ".metadata.creationTimestamp", "date"),
        column("Generation", ".status.generation.current", priority=1),
        column("Volume", of_condition("VolumeBound", "reason"), priority=1),
        column("Janitor", of_condition("JanitorHealthy", "reason"), priority=1),
        column("Shared", of_condition("ClaimShared", "reason"), priority=1),
        column("Message", of_condition("Ready", "message"), priority=1),
    ]


def _resource() -> Schema:
    return {
        "description": _DESCRIPTION,
        "type": "object",
        "x-kubernetes-validations": [NAME_FITS_CHILDREN.to_schema(), BLOCKS_OF_ANOTHER.to_schema()],
        "required": ["spec"],
        "properties": {
            "apiVersion": {"description": f"`{names.API_VERSION}`.", "type": "string"},
            "kind": {"description": f"`{names.KIND}`.", "type": "string"},
            "metadata": {"type": "object"},
            "spec": structural_schema(TierSpec),
            "status": structural_schema(TierStatus),
        },
    }


def _structural(node: Mapping[str, Any], definitions: Mapping[str, Any]) -> Schema:
    """Return one schema without references, nulls, titles and defaults that say nothing."""
    found = _resolve(node, definitions)
    if found.get("additionalProperties") is True:
        found["x-kubernetes-preserve-unknown-fields"] = True
    if not isinstance(found.get("additionalProperties"), Mapping):
        found.pop("additionalProperties", None)
    if "x-kubernetes-validations" in found:
        found["x-kubernetes-validations"] = [
            {key: rule[key] for key in ("rule", "message", "fieldPath") if key in rule}
            for rule in found["x-kubernetes-validations"]
        ]
    if "description" in found:
        found["description"] = " ".join(found["description"].split())
    if "default" in found:
        _simplify_default(found)
    if "properties" in found:
        found["properties"] = {name: _structural(child, definitions) for name, child in found["properties"].items()}
    for name in ("items", "additionalProperties"):
        if name in found:
            found[name] = _structural(found[name], definitions)
    return {key: found[key] for key in _KEPT if key in found}


def _resolve(node: Mapping[str, Any], definitions: Mapping[str, Any]) -> Schema:
    """Return a schema with what it refers to in its place; what stands beside a reference wins."""
    found = dict(node)
    if "$ref" in found:
        found = {**definitions[found.pop("$ref").rsplit("/", 1)[-1]], **found}
    if "anyOf" in found:
        # The only unions of the API are "this or absent".
        (chosen,) = (option for option in found.pop("anyOf") if option != {"type": "null"})
        found = {**_resolve(chosen, definitions), **found}
    return found


def _simplify_default(schema: Schema) -> None:
    """Reduce a default to what the API server cannot work out by itself."""
    if schema["default"] in (None, [], {}):
        del schema["default"]
    elif schema["type"] == "object":
        # The fields of the object have defaults of their own, which the API server fills in below this one.
        schema["default"] = {}


class _Plain(yaml.SafeDumper):
    """Writes everything out in place: anchors in a file for people are puzzles."""

    def ignore_aliases(self, _: object) -> bool:
        return True


if __name__ == "__main__":
    sys.exit(main())
