# SPDX-License-Identifier: Apache-2.0
"""kubectl exec runs a command inside a container, and kubectl port-forward reaches what a pod serves."""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import re
import subprocess
from collections.abc import Iterator

import ci_tools
import pytest
from pods import Bench, fetch, server
from waiting import until


@pytest.fixture
def pod(bench: Bench) -> Bench:
    greeting = {"name": "GREETING", "value": "hello"}
    bench.pod("web", server(env=[greeting]), mounts={"/data": {"emptyDir": {}}})
    until(lambda: bench.is_ready("web"))
    return bench


def kubectl(bench: Bench, *words: str) -> list[str]:
    program = str(ci_tools.load("helm").binary("kubectl"))
    return [program, f"--kubeconfig={bench.cluster.kubeconfig}", f"--namespace={bench.namespace}", *words]


def execute(
    bench: Bench, script: str, *words: str, pod: str = "web", given: str | None = None
) -> subprocess.CompletedProcess[str]:
    options = [] if given is None else ["-i"]
    command = kubectl(bench, "exec", pod, *options, "--", "python3", "-c", script, *words)
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, input=given)


def test_a_command_has_the_environment_and_the_volumes_of_its_container(pod: Bench) -> None:
    script = "import os,sys; open(sys.argv[1], 'w').write('x'); print(os.environ['GREETING'], os.environ['HOSTNAME'])"
    done = execute(pod, script, "/data/file")
    assert (done.returncode, done.stdout, done.stderr) == (0, "hello web\n", "")
    assert execute(pod, "import os,sys; print(os.path.getsize(sys.argv[1]))", "/data/file").stdout == "1\n"


def test_output_errors_and_the_exit_code_come_back_apart(pod: Bench) -> None:
    done = execute(pod, "import sys; sys.stderr.write('no'); print('x' * 300000); sys.exit(3)")
    assert (done.returncode, len(done.stdout)) == (3, 300001)
    assert done.stderr.splitlines() == ["nocommand terminated with exit code 3"]


def test_a_command_reads_what_it_is_given_to_its_end(pod: Bench) -> None:
    script = "import hashlib,sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())"
    text = "0123456789abcdef" * (1 << 17)
    done = execute(pod, script, given=text)
    assert (done.returncode, done.stdout.strip()) == (0, hashlib.sha256(text.encode()).hexdigest())


def test_a_command_may_end_before_it_has_read_all(pod: Bench) -> None:
    done = execute(pod, "import sys; print(sys.stdin.buffer.read(4)); sys.exit(3)", given="x" * (1 << 20))
    assert (done.returncode, done.stdout) == (3, "b'xxxx'\n")


def test_a_command_that_is_given_nothing_reads_nothing(pod: Bench) -> None:
    assert execute(pod, "import sys; print(repr(sys.stdin.read()))").stdout == "''\n"


def test_a_pod_that_is_not_there_is_told_of(pod: Bench) -> None:
    done = execute(pod, "", pod="none")
    assert (done.returncode, 'pods "none" not found' in done.stderr) == (1, True)


@pytest.fixture
def forwarded(pod: Bench) -> Iterator[subprocess.Popen[str]]:
    """A running `kubectl port-forward` to a server in a pod and to a port that is closed."""
    command = kubectl(pod, "port-forward", "pod/web", ":8000", ":9")
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
    forwarded: subprocess.Popen[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    large = tmp_path_factory.mktemp("served") / "large"
    large.write_text("x" * 3_000_000)
    port = local_port(forwarded, 8000)
    assert fetch(f"http://127.0.0.1:{port}/name") == "web"
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(fetch, [f"http://127.0.0.1:{port}/file{large}"] * 8))
    assert [len(answer or "") for answer in answers] == [3_000_000] * 8


def test_a_port_that_nobody_listens_on_is_told_of(forwarded: subprocess.Popen[str]) -> None:
    port = local_port(forwarded, 9)
    with contextlib.suppress(OSError):
        fetch(f"http://127.0.0.1:{port}/")
    assert forwarded.stdout is not None
    assert any("cannot reach port 9 of the pod" in line for line in forwarded.stdout)
