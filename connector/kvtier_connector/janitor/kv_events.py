# SPDX-License-Identifier: Apache-2.0
"""The events of the volume as they go over the wire: vLLM's own (vllm.distributed.kv_events), field for field. Pure.

Routers that read engines' events (llm-d, Dynamo, vllm-router) read these with the same decoder. A test holds both
against each other.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

MEDIUM = "STORAGE"
"""vLLM's word for what lies on a volume."""
REMOTE = "REMOTE"
"""Relative to any engine: all of them read the volume, and it is on no node of theirs."""
BlockHash = bytes | int


class BlockStored(msgspec.Struct, omit_defaults=True, gc=False, tag=True, kw_only=True):
    """A block is on the volume."""

    block_hashes: list[BlockHash]
    """Of the last vLLM block in the chunk that the file holds."""
    parent_block_hash: BlockHash | None
    """Of the chunk before it; None for the first of a prefix, and where it is not known."""
    token_ids: list[int]
    """Always empty: the volume does not know them. Engines tell them with their own events of the same hashes."""
    block_size: int
    """Tokens of a chunk."""
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    # vLLM's decoder asks for those above, and not for those below.
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class BlockRemoved(msgspec.Struct, omit_defaults=True, gc=False, tag=True, kw_only=True):
    """Blocks are not on the volume any more."""

    block_hashes: list[BlockHash]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """What this publisher told so far is void; what there is follows."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class _Batch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: Sequence[Event]
    data_parallel_rank: int | None = None


def encode(events: Sequence[Event], *, seconds: float) -> bytes:
    """Return the payload of one message; `seconds` is the time since 1970."""
    return msgspec.msgpack.encode(_Batch(seconds, events, 0))


def shown(block_hash: bytes, *, is_integer: bool) -> BlockHash:
    """Return a hash as vLLM's events have it: its bytes, or its last 64 bits as a number."""
    return int.from_bytes(block_hash, "big") & ((1 << 64) - 1) if is_integer else block_hash
