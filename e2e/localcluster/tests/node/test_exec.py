# SPDX-License-Identifier: Apache-2.0
"""kubectl exec runs a command inside a container: with its environment and volumes, and its exit code comes back."""

from __future__ import annotations

import hashlib
import subprocess

import ci_tools
import pytest
from pods import Bench, server
from waiting import until

CLAIMED = {"volumeMounts": [{"name": "data", "mountPath": "/data"}], "env": [{"name": "GREETING", "value": "hello"}]}


@pytest.fixture
def pod(bench: Bench) -> Bench:
    bench.pod("web", server(**CLAIMED), volumes=[{"name": "data", "emptyDir": {}}])
    until(lambda: bench.is_ready("web"))
    return bench


def execute(
    bench: Bench, script: str, *words: str, pod: str = "web", given: str | None = None
) -> subprocess.CompletedProcess[str]:
    program = str(ci_tools.load("helm").binary("kubectl"))
    options = [f"--kubeconfig={bench.cluster.kubeconfig}", f"--namespace={bench.namespace}"]
    inside = ["exec", pod, *([] if given is None else ["-i"]), "--", "python3", "-c", script, *words]
    return subprocess.run(
        [program, *options, *inside], capture_output=True, text=True, check=False, timeout=60, input=given
    )


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
