# SPDX-License-Identifier: Apache-2.0
"""The Job that tries a volume before engines use it. Pure."""

from __future__ import annotations

from typing import Final

from kvtier_operator import names
from kvtier_operator.manifests import pods
from kvtier_operator.names import Manifest
from kvtier_operator.plan import TierPlan

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
        "tolerations": pods.tolerations(plan),
        "affinity": {"nodeAffinity": node_affinity} if node_affinity else {},
        "priorityClassName": template.priority_class_name,
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
                    "serviceAccountName": names.engine(plan.tier),
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
        "command": ["python3", "-m", "kvtier_connector.preflight"],
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
