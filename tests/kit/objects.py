# SPDX-License-Identifier: Apache-2.0
"""What the tests of conformance are made of: kubectl, and manifests."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml
from targets import Target

Json = dict[str, Any]
GROUP = "conformance.kvtier.dev"
Http = Callable[..., tuple[int, Any]]
"""`http(method, path, body, media_type=..., accept=..., headers=..., **query)` returns code and decoded answer."""
Watch = Callable[..., Iterator[Json]]
"""`watch(path, **query)` iterates over the events of a watch."""
Until = Callable[[Callable[[], Any]], Any]
"""`until(condition)` waits until the condition is true and returns its value."""
Define = Callable[[Json], Json]
"""`define(crd)` makes a CustomResourceDefinition for the rest of the suite, once it is served."""


class Kubectl:
    """Runs kubectl in the namespace of a test."""

    def __init__(self, target: Target, namespace: str) -> None:
        self._target = target
        self.namespace = namespace

    def run(self, *arguments: str, stdin: Any = None) -> subprocess.CompletedProcess[str]:
        text = stdin if stdin is None or isinstance(stdin, str) else json.dumps(stdin)
        command = [*self._target.kubectl, f"--namespace={self.namespace}", *arguments]
        return subprocess.run(command, input=text, capture_output=True, text=True, timeout=270, check=False)

    def __call__(self, *arguments: str, stdin: Any = None) -> str:
        done = self.run(*arguments, stdin=stdin)
        assert done.returncode == 0, (arguments, done.stdout, done.stderr)
        return done.stdout

    def fails(self, *arguments: str, stdin: Any = None) -> str:
        done = self.run(*arguments, stdin=stdin)
        assert done.returncode != 0, (arguments, done.stdout)
        return done.stderr

    def json(self, *arguments: str) -> Json:
        found: Json = json.loads(self(*arguments, "--output=json"))
        return found


def definition(kind: str, schema: Json, **version: Any) -> Json:
    """Return a CustomResourceDefinition of the suite's group with one version."""
    plural = f"{kind.lower()}s"
    names = {"plural": plural, "singular": kind.lower(), "kind": kind, "listKind": f"{kind}List"}
    served = {"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}, **version}
    spec = {"group": GROUP, "scope": "Namespaced", "names": names, "versions": [served]}
    metadata = {"name": f"{plural}.{GROUP}"}
    kind_of_it = {"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition"}
    return {**kind_of_it, "metadata": metadata, "spec": spec}


WIDGET_SCHEMA: Json = yaml.safe_load(Path(__file__).with_name("widget.yaml").read_text())


def refusal(answered: tuple[int, Any], code: int = 422, reason: str = "Invalid") -> Json:
    """Return what a server says that refuses a request with this code and reason."""
    refused: Json = answered[1]
    assert (answered[0], refused["reason"]) == (code, reason), refused
    return refused


def widget(name: str = "a", /, **spec: Any) -> Json:
    return {"apiVersion": f"{GROUP}/v1", "kind": "Widget", "metadata": {"name": name}, "spec": {"size": 1, **spec}}


def pod(name: str = "p", /, labels: dict[str, str] | None = None, **spec: Any) -> Json:
    containers = [{"name": "main", "image": "registry.k8s.io/pause:3.10"}]
    metadata = {"name": name, "labels": labels or {}}
    settled = {"terminationGracePeriodSeconds": 1, "automountServiceAccountToken": False, "containers": containers}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {**settled, **spec}}


def deployment(name: str = "web", /, replicas: int = 2, **spec: Any) -> Json:
    labels = {"app": name}
    template = {"metadata": {"labels": labels}, "spec": pod()["spec"]}
    body = {"replicas": replicas, "selector": {"matchLabels": labels}, "template": template, **spec}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name}, "spec": body}


def claim(name: str = "data") -> Json:
    spec = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Mi"}}}
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name}, "spec": spec}


def config_map(name: str = "c", /, **data: str) -> Json:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": data}
