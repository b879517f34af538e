# SPDX-License-Identifier: Apache-2.0
"""The command line: finds the verb, runs it, and turns its result into an exit code. Here is `run`.

0: fine. 1: the verb found something, or could not do its work; the answer or standard error says what. 2: the command
line is wrong, and nothing was done.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import click
from click.shell_completion import ShellComplete

from kvtier_cli import client, output
from kvtier_cli.output import FOUND, INTERRUPTED
from kvtier_connector.contract.errors import ConnectorError
from kvtier_operator import __version__
from kvtier_operator.errors import OperatorError

_PLUGIN: Final = "kubectl-kvtier"
_LAST_PORT: Final = 65_535


class Verb(NamedTuple):
    """Section, place and summary of a verb."""

    section: str
    place: str
    """Module and function, as ``module:function``."""
    summary: str


_TIERS, _PLANS, _VOLUME, _CLUSTER = ("A tier in a cluster", "Before you apply", "Blocks on a volume", "The cluster")

VERBS: Final[Mapping[str, Verb]] = {
    "plan": Verb(_PLANS, "kvtier_cli.plan:plan", "show sizes of a tier, or the cost of an edit"),
    "validate": Verb(_PLANS, "kvtier_cli.plan:validate", "show the mistakes in a file, with remedies"),
    "render": Verb(_PLANS, "kvtier_cli.plan:render", "print the objects that the operator would make"),
    "attach": Verb(_PLANS, "kvtier_cli.engines.attach:attach", "print engines of another owner with what they need"),
    "status": Verb(_TIERS, "kvtier_cli.status:status", "show problems, sizes, use and hits"),
    "pause": Verb(_TIERS, "kvtier_cli.status:pause", "stop the operator from changing a tier, until --off"),
    "mode": Verb(_TIERS, "kvtier_cli.status:mode", "show or set whether engines use the volume, while they run"),
    "restart": Verb(_TIERS, "kvtier_cli.status:restart", "replace the engines, one at a time"),
    "warm": Verb(_TIERS, "kvtier_cli.warm:warm", "send the prompts of a file, so that their blocks are stored"),
    "bench": Verb(_TIERS, "kvtier_cli.bench:bench", "compare computed prompts with hits, by vllm bench serve"),
    "inspect": Verb(_VOLUME, "kvtier_cli.volume:inspect", "count blocks by generation, tenant and age"),
    "check": Verb(_VOLUME, "kvtier_cli.volume:check", "verify every byte"),
    "purge": Verb(_VOLUME, "kvtier_cli.volume:purge", "remove blocks by generation, tenant or adapter, or all"),
    "gc": Verb(_VOLUME, "kvtier_cli.volume:gc", "run one sweep of the janitor now"),
    "doctor": Verb(_CLUSTER, "kvtier_cli.doctor:doctor", "check that a cluster has what kvtier needs"),
    "report": Verb(_CLUSTER, "kvtier_cli.report:report", "pack a support bundle without secrets or prompts"),
    "install": Verb(_CLUSTER, "kvtier_cli.install:install", "print the operator, its chart, samples"),
    "run": Verb(_CLUSTER, "kvtier_cli.app:run", "run the operator until it is told to stop"),
}


class Verbs(click.Group):
    """The verbs by section, each imported when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - the base class's signature
        """Return the names in the order of the help."""
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 - the base class's
        """Import a verb."""
        if cmd_name not in VERBS:
            return None
        module, _, name = VERBS[cmd_name].place.partition(":")
        try:
            command: click.Command = getattr(importlib.import_module(module), name)
        except ModuleNotFoundError as error:
            if (error.name or "kvtier").startswith("kvtier"):
                raise
            text = f"{cmd_name} needs the package {error.name}, which the operator's image does without"
            raise click.ClickException(f"{text}: pip install kvtier") from error
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the verb, or name those that are like it."""
        if args[0] not in VERBS:
            near = difflib.get_close_matches(args[0], VERBS)
            hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(sorted(VERBS))}"
            ctx.fail(f"{args[0]} is unknown; {hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 - the base class's
        """List the verbs by section, without importing them."""
        for section in dict.fromkeys(verb.section for verb in VERBS.values()):
            with formatter.section(section):
                formatter.write_dl([(name, verb.summary) for name, verb in VERBS.items() if verb.section == section])


@click.command(
    cls=Verbs,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
    epilog="Exit code 0: fine. 1: the verb found something, or could not do its work. 2: the command line is wrong. "
    "A verb that removes something only shows the effect, until --yes.",
)
@client.global_options
@click.version_option(__version__, message="%(version)s")
def app(**_options: str | None) -> None:
    """Keep the KV cache of vLLM alive on a shared volume."""


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
    # These take seconds to import, which no other verb needs.
    from kvtier_operator import settings as settings_module  # noqa: PLC0415  takes seconds
    from kvtier_operator.handlers import run as run_operator  # noqa: PLC0415  takes seconds

    settings = settings_module.parse(os.environ)
    settings = replace(
        settings,
        namespaces=() if all_namespaces else namespaces or settings.namespaces,
        liveness_endpoint=liveness or settings.liveness_endpoint,
        leader_elect=leader_elect or settings.leader_elect,
        **{name: value for name, value in others.items() if value is not None},
    )
    return run_operator(settings, log_format=log_format, is_verbose=verbose)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    name = "kubectl kvtier" if Path(sys.argv[0]).name == _PLUGIN else "kvtier"
    # https://no-color.org: any value but an empty one; click itself looks at the terminal alone.
    color = False if os.environ.get("NO_COLOR") else None
    try:
        status = app.main(words, prog_name=name, standalone_mode=False, color=color)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.Abort:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader, such as `head`, has ended; the rest of the buffer is discarded.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FOUND
    except (OperatorError, ConnectorError, OSError) as error:
        # A system error without its number.
        file, why = (getattr(error, field, None) for field in ("filename", "strerror"))
        click.echo(f"{name}: {error if file is None or why is None else f'{file}: {why}'}", err=True)
        return FOUND
    return status if isinstance(status, int) else 0


def complete(arguments: Sequence[str] | None = None) -> int:
    """Print the completions of a command line, as kubectl asks its plugins: ``kubectl_complete-kvtier WORD...``."""
    words = list(sys.argv[1:] if arguments is None else arguments) or [""]
    found = ShellComplete(app, {}, "kvtier", "_KVTIER_COMPLETE").get_completions(words[:-1], words[-1])
    for each in found:
        if each.type == "plain":
            click.echo(f"{each.value}\t{each.help}" if each.help else each.value)
    # Directives of cobra: 0 lets the shell complete file names, 4 does not.
    click.echo(":0" if any(each.type != "plain" for each in found) else ":4")
    return 0
