# SPDX-License-Identifier: Apache-2.0
"""The verbs ``export`` and ``import``: a generation as a tar stream, for another volume or another cluster."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import IO, Any

import click

from kvtier_cli import answers, parameters
from kvtier_connector.janitor import transfer
from kvtier_connector.store.progress import counted, readable_size

_STREAM = click.Path(dir_okay=False, allow_dash=True)
_KEYS = click.Path(exists=True, file_okay=False)
_MOST_PROBLEMS = 20


@click.command("export")
@click.argument("source", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("file", type=_STREAM)
@click.option("--generation", help="which one, where there are several")
@click.option("--hottest", type=parameters.BYTES, help="only so much of it, as 100Gi: what would be evicted last")
@answers.output_option()
def export(source: Path, file: str, *, generation: str | None, hottest: int | None, output: str) -> int:
    """Write a generation of the tier in directory SOURCE to FILE, or to standard output (-), as a tar stream.

    Encrypted blocks stay encrypted. What is verified is what arrives: see import.
    """
    if file == "-":
        outcome = transfer.export(source, _nobody, to=sys.stdout.buffer, generation=generation, most_bytes=hottest)
        click.echo(_exported(outcome.document), err=True, nl=False)
        return outcome.status
    if Path(file).exists():
        raise click.UsageError(f"{file} is there already: name another, or remove it")
    with Path(file).open("wb") as stream, answers.progress() as tell:
        outcome = transfer.export(source, tell, to=stream, generation=generation, most_bytes=hottest)
    answers.show(outcome.document, output, lambda: _exported(outcome.document))
    return outcome.status


@click.command("import")
@click.argument("file", type=_STREAM)
@click.argument("target", type=click.Path(file_okay=False, path_type=Path))
@click.option("--keys-dir", type=_KEYS, help="keys of encrypted blocks; without them only headers are verified")
@answers.yes_option("write them")
@answers.output_option()
def import_(file: str, target: Path, *, keys_dir: str | None, yes: bool, output: str) -> int:
    """Read FILE, or standard input (-), into the tier's directory TARGET, and verify each block as it arrives.

    What is there already stays, so an import that was cut short is done again. Engines see the blocks when they start.
    Exit code 1: blocks were damaged, and were left out, or the stream was cut off.
    """
    if file != "-" and not Path(file).exists():
        raise click.UsageError(f"{file} is not there")
    with _opened(file) as stream, answers.progress() as tell:
        outcome = transfer.import_(target, tell, source=stream, keys_dir=keys_dir or "", yes=yes)
    answers.show(outcome.document, output, lambda: _imported(outcome.document))
    return outcome.status


def _opened(file: str) -> IO[bytes]:
    return sys.stdin.buffer if file == "-" else Path(file).open("rb")


def _nobody(_share: float, _blocks: int, _bytes: int) -> None:
    """Tell nobody: what goes to a pipe is read by a program."""


def _exported(document: dict[str, Any]) -> str:
    left = f"; {counted(document['leftOut'], 'block')} left out" if document["leftOut"] else ""
    there = f"{counted(document['blocks'], 'block')}, {readable_size(document['bytes'])}"
    return f"{document['generation']}: exported {there}{left}\n"


def _imported(document: dict[str, Any]) -> str:
    lines = [f"{each['path']}: {each['kind']}: left out" for each in document["damaged"][:_MOST_PROBLEMS]]
    if (more := document["damagedBlocks"] - len(lines)) > 0:
        lines.append(f"{counted(more, 'more damaged block')} left out")
    verb = "would import" if document["dryRun"] else "imported and verified"
    there = f"{counted(document['blocks'], 'block')}, {readable_size(document['bytes'])}"
    lines.append(f"{document['generation']}: {verb} {there}, to {document['to']}")
    if document["unverified"]:
        lines.append(f"of {counted(document['unverified'], 'encrypted block')} only header and length were verified")
    if document["present"]:
        lines.append(f"{counted(document['present'], 'block')} there already")
    if document["problem"]:
        lines.append(document["problem"])
    if document["dryRun"]:
        lines.append("nothing was written; add --yes to do it")
    return "\n".join(lines) + "\n"
