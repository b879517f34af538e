# SPDX-License-Identifier: Apache-2.0
"""The prompts of a file, as requests to an engine: one JSON value a line, chat or text. Nothing of them is ever shown.

A line is ``{"messages": […]}`` or ``{"prompt": "…"}`` with whatever else the OpenAI API takes, a text in quotes, or a
line of an OpenAI batch file (``{"url": …, "body": {…}}``). Lines may be compressed (``.gz``).
"""

from __future__ import annotations

import gzip
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

from kvtier_connector.contract import NAMES_PARAMETER
from kvtier_connector.errors import ConfigInvalid

CHAT: Final = "/v1/chat/completions"
LONGEST_LINE: Final = 1 << 25
"""Characters; a prompt of a million tokens has a sixth of that, and the rest is for pictures."""
TEXT: Final = "/v1/completions"
_ABOUT_ANSWERS: Final = frozenset(
    {"stream", "stream_options", "max_tokens", "max_completion_tokens", "min_tokens", "stop", "n", "best_of", "echo"}
    | {"logprobs", "top_logprobs", "prompt_logprobs", "response_format", "structured_outputs", "temperature", "seed"}
)
"""Fields that say nothing of the prompt, and cost time or keep an answer of one token from being given."""


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One request."""

    line: int
    """Where it stands in the file, from 1."""
    path: str
    body: Mapping[str, Any]


def read(file: Path) -> Iterator[Prompt]:
    """Read a file.

    Raises:
        ConfigInvalid: a line is no prompt; names the line and what is wrong, not what it says.
        OSError: it cannot be read.
    """
    with _open(file) as lines:
        try:
            yield from parse(_lines(lines))
        except UnicodeDecodeError as error:
            raise ConfigInvalid(f"{file}: is no text in UTF-8") from error


def _lines(file: IO[str]) -> Iterator[str]:
    """Give the lines of a file; one without an end is not read to it."""
    for number in itertools.count(1):
        if not (line := file.readline(LONGEST_LINE + 1)):
            return
        if len(line) > LONGEST_LINE:
            raise ConfigInvalid(
                f"line {number}: has more than {LONGEST_LINE} characters; write one JSON value a line, and shorter ones"
            )
        yield line


def _open(file: Path) -> IO[str]:
    if file.suffix == ".gz":
        return gzip.open(file, "rt", encoding="utf-8")
    return file.open(encoding="utf-8")


def parse(lines: Iterable[str]) -> Iterator[Prompt]:
    """Read lines; empty ones count, and are left out."""
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield _parse(number, line)


def _parse(number: int, line: str) -> Prompt:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        # The library's own message has the text in it.
        place = f" at column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
        raise ConfigInvalid(f"line {number}: is no JSON{place}; write one JSON value a line") from None
    if isinstance(found, str):
        found = {"prompt": found}
    if not isinstance(found, dict):
        raise ConfigInvalid(f'line {number}: must be an object with "messages" or "prompt", or a text in quotes')
    if "body" in found:
        found = found["body"] if isinstance(found["body"], dict) else {}
    if ("messages" in found) == ("prompt" in found):
        raise ConfigInvalid(f'line {number}: must have one of "messages" and "prompt"')
    given = found.get("kv_transfer_params")
    if given is not None and not isinstance(given, dict):
        raise ConfigInvalid(f"line {number}: kv_transfer_params must be an object")
    is_chat = "messages" in found
    if is_chat and not (found["messages"] and isinstance(found["messages"], list)):
        raise ConfigInvalid(f"line {number}: messages must be a list, and have one message at least")
    if not is_chat and not (found["prompt"] and isinstance(found["prompt"], str | list)):
        raise ConfigInvalid(f"line {number}: prompt must be a text, or a list of tokens, and not empty")
    body = {name: value for name, value in found.items() if name not in _ABOUT_ANSWERS}
    body |= {"max_tokens": 1, "temperature": 0, "kv_transfer_params": {**(given or {}), NAMES_PARAMETER: True}}
    return Prompt(line=number, path=CHAT if is_chat else TEXT, body=body)
