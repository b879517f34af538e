# SPDX-License-Identifier: Apache-2.0
"""The quickstart on kind, run from its first line to its last: docker and kind are stood in for, and vLLM is.

Everything else is real: kubectl, helm, the chart, the operator as the chart starts it, the janitor and the store.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ci_tools
import light_cluster
import pytest
import yaml

from kvtier_localcluster.cluster import ClusterSettings, ClusterThread, default_images
from kvtier_localcluster.node.environment import ImageProfile
from kvtier_localcluster.node.services import NodeSettings

ROOT = Path(__file__).resolve().parents[2]
TAG = "tried"
NOTE = '#!/bin/sh\nfor word in "$(basename "$0")" "$@"; do printf "%s\\t" "$word"; done >>"$NOTES"\necho >>"$NOTES"\n'
"""A program that notes what it was told to do, and does nothing."""


class Tried:
    """What a run of the script has done."""

    def __init__(self, kubectl: list[str], notes: Path) -> None:
        self._kubectl = kubectl
        self._notes = notes

    def told(self, *program: str) -> list[list[str]]:
        """Return the words of each command of docker or kind that begins like this."""
        lines = [line.strip("\t").split("\t") for line in self._notes.read_text().splitlines()]
        return [words[len(program) :] for words in lines if words[: len(program)] == list(program)]

    def get(self, *words: str) -> list[dict[str, Any]]:
        """Return objects of all namespaces."""
        done = subprocess.run(
            [*self._kubectl, "get", *words, "-A", "-o", "json"], check=True, capture_output=True, text=True
        )
        found: list[dict[str, Any]] = json.loads(done.stdout)["items"]
        return found


@pytest.fixture(scope="module")
def tried(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tried]:
    """Run the script in an embedded cluster that knows its images."""
    folder = tmp_path_factory.mktemp("quickstart")
    programs, notes = folder / "bin", folder / "notes"
    programs.mkdir()
    for name in ("docker", "kind"):
        (programs / name).write_text(NOTE)
        (programs / name).chmod(0o755)
    kubectl, helm = (ci_tools.load("helm").binary(name) for name in ("kubectl", "helm"))
    (programs / "kubectl").symlink_to(kubectl)
    (programs / "helm").symlink_to(helm)
    ours = {each.prefix: each for each in default_images()}["ghcr.io/kvtier/operator:"]
    installer = light_cluster.make_image(folder / "image")
    images = [
        ImageProfile(prefix=f"kvtier-operator:{TAG}", environment=ours.environment, entrypoint=ours.entrypoint),
        ImageProfile(prefix=f"kvtier-connector:{TAG}", environment={"PYTHONPATH": str(installer)}),
        ImageProfile(prefix=f"kvtier-janitor:{TAG}", environment=ours.environment),
    ]
    settings = ClusterSettings(
        data=folder / "cluster",
        node=NodeSettings(images=images, stop_grace_seconds=2, isolates_memory=False),
        allocatable={"cpu": "64", "memory": "256Gi"},
    )
    with ClusterThread(settings) as cluster:
        environment = {
            **os.environ,
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "KUBECONFIG": str(cluster.kubeconfig),
            "HOME": str(folder),
            "NOTES": str(notes),
            "TAG": TAG,
        }
        # One machine stands for all nodes here, and the operator's metrics would take the port of their own Service.
        command = ["bash", "e2e/kind/quickstart.sh", "--set", "metrics.enabled=false"]
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        yield Tried([str(kubectl), f"--kubeconfig={cluster.kubeconfig}"], notes)


def test_its_tier_is_ready_and_its_engines_share_the_volume_of_the_class(tried: Tried) -> None:
    (tier,) = tried.get("kvcachetiers")
    ready = {each["type"]: each["status"] for each in tier["status"]["conditions"]}
    assert ready["Ready"] == "True"
    (claim,) = tried.get("persistentvolumeclaims")
    (volume,) = (each for each in tried.get("persistentvolumes"))
    assert claim["spec"]["storageClassName"] == volume["spec"]["storageClassName"]
    assert claim["spec"]["accessModes"] == volume["spec"]["accessModes"] == ["ReadWriteMany"]


def test_every_image_of_ours_was_built_from_this_checkout_and_loaded_before_it_is_used(tried: Tried) -> None:
    containers = [
        container
        for pod in tried.get("pods")
        for group in ("initContainers", "containers")
        for container in pod["spec"].get(group, ())
    ]
    used = {each["image"] for each in containers}
    ours = {image for image in used if "kvtier" in image}
    assert used - ours == {"vllm/vllm-openai-cpu:v0.32.0"}
    builds = [dict(zip(words[::2], words[1::2], strict=False)) for words in tried.told("docker", "build")]
    assert {each["--tag"] for each in builds} == ours
    assert all((ROOT / each["--file"]).is_file() for each in builds)
    (loaded,) = tried.told("kind", "load", "docker-image")
    assert ours <= set(loaded)
    assert {each["imagePullPolicy"] for each in containers if each["image"] in ours} == {"IfNotPresent"}


def test_the_nodes_of_its_cluster_mount_what_the_volume_is_in(tried: Tried) -> None:
    (words,) = tried.told("kind", "create", "cluster")
    nodes = yaml.safe_load((ROOT / words[words.index("--config") + 1]).read_text())["nodes"]
    mounts = [mount for node in nodes if node["role"] == "worker" for mount in node["extraMounts"]]
    (volume,) = tried.get("persistentvolumes")
    assert {mount["hostPath"] for mount in mounts} == {"/tmp/kvtier-kind"}
    assert all(volume["spec"]["hostPath"]["path"] == f"{mount['containerPath']}/blocks" for mount in mounts)
