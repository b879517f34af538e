# SPDX-License-Identifier: Apache-2.0
"""The verbs about blocks: inspect, check, purge and gc, on a tier by name or on a directory, and their pages.

A directory is worked on here. A tier is worked on inside the pod of its janitor, by the same code
(`kvtier_connector.janitor.commands`), with the same document as answer. A target with a slash, or one that is a
directory here, is a directory; with ``-n`` every target is the name of a tier.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import click
from click.shell_completion import CompletionItem

from kvtier_cli import client, output
from kvtier_cli.client import Where
from kvtier_cli.output import columns, counted, duration
from kvtier_connector.contract.errors import ConfigInvalid
from kvtier_connector.contract.janitor import JANITOR_CONFIG_FILE
from kvtier_connector.janitor import commands
from kvtier_connector.store.fsck import OLDER
from kvtier_connector.store.scan import Tell
from kvtier_operator import names
from kvtier_operator.errors import ClusterUnavailable
from kvtier_operator.quantity import show_bytes

Document = Mapping[str, Any]
CONFIG: Final = f"{names.JANITOR_CONFIG_MOUNT}/{JANITOR_CONFIG_FILE}"
"""Path of the janitor's document in its pod."""
_MODULE: Final = "kvtier_connector.janitor.commands"
_FOR_USE: Final = frozenset({"gc"})
"""Commands that only make sense on blocks that engines use."""
_MOST_THREADS: Final = 64
_MOST_TENANTS: Final = 20
"""Tenants on a page, the largest first; JSON has all."""
_NOTHING: Final = "nothing yet: no engine has stored a block"
_OTHERS: Final = {"partials": "partial file", "quarantined": "quarantined file"}
_KEYS = click.Path(exists=True, file_okay=False)
_GC_OPTIONS: Final = {
    "max_bytes": "--max-bytes",
    "high_watermark": "--high",
    "low_watermark": "--low",
    "ttl_seconds": "--ttl",
    "keep_previous": "--keep-previous",
}
"""Fields of the janitor's document, and the options that replace them."""


def _complete(context: click.Context, parameter: click.Parameter, begun: str) -> list[CompletionItem]:
    return [*client.complete_tier(context, parameter, begun), CompletionItem(begun, type="dir")]


_TARGET = click.argument("target", metavar="TIER|DIR", shell_complete=_complete)


def _threads(default: int) -> Callable[[output.Function], output.Function]:
    return click.option(
        "--threads",
        type=click.IntRange(1, _MOST_THREADS),
        default=default,
        show_default=True,
        help="directories or files read at once",
    )


def _run(verb: str, target: str, where: Where, output_format: str, options: dict[str, Any], **page: Any) -> int:
    with output.progress() as tell:
        status, document = do(verb, target, where, options, tell)
    output.show(document, output_format, lambda: _PAGES[verb](document, **page))
    return status


@click.command(epilog=output.examples("kvtier inspect llama", "kvtier inspect /mnt/kv/ai.llama --verbose"))
@_TARGET
@click.option("-v", "--verbose", is_flag=True, help="also the identity of each generation, from its tier.json")
@_threads(4)
@output.output_option()
@client.cluster_options
def inspect(target: str, *, verbose: bool, threads: int, output_format: str, where: Where) -> int:
    """Count the blocks on a volume by names, sizes and times, without reading a block.

    TIER is a tier's name, reached through its janitor; DIR a directory of a tier, a generation, or any above. Exit
    code 1: a part could not be read.
    """
    return _run("inspect", target, where, output_format, {"threads": threads}, is_verbose=verbose)


