# SPDX-License-Identifier: Apache-2.0
"""A running API server for each test, plain HTTP to it, and a small CustomResourceDefinition."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import waiting
import yaml
from kubernetes import client, config
from plain_http import PlainHttp

from kvtier_localcluster.apiserver import ApiServerThread

DEADLINE_SECONDS = 120.0


@pytest.fixture
def api() -> Iterator[ApiServerThread]:
    """A running, empty server."""
    with ApiServerThread(bookmark_seconds=0.2) as running:
        yield running


@pytest.fixture
def http(api: ApiServerThread) -> Callable[..., tuple[int, Any]]:
    """`http(method, path, body, media_type=..., accept=..., **query)` returns the code and the decoded answer."""

    return PlainHttp(api.url, seconds=DEADLINE_SECONDS).send


@pytest.fixture
def watch(api: ApiServerThread) -> Iterator[Callable[..., Iterator[dict[str, Any]]]]:
    """`watch(path, **query)` iterates over the events of a watch."""
    plain = PlainHttp(api.url, seconds=DEADLINE_SECONDS)
    yield plain.watch
    plain.close()


@pytest.fixture
def until() -> Callable[[Callable[[], Any]], Any]:
    """`until(condition)` waits until the condition is true and returns its value."""

    return functools.partial(waiting.until, seconds=DEADLINE_SECONDS)


@pytest.fixture
def python_client(api: ApiServerThread) -> Iterator[client.ApiClient]:
    """The official Python client."""
    made = config.new_client_from_config_dict(yaml.safe_load(api.kubeconfig()))
    with made:
        yield made


ENGINE_SCHEMA: dict[str, Any] = {
    "type": "object",
    "description": "An Engine runs a model.",
    "required": ["spec"],
    "properties": {
        "spec": {
            "type": "object",
            "description": "What the user wants.",
            "required": ["model"],
            "x-kubernetes-validations": [
                {"rule": "self.model == oldSelf.model", "message": "model is immutable"},
                {
                    "rule": "quantity(self.memory).compareTo(quantity('1Gi')) >= 0",
                    "message": "memory must be at least 1Gi",
                },
            ],
            "properties": {
                "model": {"type": "string", "description": "Name of the model.", "minLength": 1},
                "replicas": {"type": "integer", "default": 1, "minimum": 0},
                "memory": {"type": "string", "default": "2Gi"},
                "mode": {"type": "string", "enum": ["Fast", "Slow"], "default": "Fast"},
                "ports": {
                    "type": "array",
                    "x-kubernetes-list-type": "map",
                    "x-kubernetes-list-map-keys": ["name"],
                    "items": {
                        "type": "object",
                        "required": ["name"],
                        "properties": {"name": {"type": "string"}, "port": {"type": "integer", "default": 80}},
                    },
                },
                "tags": {"type": "array", "x-kubernetes-list-type": "set", "items": {"type": "string"}},
                "args": {"type": "array", "items": {"type": "string"}},
                "free": {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
            },
        },
        "status": {
            "type": "object",
            "x-kubernetes-preserve-unknown-fields": True,
            "properties": {"replicas": {"type": "integer"}, "selector": {"type": "string"}},
        },
    },
}


@pytest.fixture
def engine_crd() -> dict[str, Any]:
    """A CustomResourceDefinition with everything in it that ours uses."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": "engines.demo.dev"},
        "spec": {
            "group": "demo.dev",
            "scope": "Namespaced",
            "names": {
                "plural": "engines",
                "singular": "engine",
                "kind": "Engine",
                "listKind": "EngineList",
                "shortNames": ["eng"],
                "categories": ["all"],
            },
            "versions": [
                {
                    "name": "v1",
                    "served": True,
                    "storage": True,
                    "subresources": {
                        "status": {},
                        "scale": {
                            "specReplicasPath": ".spec.replicas",
                            "statusReplicasPath": ".status.replicas",
                            "labelSelectorPath": ".status.selector",
                        },
                    },
                    "additionalPrinterColumns": [
                        {"name": "Model", "type": "string", "jsonPath": ".spec.model"},
                        {
                            "name": "Ready",
                            "type": "string",
                            "jsonPath": '.status.conditions[?(@.type=="Ready")].status',
                        },
                        {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"},
                    ],
                    "schema": {"openAPIV3Schema": json.loads(json.dumps(ENGINE_SCHEMA))},
                }
            ],
        },
    }


@pytest.fixture
def engine() -> Callable[..., dict[str, Any]]:
    """`engine(name, **spec)` returns a manifest of the kind that `engine_crd` defines."""

    def make(name: str = "a", /, **spec: Any) -> dict[str, Any]:
        return {
            "apiVersion": "demo.dev/v1",
            "kind": "Engine",
            "metadata": {"name": name},
            "spec": {"model": "m", **spec},
        }

    return make


@pytest.fixture
def engines(api: ApiServerThread, engine_crd: dict[str, Any]) -> str:
    """The path of the engines in the default namespace, served."""
    api.create(engine_crd)
    return "/apis/demo.dev/v1/namespaces/default/engines"


@pytest.fixture
def deployment() -> Callable[..., dict[str, Any]]:
    """`deployment(name, **container)` returns a Deployment with one container."""

    def make(name: str = "web", /, **container: Any) -> dict[str, Any]:
        return {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": name},
            "spec": {
                "selector": {"matchLabels": {"app": name}},
                "template": {
                    "metadata": {"labels": {"app": name}},
                    "spec": {"containers": [{"name": "main", "image": "web:1", **container}]},
                },
            },
        }

    return make


@pytest.fixture
def pod() -> Callable[..., dict[str, Any]]:
    """`pod(name, **spec)` returns a Pod with one container."""

    def make(name: str = "p", /, **spec: Any) -> dict[str, Any]:
        containers = [{"name": "main", "image": "web:1"}]
        metadata = {"name": name, "namespace": "default"}
        return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": containers, **spec}}

    return make
