# SPDX-License-Identifier: Apache-2.0
"""The commands of README and of the page on installing are run as they stand, in the order of the page."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import page_shell
import pytest
from page_shell import Command, Shell

ROOT = Path(__file__).resolve().parents[2]
README, INSTALL = ROOT / "README.md", ROOT / "docs" / "install.md"
REGISTRY = "registry.example.com/team/kvtier"
ELSEWHERE = ("bash e2e/kind/quickstart.sh", "kubectl kvtier status qwen-kind")
"""Commands that test_quickstart runs."""
WITHOUT_HELM = "Without Helm"
AS_ON_1_29 = re.compile(
    r"^$|^\$ export|^export|^kubectl|^kvtier install|kvcachetiers|created|configured|unchanged|applied|Policy|CRDs"
)
"""Commands, and what kubectl prints where admission policies are unknown: in Kubernetes 1.29, and here."""


@pytest.fixture
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    """A cluster that knows the images as the page names them."""
    images = {f"{REGISTRY}-{name}:": name for name in ("operator", "connector", "janitor")}
    with page_shell.running(tmp_path_factory.mktemp("pages"), images) as shell:
        yield shell


def differences(shell: Shell, commands: list[Command]) -> list[str]:
    """Run commands with the variables that the page on installing sets; return what differs from what is shown."""
    texts = [each.text for each in page_shell.commands(INSTALL)]
    variables = "".join(f"{text}\n" for text in texts if text.startswith("export "))
    found = [shell.see(each._replace(text=variables + each.text)) for each in commands if each.text not in ELSEWHERE]
    return [each for each in found if each]


def test_the_page_leads_from_nothing_to_a_shared_hit_and_on_to_its_end(shell: Shell) -> None:
    commands = list(page_shell.commands(INSTALL))
    by_hand = [each for each in commands if each.section == WITHOUT_HELM and "kvtier run" not in each.text]
    rest = [each for each in commands if each.section != WITHOUT_HELM]
    assert len(rest) > 20
    assert shell.run("kubectl create namespace argocd && kubectl -n argocd create configmap argocd-cm").returncode == 0
    assert differences(shell, rest) == []
    built = {words[words.index("-t") + 1] for words in shell.told("docker", "build")}
    assert built == {words[0] for words in shell.told("docker", "push")}
    assert all(image.startswith(REGISTRY) for image in built)
    failed = "\n".join(differences(shell, by_hand)).splitlines()
    assert [line for line in failed if not AS_ON_1_29.search(line)] == []


def test_the_readme_shows_a_tier_that_becomes_ready_as_it_says(shell: Shell) -> None:
    commands = list(page_shell.commands(README))
    install = [each for each in page_shell.commands(INSTALL) if each.section == "2. Install the operator"]
    assert differences(shell, install[:2]) == []
    (shell.folder / "tier.yaml").write_text(page_shell.tiers(README))
    assert [each.text for each in commands if each.text.startswith("make ")]
    assert differences(shell, commands) == []
