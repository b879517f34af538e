# SPDX-License-Identifier: Apache-2.0
"""The classes of the matrix, read from `cases.yaml`. Pure data.

A class that vLLM's CPU build cannot run names what it needs; the same script runs it on a GPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import yaml
from e2e.engines.weights import SHAPES, Shape
from pydantic import BaseModel

CHUNK_TOKENS: Final = 128
GPU_BLOCK_TOKENS: Final = 16
PICTURE_TOKENS: Final = 16
"""Tokens that each of these models makes of a picture."""


class ModelClass(BaseModel, frozen=True, extra="forbid"):
    """One row of the matrix."""

    name: str
    title: str
    shape: str
    gpu_shape: str = ""
    """Shape for a GPU, if another."""
    args: tuple[str, ...] = ()
    """Flags of both engines."""
    gpu_args: tuple[str, ...] = ()
    """Flags beside those, on a GPU."""
    reader_args: tuple[str, ...] = ()
    """Flags of the engine that reads, beside those."""
    block_tokens: int | None = CHUNK_TOKENS
    """`disk.blockTokens`; None leaves it to the operator."""
    asks: str = "plain"
    """How prompts are asked: plain, salted, embedded, lora or image."""
    picture_at: int = 0
    """Token of the prompt before which its picture stands."""
    loras: tuple[str, ...] = ()
    """Names of adapters; the first one is written anew at the end."""
    pair_tokens: int = 1200
    """Of each of two prompts with two thirds in common."""
    at_once: int = 1
    """Requests that the reader has at a time."""
    reader_tokens: int = 0
    """Tokens of the reader's answers, where they are to be longer than those that are compared."""
    must_preempt: bool = False
    """Whether the reader is to run out of blocks while it answers."""
    ranks: tuple[int, int] = (1, 1)
    """Tensor parallelism of the engine that writes and of the one that reads."""
    sleeps: bool = False
    """Whether the first engine gives up its memory, reads its weights anew and answers once more."""
    is_plain: bool = False
    """Whether it is another class without what the operator sets, to compare with."""
    draft: str = ""
    """Shape of a draft model."""
    draft_method: str = "draft_model"
    """As vLLM names it: draft_model or eagle."""
    cpu_verdict: str = "works"
    """Verdict on the CPU build."""
    needs: str = ""
    """Feature that the CPU build lacks; empty if the class runs there."""
    module: str = ""
    """Python module that vLLM imports for it, and that its CPU build comes without."""

    @property
    def has_other_ranks(self) -> bool:
        """Whether the reader adds up in another order than the writer, and needs the canonical layout."""
        return self.ranks[0] != self.ranks[1]

    @property
    def is_drafting(self) -> bool:
        """Whether tokens of an answer are guessed, and checked several at a time."""
        return bool(self.draft) or any(flag.startswith("--speculative-config") for flag in self.args)

    @property
    def is_eagle(self) -> bool:
        """Whether vLLM computes the last block of a hit again: what drafts looks at what the model computed there."""
        return self.draft_method == "eagle" or any('"method":"mtp"' in flag for flag in self.args)

    def shape_on(self, device: str) -> Shape:
        """Return the fields of the model's config.json."""
        return SHAPES[self.gpu_shape if device != "cpu" and self.gpu_shape else self.shape]


_DOCUMENT: Final = yaml.safe_load(Path(__file__).with_name("cases.yaml").read_text())
CLASSES: Final = tuple(ModelClass(name=name, **fields) for name, fields in _DOCUMENT["classes"].items())