@click.command(
    epilog=output.examples("kvtier check llama", "kvtier check /mnt/kv/ai.llama --keys-dir /etc/kvtier-keys")
)
@_TARGET
@click.option("--keys-dir", type=_KEYS, help="keys of encrypted blocks, one file each; without them only headers count")
@_threads(min(16, 2 * (os.cpu_count() or 1)))
@output.output_option()
@client.cluster_options
def check(target: str, *, keys_dir: str | None, threads: int, output_format: str, where: Where) -> int:
    """Verify every byte of every block, and list the problems. Changes nothing.

    Exit code 1: there are problems.
    """
    if keys_dir and not is_directory(target, where):
        raise click.UsageError("--keys-dir is for a directory: the janitor of a tier has no keys, so they stay here")
    return _run("check", target, where, output_format, {"keys_dir": keys_dir, "threads": threads})


@click.command(epilog=output.examples("kvtier purge llama --tenant acme --yes", "kvtier purge llama --all"))
@_TARGET
@click.option("--generation", help="only of this generation")
@click.option("--tenant", help="only of this tenant; '' for blocks of no tenant")
@click.option("--lora", metavar="NAME", help="only of this adapter, whatever weights it had")
@click.option("--all", "is_all", is_flag=True, help="everything")
@output.yes_option("remove them")
@_threads(8)
@output.output_option()
@client.cluster_options
def purge(target: str, *, is_all: bool, output_format: str, where: Where, **options: Any) -> int:
    """Remove blocks by generation, tenant or adapter, or all; without --yes only show the effect.

    Several options select the blocks that match all of them. Partial and quarantined files go along. Engines may be at
    work: they miss the removed blocks, and what they had queued does not come back. Exit code 1: a part could not be
    removed.
    """
    if all(options[name] is None for name in ("generation", "tenant", "lora")) is not is_all:
        raise click.UsageError("say what is to go: --generation, --tenant, --lora, or else --all")
    return _run("purge", target, where, output_format, options)


@click.command(epilog=output.examples("kvtier gc llama", "kvtier gc /mnt/kv/ai.llama --max-bytes 100Gi --ttl 7d --yes"))
@_TARGET
@click.option(
    "--config",
    type=click.Path(exists=True, dir_okay=False),
    help="the janitor's document, for a directory; options win over it, and a tier has its own",
)
@click.option("--max-bytes", type=output.size, help="budget of the tier, as 100Gi")
@click.option("--high", "high_watermark", type=output.share, help="evict above it  [default: 90%]")
@click.option("--low", "low_watermark", type=output.share, help="evict down to it  [default: 75%]")
@click.option("--ttl", "ttl_seconds", metavar="TIME", type=output.seconds, help="remove older blocks, as 7d")
@click.option("--keep-previous", type=click.IntRange(0), help="previous generations that stay  [default: all]")
@click.option("--current", help="the generation in use  [default: the newest]")
@output.yes_option("remove them")
@output.output_option()
@client.cluster_options
def gc(target: str, *, config: str | None, yes: bool, output_format: str, where: Where, **options: Any) -> int:
    """Run one sweep of the janitor now; without --yes only show the effect. Exit code 1: a part could not be done."""
    if config and not is_directory(target, where):
        raise click.UsageError("--config is for a directory: a tier has its own document")
    limits = {name: value for name, value in options.items() if value is not None}
    if {"low_watermark", "high_watermark"} <= set(limits) and limits["low_watermark"] >= limits["high_watermark"]:
        raise click.UsageError(f"--low {limits['low_watermark']} must be below --high {limits['high_watermark']}")
    try:
        return _run("gc", target, where, output_format, {"config": config, "limits": limits, "yes": yes})
    except ConfigInvalid as error:
        message = str(error).removeprefix("janitor.json: ")
        for name, option in _GC_OPTIONS.items():
            message = message.replace(f"{name}=", f"{option} ")
        raise ConfigInvalid(message) from error


def is_directory(target: str, where: Where) -> bool:
    """Return whether a target is a directory and not a tier."""
    if where.namespace:
        return False
    if Path(target).is_dir():
        return True
    if "/" in target or target == ".":
        raise click.UsageError(f"{target} is no directory; a tier is named without a slash, and its namespace by -n")
    return False


