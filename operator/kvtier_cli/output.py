# SPDX-License-Identifier: Apache-2.0
"""The exit codes that every verb keeps to.

How verbs answer: a page for people, or the same as JSON or YAML; and on standard error, how far long work is.

Types of options: sizes, times and shares as people write them, such as ``100Gi``, ``7d`` and ``90%``.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import click

from kvtier_connector.store.scan import Tell, counted, readable_size

FINE: Final = 0
"""All is well, or done."""
FOUND: Final = 1
"""Something was found, or could not be done."""
MISUSED: Final = 2
"""The command line is wrong; nothing was done."""
INTERRUPTED: Final = 130


Function = TypeVar("Function", bound=Callable[..., Any])

FORMATS: Final = ("table", "json", "yaml")
_SHOW_SECONDS: Final = 0.2
_FIRST_ETA_SECONDS: Final = 2.0


def output_option(default: str = "table") -> Callable[[Function], Function]:
    """Give a verb ``-o``."""
    return click.option(
        "-o", "--output", type=click.Choice(FORMATS), default=default, show_default=True, help="how to answer"
    )


def yes_option(verb: str) -> Callable[[Function], Function]:
    """Give a verb ``--yes``, without which it does nothing."""
    return click.option("--yes", is_flag=True, help=f"{verb}; otherwise it only says what would be done")


def show(document: Any, output: str, page: Callable[[], str]) -> None:
    """Print a document, as a page for people unless something else was asked for."""
    if output == "json":
        click.echo(json.dumps(document, indent=2))
    elif output == "yaml":
        click.echo(as_yaml([document]), nl=False)
    else:
        click.echo(page(), nl=False)


def as_yaml(documents: Sequence[Any]) -> str:
    """Write objects as people do: whole, in the order of their fields, texts of several lines as blocks."""
    import yaml  # noqa: PLC0415  JSON and pages do without it

    class Dumper(yaml.SafeDumper):
        """A dumper of its own, so that nobody else's output changes."""

        def ignore_aliases(self, data: object) -> bool:  # noqa: ARG002  the library's signature
            """Write what occurs twice, twice."""
            return True

    def represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)

    Dumper.add_representer(str, represent_text)
    return yaml.dump_all(
        documents, Dumper=Dumper, sort_keys=False, width=10_000, explicit_start=True, allow_unicode=True
    )


def columns(rows: Sequence[Sequence[str]], *, indent: int = 0) -> str:
    """Align the words of rows, the last of which may be as long as it likes."""
    widths = [max(len(row[place]) for row in rows if len(row) > place) for place in range(max(map(len, rows)) - 1)]
    lines = (
        "  ".join([*(word.ljust(width) for word, width in zip(row[:-1], widths, strict=False)), row[-1]])
        for row in rows
    )
    return "".join(f"{' ' * indent}{line.rstrip()}\n" for line in lines)


@contextmanager
def progress(noun: str = "block") -> Iterator[Tell]:
    """Return whom to tell how far long work is: one line on standard error, if that is a terminal."""
    if not sys.stderr.isatty():
        yield lambda _share, _blocks, _bytes: None
        return
    line = _Line(noun)
    try:
        yield line.tell
    finally:
        line.end()


class _Line:
    """One line that is written over and over."""

    def __init__(self, noun: str) -> None:
        self._noun = noun
        self._began = self._next = time.monotonic()

    def tell(self, share: float, blocks: int, size: int) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + _SHOW_SECONDS
        took = now - self._began
        text = f"{share:4.0%}  {counted(blocks, self._noun)}"
        if size:
            text += f", {readable_size(size)}, {readable_size(size / max(took, 1e-3))}/s"
        if took >= _FIRST_ETA_SECONDS and share > 0:
            text += f", {duration(took / share - took)} left"
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()

    def end(self) -> None:
        sys.stderr.write("\r\x1b[K")
        sys.stderr.flush()


def duration(seconds: float) -> str:
    """Return a time that people can judge."""
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


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
