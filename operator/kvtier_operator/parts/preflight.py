# SPDX-License-Identifier: Apache-2.0
"""The Job that tries a volume before engines use it, and what the status keeps of it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from kvtier_operator import names, quantity
from kvtier_operator.api.reasons import Reason
from kvtier_operator.names import Manifest
from kvtier_operator.parts import pod_settings
from kvtier_operator.plan import TierPlan
from kvtier_operator.plan.preflight_result import State
from kvtier_operator.problems import Condition, Problem, View, not_checked, unknown

RESULT_FILE: Final = "/dev/termination-log"

DEADLINE_SECONDS: Final = 1800
"""To find a node, have the volume provisioned and the image pulled, and to run, which takes a minute at most."""

KEPT_SECONDS: Final = 300
"""A Job that has failed is made anew after this long: the fault may have been removed."""


def preflight(plan: TierPlan, key: str, *, places_volume: bool = False) -> Manifest:
    """Return the Job. It runs where engines may run and as their user.

    Args:
        plan: what the tier becomes.
        key: what its result is valid for.
        places_volume: the volume may be made where its first user runs, and stay there. Then that user asks for all
            that an engine asks for: on a node without room for one, the volume would keep every engine from starting.
    """
    template = plan.spec.engine.pod_template
    node_affinity = (template.affinity or {}).get("nodeAffinity")
    optional = {
        "nodeSelector": dict(template.node_selector),
        "tolerations": pod_settings.tolerations(plan),
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
                    "serviceAccountName": pod_settings.service_account(plan),
                    "automountServiceAccountToken": False,
                    "enableServiceLinks": False,
                    "securityContext": pod_settings.security_context(template),
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
        "command": ["python3", "-m", "kvtier_connector.preflight"],
        "args": ["--root", "/".join(part for part in parts if part), "--result", RESULT_FILE],
        "resources": pod_settings.engine_resources(plan) if places_volume else little,
        "terminationMessagePath": RESULT_FILE,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": pod_settings.hardened(),
        "volumeMounts": [
            {"name": "blocks", "mountPath": names.VOLUME_MOUNT},
            {"name": "scratch", "mountPath": names.SCRATCH_MOUNT},
        ],
    }


def _judge(view: View, previous: Mapping[str, Any]) -> Problem:
    """Return what is said of the volume, be it good or not."""
    found = view.preflight
    if found is None:
        return _passed(previous["storage"]) if _is_passed(previous) else not_checked()
    job = f"Job {names.preflight(view.tier)}"
    match found.state:
        case State.OFF:
            return unknown(Reason.PREFLIGHT_OFF, found.detail)
        case State.WAITING:
            return unknown(Reason.PREFLIGHT_RUNNING, "there is no claim to try yet")
        case State.RUNNING:
            detail = f": {found.detail}" if found.detail else ""
            return unknown(Reason.PREFLIGHT_RUNNING, f"{job} tries the volume before engines start{detail}")
        case State.PASSED:
            return _passed(document(view, previous))
        case State.FAILED:
            return Problem(
                reason=Reason.PREFLIGHT_FAILED,
                message=f"the volume cannot be used: {found.detail}; it is tried again every few minutes; to start "
                "engines all the same, set spec.proof.preflight to Never",
            )


def document(view: View, previous: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the status keeps; what was measured stays until another claim is tried."""
    before = dict(previous.get("storage") or {})
    tokens = view.findings.break_even_tokens if view.findings is not None else None
    if tokens is not None:
        before["breakEvenTokens"] = tokens
    found = view.preflight
    if found is None or found.state in {State.OFF, State.WAITING, State.RUNNING}:
        return before
    kept = {name: value for name, value in before.items() if name == "breakEvenTokens"}
    if found.state is State.FAILED:
        return {**kept, "key": found.key, "problem": found.detail}
    return before if found.measured is None else {**kept, "key": found.key, **found.measured}


def _is_passed(previous: Mapping[str, Any]) -> bool:
    storage = previous.get("storage") or {}
    return "key" in storage and "problem" not in storage


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
    return Problem(reason=Reason.PREFLIGHT_PASSED, message=message, is_met=True)


CHECKED: Final = Condition("StorageChecked", _judge)
