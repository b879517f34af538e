# SPDX-License-Identifier: Apache-2.0
"""Holds objects against the schemas of a release of Kubernetes."""

from __future__ import annotations

import functools
from typing import Any

import jsonschema
import kubernetes_validate
from kubernetes_validate import utils

# It reads all definitions of a release anew for each object, a megabyte of JSON, and changes none of them.
utils.schema_contents = functools.cache(utils.schema_contents)
utils.all_versions = functools.cache(utils.all_versions)


def validate(manifest: dict[str, Any], version: str, *, strict: bool = True) -> None:
    """Raise ValidationError unless an object is valid in a release, such as "1.37".

    Where it is strict, no field may be unknown to that release.
    """
    kubernetes_validate.validate(manifest, version, strict=strict)


def validate_custom(manifest: dict[str, Any], schema: dict[str, Any], version: str = "1.37") -> None:
    """Raise ValidationError unless an object is as a schema has it, in which `inline` names a schema of Kubernetes.

    Fields that the schema does not know are refused, except below ``x-kubernetes-preserve-unknown-fields``.
    """
    contents = utils.schema_contents(f"kubernetes-json-schema/v{version}.0-local-strict/_definitions.json", version)
    definitions = contents["$defs"]
    jsonschema.Draft202012Validator({**_close(schema, definitions), "$defs": definitions}).validate(manifest)


def _close(schema: Any, definitions: dict[str, Any]) -> Any:
    if isinstance(schema, list):
        return [_close(each, definitions) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: _close(value, definitions) for key, value in schema.items() if key != "inline"}
    if "inline" in schema:
        known = definitions[f"io.k8s.api.core.v1.{schema['inline']}"]["properties"]
        found["properties"] = {**known, **found.get("properties", {})}
    if found.get("type") == "object" and "properties" in found:
        found.setdefault("additionalProperties", False)
    return found
