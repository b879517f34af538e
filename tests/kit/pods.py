# SPDX-License-Identifier: Apache-2.0
"""For tests that run pods: one namespace of a cluster with short words for what tests do, and containers to run."""

from __future__ import annotations

import builtins
import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import yaml

from kvtier_localcluster import kinds
from kvtier_localcluster.cluster import ClusterThread
from kvtier_localcluster.kinds import Json, Kind

NAMESPACE = Kind("v1", "Namespace", "namespaces", is_namespaced=False)

# Answers GET /env with its environment, /file/<path> with a file, /healthz by the presence of ./sick in its directory.
SERVER = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())["SERVER"]


def server(name: str = "main", **fields: Any) -> Json:
    """Return a container that serves HTTP on port 8000, ready when it does; on a busy machine it is not sick."""
    look = {"httpGet": {"path": "/healthz", "port": "http"}, "timeoutSeconds": 60}
    return {
        "name": name,
        "image": "example.org/server:1",
        "command": ["python3", "-c", SERVER],
        "ports": [{"name": "http", "containerPort": 8000}],
        "readinessProbe": {**look, "periodSeconds": 1, "failureThreshold": 1},
        **fields,
    }


def script(text: str, name: str = "main", **fields: Any) -> Json:
    return {"name": name, "image": "example.org/script:1", "command": ["python3", "-c", text], **fields}


def claim(name: str, **fields: Any) -> Json:
    requests = {"resources": {"requests": {"storage": "1Gi"}}}
    return {"metadata": {"name": name}, "spec": {"accessModes": ["ReadWriteMany"], **requests, **fields}}


def claimed(name: str) -> Json:
    """Return what a volume is that is in a claim."""
    return {"persistentVolumeClaim": {"claimName": name}}


def fetch(url: str) -> str | None:
    try:
        with urllib.request.urlopen(url, timeout=60) as answer:
            return str(answer.read().decode())
    except urllib.error.HTTPError as problem:
        problem.close()
        return None
    except OSError:
        return None


def _resource(kind: Kind) -> str:
    return f"{kind.plural}.{kind.api_version.rpartition('/')[0]}".rstrip(".")


class Bench:
    """One namespace of a cluster, and short words for what tests do in it."""

    def __init__(self, cluster: ClusterThread, namespace: str) -> None:
        self.cluster = cluster
        self.namespace = namespace

    def create(self, kind: Kind, manifest: Json) -> Json:
        metadata = {"namespace": self.namespace, **manifest["metadata"]}
        return self.cluster.call(lambda: self.cluster.cluster.client.create(kind, {**manifest, "metadata": metadata}))

    def get(self, kind: Kind, name: str) -> Json | None:
        """Return an object, or None; tests that wait for something ask so often that they ask the server itself."""

        async def find() -> Json | None:
            return self.cluster.cluster.server.get(_resource(kind), self.namespace, name)

        return self.cluster.call(find)

    def list(self, kind: Kind) -> builtins.list[Json]:
        async def find() -> builtins.list[Json]:
            return self.cluster.cluster.server.list(_resource(kind), self.namespace)

        return self.cluster.call(find)

    def patch(self, kind: Kind, name: str, change: Json) -> Json:
        target = self.get(kind, name)
        assert target is not None
        return self.cluster.call(lambda: self.cluster.cluster.client.patch(kind, target, change))

    def delete(self, kind: Kind, name: str, grace_seconds: int | None = None) -> None:
        target = self.get(kind, name)
        assert target is not None
        client = self.cluster.cluster.client
        self.cluster.call(lambda: client.delete(kind, target, grace_seconds=grace_seconds))

    def pod(self, name: str, *containers: Json, mounts: dict[str, Json] | None = None, **spec: Any) -> Json:
        """Create a pod; `mounts` are volumes by path, `labels` go to its metadata, everything else into its spec."""
        labels, volumes = spec.pop("labels", {}), list(enumerate((mounts or {}).items()))
        places = [{"name": f"v{number}", "mountPath": path} for number, (path, _) in volumes]
        defaults = {
            "terminationGracePeriodSeconds": 2,
            "containers": [{**each, "volumeMounts": places} for each in containers],
            "volumes": [{"name": f"v{number}", **source} for number, (_, source) in volumes],
        }
        return self.create(kinds.POD, {"metadata": {"name": name, "labels": labels}, "spec": {**defaults, **spec}})

    def deployment(self, name: str, *containers: Json, replicas: int = 2, **spec: Any) -> Json:
        """Create a Deployment whose pods carry the label `app`."""
        template = {
            "metadata": {"labels": {"app": name}},
            "spec": {"terminationGracePeriodSeconds": 2, "containers": list(containers)},
        }
        body = {"replicas": replicas, "selector": {"matchLabels": {"app": name}}, "template": template, **spec}
        return self.create(kinds.DEPLOYMENT, {"metadata": {"name": name}, "spec": body})

    def status(self, name: str) -> Json:
        """Return the status of a pod; empty where there is none."""
        pod = self.get(kinds.POD, name)
        return {} if pod is None else dict(pod["status"])

    def container(self, pod: str, name: str = "main", field: str = "containerStatuses") -> Json:
        """Return the status of a container; empty where there is none."""
        return next((each for each in self.status(pod).get(field, []) if each["name"] == name), {})

    def waiting(self, pod: str, name: str = "main", field: str = "containerStatuses") -> Json:
        """Return what a container waits for; empty where it does not."""
        return dict(self.container(pod, name, field).get("state", {}).get("waiting") or {})

    def is_ready(self, name: str) -> bool:
        pod = self.get(kinds.POD, name)
        return pod is not None and kinds.is_ready(pod)

    def url(self, name: str, path: str = "") -> str:
        return f"http://{self.status(name)['podIP']}:8000{path}"

    def ask(self, name: str, path: str) -> str:
        answer = fetch(self.url(name, path))
        assert answer is not None
        return answer

    def environment(self, name: str) -> dict[str, str]:
        return dict(json.loads(self.ask(name, "/env")))

    def events(self, about: str) -> builtins.list[tuple[str, str]]:
        """Return reason and message of the Events about an object."""
        found = [event for event in self.list(kinds.EVENT) if event["involvedObject"]["name"] == about]
        return [(event["reason"], event["message"]) for event in found]

    def reasons(self, about: str) -> set[str]:
        return {reason for reason, _ in self.events(about)}

    def log(self, pod: str, container: str = "main") -> str:
        url = f"{self.cluster.url}/api/v1/namespaces/{self.namespace}/pods/{pod}/log?container={container}"
        return fetch(url) or ""
