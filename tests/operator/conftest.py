# SPDX-License-Identifier: Apache-2.0
"""What the operator's tests share: a path to their fakes, and an API server that knows our resource."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from definition import tier_definition
from kubernetes.config import kube_config

from kvtier_localcluster.apiserver import ApiServerThread

sys.path.insert(0, str(Path(__file__).parent))

from asking_pods import running
from live import Client, Controllers

from kvtier_operator.observe.http_client import HttpClient


@pytest.fixture
def asker() -> Iterator[HttpClient]:
    with running() as made:
        yield made


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServerThread]:
    """A live API server, which whoever asks KUBECONFIG finds."""
    with ApiServerThread() as server:
        server.create(tier_definition())
        file = str(server.write_kubeconfig(tmp_path / "kubeconfig"))
        monkeypatch.setenv("KUBECONFIG", file)
        # kopf asks the package, which looked at the variable when it was imported.
        monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", file)
        yield server


@pytest.fixture
def kubectl(api: ApiServerThread) -> Client:
    return Client(api.url)


@pytest.fixture
def controllers(kubectl: Client, api: ApiServerThread) -> Iterator[None]:
    with Controllers(kubectl, api):
        yield
