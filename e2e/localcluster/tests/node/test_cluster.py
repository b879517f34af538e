# SPDX-License-Identifier: Apache-2.0
"""The cluster as a whole: its life, what outlives it, and its command."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from pods import Bench, claim, claimed, fetch, script, server
from waiting import is_alive, until

from kvtier_localcluster import kinds
from kvtier_localcluster.__main__ import main
from kvtier_localcluster.cluster import ClusterSettings, ClusterThread
from kvtier_localcluster.datadir import DataDirectory
from kvtier_localcluster.errors import ClusterUnavailable
from kvtier_localcluster.node.simulated import SIMULATE

WRITER = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import os, time; os.setsid(); time.sleep(600)"])
with open("/data/pids", "a") as file: file.write(f"{os.getpid()} {child.pid}\\n")
time.sleep(600)
"""


def start_writer(bench: Bench) -> list[int]:
    """Run a pod that notes the pids of its processes in its claim; return them."""
    bench.create(kinds.PERSISTENT_VOLUME_CLAIM, claim("data"))
    bench.pod("writer", script(WRITER), mounts={"/data": claimed("data")})
    notes = bench.cluster.cluster.data.claim(("default", "data")) / "pids"
    lines = notes.read_text().count("\n") if notes.exists() else 0
    until(lambda: notes.exists() and notes.read_text().count("\n") == lines + 1)
    return [int(pid) for pid in notes.read_text().split()]


def test_a_claim_keeps_its_files_across_a_restart_and_no_process_survives_the_stop(tmp_path: Path) -> None:
    settings = ClusterSettings(data=tmp_path / "data")
    with ClusterThread(settings) as first:
        pids = start_writer(Bench(first, "default"))
        assert all(is_alive(pid) for pid in pids)
    assert not any(is_alive(pid) for pid in pids)
    with ClusterThread(settings) as second:
        assert start_writer(Bench(second, "default"))[:2] == pids
    assert not list(DataDirectory(tmp_path / "data").pods.glob("*"))


def test_no_process_survives_when_the_cluster_is_killed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "data"
    command = [sys.executable, "-m", "kvtier_localcluster", "up", "--data", str(data)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        url = next(line.split()[5].rstrip(".") for line in process.stdout if "ready" in line)
        assert main(["up", "--data", str(data)]) == 1
        assert "stop it with Ctrl-C where it runs" in capfd.readouterr().err
        request = urllib.request.Request(f"{url}/api/v1/namespaces/default/pods", data=POD_WITH_DAEMON.encode())
        urllib.request.urlopen(request).close()
        log = data / "logs" / "default" / "daemon" / "main.log"
        until(lambda: log.exists() and log.read_text().endswith("\n"))
        pids = [int(pid) for pid in log.read_text().split()]
        assert all(is_alive(pid) for pid in pids)
        process.send_signal(signal.SIGKILL)
        process.wait()
        until(lambda: not any(is_alive(pid) for pid in pids))
    places = DataDirectory(data)
    assert list(places.pods.iterdir())
    with ClusterThread(ClusterSettings(data=data)):
        assert not list(places.pods.iterdir())


POD_WITH_DAEMON = """
{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "daemon"}, "spec": {"containers": [{
  "name": "main", "image": "x", "command": ["python3", "-c",
  "import os, subprocess as s; p = s.Popen(['setsid', 'sleep', '600']); print(os.getpid(), p.pid, flush=True); p.wait()"
]}]}}
"""


def test_leftovers_of_a_run_that_was_killed_with_its_launchers_end_at_the_next_start(tmp_path: Path) -> None:
    scratch = DataDirectory(tmp_path / "data").pod("uid") / "tmp"
    scratch.mkdir(parents=True)
    environment = {**os.environ, "TMPDIR": str(scratch)}
    with subprocess.Popen(["sleep", "600"], env=environment, start_new_session=True) as stray:
        try:
            # A process that has only just been started does not show its environment yet.
            until(lambda: str(scratch).encode() in Path(f"/proc/{stray.pid}/environ").read_bytes())
            with ClusterThread(ClusterSettings(data=tmp_path / "data")):
                assert stray.wait(timeout=60) == -signal.SIGKILL
        finally:
            stray.kill()


def test_two_clusters_at_once_give_their_services_addresses_of_their_own(tmp_path: Path) -> None:
    service = {"metadata": {"name": "web"}, "spec": {"selector": {"app": "web"}, "ports": [{"port": 8000}]}}
    with (
        ClusterThread(ClusterSettings(data=tmp_path / "one")) as one,
        ClusterThread(ClusterSettings(data=tmp_path / "two")) as two,
    ):
        benches = [Bench(one, "default"), Bench(two, "default")]
        addresses = [bench.create(kinds.SERVICE, service)["spec"]["clusterIP"] for bench in benches]
        assert addresses[0] != addresses[1]
        for bench in benches:
            bench.deployment("web", server(), replicas=1)
        for bench, address in zip(benches, addresses, strict=True):
            pod = next(iter(until(lambda bench=bench: bench.list(kinds.POD))))["metadata"]["name"]
            assert until(lambda address=address: fetch(f"http://{address}:8000/name")) == pod


def test_a_taken_port_is_refused_with_a_remedy(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ClusterUnavailable, match=f"port {port} is taken: choose another with --port"):
            ClusterThread(ClusterSettings(data=tmp_path, port=port)).start()


def test_simulated_pods_are_ready_without_a_process_and_can_be_told_otherwise(tmp_path: Path) -> None:
    settings = ClusterSettings(data=tmp_path, simulate=True, allocatable={"nvidia.com/gpu": "8"})
    with ClusterThread(settings) as cluster:
        bench = Bench(cluster, "default")
        gpu = server(resources={"limits": {"nvidia.com/gpu": "4"}})
        bench.deployment("many", gpu, replicas=3)

        def ready() -> int:
            found = bench.get(kinds.DEPLOYMENT, "many")
            assert found is not None
            return int((found.get("status") or {}).get("readyReplicas", 0))

        until(lambda: ready() == 2)
        name = next(pod["metadata"]["name"] for pod in bench.list(kinds.POD) if kinds.is_ready(pod))
        bench.patch(kinds.POD, name, {"metadata": {"annotations": {SIMULATE: "NotReady"}}})
        until(lambda: ready() == 1)
        bench.delete(kinds.DEPLOYMENT, "many")
        until(lambda: not bench.list(kinds.POD))
