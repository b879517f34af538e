# SPDX-License-Identifier: Apache-2.0
"""What keeps the kubelet from starting a pod at all: volumes that are not there, or cannot be mounted."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Final

from kvtier_operator.kube.cluster import Cluster
from kvtier_operator.names import Manifest

MOUNT_PATIENCE: Final = timedelta(seconds=30)
"""A pod whose volumes are not mounted for this long after it was made is asked about."""

_MOUNT_REASONS: Final = frozenset({"FailedMount", "FailedAttachVolume", "FailedCreatePodSandBox"})


def mount_problem(cluster: Cluster, pod: Manifest, now: datetime) -> str:
    """Return what keeps the kubelet from starting a pod at all; only Events tell, so they are read only for such a pod.

    A pod in that state names nothing but ContainerCreating, for ever.
    """
    metadata = pod["metadata"]
    born = metadata.get("creationTimestamp")
    if not is_held_up(pod) or born is None:
        return ""
    if now - datetime.fromisoformat(born) < MOUNT_PATIENCE:
        return ""
    found = [
        event
        for event in cluster.events(metadata["namespace"], uid=metadata["uid"])
        if event.get("reason") in _MOUNT_REASONS
    ]
    latest = max(found, key=lambda event: event.get("lastTimestamp") or event.get("eventTime") or "", default=None)
    return "" if latest is None else f"{latest['reason']}: {latest.get('message', '')}"


def is_held_up(pod: Manifest) -> bool:
    """Tell whether the kubelet starts nothing of a pod yet."""
    status = pod.get("status", {})
    waiting = [
        (each.get("state") or {}).get("waiting") or {}
        for each in (*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ()))
    ]
    is_waiting = all(each.get("reason") in {"ContainerCreating", "PodInitializing"} for each in waiting)
    return bool(waiting) and is_waiting and "deletionTimestamp" not in pod["metadata"]
