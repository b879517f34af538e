# SPDX-License-Identifier: Apache-2.0
"""Keeps engines as they are until somebody asks for a change: what a Deployment's pods were made from. Pure.

Another version of the operator may render other pods from the same spec, and a replaced engine costs its memory, its
start and its place on a node. So the Deployment carries what its pods were made from: the fields of the spec, the pod
template, and the document that the connector reads. While the spec still says the same, exactly that is applied again,
whatever this version would render; an edit of the spec, or a new value of the restart annotation, renders anew.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from pydantic.alias_generators import to_camel

from kvtier_operator.api import TierSpec
from kvtier_operator.api.rules import ApiModel

ROLLS_NOTHING: Final = (
    ("replicas",),
    ("paused",),
    ("disk", "mode"),
    ("disk", "budget"),
    ("disk", "encryption", "activeKey"),
    ("generations",),
    ("janitor",),
    ("proof",),
    ("routing",),
    ("engine", "rollout"),
    ("engine", "service"),
    ("engine", "disruptionBudget"),
    ("volume", "claim"),
    ("volume", "deletionPolicy"),
)
"""Fields of the spec that no pod is made from. What is missing here is only rendered anew once too often."""


@dataclass(frozen=True, kw_only=True)
class Pin:
    """What the pods of a Deployment were made from."""

    spec: Mapping[str, Any]
    restart: str
    config: str
    """The connector's document."""
    template: Mapping[str, Any]
    """Of the pods, as it was applied."""

    def encode(self) -> str:
        """Return the text of the annotation."""
        document = {"spec": self.spec, "restart": self.restart, "config": self.config, "template": self.template}
        return json.dumps(document, sort_keys=True, separators=(",", ":"))

    def holds(self, spec: TierSpec, restart: str) -> bool:
        """Tell whether the spec still asks for what these pods were made from.

        A field that only this version knows counts if it has another value than by default; one that only the version
        that made the pods knew does not count.
        """
        return self.restart == restart and _agrees(self.spec, spec, ())


def make_pin(spec: TierSpec, *, restart: str, config: str, template: Mapping[str, Any]) -> Pin:
    """Note what pods are made from."""
    return Pin(spec=_to_json(spec), restart=restart, config=config, template=template)


def decode(text: str) -> Pin | None:
    """Read the annotation; None where there is none that can be used: then the pods are rendered anew."""
    try:
        document = json.loads(text)
        found = Pin(**{name: document[name] for name in ("spec", "restart", "config", "template")})
    except (ValueError, TypeError, KeyError):
        return None
    is_whole = isinstance(found.spec, dict) and isinstance(found.template, dict) and isinstance(found.config, str)
    return found if is_whole and {"metadata", "spec"} <= found.template.keys() else None


def _agrees(before: Any, now: Any, path: tuple[str, ...]) -> bool:
    if not (isinstance(now, ApiModel) and isinstance(before, Mapping)):
        return bool(before == _to_json(now))
    for name, field in type(now).model_fields.items():
        alias, value = field.alias or to_camel(name), getattr(now, name)
        here = (*path, alias)
        if here in ROLLS_NOTHING:
            continue
        if alias not in before:
            if value != field.get_default(call_default_factory=True):
                return False
        elif not _agrees(before[alias], value, here):
            return False
    return True


def _to_json(value: Any) -> Any:
    if isinstance(value, ApiModel):
        return value.model_dump(mode="json", by_alias=True)
    return json.loads(json.dumps(value, default=dict))
