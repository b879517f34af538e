# SPDX-License-Identifier: Apache-2.0
"""The Job that fills a tier with the blocks of a list of prompts. Pure.

It is made from the pods of the engines as they stand, so that the operator and a person's command make the same one: it
runs as their user, near to them, with their connector, and sees their volume without the right to write.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvtier_connector.contract import CONFIG_FILE
from kvtier_operator import names
from kvtier_operator.names import Manifest, TierRef
from kvtier_operator.parts import pod_settings

KEY_VARIABLE: Final = "VLLM_API_KEY"
PROMPTS_MOUNT: Final = "/tmp/kvtier-prompts"  # noqa: S108  a mount point, in a pod of its own
_KEPT_SECONDS: Final = 300
_LONGEST_KEPT_SECONDS: Final = 86400
RESULT_FILE: Final = "/dev/termination-log"


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """Where the prompts are."""

    volume: Mapping[str, Any]
    """Source of the volume that has them, as in a pod: ``{"configMap": {…}}`` and the like."""
    file: str
    """Path below it."""
    concurrency: int = 4
    patience_seconds: float = 120.0
    """How long the blocks of one prompt may take to come to the volume."""


def kept_seconds(attempt: int) -> int:
    """Return after how long a Job that has ended is removed with what it owns; the next one is not made before."""
    return int(min(_KEPT_SECONDS * 2 ** min(attempt - 1, 16), _LONGEST_KEPT_SECONDS))


def job(  # noqa: PLR0913  each by its name
    tier: TierRef,
    template: Manifest,
    prompts: Prompts,
    *,
    name: str,
    host: str,
    deadline_seconds: int,
    key: str = "",
    attempt: int = 1,
    generation: str = "",
    is_on_one_node: bool = False,
) -> Manifest:
    """Return the Job.

    Args:
        tier: whose engines are asked.
        template: the pod template of these engines.
        prompts: what they are asked.
        name: of the Job.
        host: of the engines' Service.
        deadline_seconds: for the Job as a whole.
        key: what its result is valid for.
        attempt: one more for each Job before it that failed at the same.
        generation: digest of the blocks that count; if empty, those of the connector's document as the pod finds it.
        is_on_one_node: whether only one node can mount the volume.
    """
    spec = template["spec"]
    metadata = names.metadata(tier, name, component=names.COMPONENT_WARM)
    annotations = {names.ANNOTATION_WARM: key, names.ANNOTATION_WARM_TRY: str(attempt)} if key else {}
    alike = ("nodeSelector", "imagePullSecrets", "priorityClassName", "schedulerName")
    tolerations = _tolerations(spec)
    volumes = {each["name"]: each for each in spec["volumes"]}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {**metadata, **({"annotations": annotations} if annotations else {})},
        "spec": {
            "backoffLimit": 0,  # the same prompts fail again at once as they did
            "activeDeadlineSeconds": deadline_seconds,
            "ttlSecondsAfterFinished": kept_seconds(attempt),
            "template": {
                "metadata": {"labels": names.labels(tier, names.COMPONENT_WARM)},
                "spec": {
                    "restartPolicy": "Never",
                    "serviceAccountName": spec["serviceAccountName"],
                    "automountServiceAccountToken": False,
                    "enableServiceLinks": False,
                    "securityContext": spec["securityContext"],
                    **{field: spec[field] for field in alike if spec.get(field)},
                    **({"tolerations": tolerations} if tolerations else {}),
                    "affinity": {"podAffinity": _near(tier, is_on_one_node=is_on_one_node)},
                    "containers": [_container(spec, prompts, host, generation)],
                    "volumes": [
                        volumes["blocks"],
                        volumes["config"],
                        {"name": "prompts", **prompts.volume},
                        {"name": "scratch", "emptyDir": {}},
                    ],
                },
            },
        },
    }


def _tolerations(spec: Manifest) -> list[Manifest]:
    """Return the taints that the pod must put up with to run where engines do, though it has no device of theirs."""
    found = list(spec.get("tolerations") or ())
    for resource in (_engine(spec).get("resources") or {}).get("limits") or {}:
        if "/" in resource:  # a device's: Kubernetes adds this one to pods that ask for it, so the template need not
            of_devices = {"key": resource, "operator": "Exists", "effect": "NoSchedule"}
            found += [] if of_devices in found else [of_devices]
    return found


def _near(tier: TierRef, *, is_on_one_node: bool) -> Manifest:
    term = {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": names.selector(tier)}}
    if is_on_one_node:
        return {"requiredDuringSchedulingIgnoredDuringExecution": [term]}
    return {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "podAffinityTerm": term}]}


def _engine(spec: Manifest) -> Manifest:
    found: Manifest = next(each for each in spec["containers"] if each["name"] == names.ENGINE_CONTAINER)
    return found


def _container(spec: Manifest, prompts: Prompts, host: str, generation: str) -> Manifest:
    engine = _engine(spec)
    installer = next(each for each in spec["initContainers"] if each["name"] == names.INSTALL_CONTAINER)
    keys = [each for each in engine.get("env", ()) if each["name"] == KEY_VARIABLE]
    return {
        "name": names.WARM_CONTAINER,
        "image": installer["image"],
        "command": ["python3", "-m", "kvtier_connector.janitor.warming"],
        "args": [
            f"--prompts={PROMPTS_MOUNT}/{prompts.file}",
            f"--url=http://{f'[{host}]' if ':' in host else host}:{names.HTTP_PORT}",
            f"--config={names.CONFIG_MOUNT}/{CONFIG_FILE}",
            f"--concurrency={prompts.concurrency}",
            f"--patience={prompts.patience_seconds:g}",
            f"--result={RESULT_FILE}",
            *([f"--generation={generation}"] if generation else ()),
        ],
        **({"env": keys} if keys else {}),
        "resources": {"requests": {"cpu": "100m", "memory": "128Mi"}, "limits": {"memory": "512Mi"}},
        "terminationMessagePath": RESULT_FILE,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": pod_settings.hardened(),
        "volumeMounts": [
            {"name": "blocks", "mountPath": names.VOLUME_MOUNT, "readOnly": True},
            {"name": "config", "mountPath": names.CONFIG_MOUNT, "readOnly": True},
            {"name": "prompts", "mountPath": PROMPTS_MOUNT, "readOnly": True},
            {"name": "scratch", "mountPath": names.SCRATCH_MOUNT},
        ],
    }
