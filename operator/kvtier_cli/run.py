# SPDX-License-Identifier: Apache-2.0
"""The verbs about the program itself: run, version."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any, Final

import click

from kvtier_cli import output
from kvtier_cli.output import FINE
from kvtier_operator import __version__
from kvtier_operator import settings as settings_module

_LAST_PORT: Final = 65_535


@click.command(epilog=output.examples("kvtier run --all-namespaces", "kvtier run -n ai --metrics-port 9090"))
@click.option("-n", "--namespace", "namespaces", multiple=True, help="serve this namespace (may be repeated)")
@click.option("-A", "--all-namespaces", is_flag=True, help="serve every namespace (the default)")
@click.option("--liveness", metavar="URL", help="answer the kubelet at http://ADDRESS:PORT, /healthz and /readyz")
@click.option("--operator-class", metavar="NAME", help="work only on tiers with this spec.operatorClassName")
@click.option("--leader-elect", is_flag=True, help="wait for the Lease, so that several may run")
@click.option("--metrics-port", type=click.IntRange(0, _LAST_PORT), help="serve /metrics there; 0 serves none")
@click.option("--log-format", type=click.Choice(["plain", "full", "json"]), default="full", show_default=True)
@click.option("-v", "--verbose", is_flag=True, help="also log reads, and tiers that need nothing")
def run(  # noqa: PLR0913 - options
    *,
    namespaces: tuple[str, ...],
    all_namespaces: bool,
    liveness: str | None,
    leader_elect: bool,
    log_format: str,
    verbose: bool,
    **others: Any,
) -> int:
    """Run the operator until it receives SIGTERM; KVTIER_ variables of the environment are the defaults."""
    before = click.get_current_context().find_root().params.get("namespace")
    namespaces = namespaces or ((before,) if before else ())
    if namespaces and all_namespaces:
        raise click.UsageError("--namespace and --all-namespaces: give one of them")
    settings = settings_module.parse(os.environ)
    settings = replace(
        settings,
        namespaces=() if all_namespaces else namespaces or settings.namespaces,
        liveness_endpoint=liveness or settings.liveness_endpoint,
        leader_elect=leader_elect or settings.leader_elect,
        **{name: value for name, value in others.items() if value is not None},
    )
    # The client and the framework take seconds to import, which no other verb needs.
    from kvtier_operator.handlers import run as run_operator  # noqa: PLC0415  takes seconds

    return run_operator(settings, log_format=log_format, is_verbose=verbose)


@click.command(epilog=output.examples("kvtier version", "kvtier version -o json"))
@output.output_option()
def version(*, output_format: str) -> int:
    """Print the version."""
    output.show({"version": __version__}, output_format, lambda: f"{__version__}\n")
    return FINE
