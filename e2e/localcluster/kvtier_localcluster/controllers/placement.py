# SPDX-License-Identifier: Apache-2.0
"""Whether a pod fits the node, and if not, why. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from kvtier_localcluster.apiserver.quantity import parse_quantity
from kvtier_localcluster.kinds import Json

Amounts = Mapping[str, float]


def requests_of(pod: Json) -> Counter[str]:
    """Return what a pod needs: the sum of its containers, or its largest init container where that is more."""
    spec = pod["spec"]
    total: Counter[str] = Counter(pods=1)
    for container in spec["containers"]:
        total.update(_container_requests(container))
    largest: Counter[str] = Counter()
    for container in spec.get("initContainers") or []:
        if container.get("restartPolicy") == "Always":  # a sidecar runs beside the containers
            total.update(_container_requests(container))
        else:
            largest |= _container_requests(container)
    return total | largest


def shortages(pod: Json, *, allocatable: Amounts, placed: Iterable[Json]) -> list[str]:
    """Return the names of the resources that the node lacks for this pod."""
    used: Counter[str] = Counter()
    for other in placed:
        used.update(requests_of(other))
    wanted = requests_of(pod)
    return sorted(name for name, amount in wanted.items() if amount > allocatable.get(name, 0) - used[name])


def problems(pod: Json, *, node: Json, placed: Sequence[Json], claims: Mapping[str, Json]) -> list[str]:
    """Return why the pod cannot run on the node, in the scheduler's words; empty means that it can."""
    spec = pod["spec"]
    for volume in spec.get("volumes") or []:
        name = (volume.get("persistentVolumeClaim") or {}).get("claimName")
        if name is None:
            continue
        if name not in claims:
            return [f'persistentvolumeclaim "{name}" not found']
        if (claims[name].get("status") or {}).get("phase") != "Bound":
            return ["pod has unbound immediate PersistentVolumeClaims"]
    if node["spec"].get("unschedulable"):
        return ["1 node(s) were unschedulable"]
    if not _selects(spec, node["metadata"].get("labels") or {}):
        return ["1 node(s) didn't match Pod's node affinity/selector"]
    amounts = {name: parse_quantity(text) for name, text in node["status"]["allocatable"].items()}
    lacking = shortages(pod, allocatable=amounts, placed=placed)
    return ["1 Too many pods" if name == "pods" else f"1 Insufficient {name}" for name in lacking]


def _container_requests(container: Json) -> Counter[str]:
    resources = container.get("resources") or {}
    wanted = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
    amounts: Counter[str] = Counter()
    for name, text in wanted.items():
        amounts[name] = parse_quantity(text)  # type: ignore[assignment]  # a Counter of floats adds up as well
    return amounts


def _selects(spec: Json, labels: Mapping[str, str]) -> bool:
    if any(labels.get(name) != value for name, value in (spec.get("nodeSelector") or {}).items()):
        return False
    affinity = (spec.get("affinity") or {}).get("nodeAffinity") or {}
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution")
    if required is None:
        return True
    return any(
        all(_holds(expression, labels) for expression in term.get("matchExpressions") or [])
        for term in required["nodeSelectorTerms"]
    )


def _holds(expression: Json, labels: Mapping[str, str]) -> bool:
    value = labels.get(expression["key"])
    values = expression.get("values") or []
    match expression["operator"]:
        case "In":
            return value in values
        case "NotIn":
            return value not in values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case "Gt":
            return value is not None and int(value) > int(values[0])
        case "Lt":
            return value is not None and int(value) < int(values[0])
    return False
