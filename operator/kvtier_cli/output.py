# SPDX-License-Identifier: Apache-2.0
"""Output, exit codes and options that the verbs share.

Answers go to standard output, as a page or as JSON or YAML. Progress goes to standard error.
"""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import click

from kvtier_connector.store.scan import Tell, counted, readable_size

FINE: Final = 0
"""Exit code: all is well, or done."""
FOUND: Final = 1
"""Exit code: something was found, or could not be done."""
INTERRUPTED: Final = 130

FORMATS: Final = ("table", "json", "yaml")
Function = TypeVar("Function", bound=Callable[..., Any])

_REDRAW_SECONDS: Final = 0.2
_FIRST_ETA_SECONDS: Final = 2.0
_SPINNER: Final = "|/-\\"
_ESCAPES: Final = re.compile(r"\x1b\[[0-9;]*m")
_SIZES = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_TIMES = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_AMOUNT = re.compile(r"([0-9]+(?:\.[0-9]+)?)([A-Za-z]*)", re.ASCII)
_DURATION = re.compile(r"(?:[0-9]+(?:\.[0-9]+)?[smhdw])+", re.ASCII)


def output_option(default: str = "table") -> Callable[[Function], Function]:
    """Give a verb ``-o``, as its parameter `output_format`."""
    return click.option(
        "-o",
        "--output",
        "output_format",
        type=click.Choice(FORMATS),
        default=default,
        show_default=True,
        help="format of the answer",
    )


def yes_option(verb: str) -> Callable[[Function], Function]:
    """Give a verb ``--yes``, without which it changes nothing."""
    return click.option("--yes", is_flag=True, help=f"{verb}; without it the command only shows the effect")


def examples(*lines: str) -> str:
    """Return the end of a verb's help: commands to copy."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


def show(document: Any, output_format: str, page: Callable[[], str]) -> None:
    """Print a document in the format that was asked for."""
    if output_format == "json":
        click.echo(json.dumps(document, indent=2))
    elif output_format == "yaml":
        click.echo(as_yaml([document]), nl=False)
    else:
        click.echo(page(), nl=False)


def as_yaml(documents: Sequence[Any]) -> str:
    """Return objects as YAML: fields in their order, texts of several lines as blocks, no aliases."""
    import yaml  # noqa: PLC0415  JSON and pages do without it

    class Dumper(yaml.SafeDumper):
        """A subclass, so that other users of the library keep their output."""

        def ignore_aliases(self, data: object) -> bool:  # noqa: ARG002  the library's signature
            """Write a repeated value in full."""
            return True

    def represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)

    Dumper.add_representer(str, represent_text)
    return yaml.dump_all(
        documents, Dumper=Dumper, sort_keys=False, width=10_000, explicit_start=True, allow_unicode=True
    )


def columns(rows: Sequence[Sequence[str]], *, indent: int = 0) -> str:
    """Align the cells of rows, whose colours take no width; the last cell of a row may have any length."""
    widths = [max(_width(row[place]) for row in rows if len(row) > place) for place in range(max(map(len, rows)) - 1)]
    lines = (
        "  ".join(
            [*(cell + " " * (width - _width(cell)) for cell, width in zip(row[:-1], widths, strict=False)), row[-1]]
        )
        for row in rows
    )
    return "".join(f"{' ' * indent}{line.rstrip()}\n" for line in lines)


def _width(cell: str) -> int:
    return len(_ESCAPES.sub("", cell))


def duration(seconds: float) -> str:
    """Return a time in its largest unit."""
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def tell_step(text: str) -> None:
    """Print a step of long work on standard error, if that is a terminal."""
    if sys.stderr.isatty():
        click.echo(text, err=True)


@contextmanager
def progress(noun: str = "block") -> Iterator[Tell]:
    """Yield a function that is told the progress of work, and show it on standard error if that is a terminal."""
    if not sys.stderr.isatty():
        yield lambda _share, _count, _bytes: None
        return
    line = _Line(noun)
    line.start()
    try:
        yield line.tell
    finally:
        line.end()


class _Line:
    """One line that a thread of its own redraws, so that it moves also while nothing is told.

    `tell` stores the last progress; the thread alone writes to standard error.
    """

    def __init__(self, noun: str) -> None:
        self._noun = noun
        self._began = time.monotonic()
        self._state = (0.0, 0, 0)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._draw, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def tell(self, share: float, count: int, size: int) -> None:
        self._state = (share, count, size)

    def end(self) -> None:
        self._is_over.set()
        self._thread.join()

    def _draw(self) -> None:
        drawn = 0
        while not self._is_over.wait(_REDRAW_SECONDS):
            drawn += 1
            sys.stderr.write(f"\r\x1b[K{_SPINNER[drawn % len(_SPINNER)]} {self._text()}")
            sys.stderr.flush()
        sys.stderr.write("\r\x1b[K")
        sys.stderr.flush()

    def _text(self) -> str:
        share, count, size = self._state
        took = time.monotonic() - self._began
        text = f"{duration(took)}  {share:4.0%}  {counted(count, self._noun)}"
        if size:
            text += f", {readable_size(size)}, {readable_size(size / max(took, 1e-3))}/s"
        if took >= _FIRST_ETA_SECONDS and share > 0:
            text += f", {duration(took / share - took)} left"
        return text


class _Amount(click.ParamType[Any]):
    """A type of option, read by a function that raises ValueError."""

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
    """Return bytes.

    Raises:
        ValueError: the text is no size; the message has an example.
    """
    match = _AMOUNT.fullmatch(text)
    if match is None or match[2] not in _SIZES:
        unit = text[-2:-1]
        hint = f"{text[:-1]} or {text[:-1]}i" if text[-1:] == "B" and unit in _SIZES and unit else "100Gi"
        raise ValueError(f"{text!r} is no size; write it as {hint}")
    return int(float(match[1]) * _SIZES[match[2]])


def parse_seconds(text: str) -> float:
    """Return seconds.

    Raises:
        ValueError: the text is no time above 0; the message has examples.
    """
    seconds = sum(float(amount) * _TIMES[unit] for amount, unit in _AMOUNT.findall(text) if unit in _TIMES)
    if _DURATION.fullmatch(text) is None or seconds <= 0:
        raise ValueError(f"{text!r} is no time of more than 0; write it as 7d, 12h, 1h30m or 90s")
    return seconds


def parse_share(text: str) -> float:
    """Return a share of one.

    Raises:
        ValueError: the text is no percentage; the message has an example.
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)%", text)
    if match is None or not 0 < float(match[1]) <= 100:  # noqa: PLR2004 - percent
        raise ValueError(f"{text!r} is no share; write it as 90%")
    return float(match[1]) / 100


SECONDS = _Amount("time", parse_seconds)
BYTES = _Amount("size", parse_size)
SHARE = _Amount("share", parse_share)
