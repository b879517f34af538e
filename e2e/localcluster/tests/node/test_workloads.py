# SPDX-License-Identifier: Apache-2.0
"""Controllers, scheduler and service proxy, with pods that really run, and two of them on their own."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
from collections.abc import Mapping
from typing import Any

import pytest
from pods import Bench, claim, claimed, fetch, script, server
from waiting import until

from kvtier_localcluster import kinds
from kvtier_localcluster.apiserver import ApiServerThread
from kvtier_localcluster.client import ApiClient
from kvtier_localcluster.controllers.deployments import DeploymentController
from kvtier_localcluster.controllers.service_proxy import PortForwarder
from kvtier_localcluster.informers import Informers
from kvtier_localcluster.kinds import DEPLOYMENT, REPLICA_SET, Json, Kind, key_of


def condition(manifest: Json | None, kind: str) -> Json:
    conditions = ((manifest or {}).get("status") or {}).get("conditions") or []
    return next((dict(each) for each in conditions if each["type"] == kind), {})


def is_rolled_out(bench: Bench, name: str, replicas: int) -> bool:
    found = bench.get(kinds.DEPLOYMENT, name)
    assert found is not None
    status = found.get("status") or {}
    counts = [status.get(field, 0) for field in ("replicas", "updatedReplicas", "availableReplicas")]
    return status.get("observedGeneration") == found["metadata"]["generation"] and counts == [replicas] * 3


def test_nothing_is_written_while_nothing_changes(bench: Bench) -> None:
    bench.deployment("calm", server())
    until(lambda: is_rolled_out(bench, "calm", 2))
    server_audit = bench.cluster.cluster.server.audit
    seen: dict[str, int] = {}

    def writes() -> int:
        return sum(entry.method != "GET" for entry in server_audit)

    def is_quiet_through_four_probes() -> bool:
        """Each probe is one line in the log, so the logs are the clock of this test."""
        before = seen.setdefault("writes", writes())
        if writes() != before:
            seen.clear()
            return False
        lines = sum(bench.log(pod["metadata"]["name"]).count("/healthz") for pod in bench.list(kinds.POD))
        return lines >= seen.setdefault("lines", lines) + 4

    until(is_quiet_through_four_probes)


def test_a_rolling_update_replaces_every_pod_and_never_drops_below_the_minimum(bench: Bench) -> None:
    strategy = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}
    bench.deployment("roll", server(), strategy=strategy)
    until(lambda: is_rolled_out(bench, "roll", 2))
    old = {pod["metadata"]["uid"] for pod in bench.list(kinds.POD)}
    container = server(env=[{"name": "VERSION", "value": "2"}])
    bench.patch(kinds.DEPLOYMENT, "roll", {"spec": {"template": {"spec": {"containers": [container]}}}})
    ready_counts = set()

    def done() -> bool:
        pods = bench.list(kinds.POD)
        ready_counts.add(sum(kinds.is_ready(pod) and not kinds.is_deleting(pod) for pod in pods))
        return is_rolled_out(bench, "roll", 2) and len(pods) == 2

    until(done)
    assert not old & {pod["metadata"]["uid"] for pod in bench.list(kinds.POD)}
    assert min(ready_counts) >= 2


def test_recreate_ends_the_old_pods_before_it_starts_new_ones(bench: Bench) -> None:
    bench.deployment("swap", server(), replicas=1, strategy={"type": "Recreate"})
    until(lambda: is_rolled_out(bench, "swap", 1))
    container = server(env=[{"name": "VERSION", "value": "2"}])
    bench.patch(kinds.DEPLOYMENT, "swap", {"spec": {"template": {"spec": {"containers": [container]}}}})
    counts = set()

    def done() -> bool:
        counts.add(len(bench.list(kinds.POD)))
        return is_rolled_out(bench, "swap", 1)

    until(done)
    assert max(counts) == 1


def test_scaling_down_keeps_the_pods_that_are_ready(bench: Bench) -> None:
    bench.deployment("shrink", server())
    until(lambda: is_rolled_out(bench, "shrink", 2))
    sick, well = (pod["metadata"]["name"] for pod in bench.list(kinds.POD))
    bench.ask(sick, "/sick")
    until(lambda: not bench.is_ready(sick))
    bench.patch(kinds.DEPLOYMENT, "shrink", {"spec": {"replicas": 1}})
    until(lambda: len(bench.list(kinds.POD)) == 1)
    assert bench.list(kinds.POD)[0]["metadata"]["name"] == well


def test_a_service_spreads_connections_over_ready_pods_only(bench: Bench) -> None:
    for name in ("one", "two", "sick"):
        bench.pod(name, server(), labels={"app": "web"})
    ports = [{"port": 80, "targetPort": "http"}]
    service = bench.create(
        kinds.SERVICE, {"metadata": {"name": "web"}, "spec": {"selector": {"app": "web"}, "ports": ports}}
    )
    url = f"http://{service['spec']['clusterIP']}"
    until(lambda: all(bench.is_ready(name) for name in ("one", "two", "sick")))
    until(lambda: {fetch(f"{url}/name") for _ in range(6)} == {"one", "two", "sick"})
    bench.ask("sick", "/sick")
    until(lambda: {fetch(f"{url}/name") for _ in range(6)} == {"one", "two"})
    bench.delete(kinds.SERVICE, "web")
    until(lambda: fetch(f"{url}/name") is None)


def test_session_affinity_keeps_a_client_with_one_pod(bench: Bench) -> None:
    for name in ("one", "two"):
        bench.pod(name, server(), labels={"app": "sticky"})
    spec = {"selector": {"app": "sticky"}, "ports": [{"port": 80, "targetPort": 8000}], "sessionAffinity": "ClientIP"}
    service = bench.create(kinds.SERVICE, {"metadata": {"name": "sticky"}, "spec": spec})
    until(lambda: bench.is_ready("one") and bench.is_ready("two"))
    url = f"http://{service['spec']['clusterIP']}/name"
    first = until(lambda: fetch(url))
    assert {fetch(url) for _ in range(6)} == {first}


def test_a_pod_that_wants_a_gpu_stays_pending_and_says_why(bench: Bench) -> None:
    bench.pod("gpu", server(resources={"limits": {"nvidia.com/gpu": "1"}}))
    pod = until(lambda: (found := bench.get(kinds.POD, "gpu")) and condition(found, "PodScheduled") and found)
    assert condition(pod, "PodScheduled")["reason"] == "Unschedulable"
    message = "0/1 nodes are available: 1 Insufficient nvidia.com/gpu."
    assert condition(pod, "PodScheduled")["message"] == message
    until(lambda: ("FailedScheduling", message) in bench.events("gpu"))
    assert "nodeName" not in pod["spec"]


def test_a_pod_waits_for_its_claim(bench: Bench) -> None:
    bench.pod("waits", server(), mounts={"/data": claimed("late")})
    until(lambda: "FailedScheduling" in bench.reasons("waits"))
    bench.create(kinds.PERSISTENT_VOLUME_CLAIM, claim("late"))
    until(lambda: bench.is_ready("waits"))
    bound = bench.get(kinds.PERSISTENT_VOLUME_CLAIM, "late")
    assert bound is not None
    assert bound["status"]["phase"] == "Bound"
    assert bound["status"]["capacity"] == {"storage": "1Gi"}


def test_a_claim_that_asks_for_a_volume_that_does_not_exist_stays_pending(bench: Bench) -> None:
    bench.create(kinds.PERSISTENT_VOLUME_CLAIM, claim("odd", volumeName="elsewhere"))
    until(lambda: "FailedBinding" in bench.reasons("odd"))
    found = bench.get(kinds.PERSISTENT_VOLUME_CLAIM, "odd")
    assert found is not None
    assert found["status"]["phase"] == "Pending"


def test_deleting_a_claim_removes_its_directory(bench: Bench) -> None:
    bench.create(kinds.PERSISTENT_VOLUME_CLAIM, claim("brief"))
    directory = bench.cluster.cluster.data.claim((bench.namespace, "brief"))
    until(directory.is_dir)
    bench.delete(kinds.PERSISTENT_VOLUME_CLAIM, "brief")
    until(lambda: not directory.exists())


def test_a_job_runs_to_completion_and_gives_up_after_its_limit(bench: Bench) -> None:
    def job(name: str, code: int) -> Json:
        pod = {"restartPolicy": "Never", "containers": [script(f"raise SystemExit({code})")]}
        return {"metadata": {"name": name}, "spec": {"backoffLimit": 1, "template": {"spec": pod}}}

    bench.create(kinds.JOB, job("good", 0))
    bench.create(kinds.JOB, job("bad", 1))
    until(lambda: condition(bench.get(kinds.JOB, "good"), "Complete").get("status") == "True")
    until(lambda: condition(bench.get(kinds.JOB, "bad"), "Failed").get("reason") == "BackoffLimitExceeded")
    bad = bench.get(kinds.JOB, "bad")
    assert bad is not None
    assert bad["status"]["failed"] == 2


@pytest.mark.parametrize("turns", range(5))
def test_a_connection_that_arrives_while_the_socket_closes_is_closed_too(turns: int) -> None:
    complaints: list[dict[str, Any]] = []

    async def connect_and_stop() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        with socket.create_server(("127.0.0.1", 0)) as free:
            address = free.getsockname()
        forwarder = PortForwarder()
        await forwarder.start(address)
        with socket.create_connection(address) as client:
            for _ in range(turns):
                await asyncio.sleep(0)
            await forwarder.stop()
            client.settimeout(60)
            with contextlib.suppress(ConnectionResetError):
                assert client.recv(1) == b""

    asyncio.run(connect_and_stop())
    gc.collect()  # what was left open complains now, and a warning is an error
    assert complaints == []


WEB: Json = {
    "metadata": {"name": "web", "namespace": "default"},
    "spec": {
        "replicas": 1,
        "selector": {"matchLabels": {"app": "web"}},
        "template": {
            "metadata": {"labels": {"app": "web"}},
            "spec": {"containers": [{"name": "main", "image": "example.org/web:1"}]},
        },
    },
}


class EditedMeanwhile(ApiClient):
    """A client that scales the Deployment to two while a ReplicaSet is made for it, and hears of that at once."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.informers = Informers(self)

    async def create(self, kind: Kind, manifest: Mapping[str, Any]) -> Json:
        created = await super().create(kind, manifest)
        if kind == REPLICA_SET:
            (deployment,) = self.informers[DEPLOYMENT]
            self.informers[DEPLOYMENT].remember(await self.patch(DEPLOYMENT, deployment, {"spec": {"replicas": 2}}))
        return created


async def sync_twice(url: str) -> list[Json]:
    """Sync the Deployment, edited meanwhile, and once more; return it as it stood after each."""
    client = EditedMeanwhile(url)
    await client.start()
    try:
        controller = DeploymentController(client, client.informers)
        made = await client.create(DEPLOYMENT, WEB)
        client.informers[DEPLOYMENT].remember(made)
        found = []
        for _ in range(2):
            await controller.sync(key_of(made))
            found.append(await client.get(DEPLOYMENT, key_of(made)))
        return found
    finally:
        await client.close()


def test_a_status_tells_the_generation_that_was_synced_though_a_later_one_is_known() -> None:
    with ApiServerThread() as api:
        edited, caught_up = asyncio.run(sync_twice(api.url))
    assert (edited["metadata"]["generation"], edited["spec"]["replicas"]) == (2, 2)
    assert edited["status"]["observedGeneration"] == 1
    assert caught_up["status"]["observedGeneration"] == 2
