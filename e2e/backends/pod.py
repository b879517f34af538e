# SPDX-License-Identifier: Apache-2.0
"""One engine as the kubelet would start it, with directories of this machine where a pod has its volumes."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SECRETS = {"LMCACHE_RESP_PASSWORD"}
"""Variables that come from Secrets."""
KEPT = {"connector"}
"""Mounts without a directory here: the package is on PYTHONPATH."""


class Pod:
    """One engine process. Use it from one thread."""

    def __init__(
        self, case: Mapping[str, Any], work: Path, *, port: int, name: str, more_env: Mapping[str, str]
    ) -> None:
        """Store; `start` starts."""
        self.title = str(case["title"])
        self.port = port
        self.log = work / f"{name}.log"
        self._case = case
        self._work = work
        self._name = name
        self._more_env = more_env
        self._process: subprocess.Popen[bytes] | None = None
        self._began = 0.0
        self.start_seconds: float | None = None

    @property
    def volume(self) -> Path:
        """Return what stands for the volume, which pods of one tier share."""
        return self._work / f"{self._case['blocks']}-volume"

    def start(self) -> None:
        """Write the files of the pod and start its engine."""
        moved = self._directories()
        for file, text in self._case["files"].items():
            if "/etc/kvtier" in moved:
                path = Path(moved["/etc/kvtier"]) / file
                path.write_text(_moved(text, moved))
        words = [_moved(word, moved) for word in self._case["args"]]
        words = [f"--port={self.port}" if word.startswith("--port=") else word for word in words]
        own = [sys.executable, *self._case["command"][1:]]
        self._began = time.monotonic()
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [*own, *words],
                env=self._environment(moved),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def is_ready(self) -> bool:
        """Tell whether the engine answers; raise RuntimeError if it has ended."""
        assert self._process is not None
        if self._process.poll() is not None:
            raise RuntimeError(f"the engine ended with {self._process.returncode}: {self.last_words()}")
        try:
            self.ask("GET", "/health", None, seconds=2)
        except (OSError, http.client.HTTPException, RuntimeError):
            return False
        self.start_seconds = self.start_seconds or time.monotonic() - self._began
        return True

    def ask(self, method: str, path: str, document: Any, *, seconds: float = 120) -> bytes:
        """Send one request and return the answer's body; raise RuntimeError for any status but 200."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=seconds)
        try:
            connection.request(
                method, path, None if document is None else json.dumps(document), {"Content-Type": "application/json"}
            )
            answer = connection.getresponse()
            body = answer.read()
        finally:
            connection.close()
        if answer.status != http.client.OK:
            raise RuntimeError(f"{path}: {answer.status}: {body[:300]!r}")
        return body

    def stop(self) -> None:
        """End the engine and whatever it started."""
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(12)
        # Children, such as LMCache's cache server, may outlive it; in a pod they end with the container.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(10)

    def kill(self) -> None:
        """End the engine as a node that is gone would: nothing is said to anyone."""
        assert self._process is not None
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(10)

    def last_words(self) -> str:
        """Return the end of the log that says what went wrong."""
        lines = self.log.read_text(errors="replace").splitlines()
        telling = [line for line in lines if "Error" in line or "error" in line or "Exception" in line]
        return " | ".join(telling[-4:] or lines[-4:])[-900:]

    def reasons(self) -> str:
        """Return the first traceback of an engine's core or worker: the last one, of the API server, only follows."""
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        inner = [line for line in lines if line.startswith(("(EngineCore", "(Worker")) and "ERROR" in line]
        return "".join(f"{line[:400]}\n" for line in inner[:60])

    def _directories(self) -> dict[str, str]:
        """Return where this machine has what the pod mounts; volumes are shared by the pods of a case."""
        own = self._work / self._name
        found: dict[str, str] = {}
        for name, path in self._case["mounts"].items():
            if name in KEPT or path == "/dev/shm":  # noqa: S108  this machine's own will do
                continue
            place = self.volume if name == "blocks" else own / name
            place.mkdir(parents=True, exist_ok=True)
            found[path] = str(place)
            if name == "scratch":
                self._share_inspections(place)
        return found

    def _share_inspections(self, scratch: Path) -> None:
        """Spare this engine to look at the model's class in a process of its own, as one before it has done."""
        known = self._work / "modelinfos"
        known.mkdir(exist_ok=True)
        (scratch / "vllm").mkdir(exist_ok=True)
        with contextlib.suppress(FileExistsError):
            (scratch / "vllm" / "modelinfos").symlink_to(known)

    def _environment(self, moved: Mapping[str, str]) -> dict[str, str]:
        found = dict(os.environ)
        for each in self._case["env"]:
            name = each["name"]
            if name == "PYTHONPATH":
                continue  # of the image; here, the package is where this machine has it
            value = each.get("value")
            found[name] = _moved(value, moved) if value is not None else self._more_env.get(name, "127.0.0.1")
        # Values of Secrets go only to engines that ask for them.
        asked = {each["name"] for each in self._case["env"]}
        return {
            **found,
            **{name: value for name, value in self._more_env.items() if name in asked or name not in SECRETS},
        }


def _moved(text: str, moved: Mapping[str, str]) -> str:
    """Return a text in which what the pod mounts is where this machine has it."""
    for path in sorted(moved, key=len, reverse=True):
        # The model's directory is this machine's own, and lies below the scratch volume's path.
        if path == "/tmp":  # noqa: S108  the scratch volume
            for each in ("home", "hf", "cache", "vllm", "triton", "torchinductor", "kvtier/", 'kvtier"'):
                text = text.replace(f"/tmp/{each}", f"{moved[path]}/{each}")  # noqa: S108  a path of the pod
            continue
        text = text.replace(path, moved[path])
    return text
