# SPDX-License-Identifier: Apache-2.0
"""The verbs before an apply: plan, validate, render. They read files; only ``plan --diff FILE`` asks a cluster."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import click
import yaml
from pydantic.alias_generators import to_camel

from kvtier_cli import client, kubectl_yaml, output, trace
from kvtier_cli.output import FINE, FOUND
from kvtier_operator import names, parts, quantity
from kvtier_operator import settings as settings_module
from kvtier_operator.api import TierSpec, parse
from kvtier_operator.api.parse import problems, read_annotations
from kvtier_operator.api.reasons import Reason, Refusal
from kvtier_operator.conditions import PlannedStage
from kvtier_operator.errors import SpecInvalid
from kvtier_operator.names import Manifest, ObjectKey, TierRef
from kvtier_operator.parts import pods
from kvtier_operator.parts.edit_impact import applicable_spec, explain_edit
from kvtier_operator.parts.engine_checks import a_node_is_large_enough, hosts, pod_requests
from kvtier_operator.plan import TierPlan, decide, diff, make_unchecked_plan, nodes, report
from kvtier_operator.plan.capacity import make_capacity
from kvtier_operator.settings import Settings
from kvtier_operator.snapshot import Nodes, Snapshot


def read_documents(file: str) -> list[Any]:
    """Return the YAML documents of a file, or of standard input for ``-``; the items of lists one by one."""
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise SpecInvalid(_called(file), f"is not text in UTF-8: {error}") from error
    try:
        found = yaml.load_all(text, Loader=kubectl_yaml.Reader)
        return [item for document in found if document is not None for item in _items(document)]
    except yaml.YAMLError as error:
        raise SpecInvalid(_called(file), f"is not YAML: {error}") from error


def read_tiers(file: str) -> list[Manifest]:
    """Return the KVCacheTier resources of a file, at least one; objects of other kinds are skipped."""
    documents = read_documents(file)
    bodies = [body for body in documents if _is_tier(body, file)]
    if not bodies:
        others = f"something else than {names.KIND} resources of {names.API_VERSION}"
        raise SpecInvalid(_called(file), f"holds {others}" if documents else f"holds no {names.KIND}")
    return bodies


def read_config(file: str) -> Mapping[str, Any]:
    """Return a model's config.json."""
    try:
        config = json.loads(Path(file).read_text(encoding="utf-8"))
    except ValueError as error:
        raise SpecInvalid(file, f"is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise SpecInvalid(file, "is not a model's config.json: that is one JSON object")
    return config


def _items(document: Any) -> list[Any]:
    if not isinstance(document, Mapping) or not str(document.get("kind")).endswith("List") or "items" not in document:
        return [document]
    if not isinstance(items := document["items"] or [], list):
        raise SpecInvalid(
            "items", f"of a {document['kind']} must be a list of objects: write each below `items:` as `- `"
        )
    return items


def _is_tier(body: Any, file: str) -> bool:
    version, kind = (body.get("apiVersion"), body.get("kind")) if isinstance(body, Mapping) else (None, None)
    if not isinstance(version, str) or not isinstance(kind, str):
        raise SpecInvalid(
            _called(file), "holds something that is no object of Kubernetes: apiVersion or kind is missing"
        )
    if (version, kind) != (names.API_VERSION, names.KIND):
        if version.partition("/")[0] == names.API_VERSION.partition("/")[0] or kind.lower() == names.KIND.lower():
            meant = f"write apiVersion: {names.API_VERSION} and kind: {names.KIND}"
            raise SpecInvalid(_called(file), f"holds a {kind} of {version}, which there is not: {meant}")
        return False
    metadata = body.get("metadata")
    if not isinstance(metadata, Mapping) or not isinstance(metadata.get("name"), str):
        raise SpecInvalid("metadata.name", "is required")
    if not isinstance(metadata.get("annotations") or {}, Mapping):
        raise SpecInvalid("metadata.annotations", "must be an object: write names and values, such as example.org/a: b")
    return True


def _called(file: str) -> str:
    return "standard input" if file == "-" else file


def _validate(body: names.Manifest) -> tuple[list[str], list[str]]:
    """Return problems and warnings of one tier."""
    found = [str(each) for each in problems(body)]
    try:
        read_annotations(body)
    except SpecInvalid as error:
        found.append(str(error))
    if found:
        return found, []
    spec = parse(body)
    decided = decide(spec, names.tier_ref(body), None)
    # A share of nodes needs the nodes, which a file does not have: that is no mistake.
    if isinstance(decided, Refusal) and decided.reason is not Reason.NODES_UNKNOWN:
        return [decided.message], []
    warning = pods.warning(spec.engine.pod_template)
    return [], [warning] if warning else []


class Planned(NamedTuple):
    """A plan or an edit: its documents, its page, and whether a node can hold the pods."""

    documents: list[dict[str, Any]]
    page: str
    is_fitting: bool = True


def plan_file(
    settings: Settings, file: str, *, config_file: str | None, nodes_file: str | None, traffic: trace.Options | None
) -> Planned:
    """Plan the tiers of a file, or tell what they would serve of recorded traffic."""
    found_nodes = read_nodes(nodes_file)
    config = None if config_file is None else read_config(config_file)
    documents: list[dict[str, Any]] = []
    pages, is_fitting = [], True
    for body in read_tiers(file):
        spec, tier = _parse(body, config), names.tier_ref(body)
        snapshot = make_snapshot(tier, found_nodes)
        made = make_unchecked_plan(spec, tier, connector_image=settings.connector_image, snapshot=snapshot)
        capacity = make_capacity(spec, made.decisions, snapshot)
        if traffic is not None:
            found = trace.forecast(traffic, spec, capacity)
            pages.append(f"{tier}, {found.page()}")
            documents.append({"tier": str(tier), **found.document()})
            continue
        fits, fits_some = _fit(made, snapshot)
        is_fitting = is_fitting and fits_some
        warning = pods.warning(spec.engine.pod_template)
        pages.append(report.describe(made, capacity, fits=fits, warning=warning, found=found_nodes))
        documents.append(
            {
                "tier": str(tier),
                "model": spec.model.name,
                "generation": made.generation.digest,
                "sizing": report.terms(made.sizing, capacity, node_bytes=made.decisions.node_bytes),
                **({} if fits is None else {"nodes": {"fits": fits_some, "message": fits}}),
            }
        )
    return Planned(documents, "\n".join(pages), is_fitting)


def read_nodes(file: str | None) -> Nodes | None:
    """Return the nodes of a file, if one is given."""
    if file is None:
        return None
    # The client of the cluster takes a second to import, which the rest does not need.
    from kvtier_operator.inventory import from_objects  # noqa: PLC0415  takes a second

    remedy = "kubectl get nodes,pods -A -o yaml prints what belongs there"
    try:
        found = from_objects(item for item in read_documents(file) if isinstance(item, dict))
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise SpecInvalid(file, f"holds a node or a pod that cannot be read ({error!r}): {remedy}") from error
    if not found.nodes:
        raise SpecInvalid(file, f"holds no nodes: {remedy}")
    return found


def _parse(body: Manifest, config: Mapping[str, Any] | None) -> TierSpec:
    spec = body.get("spec")
    if config is None or not isinstance(spec, Mapping) or not isinstance(spec.get("model"), Mapping):
        return parse(body)
    return parse({**body, "spec": {**spec, "model": {**spec["model"], "config": config}}})


def make_snapshot(tier: TierRef, found: Nodes | None) -> Snapshot | None:
    """Return a snapshot of a cluster with nothing but nodes."""
    return None if found is None else Snapshot(tier=tier, nodes=found)


def _fit(plan: TierPlan, snapshot: Snapshot | None) -> tuple[str | None, bool]:
    """Return which nodes can hold an engine pod, and whether one can."""
    if snapshot is None or snapshot.nodes is None:
        return None, True
    capacity = make_capacity(plan.spec, plan.decisions, snapshot)
    stage = PlannedStage(generation=0, spec=plan.spec, snapshot=snapshot, plan=plan, capacity=capacity)
    if (problem := a_node_is_large_enough(stage)) is not None:
        return problem.message, False
    count = (plan.spec.replicas or 1) if plan.is_on_one_node else 1
    large = hosts(plan, snapshot.nodes, count)
    least = nodes.smallest_node(plan.spec, plan.tier, snapshot.nodes)
    assert least is not None
    return (
        f"{len(large)} of {len(snapshot.nodes.nodes)} could hold "
        f"{'an engine pod' if count == 1 else f'{count} engine pods'} of "
        f"{quantity.show_bytes(count * pod_requests(plan)[0])}; the smallest that matches, {least[0].name}, has "
        f"{quantity.show_bytes(least[1])} left"
    ), True


def compare(settings: Settings, files: Sequence[str], where: client.Where, *, nodes_file: str | None) -> Planned:
    """Compare the tiers of one file with those of another file, or with those in the cluster."""
    new = {str(names.tier_ref(body)): body for body in read_tiers(files[-1])}
    is_live = len(files) == 1
    old = _live(new.values(), where) if is_live else {str(names.tier_ref(b)): b for b in read_tiers(files[0])}
    found_nodes = read_nodes(nodes_file)
    documents: list[dict[str, Any]] = []
    pages = []
    for name in sorted({*old, *new}):
        if name not in old or name not in new:
            pages.append(f"{name}: {'only in the new file' if name in new else 'only in the old file'}\n")
            documents.append({"tier": name, "only": "after" if name in new else "before"})
            continue
        tier = names.tier_ref(old[name])
        snapshot = _live_snapshot(old[name], where) if is_live else make_snapshot(tier, found_nodes)
        # An annotation that the file does not name stays as it is.
        restart = read_annotations(new[name]).restart or read_annotations(old[name]).restart
        found = explain_edit(
            _stored(old[name], snapshot, connector_image=settings.connector_image, restart=restart),
            parse(new[name]),
            tier,
            connector_image=settings.connector_image,
            snapshot=snapshot,
            restart=restart,
            warm_bytes=diff.warm_bytes(old[name].get("status") or {}),
        )
        pages.append(report.describe_diff(name, found))
        documents.append({"tier": name, **_document(found), "warnings": diff.warnings(found)})
    return Planned(documents, "\n".join(pages))


def _stored(body: Manifest, snapshot: Snapshot | None, *, connector_image: str, restart: str) -> TierSpec:
    """Return the spec that the operator applies to a tier: the stored one, or its last one that could be applied."""
    try:
        return parse(body)
    except SpecInvalid:
        if snapshot is not None:
            runs = applicable_spec(body.get("spec"), snapshot, connector_image=connector_image, restart=restart)
            if runs is not None:
                return runs
        raise


def _document(found: diff.Diff) -> dict[str, Any]:
    """Return an edit with the API's names of its fields; values of the tier keep their form."""
    document = {to_camel(name): value for name, value in asdict(found).items()}
    document["changes"] = [{to_camel(name): value for name, value in each.items()} for each in document["changes"]]
    return document


def _live(bodies: Iterable[Manifest], where: client.Where) -> dict[str, Manifest]:
    """Return the tiers of the same names in the cluster."""
    found = {}
    for tier in map(names.tier_ref, bodies):
        key = ObjectKey(api_version=names.API_VERSION, kind=names.KIND, name=tier.name)
        if live := where.client.cluster.get(key, tier.namespace):
            found[str(tier)] = live
    return found


def _live_snapshot(body: Manifest, where: client.Where) -> Snapshot:
    """Return the objects of a tier in the cluster, with nodes and pods if the user may read them."""
    from kvtier_operator.gather import gather  # noqa: PLC0415  takes a second
    from kvtier_operator.inventory import Inventory  # noqa: PLC0415  takes a second

    cluster = where.client.cluster
    found = gather(cluster, body, now=datetime.now(UTC))
    return replace(found, nodes=Inventory(cluster, is_allowed=True, clock=time.monotonic).look(with_pods=True))


_FILE = click.Path(exists=True, dir_okay=False, allow_dash=True)
_NODES = click.option(
    "--nodes", type=_FILE, help="output of `kubectl get nodes,pods -A -o yaml`, to see whether the pods fit"
)
_MOST_FILES = 2


@click.command(epilog=output.examples("kvtier plan tier.yaml --trace requests.jsonl", "kvtier plan --diff tier.yaml"))
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=_FILE)
@click.option(
    "--diff", "is_diff", is_flag=True, help="show the cost of replacing OLD by NEW, or the cluster's tier by one FILE"
)
@click.option("--config", type=_FILE, help="the model's config.json, if kvtier does not know the model")
@trace.options
@_NODES
@output.output_option()
@client.cluster_options
def plan(  # noqa: PLR0913 - options
    files: tuple[str, ...],
    *,
    is_diff: bool,
    config: str | None,
    nodes: str | None,
    output_format: str,
    where: client.Where,
    **traffic: Any,
) -> int:
    """Show the sizes of a tier, each with its sum; the cost of an edit; or what the tier would serve of traffic.

    FILE is YAML with KVCacheTier resources, - for standard input. Exit code 1: no node can hold an engine.
    """
    if len(files) > (_MOST_FILES if is_diff else 1):
        one = "takes one FILE; to compare two, add --diff"
        raise click.UsageError("takes OLD and NEW, or one FILE to compare with the cluster" if is_diff else one)
    replayed = trace.parse_options(**traffic)
    if replayed is not None and is_diff:
        raise click.UsageError("--trace and --diff: give one of them")
    settings = settings_module.parse(os.environ)
    planned = (
        compare(settings, files, where, nodes_file=nodes)
        if is_diff
        else plan_file(settings, files[0], config_file=config, nodes_file=nodes, traffic=replayed)
    )
    output.show(planned.documents, output_format, lambda: planned.page)
    return FINE if planned.is_fitting else FOUND


