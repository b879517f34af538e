# SPDX-License-Identifier: Apache-2.0
"""What the documentation has people apply is valid, what it names and links to exists, what it promises is so."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import ci_tools
import kubernetes_schemas
import pytest
import yaml
from definition import tier_definition

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(
    path for path in ROOT.rglob("*.md") if not {".venv", ".kvtier", "node_modules"} & set(path.relative_to(ROOT).parts)
)


@pytest.mark.parametrize("version", ["1.29", "1.37"])
def test_the_operator_installs_on_the_oldest_and_the_newest_kubernetes(version: str) -> None:
    since = {"ValidatingAdmissionPolicy": "1.30", "ValidatingAdmissionPolicyBinding": "1.30"}
    for manifest in yaml.safe_load_all((ROOT / "docs/operator.yaml").read_text()):
        if since.get(manifest["kind"], version) <= version:
            kubernetes_schemas.validate(manifest, version)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_within_the_repository_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?://|#|mailto:)([^)#\s]+)", page.read_text())
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_every_page_is_found_from_the_readme() -> None:
    linked = set(re.findall(r"\]\(([^)#\s]+)", (ROOT / "README.md").read_text()))
    written = {
        str(page.relative_to(ROOT)) for folder in ("docs", "connector", "crds") for page in (ROOT / folder).glob("*.md")
    }
    assert written - linked == set()


def test_every_target_of_make_is_explained() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z0-9-]+):", makefile, re.MULTILINE))
    explained = set(re.findall(r"^([a-z0-9-]+):.*## ", makefile, re.MULTILINE))
    assert targets - explained == set()


def test_every_page_of_the_site_is_in_its_menu() -> None:
    site = ci_tools.load("site")
    menu = (ROOT / "mkdocs.yml").read_text()
    own = [page for page in site.pages() if "results" not in page.parts]
    assert [str(page) for page in own if not re.search(rf"(: |- ){re.escape(str(page))}$", menu, re.MULTILINE)] == []


def test_what_is_linked_from_the_site_and_is_no_page_of_it_is_a_link_to_the_repository(tmp_path: Path) -> None:
    site = ci_tools.load("site")
    site.gather(tmp_path / "pages")
    for page in site.pages():
        targets = re.findall(r"\]\((?!https?://|#|mailto:)([^)#\s]+)", (tmp_path / "pages" / page).read_text())
        assert [each for each in targets if not (tmp_path / "pages" / page.parent / each).exists()] == []


def test_a_picture_of_the_site_leads_to_itself_in_full_size(tmp_path: Path) -> None:
    site = ci_tools.load("site")
    site.gather(tmp_path / "pages")
    shown = [
        (page, alone, file)
        for page in site.pages()
        for alone, file in re.findall(r"(\[?)!\[[^\]]*\]\(([^)]+)\)", (tmp_path / "pages" / page).read_text())
    ]
    assert {Path("README.md"), Path("docs/operations.md")} <= {page for page, _, _ in shown}
    assert [(str(page), file) for page, alone, file in shown if not alone] == []
    assert (tmp_path / "pages" / "site.css").read_text().startswith("/*")


PAGE = (Path(__file__).resolve().parents[1] / "docs/support.md").read_text()
TABLE = PAGE.split("## Stability by field")[1].split("\n## ")[0]
EXPERIMENTAL = re.findall(r"`((?:spec|status)\.[A-Za-z.]+)`", TABLE)
(VERSION,) = tier_definition()["spec"]["versions"]


@pytest.mark.parametrize("path", EXPERIMENTAL)
def test_an_experimental_field_is_a_field(path: str) -> None:
    node: dict[str, Any] = VERSION["schema"]["openAPIV3Schema"]
    for name in path.split("."):
        node = node["properties"][name]
    assert node["description"]


def test_the_promise_is_of_the_served_version() -> None:
    assert (VERSION["served"], VERSION["storage"]) == (True, True)
    assert f"`{VERSION['name']}` is served until" in TABLE
    assert len(EXPERIMENTAL) > 8


FAULTS = (ROOT / "docs/troubleshooting.md").read_text()
PROOFS = (ROOT / "tests/connector/faults/README.md").read_text()


def functions_in(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


def rows(text: str) -> list[list[str]]:
    """Return the cells of a table, without its head."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[1:]]


def test_every_fault_of_the_page_is_proved_by_tests_that_exist() -> None:
    faults = rows(FAULTS.split("## Faults")[1].split("\n## ")[0])
    assert [cells[0] for cells in faults] == [cells[0] for cells in rows(PROOFS)]
    named = [re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", cells[1]) for cells in rows(PROOFS)]
    assert all(named)
    missing = [f"{path}::{name}" for each in named for path, name in each if name not in functions_in(ROOT / path)]
    assert missing == []


def test_every_metric_that_the_page_names_is_served() -> None:
    served = (ROOT / "connector/METRICS.md").read_text()
    named = set(re.findall(r"vllm:kvtier_\w+", FAULTS))
    assert [name for name in named if f"`{name}`" not in served] == []


def test_every_cause_that_the_page_names_is_one_the_connector_counts() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "connector/kvtier_connector").rglob("*.py"))
    causes = set(re.findall(r'cause="(\w+)"', FAULTS))
    assert len(causes) > 8
    assert [cause for cause in causes if f'"{cause}"' not in sources] == []


def test_every_condition_that_the_page_names_is_reported() -> None:
    reported = (ROOT / "docs/conditions.md").read_text()
    named = set(re.findall(r"condition `(\w+)`", FAULTS))
    assert named
    assert [name for name in named if f"## {name}\n" not in reported] == []


def test_the_readme_of_the_embedded_cluster_promises_what_is_tested() -> None:
    files = sorted((ROOT / "tests/conformance").glob("test_*.py"))
    wanted = [f"| {path.stem} | {ast.get_docstring(ast.parse(path.read_text()))} |" for path in files]
    readme = (ROOT / "e2e/localcluster/README.md").read_text()
    assert [line for line in readme.splitlines() if line.startswith("| test_")] == wanted
