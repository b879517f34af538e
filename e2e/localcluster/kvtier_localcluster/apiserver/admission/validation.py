# SPDX-License-Identifier: Apache-2.0
"""Decide whether an object may be stored: metadata, schema, CEL rules, and the immutable fields of built-in kinds."""

from __future__ import annotations

import functools
import json
import re
import weakref
from collections.abc import Iterator
from typing import Any, Final

from kvtier_localcluster.apiserver.admission import builtin, cel, crd_schema
from kvtier_localcluster.apiserver.admission.builtin import SchemaWalk
from kvtier_localcluster.apiserver.admission.cel_cost import cost_problems
from kvtier_localcluster.apiserver.admission.defaulting import set_builtin_defaults
from kvtier_localcluster.apiserver.admission.structural import structural_problems
from kvtier_localcluster.apiserver.store.api_errors import bad_request, invalid
from kvtier_localcluster.apiserver.store.objects import Json, compact_json
from kvtier_localcluster.apiserver.store.resources import Resource

_SUBDOMAIN: Final = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_LABEL: Final = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_SERVICE_LABEL: Final = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_LABEL_VALUE: Final = re.compile(r"(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?")
_QUALIFIED_NAME: Final = re.compile(r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]")
_MAX_LABEL: Final = 63
_MAX_NAME: Final = 253
_MAX_ANNOTATIONS: Final = 256 * 1024


def name_problems(resource: Resource, name: str) -> Iterator[str]:
    """Yield what is wrong with an object's name; RBAC objects may have any name that fits into a path."""
    if resource.group == "rbac.authorization.k8s.io":
        if name in (".", "..") or "/" in name or "%" in name:
            yield f'metadata.name: Invalid value: "{name}": may not contain "/" or "%"'
        return
    pattern, limit, what = _SUBDOMAIN, _MAX_NAME, "a lowercase RFC 1123 subdomain"
    if resource.kind == "Namespace":
        pattern, limit, what = _LABEL, _MAX_LABEL, "a lowercase RFC 1123 label"
    elif resource.kind == "Service" and not resource.is_custom:
        pattern, limit, what = _SERVICE_LABEL, _MAX_LABEL, "a DNS-1035 label"
    if not pattern.fullmatch(name):
        yield (
            f'metadata.name: Invalid value: "{name}": {what} must consist of lower case alphanumeric characters '
            "and '-', and must start and end with an alphanumeric character"
        )
    if len(name) > limit:
        yield f'metadata.name: Invalid value: "{name}": must be no more than {limit} characters'


def metadata_problems(metadata: Json) -> Iterator[str]:
    """Yield what is wrong with labels, annotations, finalizers and owner references."""
    for key, value in (metadata.get("labels") or {}).items():
        yield from _key_problems("metadata.labels", key)
        if not isinstance(value, str) or len(value) > _MAX_LABEL or not _LABEL_VALUE.fullmatch(value):
            yield (
                f"metadata.labels: Invalid value: {value!r}: a valid label must be an empty string or consist of "
                f"alphanumeric characters, '-', '_' or '.', of no more than {_MAX_LABEL} characters"
            )
    annotations = metadata.get("annotations") or {}
    for key, value in annotations.items():
        yield from _key_problems("metadata.annotations", key.lower())
        if not isinstance(value, str):
            yield f"metadata.annotations: Invalid value: {value!r}: must be a string"
    if sum(len(key) + len(str(value)) for key, value in annotations.items()) > _MAX_ANNOTATIONS:
        yield f"metadata.annotations: Too long: must have at most {_MAX_ANNOTATIONS} bytes"
    for finalizer in metadata.get("finalizers") or []:
        if not _QUALIFIED_NAME.fullmatch(finalizer):
            yield f'metadata.finalizers: Invalid value: "{finalizer}": name part must be a qualified name'
    yield from _owner_problems(metadata.get("ownerReferences") or [])


def _owner_problems(owners: list[Json]) -> Iterator[str]:
    for index, owner in enumerate(owners):
        for field in ("apiVersion", "kind", "name", "uid"):
            if not owner.get(field):
                yield f"metadata.ownerReferences[{index}].{field}: Required value"
    if sum(bool(owner.get("controller")) for owner in owners) > 1:
        yield "metadata.ownerReferences: Invalid value: only one reference can have controller set to true"


def _key_problems(field: str, key: str) -> Iterator[str]:
    if not _QUALIFIED_NAME.fullmatch(key) or len(key.rpartition("/")[2]) > _MAX_LABEL:
        yield f'{field}: Invalid value: "{key}": name part must be a qualified name'


class Validator:
    """Prunes, defaults and checks objects; keeps the compiled schemas of custom resources."""

    def __init__(self) -> None:
        """Start with no compiled schema."""
        self._compiled: weakref.WeakKeyDictionary[Resource, Any] = weakref.WeakKeyDictionary()

    def settle(self, resource: Resource, new: Json, old: Json | None, *, field_validation: str) -> list[str]:
        """Prune and default an object in place, and return warnings about unknown fields.

        Raises:
            ApiError: the object is invalid (422), or has unknown fields and the client asked for strictness (400).
        """
        if resource.is_custom:
            problems, dropped = self._settle_custom(resource, new, old)
        else:
            problems, dropped = _settle_builtin(resource, new, old)
        metadata = new["metadata"]
        problems = [*name_problems(resource, metadata["name"]), *metadata_problems(metadata), *problems]
        if dropped and field_validation == "Strict":
            listed = ", ".join(f'unknown field "{field}"' for field in dropped)
            kind = resource.kind
            raise bad_request(
                f'{kind} in version "{resource.version}" cannot be handled as a {kind}: strict decoding error: {listed}'
            )
        if problems:
            raise invalid(resource.kind, resource.group, metadata["name"], problems)
        return [f'unknown field "{field}"' for field in dropped] if field_validation == "Warn" else []

    def _settle_custom(self, resource: Resource, new: Json, old: Json | None) -> tuple[list[str], list[str]]:
        schema = resource.custom_schema
        dropped = crd_schema.prune(new, schema)
        crd_schema.set_defaults(new, schema)
        validator = self._compiled.get(resource)
        if validator is None:
            validator = self._compiled[resource] = crd_schema.make_validator(schema)
        problems = crd_schema.schema_problems(new, schema, validator=validator, old=old)
        return problems or cel.rule_problems(new, old, schema), dropped


def _settle_builtin(resource: Resource, new: Json, old: Json | None) -> tuple[list[str], list[str]]:
    walk = SchemaWalk()
    walk.check(new, resource.schema)
    if walk.problems:
        return walk.problems, walk.dropped
    set_builtin_defaults(resource, new)
    problems = list(builtin.problems(resource, new, old))
    if resource.kind == "CustomResourceDefinition" and not problems:
        metadata = {"name": new["metadata"]["name"]}
        problems = list(_definition_problems(compact_json({"metadata": metadata, "spec": new["spec"]})))
    return problems, walk.dropped


@functools.lru_cache(maxsize=32)
def _definition_problems(text: str) -> tuple[str, ...]:
    """Return what is wrong with a definition: kept, since rules are slow to estimate and many servers get the same."""
    definition = json.loads(text)
    problems = [f"spec: Invalid value: {problem}" for problem in structural_problems(definition)]
    return tuple(problems or cost_problems(definition))
