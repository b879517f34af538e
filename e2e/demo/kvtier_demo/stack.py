# SPDX-License-Identifier: Apache-2.0
"""The embedded cluster and the operator as child processes, ended together whatever happens."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvtier_demo.kube import Kube
from kvtier_demo.progress import Progress
from kvtier_localcluster.cluster import is_running
from kvtier_localcluster.datadir import DataDirectory

_STOP_SECONDS = 60.0
_EARLIER_SECONDS = 30.0
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)  # found before a fork, after which little may be called


@dataclass(frozen=True)
class Stack:
    """A running cluster with the CRD installed and the operator watching."""

    kube: Kube
    data: Path
    processes: Mapping[str, subprocess.Popen[bytes]]

    def check(self) -> None:
        """Raise RuntimeError if a process that must run has ended."""
        for name, process in self.processes.items():
            _check(name, process, self.data)

    def claim_directory(self, name: str, namespace: str = "default") -> Path:
        """Return where the embedded cluster keeps the files of a claim."""
        return self.data / "cluster" / "pvc" / namespace / name


@contextlib.contextmanager
def running_stack(root: Path, data: Path, progress: Progress) -> Iterator[Stack]:
    """Start the cluster, install the CRD, start the operator; end both on the way out."""
    logs = data / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    kubeconfig = data / "kubeconfig"
    kubeconfig.unlink(missing_ok=True)
    earlier = DataDirectory(data / "cluster")  # of a demo that was killed: it ends its pods now
    progress.wait("the cluster of an earlier run to end", lambda: not is_running(earlier), seconds=_EARLIER_SECONDS)
    cluster_command = ["kvtier_localcluster", "up", "--data", str(earlier.root), "--kubeconfig", str(kubeconfig)]
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(_process("cluster", cluster_command, logs))
        progress.wait("the embedded API server", lambda: _is_up(cluster, kubeconfig, data), seconds=60)
        kube = Kube(kubeconfig)
        progress.say("an embedded Kubernetes API runs")
        progress.say(kube.apply(root / "crds" / "kvcachetier.yaml"))
        operator_command = ["kvtier_cli", "run", "--all-namespaces"]
        operator = stack.enter_context(_process("operator", operator_command, logs, KUBECONFIG=str(kubeconfig)))
        progress.say("operator started")
        yield Stack(kube=kube, data=data, processes={"cluster": cluster, "operator": operator})


def tail(file: Path, lines: int = 15) -> str:
    """Return the last lines of a log."""
    if not file.exists():
        return ""
    return "\n".join("    " + line for line in file.read_text(errors="replace").splitlines()[-lines:])


def _check(name: str, process: subprocess.Popen[bytes], data: Path) -> None:
    if process.poll() is not None:
        raise RuntimeError(f"the {name} ended with {process.returncode}:\n{tail(data / 'logs' / f'{name}.log')}")


def _is_up(cluster: subprocess.Popen[bytes], kubeconfig: Path, data: Path) -> bool:
    _check("cluster", cluster, data)
    return kubeconfig.exists()


@contextlib.contextmanager
def _process(name: str, module: Sequence[str], logs: Path, **env: str) -> Iterator[subprocess.Popen[bytes]]:
    with (logs / f"{name}.log").open("wb") as log:
        child = subprocess.Popen(
            [sys.executable, "-m", *module],
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **env},
            start_new_session=True,  # Ctrl-C reaches us alone, and we end the children in order
            preexec_fn=functools.partial(_end_with, os.getpid()),  # noqa: PLW1509  it makes one call of the kernel
        )
        try:
            yield child
        finally:
            _stop(child)


def _end_with(parent: int) -> None:
    """Have the kernel end this process in order, once the one that started it is gone, even if it was killed."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(128 + signal.SIGTERM)  # it died before the kernel knew that we want to hear of it


def _stop(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is None:
        child.terminate()
    try:
        child.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def place_model(model: Path, claim: Path) -> None:
    """Copy the model onto the claim unless it is there, whole or not at all."""
    target = claim / model.name
    if not target.exists():
        partial = claim / f"{model.name}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(model, partial)
        partial.rename(target)
