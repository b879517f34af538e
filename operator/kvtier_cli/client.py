# SPDX-License-Identifier: Apache-2.0
"""The cluster, namespace and tier that a command line names, and completion of tier names."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar, cast

import click
from click.shell_completion import CompletionItem

from kvtier_operator.errors import OperatorError

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True)
class Where:
    """The cluster and namespace that a command line names; empty fields mean those of the kubeconfig."""

    namespace: str = ""
    context: str = ""
    kubeconfig: str = ""

    @cached_property
    def client(self) -> Any:
        """Return the connection to the cluster, made at the first use."""
        # The client takes a second to import, which verbs without a cluster save.
        from kvtier_operator.kube.cli_client import CliClient  # noqa: PLC0415  takes a second

        client = CliClient(kubeconfig=self.kubeconfig or None, context=self.context or None)
        if context := click.get_current_context(silent=True):
            context.call_on_close(client.close)
        return client

    @property
    def asked_namespace(self) -> str:
        """Return the namespace of ``-n``, or that of the context."""
        namespace: str = self.namespace or self.client.namespace
        return namespace


def global_options(function: Function) -> Function:
    """Give a command ``-n``, ``--context`` and ``--kubeconfig``."""
    options = (
        click.option("-n", "--namespace", help="namespace of the tier  [default: that of the context]"),
        click.option("--context", help="context of the kubeconfig"),
        click.option("--kubeconfig", type=click.Path(), help="file to use instead of $KUBECONFIG"),
    )
    for option in reversed(options):
        function = option(function)
    return function


def cluster_options(function: Function) -> Function:
    """Give a verb the global options, as its parameter `where`; an option after the verb wins over one before it."""

    @functools.wraps(function)
    def with_where(*args: Any, namespace: str, context: str, kubeconfig: str, **options: Any) -> Any:
        given = {"namespace": namespace, "context": context, "kubeconfig": kubeconfig}
        return function(*args, where=_where(click.get_current_context(), given), **options)

    return cast("Function", global_options(with_where))


def _where(context: click.Context, given: dict[str, Any]) -> Where:
    before = context.find_root().params
    return Where(**{name: given.get(name) or before.get(name) or "" for name in ("namespace", "context", "kubeconfig")})


def complete_tier(context: click.Context, _parameter: click.Parameter, begun: str) -> list[CompletionItem]:
    """Return the names of tiers that begin with some letters; none if the cluster does not answer."""
    where = _where(context, context.params)
    try:
        tiers = where.client.tiers(where.asked_namespace)
    except (OperatorError, OSError):
        return []
    names = sorted(each["metadata"]["name"] for each in tiers)
    return [CompletionItem(name) for name in names if name.startswith(begun)]


tier_argument = click.argument("tier", shell_complete=complete_tier)
"""Give a verb its argument TIER."""
