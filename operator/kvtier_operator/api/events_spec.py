# SPDX-License-Identifier: Apache-2.0
"""``spec.kvEvents`` of a KVCacheTier: what engines and the volume tell routers about their blocks. Pure."""

from __future__ import annotations

from typing import Final, Literal

from kvtier_operator.api.rules import ApiModel

EVENTS_PORT: Final = 5557
"""Where they are published. An engine of several data-parallel ranks takes the ports after it, too."""
REPLAY_PORT: Final = 5757
"""Where they are repeated to who missed some; as far away as ranks may count."""


class KvEvents(ApiModel):
    """KV events over ZeroMQ, as vLLM publishes them, for routers that know what lies where.

    Engines tell of their accelerator and host memory; the janitor tells of the volume, once for the whole tier.
    """

    block_hashes: Literal["Integers", "Bytes"] = "Integers"
    """How a block is named: `Integers`, the last 64 bits of its hash, as vLLM does by default; or `Bytes`, all of
    it."""
