# SPDX-License-Identifier: Apache-2.0
"""Several operators, of which one acts: real processes, a real API server, and no mercy."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from live import APPS, NAMESPACE, Client, body, operator_process
from waiting import until

from kvtier_localcluster.apiserver import ApiError, ApiServerThread

LEASES = "/apis/coordination.k8s.io/v1"
SLOW = 120.0
Spawn = Callable[[], "subprocess.Popen[bytes]"]


@pytest.fixture
def spawn(api: ApiServerThread, tmp_path: Path) -> Iterator[Spawn]:
    """Start operators that wait for the lead; their logs are files, so that nobody blocks on a pipe."""
    del api
    with ExitStack() as stack:

        def start() -> subprocess.Popen[bytes]:
            started = operator_process(tmp_path / "kubeconfig", "--leader-elect", KVTIER_LEASE_SECONDS="15")
            return stack.enter_context(started).process

        yield start


def holder(kubectl: Client) -> str:
    lease = kubectl.get(LEASES, "leases", "kvtier-operator") or {}
    return str(lease.get("spec", {}).get("holderIdentity") or "")


def has_engine(kubectl: Client, name: str) -> Callable[[], bool]:
    return lambda: kubectl.get(APPS, "deployments", f"{name}-engine") is not None


def test_when_the_leader_is_killed_the_one_that_waited_goes_on(api: ApiServerThread, spawn: Spawn) -> None:
    kubectl = Client(api.url)
    first = spawn()
    leader = until(lambda: holder(kubectl), seconds=SLOW)
    kubectl.apply_tier(body("one"))
    until(has_engine(kubectl, "one"), seconds=SLOW)

    def watches(since: int = 0) -> int:
        audit = list(api.server.audit)[since:]
        return sum(call.verb == "watch" and call.path.endswith("/kvcachetiers") for call in audit)

    until(lambda: watches() == 1, seconds=SLOW)
    before = len(api.server.audit)
    second = spawn()
    until(lambda: waits(api, before), seconds=SLOW)
    # One that waits listed the tiers once, to see whether it may, and since then looks at the Lease alone.
    assert watches(before) == 0
    first.send_signal(signal.SIGKILL)
    kubectl.apply_tier(body("two"))
    until(has_engine(kubectl, "two"), seconds=SLOW)
    assert holder(kubectl) not in {"", leader}
    assert second.poll() is None


def waits(api: ApiServerThread, since: int) -> bool:
    looks = [call for call in list(api.server.audit)[since:] if call.verb == "get" and "/leases/" in call.path]
    return len(looks) > 3


def test_a_leader_that_is_told_to_go_hands_over_without_a_wait(api: ApiServerThread, spawn: Spawn) -> None:
    kubectl = Client(api.url)
    first = spawn()
    leader = until(lambda: holder(kubectl), seconds=SLOW)
    first.send_signal(signal.SIGTERM)
    assert first.wait(SLOW) == 0
    assert holder(kubectl) == ""
    spawn()
    assert until(lambda: holder(kubectl), seconds=SLOW) != leader


def test_one_that_waits_goes_at_once_when_told_to(api: ApiServerThread, spawn: Spawn) -> None:
    kubectl = Client(api.url)
    spawn()
    leader = until(lambda: holder(kubectl), seconds=SLOW)
    before = len(api.server.audit)
    second = spawn()
    until(lambda: waits(api, before), seconds=SLOW)
    second.send_signal(signal.SIGTERM)
    assert second.wait(SLOW) == 0
    assert holder(kubectl) == leader


def test_a_leader_that_cannot_renew_ends_and_writes_nothing_more(api: ApiServerThread, spawn: Spawn) -> None:
    kubectl, is_cut = Client(api.url), threading.Event()

    def cut(request: Any) -> ApiError | None:
        is_theirs = request.headers.get("User-Agent") != "test" and "/leases/" in request.path
        return ApiError(503, "ServiceUnavailable", "injected") if is_theirs and is_cut.is_set() else None

    api.server.faults.append(cut)
    first = spawn()
    until(lambda: holder(kubectl), seconds=SLOW)
    is_cut.set()
    assert first.wait(SLOW) == 1


def test_an_operator_is_not_run_beside_one_that_is_installed_for_the_same_tiers(api: ApiServerThread) -> None:
    labels = {"app.kubernetes.io/component": "operator", "app.kubernetes.io/part-of": "kvtier"}
    template = {
        "metadata": {"labels": labels},
        "spec": {"containers": [{"name": "operator", "image": "o", "args": []}]},
    }
    spec = {"replicas": 1, "selector": {"matchLabels": labels}, "template": template}
    metadata = {"name": "kvtier-operator", "namespace": NAMESPACE, "labels": labels}
    api.create({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": spec})
    command = [sys.executable, "-m", "kvtier_cli", "run", "-n", NAMESPACE]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=SLOW, check=False)
    assert refused.returncode != 0
    assert f"the operator {NAMESPACE}/kvtier-operator works on these tiers: scale its Deployment to 0" in refused.stderr
    with pytest.raises(subprocess.TimeoutExpired):
        subprocess.run([*command, "--operator-class=mine"], capture_output=True, timeout=10, check=False)
