# SPDX-License-Identifier: Apache-2.0
"""``spec.disk.admission`` of a KVCacheTier: which blocks are written to the volume, and which are read. Pure."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StrictBool, StrictInt

from kvtier_operator.spec.rules import ApiModel


class Admission(ApiModel):
    """Which blocks are worth writing to the volume and reading from it."""

    min_reuse: Annotated[StrictInt, Field(ge=1, le=100, json_schema_extra={"format": "int32"})] = 1
    """Write a block when an engine offers it for this many-th time. `1` writes every block. `2` writes a fraction,
    which pays only where the budget holds a small part of what is used, or where writes are scarce: what is not written
    the first time cannot be read the second time."""
    cost_aware: StrictBool = True
    """Whether an engine computes a prompt again where it measures that this is quicker than reading it. It measures
    both while it serves, and tries the other way now and then. `false` always reads."""
    min_tokens: Annotated[StrictInt, Field(ge=0, le=10_000_000, json_schema_extra={"format": "int32"})] = 0
    """Hits on the volume of fewer tokens are computed again. `0` leaves it to `costAware` alone."""
