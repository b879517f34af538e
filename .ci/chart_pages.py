# SPDX-License-Identifier: Apache-2.0
"""Writes or checks what the chart says of itself: ``python .ci/chart_pages.py --write | --check``.

README.md from values.yaml and its schema, images.txt with every image that chart and operator name by themselves, and
the annotations of Chart.yaml for Artifact Hub. Also the table of the operator's variables in docs/reference.md, which
the chart's `settings.env` sets.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import re
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from kvtier_operator import __version__, names, settings
from kvtier_operator.api.connector_spec import TrialRedis
from kvtier_operator.api.engine_spec import EngineSpec
from kvtier_operator.parts.routing import ROUTER_IMAGE

ROOT = Path(__file__).resolve().parent.parent
CHART = ROOT / "charts" / "kvtier"
SETTINGS = ROOT / "operator" / "kvtier_operator" / "settings.py"
REFERENCE = ROOT / "docs" / "reference.md"
REPOSITORY = "https://github.com/kvtier/kvtier"
SAMPLES = ("minimal", "shared", "encrypted-tenants")
"""Shown on Artifact Hub."""

_README = f"""\
<!-- Written by `make generate` from values.yaml and values.schema.json. -->
# kvtier

The operator of [kvtier]({REPOSITORY}), which keeps the KV cache of vLLM alive on a shared volume.

    helm install kvtier oci://ghcr.io/kvtier/charts/kvtier --namespace kvtier-system --create-namespace
    kubectl kvtier doctor

Version {__version__} is not released yet: build the images and install from `charts/kvtier` of a checkout.

Then [apply a tier]({REPOSITORY}/blob/main/docs/install.md). Upgrades, several operators, single namespaces and removal
are [on the same page]({REPOSITORY}/blob/main/docs/install.md#more-about-the-operator). [images.txt](images.txt) lists
the images for a mirror.

## Values

A value that values.schema.json does not know is an error.

| Value | Type | Default | Meaning |
|---|---|---|---|
"""


def images() -> dict[str, str]:
    """Return the images that the chart and the operator name by default, each with its use."""
    given = settings.Settings()
    return {
        f"ghcr.io/kvtier/operator:{__version__}": "operator",
        given.connector_image: "connector, copied into the pods of engines; preflight",
        given.janitor_image: "janitor",
        ROUTER_IMAGE: "router (`routing.type: Router`)",
        EngineSpec().image: "engines (`engine.image`)",
        TrialRedis().image: "Redis for trying LMCache (`connector.lmcache.redis.trial`)",
    }


def images_text() -> str:
    """Return the list for a mirror, one image a line."""
    return "".join(f"{image}\n" for image in images())


def rows() -> Iterator[tuple[str, str, Any]]:
    """Yield each value that is set in values.yaml: its path, the comment above it, and its default."""
    text = (CHART / "values.yaml").read_text(encoding="utf-8")
    defaults = yaml.safe_load(text)
    path: list[tuple[int, str]] = []
    comment: list[str] = []
    for line in text.splitlines():
        if (found := re.match(r" *# (-- )?(.*)", line)) is not None:
            comment = [found[2]] if found[1] else [*comment, found[2]] if comment else []
        elif (found := re.match(r"( *)([A-Za-z]+):", line)) is not None:
            indent = len(found[1])
            path = [*(each for each in path if each[0] < indent), (indent, found[2])]
            value = defaults
            for _, name in path:
                value = value[name]
            is_parent = line.rstrip().endswith(":")
            if not is_parent or comment:
                yield ".".join(name for _, name in path), " ".join(comment), None if is_parent else value
            comment = []
        elif not line.strip():
            comment = []


def readme() -> str:
    """Return the page of the chart."""
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    lines = []
    for path, meaning, default in rows():
        node = schema
        for name in path.split("."):
            node = node.get("properties", {}).get(name, {})
        kind = " or ".join(f"`{each}`" for each in node["enum"]) if "enum" in node else node.get("type", "")
        shown = "" if default is None else f"`{json.dumps(default, ensure_ascii=False)}`"
        cells = (f"`{path}`", kind, shown, meaning)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n")
    return _README + "".join(lines)


def changes() -> list[dict[str, str]]:
    """Return the entries of the newest version of CHANGELOG.md."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    section = re.findall(r"^## .*\n((?:(?!## ).*\n?)*)", text, re.MULTILINE)[0]
    entries = re.findall(r"^- ((?:.*\n)(?:  .*\n?)*)", section, re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(each.split())) for each in entries]
    return [{"kind": "added", "description": each} for each in plain]


