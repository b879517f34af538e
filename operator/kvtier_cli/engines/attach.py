# SPDX-License-Identifier: Apache-2.0
"""The verb attach: prints the YAML of engines of another owner with what a tier needs put in, or taken out.

Nothing is sent to a cluster. The tier comes from the cluster or from a file, the engines likewise.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import click

from kvtier_cli import client, output
from kvtier_cli.output import FINE, FOUND
from kvtier_cli.plan import read_documents, read_tiers
from kvtier_operator import names
from kvtier_operator import settings as settings_module
from kvtier_operator.api import parse
from kvtier_operator.errors import KindMissing
from kvtier_operator.names import Manifest
from kvtier_operator.parts.edit_impact import keep_pods
from kvtier_operator.parts.engine_config import key_of
from kvtier_operator.parts.external import templates
from kvtier_operator.parts.external.attach import AttachRefused, step_into
from kvtier_operator.plan import TierPlan, decide, make_plan, make_unchecked_plan
from kvtier_operator.plan.decisions import Decisions

_FORMATS: Final = ("yaml", "json", "patch", "kustomize")
_PRIVATE: Final = ("kubectl.kubernetes.io/last-applied-configuration", "deployment.kubernetes.io/revision")


def _plan(tier: str, where: client.Where, namespace: str | None) -> TierPlan:
    """Return the plan of a tier: as its operator carries it out, or as a file has it, which need name no namespace."""
    image = settings_module.parse(os.environ).connector_image
    if tier == "-" or "/" in tier or Path(tier).suffix in {".yaml", ".yml"}:
        bodies = read_tiers(tier)
        if len(bodies) > 1:
            raise click.UsageError(f"{tier} has several tiers: give a file with one")
        namespace = bodies[0]["metadata"].get("namespace") or where.namespace or namespace or "default"
        body = {**bodies[0], "metadata": {**bodies[0]["metadata"], "namespace": namespace}}
        return make_unchecked_plan(parse(body), names.tier_ref(body), connector_image=image)
    from kvtier_operator.gather import gather  # noqa: PLC0415  takes a second

    body = where.client.tier(where.asked_namespace, tier)
    spec, snapshot = parse(body), gather(where.client.cluster, body, now=datetime.now(UTC))
    decided = decide(spec, snapshot.tier, snapshot)
    if not isinstance(decided, Decisions):
        raise click.ClickException(decided.message)
    plan = keep_pods(make_plan(spec, snapshot, decided, connector_image=image), snapshot)
    config = snapshot.live.get(key_of(snapshot.tier))
    used = (config.content["metadata"].get("annotations") or {} if config else {}).get(names.ANNOTATION_IMAGE)
    if plan.rendered is not None:
        installs = plan.rendered.template["spec"].get("initContainers", ())
        used = next((each["image"] for each in installs if each["name"] == names.INSTALL_CONTAINER), used)
    return replace(plan, connector_image=used or image)


def _split(name: str) -> tuple[str, str]:
    """Return kind and name of ``deployment/NAME``."""
    word, _, rest = name.partition("/")
    for kind, known in templates.KINDS.items():
        if rest and word.lower() in {kind.lower(), known.plural, known.short}:
            return kind, rest
    kinds = ", ".join(kind.lower() for kind in templates.KINDS)
    raise click.UsageError(f"{name} is no KIND/NAME with a KIND of {kinds}")


def _read(name: str | None, file: str | None, where: client.Where) -> tuple[list[Any], Manifest]:
    """Return the documents of a file, or the object of a cluster, and the one of them that has the engines."""
    wanted = None if name is None else _split(name)
    if file is not None:
        found = read_documents(file)
        chosen = [each for each in found if isinstance(each, dict) and templates.is_attachable(each)]
        if wanted is not None:
            chosen = [each for each in chosen if (each.get("kind"), each.get("metadata", {}).get("name")) == wanted]
        if len(chosen) != 1:
            what = f"objects with engines ({', '.join(templates.KINDS)}, or values of production-stack)"
            raise click.UsageError(f"{file} has {len(chosen)} {what}: name one as KIND/NAME")
        return found, chosen[0]
    if wanted is None:
        raise click.UsageError("give the engines: -f FILE, or KIND/NAME of the cluster")
    document = _readable(_ask(*wanted, where))
    return [document], document


def _ask(kind: str, name: str, where: client.Where) -> Manifest:
    """Return an object in the first of its versions that the cluster serves."""
    known, namespace = templates.KINDS[kind], where.asked_namespace
    paths = [f"/apis/{version}/namespaces/{namespace}/{known.plural}/{name}" for version in known.api_versions]
    what = f"read {kind.lower()}/{name}"
    for path in paths[:-1]:
        with contextlib.suppress(KindMissing):
            return where.client.ask(path, what)  # type: ignore[no-any-return]  # Where.client
    return where.client.ask(paths[-1], what)  # type: ignore[no-any-return]  # Where.client


def _readable(found: Manifest) -> Manifest:
    """Return an object as its owner would write it."""
    there = found["metadata"]
    metadata = {field: there[field] for field in ("name", "namespace", "labels") if field in there}
    annotations = {key: value for key, value in (there.get("annotations") or {}).items() if key not in _PRIVATE}
    if annotations:
        metadata["annotations"] = annotations
    first = {"apiVersion": found["apiVersion"], "kind": found["kind"], "metadata": metadata}
    return {**first, **{field: value for field, value in found.items() if field not in {*first, "status"}}}


def _patch(before: Manifest, after: Manifest, output_format: str) -> Manifest:
    if "kind" not in before:
        raise click.UsageError(f"-o {output_format} is for objects of Kubernetes; values are printed whole")
    patch = templates.make_patch(before, after)
    if output_format == "patch":
        return patch
    target = {"kind": before["kind"], "name": before["metadata"]["name"]}
    component = {"apiVersion": "kustomize.config.k8s.io/v1alpha1", "kind": "Component"}
    return {**component, "patches": [{"target": target, "patch": output.as_yaml([patch]).removeprefix("---\n")}]}


@click.command(
    epilog=output.examples(
        "kvtier attach llama deployment/vllm | kubectl apply -f -",
        "kvtier attach tier.yaml -f values.yaml > attached-values.yaml",
    )
)
@client.tier_argument
@click.argument("name", metavar="[KIND/NAME]", required=False)
@click.option(
    "-f", "--file", type=click.Path(exists=True, dir_okay=False, allow_dash=True), help="where the engines are"
)
@click.option("--container", help="container, or model of the values, that runs vLLM, if it cannot be told")
@click.option("--remove", is_flag=True, help="take out exactly what was put in")
@click.option("-o", "--output", "output_format", type=click.Choice(_FORMATS), default="yaml", show_default=True)
@client.cluster_options
def attach(  # noqa: PLR0913 - options
    tier: str,
    name: str | None,
    *,
    file: str | None,
    container: str | None,
    remove: bool,
    output_format: str,
    where: client.Where,
) -> int:
    """Print the YAML of engines that another owner makes, with what an engine of TIER needs put in.

    TIER is a tier of the cluster, or a file. The engines are a Deployment, StatefulSet, LeaderWorkerSet of one node,
    InferenceService, LLMInferenceService, or values of vLLM's production-stack. Attaching again changes nothing. Exit
    code 1: these pods cannot be engines of the tier; each field is named.
    """
    documents, document = _read(name, file, where)
    try:
        if remove:
            before, after, notes = document, templates.detach_document(document, container=container), tuple[str, ...]()
        else:
            plan = _plan(tier, where, step_into(document, ("metadata", "namespace")))
            if not plan.spec.connector.is_ours:
                label = plan.spec.connector.label
                raise click.ClickException(f"tier {tier} has spec.connector.type {label}, not Bundled")
            before, after, notes = templates.attach_document(document, plan, container=container)
    except AttachRefused as refused:
        for field, text in refused.problems:
            click.echo(f"{field} {text}", err=True)
        return FOUND
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        text = "the object is not as the API server takes it: `kubectl apply --dry-run=server -f FILE` names the field"
        raise click.ClickException(text) from error
    for each in notes:
        click.echo(f"# {each}", err=True)
    if output_format in {"patch", "kustomize"}:
        # A patch is laid over the object as it is; a component over that of the owner.
        documents = [_patch(document if output_format == "patch" else before, after, output_format)]
    else:
        documents[documents.index(document)] = after
    output.show(documents, output_format if output_format == "json" else "", lambda: output.as_yaml(documents))
    return FINE
