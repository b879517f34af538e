# SPDX-License-Identifier: Apache-2.0
"""What users read when they apply something: from the API server, and from the operator."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvtier_localcluster.apiserver.admission.validation import Validator
from kvtier_localcluster.apiserver.store.api_errors import ApiError
from kvtier_localcluster.apiserver.store.resources import Registry, Resource
from kvtier_operator.api import TierSpec, crd, parse
from kvtier_operator.errors import SpecInvalid

GOLDEN = Path(__file__).parent / "golden"
ABSENT = "~remove"


class Admission:
    """The admission of the local API server: what `kubectl apply` would be answered."""

    def __init__(self) -> None:
        registry = Registry()
        registry.sync_crd(crd.definition(), is_deleted=False)
        self.resource: Resource = registry.named("kvcachetiers")
        self.validator = Validator()

    def refusals(self, new: Mapping[str, Any], old: Mapping[str, Any] | None = None) -> list[tuple[str, str]]:
        """Return the field and message of every cause of a refusal; empty where the object is accepted."""
        stored = copy.deepcopy(old)
        if stored is not None:
            self.validator.settle(self.resource, stored, None, field_validation="Strict")
        try:
            self.validator.settle(self.resource, copy.deepcopy(new), stored, field_validation="Strict")
        except ApiError as error:
            causes = error.status()["details"].get("causes")
            if causes is None:
                return [("", error.status()["message"])]
            return [(cause["field"], cause["message"].removeprefix("Invalid value: ")) for cause in causes]
        return []


def tier(changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return a good body with some fields set (`spec.engine.args`) or removed."""
    body = yaml.safe_load((GOLDEN / "minimal" / "tier.yaml").read_text())
    for path, value in (changes or {}).items():
        *parents, last = path.split(".")
        at = body
        for name in parents:
            at = at.setdefault(name, {})
        if value == ABSENT:
            del at[last]
        else:
            at[last] = value
    return body


def both_take(server: Admission, body: dict[str, Any]) -> TierSpec:
    """Return the spec of a body that API server and operator accept."""
    assert server.refusals(body) == []
    return parse(body)


def both_refuse(server: Admission, body: dict[str, Any]) -> tuple[str, str]:
    """Return the field and the message by which API server and operator refuse a body."""
    with pytest.raises(SpecInvalid) as refused:
        parse(body)
    found = refused.value.field, refused.value.message
    assert server.refusals(body) == [found]
    return found
