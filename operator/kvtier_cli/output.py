# SPDX-License-Identifier: Apache-2.0
"""Output, exit codes and options that the verbs share.

Answers go to standard output, as a page or as JSON or YAML. Progress goes to standard error.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import click

from kvtier_connector.store.scan import Tell
from kvtier_operator import quantity
from kvtier_operator.quantity import show_bytes

FINE: Final = 0
"""Exit code: all is well, or done."""
FOUND: Final = 1
"""Exit code: something was found, or could not be done."""
INTERRUPTED: Final = 130

FORMATS: Final = ("table", "json", "yaml")
Function = TypeVar("Function", bound=Callable[..., Any])

_STEPS: Final = 1000
"""Of a progress bar."""
_ESCAPES: Final = re.compile(r"\x1b\[[0-9;]*m")
_SIZE: Final = re.compile(r"[0-9]+(\.[0-9]+)?(k|M|G|T|Ki|Mi|Gi|Ti)?", re.ASCII)


def counted(count: int, noun: str) -> str:
    """Return a number with its noun."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


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

    from kvtier_cli.kubectl_yaml import Writer  # noqa: PLC0415  as above

    options: Any = {"sort_keys": False, "width": 10_000, "explicit_start": True, "allow_unicode": True}
    return yaml.dump_all(documents, Dumper=Writer, **options)  # type: ignore[no-any-return]  # as above


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

    def words(state: tuple[int, int] | None) -> str:
        count, size = state or (0, 0)
        return f"{counted(count, noun)}{f', {show_bytes(size)}' if size else ''}"

    is_shown = sys.stderr.isatty()
    with click.progressbar(length=_STEPS, item_show_func=words, file=sys.stderr, hidden=not is_shown) as bar:
        yield lambda share, count, size: bar.update(round(share * _STEPS) - bar.pos, (count, size))


def size(text: str) -> int:
    """Return the bytes of an option; refuse what is no size, with an example."""
    match = _SIZE.fullmatch(text)
    if match is None:
        hint = f"{text[:-1]} or {text[:-1]}i" if text[-1:] == "B" and _SIZE.fullmatch(text[:-1]) else "100Gi"
        raise click.BadParameter(f"{text!r} is no size; write it as {hint}")
    return quantity.parse_bytes(text)


def seconds(text: str) -> float:
    """Return the seconds of an option; refuse what is no time above 0, with examples."""
    with contextlib.suppress(ValueError):
        if found := quantity.parse_seconds(text):
            return found
    raise click.BadParameter(f"{text!r} is no time of more than 0; write it as 7d, 12h, 1h30m or 90s")


def share(text: str) -> float:
    """Return a percentage as a share of one; refuse anything else, with an example."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)%", text)
    if match is None or not 0 < float(match[1]) <= 100:  # noqa: PLR2004 - percent
        raise click.BadParameter(f"{text!r} is no share; write it as 90%")
    return float(match[1]) / 100
