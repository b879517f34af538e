# SPDX-License-Identifier: Apache-2.0
"""A live API server with everything around the operator that it needs: clients' hands, and controllers in a thread."""

from __future__ import annotations

import gc
import json
import threading
import time
import urllib.error
import urllib.request
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Self

from e2e.bench.processes import MeasuredProcess
from e2e.bench.processes import running as run_module
from tiers import made_by, tier

from kvtier_localcluster.apiserver import ApiServerThread
from kvtier_operator.controller import Operator
from kvtier_operator.handlers import serve
from kvtier_operator.kube.client import connect
from kvtier_operator.kube.http_server import Health
from kvtier_operator.metrics import OperatorMetrics
from kvtier_operator.settings import Settings

NAMESPACE = "default"
CORE, APPS, TIERS, BATCH = "/api/v1", "/apis/apps/v1", "/apis/kvtier.dev/v1beta1", "/apis/batch/v1"
MERGE = "application/merge-patch+json"
AGENT = "test"
"""User agent of every request that no operator sends."""


def body(name: str = "llama", /, **spec: Any) -> dict[str, Any]:
    return {**tier(**spec), "metadata": {"name": name, "namespace": NAMESPACE}}


class Client:
    """kubectl's hands: plain HTTP requests in one namespace."""

    def __init__(self, url: str) -> None:
        self._url = url

    def call(self, method: str, path: str, body: Any = None, content_type: str = "application/json") -> dict[str, Any]:
        """Send a request and return the answer; raise HTTPError for a status of 400 and more."""
        request = urllib.request.Request(
            self._url + path,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": content_type, "User-Agent": AGENT},
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            found: dict[str, Any] = json.load(response)
            return found

    def path(self, group: str, plural: str, name: str = "") -> str:
        return f"{group}/namespaces/{NAMESPACE}/{plural}{f'/{name}' if name else ''}"

    def get(self, group: str, plural: str, name: str) -> dict[str, Any] | None:
        try:
            return self.call("GET", self.path(group, plural, name))
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            raise

    def names(self, group: str, plural: str) -> set[str]:
        return {item["metadata"]["name"] for item in self.items(group, plural)}

    def items(self, group: str, plural: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.call("GET", self.path(group, plural))["items"]
        return found

    def merge(self, group: str, plural: str, name: str, patch: Any, *, sub: str = "") -> dict[str, Any]:
        return self.call("PATCH", self.path(group, plural, name) + sub, patch, MERGE)

    def apply_tier(self, body: dict[str, Any]) -> dict[str, Any]:
        return self.call("POST", self.path(TIERS, "kvcachetiers"), body)

    def delete(self, group: str, plural: str, name: str) -> None:
        self.call("DELETE", self.path(group, plural, name))

    def condition(self, kind: str, name: str = "llama") -> dict[str, Any]:
        return _condition(self.get(TIERS, "kvcachetiers", name) or {}, kind)

    def is_ready(self, name: str = "llama") -> bool:
        """Tell whether the tier is ready in its present generation."""
        found = self.get(TIERS, "kvcachetiers", name) or {}
        current = found.get("metadata", {}).get("generation")
        ready = _condition(found, "Ready")
        return ready.get("status") == "True" and ready.get("observedGeneration") == current


def _condition(tier: dict[str, Any], kind: str) -> dict[str, Any]:
    return next((each for each in tier.get("status", {}).get("conditions", ()) if each["type"] == kind), {})


class Controllers:
    """What a real cluster does to children: binds claims, makes pods, reports Deployments. One thread, stateless."""

    def __init__(self, client: Client, api: ApiServerThread) -> None:
        self._client = client
        self._api = api
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        looked_at = -1
        while not self._stop.wait(0.05):
            # What was right stays so until somebody writes.
            if (version := self._api.server.version) == looked_at:
                continue
            looked_at = version
            try:
                self._step()
            except urllib.error.HTTPError as error:
                # Deleted, or changed by somebody else, between our look and our write: the next step sees that.
                assert error.code in {404, 409}, error  # noqa: PT017  a thread's assertion ends the thread, as it should

    def _step(self) -> None:
        client = self._client
        for claim in client.items(CORE, "persistentvolumeclaims"):
            if claim["status"].get("phase") != "Bound":
                name = claim["metadata"]["name"]
                client.merge(CORE, "persistentvolumeclaims", name, {"status": {"phase": "Bound"}}, sub="/status")
        wanted: dict[str, dict[str, Any]] = {}
        reports: dict[str, dict[str, Any]] = {}
        for deployment in client.items(APPS, "deployments"):
            wanted |= self._pods(deployment)
            count = deployment["spec"]["replicas"]
            status: dict[str, Any] = {
                "observedGeneration": deployment["metadata"]["generation"],
                "replicas": count,
                "updatedReplicas": count,
                "readyReplicas": count,
            }
            if any(deployment.get("status", {}).get(key) != value for key, value in status.items()):
                reports[deployment["metadata"]["name"]] = {"status": status}
        jobs = {f"{job['metadata']['name']}-0": job for job in client.items(BATCH, "jobs")}
        groups = {name: job["spec"]["template"]["spec"]["securityContext"].get("fsGroup") for name, job in jobs.items()}
        # A Job that asks for the group 7 never gets a pod.
        wanted |= {name: pod_of_job(job, name) for name, job in jobs.items() if groups[name] != 7}
        live = {pod["metadata"]["name"] for pod in client.items(CORE, "pods")}
        for name in live - wanted.keys():
            client.delete(CORE, "pods", name)
        for name in wanted.keys() - live:
            client.call("POST", client.path(CORE, "pods"), wanted[name])
            status = {"conditions": [{"type": kind, "status": "True"} for kind in ("PodScheduled", "Ready")]}
            if name in jobs:
                ended = {"exitCode": 0, "message": '{"problem": "", "read_bytes_per_second": 1048576}'}
                container = {"name": "preflight", "image": "i", "imageID": "", "ready": False, "restartCount": 0}
                status = {"phase": "Succeeded", "containerStatuses": [{**container, "state": {"terminated": ended}}]}
            client.merge(CORE, "pods", name, {"status": status}, sub="/status")
        # Last, for a rollout is only complete once the pods it replaces are gone.
        for name, report in reports.items():
            client.merge(APPS, "deployments", name, report, sub="/status")

    def _pods(self, deployment: dict[str, Any]) -> dict[str, dict[str, Any]]:
        template, metadata = deployment["spec"]["template"], deployment["metadata"]
        text = json.dumps(template, sort_keys=True)
        stamp = f"{sum(map(ord, text)) % 0xFFFF:x}"
        names = [f"{metadata['name']}-{stamp}-{number}" for number in range(deployment["spec"]["replicas"])]
        return {
            name: {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {
                    "name": name,
                    "labels": {**template["metadata"]["labels"], "pod-template-hash": stamp},
                    "annotations": template["metadata"].get("annotations", {}),
                    # Of the ReplicaSet there is nothing but its name: they go with their Deployment.
                    "ownerReferences": [{**made_by(f"{metadata['name']}-{stamp}"), "uid": metadata["uid"]}],
                },
                "spec": template["spec"],
            }
            for name in names
        }


def pod_of_job(job: dict[str, Any], name: str) -> dict[str, Any]:
    template, uid = job["spec"]["template"], job["metadata"]["uid"]
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": job["metadata"]["name"], "uid": uid, "controller": True}
    about = {"name": name, "namespace": NAMESPACE, "ownerReferences": [owner]}
    metadata = {**about, "labels": template["metadata"]["labels"]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}


@contextmanager
def running(*, health: Health | None = None, **changes: Any) -> Iterator[OperatorMetrics]:
    """Run the operator in a thread as `kvtier run` does, and stop it gracefully."""
    defaults = {"namespaces": (NAMESPACE,), "debounce_seconds": 0.02, "resync_seconds": 30.0}
    settings = Settings(**{**defaults, **changes})
    metrics, stop = OperatorMetrics(), threading.Event()
    operator = Operator(settings, cluster=connect(on_answer=metrics.count_request), metrics=metrics, health=health)
    failures: list[BaseException] = []

    def target() -> None:
        try:
            serve(operator, stop)
        except BaseException as error:  # noqa: BLE001  a thread hands its error to the test
            failures.append(error)

    thread = threading.Thread(target=target, name="operator")
    thread.start()
    try:
        yield metrics
    finally:
        stop.set()
        thread.join(120)
        assert not thread.is_alive(), "the operator does not stop"
        assert not failures, failures
        with warnings.catch_warnings():
            # What kopf opens in the moment in which it stops, it never closes: a session, its connector, their sockets.
            warnings.simplefilter("ignore", ResourceWarning)
            gc.collect()


def agents(api: ApiServerThread, *verbs: str) -> list[str]:
    """Return the requests with these verbs that were not made by the test itself."""
    return [str(entry) for entry in list(api.server.audit) if entry.verb in verbs and entry.user_agent != AGENT]


def operator_process(kubeconfig: Path, *arguments: str, **environment: str) -> AbstractContextManager[MeasuredProcess]:
    """Run an operator of this checkout for the namespace, with its log beside its kubeconfig."""
    log, words = kubeconfig.with_name(f"operator-{time.monotonic_ns()}.log"), ("-n", NAMESPACE, *arguments)
    return run_module(log, "kvtier_cli", "run", *words, KUBECONFIG=str(kubeconfig), **environment)
