# SPDX-License-Identifier: Apache-2.0
"""What the documentation tells people to apply is valid, and what it links to exists."""

from __future__ import annotations

import re
from pathlib import Path

import ci_tools
import kubernetes_schemas
import pytest
import yaml

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
