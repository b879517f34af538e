# SPDX-License-Identifier: Apache-2.0
"""The verbs ``export``, ``import`` and ``clone``: a generation goes to another volume, or to another cluster."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import IO, Any

import click

from kvtier_cli import answers, carrying, parameters, targets, volume_pages
from kvtier_connector.janitor import chores
from kvtier_connector.store.progress import Tell, counted, readable_size

_STREAM = click.Path(dir_okay=False, allow_dash=True)
_KEYS = click.Path(exists=True, file_okay=False)
_MOST_PROBLEMS = 20


@click.command("export")
@click.argument("source", metavar="TIER|DIR")
@click.argument("file", type=_STREAM)
@click.option("--generation", help="which one, where there are several")
@click.option("--hottest", type=parameters.BYTES, help="only so much of it, as 100Gi: what would be evicted last")
@answers.output_option()
@targets.cluster_options
def export(source: str, file: str, *, generation: str | None, hottest: int | None, output: str, **cluster: str) -> int:
    """Write a generation of a tier to FILE, or to standard output (-), as a tar stream.

    TIER is a tier's name, reached through its janitor; DIR a directory of a tier or of a generation. Encrypted blocks
    stay encrypted. What is verified is what arrives: see import.
    """
    end = _end(source, targets.Where(**cluster), "export")
    if file == "-":
        outcome = end.export(sys.stdout.buffer, _nobody, generation=generation, most_bytes=hottest)
        click.echo(_exported(outcome.document), err=True, nl=False)
        return outcome.status
    if Path(file).exists():
        raise click.UsageError(f"{file} is there already: name another, or remove it")
    end.find()
    try:
        with Path(file).open("xb") as stream, answers.progress() as tell:
            outcome = end.export(stream, tell, generation=generation, most_bytes=hottest)
    except FileExistsError:
        raise
    except BaseException:
        # What is cut off is of no use to an import, and would stand in the way of the next export.
        Path(file).unlink(missing_ok=True)
        raise
    answers.show(outcome.document, output, lambda: _exported(outcome.document))
    return outcome.status


@click.command("import")
@click.argument("file", type=_STREAM)
@click.argument("target", metavar="TIER|DIR")
@click.option("--keys-dir", type=_KEYS, help="keys of encrypted blocks; without them only headers are verified")
@answers.yes_option("write them")
@answers.output_option()
@targets.cluster_options
def import_(file: str, target: str, *, keys_dir: str | None, yes: bool, output: str, **cluster: str) -> int:
    """Read FILE, or standard input (-), into a tier, and verify each block as it arrives.

    TIER is a tier's name, reached through its janitor; DIR a tier's directory: one that is new is written with a slash.
    What is there already stays, so an import that was cut short is done again. Engines see the blocks when they start.
    Exit code 1: blocks were damaged, and were left out, or the stream was cut off.
    """
    if file != "-" and not Path(file).exists():
        raise click.UsageError(f"{file} is not there")
    end = _end(target, targets.Where(**cluster), "import")
    with _opened(file) as stream, answers.progress() as tell:
        outcome = end.import_(stream, _of_file(stream, tell), keys_dir=keys_dir or "", yes=yes)
    answers.show(outcome.document, output, lambda: _imported(outcome.document))
    return outcome.status


@click.command
@click.argument("source", metavar="SOURCE")
@click.argument("target", metavar="TARGET")
@click.option("--generation", help="which one, where there are several")
@click.option("--keys-dir", type=_KEYS, help="keys of encrypted blocks; without them only headers are verified")
@click.option("--to-namespace", default="", help="namespace of TARGET  [default: that of SOURCE]")
@click.option("--to-context", default="", help="context of TARGET  [default: that of SOURCE]")
@click.option("--threads", type=click.IntRange(1, 64), default=8, show_default=True, help="files copied at once")
@answers.yes_option("copy")
@answers.output_option()
@targets.cluster_options
def clone(  # noqa: PLR0913 - options
    source: str,
    target: str,
    *,
    generation: str | None,
    keys_dir: str | None,
    to_namespace: str,
    to_context: str,
    threads: int,
    yes: bool,
    output: str,
    **cluster: str,
) -> int:
    """Copy a generation from one tier to another, and verify each block as it arrives.

    SOURCE and TARGET are names of tiers, reached through their janitors, or directories. What goes from or to a tier
    passes through this machine, also without --yes. Between directories on one file system that can, copies share
    their bytes; one that is new is written with a slash. What is there already stays, so a clone that was cut short
    goes on. Engines see the blocks when they start. Exit code 1: blocks were damaged, and were left behind.
    """
    where = targets.Where(**cluster)
    there = targets.Where(
        namespace=to_namespace or where.namespace,
        context=to_context or where.context,
        kubeconfig=where.kubeconfig,
    )
    ends = _end(source, where, "export"), _end(target, there, "import")
    with answers.progress() as tell:
        if all(end.is_directory for end in ends):
            options = {"to": target, "generation": generation, "keys_dir": keys_dir or "", "yes": yes}
            outcome = chores.do("clone", Path(source), {**options, "threads": threads}, tell)
        else:
            outcome = carrying.carry(*ends, tell, generation=generation, keys_dir=keys_dir or "", yes=yes)
    page = volume_pages.PAGES["clone"] if all(end.is_directory for end in ends) else _imported
    answers.show(outcome.document, output, lambda: page(outcome.document))
    return outcome.status


def _end(target: str, where: targets.Where, verb: str) -> carrying.End:
    return carrying.End(target, where, targets.is_directory(target, where, may_be_new=verb == "import"), verb)


def _opened(file: str) -> IO[bytes]:
    return sys.stdin.buffer if file == "-" else Path(file).open("rb")


def _of_file(stream: IO[bytes], tell: Tell) -> Tell:
    """Return one who is told of the share of a file that was read; of a pipe, nobody knows the length."""
    if not stream.seekable():
        return tell
    size = os.fstat(stream.fileno()).st_size

    def told(_share: float, blocks: int, count: int) -> None:
        tell(min(1.0, stream.tell() / size) if size else 1.0, blocks, count)

    return told


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
