# SPDX-License-Identifier: Apache-2.0
"""EndpointSlices: which pods answer for a Service. Only pods that are Ready are listed, one slice for each Service."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from kvtier_localcluster import kinds
from kvtier_localcluster.client import ApiClient
from kvtier_localcluster.controllers.loop import Controller
from kvtier_localcluster.informers import Change, Informers
from kvtier_localcluster.kinds import Json, Key, Kind

SERVICE_LABEL = "kubernetes.io/service-name"
_MANAGER_LABEL = "endpointslice.kubernetes.io/managed-by"


def target_port(service_port: Json, pod: Json) -> int | None:
    """Return the number of the container port that a Service port means in one pod."""
    target = service_port.get("targetPort", service_port["port"])
    if isinstance(target, int):
        return target
    for container in pod["spec"]["containers"]:
        for port in container.get("ports") or []:
            if port.get("name") == target:
                return int(port["containerPort"])
    return int(target) if target is not None and str(target).isdigit() else None


class EndpointsController(Controller):
    """Keeps one EndpointSlice for each Service that has a selector."""

    kind: ClassVar[Kind] = kinds.SERVICE

    def __init__(self, client: ApiClient, informers: Informers) -> None:
        """Listen to Services and pods."""
        super().__init__(client, informers)
        self._pods = informers[kinds.POD]
        self._slices = informers[kinds.ENDPOINT_SLICE]
        self._pods.listen(self._notice_pod)

    async def sync(self, key: Key) -> None:
        """Write the slice of one Service, if it changed."""
        service = self.own.get(key)
        if service is None or kinds.is_deleting(service) or not service["spec"].get("selector"):
            return
        manifest = _slice(service, [pod for pod in self._pods if _serves(pod, service)])
        current = self._slices.get(kinds.key_of(manifest))
        if current is None:
            self._slices.remember(await self.client.create(kinds.ENDPOINT_SLICE, manifest))
            return
        present = {field: current.get(field) for field in ("endpoints", "ports")}
        change = kinds.merge_difference(present, {field: manifest[field] for field in present})
        if change:
            self._slices.remember(await self.client.patch(kinds.ENDPOINT_SLICE, current, change))

    def _notice_pod(self, change: Change) -> None:
        for service in self.own:
            if service["metadata"]["namespace"] == change.object["metadata"]["namespace"] and any(
                kinds.matches(service["spec"].get("selector") or {}, pod["metadata"].get("labels"))
                for pod in (change.object, change.old)
                if pod is not None
            ):
                self.enqueue(kinds.key_of(service))


def _serves(pod: Json, service: Json) -> bool:
    is_near = pod["metadata"]["namespace"] == service["metadata"]["namespace"]
    if not is_near or not kinds.matches(service["spec"]["selector"], pod["metadata"].get("labels")):
        return False
    has_address = bool((pod.get("status") or {}).get("podIP"))
    is_over = kinds.is_deleting(pod) or kinds.is_finished(pod)
    return (
        has_address and not is_over and (kinds.is_ready(pod) or bool(service["spec"].get("publishNotReadyAddresses")))
    )


def _slice(service: Json, pods: Sequence[Json]) -> Json:
    metadata = service["metadata"]
    ordered = sorted(pods, key=kinds.key_of)
    return {
        "metadata": {
            "name": f"{metadata['name']}-{metadata['uid'][:5]}",
            "namespace": metadata["namespace"],
            "labels": {
                **(metadata.get("labels") or {}),
                SERVICE_LABEL: metadata["name"],
                _MANAGER_LABEL: "endpointslice-controller.k8s.io",
            },
            "ownerReferences": [kinds.controlled_by(kinds.SERVICE, service)],
        },
        "addressType": "IPv4",
        "endpoints": [_endpoint(pod) for pod in ordered],
        "ports": _ports(service, ordered),
    }


def _endpoint(pod: Json) -> Json:
    return {
        "addresses": [pod["status"]["podIP"]],
        "conditions": {"ready": True, "serving": kinds.is_ready(pod), "terminating": False},
        "nodeName": pod["spec"].get("nodeName", ""),
        "targetRef": {
            "kind": "Pod",
            "namespace": pod["metadata"]["namespace"],
            "name": pod["metadata"]["name"],
            "uid": pod["metadata"]["uid"],
        },
    }


def _ports(service: Json, pods: Sequence[Json]) -> list[Json]:
    ports = []
    for port in service["spec"].get("ports") or []:
        number = target_port(port, pods[0]) if pods else None
        if number is not None:
            ports.append({"name": port.get("name", ""), "port": number, "protocol": port.get("protocol", "TCP")})
    return ports
