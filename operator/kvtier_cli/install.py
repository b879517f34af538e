# SPDX-License-Identifier: Apache-2.0
"""Where the CRD, the chart, the samples and the rendered operator of this release are.

The verbs ``install …``: what this release installs, as text; nothing is sent to a cluster.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import click

from kvtier_cli import output as answers
from kvtier_cli.output import FINE
from kvtier_operator import names

CHART: Final = "charts/kvtier"
CRD: Final = "crds/kvcachetier.yaml"
SAMPLES: Final = "crds/samples"
OPERATOR: Final = "docs/operator.yaml"

_HERE: Final = Path(__file__).resolve().parent


def carried_file(name: str) -> Path:
    """Return the path of one of them.

    Raises:
        ClickException: this installation was built without.
    """
    for base in (_HERE / "carried", _HERE.parents[1]):
        if (base / name).exists():
            return base / name
    raise click.ClickException(f"{name} is not part of this installation: use the wheel, or a checkout")


def carried_samples() -> dict[str, Path]:
    """Return the samples by name. Those in the folder `others` have kinds that a cluster need not know."""
    return {path.stem: path for path in sorted(carried_file(SAMPLES).rglob("*.yaml"))}


_NAMESPACE: Final = "kvtier-system"
"""Of the rendered operator."""


@click.group
def install() -> None:
    """Print what installs kvtier: the operator, its chart, samples."""


@install.command
@click.option("-n", "--namespace", default=_NAMESPACE, show_default=True, help="where the operator runs")
@click.option("--image", help="of the operator")
@click.option("--connector-image", help="what brings the connector into engine pods")
@click.option("--janitor-image", help="of the janitors")
@click.option("--crd/--no-crd", "with_crd", default=True, help="the definition of KVCacheTier, too")
@answers.output_option("yaml")
def generate(  # noqa: PLR0913 - options
    *,
    namespace: str,
    image: str | None,
    connector_image: str | None,
    janitor_image: str | None,
    with_crd: bool,
    output: str,
) -> int:
    """Print all that the operator takes, for every namespace: `| kubectl apply --server-side -f -`.

    Single namespaces, several operators and monitoring are values of the chart: `kvtier install chart`.
    """
    import yaml  # noqa: PLC0415  the group's help does without it

    documents = [each for each in yaml.safe_load_all(carried_file(OPERATOR).read_text()) if each]
    variables = {"KVTIER_CONNECTOR_IMAGE": connector_image, "KVTIER_JANITOR_IMAGE": janitor_image}
    for document in documents:
        _move(document, namespace)
        for container in _containers(document):
            container["image"] = image or container["image"]
            set_here = {name: value for name, value in variables.items() if value}
            rest = [each for each in container["env"] if each["name"] not in set_here]
            container["env"] = [*rest, *({"name": name, "value": value} for name, value in set_here.items())]
    if with_crd:
        # A kind stands before what is of it, and a namespace before what is in it.
        documents.insert(0, yaml.safe_load(carried_file(CRD).read_text()))
    if output == "yaml":
        click.echo(answers.as_yaml(documents), nl=False)
    else:
        rows = [(each["kind"], each["metadata"]["name"]) for each in documents]
        answers.show(documents, output, lambda: answers.columns([("KIND", "NAME"), *rows]))
    return FINE


def _move(document: names.Manifest, namespace: str) -> None:
    metadata = document["metadata"]
    if document["kind"] == "Namespace":
        metadata["name"] = namespace
    if "namespace" in metadata:
        metadata["namespace"] = namespace
    for subject in document.get("subjects", ()):
        subject["namespace"] = namespace


def _containers(document: names.Manifest) -> Iterator[dict[str, Any]]:
    if document["kind"] == "Deployment":
        yield from document["spec"]["template"]["spec"]["containers"]


@install.command
@click.argument("directory", type=click.Path(file_okay=False, path_type=Path))
@answers.output_option()
def chart(directory: Path, *, output: str) -> int:
    """Write the Helm chart of this release to DIRECTORY, which must not be there yet."""
    if directory.exists():
        raise click.UsageError(f"{directory} is there already: name another directory, or remove it")
    shutil.copytree(carried_file(CHART), directory)
    command = f"helm install kvtier {directory} --namespace {_NAMESPACE} --create-namespace"
    answers.show({"directory": str(directory), "next": command}, output, lambda: f"{command}\n")
    return FINE


def _names_like(_context: click.Context, _parameter: click.Parameter, begun: str) -> list[str]:
    return [each for each in carried_samples() if each.startswith(begun)]


@install.command
@click.argument("name", required=False, shell_complete=_names_like)
@answers.output_option()
def samples(name: str | None, *, output: str) -> int:
    """List the samples, or print the one of that NAME: `kvtier install samples minimal | kubectl apply -f -`."""
    found = carried_samples()
    if name is None:
        purposes = {each: _purpose(path) for each, path in found.items()}
        answers.show(purposes, output, lambda: answers.columns([("NAME", "WHAT IT SHOWS"), *purposes.items()]))
        return FINE
    if name not in found:
        raise click.UsageError(f"there is no sample {name}; there are {', '.join(found)}")
    if output == "json":
        import yaml  # noqa: PLC0415  as above

        answers.show(list(yaml.safe_load_all(found[name].read_text())), output, str)
    else:
        click.echo(found[name].read_text(), nl=False)
    return FINE


def _purpose(path: Path) -> str:
    """Return the first sentence of the comment at the top, which may go over several lines."""
    words: list[str] = []
    for line in path.read_text().splitlines():
        sentence, stop, _ = line.removeprefix("#").strip().partition(". ")
        words.append(sentence)
        if stop or sentence.endswith((".", ":")):
            break
    return " ".join(words).rstrip(".:")
