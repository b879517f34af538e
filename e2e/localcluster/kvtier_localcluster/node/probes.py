# SPDX-License-Identifier: Apache-2.0
"""Probes: one look at a container, and the thresholds that turn looks into a verdict."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import aiohttp

from kvtier_localcluster.kinds import Json
from kvtier_localcluster.node.environment import with_address

_DEFAULT_TIMEOUT_SECONDS = 1
_ERROR_STATUS = 400
_SHOWN_CHARACTERS = 200

Execute = Callable[[list[str]], Awaitable[tuple[int, str]]]
"""Runs a command inside the container and returns exit code and output; being cancelled ends the command."""


class Verdict(enum.Enum):
    """The result of the looks so far."""

    UNDECIDED = "undecided"
    SUCCESS = "success"
    FAILURE = "failure"


@dataclass
class Tally:
    """Counts looks in a row against the thresholds of a probe. Pure."""

    success_threshold: int
    failure_threshold: int
    _successes: int = 0
    _failures: int = 0

    @classmethod
    def of(cls, probe: Json) -> Tally:
        """Read the thresholds."""
        return cls(int(probe.get("successThreshold", 1)), int(probe.get("failureThreshold", 3)))

    def add(self, *, is_success: bool) -> Verdict:
        """Count one look."""
        if is_success:
            self._successes, self._failures = self._successes + 1, 0
            return Verdict.SUCCESS if self._successes >= self.success_threshold else Verdict.UNDECIDED
        self._successes, self._failures = 0, self._failures + 1
        return Verdict.FAILURE if self._failures >= self.failure_threshold else Verdict.UNDECIDED


@dataclass(frozen=True, kw_only=True)
class ProbeTarget:
    """Where the container of a probe is."""

    container: Json
    pod_ip: str
    session: aiohttp.ClientSession
    execute: Execute

    def port(self, wanted: int | str) -> int:
        """Return the number of a port that may be named; raises ValueError for a name that is not there."""
        for port in self.container.get("ports") or []:
            if port.get("name") == wanted:
                return int(port["containerPort"])
        return int(wanted)


async def look(action: Json, target: ProbeTarget) -> str | None:
    """Do what a probe or a hook describes once; return why it failed, or None."""
    seconds = float(action.get("timeoutSeconds", _DEFAULT_TIMEOUT_SECONDS))
    try:
        async with asyncio.timeout(seconds):
            if "httpGet" in action:
                return await _http(action["httpGet"], target)
            if "tcpSocket" in action:
                return await _tcp(action["tcpSocket"], target)
            if "exec" in action:
                return await _exec(action["exec"], target)
    except TimeoutError:
        return f"timed out after {seconds:g} s"
    except (aiohttp.ClientError, OSError, ValueError) as problem:
        return str(problem) or repr(problem)
    return f"no such action here: {', '.join(sorted(action))}"


async def _http(action: Json, target: ProbeTarget) -> str | None:
    scheme = action.get("scheme", "HTTP").lower()
    host = with_address(action.get("host") or target.pod_ip, target.pod_ip)
    path = action.get("path") or "/"
    url = f"{scheme}://{host}:{target.port(action['port'])}/{path.removeprefix('/')}"
    headers = {each["name"]: each["value"] for each in action.get("httpHeaders") or []}
    request = target.session.get(url, headers={"User-Agent": "kube-probe/1.34", **headers}, ssl=False)
    async with request as answer:
        if answer.status < _ERROR_STATUS:
            return None
        return f"HTTP probe failed with statuscode: {answer.status}"


async def _tcp(action: Json, target: ProbeTarget) -> str | None:
    host = with_address(action.get("host") or target.pod_ip, target.pod_ip)
    _, writer = await asyncio.open_connection(host, target.port(action["port"]))
    writer.close()
    return None


async def _exec(action: Json, target: ProbeTarget) -> str | None:
    code, output = await target.execute(action["command"])
    return None if code == 0 else output.strip()[-_SHOWN_CHARACTERS:] or f"command exited with {code}"
