# SPDX-License-Identifier: Apache-2.0
"""A running API server for each test, plain HTTP to it, and manifests."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import objects
import pytest
import waiting
import yaml
from kubernetes import client, config
from plain_http import PlainHttp

from kvtier_localcluster.apiserver import ApiServerThread

DEADLINE_SECONDS = 120.0


@pytest.fixture
def api() -> Iterator[ApiServerThread]:
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
    made = config.new_client_from_config_dict(yaml.safe_load(api.kubeconfig()))
    with made:
        yield made


@pytest.fixture
def crd() -> objects.Json:
    """The CustomResourceDefinition of Widgets, for a test to change."""
    paths = {"specReplicasPath": ".spec.replicas", "statusReplicasPath": ".status.replicas"}
    return objects.definition(
        "Widget", copy.deepcopy(objects.WIDGET_SCHEMA), subresources={"status": {}, "scale": paths}
    )


@pytest.fixture
def widgets(api: ApiServerThread, crd: objects.Json) -> str:
    """The path of the Widgets in the default namespace, served."""
    api.create(crd)
    return f"/apis/{objects.GROUP}/v1/namespaces/default/widgets"