def do(verb: str, target: str, where: Where, options: Mapping[str, Any], tell: Tell) -> tuple[int, Document]:
    """Run a command on a tier or a directory."""
    options = {name: value for name, value in options.items() if value is not None}
    if is_directory(target, where):
        return commands.do(verb, Path(target), options, tell)
    if verb == "gc":
        # The limits of the tier, from the document of its janitor.
        options = {"config": CONFIG, **options}
    return _do_in_pod(target, where, {"verb": verb, "config": CONFIG, "options": options}, tell)


def _do_in_pod(tier: str, where: Where, request: Mapping[str, Any], tell: Tell) -> tuple[int, Document]:
    pod = janitor_pod(tier, where, str(request["verb"]))
    answer: dict[str, Any] = {}
    stray: list[str] = []

    def hear(line: str) -> None:
        try:
            found = json.loads(line)
        except ValueError:
            stray.append(line)
            return
        if "progress" in found:
            tell(*found["progress"])
        else:
            answer.update(found)

    command = ["python3", "-m", _MODULE, json.dumps(request)]
    code, complaint = where.client.execute(pod, names.JANITOR_CONTAINER, command, hear)
    if not answer:
        said = " ".join([*stray, complaint]).strip()[-500:] or "nothing"
        raise ClusterUnavailable(
            f"the janitor of {tier} ({pod['metadata']['name']}) ended with {code} and said {said}. An image of another "
            "release may not know this verb, and one that was killed may need more memory: spec.janitor.resources"
        )
    if "error" in answer:
        raise ConfigInvalid(answer["error"])
    return answer["status"], answer["document"]


def _why_not(body: names.Manifest, verb: str) -> str | None:
    """Return why the connector of a tier rules a command out; None if it does not."""
    connector = body["spec"].get("connector") or {}
    kind, nixl = connector.get("type", "Bundled"), (connector.get("hybrid") or {}).get("nixl")
    if kind == "VLLMTiering":
        # Blocks from before a change of the connector are still there, and nothing else removes them.
        if verb not in _FOR_USE:
            return None
        return (
            f"spec.connector.type {kind} has files of vLLM's own on the volume, which {verb} cannot read. The janitor "
            "keeps them within spec.disk.budget. inspect, check and purge work on blocks of kvtier's connector"
        )
    if kind != "Bundled" and nixl is None:
        return f"spec.connector.type {kind} keeps nothing on a shared volume"
    if nixl is not None and nixl.get("blocksOf"):
        return f"its blocks are those of tier {nixl['blocksOf']} (spec.connector.hybrid.nixl.blocksOf): name that one"
    return None


def janitor_pod(tier: str, where: Where, verb: str) -> names.Manifest:
    """Return the running janitor of a tier, for a command."""
    try:
        namespace = where.asked_namespace
    except ClusterUnavailable as error:
        text = f"{tier} is no directory here, and as the name of a tier it takes a cluster: {error}"
        raise ClusterUnavailable(text) from error
    body = where.client.tier(namespace, tier)
    if (why := _why_not(body, verb)) is not None:
        raise ClusterUnavailable(f"tier {tier}: {why}")
    for pod in where.client.pods(namespace, tier, names.COMPONENT_JANITOR):
        if pod.get("status", {}).get("phase") == "Running" and "deletionTimestamp" not in pod["metadata"]:
            return pod  # type: ignore[no-any-return]  # Where.client
    if not (body["spec"].get("janitor") or {}).get("enabled", True):
        raise ClusterUnavailable(
            f"tier {tier} has no janitor (spec.janitor.enabled: false), through whose pod its volume is reached: run "
            "this on a directory, where the volume is mounted"
        )
    raise ClusterUnavailable(
        f"the janitor of tier {tier}, through whose pod its volume is reached, does not run now: kubectl get pods -n "
        f"{namespace} -l {names.LABEL_TIER}={tier}"
    )


def _inspect_page(document: Document, *, is_verbose: bool) -> str:
    """Return the counts, then each generation."""
    volume, generations = document["volume"], document["generations"]
    head = (
        f"{counted(document['blocks'], 'block')}, {show_bytes(document['bytes'])}, in "
        f"{counted(len(generations), 'generation')}\n"
        f"volume: {show_bytes(volume['free'])} free of {show_bytes(volume['bytes'])}\n"
    )
    if not generations:
        return f"{_NOTHING}\n{head}"
    return head + "".join(_generation(each, is_verbose=is_verbose) for each in generations)


