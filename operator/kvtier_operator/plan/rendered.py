# SPDX-License-Identifier: Apache-2.0
"""The source of a Deployment's pods, as the Deployment itself carries it. Pure.

Another version of the operator may render other pods from the same spec, and a replaced engine costs its memory, its
start and its place on a node. So the Deployment carries what its pods were made from: the spec, the pod template, and
the document that the connector reads. `parts.edit_impact.keep_pods` decides whether they stay.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvtier_operator.api import TierSpec
from kvtier_operator.api.parse import document


@dataclass(frozen=True, kw_only=True)
class RenderedPods:
    """The source of a Deployment's pods."""

    spec: Mapping[str, Any]
    restart: str
    config: str
    """The connector's document."""
    template: Mapping[str, Any]
    """Of the pods, as it was applied."""

    @property
    def generation(self) -> str:
        """Digest of the generation that the connector's document names; empty where it names none."""
        try:
            found = json.loads(self.config)
        except ValueError:
            return ""
        return str(found.get("digest", "")) if isinstance(found, dict) else ""

    def encode(self) -> str:
        """Return the text of the annotation."""
        document = {"spec": self.spec, "restart": self.restart, "config": self.config, "template": self.template}
        return json.dumps(document, sort_keys=True, separators=(",", ":"))


def make_rendered(spec: TierSpec, *, restart: str, config: str, template: Mapping[str, Any]) -> RenderedPods:
    """Note what pods are made from."""
    return RenderedPods(spec=document(spec), restart=restart, config=config, template=template)


def decode_rendered(text: str) -> RenderedPods | None:
    """Read the annotation; None where there is none that can be used: then the pods are rendered anew."""
    try:
        document = json.loads(text)
        found = RenderedPods(**{name: document[name] for name in ("spec", "restart", "config", "template")})
    except (ValueError, TypeError, KeyError):
        return None
    is_whole = isinstance(found.spec, dict) and isinstance(found.template, dict) and isinstance(found.config, str)
    return found if is_whole and {"metadata", "spec"} <= found.template.keys() else None