@click.command(epilog=output.examples("kvtier validate tier.yaml", "kvtier validate tiers/*.yaml -o json"))
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=_FILE)
@output.output_option()
def validate(files: tuple[str, ...], *, output_format: str) -> int:
    """Show the mistakes in the KVCacheTier resources of files, field by field, with remedies.

    Exit code 1: there are mistakes.
    """
    found = []
    for file, body in [(each, body) for each in files for body in read_tiers(each)]:
        wrong, warnings = _validate(body)
        tier = str(names.tier_ref(body))
        found.append({"file": file, "tier": tier, "valid": not wrong, "problems": wrong, "warnings": warnings})
    output.show(found, output_format, lambda: "".join(map(_validation_page, found)))
    return FINE if all(each["valid"] for each in found) else FOUND


def _validation_page(found: Mapping[str, Any]) -> str:
    about = f"{found['file']}: {found['tier']}"
    lines = [f"{about}: {each}" for each in found["problems"]]
    lines += [f"{about}: warning: {each}" for each in found["warnings"]]
    return "\n".join(lines if found["problems"] else [*lines, f"{about} is valid"]) + "\n"


@click.command(epilog=output.examples("kvtier render tier.yaml", "kvtier render tier.yaml -o table"))
@click.argument("file", type=_FILE)
@_NODES
@output.output_option("yaml")
def render(file: str, *, nodes: str | None, output_format: str) -> int:
    """Print the objects that the operator would make, the same bytes every time; -o table lists them.

    FILE is YAML with KVCacheTier resources, - for standard input.
    """
    settings = settings_module.parse(os.environ)
    found = read_nodes(nodes)
    rendered: list[names.Manifest] = []
    for body in read_tiers(file):
        tier = names.tier_ref(body)
        made = make_unchecked_plan(
            parse(body),
            tier,
            connector_image=settings.connector_image,
            janitor_image=settings.janitor_image,
            snapshot=make_snapshot(tier, found),
        )
        rendered += parts.render(made)
    if output_format == "yaml":
        click.echo(output.as_yaml(rendered), nl=False)
    else:
        rows = [(each["kind"], each["metadata"]["name"], each["metadata"]["namespace"]) for each in rendered]
        output.show(rendered, output_format, lambda: output.columns([("KIND", "NAME", "NAMESPACE"), *rows]))
    return FINE