def chart_yaml() -> str:
    """Return Chart.yaml, whose annotations are written anew."""
    text = (CHART / "Chart.yaml").read_text(encoding="utf-8")
    definition = yaml.safe_load((ROOT / "crds/kvcachetier.yaml").read_text(encoding="utf-8"))
    described = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["description"]
    examples = [
        next(
            each
            for each in yaml.safe_load_all((ROOT / f"crds/samples/{name}.yaml").read_text(encoding="utf-8"))
            if each["kind"] == names.KIND
        )
        for name in SAMPLES
    ]
    listed = {
        "changes": changes(),
        "crds": [
            {
                "kind": names.KIND,
                "version": names.VERSION,
                "name": definition["metadata"]["name"],
                "displayName": "KV cache tier",
                "description": described,
            }
        ],
        "crdsExamples": examples,
        "images": [{"name": use.split()[0].rstrip(",").lower(), "image": image} for image, use in images().items()],
        "links": [
            {"name": "documentation", "url": f"{REPOSITORY}/tree/main/docs"},
            {"name": "support", "url": f"{REPOSITORY}/issues"},
        ],
    }
    plain = {
        "category": "ai-machine-learning",
        "license": "Apache-2.0",
        "operator": "true",
        "operatorCapabilities": "Deep Insights",
        "prerelease": "false",
    }
    given = plain | {
        name: yaml.safe_dump(value, sort_keys=False, width=110, allow_unicode=True) for name, value in listed.items()
    }
    annotations = {f"artifacthub.io/{name}": given[name] for name in sorted(given)}
    head = text[: text.index("# Written by `make generate`")]
    tail = yaml.dump({"annotations": annotations}, Dumper=_Blocks, sort_keys=False, width=118, allow_unicode=True)
    return f"{head}# Written by `make generate`; read by Artifact Hub.\n{tail}"


class _Blocks(yaml.SafeDumper):
    """Writes texts of several lines as they are."""


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


_Blocks.add_representer(str, _text)


def variables() -> Iterator[str]:
    """Yield the lines of the table of the operator's variables."""
    (described,) = (each for each in ast.parse(SETTINGS.read_text("utf-8")).body if isinstance(each, ast.ClassDef))
    below = {
        ast.unparse(field.target): text for field, text in pairwise(described.body) if isinstance(field, ast.AnnAssign)
    }
    yield "| Variable | Default | Values | Meaning |\n|---|---|---|---|\n"
    for field in dataclasses.fields(settings.Settings):
        if field.name == "listen_host":
            continue  # decided by the cluster
        meaning = " ".join(ast.literal_eval(below[field.name].value).split()).replace("``", "`")
        default = str(field.default).lower() if isinstance(field.default, bool) else field.default or ""
        values = "true, false" if isinstance(field.default, bool) else ""
        if field.name in settings.RANGES:
            default, values = f"{field.default:g}", "{:g} to {:g}".format(*settings.RANGES[field.name])
        yield f"| `KVTIER_{field.name.upper()}` | {f'`{default}`' if default else ''} | {values} | {meaning} |\n"


def reference() -> str:
    """Return docs/reference.md, whose table of variables is written anew."""
    text = REFERENCE.read_text(encoding="utf-8")
    head, begin, rest = text.partition("<!-- settings -->\n")
    return f"{head}{begin}\n{''.join(variables())}\n{rest[rest.index('<!-- end of settings -->') :]}"


PAGES = {"README.md": readme, "images.txt": images_text, "Chart.yaml": chart_yaml}


def main(arguments: list[str]) -> int:
    """Write the files, or say which of them are stale."""
    made = {CHART / name: make() for name, make in PAGES.items()} | {REFERENCE: reference()}
    if arguments == ["--write"]:
        for path, text in made.items():
            path.write_text(text, encoding="utf-8")
        return 0
    stale = [path for path, text in made.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    for path in stale:
        print(f"{path.relative_to(ROOT)} is stale; run make generate", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
