# SPDX-License-Identifier: Apache-2.0
"""What engines have compiled: the init container that brings it along, and the Job that makes it. Pure."""

from __future__ import annotations

from typing import Any, Final

from kvtier_operator import names
from kvtier_operator.names import Manifest, TierRef
from kvtier_operator.parts import pod_settings
from kvtier_operator.plan import TierPlan

_MODULE: Final = ["python3", "-m", "kvtier_connector.compile_cache"]
_RESULT: Final = "/dev/termination-log"
_SCRATCH: Final = f"{names.SCRATCH_MOUNT}/kvtier-compile"
_KEPT_SECONDS: Final = 3600


def directory(root: str) -> str:
    """Return where the caches of a tier lie, beside the directory of its generations.

    Args:
        root: directory of a generation, as pods see it.
    """
    tier_dir = root.rpartition("/")[0]
    base, _, tier = tier_dir.rpartition("/")
    return f"{base}/.compiled/{tier}"


def init_containers(plan: TierPlan) -> list[Manifest]:
    """Return the container that copies a cache to where the engine looks; none where none is named."""
    if plan.spec.engine.compile_cache is None:
        return []
    return [
        {
            "name": names.COMPILED_CONTAINER,
            "image": plan.connector_image,
            "command": list(_MODULE),
            "args": [
                "restore",
                f"--caches={directory(plan.generation.root)}",
                f"--digest={plan.spec.engine.compile_cache.digest}",
                f"--target={names.SCRATCH_MOUNT}",
            ],
            "resources": {"requests": {"cpu": "100m", "memory": "64Mi"}, "limits": {"memory": "512Mi"}},
            "terminationMessagePolicy": "FallbackToLogsOnError",
            "securityContext": pod_settings.hardened(),
            "volumeMounts": [
                {"name": "blocks", "mountPath": names.VOLUME_MOUNT, "readOnly": True},
                {"name": "scratch", "mountPath": names.SCRATCH_MOUNT},
            ],
        }
    ]


def job(tier: TierRef, template: Manifest, *, name: str, root: str, deadline_seconds: int) -> Manifest:
    """Return the Job that compiles: an engine as they are, which gets no request and ends once it serves.

    Args:
        tier: whose engines.
        template: their pod template.
        name: of the Job.
        root: directory of a generation, as pods see it.
        deadline_seconds: for the Job as a whole.
    """
    spec: dict[str, Any] = template["spec"]
    engine = next(each for each in spec["containers"] if each["name"] == names.ENGINE_CONTAINER)
    left_out = {"startupProbe", "readinessProbe", "livenessProbe", "lifecycle", "ports", "name", "command", "args"}
    listening = next((word for word in engine["args"] if word.startswith("--host=")), "--host=127.0.0.1")
    # To Linux, all addresses are this machine.
    host = listening.removeprefix("--host=").replace(names.EVERY_ADDRESS, f"[{names.EVERY_ADDRESS}]")
    container = {
        "name": names.COMPONENT_COMPILE,
        **{field: value for field, value in engine.items() if field not in left_out},
        "command": list(_MODULE),
        "args": [
            "write",
            f"--caches={directory(root)}",
            f"--scratch={_SCRATCH}",
            f"--url=http://{host}:{names.HTTP_PORT}/health",
            f"--seconds={deadline_seconds}",
            f"--result={_RESULT}",
            "--",
            *engine["command"],
            *engine["args"],
        ],
    }
    others = {names.COMPILED_CONTAINER, names.REDIS_CHECK_CONTAINER}
    first = [each for each in spec.get("initContainers", ()) if each["name"] not in others]
    kept = {field: value for field, value in spec.items() if field not in {"initContainers", "containers"}}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": names.metadata(tier, name, component=names.COMPONENT_COMPILE),
        "spec": {
            "backoffLimit": 0,
            "activeDeadlineSeconds": deadline_seconds + 120,
            "ttlSecondsAfterFinished": _KEPT_SECONDS,
            "template": {
                # Not an engine's labels: no Service and no router may send it anything.
                "metadata": {"labels": names.labels(tier, names.COMPONENT_COMPILE)},
                "spec": {
                    **kept,
                    "restartPolicy": "Never",
                    "initContainers": first,
                    "containers": [container],
                },
            },
        },
    }
