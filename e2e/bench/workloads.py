# SPDX-License-Identifier: Apache-2.0
"""The traffic that the benchmark plays: which prompts, in which order, which of them share a prefix. Pure.

A prompt is given as parts, each a seed and a number of tokens. Prompts that begin with the same parts share them, and
every part of a shared prefix is whole blocks long. The next turn of a conversation is fixed beforehand and does not
contain the answer. So every backend gets the same prompts whatever it answers, as in a recorded trace.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

Request = dict[str, Any]
"""A prompt as `engines` reads it."""

_CONVERSATION, _DOCUMENT, _BURST, _SHARED, _SINGLE, _USER, _NEVER, _WARM_UP = (
    place * 10_000_000 for place in range(1, 9)
)
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
    USERS = "users"
    """Users with long prompts who return together, after a restart."""
    NEVER = "never"
    """Prompts that were never asked before."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How large the workloads are."""

    conversations: int = 40
    fitting_conversations: int = 24
    turns: int = 4
    first_tokens: int = 8192
    turn_tokens: int = 512
    turn_output: int = 64
    conversations_at_a_time: int = 12
    short_prompts: int = 800
    short_tokens: int = 512
    short_output: int = 16
    short_at_a_time: int = 48
    arrivals: int = 8
    arrivals_per_second: float = 4.0
    arrival_tokens: int = 10240
    sharers: int = 50
    shared_tokens: int = 10240
    own_tokens: int = 128
    shared_output: int = 128
    single_tokens: tuple[int, ...] = (2048, 8192, 32768)
    single_repetitions: int = 3
    single_output: int = 8
    users: int = 8
    user_tokens: int = 32768
    never_prompts: int = 96
    never_tokens: int = 1024
    never_output: int = 128
    never_at_a_time: int = 32
    never_rounds: int = 3


GPU_SIZES = Sizes()
TINY_SIZES = Sizes(
    conversations=4,
    fitting_conversations=2,
    turns=2,
    first_tokens=512,
    turn_tokens=128,
    turn_output=4,
    conversations_at_a_time=2,
    short_prompts=6,
    short_tokens=256,
    short_output=2,
    short_at_a_time=3,
    arrivals=2,
    arrival_tokens=512,
    sharers=3,
    shared_tokens=512,
    own_tokens=128,
    shared_output=4,
    single_tokens=(256, 1024),
    single_repetitions=1,
    single_output=4,
    users=2,
    user_tokens=512,
    never_prompts=3,
    never_tokens=256,
    never_output=4,
    never_at_a_time=2,
    never_rounds=1,
)
"""Small enough for two cores, in blocks of 128 tokens."""


def conversations(sizes: Sizes, count: int, *, first: int = 0) -> list[Request]:
    """Return the turns of so many conversations, from a number on, in the order of the turns."""
    return [
        {
            "label": f"turn {turn}",
            "parts": _turn(sizes, first + number, turn),
            "output_tokens": sizes.turn_output,
            **({"after": (turn - 1) * count + number} if turn else {}),
        }
        for turn in range(sizes.turns)
        for number in range(count)
    ]


def _turn(sizes: Sizes, conversation: int, turn: int) -> list[tuple[int, int]]:
    seed = _CONVERSATION + conversation * _PARTS_OF_A_CONVERSATION
    return [(seed, sizes.first_tokens), *((seed + number, sizes.turn_tokens) for number in range(1, turn + 1))]


def short_prompts(sizes: Sizes, *, first: int = 0) -> list[Request]:
    """Return many prompts that share nothing."""
    return [
        {
            "label": "short",
            "parts": [(_DOCUMENT + first + number, sizes.short_tokens)],
            "output_tokens": sizes.short_output,
        }
        for number in range(sizes.short_prompts)
    ]


def arrivals(sizes: Sizes) -> list[Request]:
    """Return prompts that start at fixed times, however long the others take."""
    return [
        {
            "label": "arrival",
            "parts": [(_BURST + number, sizes.arrival_tokens)],
            "output_tokens": 1,
            "start": number / sizes.arrivals_per_second,
        }
        for number in range(sizes.arrivals)
    ]


def sharers(sizes: Sizes, *, first: int = 0) -> list[Request]:
    """Return prompts that share a long prefix and end with parts of their own, numbered from a number on."""
    return [
        {
            "label": "sharer",
            "parts": [(_SHARED, sizes.shared_tokens), (_SHARED + 1 + first + number, sizes.own_tokens)],
            "output_tokens": sizes.shared_output,
        }
        for number in range(sizes.sharers)
    ]


def shared_prefix(sizes: Sizes) -> list[Request]:
    """Return the prompt that leaves the prefix of `sharers` on the volume, and nothing that is a sharer's own."""
    return [{"label": "prefix", "parts": [(_SHARED, sizes.shared_tokens)], "output_tokens": 1}]


def singles(sizes: Sizes) -> list[Request]:
    """Return prompts to be asked one at a time, the shortest first."""
    return [
        {
            "label": f"{tokens}",
            "parts": [(_SINGLE + place * 1000 + repetition, tokens)],
            "output_tokens": sizes.single_output,
        }
        for place, tokens in enumerate(sizes.single_tokens)
        for repetition in range(sizes.single_repetitions)
    ]


def users(sizes: Sizes) -> list[Request]:
    """Return the prompts of users who all come at once."""
    return [
        {"label": "user", "parts": [(_USER + number, sizes.user_tokens)], "output_tokens": sizes.single_output}
        for number in range(sizes.users)
    ]


def never(sizes: Sizes, round_number: int) -> list[Request]:
    """Return prompts that no other round has."""
    first = _NEVER + round_number * sizes.never_prompts
    return [
        {"label": "never", "parts": [(first + number, sizes.never_tokens)], "output_tokens": sizes.never_output}
        for number in range(sizes.never_prompts)
    ]


def warm_up(sizes: Sizes) -> list[Request]:
    """Return prompts that let an engine compile and capture what it will need; they belong to no workload."""
    return [
        {"label": "warm-up", "parts": [(_WARM_UP + tokens, tokens)], "output_tokens": 4}
        for tokens in sizes.single_tokens[:2]
    ]


def block_count(requests: list[Request], block_tokens: int) -> int:
    """Return how many different whole blocks the prompts have."""
    blocks: set[tuple[tuple[Any, ...], int]] = set()
    for request in requests:
        prefix: tuple[Any, ...] = ()
        for seed, tokens in request["parts"]:
            prefix = (*prefix, seed, tokens)
            blocks.update((prefix, number) for number in range(tokens // block_tokens))
    return len(blocks)
