# SPDX-License-Identifier: Apache-2.0
"""Finds the verb that was typed, runs it, and turns what it says into an exit code.

0: fine. 1: it found something, or could not do what it was asked; what it is stands on standard error or in the answer.
2: the command line is wrong, and nothing was done.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import click
from click.shell_completion import ShellComplete

from kvtier_cli.output import FOUND, INTERRUPTED
from kvtier_connector.contract.errors import ConnectorError
from kvtier_operator import __version__
from kvtier_operator.errors import OperatorError

_PLUGIN: Final = "kubectl-kvtier"


class Verb(NamedTuple):
    """Where a verb is, and what it does in a few words."""

    section: str
    place: str
    """Module and function, as ``module:function``."""
    summary: str


_TIERS, _PLANS, _VOLUME, _CLUSTER = (
    "A tier in a cluster",
    "Before you apply",
    "Blocks, by tier or directory",
    "The cluster",
)

VERBS: Final[Mapping[str, Verb]] = {
    "plan": Verb(_PLANS, "kvtier_cli.plan:plan", "say what a tier takes and holds, or what an edit costs"),
    "validate": Verb(_PLANS, "kvtier_cli.plan:validate", "say what is wrong with a file, and how to mend it"),
    "render": Verb(_PLANS, "kvtier_cli.plan:render", "print the objects that the operator would make"),
    "status": Verb(_TIERS, "kvtier_cli.status:status", "show conditions, sizes, use, hits and what to do next"),
    "pause": Verb(_TIERS, "kvtier_cli.tiers:pause", "let the operator change nothing, until --off"),
    "mode": Verb(_TIERS, "kvtier_cli.tiers:mode", "show or set what engines do with the volume, while they run"),
    "restart": Verb(_TIERS, "kvtier_cli.tiers:restart", "replace the engines, one at a time"),
    "warm": Verb(_TIERS, "kvtier_cli.warm:warm", "send the prompts of a file, so that their blocks are stored"),
    "bench": Verb(_TIERS, "kvtier_cli.bench.command:bench", "send the same prompts to tiers, and compare times"),
    "inspect": Verb(_VOLUME, "kvtier_cli.volume:inspect", "count what is there, by generation, tenant and age"),
    "check": Verb(_VOLUME, "kvtier_cli.volume:check", "verify every byte"),
    "purge": Verb(_VOLUME, "kvtier_cli.volume:purge", "remove blocks by generation, tenant or adapter, or all"),
    "gc": Verb(_VOLUME, "kvtier_cli.volume:gc", "do once, now, what the janitor does all the time"),
    "doctor": Verb(_CLUSTER, "kvtier_cli.doctor:doctor", "look whether a cluster has what kvtier needs"),
    "report": Verb(_CLUSTER, "kvtier_cli.report:report", "pack what support needs to see, without secrets or prompts"),
    "install": Verb(_CLUSTER, "kvtier_cli.install:install", "print what installs kvtier: operator, chart, samples"),
    "run": Verb(_CLUSTER, "kvtier_cli.run:run", "run the operator until it is told to stop"),
    "version": Verb(_CLUSTER, "kvtier_cli.run:version", "print the version"),
}


class Verbs(click.Group):
    """The verbs, in sections, each imported when it is called."""

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
            raise click.ClickException(
                f"{cmd_name} needs the package {error.name}, which the operator's image does without: "
                "pip install kvtier"
            ) from error
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
    epilog="Exit code 0: fine. 1: it found something, or could not do it. 2: the command line is wrong, and nothing "
    "was done. Whatever removes something only says what it would do, until --yes.",
)
@click.version_option(__version__, message="%(version)s")
def app() -> None:
    """Keep the KV cache of vLLM alive on a shared volume."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    called = Path(sys.argv[0]).name
    name = "kubectl kvtier" if called == _PLUGIN else "kvtier"
    try:
        status = app.main(words, prog_name=name, standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.Abort:
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read it has seen enough; what is still in the buffer goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FOUND
    except (OperatorError, ConnectorError) as error:
        click.echo(f"{name}: {error}", err=True)
        return FOUND
    except OSError as error:
        click.echo(f"{name}: {_in_words(error)}", err=True)
        return FOUND
    return status if isinstance(status, int) else 0


def _in_words(error: OSError) -> str:
    """Return what the system refused, without its number."""
    if error.filename is None or error.strerror is None:
        return str(error)
    return f"{error.filename}: {error.strerror}"


def complete(arguments: Sequence[str] | None = None) -> int:
    """Answer kubectl, which asks ``kubectl_complete-kvtier WORD...`` for what may follow."""
    words = list(sys.argv[1:] if arguments is None else arguments) or [""]
    found = ShellComplete(app, {}, "kvtier", "_KVTIER_COMPLETE").get_completions(words[:-1], words[-1])
    for each in found:
        click.echo(f"{each.value}\t{each.help}" if each.help else each.value)
    # kubectl's own code for: nothing else, and no names of files unless they are asked for.
    click.echo(":0" if any(each.type in {"file", "dir"} for each in found) else ":4")
    return 0
