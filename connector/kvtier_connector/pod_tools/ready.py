# SPDX-License-Identifier: Apache-2.0
"""Startup probe of an engine, which serves with its volume then: ``python3 -S -m kvtier_connector.pod_tools.ready``.

Each disk tier of an engine reports its progress in a file of its own, in a directory of the pod. There is one file for
each engine process, and data parallelism starts several. The command is the startup probe of the container: it passes
once the engine answers and every tier has its volume, or has decided to serve without. Otherwise it prints the reason.

The directory outlives the container, and the next one counts its processes from 1 again. So a file names its process by
number and time of birth, and one whose process is gone counts for nothing.

Runs every few seconds beside a starting engine: standard library only, and nothing else of this package.
"""

from __future__ import annotations

import argparse
import contextlib
import enum
import http.client
import json
import os
import sys
import threading
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

HEALTH_SECONDS = 5.0
"""How long the engine may take to answer one question."""

_SUFFIX = ".json"
_BIRTH = 19
"""Place of the start time in /proc/<pid>/stat, counted from behind the name, which may hold anything."""


class Phase(enum.StrEnum):
    """How far a disk tier is."""

    OPENING = "opening"
    ATTACHED = "attached"
    WITHOUT = "without"


@dataclass(frozen=True, kw_only=True)
class Statement:
    """Progress of a disk tier, as it reports it."""

    phase: str
    reason: str
    """Why it is not attached; empty if it is."""
    tier: str
    pid: int
    birth: str
    """When the process began, in the system's own unit; empty where the system does not tell."""

    def is_current(self) -> bool:
        """Return whether the process that said so still runs."""
        return not self.birth or _birth(self.pid) == self.birth


class StartupReport:
    """The file of one disk tier; any thread may call. Every method raises OSError if the file cannot be written."""

    def __init__(self, directory: str, tier: str) -> None:
        """Store the settings; `begin` writes. Without a directory nothing is ever written."""
        self._directory = Path(directory) if directory else None
        self._tier = tier
        self._name = f"{os.getpid()}-{uuid.uuid4().hex}"
        self._lock = threading.Lock()
        self._phase: Phase | None = None

    def begin(self, reason: str) -> None:
        """Report that the volume is being opened, and remove the reports of dead processes."""
        if self._directory is not None:
            self._directory.mkdir(parents=True, exist_ok=True)
            for path in self._directory.glob(f"*{_SUFFIX}"):
                said = _read(path)
                if said is None or not said.is_current():
                    path.unlink(missing_ok=True)
        self.say(Phase.OPENING, reason)

    def end(self) -> None:
        """Remove the report."""
        with self._lock:
            self._phase = None
            if self._directory is not None:
                (self._directory / f"{self._name}{_SUFFIX}").unlink(missing_ok=True)

    def say(self, phase: Phase, reason: str = "", *, only_after: Phase | None = None) -> bool:
        """Report a phase, only after another one if that is given; return whether it was reported."""
        with self._lock:
            if only_after is not None and self._phase is not only_after:
                return False
            self._phase = phase
            if self._directory is not None:
                pid = os.getpid()
                said = Statement(phase=phase.value, reason=reason, tier=self._tier, pid=pid, birth=_birth(pid))
                partial = self._directory / f"{self._name}.partial"
                partial.write_text(json.dumps(asdict(said), sort_keys=True), encoding="utf-8")
                partial.replace(self._directory / f"{self._name}{_SUFFIX}")
            return True


def why_not_decided(directory: Path) -> str:
    """Return why the disk tiers of the engine hold it back; empty if they do not."""
    said = [each for path in sorted(directory.glob(f"*{_SUFFIX}")) if (each := _read(path)) and each.is_current()]
    if not said:
        return "no disk tier has begun to open its volume"
    waiting = [each for each in said if each.phase not in {Phase.ATTACHED, Phase.WITHOUT}]
    if not waiting:
        return ""
    first = waiting[0]
    return f"{len(waiting)} of {len(said)} disk tiers wait for the volume: {first.tier}: {first.reason}"


def why_not_serving(host: str, port: int) -> str:
    """Return why the engine cannot be asked; empty if it can."""
    connection = http.client.HTTPConnection(host, port, timeout=HEALTH_SECONDS)
    with contextlib.closing(connection):
        try:
            connection.request("GET", "/health")
            status = connection.getresponse().status
        except (OSError, http.client.HTTPException) as error:
            return f"the engine does not answer at {host}:{port}/health yet: {error or type(error).__name__}"
    return "" if status == http.HTTPStatus.OK else f"the engine answers {status} at {host}:{port}/health"


def _read(path: Path) -> Statement | None:
    """Return what a file says; None if it is gone, or no whole statement: one of ours is always whole."""
    try:
        said = Statement(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    return said if isinstance(said.pid, int) and isinstance(said.birth, str) else None


def _birth(pid: int) -> str:
    """Return what tells a process from any other of its number; empty if there is none or the system does not tell."""
    try:
        line = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    fields = line.rpartition(")")[2].split()
    return fields[_BIRTH] if len(fields) > _BIRTH else ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 0 if the engine may get requests."""
    parser = argparse.ArgumentParser(prog="python3 -m kvtier_connector.pod_tools.ready")
    parser.add_argument("--state", type=Path, required=True, help="directory in which the engine's disk tiers report")
    parser.add_argument("--host", required=True, help="address that the engine listens on")
    parser.add_argument("--port", type=int, required=True, help="port that the engine listens on")
    options = parser.parse_args(arguments)
    problem = why_not_serving(options.host, options.port) or why_not_decided(options.state)
    sys.stdout.write(f"{problem or 'ready'}\n")
    return 1 if problem else 0


if __name__ == "__main__":
    sys.exit(main())
