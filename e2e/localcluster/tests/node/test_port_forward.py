# SPDX-License-Identifier: Apache-2.0
"""kubectl port-forward reaches what a pod serves."""

from __future__ import annotations

import concurrent.futures
import contextlib
import re
import subprocess
from collections.abc import Iterator

import ci_tools
import pytest
from pods import Bench, fetch, server
from waiting import until

SIZE = 3_000_000


@pytest.fixture
def forwarded(bench: Bench) -> Iterator[subprocess.Popen[str]]:
    """A running `kubectl port-forward` to a server in a pod and to a port that nobody listens on."""
    bench.pod("web", server(), labels={"app": "web"})
    until(lambda: bench.is_ready("web"))
    program = str(ci_tools.load("helm").binary("kubectl"))
    options = [f"--kubeconfig={bench.cluster.kubeconfig}", f"--namespace={bench.namespace}"]
    command = [program, *options, "port-forward", "pod/web", ":8000", ":9"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            yield process
        finally:
            process.terminate()
            process.communicate(timeout=60)


def local_port(process: subprocess.Popen[str], port: int) -> int:
    assert process.stdout is not None
    for line in process.stdout:
        if found := re.match(rf"Forwarding from 127\.0\.0\.1:(\d+) -> {port}$", line):
            return int(found[1])
    raise AssertionError("kubectl has ended")


def test_a_port_of_a_pod_is_reached_many_times_at_once(
    bench: Bench, forwarded: subprocess.Popen[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    large = tmp_path_factory.mktemp("served") / "large"
    large.write_text("x" * SIZE)
    port = local_port(forwarded, 8000)
    assert fetch(f"http://127.0.0.1:{port}/name") == "web"
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(fetch, [f"http://127.0.0.1:{port}/file{large}"] * 8))
    assert [len(answer or "") for answer in answers] == [SIZE] * 8


def test_a_port_that_nobody_listens_on_is_told_of(forwarded: subprocess.Popen[str]) -> None:
    port = local_port(forwarded, 9)
    with contextlib.suppress(OSError):
        fetch(f"http://127.0.0.1:{port}/")
    assert forwarded.stdout is not None
    assert any("cannot reach port 9 of the pod" in line for line in forwarded.stdout)
