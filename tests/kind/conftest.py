# SPDX-License-Identifier: Apache-2.0
"""Where the end-to-end scenarios run: in the cluster of E2E_KUBECONFIG, or in an embedded one with light engines.

They know of a cluster what kubectl tells. What differs is said here: what an engine is, and how the operator is
replaced by another version. `make e2e-kind` makes a cluster with kind, with images of this checkout and vLLM's CPU
build; the embedded one runs the real operator, the real janitor and the real store, and stands in for vLLM.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "e2e")]

import light_cluster  # noqa: E402 - found through the line above
from kind_cluster import Cluster  # noqa: E402 - found through the line above


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory, of_group: ExitStack) -> Cluster:
    if kubeconfig := os.environ.get("E2E_KUBECONFIG"):
        return Cluster(
            kubeconfig=kubeconfig,
            model={"name": "Qwen/Qwen2.5-0.5B-Instruct"},
            engine={
                "image": "vllm/vllm-openai-cpu:v0.32.0",
                "accelerator": {"resource": "none"},
                "memory": "4Gi",
                "cpu": "500m",
                "args": ["--max-model-len=4096", "--dtype=bfloat16", "--enforce-eager"],
                "env": [{"name": "VLLM_CPU_KVCACHE_SPACE", "value": "1"}],
            },
            claim={"size": "10Gi", "accessModes": ["ReadWriteMany"], "storageClassName": "shared"},
            upgrade=lambda: _run_upgrade(os.environ["E2E_UPGRADE"]),
        )
    image = light_cluster.make_image(tmp_path_factory.mktemp("image"))
    bench, operator = of_group.enter_context(light_cluster.running_cluster(image, tmp_path_factory.mktemp("cluster")))
    return Cluster(
        kubeconfig=str(bench.cluster.kubeconfig),
        model={"name": "org/model"},
        engine={"accelerator": {"resource": "none"}, "memory": "64Mi", "cpu": "10m"},
        claim={"size": "10Gi", "accessModes": ["ReadWriteMany"]},
        upgrade=lambda: operator.replace("example.org/light-connector:2"),
    )


def _run_upgrade(command: str) -> None:
    """Run what make e2e-kind says that replaces the operator."""
    subprocess.run(command, shell=True, check=True, timeout=600)
