# SPDX-License-Identifier: Apache-2.0
"""A terminal in front of a cluster: kubectl and helm, what they print, and what happens beside them."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Final

import yaml
from aiohttp import web
from e2e.bench.operator_cluster import NAMESPACE, BenchCluster, Json, OperatorProcess, running, tier, until

from kvtier_localcluster.apiserver import ApiError
from kvtier_localcluster.apiserver.audit import parse_path
from kvtier_localcluster.client import ApiClient
from kvtier_localcluster.controllers.roles import RoleController
from kvtier_localcluster.informers import Informers

ROOT: Final = Path(__file__).resolve().parents[2]
TOOLS: Final = ROOT / ".ci" / "helm.py"
SLOW: Final = 60.0


class SlowCluster(BenchCluster):
    """A cluster in which engines of some Deployments take their time."""

    def __init__(self) -> None:
        """Have nothing slow."""
        super().__init__()
        self.slow: set[str] = set()
        """Deployments whose new pods do not get ready."""

    def _settle(self, plural: str, name: str) -> None:
        if plural != "deployments" or name not in self.slow:
            super()._settle(plural, name)
            return
        path = f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments/{name}"
        deployment = self.call("GET", path)
        count, ready = deployment["spec"]["replicas"], deployment.get("status", {}).get("readyReplicas", 0)
        numbers = {"replicas": count, "updatedReplicas": count, "readyReplicas": ready, "availableReplicas": ready}
        status = {"observedGeneration": deployment["metadata"]["generation"], **numbers}
        self.call("PATCH", f"{path}/status", {"status": status})


class Scene:
    """One cluster, a terminal in front of it, and what is written down of both."""

    def __init__(self, cluster: SlowCluster, folder: Path) -> None:
        """Begin with an empty page."""
        self.cluster = cluster
        self.folder = folder
        self.kubeconfig = cluster.api.write_kubeconfig(folder / "kubeconfig")
        self.lines: list[str] = []
        self._binaries = _binaries()

    def title(self, number: int, text: str) -> None:
        """Begin a finding."""
        self.lines += ["", "=" * 120, f"{number}. {text}", "=" * 120]

    def say(self, text: str) -> None:
        """Note what happens beside the terminal."""
        self.lines += ["", f"# {text}"]

    def run(self, command: str, *, stdin: str = "", is_quiet: bool = False) -> str:
        """Type a command and return what it prints, errors included; nothing is noted of a quiet one."""
        program, *arguments = shlex.split(command)
        environment = {**os.environ, "KUBECONFIG": str(self.kubeconfig), "HOME": str(self.folder)}
        done = subprocess.run(
            [str(self._binaries[program]), *arguments],
            check=False,
            input=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        if not is_quiet:
            self.lines += [
                "",
                f"$ {command.replace(f'{self.folder}/', '').replace(f'{ROOT}/', '')}",
                done.stdout.rstrip(),
            ]
        return str(done.stdout)

    def show(self, *names: str) -> None:
        """Type what everybody types first. Of `describe`, the spec is left out: it is what was applied."""
        self.run(f"kubectl get kvt {' '.join(names)}")
        for name in names:
            text = self.run(f"kubectl describe kvt {name}", is_quiet=True)
            text = re.sub(r"^Spec:\n.*?^Status:", "Spec:  (as applied)\nStatus:", text, flags=re.MULTILINE | re.DOTALL)
            self.lines += ["", f"$ kubectl describe kvt {name}", text.rstrip()]

    def operator(self, **environment: str) -> AbstractContextManager[OperatorProcess]:
        """Run an operator for the whole cluster."""
        return running(self.folder, self.kubeconfig, "-A", **environment)

    def apply(self, name: str, **spec: Any) -> None:
        """Apply a tier."""
        self.run("kubectl apply -f -", stdin=yaml.safe_dump(tier(name, **spec)))

    def tier(self, name: str) -> Json:
        """Return a tier."""
        return self.cluster.api.get("kvcachetiers.kvtier.dev", NAMESPACE, name) or {}

    def condition(self, name: str, kind: str) -> Mapping[str, str]:
        """Return a condition of a tier; empty texts where there is none."""
        found = (self.tier(name).get("status") or {}).get("conditions", ())
        return next((each for each in found if each["type"] == kind), {"status": "", "reason": "", "message": ""})

    def wait(self, name: str, kind: str, said: str) -> None:
        """Wait until a condition has that status or reason, of the present spec."""

        def is_said() -> bool:
            found = self.condition(name, kind)
            is_current = found.get("observedGeneration") == self.tier(name)["metadata"]["generation"]
            return is_current and said in {found["status"], found["reason"]}

        began = time.monotonic()
        try:
            until(is_said, seconds=SLOW, pause=0.1)
        except TimeoutError as error:
            raise TimeoutError(f"{kind} of {name} is not {said}, but {dict(self.condition(name, kind))}") from error
        self.say(f"{kind} is {said} after {time.monotonic() - began:.1f} s")

    def ready(self, name: str, **spec: Any) -> None:
        """Have a tier that is ready."""
        self.apply(name, **spec)
        self.wait(name, "Ready", "True")

    def pod_of(self, name: str) -> str:
        """Return a pod of a Deployment."""
        pods = [str(each["metadata"]["name"]) for each in self.cluster.api.list("pods", NAMESPACE)]
        return next(each for each in pods if each.startswith(f"{name}-"))


def _binaries() -> dict[str, Path]:
    """Return kubectl and helm of the locked tools."""
    code = f"import runpy; t = runpy.run_path({str(TOOLS)!r}); print(t['binary']('kubectl')); print(t['binary']())"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return dict(zip(("kubectl", "helm"), map(Path, done.stdout.split()), strict=True))


@contextmanager
def without_right(cluster: BenchCluster, plural: str) -> Iterator[None]:
    """Forbid a kind to operators."""

    def fault(request: web.Request) -> ApiError | None:
        target = parse_path(request.path)
        is_theirs = "kubectl" not in request.headers.get("User-Agent", "")
        is_meant = is_theirs and target is not None and target.plural == plural
        return ApiError(403, "Forbidden", f"{plural}.policy is forbidden: no rule allows it") if is_meant else None

    cluster.faults.append(fault)
    try:
        yield
    finally:
        cluster.faults.remove(fault)


@contextmanager
def aggregated_roles(cluster: BenchCluster) -> Iterator[None]:
    """Run the controller that fills in the roles everybody has."""
    loop, stopping = asyncio.new_event_loop(), asyncio.Event()

    async def work() -> None:
        client = ApiClient(cluster.api.url)
        await client.start()
        informers = Informers(client)
        controller = RoleController(client, informers)
        await informers.start()
        running = asyncio.create_task(controller.run())
        await stopping.wait()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await informers.stop()
        await client.close()

    thread = threading.Thread(target=loop.run_until_complete, args=(work(),))
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(stopping.set)
        thread.join()
        loop.close()
