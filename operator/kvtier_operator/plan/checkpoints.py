# SPDX-License-Identifier: Apache-2.0
"""Where a later prompt can go on from what it shares with an earlier one, for layers that do not keep every token.

Pure. A layer with a window keeps the last tokens, a Mamba or linear-attention layer one state. vLLM by itself keeps
those for the end of a prompt only, so of two prompts with much in common the second finds nothing that it can go on
from. Kept at places in between they cost memory and disk, which is why the places are chosen and told.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvtier_operator.plan import chunks
from kvtier_operator.plan.chunks import Chunking
from kvtier_operator.plan.engine_args import EngineArgs
from kvtier_operator.plan.model_layout import KvUnknown, ModelLayout, language_config

LEAST_INTERVAL_TOKENS: Final = 512
STEP_TOKENS: Final = 2048
"""What vLLM computes of a prompt in one step, where the model has states: it has a state at the end of a step."""

LARGEST_BLOCK_TOKENS: Final = 128
"""Attention kernels with blocks larger than vLLM's usual ones have this many tokens in one, at most. An interval that
is no multiple of the real block would keep the engine from starting."""

_INTERVAL_FLAG: Final = "prefix-cache-retention-interval"
_PIECES: Final = "attention_chunk_size"
_STEP_FLAG: Final = "long-prefill-token-threshold"
_NO_WINDOWS: Final = ("disable-sliding-window", "disable-hybrid-kv-cache-manager")


@dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """What the engine is told; None where nothing is."""

    window_interval: int | None = None
    """Tokens from one place where windows are kept to the next."""
    window_share: float = 0.0
    """Part of the KV of layers with a window that is kept so; what the tiers hold beside full attention."""
    step_tokens: int | None = None
    """Tokens of a prompt that one step computes at most; states are kept at the end of each."""
    is_set_by_user: bool = False
    """Whether ``spec.engine.args`` has one of the flags: then none is added."""

    def args(self) -> list[str]:
        """Return the flags of vLLM."""
        if self.step_tokens is not None:
            # Every state there is: steps decide how many. An interval would have to be a multiple of a block whose
            # size only the engine knows.
            return [f"--{_INTERVAL_FLAG}=None", f"--{_STEP_FLAG}={self.step_tokens}"]
        return [] if self.window_interval is None else [f"--{_INTERVAL_FLAG}={self.window_interval}"]


def choose(
    kv: ModelLayout | KvUnknown, chunking: Chunking, *, args: EngineArgs, config: Mapping[str, Any] | None
) -> Checkpoints:
    """Return the places that engines keep.

    Args:
        kv: what a token takes.
        chunking: the size of files.
        args: the flags of ``spec.engine.args``.
        config: the model's config.json, where that is known.
    """
    if isinstance(kv, KvUnknown) or not (kv.has_states or kv.layers.sliding):
        return Checkpoints()
    if args.has(_INTERVAL_FLAG, _STEP_FLAG):
        return Checkpoints(is_set_by_user=True)
    if kv.has_states:
        longest = _longest_prompt(args, config)
        return Checkpoints(step_tokens=STEP_TOKENS if longest is None else min(STEP_TOKENS, longest))
    # vLLM refuses an interval where no layer has a window that it keeps apart; one in pieces (Llama 4) is none.
    is_apart = not args.has(*_NO_WINDOWS) and not language_config(config or {}).get(_PIECES)
    tokens = chunks.tokens_of(chunking, kv)
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
