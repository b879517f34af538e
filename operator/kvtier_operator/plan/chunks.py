# SPDX-License-Identifier: Apache-2.0
"""Tokens of one file on the volume, and the places in a prompt that engines keep. Pure.

Small files cost a round trip each, large ones are read for their first tokens only; between 4 and 8 MiB a volume gives
its full rate. The number is given to vLLM in blocks of the engine, because only the engine knows how many tokens its
block really has.

A layer with a window keeps the last tokens, a Mamba or linear-attention layer one state. By itself, vLLM keeps those
for the end of a prompt only. A prompt that parts from an earlier one before could not go on from it. Kept at places in
between they cost memory and disk. The function `choose_checkpoints` chooses the places.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvtier_operator.plan.engine_args import EngineArgs
from kvtier_operator.plan.model_layout import KvUnknown, ModelLayout, language_config

PAGE_BYTES: Final = 4096
"""Rows of the CPU tier, and so the payloads of files, are whole pages."""

HEADER_BYTES: Final = 4096
"""Bytes of a file beside its payload."""

MOST_AUTO_BYTES: Final = 8 << 20
"""The largest file that is chosen; with twice the tokens it would be larger, so it has more than half of this."""

MOST_AUTO_TOKENS: Final = 1024
"""A prompt shorter than a chunk is never kept, however small its KV."""


@dataclass(frozen=True, kw_only=True)
class Chunking:
    """Settings of the chunk for vLLM; both None leave it at one block."""

    tokens: int | None = None
    """``block_size`` of the connector: what the user asked for."""
    blocks: int | None = None
    """``blocks_per_chunk`` of the connector: what was chosen."""

    def settings(self) -> dict[str, int]:
        """Return the entries of vLLM's ``kv_connector_extra_config``."""
        if self.tokens is not None:
            return {"block_size": self.tokens}
        return {} if self.blocks is None else {"blocks_per_chunk": self.blocks}


def choose_chunking(kv: ModelLayout | KvUnknown, *, asked_tokens: int | None) -> Chunking:
    """Return the chunk that a spec gets."""
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


LEAST_INTERVAL_TOKENS: Final = 512
STEP_TOKENS: Final = 2048
"""Tokens of a prompt that vLLM computes in one step, where the model has states: it has one at the end of a step."""

LARGEST_BLOCK_TOKENS: Final = 128
"""Attention kernels with blocks larger than vLLM's usual ones have this many tokens in one, at most. An interval that
is no multiple of the real block would keep the engine from starting."""

_INTERVAL_FLAG: Final = "prefix-cache-retention-interval"
_PIECES: Final = "attention_chunk_size"
_STEP_FLAG: Final = "long-prefill-token-threshold"
_NO_WINDOWS: Final = ("disable-sliding-window", "disable-hybrid-kv-cache-manager")


@dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """Settings of the engine about places that it keeps; None leaves one to vLLM."""

    window_interval: int | None = None
    """Tokens from one place where windows are kept to the next."""
    window_share: float = 0.0
    """Part of the KV of layers with a window that is kept so; what the tiers hold beside full attention."""
    step_tokens: int | None = None
    """Tokens of a prompt that one step computes at most; states are kept at the end of each."""

    def args(self) -> list[str]:
        """Return the flags of vLLM."""
        if self.step_tokens is not None:
            # Every state there is: steps decide how many. An interval would have to be a multiple of a block whose
            # size only the engine knows.
            return [f"--{_INTERVAL_FLAG}=None", f"--{_STEP_FLAG}={self.step_tokens}"]
        return [] if self.window_interval is None else [f"--{_INTERVAL_FLAG}={self.window_interval}"]


def choose_checkpoints(
    kv: ModelLayout | KvUnknown, chunking: Chunking, *, args: EngineArgs, config: Mapping[str, Any] | None
) -> Checkpoints:
    """Return the places that engines keep."""
    is_set_by_user = args.has(_INTERVAL_FLAG, _STEP_FLAG)
    if isinstance(kv, KvUnknown) or is_set_by_user or not (kv.has_states or kv.layers.sliding):
        return Checkpoints()
    if kv.has_states:
        longest = _longest_prompt(args, config)
        return Checkpoints(step_tokens=STEP_TOKENS if longest is None else min(STEP_TOKENS, longest))
    # vLLM refuses an interval where no layer has a window that it keeps apart; one in pieces (Llama 4) is none.
    is_apart = not args.has(*_NO_WINDOWS) and not language_config(config or {}).get(_PIECES)
    tokens = tokens_of(chunking, kv)
    if tokens is None or kv.layers.window is None or not is_apart:
        return Checkpoints()
    # A later prompt needs the window before the place, in whole files.
    tail = math.ceil((kv.layers.window - 1) / tokens) * tokens
    least = tokens if chunking.blocks is None else math.lcm(tokens, chunking.blocks * LARGEST_BLOCK_TOKENS)
    interval = math.ceil(max(LEAST_INTERVAL_TOKENS, 2 * tail) / least) * least
    return Checkpoints(window_interval=interval, window_share=tail / interval)


def _longest_prompt(args: EngineArgs, config: Mapping[str, Any] | None) -> int | None:
    """Return the tokens of the longest prompt: a step may not be longer, or the engine does not start."""
    if args.max_model_len is not None:
        return args.max_model_len
    known = language_config(config or {}).get("max_position_embeddings")
    return known if isinstance(known, int) and known >= 1 else None
