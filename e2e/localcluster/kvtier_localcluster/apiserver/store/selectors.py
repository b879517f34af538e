# SPDX-License-Identifier: Apache-2.0
"""Label and field selectors, parsed once per request and matched against many objects. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvtier_localcluster.apiserver.store.api_errors import bad_request
from kvtier_localcluster.apiserver.store.objects import Json, field_at
from kvtier_localcluster.apiserver.store.resources import Resource

_COMMA_OUTSIDE_PARENTHESES = re.compile(r",(?![^(]*\))")
_SET_BASED = re.compile(r"([^\s!=]+)\s+(in|notin)\s+\(([^)]*)\)")
_EQUALITY = re.compile(r"([^!=\s]+)\s*(==|=|!=)\s*([^=!]*)")
_KEY = re.compile(r"!?\s*[A-Za-z0-9]([-A-Za-z0-9_./]*[A-Za-z0-9])?")
_FIELD = re.compile(r"([^!=]+)(==|=|!=)(.*)")

_EVERY_KIND = ("metadata.name", "metadata.namespace")
_EVENT = tuple(f"involvedObject.{name}" for name in ("kind", "namespace", "name", "uid", "apiVersion"))
_BY_KIND: dict[str, tuple[str, ...]] = {
    "Pod": ("spec.nodeName", "spec.restartPolicy", "spec.serviceAccountName", "status.phase", "status.podIP"),
    "Event": (*_EVENT, "reason", "reportingComponent", "type"),
    "Secret": ("type",),
    "Namespace": ("status.phase",),
    "Node": ("spec.unschedulable",),
}

Test = Callable[[Mapping[str, Any]], bool]


def _label_test(term: str) -> Test:
    if found := _SET_BASED.fullmatch(term):
        key, operator, values = found[1], found[2], {value.strip() for value in found[3].split(",")}
        return lambda labels: (labels.get(key) in values) == (operator == "in")
    if found := _EQUALITY.fullmatch(term):
        key, operator, value = found[1], found[2], found[3].strip()
        return lambda labels: (labels.get(key) == value) == (operator != "!=")
    if not _KEY.fullmatch(term):
        raise bad_request(f"unable to parse requirement: {term!r}")
    if term.startswith("!"):
        return lambda labels: term[1:].strip() not in labels
    return lambda labels: term in labels


def label_tests(selector: str) -> tuple[Test, ...]:
    """Parse a label selector such as `app=x,tier in (a,b),!gone`."""
    terms = (term.strip() for term in _COMMA_OUTSIDE_PARENTHESES.split(selector))
    return tuple(_label_test(term) for term in terms if term)


def selectable_fields(resource: Resource) -> tuple[str, ...]:
    """Return the fields that may select objects of a kind."""
    if resource.crd_version is not None:
        more = resource.crd_version.get("selectableFields") or []
        return (*_EVERY_KIND, *(each["jsonPath"].removeprefix(".") for each in more))
    return (*_EVERY_KIND, *_BY_KIND.get(resource.kind, ()))


def field_tests(selector: str, selectable: tuple[str, ...]) -> tuple[Test, ...]:
    """Parse a field selector; an absent field equals the empty string."""
    tests: list[Test] = []
    for term in filter(None, selector.split(",")):
        found = _FIELD.fullmatch(term)
        if found is None:
            raise bad_request(f"invalid field selector {term!r}")
        path, operator, value = found[1], found[2], found[3]
        if path not in selectable:
            raise bad_request(f"field label not supported: {path}")
        tests.append(_field_test(path, value, is_negated=operator == "!="))
    return tuple(tests)


def _field_test(path: str, value: str, *, is_negated: bool) -> Test:
    def test(manifest: Mapping[str, Any]) -> bool:
        found = field_at(manifest, path)
        return (("" if found is None else str(found)) == value) != is_negated

    return test


def labels_match(selector: Json | None, labels: Mapping[str, str]) -> bool:
    """Match a LabelSelector object (matchLabels and matchExpressions); an absent selector matches nothing."""
    if selector is None:
        return False
    if any(labels.get(key) != value for key, value in (selector.get("matchLabels") or {}).items()):
        return False
    for expression in selector.get("matchExpressions") or []:
        key, values = expression["key"], expression.get("values") or []
        is_matched = {
            "In": labels.get(key) in values,
            "NotIn": labels.get(key) not in values,
            "Exists": key in labels,
            "DoesNotExist": key not in labels,
        }[expression["operator"]]
        if not is_matched:
            return False
    return True


@dataclass(frozen=True)
class Selection:
    """Which objects of a kind a list, watch or deletecollection is about."""

    namespace: str | None
    labels: tuple[Test, ...] = ()
    fields: tuple[Test, ...] = ()

    @classmethod
    def parse(
        cls, namespace: str | None, name: str | None, query: Mapping[str, str], selectable: tuple[str, ...]
    ) -> Selection:
        """Read the selectors of a request; `name` narrows it to one object."""
        fields = field_tests(query.get("fieldSelector") or "", selectable)
        if name is not None:
            fields = (*fields, _field_test("metadata.name", name, is_negated=False))
        return cls(namespace, label_tests(query.get("labelSelector") or ""), fields)

    def matches(self, manifest: Json | None) -> bool:
        """Tell whether an object is selected; None (no object) never is."""
        if manifest is None:
            return False
        metadata = manifest["metadata"]
        if self.namespace is not None and metadata.get("namespace") != self.namespace:
            return False
        labels = metadata.get("labels") or {}
        # Loops and not all(): a list asks this of every object of a kind.
        for test in self.labels:
            if not test(labels):
                return False
        for test in self.fields:  # noqa: SIM110 (see above)
            if not test(manifest):
                return False
        return True
