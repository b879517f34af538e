# SPDX-License-Identifier: Apache-2.0
"""An operator that lacks a right lives on, says where the kubelet looks that it can do nothing, and goes on with it."""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from live import APPS, NAMESPACE, Client
from tiers import tier
from waiting import until

from kvtier_localcluster.apiserver import ApiError, ApiServerThread
from kvtier_localcluster.ports import free_port

SLOW = 120.0

pytestmark = pytest.mark.timeout(400)


@contextmanager
def forbidden(api: ApiServerThread, plural: str) -> Iterator[None]:
    """Refuse operators whatever they ask of a kind."""

    def refuse(request: Any) -> ApiError | None:
        is_theirs = request.headers.get("User-Agent") != "test" and plural in request.path.split("/")
        return ApiError(403, "Forbidden", f"{plural} is forbidden") if is_theirs else None

    api.server.faults.append(refuse)
    yield
    api.server.faults.remove(refuse)


@pytest.fixture
def operator(api: ApiServerThread, tmp_path: Path) -> Iterator[Callable[[], tuple[subprocess.Popen[bytes], int]]]:
    """Start an operator as a pod does, and return the port that the kubelet asks."""
    started: list[subprocess.Popen[bytes]] = []

    def start() -> tuple[subprocess.Popen[bytes], int]:
        port = free_port()
        command = [sys.executable, "-m", "kvtier_cli", "run", "-n", NAMESPACE]
        settings = {"KVTIER_LIVENESS_ENDPOINT": f"http://127.0.0.1:{port}", "KVTIER_LEASE_SECONDS": "6"}
        environment = {**os.environ, **settings}
        with (tmp_path / "log").open("wb") as log:
            started.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
        return started[0], port

    yield start
    for process in started:
        process.kill()
        process.wait()


def asked(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()
    except OSError as error:
        return 0, str(error)


def test_without_a_right_that_everything_needs_it_is_alive_and_not_ready_until_it_has_it(
    api: ApiServerThread, operator: Callable[[], tuple[subprocess.Popen[bytes], int]]
) -> None:
    kubectl, manifest = Client(api.url), tier()
    manifest["metadata"]["namespace"] = NAMESPACE
    kubectl.apply_tier(manifest)
    with forbidden(api, "kvcachetiers"):
        process, port = operator()
        said = until(lambda: (found := asked(port, "/readyz"))[0] == 503 and found[1], seconds=SLOW)
        assert "kvcachetiers is forbidden" in said
        assert asked(port, "/healthz")[0] == 200
        assert process.poll() is None
        assert kubectl.get(APPS, "deployments", "llama-janitor") is None
    until(lambda: kubectl.get(APPS, "deployments", "llama-janitor"), seconds=SLOW)
    until(lambda: asked(port, "/readyz")[0] == 200, seconds=SLOW)
