# SPDX-License-Identifier: Apache-2.0
"""A cluster with the real operator, the real janitor and the real store; only vLLM is stood in for."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from pods import Bench, fetch
from waiting import until

import kvtier_connector
from kvtier_localcluster import kinds
from kvtier_localcluster.cluster import ClusterSettings, ClusterThread, default_images
from kvtier_localcluster.kinds import Kind
from kvtier_localcluster.node.environment import ImageProfile
from kvtier_localcluster.node.services import NodeSettings

ROOT = Path(__file__).resolve().parents[2]
TIER = Kind("kvtier.dev/v1beta1", "KVCacheTier", "kvcachetiers")

INSTALL = """
import shutil, sys
shutil.copytree({source!r}, sys.argv[sys.argv.index("--target") + 1], dirs_exist_ok=True)
"""


def make_image(root: Path) -> Path:
    """Return what stands for the connector's image: it installs an engine of our own beside the real connector."""
    server = root / "content" / "vllm" / "entrypoints" / "openai"
    server.mkdir(parents=True)
    for package in (server, *server.parents[:2]):
        (package / "__init__.py").touch()
    shutil.copy(Path(__file__).with_name("light_engine.py"), server / "api_server.py")
    connector = Path(kvtier_connector.__path__[0])
    for place in ("content", "installer"):
        shutil.copytree(connector, root / place / connector.name, ignore=shutil.ignore_patterns("__pycache__"))
    installer = root / "installer" / connector.name / "pod_tools" / "install.py"
    installer.write_text(INSTALL.format(source=str(root / "content")))
    return root / "installer"


class Operator:
    """The operator, as a process that can be replaced by another version of itself."""

    def __init__(self, kubeconfig: Path) -> None:
        self._kubeconfig = kubeconfig
        self._process: subprocess.Popen[bytes] | None = None

    def replace(self, connector_image: str) -> None:
        """End the one that runs, if any, and start one that brings this connector."""
        self.stop()
        environment = {
            **os.environ,
            "KUBECONFIG": str(self._kubeconfig),
            "KVTIER_CONNECTOR_IMAGE": connector_image,
            "KVTIER_PROBE_SECONDS": "1",
            "KVTIER_RESYNC_SECONDS": "2",
        }
        command = [sys.executable, "-m", "kvtier_cli", "run", "--namespace", "default"]
        self._process = subprocess.Popen(command, env=environment)

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait(60)


@contextmanager
def running_bench(image: Path, data: Path) -> Iterator[Bench]:
    """Run the cluster with an operator for the namespace default."""
    with running_cluster(image, data) as (bench, _):
        yield bench


@contextmanager
def running_cluster(image: Path, data: Path) -> Iterator[tuple[Bench, Operator]]:
    profile = ImageProfile(prefix="example.org/light", environment={"PYTHONPATH": str(image)})
    settings = ClusterSettings(
        data=data,
        node=NodeSettings(images=[*default_images(), profile], stop_grace_seconds=2),
        allocatable={"cpu": "64", "memory": "256Gi", "nvidia.com/gpu": "8"},
    )
    with ClusterThread(settings) as cluster:
        definition = yaml.safe_load((ROOT / "crds" / "kvcachetier.yaml").read_text())
        cluster.call(lambda: cluster.cluster.server.create(definition))
        operator = Operator(cluster.kubeconfig)
        operator.replace("example.org/light-connector:1")
        try:
            yield Bench(cluster, "default"), operator
        finally:
            operator.stop()


def _condition(status: dict[str, Any], kind: str) -> dict[str, Any]:
    return next((each for each in status.get("conditions", ()) if each["type"] == kind), {})


class Tier:
    """One tier, in the words of the tests."""

    def __init__(self, bench: Bench, name: str, *, engine: dict[str, Any] | None = None, **spec: Any) -> None:
        self.bench, self.name = bench, name
        body = {
            "model": {"name": "org/model"},
            "engine": {"accelerator": {"resource": "none"}, "memory": "64Mi", "cpu": "10m", **(engine or {})},
            "cpu": {"size": "1Mi"},
            "volume": {"claim": {"size": "10Gi"}, "deletionPolicy": "Delete"},
            **spec,
        }
        body = {name: value for name, value in body.items() if value is not None}
        bench.create(
            TIER, {"apiVersion": TIER.api_version, "kind": TIER.name, "metadata": {"name": name}, "spec": body}
        )

    def patch(self, **spec: Any) -> None:
        self.bench.patch(TIER, self.name, {"spec": spec})

    def status(self) -> dict[str, Any]:
        return (self.bench.get(TIER, self.name) or {}).get("status", {})

    def condition(self, kind: str) -> dict[str, Any]:
        return _condition(self.status(), kind)

    def reaches(self, kind: str, status: str, reason: str = "") -> dict[str, Any]:
        """Wait for a condition of the present generation, and return it."""

        def found() -> dict[str, Any] | None:
            tier = self.bench.get(TIER, self.name) or {}
            generation, condition = tier["metadata"]["generation"], _condition(tier.get("status", {}), kind)
            is_met = condition.get("status") == status and condition.get("observedGeneration") == generation
            return condition if is_met and reason in {"", condition["reason"]} else None

        return until(found)

    def pods(self, component: str = "engine") -> list[dict[str, Any]]:
        wanted = {"kvtier.dev/tier": self.name, "app.kubernetes.io/component": component}
        return [pod for pod in self.bench.list(kinds.POD) if wanted.items() <= pod["metadata"]["labels"].items()]

    def ask(self, request: str, *, engine: int = 0) -> dict[str, Any]:
        """Return what the engine answers, or another one by its place in the order of names, when it does."""

        def answer() -> str | None:
            pods = sorted(self.pods(), key=lambda pod: str(pod["metadata"]["name"]))
            living = [pod for pod in pods if "deletionTimestamp" not in pod["metadata"] and "podIP" in pod["status"]]
            return fetch(f"http://{living[engine]['status']['podIP']}:8000/{request}") if living[engine:] else None

        found: dict[str, Any] = json.loads(str(until(answer)))
        return found

    def disk(self) -> dict[str, Any]:
        return next((each for each in self.status().get("tiers", ()) if each["name"] == "disk"), {})
