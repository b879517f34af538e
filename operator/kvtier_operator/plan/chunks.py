# SPDX-License-Identifier: Apache-2.0
"""How many tokens one file on the volume holds.

Pure. Small files cost a round trip each, large ones are read for their first tokens only; between 4 and 16 MiB a volume
gives its full rate. The number is given to vLLM in blocks of the engine, because only the engine knows how many tokens
its block really has; whoever sets the number of tokens instead has vLLM check it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvtier_operator.plan.model_layout import KvUnknown, ModelLayout

PAGE_BYTES: Final = 4096
"""Rows of the CPU tier, and so the payloads of files, are whole pages."""

HEADER_BYTES: Final = 4096
"""What a file holds beside its payload."""

MOST_AUTO_BYTES: Final = 8 << 20
"""The largest file that is chosen; with twice the tokens it would be larger, so it has more than half of this."""

MOST_AUTO_TOKENS: Final = 1024
"""A prompt shorter than a chunk is never kept, however small its KV."""


@dataclass(frozen=True, kw_only=True)
class Chunking:
    """What vLLM is told; both None leave it at one block."""

    tokens: int | None = None
    """``block_size`` of the connector: what the user asked for."""
    blocks: int | None = None
    """``blocks_per_chunk`` of the connector: what was chosen."""

    def settings(self) -> dict[str, int]:
        """Return the entries of vLLM's ``kv_connector_extra_config``."""
        if self.tokens is not None:
            return {"block_size": self.tokens}
        return {} if self.blocks is None else {"blocks_per_chunk": self.blocks}


def choose(kv: ModelLayout | KvUnknown, *, asked_tokens: int | None) -> Chunking:
    """Return the chunk that a spec gets.

    Args:
        kv: what a token takes.
        asked_tokens: ``spec.disk.blockTokens``.
    """
    if asked_tokens is not None:
        return Chunking(tokens=asked_tokens)
    # A block that holds a state is large already, and vLLM offers the tail of a prompt only for single blocks.
    if isinstance(kv, KvUnknown) or kv.block_tokens is None or kv.has_states:
        return Chunking()
    blocks = 1
    while (
        2 * blocks * kv.block_tokens * kv.group_bytes <= MOST_AUTO_BYTES
        and 2 * blocks * kv.block_tokens <= MOST_AUTO_TOKENS
    ):
        blocks *= 2
    return Chunking(blocks=blocks)


def tokens_of(chunking: Chunking, kv: ModelLayout) -> int | None:
    """Return the tokens of one chunk; None where only the engine knows."""
    if chunking.tokens is not None:
        return chunking.tokens
    return None if kv.block_tokens is None else (chunking.blocks or 1) * kv.block_tokens


def bytes_of(tokens: int, kv: ModelLayout) -> int:
    """Return the bytes of one chunk in the CPU tier: the payload of one file."""
    return -(-tokens * kv.group_bytes // PAGE_BYTES) * PAGE_BYTES


def held_tokens(capacity_bytes: int, kv: ModelLayout, *, chunk_tokens: int, on_disk: bool = False) -> int:
    """Return how many tokens of prompts fit into that many bytes, states left aside."""
    each = bytes_of(chunk_tokens, kv) + (HEADER_BYTES if on_disk else 0)
    return capacity_bytes // (kv.attention_groups * each) * chunk_tokens
