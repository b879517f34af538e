# SPDX-License-Identifier: Apache-2.0
"""The verbs about blocks: inspect, check, purge and gc, each on a tier by name or on a directory, and their pages."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, Final

import click

from kvtier_cli import client
from kvtier_cli import output as answers
from kvtier_cli import output as parameters
from kvtier_cli.output import columns, duration
from kvtier_connector.contract.errors import ConfigInvalid
from kvtier_connector.store.fsck import OLDER
from kvtier_connector.store.scan import PARTIAL_AGE_SECONDS, counted, readable_size

Document = Mapping[str, Any]
_MOST_THREADS: Final = 64
_MOST_TENANTS: Final = 20
"""The largest, on a page; JSON has all."""
_NOTHING: Final = "nothing yet: no engine has stored a block"
_OTHERS: Final = {"partials": "partial file", "quarantined": "quarantined file"}
_THREADS = click.IntRange(1, _MOST_THREADS)
_TARGET = click.argument("target", metavar="TIER|DIR")
_KEYS = click.Path(exists=True, file_okay=False)
_GC_OPTIONS: Final = {
    "max_bytes": "--max-bytes",
    "high_watermark": "--high",
    "low_watermark": "--low",
    "ttl_seconds": "--ttl",
    "keep_previous": "--keep-previous",
}
"""Fields of the janitor's document, and the options that replace them."""


def _threads(default: int) -> Callable[[answers.Function], answers.Function]:
    return click.option(
        "--threads", type=_THREADS, default=default, show_default=True, help="directories or files read at once"
    )


def _do(verb: str, target: str, cluster: dict[str, str], output: str, options: dict[str, Any]) -> int:
    with answers.progress() as tell:
        outcome = client.do(verb, target, client.Where(**cluster), options, tell)
    answers.show(outcome.document, output, lambda: _PAGES[verb](outcome.document))
    return outcome.status


@click.command
@_TARGET
@_threads(4)
@answers.output_option()
@client.cluster_options
def inspect(target: str, *, threads: int, output: str, **cluster: str) -> int:
    """Count what lies on a volume: names, sizes and times; no block is read.

    TIER is a tier's name, reached through its janitor; DIR a directory of a tier, a generation, or any above. Exit
    code 1: not all could be looked at.
    """
    return _do("inspect", target, cluster, output, {"threads": threads})


@click.command
@_TARGET
@click.option("--keys-dir", type=_KEYS, help="keys of encrypted blocks, one file each; without them only headers count")
@click.option(
    "--partial-age",
    type=parameters.SECONDS,
    default=f"{PARTIAL_AGE_SECONDS:.0f}s",
    show_default=True,
    help="partial files younger than this belong to a writer at work",
)
@_threads(min(16, 2 * (os.cpu_count() or 1)))
@answers.output_option()
@client.cluster_options
def check(target: str, *, keys_dir: str | None, partial_age: float, threads: int, output: str, **cluster: str) -> int:
    """Verify every byte of every block, and list what is wrong. Changes nothing.

    Exit code 1 if there are problems.
    """
    if keys_dir and not client.is_directory(target, client.Where(**cluster)):
        raise click.UsageError(
            "--keys-dir is for a directory: keys stay where they are, and the janitor of a tier has none"
        )
    options = {"keys_dir": keys_dir, "partial_age_seconds": partial_age, "threads": threads}
    return _do("check", target, cluster, output, options)


@click.command
@_TARGET
@click.option("--generation", help="of this generation alone")
@click.option("--tenant", help="of this tenant alone; '' for the common blocks")
@click.option("--lora", metavar="NAME", help="of this adapter alone, whatever weights it had")
@click.option("--all", "is_all", is_flag=True, help="everything")
@answers.yes_option("remove them")
@_threads(8)
@answers.output_option()
@client.cluster_options
def purge(  # noqa: PLR0913 - options
    target: str,
    *,
    generation: str | None,
    tenant: str | None,
    lora: str | None,
    is_all: bool,
    yes: bool,
    threads: int,
    output: str,
    **cluster: str,
) -> int:
    """Remove blocks by generation, tenant or adapter, or all; without --yes only say what would go.

    Several options mean the blocks that match each of them. Partial and quarantined files go along. Engines may be at
    work: what goes is a miss for them, and what they had queued does not come back. Exit code 1 if not all could be
    removed.
    """
    chosen = {"generation": generation, "tenant": tenant, "lora": lora}
    if all(each is None for each in chosen.values()) is not is_all:
        raise click.UsageError("say what is to go: --generation, --tenant, --lora, or else --all")
    return _do("purge", target, cluster, output, {**chosen, "yes": yes, "threads": threads})


@click.command
@_TARGET
@click.option(
    "--config",
    type=click.Path(exists=True, dir_okay=False),
    help="the janitor's document, for a directory; options go first, and a tier's own is taken for a tier",
)
@click.option("--max-bytes", type=parameters.BYTES, help="budget of the tier, as 100Gi")
@click.option("--high", "high_watermark", type=parameters.SHARE, help="evict above it  [default: 90%]")
@click.option("--low", "low_watermark", type=parameters.SHARE, help="evict down to it  [default: 75%]")
@click.option("--ttl", "ttl_seconds", type=parameters.SECONDS, help="remove what is older, as 7d")
@click.option("--keep-previous", type=click.IntRange(0), help="previous generations that stay  [default: all]")
@click.option("--current", help="the generation in use  [default: the newest]")
@answers.yes_option("remove it")
@answers.output_option()
@client.cluster_options
def gc(target: str, *, config: str | None, yes: bool, output: str, **others: Any) -> int:
    """Do once, and now, what the janitor does all the time; without --yes only say what would go."""
    where = {name: others.pop(name) for name in ("namespace", "context", "kubeconfig")}
    if config and not client.is_directory(target, client.Where(**where)):
        raise click.UsageError("--config is for a directory: a tier has its own document")
    limits = {name: value for name, value in others.items() if value is not None}
    if {"low_watermark", "high_watermark"} <= set(limits) and limits["low_watermark"] >= limits["high_watermark"]:
        raise click.UsageError(f"--low {limits['low_watermark']} must be below --high {limits['high_watermark']}")
    try:
        return _do("gc", target, where, output, {"config": config, "limits": limits, "yes": yes})
    except ConfigInvalid as error:
        message = str(error).removeprefix("janitor.json: ")
        for name, option in _GC_OPTIONS.items():
            message = message.replace(f"{name}=", f"{option} ")
        raise ConfigInvalid(message) from error


