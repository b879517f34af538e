# SPDX-License-Identifier: Apache-2.0
"""``spec.disk`` of a KVCacheTier: the tier on the volume. Pure."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import Field, StrictInt

from kvtier_operator import quantity
from kvtier_operator.spec.admission import Admission
from kvtier_operator.spec.rules import ApiModel, Checked, Rule
from kvtier_operator.spec.scalars import ByteQuantity

WHOLE_BLOCKS: Final = Rule(
    cel="self % 16 == 0",
    message="must be a multiple of 16, the smallest block of vLLM",
    check=lambda tokens: tokens % 16 == 0,
)


class Budget(ApiModel):
    """How much of the volume the blocks may take."""

    max_size: Annotated[ByteQuantity | None, Field(alias="maxBytes")] = None
    """Storage that the blocks of this tier may take, such as `1800Gi`; at most the size of the claim. Engines stop
    storing there. No limit if left out: then the volume itself is the limit."""

    @property
    def max_bytes(self) -> int | None:
        """Return `max_size` in bytes; None is no limit."""
        return None if self.max_size is None else quantity.parse_bytes(self.max_size)


class Disk(ApiModel):
    """The tier on the volume."""

    mode: Literal["ReadWrite", "ReadOnly", "Bypass"] = "ReadWrite"
    """What engines use the volume for: `ReadOnly` loads and stores nothing, `Bypass` does not touch it. Engines follow
    as fast as the kubelet refreshes a ConfigMap, in a minute or two; none restarts."""
    budget: Budget = Budget()
    """How much of the volume the blocks may take."""
    block_tokens: Annotated[StrictInt, Field(ge=16, le=65536), Checked((WHOLE_BLOCKS,))] | None = None
    """Tokens of one file, a multiple of vLLM's own block size. Left out, it is chosen so that a file has 4 to 16 MiB,
    or is one block of vLLM for a model whose KV is unknown. Changing it starts a new cache generation."""
    admission: Admission = Admission()
    """Which blocks are worth writing to the volume and reading from it."""
