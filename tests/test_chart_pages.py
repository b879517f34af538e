# SPDX-License-Identifier: Apache-2.0
"""What the chart says of itself, to people, to Artifact Hub, and to who mirrors its images."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ci_tools
import pytest
import yaml

from kvtier_operator import names
from kvtier_operator.api import parse
from kvtier_operator.parts import render
from kvtier_operator.plan import make_unchecked_plan

ROOT = Path(__file__).resolve().parents[1]
CHART = ROOT / "charts" / "kvtier"
pages, helm = ci_tools.load("chart_pages"), ci_tools.load("release").helm
LISTED = (CHART / "images.txt").read_text().split()
TIERS = sorted((ROOT / "tests/operator/golden").glob("*/tier.yaml")) + sorted((ROOT / "crds/samples").glob("*.yaml"))
HUB = yaml.safe_load((CHART / "Chart.yaml").read_text())["annotations"]


def leaves(node: dict[str, Any], path: str = "") -> Iterator[str]:
    for name, value in node.items():
        if isinstance(value, dict) and value and name not in {"labels", "resources", "podSecurityContext"}:
            yield from leaves(value, f"{path}{name}.")
        else:
            yield path + name


def test_the_readme_names_every_value_with_its_default() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    found = {path: default for path, _, default in pages.rows()}
    assert [path for path in leaves(values) if not any(f"{each}.".startswith(f"{path}.") for each in found)] == []
    assert (found["leaderElection.leaseSeconds"], found["metrics.dashboards.labels"]) == (
        12,
        {"grafana_dashboard": "1"},
    )


def images_of(node: Any) -> Iterator[str]:
    """Yield what the containers of any object run, and the images that its environment names."""
    if isinstance(node, dict):
        for name, value in node.items():
            if name == "image" and isinstance(value, str):
                yield value
            elif name == "value" and str(node.get("name", "")).endswith("_IMAGE"):
                yield str(value)
            else:
                yield from images_of(value)
    elif isinstance(node, list):
        for each in node:
            yield from images_of(each)


@pytest.mark.parametrize("path", TIERS, ids=lambda path: path.parent.name if path.name == "tier.yaml" else path.stem)
def test_the_list_of_images_has_each_that_a_tier_does_not_name_itself(path: Path) -> None:
    text = path.read_text()
    for body in yaml.safe_load_all(text):
        if body["kind"] == names.KIND:
            connector = next(each for each in LISTED if "/connector:" in each)
            made = render(make_unchecked_plan(parse(body), names.tier_ref(body), connector_image=connector))
            used = set(images_of(list(made)))
            assert used
            assert {each for each in used if each not in text} <= set(LISTED)


def test_the_list_of_images_has_those_of_the_chart() -> None:
    text = helm("template", "kvtier", str(CHART), "--set=crds.install=false")
    assert set(images_of([each for each in yaml.safe_load_all(text) if each])) <= set(LISTED)


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ((), {f"registry.local:5000/mirror/kvtier/{name}:0.1.0" for name in ("operator", "connector", "janitor")}),
        (
            ("--set=image.digest=sha256:" + "0" * 64, "--set=janitorImage=quay.local/janitor:1"),
            {
                "registry.local:5000/mirror/kvtier/operator@sha256:" + "0" * 64,
                "registry.local:5000/mirror/kvtier/connector:0.1.0",
                "quay.local/janitor:1",
            },
        ),
    ],
    ids=["defaults", "with images of one's own"],
)
def test_one_value_moves_what_the_chart_names_to_a_mirror(more: tuple[str, ...], expected: set[str]) -> None:
    mirror = "--set=global.imageRegistry=registry.local:5000/mirror"
    text = helm("template", "kvtier", str(CHART), "--set=crds.install=false", mirror, *more)
    assert set(images_of([each for each in yaml.safe_load_all(text) if each])) == expected


def test_artifact_hub_is_told_of_images_definitions_examples_and_changes() -> None:
    listed = {
        name: yaml.safe_load(HUB[f"artifacthub.io/{name}"])
        for name in ("images", "crds", "crdsExamples", "changes", "links")
    }
    assert [each["image"] for each in listed["images"]] == LISTED
    assert len({each["name"] for each in listed["images"]}) == len(LISTED)
    (definition,) = listed["crds"]
    assert (definition["kind"], definition["version"]) == (names.KIND, names.VERSION)
    for body in listed["crdsExamples"]:
        parse({**body, "metadata": {"namespace": "default", **body["metadata"]}})
    assert {each["kind"] for each in listed["changes"]} <= {
        "added",
        "changed",
        "deprecated",
        "removed",
        "fixed",
        "security",
    }
    assert len(listed["changes"]) == (ROOT / "CHANGELOG.md").read_text().split("\n## ")[1].count("\n- ")
    assert all(each["url"].startswith("https://") for each in listed["links"])
    assert HUB["artifacthub.io/operatorCapabilities"] in (ROOT / "docs/support.md").read_text()


def test_the_chart_has_an_icon_and_a_licence_that_exist() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (ROOT / chart["icon"].partition("/main/")[2]).read_text().startswith("<svg")
    assert f'license = "{HUB["artifacthub.io/license"]}"' in (ROOT / "pyproject.toml").read_text()
    assert all(isinstance(value, str) for value in HUB.values())