def _inspect_page(document: Document) -> str:
    """Return the counts first, then each generation."""
    volume = document["volume"]
    generations = document["generations"]
    head = (
        f"{counted(document['blocks'], 'block')}, {readable_size(document['bytes'])}, in "
        f"{counted(len(generations), 'generation')}\n"
        f"volume: {readable_size(volume['free'])} free of {readable_size(volume['bytes'])}\n"
    )
    if not generations:
        return f"{_NOTHING}\n{head}"
    return head + "".join(_generation(each) for each in generations)


def _generation(document: Document) -> str:
    rows = [("blocks", _heap(document["blocks"]))]
    if document["problem"]:
        rows.insert(0, ("problem", document["problem"]))
    if document["oldestSeconds"] is not None:
        written = f"{duration(document['newestSeconds'])} to {duration(document['oldestSeconds'])} ago"
        rows.append(("written", written))
        rows += [
            ("  over 30 d" if name == OLDER else f"  up to {name}", _heap(heap))
            for name, heap in document["ages"].items()
            if heap["files"]
        ]
    tenants = sorted(document["tenants"].items(), key=lambda item: (-item[1]["bytes"], item[0]))
    if tenants:
        rows.append(("tenants", str(len(tenants))))
        rows += [(f"  {name}", _heap(heap)) for name, heap in tenants[:_MOST_TENANTS]]
    rows += [(name, _heap(heap, "file")) for name, heap in document["leftovers"].items() if heap["files"]]
    rows.append(("journals", _heap(document["journals"], "file")))
    rows += [(name, str(value)) for name, value in sorted(document["identity"].items())]
    return f"\n{document['path']}\n{columns(rows, indent=2)}"


def _heap(heap: Document, noun: str = "block") -> str:
    return f"{counted(heap['files'], noun)}, {readable_size(heap['bytes'])}"


def _check_page(document: Document) -> str:
    """Return each problem, and the counts last, where they stay on the screen."""
    problems = document["problems"]
    lines = [f"{each['path'] or '.'}: {each['kind']}: {each['message']}" for each in problems]
    count = sum(document["problemsByKind"].values())
    if count > len(problems):
        lines.append(f"and {count - len(problems)} more")
    if document["unverified"]:
        lines.append(_sealed(document["unverified"]))
    if document["compressed"]:
        saved = readable_size(document["savedBytes"])
        lines.append(f"{counted(document['compressed'], 'block')} compressed, which saves {saved}")
    if not document["blocks"] and not count:
        lines.append(_NOTHING)
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(document["problemsByKind"].items()))
    lines.append(
        f"{counted(document['blocks'], 'block')}, {readable_size(document['bytes'])}, "
        f"{counted(count, 'problem')}" + (f": {kinds}" if kinds else "")
    )
    return "\n".join(lines) + "\n"


def _sealed(blocks: int) -> str:
    return f"{counted(blocks, 'block')} encrypted with a key that was not given: see --keys-dir"


def _purge_page(document: Document) -> str:
    """Return what went, or would."""
    verb = "would remove" if document["dryRun"] else "removed"
    lines = []
    for each in document["generations"]:
        others = [f"{counted(each[kind], name)}" for kind, name in _OTHERS.items() if each[kind]]
        files = " and ".join([counted(each["blocks"], "block"), *others])
        lines.append(f"{each['path']}: {verb} {files}, {readable_size(each['bytes'])}")
        if each["problem"]:
            lines.append(f"{each['path']}: not all of it: {each['problem']}")
    if not document["generations"]:
        lines.append(_NOTHING)
    lines.append(f"{verb} {counted(document['blocks'], 'block')}, {readable_size(document['bytes'])}")
    return "\n".join([*lines, *_dry(document)]) + "\n"


def _gc_page(document: Document) -> str:
    """Return what went, or would, and why."""
    verb = "would remove" if document["dryRun"] else "removed"
    lines = [f"{verb} {counted(count, 'block')}: {reason}" for reason, count in document["evicted"].items()]
    lines += [f"removed {counted(count, 'leftover')}: {kind}" for kind, count in document["removedLeftovers"].items()]
    if not document["evicted"]:
        lines.append("nothing is above its limits" if document["blocks"] else _NOTHING)
    lines += [f"problem: {each}" for each in document["problems"]]
    lines.append(f"{counted(document['blocks'], 'block')}, {readable_size(document['bytes'])} on the volume")
    return "\n".join([*lines, *(_dry(document) if document["evicted"] else [])]) + "\n"


def _dry(document: Document) -> list[str]:
    return ["nothing was removed; add --yes to do it"] if document["dryRun"] else []


_PAGES: Final[Mapping[str, Callable[[Document], str]]] = {
    "inspect": _inspect_page,
    "check": _check_page,
    "purge": _purge_page,
    "gc": _gc_page,
}
