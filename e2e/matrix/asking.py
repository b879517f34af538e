# SPDX-License-Identifier: Apache-2.0
"""The prompts that every class of the matrix is asked. Pure: the same numbers in every process."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

STEMS: Final = 4
PROMPTS_A_STEM: Final = 8
_STEM_TOKENS: Final = 768
_FIRST_TOKEN: Final = 8
"""Those below may have a meaning for the model."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt, and what it is asked with."""

    tokens: tuple[int, ...]
    salt: str = ""
    lora: str = ""
    """Name of an adapter."""
    image: int | None = None
    """Seed of the picture that goes with the prompt."""
    embedding: int | None = None
    """Seed of the table by which the prompt is given as embeddings; None where it is given as tokens."""
    transfer: Mapping[str, Any] | None = None
    """Parameters by which a proxy names another engine's blocks to the connector."""


def tokens(count: int, vocabulary: int, *, seed: int) -> tuple[int, ...]:
    """Return random tokens; those of one seed begin alike."""
    chooser = random.Random(seed)
    return tuple(chooser.randrange(_FIRST_TOKEN, vocabulary) for _ in range(count))


def prompts(vocabulary: int) -> list[tuple[int, ...]]:
    """Return prompts of differing lengths; each shares its beginning with others."""
    made = []
    for stem in range(STEMS):
        trunk = tokens(_STEM_TOKENS, vocabulary, seed=stem)
        for number in range(PROMPTS_A_STEM):
            shared = trunk[: number * _STEM_TOKENS // PROMPTS_A_STEM]
            own = tokens(140 + 23 * number + 11 * stem, vocabulary, seed=100 + stem * PROMPTS_A_STEM + number)
            made.append(shared + own)
    return made


def cut(
    made: Sequence[tuple[int, ...]], *, chunk: int, block: int, spare: int = 0, ahead: int = 0
) -> list[tuple[int, ...]]:
    """Cut prompts so that a cache of small blocks finds as much of each as one of large chunks.

    Args:
        made: the prompts.
        chunk: tokens of a chunk.
        block: tokens of a block; some remain behind the last chunk, at most a block of them.
        spare: tokens more, for an engine that computes the last block of a hit again.
        ahead: tokens that will be put before each prompt.
    """
    wholes = [len(each) + ahead - 1 for each in made]
    lengths = [whole // chunk * chunk + 1 + whole % block - ahead for whole in wholes]
    return [
        each[:length] + each[length - chunk : length - chunk + spare]
        for each, length in zip(made, lengths, strict=True)
    ]


def sharing(vocabulary: int, length: int) -> list[tuple[int, ...]]:
    """Return four prompts that have two thirds in common."""
    common = tokens(length * 2 // 3, vocabulary, seed=900)
    return [common + tokens(length - len(common), vocabulary, seed=901 + number) for number in range(4)]


def twins(vocabulary: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return two prompts that end alike after beginnings that differ: a model that looks back answers differently."""
    tail = tokens(100, vocabulary, seed=910)
    return tokens(400, vocabulary, seed=911) + tail, tokens(400, vocabulary, seed=912) + tail
