# SPDX-License-Identifier: Apache-2.0
"""Types of options: sizes, times and shares as people write them, such as ``100Gi``, ``7d`` and ``90%``."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import click

_SIZES = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_TIMES = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_AMOUNT = re.compile(r"([0-9]+(?:\.[0-9]+)?)([A-Za-z]*)", re.ASCII)
_DURATION = re.compile(r"(?:[0-9]+(?:\.[0-9]+)?[smhdw])+", re.ASCII)


class _Reading(click.ParamType[Any]):
    """Reads a word with a function that raises for what it cannot read."""

    def __init__(self, name: str, read: Callable[[str], Any]) -> None:
        self.name = name
        self._read = read

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return self._read(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


def parse_size(text: str) -> int:
    """Return bytes; raises ValueError with the form that is meant."""
    match = _AMOUNT.fullmatch(text)
    if match is None or match[2] not in _SIZES:
        unit = text[-2:-1]
        hint = f"{text[:-1]} or {text[:-1]}i" if text[-1:] == "B" and unit in _SIZES and unit else "100Gi"
        raise ValueError(f"{text!r} is no size; write it as {hint}")
    return int(float(match[1]) * _SIZES[match[2]])


def parse_seconds(text: str) -> float:
    """Return seconds; raises ValueError with the form that is meant."""
    seconds = sum(float(amount) * _TIMES[unit] for amount, unit in _AMOUNT.findall(text) if unit in _TIMES)
    if _DURATION.fullmatch(text) is None or seconds <= 0:
        raise ValueError(f"{text!r} is no time of more than 0; write it as 7d, 12h, 1h30m or 90s")
    return seconds


def parse_share(text: str) -> float:
    """Return a share of one; raises ValueError with the form that is meant."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)%", text)
    if match is None or not 0 < float(match[1]) <= 100:  # noqa: PLR2004 - percent
        raise ValueError(f"{text!r} is no share; write it as 90%")
    return float(match[1]) / 100


SECONDS = _Reading("time", parse_seconds)
BYTES = _Reading("size", parse_size)
SHARE = _Reading("share", parse_share)