def _generation(document: Document, *, is_verbose: bool) -> str:
    rows = [("blocks", _heap(document["blocks"]))]
    if document["problem"]:
        rows.insert(0, ("problem", document["problem"]))
    if document["oldestSeconds"] is not None:
        rows.append(("written", f"{duration(document['newestSeconds'])} to {duration(document['oldestSeconds'])} ago"))
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
    rows += [(name, str(value)) for name, value in sorted(document["identity"].items()) if is_verbose]
    return f"\n{document['path']}\n{columns(rows, indent=2)}"


def _heap(heap: Document, noun: str = "block") -> str:
    return f"{counted(heap['files'], noun)}, {show_bytes(heap['bytes'])}"


def _check_page(document: Document) -> str:
    """Return each problem, and the counts last, next to the prompt of the shell."""
    problems = document["problems"]
    lines = [f"{each['path'] or '.'}: {each['kind']}: {each['message']}" for each in problems]
    count = sum(document["problemsByKind"].values())
    if count > len(problems):
        lines.append(f"and {count - len(problems)} more")
    sealed, packed = (counted(document[name], "block") for name in ("unverified", "compressed"))
    if document["unverified"]:
        lines.append(f"{sealed} encrypted with a key that was not given: see --keys-dir")
    if document["compressed"]:
        lines.append(f"{packed} compressed, which saves {show_bytes(document['savedBytes'])}")
    if not document["blocks"] and not count:
        lines.append(_NOTHING)
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(document["problemsByKind"].items()))
    total = f"{counted(document['blocks'], 'block')}, {show_bytes(document['bytes'])}, {counted(count, 'problem')}"
    return "\n".join([*lines, f"{total}: {kinds}" if kinds else total]) + "\n"


def _purge_page(document: Document) -> str:
    """Return the removed blocks, or those that would be removed, and the total of several generations."""
    verb = "would remove" if document["dryRun"] else "removed"
    lines = []
    for each in document["generations"]:
        others = [f"{counted(each[kind], name)}" for kind, name in _OTHERS.items() if each[kind]]
        files = " and ".join([counted(each["blocks"], "block"), *others])
        lines.append(f"{each['path']}: {verb} {files}, {show_bytes(each['bytes'])}")
        if each["problem"]:
            lines.append(f"{each['path']}: not all of it: {each['problem']}")
    if not document["generations"]:
        lines.append(_NOTHING)
    if len(document["generations"]) > 1:
        lines.append(f"{verb} {counted(document['blocks'], 'block')}, {show_bytes(document['bytes'])}")
    return "\n".join([*lines, *_dry(document)]) + "\n"


def _gc_page(document: Document) -> str:
    """Return the evicted blocks by reason."""
    verb = "would remove" if document["dryRun"] else "removed"
    lines = [f"{verb} {counted(count, 'block')}: {reason}" for reason, count in document["evicted"].items()]
    lines += [f"removed {counted(count, 'leftover')}: {kind}" for kind, count in document["removedLeftovers"].items()]
    if not document["evicted"]:
        lines.append("nothing is above its limits" if document["blocks"] else _NOTHING)
    lines += [f"problem: {each}" for each in document["problems"]]
    lines.append(f"{counted(document['blocks'], 'block')}, {show_bytes(document['bytes'])} on the volume")
    return "\n".join([*lines, *(_dry(document) if document["evicted"] else [])]) + "\n"


def _dry(document: Document) -> list[str]:
    return ["nothing was removed; add --yes to do it"] if document["dryRun"] else []


_PAGES: Final[Mapping[str, Callable[..., str]]] = {
    "inspect": _inspect_page,
    "check": _check_page,
    "purge": _purge_page,
    "gc": _gc_page,
}
