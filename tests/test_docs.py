# SPDX-License-Identifier: Apache-2.0
"""What the documentation tells people to apply is valid, and what it links to exists."""

from __future__ import annotations

import re
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(
    path for path in ROOT.rglob("*.md") if not {".venv", ".kvtier", "node_modules"} & set(path.relative_to(ROOT).parts)
)


@pytest.mark.parametrize("version", ["1.29", "1.37"])
def test_the_operator_installs_on_the_oldest_and_the_newest_kubernetes(version: str) -> None:
    for manifest in yaml.safe_load_all((ROOT / "docs/operator.yaml").read_text()):
        kubernetes_validate.validate(manifest, version, strict=True)


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
