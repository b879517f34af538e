# SPDX-License-Identifier: Apache-2.0
"""The verbs ``install …``: print operator, chart and samples of this release; nothing is sent to a cluster."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

import click

from kvtier_cli import output
from kvtier_cli.output import FINE

CHART: Final = "charts/kvtier"
CRD: Final = "crds/kvcachetier.yaml"
SAMPLES: Final = "crds/samples"
OPERATOR: Final = "docs/operator.yaml"

_HERE: Final = Path(__file__).resolve().parent


def carried_file(name: str) -> Path:
    """Return the path of a file or folder of this release.

    Raises:
        ClickException: this installation does not have it.
    """
    for base in (_HERE / "carried", _HERE.parents[1]):
        if (base / name).exists():
            return base / name
    raise click.ClickException(f"{name} is not part of this installation: use the wheel, or a checkout")


def carried_samples() -> dict[str, Path]:
    """Return the samples by name. Those in the folder `others` have kinds that a cluster need not know."""
    return {path.stem: path for path in sorted(carried_file(SAMPLES).rglob("*.yaml"))}


_NAMESPACE: Final = "kvtier-system"
"""Namespace of the rendered operator."""


@click.group(
    epilog=output.examples("kvtier install generate | kubectl apply --server-side -f -", "kvtier install samples")
)
def install() -> None:
    """Print the operator, its chart, samples."""


@install.command(
    epilog=output.examples(
        "kvtier install generate | kubectl apply --server-side -f -",
        "kvtier install generate -n tools --image registry/kvtier-operator:0.1.0",
    )
)
@click.option("-n", "--namespace", default=_NAMESPACE, show_default=True, help="where the operator runs")
@click.option("--image", help="image of the operator")
@click.option("--connector-image", help="image that installs the connector in engine pods")
@click.option("--janitor-image", help="image of the janitors")
@click.option("--crd/--no-crd", "with_crd", default=True, help="also the definition of KVCacheTier")
@output.output_option("yaml")
def generate(  # noqa: PLR0913 - options
    *,
    namespace: str,
    image: str | None,
    connector_image: str | None,
    janitor_image: str | None,
    with_crd: bool,
    output_format: str,
) -> int:
    """Print all objects of an operator for every namespace.

    Single namespaces, several operators and monitoring are values of the chart: `kvtier install chart`.
    """
    import yaml  # noqa: PLC0415  the group's help does without it

    # The namespace stands in metadata, in subjects, and in the account that the admission policy is about.
    text = carried_file(OPERATOR).read_text().replace(_NAMESPACE, namespace)
    documents = [each for each in yaml.safe_load_all(text) if each]
    variables = {"KVTIER_CONNECTOR_IMAGE": connector_image, "KVTIER_JANITOR_IMAGE": janitor_image}
    deployment = next(each for each in documents if each["kind"] == "Deployment")
    for container in deployment["spec"]["template"]["spec"]["containers"]:
        container["image"] = image or container["image"]
        set_here = {name: value for name, value in variables.items() if value}
        rest = [each for each in container["env"] if each["name"] not in set_here]
        container["env"] = [*rest, *({"name": name, "value": value} for name, value in set_here.items())]
    if with_crd:
        # A kind must come before its objects, and a namespace before its content.
        documents.insert(0, yaml.safe_load(carried_file(CRD).read_text()))
    if output_format == "yaml":
        click.echo(output.as_yaml(documents), nl=False)
    else:
        rows = [(each["kind"], each["metadata"]["name"]) for each in documents]
        output.show(documents, output_format, lambda: output.columns([("KIND", "NAME"), *rows]))
    return FINE


@install.command(epilog=output.examples("kvtier install chart ./kvtier", "kvtier install chart /tmp/kvtier -o json"))
@click.argument("directory", type=click.Path(file_okay=False, path_type=Path))
@output.output_option()
def chart(directory: Path, *, output_format: str) -> int:
    """Write the Helm chart of this release to DIRECTORY, which must not exist."""
    if directory.exists():
        raise click.UsageError(f"{directory} is there already: name another directory, or remove it")
    shutil.copytree(carried_file(CHART), directory)
    command = f"helm install kvtier {directory} --namespace {_NAMESPACE} --create-namespace"
    output.show({"directory": str(directory), "next": command}, output_format, lambda: f"{command}\n")
    return FINE


def _names_like(_context: click.Context, _parameter: click.Parameter, begun: str) -> list[str]:
    return [each for each in carried_samples() if each.startswith(begun)]


@install.command(
    epilog=output.examples("kvtier install samples", "kvtier install samples minimal | kubectl apply -f -")
)
@click.argument("name", required=False, shell_complete=_names_like)
@output.output_option()
def samples(name: str | None, *, output_format: str) -> int:
    """List the samples, or print the sample of a NAME."""
    found = carried_samples()
    if name is None:
        purposes = {each: _purpose(path) for each, path in found.items()}
        output.show(purposes, output_format, lambda: output.columns([("NAME", "WHAT IT SHOWS"), *purposes.items()]))
        return FINE
    if name not in found:
        raise click.UsageError(f"there is no sample {name}; there are {', '.join(found)}")
    if output_format == "json":
        import yaml  # noqa: PLC0415  as above

        output.show(list(yaml.safe_load_all(found[name].read_text())), output_format, str)
    else:
        click.echo(found[name].read_text(), nl=False)
    return FINE


def _purpose(path: Path) -> str:
    """Return the first sentence of the comment at the top of a file."""
    words: list[str] = []
    for line in path.read_text().splitlines():
        sentence, stop, _ = line.removeprefix("#").strip().partition(". ")
        words.append(sentence)
        if stop or sentence.endswith((".", ":")):
            break
    return " ".join(words).rstrip(".:")
