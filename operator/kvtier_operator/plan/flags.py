# SPDX-License-Identifier: Apache-2.0
"""Read the flags a user adds to the engine's command line.

Pure. vLLM's parser accepts ``--flag value``, ``--flag=value``, underscores for dashes and ``--flag.key value`` for JSON
options; whoever asks here about a flag gets the same answer for all of these spellings.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

_MOST_DIGITS: Final = 4
"""Of a number of engines, stages or tokens in a block; what is longer is a mistake."""

_SHORT: Final = {
    "ac": "attention-config",
    "dcp": "decode-context-parallel-size",
    "dp": "data-parallel-size",
    "dpl": "data-parallel-size-local",
    "pcp": "prefill-context-parallel-size",
    "pp": "pipeline-parallel-size",
    "q": "quantization",
    "sc": "speculative-config",
    "tp": "tensor-parallel-size",
}


def parse(args: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Return every flag with the words that follow it, in order; repeated flags add up."""
    found: dict[str, tuple[str, ...]] = {}
    flag = ""
    for word in args:
        if word.startswith("-") and not _is_number(word):
            text, has_value, value = word.lstrip("-").partition("=")
            flag, has_key, key = text.partition(".")
            flag = _SHORT.get(flag, flag.replace("_", "-"))
            words = ((f".{key}",) if has_key else ()) + ((value,) if has_value else ())
            found[flag] = found.get(flag, ()) + words
        elif flag:
            found[flag] = (*found[flag], word)
    return found


def engines_per_pod(args: Sequence[str]) -> int:
    """Return how many engine cores one pod runs (data parallelism); each of them has a CPU tier of its own."""
    found = parse(args)
    return count(found, "data-parallel-size-local", default=count(found, "data-parallel-size"))


def last(found: Mapping[str, tuple[str, ...]], flag: str) -> str | None:
    """Return the value that vLLM goes by: the last one given; None where there is none."""
    words = found.get(flag)
    return words[-1] if words else None


def count(found: Mapping[str, tuple[str, ...]], flag: str, *, default: int = 1) -> int:
    """Return the whole number of at least 1 that a flag was given, or the default."""
    word = last(found, flag) or ""
    return max(1, int(word)) if word.isascii() and word.isdecimal() and len(word) <= _MOST_DIGITS else default


def _is_number(word: str) -> bool:
    return word[1:2].isdigit() or word[1:2] == "."
