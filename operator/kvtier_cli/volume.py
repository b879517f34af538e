# SPDX-License-Identifier: Apache-2.0
"""The verbs about blocks: inspect, check, purge, pin, unpin, gc; each on a tier by name or on a directory."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Final

import click

from kvtier_cli import answers, parameters, targets, volume_pages
from kvtier_connector.errors import ConfigInvalid
from kvtier_connector.store.scan import PARTIAL_AGE_SECONDS

_MOST_THREADS: Final = 64
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
        outcome = targets.do(verb, target, targets.Where(**cluster), options, tell)
    answers.show(outcome.document, output, lambda: volume_pages.PAGES[verb](outcome.document))
    return outcome.status


@click.command
@_TARGET
@_threads(4)
@answers.output_option()
@targets.cluster_options
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
@targets.cluster_options
def check(target: str, *, keys_dir: str | None, partial_age: float, threads: int, output: str, **cluster: str) -> int:
    """Verify every byte of every block, and list what is wrong. Changes nothing.

    Exit code 1 if there are problems.
    """
    if keys_dir and not targets.is_directory(target, targets.Where(**cluster)):
        raise click.UsageError(
            "--keys-dir is for a directory: keys stay where they are, and the janitor of a tier has none"
        )
    options = {"keys_dir": keys_dir, "partial_age_seconds": partial_age, "threads": threads}
    return _do("check", target, cluster, output, options)


@click.command
@_TARGET
@click.option("--older-than", type=parameters.SECONDS, help="written before, as 7d, 12h or 1h30m")
@click.option("--generation", help="of this generation alone")
@click.option("--tenant", help="of this tenant alone; '' for the blocks of nobody in particular")
@click.option("--prefix", metavar="HASH", type=parameters.HASH, help="this block and all that continue it")
@click.option("--lora", metavar="NAME", help="of this adapter alone, whatever it holds or held")
@click.option("--all", "is_all", is_flag=True, help="everything")
@answers.yes_option("remove them")
@_threads(8)
@answers.output_option()
@targets.cluster_options
def purge(  # noqa: PLR0913 - options
    target: str,
    *,
    older_than: float | None,
    generation: str | None,
    tenant: str | None,
    prefix: str | None,
    lora: str | None,
    is_all: bool,
    yes: bool,
    threads: int,
    output: str,
    **cluster: str,
) -> int:
    """Remove blocks by age, generation, tenant or prefix, of an adapter, or all; without --yes only say what would go.

    Engines may be at work: what goes is a miss for them. Exit code 1 if not all could be removed.
    """
    chosen = {"older_than_seconds": older_than, "generation": generation, "tenant": tenant, "prefix": prefix}
    # Only where it is asked for: the janitor may be of a release that does not know it.
    chosen |= {} if lora is None else {"lora": lora}
    if all(each is None for each in chosen.values()) is not is_all:
        raise click.UsageError(
            "say what is to go: --older-than, --generation, --tenant, --prefix, --lora, or else --all"
        )
    return _do("purge", target, cluster, output, {**chosen, "yes": yes, "threads": threads})


@click.command
@_TARGET
@click.argument("block_hash", metavar="[HASH]", required=False, type=parameters.HASH)
@click.option("--name", type=parameters.PIN, help="by which it can be unpinned")
@answers.output_option()
@targets.cluster_options
def pin(target: str, block_hash: str | None, *, name: str | None, output: str, **cluster: str) -> int:
    """Keep a block and all before it, whatever the budget says; without HASH, list what is pinned.

    HASH is the hex digits before _g in the name of the block's file.
    """
    if block_hash is None:
        if name is not None:
            raise click.UsageError("HASH is missing: say which block --name is to pin")
        return _do("pins", target, cluster, output, {})
    if name is None:
        raise click.UsageError("--name is required, so that it can be unpinned")
    return _do("pin", target, cluster, output, {"name": name, "hash": block_hash})


@click.command
@_TARGET
@click.argument("name")
@answers.output_option()
@targets.cluster_options
def unpin(target: str, name: str, *, output: str, **cluster: str) -> int:
    """Let a pinned block go again when room is needed; NAME as it was pinned."""
    return _do("unpin", target, cluster, output, {"name": name})


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
@targets.cluster_options
def gc(target: str, *, config: str | None, yes: bool, output: str, **others: Any) -> int:
    """Do once, and now, what the janitor does all the time; without --yes only say what would go."""
    where = {name: others.pop(name) for name in ("namespace", "context", "kubeconfig")}
    if config and not targets.is_directory(target, targets.Where(**where)):
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
