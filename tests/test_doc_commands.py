# SPDX-License-Identifier: Apache-2.0
"""What the documentation has people type at make, helm and kubectl is there; its blocks are tried elsewhere."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import ci_tools
import kubernetes_schemas
import pytest
import yaml

from kvtier_operator.api import parse

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
helm = ci_tools.load("helm")


def code(page: Path) -> str:
    """Return the text of all code on a page, fenced or indented, with lines that go on put together."""
    text = page.read_text()
    fenced = re.findall(r"^ *```[a-z]*\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL)
    indented = re.findall(
        r"(?:^ {4,}\S.*\n)+", re.sub(r"^ *```.*?^ *```", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE
    )
    return re.sub(r"\\\n\s*", " ", "\n".join([*fenced, *indented]))


def commands(tool: str) -> Iterator[Any]:
    for page in PAGES:
        for line in code(page).splitlines():
            for part in re.split(r"&&|;|\|", line.strip().removeprefix("$ ")):
                if re.match(rf"{tool}(\s|$)", part.strip()):
                    yield pytest.param(part.strip(), id=f"{page.name}: {part.strip()[:60]}")


def words(command: str) -> list[str]:
    text = command.partition("  #")[0]
    # What is quoted may go on in the next line.
    return shlex.split(text, comments=True) if text.count("'") % 2 == 0 and text.count('"') % 2 == 0 else text.split()


def documents() -> Iterator[Any]:
    for page in PAGES:
        for text in re.findall(r"^```yaml\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
            for found in yaml.safe_load_all(text):
                yield pytest.param(found, id=f"{page.name}: {found.get('kind')} {found.get('provisioner', '')}")


@pytest.mark.parametrize("document", list(documents()))
def test_a_document_of_the_docs_is_what_its_api_takes(document: dict[str, Any]) -> None:
    if document["kind"] == "KVCacheTier":
        assert parse(document).model.name
    else:
        for version in ("1.29", "1.37"):
            kubernetes_schemas.validate(document, version)


@pytest.mark.parametrize("command", list(commands("make")))
def test_a_target_of_make_is_there(command: str) -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert words(command)[1] in targets


@pytest.mark.parametrize("command", list(commands("helm")))
def test_helm_takes_the_values_that_are_set(command: str) -> None:
    given = words(command)
    if given[1] not in {"install", "upgrade"}:
        return
    sets = [word for word in given if word.startswith("--set=")]
    sets += [f"--set={value}" for name, value in pairwise(given) if name == "--set"]
    place = ["template", "kvtier", str(ROOT / "charts" / "kvtier"), "--namespace=kvtier-system"]
    done = subprocess.run([helm.binary(), *place, *sets], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", list(commands("kubectl")))
def test_a_file_that_kubectl_is_given_is_there(command: str) -> None:
    given = words(command)
    files = [after for name, after in pairwise(given) if name in {"-f", "--patch-file"}]
    assert [file for file in files if "/" in file and "://" not in file and not (ROOT / file).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_verb_after_a_sample_was_applied_names_the_tier_of_the_sample(page: Path) -> None:
    applied = ""
    for line in code(page).splitlines():
        if found := re.search(r"kubectl apply -f (crds/samples/\S+\.yaml)|bash e2e/kind/quickstart\.sh", line):
            body = next(yaml.safe_load_all((ROOT / (found[1] or "e2e/kind/tier.yaml")).read_text()))
            applied = body["metadata"]["name"] if body["kind"] == "KVCacheTier" else ""
        elif applied and (found := re.match(r"\s*(?:kubectl )?kvtier (?:status|mode|restart|pause) ([a-z]\S*)", line)):
            assert found[1] == applied, line


def test_the_operator_that_flux_installs_has_the_name_that_the_docs_have() -> None:
    found = yaml.safe_load_all((ROOT / "crds" / "samples" / "others" / "flux.yaml").read_text())
    (release,) = (each for each in found if each["kind"] == "HelmRelease")
    assert release["spec"]["releaseName"] == "kvtier"
