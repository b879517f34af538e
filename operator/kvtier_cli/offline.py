# SPDX-License-Identifier: Apache-2.0
"""The verbs that need no cluster: plan, validate, render."""

from __future__ import annotations

import os

import click

from kvtier_cli import answers, input_files, planning, validation
from kvtier_cli.exits import FINE, FOUND
from kvtier_operator import names, parts
from kvtier_operator import settings as settings_module
from kvtier_operator.api import parse
from kvtier_operator.plan import make_unchecked_plan

_FILE = click.Path(exists=True, dir_okay=False, allow_dash=True)
_NODES = click.option(
    "--nodes", type=_FILE, help="nodes and pods as `kubectl get nodes,pods -A -o yaml` prints them, to look what fits"
)
_MOST_FILES = 2


@click.command
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=_FILE)
@click.option(
    "--diff",
    "is_diff",
    is_flag=True,
    help="say what it costs to replace OLD by NEW; with one FILE, what stands in the cluster",
)
@click.option("--config", type=_FILE, help="the model's config.json, where its name does not tell")
@_NODES
@answers.output_option()
def plan(files: tuple[str, ...], *, is_diff: bool, config: str | None, nodes: str | None, output: str) -> int:
    """Say what a tier takes and holds, each number with its sum; or with --diff what an edit costs.

    FILE is YAML with KVCacheTier resources, - for standard input. Exit code 1 also where no node holds it.
    """
    if len(files) > (_MOST_FILES if is_diff else 1):
        one = "takes one FILE; to compare two, add --diff"
        raise click.UsageError("takes OLD and NEW, or one FILE to compare with the cluster" if is_diff else one)
    settings = settings_module.parse(os.environ)
    planned = (
        planning.compare(settings, files, nodes_file=nodes)
        if is_diff
        else planning.plan(settings, files[0], config_file=config, nodes_file=nodes)
    )
    answers.show(planned.documents, output, lambda: planned.page)
    return FINE if planned.is_fitting else FOUND


@click.command
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=_FILE)
@answers.output_option()
def validate(files: tuple[str, ...], *, output: str) -> int:
    """Say what is wrong with the KVCacheTier resources of files, field by field, and how to mend it.

    Exit code 1 if anything is.
    """
    found = [each for file in files for each in validation.validate(file)]
    answers.show([each.document() for each in found], output, lambda: "".join(each.page() for each in found))
    return FOUND if any(each.problems for each in found) else FINE


@click.command
@click.argument("file", type=_FILE)
@_NODES
@answers.output_option("yaml")
def render(file: str, *, nodes: str | None, output: str) -> int:
    """Print the objects that the operator would make, the same bytes every time; -o table lists them.

    FILE is YAML with KVCacheTier resources, - for standard input.
    """
    settings = settings_module.parse(os.environ)
    found = planning.read_nodes(nodes)
    rendered: list[names.Manifest] = []
    for body in input_files.read_tiers(file):
        tier = names.tier_ref(body)
        made = make_unchecked_plan(
            parse(body),
            tier,
            connector_image=settings.connector_image,
            janitor_image=settings.janitor_image,
            snapshot=planning.make_snapshot(tier, found),
        )
        rendered += parts.render(made)
    if output == "yaml":
        click.echo(answers.as_yaml(rendered), nl=False)
    else:
        rows = [(each["kind"], each["metadata"]["name"], each["metadata"]["namespace"]) for each in rendered]
        answers.show(rendered, output, lambda: answers.columns([("KIND", "NAME", "NAMESPACE"), *rows]))
    return FINE
