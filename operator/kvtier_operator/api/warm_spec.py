# SPDX-License-Identifier: Apache-2.0
"""``spec.warm`` of a KVCacheTier: prompts whose blocks are to lie on the volume before users come. Pure."""

from __future__ import annotations

from typing import Annotated, Any, Final

from pydantic import Field, StrictBool, StrictInt, StrictStr

from kvtier_operator.api.rules import ApiModel, Rule
from kvtier_operator.api.scalars import ObjectName

_FILE: Final = "prompts.jsonl"
_Path = Annotated[StrictStr, Field(min_length=1, max_length=253, pattern=r"^[A-Za-z0-9_][-A-Za-z0-9_./]*$")]


class PromptsInConfigMap(ApiModel):
    """A key of a ConfigMap."""

    name: ObjectName
    """ConfigMap in the same namespace."""
    key: _Path = _FILE
    """Key in it; `.gz` is unpacked."""


class PromptsOnClaim(ApiModel):
    """A file on a volume."""

    name: ObjectName
    """PersistentVolumeClaim in the same namespace, which the Job mounts beside the tier's own."""
    path: _Path = _FILE
    """File on it; `.gz` is unpacked."""


class PromptsFrom(ApiModel):
    """Where the prompts are."""

    config_map: PromptsInConfigMap | None = None
    """A ConfigMap, which holds 1 MiB."""
    claim: PromptsOnClaim | None = None
    """A volume."""

    rules = (Rule.exactly_one("config_map", "claim"),)

    @property
    def volume(self) -> dict[str, Any]:
        """Return the source of a pod's volume that has them."""
        if self.config_map is not None:
            return {"configMap": {"name": self.config_map.name}}
        assert self.claim is not None
        return {"persistentVolumeClaim": {"claimName": self.claim.name, "readOnly": True}}

    @property
    def file(self) -> str:
        """Return the path of the file on that volume."""
        if self.config_map is not None:
            return self.config_map.key
        assert self.claim is not None
        return self.claim.path


class Warm(ApiModel):
    """Prompts that a Job sends to the engines, with one token of answer each, until their blocks are on the volume."""

    prompts: PromptsFrom
    """Where they are: a line each, `{"messages": […]}` or `{"prompt": "…"}` with what else the OpenAI API takes."""
    required: StrictBool = False
    """Whether `Ready` waits for them. The condition `Warm` tells of them in any case. Engines serve meanwhile."""
    concurrency: Annotated[StrictInt, Field(ge=1, le=256)] = 4
    """Prompts that are sent at once."""
    timeout_seconds: Annotated[StrictInt, Field(ge=60, le=604_800)] = 21600
    """Seconds that it may take; six hours by default."""
    revision: Annotated[StrictStr, Field(min_length=1, max_length=63)] | None = None
    """Any text: another one has the prompts sent again, after their ConfigMap or file was changed."""
