# SPDX-License-Identifier: Apache-2.0
"""The quickstart on kind, run from its first line to its last: docker and kind are stood in for, and vLLM is.

Everything else is real: kubectl, helm, the chart, the operator as the chart starts it, the janitor and the store.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import page_shell
import pytest
import yaml
from page_shell import Shell

ROOT = Path(__file__).resolve().parents[2]
TAG = "tried"


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    """Run the script in an embedded cluster that knows its images."""
    images = {f"kvtier-{name}:{TAG}": name for name in ("operator", "connector", "janitor")}
    with page_shell.running(tmp_path_factory.mktemp("quickstart"), images) as shell:
        done = shell.run(f"TAG={TAG} bash e2e/kind/quickstart.sh")
        assert done.returncode == 0, done.stdout + done.stderr
        yield shell


def listed(shell: Shell, kind: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(shell.run(f"kubectl get {kind} -A -o json").stdout)["items"]
    return found


def test_its_tier_is_ready_and_its_engines_share_the_volume_of_the_class(shell: Shell) -> None:
    (tier,) = listed(shell, "kvcachetiers")
    assert {each["type"]: each["status"] for each in tier["status"]["conditions"]}["Ready"] == "True"
    (claim,) = listed(shell, "persistentvolumeclaims")
    (volume,) = (each for each in listed(shell, "persistentvolumes"))
    assert claim["spec"]["storageClassName"] == volume["spec"]["storageClassName"]
    assert claim["spec"]["accessModes"] == volume["spec"]["accessModes"] == ["ReadWriteMany"]


def test_every_image_of_ours_was_built_from_this_checkout_and_loaded_before_it_is_used(shell: Shell) -> None:
    containers = [
        container
        for pod in listed(shell, "pods")
        for group in ("initContainers", "containers")
        for container in pod["spec"].get(group, ())
    ]
    used = {each["image"] for each in containers}
    ours = {image for image in used if "kvtier" in image}
    assert used - ours == {"vllm/vllm-openai-cpu:v0.32.0"}
    builds = [dict(zip(words[::2], words[1::2], strict=False)) for words in shell.told("docker", "build")]
    assert {each["--tag"] for each in builds} == ours
    assert all((ROOT / each["--file"]).is_file() for each in builds)
    (loaded,) = shell.told("kind", "load", "docker-image")
    assert ours <= set(loaded)
    assert {each["imagePullPolicy"] for each in containers if each["image"] in ours} == {"IfNotPresent"}


def test_the_nodes_of_its_cluster_mount_what_the_volume_is_in(shell: Shell) -> None:
    (words,) = shell.told("kind", "create", "cluster")
    nodes = yaml.safe_load((ROOT / words[words.index("--config") + 1]).read_text())["nodes"]
    mounts = [mount for node in nodes if node["role"] == "worker" for mount in node["extraMounts"]]
    (volume,) = listed(shell, "persistentvolumes")
    assert {mount["hostPath"] for mount in mounts} == {"/tmp/kvtier-kind"}
    assert all(volume["spec"]["hostPath"]["path"] == f"{mount['containerPath']}/blocks" for mount in mounts)
