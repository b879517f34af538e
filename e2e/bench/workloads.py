# SPDX-License-Identifier: Apache-2.0
"""The traffic that the benchmark plays: which prompts, in which order, which of them share a prefix. Pure.

A prompt is given as parts, each a seed and a number of tokens. Prompts that begin with the same parts share them, and
every part of a shared prefix is whole blocks long. The next turn of a conversation is fixed beforehand and does not
contain the answer. So every backend gets the same prompts whatever it answers, as in a recorded trace.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

Request = dict[str, Any]
"""A prompt as `engines` reads it."""

_CONVERSATION, _DOCUMENT, _BURST, _SHARED, _SINGLE, _NEVER, _WARM_UP = (
    place * 10_000_000 for place in (1, 2, 3, 4, 5, 7, 8)
)
NEXT_SEED = 90_000_000
"""Seeds of different workloads never meet, or one would find the blocks of another."""
_PARTS_OF_A_CONVERSATION = 100


class Cell(enum.StrEnum):
    """One measurement."""

    CONVERSATIONS = "A"
    """More conversations than GPU and CPU tier hold together."""
    FITTING = "B"
    """Conversations that the CPU tier holds, and the GPU does not."""
    SHORT = "C"
    """Many short prompts for the second time."""
    ARRIVALS = "D"
    """Prompts that come at fixed times after a restart."""
    SHARED = "E"
    """Prompts that come at once after a restart and share most of their tokens."""
    SINGLE = "single"
    """One prompt after another, after a restart."""
    NEVER = "never"
    """Prompts that were never asked before."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How large the workloads are."""

    conversations: int
    fitting_conversations: int
    turns: int
    first_tokens: int
    turn_tokens: int
    turn_output: int
    conversations_at_a_time: int
    short_prompts: int
    short_tokens: int
    short_output: int
    short_at_a_time: int
    arrivals: int
    arrivals_per_second: float
    arrival_tokens: int
    sharers: int
    shared_tokens: int
    own_tokens: int
    shared_output: int
    single_tokens: Sequence[int]
    single_repetitions: int
    single_output: int
    never_prompts: int
    never_tokens: int
    never_output: int
    never_at_a_time: int
    never_rounds: int


_SIZES = yaml.safe_load(Path(__file__).with_name("sizes.yaml").read_text())
GPU_SIZES = Sizes(**_SIZES["gpu"])
TINY_SIZES = Sizes(**_SIZES["cpu"])


def make_request(label: str, parts: list[tuple[int, int]], output_tokens: int, **more: Any) -> Request:
    """Return a prompt as `engines` reads it."""
    return {"label": label, "parts": parts, "output_tokens": output_tokens, **more}


def conversations(sizes: Sizes, count: int, *, first: int = 0) -> list[Request]:
    """Return the turns of so many conversations, from a number on, in the order of the turns."""
    return [
        make_request(
            f"turn {turn}",
            _turn(sizes, first + number, turn),
            sizes.turn_output,
            **({"after": (turn - 1) * count + number} if turn else {}),
        )
        for turn in range(sizes.turns)
        for number in range(count)
    ]


def _turn(sizes: Sizes, conversation: int, turn: int) -> list[tuple[int, int]]:
    seed = _CONVERSATION + conversation * _PARTS_OF_A_CONVERSATION
    return [(seed, sizes.first_tokens), *((seed + number, sizes.turn_tokens) for number in range(1, turn + 1))]


def short_prompts(sizes: Sizes, *, first: int = 0) -> list[Request]:
    """Return many prompts that share nothing."""
    numbers = range(first, first + sizes.short_prompts)
    return [make_request("short", [(_DOCUMENT + number, sizes.short_tokens)], sizes.short_output) for number in numbers]


def arrivals(sizes: Sizes) -> list[Request]:
    """Return prompts that start at fixed times, however long the others take."""
    return [
        make_request("arrival", [(_BURST + number, sizes.arrival_tokens)], 1, start=number / sizes.arrivals_per_second)
        for number in range(sizes.arrivals)
    ]


def sharers(sizes: Sizes, *, first: int = 0) -> list[Request]:
    """Return prompts that share a long prefix and end with parts of their own, numbered from a number on."""
    own = ((_SHARED + 1 + number, sizes.own_tokens) for number in range(first, first + sizes.sharers))
    return [make_request("sharer", [(_SHARED, sizes.shared_tokens), part], sizes.shared_output) for part in own]


def shared_prefix(sizes: Sizes) -> list[Request]:
    """Return the prompt that leaves the prefix of `sharers` on the volume, and nothing that is a sharer's own."""
    return [make_request("prefix", [(_SHARED, sizes.shared_tokens)], 1)]


def singles(sizes: Sizes) -> list[Request]:
    """Return prompts to be asked one at a time, the shortest first."""
    return [
        make_request(f"{tokens}", [(_SINGLE + place * 1000 + repetition, tokens)], sizes.single_output)
        for place, tokens in enumerate(sizes.single_tokens)
        for repetition in range(sizes.single_repetitions)
    ]


def never(sizes: Sizes, round_number: int) -> list[Request]:
    """Return prompts that no other round has."""
    first = _NEVER + round_number * sizes.never_prompts
    seeds = range(first, first + sizes.never_prompts)
    return [make_request("never", [(seed, sizes.never_tokens)], sizes.never_output) for seed in seeds]


def warm_up(sizes: Sizes) -> list[Request]:
    """Return prompts that let an engine compile and capture what it will need; they belong to no workload."""
    return [make_request("warm-up", [(_WARM_UP + tokens, tokens)], 4) for tokens in sizes.single_tokens[:2]]


def block_count(requests: list[Request], block_tokens: int) -> int:
    """Return how many different whole blocks the prompts have."""
    blocks: set[tuple[tuple[Any, ...], int]] = set()
    for request in requests:
        prefix: tuple[Any, ...] = ()
        for seed, tokens in request["parts"]:
            prefix = (*prefix, seed, tokens)
            blocks.update((prefix, number) for number in range(tokens // block_tokens))
    return len(blocks)
