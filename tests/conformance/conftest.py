# SPDX-License-Identifier: Apache-2.0
"""One cluster for the whole suite, reached as anybody reaches it: through kubectl, and through HTTP by its proxy.

Without more it is the embedded cluster. CONFORMANCE_KUBECONFIG names another one, CONFORMANCE_ASSETS a directory with
etcd and kube-apiserver (KUBEBUILDER_ASSETS of envtest); `make conformance` sets them from the usual variables.
"""

from __future__ import annotations

import functools
import os
import secrets
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import ci_tools
import pytest
import waiting
from objects import GROUP, WIDGET_SCHEMA, Define, Http, Json, Kubectl, Until, Watch, definition
from plain_http import PlainHttp
from targets import Target, embedded, of_assets, of_kubeconfig

SECONDS = 120.0
WIDGETS = f"/apis/{GROUP}/v1"


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory, of_group: ExitStack) -> Target:
    folder = tmp_path_factory.mktemp("conformance")
    program = ci_tools.load("helm").binary("kubectl")
    if assets := os.environ.get("CONFORMANCE_ASSETS"):
        making = of_assets(Path(assets), folder, program)
    elif kubeconfig := os.environ.get("CONFORMANCE_KUBECONFIG"):
        making = of_kubeconfig(Path(kubeconfig), folder, program)
    else:
        making = embedded(folder, program)
    return of_group.enter_context(making)


@pytest.fixture(autouse=True)
def _has_what_it_needs(request: pytest.FixtureRequest, target: Target) -> None:
    for mark in request.node.iter_markers("needs"):
        for what in mark.args:
            if what not in target.offers:
                pytest.skip(f"{target.name} has no {what}")
    for mark in request.node.iter_markers("since"):
        if target.minor < mark.args[0]:
            pytest.skip(f"{target.name} is Kubernetes 1.{target.minor}, and this is so since 1.{mark.args[0]}")


@pytest.fixture(scope="session")
def http(target: Target) -> Http:
    """`http(method, path, body, media_type=..., accept=..., headers=..., **query)` returns code and decoded answer."""

    plain = PlainHttp(target.proxy, seconds=SECONDS)

    def send(*request: Any, **options: Any) -> tuple[int, Any]:
        code, answer = plain.send(*request, **options)
        return code, {"message": answer} if isinstance(answer, str) else answer

    return send


@pytest.fixture
def watch(target: Target) -> Iterator[Watch]:
    """`watch(path, **query)` iterates over the events of a watch."""
    plain = PlainHttp(target.proxy, seconds=SECONDS)
    yield functools.partial(plain.watch, timeoutSeconds="120")
    plain.close()


@pytest.fixture
def until() -> Until:
    """`until(condition)` waits until the condition is true and returns its value."""
    return functools.partial(waiting.until, seconds=SECONDS, pause_seconds=0.05)


@pytest.fixture
def namespace(target: Target, http: Http) -> Iterator[str]:
    name = f"conformance-{secrets.token_hex(4)}"
    code, answer = http("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
    assert code == 201, answer
    yield name
    http("DELETE", f"/api/v1/namespaces/{name}")


@pytest.fixture
def kubectl(target: Target, namespace: str) -> Kubectl:
    return Kubectl(target, namespace)


@pytest.fixture
def core(namespace: str) -> str:
    return f"/api/v1/namespaces/{namespace}"


@pytest.fixture
def apps(namespace: str) -> str:
    return f"/apis/apps/v1/namespaces/{namespace}"


CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"


@pytest.fixture(scope="session")
def widget_definition() -> Json:
    paths = {"specReplicasPath": ".spec.replicas", "statusReplicasPath": ".status.replicas"}
    columns = [
        {"name": "Size", "type": "integer", "jsonPath": ".spec.size"},
        {"name": "Ready", "type": "string", "jsonPath": '.status.conditions[?(@.type=="Ready")].status'},
        {"name": "Mode", "type": "string", "jsonPath": ".spec.mode", "priority": 1},
        {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"},
    ]
    made = definition(
        "Widget",
        WIDGET_SCHEMA,
        subresources={"status": {}, "scale": {**paths, "labelSelectorPath": ".status.selector"}},
        additionalPrinterColumns=columns,
    )
    made["spec"]["names"] |= {"shortNames": ["wdg"], "categories": ["all"]}
    return made


@pytest.fixture(scope="session")
def define(http: Http, of_group: ExitStack) -> Define:
    """`define(crd)` makes a CustomResourceDefinition for the rest of the suite, once it is served."""

    def create(crd: Json) -> Json:
        code, answer = http("POST", CRDS, crd)
        assert code == 201, answer
        of_group.callback(http, "DELETE", f"{CRDS}/{crd['metadata']['name']}")
        version, plural = crd["spec"]["versions"][0]["name"], crd["spec"]["names"]["plural"]
        collection = f"/apis/{crd['spec']['group']}/{version}/{plural}"
        waiting.until(lambda: http("GET", collection)[0] == 200, seconds=SECONDS)
        created: Json = answer
        return created

    return create


@pytest.fixture(scope="session")
def _widgets_served(define: Define, widget_definition: Json) -> None:
    define(widget_definition)


@pytest.fixture
def widgets(_widgets_served: None, namespace: str) -> str:
    return f"{WIDGETS}/namespaces/{namespace}/widgets"
