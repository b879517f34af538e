# SPDX-License-Identifier: Apache-2.0
"""Whether a claim has to be tried before engines use it, and what trying it has shown. Pure.

A claim is tried once: what was found is kept in the status, under a key that changes with the claim and with the user
that the pods run as. Engines that run already are never held up by it.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvtier_operator.api import TierSpec
from kvtier_operator.plan.digest import digest
from kvtier_operator.snapshot import Snapshot

ALWAYS: Final = "Always"
_WRITTEN: Final = "ReadWrite"
"""The mode in which engines need what a preflight asks for."""

_MEASURED: Final = (
    "directIo",
    "totalBytes",
    "freeBytes",
    "writeBytesPerSecond",
    "readBytesPerSecond",
    "statMicroseconds",
    "roundTripMicroseconds",
)
_TOLD: Final = ("fileSystem", "chosen", "advice")
_MOST_CHARACTERS: Final = 256


class State(enum.Enum):
    """How far a preflight is."""

    OFF = enum.auto()
    WAITING = enum.auto()
    """There is no claim to try yet."""
    RUNNING = enum.auto()
    PASSED = enum.auto()
    FAILED = enum.auto()


@dataclass(frozen=True, kw_only=True)
class JobState:
    """The Job of a preflight and its pods, as last seen."""

    key: str = ""
    """Of the claim that it tries; empty where there is no Job."""
    uid: str = ""
    is_foreign: bool = False
    """Something else stands under its name."""
    failure: str = ""
    """Why the Job gave up, in the words of its controller."""
    waiting: str = ""
    """What its pod waits for."""
    exit_code: int | None = None
    message: str = ""
    """Its pod's last words."""


@dataclass(frozen=True, kw_only=True)
class Preflight:
    """What is known of a claim."""

    state: State
    key: str = ""
    detail: str = ""
    """What it waits for, or why the volume cannot be used."""
    measured: Mapping[str, Any] | None = None
    """For the status."""


def key_of(spec: TierSpec, snapshot: Snapshot) -> str:
    """Return what a preflight is valid for; empty while there is no claim."""
    if snapshot.claim is None:
        return ""
    return digest(
        {
            "claim": snapshot.claim.name,
            "uid": snapshot.claim.uid,
            "path": spec.volume.path,
            "securityContext": spec.engine.pod_template.security_context or {},
        }
    )


def remembered(spec: TierSpec, snapshot: Snapshot, storage: Mapping[str, Any]) -> Preflight | None:
    """Return what is known without looking at any Job; None where one must be looked at."""
    key = key_of(spec, snapshot)
    if spec.proof.preflight != ALWAYS:
        return Preflight(state=State.OFF, detail="spec.proof.preflight is Never")
    if not key:
        return Preflight(state=State.WAITING)
    if storage.get("key") == key and storage.get("problem") is None and "key" in storage:
        return Preflight(state=State.PASSED, key=key)
    if spec.disk.mode != _WRITTEN:
        return Preflight(state=State.OFF, detail=f"spec.disk.mode is {spec.disk.mode}: nothing is written there")
    return None


def judge(key: str, storage: Mapping[str, Any], job: JobState) -> Preflight:
    """Return what a Job has shown; a failure is told until the next Job has ended."""
    if job.is_foreign:
        return Preflight(state=State.FAILED, key=key, detail="a Job of its name belongs to somebody else: delete it")
    if job.key == key and job.exit_code == 0:
        return Preflight(state=State.PASSED, key=key, measured=_measured(job.message))
    if job.key == key and (job.exit_code is not None or job.failure):
        problem = _problem(job.message) or job.failure or f"it ended with exit code {job.exit_code}"
        return Preflight(state=State.FAILED, key=key, detail=problem)
    if storage.get("key") == key and storage.get("problem"):
        return Preflight(state=State.FAILED, key=key, detail=str(storage["problem"]))
    return Preflight(state=State.RUNNING, key=key, detail=job.waiting)


def _document(message: str) -> Mapping[str, Any]:
    try:
        found = json.loads(message.strip().splitlines()[-1]) if message.strip() else {}
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _problem(message: str) -> str:
    found = _document(message)
    return str(found["problem"])[:1000] if found.get("problem") else message.strip()[-500:]


def _measured(message: str) -> dict[str, Any]:
    found = _document(message)
    fields = {_camel(name): value for name, value in found.items()}
    measured = {name: fields[name] for name in _MEASURED if _is_sound(name, fields.get(name))}
    told = {
        name: fields[name][:_MOST_CHARACTERS] for name in _TOLD if isinstance(fields.get(name), str) and fields[name]
    }
    return {**measured, **told}


def _is_sound(name: str, value: Any) -> bool:
    if name == "directIo":
        return isinstance(value, bool)
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(part.capitalize() for part in rest)
