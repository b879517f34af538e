# SPDX-License-Identifier: Apache-2.0
"""A cluster for faults around the operator: the embedded API server, controllers and operators.

The controllers here are reduced to what a tier waits for, and told by the API server what changed, so that the machine
is left to the operator: claims are bound, Jobs end well, pods stand and are ready, Deployments report it.
"""

from __future__ import annotations

import json
import queue
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml
from aiohttp import web
from e2e.bench.operator_scale import NAMESPACE, OperatorProcess, running

from kvtier_localcluster.apiserver import ApiError, ApiServerThread
from kvtier_localcluster.apiserver.requests import parse_path

ROOT = Path(__file__).resolve().parents[2]
TIERS = f"/apis/kvtier.dev/v1alpha1/namespaces/{NAMESPACE}/kvcachetiers"
AGENT = "cluster"
CONTROLLERS = 3
_SETTLED = {"deployments", "jobs", "persistentvolumeclaims"}
_MERGE = "application/merge-patch+json"
Json = dict[str, Any]


class BenchCluster:
    """The API server and the controllers, each in a thread; who asked for what is counted as it comes in."""

    def __init__(self) -> None:
        """Make a cluster; entering the context starts it."""
        self.api = ApiServerThread()
        self.requests: dict[str, int] = {}
        """Requests of operators, by verb and plural; leases apart from the rest."""
        self.faults: list[Callable[[web.Request], ApiError | None]] = []
        """Asked for operators' requests alone."""
        self._work: queue.SimpleQueue[tuple[str, str] | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(CONTROLLERS)]
        # The server's thread would keep the others of this process waiting for 5 ms at each of their requests.
        sys.setswitchinterval(0.0005)

    def __enter__(self) -> Self:
        """Start, with the CRD."""
        self.api.start()
        self.api.create(yaml.safe_load((ROOT / "crds" / "kvcachetier.yaml").read_text()))
        self.api.server.faults.append(self._look)
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop."""
        for _ in self._threads:
            self._work.put(None)
        for thread in self._threads:
            thread.join()
        self.api.close()

    def call(self, method: str, path: str, body: Json | None = None) -> Json:
        """Send a request as somebody who is no operator."""
        request = urllib.request.Request(
            self.api.url + path,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": _MERGE if method == "PATCH" else "application/json", "User-Agent": AGENT},
        )
        with urllib.request.urlopen(request, timeout=30) as response:
            found: Json = json.load(response)
            return found

    def tiers(self) -> list[Json]:
        """Return all tiers."""
        found: list[Json] = self.call("GET", TIERS)["items"]
        return found

    def _look(self, request: web.Request) -> ApiError | None:
        target = parse_path(request.path)
        if target is None or request.headers.get("User-Agent") == AGENT:
            return None
        is_watch = "watch" in request.query
        what = "watch" if is_watch else request.method
        self.requests[f"{what} {target.plural}"] = self.requests.get(f"{what} {target.plural}", 0) + 1
        for fault in list(self.faults):
            error = fault(request)
            if error is not None:
                return error
        if request.method == "PATCH" and target.name and target.plural in _SETTLED:
            self._work.put((target.plural, target.name))
        return None

    def writes(self) -> dict[str, int]:
        """Return the writes of operators so far, by what; the Lease is named like any other."""
        return {what: count for what, count in self.requests.items() if what.split()[0] not in {"GET", "watch"}}

    def _run(self) -> None:
        retry: set[tuple[str, str]] = set()
        while True:
            try:
                work = self._work.get(timeout=0.2 if retry else None)
            except queue.Empty:
                due = retry
            else:
                if work is None:
                    return
                due = {work}
            for each in tuple(due):
                retry.discard(each)
                try:
                    self._settle(*each)
                except urllib.error.HTTPError as error:
                    error.close()
                    # Not there yet, or changed meanwhile: unless its tier has gone, it is looked at again.
                    if error.code != 404 or self._is_young(each):
                        retry.add(each)

    def _is_young(self, work: tuple[str, str]) -> bool:
        """Tell whether the request that told us of an object may not have been carried out yet: its tier is there."""
        name = work[1].rpartition("-")[0]
        return self.api.get("kvcachetiers.kvtier.dev", NAMESPACE, name) is not None

    def _settle(self, plural: str, name: str) -> None:
        core = f"/api/v1/namespaces/{NAMESPACE}"
        if plural == "persistentvolumeclaims":
            self.call("PATCH", f"{core}/{plural}/{name}/status", {"status": {"phase": "Bound"}})
            return
        if plural == "jobs":
            self._pod(core, f"{name}-0", self.call("GET", f"/apis/batch/v1/namespaces/{NAMESPACE}/jobs/{name}"))
            return
        path = f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments/{name}"
        deployment = self.call("GET", path)
        count, metadata = deployment["spec"]["replicas"], deployment["metadata"]
        have = {pod["metadata"]["name"] for pod in self.api.list("pods", NAMESPACE)} if count > 1 else set()
        for number in range(count):
            pod = f"{name}-{number}"
            if pod not in have:
                self._pod(core, pod, deployment)
        for extra in sorted(each for each in have if each.startswith(f"{name}-") and _number(each) >= count):
            self.call("DELETE", f"{core}/pods/{extra}")
        numbers = dict.fromkeys(("replicas", "updatedReplicas", "readyReplicas", "availableReplicas"), count)
        self.call("PATCH", f"{path}/status", {"status": {"observedGeneration": metadata["generation"], **numbers}})

    def _pod(self, core: str, name: str, of: Json) -> None:
        metadata, template = of["metadata"], of["spec"]["template"]
        owner = {"apiVersion": of["apiVersion"], "kind": of["kind"], "name": metadata["name"], "uid": metadata["uid"]}
        made = {**template["metadata"], "name": name, "ownerReferences": [{**owner, "controller": True}]}
        if of["kind"] == "Deployment":
            # Of its ReplicaSet there is nothing but the name that its pods carry; they go with the Deployment.
            stamp = f"{hash(json.dumps(template, sort_keys=True)) & 0xFFFFFFFF:x}"
            made["labels"] = {**made["labels"], "pod-template-hash": stamp}
            replica_set = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": f"{metadata['name']}-{stamp}"}
            made["ownerReferences"] = [{**owner, **replica_set, "controller": True}]
        try:
            self.call(
                "POST",
                f"{core}/pods",
                {"apiVersion": "v1", "kind": "Pod", "metadata": made, "spec": template["spec"]},
            )
        except urllib.error.HTTPError as error:
            error.close()
            if error.code != 409:
                raise
        conditions = [{"type": kind, "status": "True"} for kind in ("PodScheduled", "Ready")]
        status: Json = {"phase": "Running", "conditions": conditions}
        if of["kind"] == "Job":
            ended = {"exitCode": 0, "message": '{"problem": ""}'}
            container = {"name": "preflight", "image": "i", "imageID": "", "ready": False, "restartCount": 0}
            status = {"phase": "Succeeded", "containerStatuses": [{**container, "state": {"terminated": ended}}]}
        self.call("PATCH", f"{core}/pods/{name}/status", {"status": status})


def _number(pod: str) -> int:
    return int(pod.rpartition("-")[2])


def is_final(body: Json) -> bool:
    """Tell whether a tier is ready in its present generation."""
    conditions = {each["type"]: each for each in (body.get("status") or {}).get("conditions", ())}
    ready = conditions.get("Ready", {})
    return bool(ready.get("status") == "True" and ready.get("observedGeneration") == body["metadata"]["generation"])


def operator(
    cluster: BenchCluster, folder: Path, *arguments: str, **environment: str
) -> AbstractContextManager[OperatorProcess]:
    """Run an operator of this checkout for the namespace of the benchmark."""
    folder.mkdir(parents=True, exist_ok=True)
    kubeconfig = cluster.api.write_kubeconfig(folder / "kubeconfig")
    return running(folder, kubeconfig, "-n", NAMESPACE, *arguments, **environment)
