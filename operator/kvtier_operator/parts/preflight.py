# SPDX-License-Identifier: Apache-2.0
"""The Job that tries a claim before engines use it: whether it has to, what it has shown, what is kept of that. Pure.

A claim is tried once: what was found is kept in the status, under a key that changes with the claim and with the user
that the pods run as. Engines that run already are never held up by it.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from pydantic.alias_generators import to_camel

from kvtier_operator import names, quantity
from kvtier_operator.api import TierSpec
from kvtier_operator.api.reasons import Reason
from kvtier_operator.conditions import ConditionRule, Problem, ReadStage, Status, met, unknown
from kvtier_operator.names import Manifest
from kvtier_operator.parts import pods
from kvtier_operator.parts.part import Work
from kvtier_operator.plan import TierPlan
from kvtier_operator.plan.digest import digest
from kvtier_operator.snapshot import SeenJob, Snapshot

RESULT_FILE: Final = "/dev/termination-log"

DEADLINE_SECONDS: Final = 1800
"""To find a node, have the volume provisioned and the image pulled, and to run, which takes a minute at most."""

KEPT_SECONDS: Final = 300
"""A Job that has failed is made anew after this long: the fault may have been removed."""


ALWAYS: Final = "Always"
_WRITTEN: Final = "ReadWrite"
"""The mode in which engines need what a preflight asks for."""

_MEASURED: Final = (
    *("directIo", "totalBytes", "freeBytes", "writeBytesPerSecond", "readBytesPerSecond", "statMicroseconds"),
    "roundTripMicroseconds",
)
_QUOTED_FIELDS: Final = ("fileSystem", "chosen", "advice")
_MOST_CHARACTERS: Final = 256


def job(plan: TierPlan, key: str, *, places_volume: bool = False) -> Manifest:
    """Return the Job, whose result is valid for a key. It runs where engines may run and as their user.

    A volume that is made where its first user runs may stay there. Then that user asks for all that an engine asks for:
    on a node without room for one, the volume would keep every engine from starting.
    """
    template = plan.spec.engine.pod_template
    node_affinity = (template.affinity or {}).get("nodeAffinity")
    optional = {
        "nodeSelector": dict(template.node_selector),
        "tolerations": pods.tolerations(plan),
        "affinity": {"nodeAffinity": node_affinity} if node_affinity else {},
        "priorityClassName": template.priority_class_name,
        "schedulerName": template.scheduler_name,
        "imagePullSecrets": list(template.image_pull_secrets),
    }
    metadata = names.metadata(plan.tier, names.preflight(plan.tier), component=names.COMPONENT_PREFLIGHT)
    annotations = {names.ANNOTATION_PREFLIGHT: key}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {**metadata, "annotations": annotations},
        "spec": {
            "backoffLimit": 1,
            "activeDeadlineSeconds": DEADLINE_SECONDS,
            "ttlSecondsAfterFinished": KEPT_SECONDS,
            "template": {
                "metadata": {
                    "labels": names.labels(plan.tier, names.COMPONENT_PREFLIGHT),
                    "annotations": dict(annotations),
                },
                "spec": {
                    "restartPolicy": "Never",
                    "serviceAccountName": pods.service_account(plan),
                    "automountServiceAccountToken": False,
                    "enableServiceLinks": False,
                    "securityContext": pods.security_context(template),
                    **{field: value for field, value in optional.items() if value},
                    "containers": [_container(plan, places_volume=places_volume)],
                    "volumes": [
                        {"name": "blocks", "persistentVolumeClaim": {"claimName": plan.claim_name}},
                        {"name": "scratch", "emptyDir": {}},
                    ],
                },
            },
        },
    }


def _container(plan: TierPlan, *, places_volume: bool) -> Manifest:
    parts = (names.VOLUME_MOUNT, plan.spec.volume.path.strip("/"), f"{plan.tier.namespace}.{plan.tier.name}")
    little = {"requests": {"cpu": "100m", "memory": "128Mi"}, "limits": {"memory": "256Mi"}}
    return {
        "name": names.PREFLIGHT_CONTAINER,
        "image": plan.connector_image,
        "command": ["python3", "-m", "kvtier_connector.pod_tools.preflight"],
        "args": ["--root", "/".join(part for part in parts if part), "--result", RESULT_FILE],
        "resources": pods.engine_resources(plan) if places_volume else little,
        "terminationMessagePath": RESULT_FILE,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": pods.hardened(),
        "volumeMounts": [
            {"name": "blocks", "mountPath": names.VOLUME_MOUNT},
            {"name": "scratch", "mountPath": names.SCRATCH_MOUNT},
        ],
    }


class PreflightState(enum.Enum):
    """How far a preflight is."""

    OFF = enum.auto()
    WAITING = enum.auto()
    """There is no claim to try yet."""
    RUNNING = enum.auto()
    PASSED = enum.auto()
    FAILED = enum.auto()


@dataclass(frozen=True, kw_only=True)
class Preflight:
    """Everything known of a claim."""

    state: PreflightState
    key: str = ""
    detail: str = ""
    """The reason why it waits, or why the volume cannot be used."""
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


def preflight_of(spec: TierSpec, snapshot: Snapshot, status: Status) -> Preflight:
    """Return the preflight of the claim, by the last status and by the Job."""
    key, storage = key_of(spec, snapshot), status.get("storage") or {}
    if snapshot.claim is not None and snapshot.claim.is_terminating and not spec.paused:
        # The Job's pod holds the claim, even after it has ended.
        return Preflight(state=PreflightState.WAITING)
    if not spec.connector.uses_volume:
        return Preflight(state=PreflightState.OFF, detail="the connector uses no volume")
    if spec.proof.preflight != ALWAYS:
        return Preflight(state=PreflightState.OFF, detail="spec.proof.preflight is Never")
    if not key:
        return Preflight(state=PreflightState.WAITING)
    if storage.get("key") == key and storage.get("problem") is None and "key" in storage:
        return Preflight(state=PreflightState.PASSED, key=key)
    if spec.disk.mode != _WRITTEN:
        return Preflight(
            state=PreflightState.OFF, detail=f"spec.disk.mode is {spec.disk.mode}: nothing is written there"
        )
    if spec.paused:
        return Preflight(state=PreflightState.RUNNING, detail="the tier is paused")
    return _by_job(key, storage, snapshot.preflight)


def _by_job(key: str, storage: Mapping[str, Any], seen: SeenJob) -> Preflight:
    """Return the result of a Job; a failure is reported until the next Job has ended."""
    if seen.is_foreign:
        return Preflight(
            state=PreflightState.FAILED, key=key, detail="a Job of its name does not belong to this tier: delete it"
        )
    if seen.key == key and seen.exit_code == 0:
        return Preflight(state=PreflightState.PASSED, key=key, measured=_measured(seen.result))
    if seen.key == key and (seen.exit_code is not None or seen.failure):
        problem = _problem(seen) or seen.failure or f"it ended with exit code {seen.exit_code}"
        return Preflight(state=PreflightState.FAILED, key=key, detail=problem)
    if storage.get("key") == key and storage.get("problem"):
        return Preflight(state=PreflightState.FAILED, key=key, detail=str(storage["problem"]))
    return Preflight(state=PreflightState.RUNNING, key=key, detail=seen.waiting)


def _problem(seen: SeenJob) -> str:
    problem = seen.result.get("problem")
    return str(problem)[:1000] if problem else seen.message.strip()[-500:]


def _measured(document: Mapping[str, Any]) -> dict[str, Any]:
    fields = {to_camel(name): value for name, value in document.items()}
    measured = {name: fields[name] for name in _MEASURED if _is_sound(name, fields.get(name))}
    texts = {
        name: fields[name][:_MOST_CHARACTERS]
        for name in _QUOTED_FIELDS
        if isinstance(fields.get(name), str) and fields[name]
    }
    return {**measured, **texts}


def _is_sound(name: str, value: Any) -> bool:
    if name == "directIo":
        return isinstance(value, bool)
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def wanted(work: Work) -> tuple[Manifest, ...]:
    """Return the Job where the claim is to be tried and no Job stands; a Job cannot be changed."""
    spec, snapshot, plan = work.plan.spec, work.snapshot, work.plan
    found = preflight_of(spec, snapshot, work.status)
    if snapshot.preflight.uid or found.state not in {PreflightState.RUNNING, PreflightState.FAILED}:
        return ()
    is_bound = snapshot.claim is not None and snapshot.claim.phase == "Bound"
    return (job(plan, found.key, places_volume=plan.is_on_one_node and not is_bound),)


def leaves_job(work: Work) -> bool:
    """Tell whether a Job that stands stays: it tries this claim, or its result is known."""
    found, seen = preflight_of(work.plan.spec, work.snapshot, work.status), work.snapshot.preflight
    if found.state in {PreflightState.OFF, PreflightState.WAITING}:
        return False
    return found.state is PreflightState.PASSED or seen.is_foreign or seen.key == found.key


def why_deleted(work: Work) -> str:
    """Return why the Job is deleted, as the end of a sentence."""
    claim = work.snapshot.claim
    if claim is not None and claim.is_terminating:
        return "the claim was deleted"
    found = preflight_of(work.plan.spec, work.snapshot, work.status)
    return found.detail if found.state is PreflightState.OFF else "another claim is to be tried"


def lets_engines_start(work: Work) -> bool:
    """Tell whether a first engine may start on the claim."""
    found = preflight_of(work.plan.spec, work.snapshot, work.status)
    return found.state in {PreflightState.OFF, PreflightState.PASSED}


def _judge(stage: ReadStage, previous: Status) -> Problem:
    """Return what is said of the volume, be it good or not."""
    found = preflight_of(stage.spec, stage.snapshot, previous)
    job = f"Job {names.preflight(stage.tier)}"
    match found.state:
        case PreflightState.OFF:
            return unknown(Reason.PREFLIGHT_OFF, found.detail)
        case PreflightState.WAITING:
            return unknown(Reason.PREFLIGHT_RUNNING, "there is no claim to try yet")
        case PreflightState.RUNNING:
            detail = f": {found.detail}" if found.detail else ""
            return unknown(Reason.PREFLIGHT_RUNNING, f"{job} tries the volume before engines start{detail}")
        case PreflightState.PASSED:
            return _passed(document(stage, previous))
        case PreflightState.FAILED:
            return Problem(
                Reason.PREFLIGHT_FAILED,
                f"the volume cannot be used: {found.detail}; it is tried again every few minutes; to start "
                "engines all the same, set spec.proof.preflight to Never",
            )


def document(stage: ReadStage | None, previous: Status) -> dict[str, Any]:
    """Return the measurements for the status; they stay until another claim is tried."""
    before = dict(previous.get("storage") or {})
    if stage is None:
        return before
    found = preflight_of(stage.spec, stage.snapshot, previous)
    if found.state in {PreflightState.OFF, PreflightState.WAITING, PreflightState.RUNNING}:
        return before
    if found.state is PreflightState.FAILED:
        return {"key": found.key, "problem": found.detail}
    return before if found.measured is None else {"key": found.key, **found.measured}


def _passed(storage: Mapping[str, Any]) -> Problem:
    message = "engines can use the volume"
    rates = [
        f"{verb} {quantity.show_bytes(storage[f'{verb}BytesPerSecond'])}/s"
        for verb in ("read", "write")
        if f"{verb}BytesPerSecond" in storage
    ]
    if rates:
        message += f": when it was new, it was measured to {' and '.join(rates)}"
    message += "".join(f"; {storage[name]}" for name in ("chosen", "advice") if storage.get(name))
    if "fileSystem" in storage:
        message = f"{storage['fileSystem']}: {message}"
    return met(Reason.PREFLIGHT_PASSED, message)


CHECKED: Final = ConditionRule(kind="StorageChecked", needs=ReadStage, judge=_judge)
