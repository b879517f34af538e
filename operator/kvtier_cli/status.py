# SPDX-License-Identifier: Apache-2.0
"""The verb ``status``: one screen about a tier, or one line about each."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import click

from kvtier_cli import answers, standing, status_page, targets
from kvtier_cli.exits import FINE, FOUND
from kvtier_operator.errors import ClusterError

_CLEAR: Final = "\x1b[H\x1b[2J"


@click.command
@click.argument("tier", required=False)
@click.option("-A", "--all-namespaces", is_flag=True, help="tiers of every namespace")
@click.option("-w", "--watch", is_flag=True, help="show it anew until Ctrl-C")
@click.option(
    "--interval", type=click.IntRange(1, 3600), default=5, show_default=True, help="seconds between two looks"
)
@click.option("--ask/--no-ask", default=True, help="ask engines and janitor for hits and use (takes the right to exec)")
@answers.output_option()
@targets.cluster_options
def status(  # noqa: PLR0913 - options
    tier: str | None,
    *,
    all_namespaces: bool,
    watch: bool,
    interval: int,
    ask: bool,
    output: str,
    **cluster: str,
) -> int:
    """Show how TIER stands: conditions, sizes, use, hits by tier, and what to do next; without TIER, all of them.

    Exit code 1: a tier is not Ready.
    """
    where = targets.Where(**cluster)
    if tier and all_namespaces:
        raise click.UsageError("-A is for all tiers: leave TIER out, or name its namespace with -n")
    namespace = "" if all_namespaces else where.asked_namespace

    def look() -> Any:
        if tier:
            return standing.look(where, namespace, tier, asks_pods=ask)
        bodies = where.person.tiers(namespace)
        return [
            standing.look(where, each["metadata"]["namespace"], each["metadata"]["name"], asks_pods=False)
            for each in bodies
        ]

    def page(found: Any) -> str:
        return status_page.one(found) if tier else status_page.many(found, namespace)

    if watch:
        return _watch(look, page, interval, output)
    found = look()
    answers.show(found, output, lambda: page(found))
    return _judge(found)


def _judge(found: Any) -> int:
    documents: list[Mapping[str, Any]] = found if isinstance(found, list) else [found]
    return FINE if all(standing.ready(each)["status"] == "True" for each in documents) else FOUND


def _watch(look: Callable[[], Any], page: Callable[[Any], str], interval: int, output: str) -> int:
    code = FINE
    try:
        while True:
            try:
                found = look()
            except ClusterError as error:
                # An API server that is away for a moment is what one watches for.
                click.echo(f"{error}; asked again in {interval} s", err=True)
            else:
                code = _judge(found)
                if sys.stdout.isatty() and output == "table":
                    click.echo(_CLEAR, nl=False)
                answers.show(found, output, functools.partial(page, found))
            time.sleep(interval)
    except KeyboardInterrupt:
        return code
