# SPDX-License-Identifier: Apache-2.0
"""Which nodes an engine pod may run on, and what they have left for it.

Pure. Follows the scheduler as far as a spec can say where its pods go: node selector, required node affinity, taints,
and the devices that a node offers. What it cannot know (topology of volumes, affinity between pods) it leaves open.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from kvtier_operator.names import TierName, TierRef
from kvtier_operator.snapshot import Node, Nodes, Usage
from kvtier_operator.spec import TierSpec
from kvtier_operator.spec.engine import NO_ACCELERATOR

_KEEPS_AWAY: Final = frozenset({"NoSchedule", "NoExecute"})

DEVICE_MEMORY_LABEL: Final = "nvidia.com/gpu.memory"
"""MiB of one device, as NVIDIA's feature discovery writes it."""


def matching(spec: TierSpec, nodes: Iterable[Node]) -> list[Node]:
    """Return the nodes that the pods of a spec may run on, were they empty."""
    return [node for node in nodes if may_run_on(spec, node)]


def may_run_on(spec: TierSpec, node: Node) -> bool:
    """Tell whether a node takes new pods, has the labels and devices, and no taint that the pods do not tolerate."""
    template = spec.engine.pod_template
    return (
        node.is_open
        and all(node.labels.get(key) == value for key, value in template.node_selector.items())
        and _is_affine(template.affinity or {}, node)
        and all(_is_tolerated(taint, template.tolerations) or _is_of_device(spec, taint) for taint in node.taints)
        and node.devices.get(spec.engine.accelerator.resource, 0) >= devices_wanted(spec)
    )


def _is_of_device(spec: TierSpec, taint: Mapping[str, str]) -> bool:
    """Tell whether a taint keeps away who does not ask for the device: Kubernetes lets in who does, if it is set up so.

    Where it is not, the scheduler says so.
    """
    return devices_wanted(spec) > 0 and taint.get("key") == spec.engine.accelerator.resource


def devices_wanted(spec: TierSpec) -> int:
    """Return the devices of one pod."""
    return 0 if spec.engine.accelerator.resource == NO_ACCELERATOR else spec.engine.accelerator.per_pod


def smallest(spec: TierSpec, tier: TierName | TierRef, nodes: Nodes) -> tuple[Node, int] | None:
    """Return the matching node that has the least memory left beside the pods of others, and how much that is.

    A node whose devices are taken by others gets no pod of ours, so it counts only where all are taken.
    """
    left = [(node, *_left(spec, tier, node, nodes.usage or ())) for node in matching(spec, nodes.nodes)]
    free = [entry for entry in left if entry[2] >= devices_wanted(spec)] or left
    if not free:
        return None
    node, memory, _ = min(free, key=lambda entry: (entry[1], entry[0].name))
    return node, memory


def device_memory(spec: TierSpec, nodes: Nodes | None) -> int | None:
    """Return the bytes of memory of one device, by the spec or else the least of matching nodes; None if none says."""
    if spec.engine.accelerator.memory_bytes is not None:
        return spec.engine.accelerator.memory_bytes
    if nodes is None or spec.engine.accelerator.resource == NO_ACCELERATOR:
        return None
    labels = [node.labels.get(DEVICE_MEMORY_LABEL, "") for node in matching(spec, nodes.nodes)]
    sizes = [int(label) << 20 for label in labels if label.isascii() and label.isdecimal() and len(label) < _LONG]
    return min(sizes, default=None)


_LONG: Final = 12


def _left(spec: TierSpec, tier: TierName | TierRef, node: Node, usage: Iterable[Usage]) -> tuple[int, int]:
    """Return the memory and the devices that others leave on a node."""
    resource = spec.engine.accelerator.resource
    memory, devices = node.memory_bytes, node.devices.get(resource, 0)
    for each in usage:
        if each.node == node.name and (each.namespace, each.tier) != (tier.namespace, tier.name):
            memory -= each.memory_bytes
            devices -= each.devices.get(resource, 0)
    return max(0, memory), max(0, devices)


def _is_tolerated(taint: Mapping[str, str], tolerations: Sequence[Mapping[str, Any]]) -> bool:
    return taint.get("effect") not in _KEEPS_AWAY or any(_tolerates(each, taint) for each in tolerations)


def _tolerates(toleration: Mapping[str, Any], taint: Mapping[str, str]) -> bool:
    if toleration.get("effect") not in {None, "", taint.get("effect")}:
        return False
    operator, key = toleration.get("operator", "Equal"), toleration.get("key")
    if operator == "Exists":
        return key in {None, "", taint.get("key")}
    return key == taint.get("key") and toleration.get("value", "") == taint.get("value", "")


def _is_affine(affinity: Mapping[str, Any], node: Node) -> bool:
    """Tell whether a node satisfies the required node affinity: any of the terms, and everything in it."""
    required = (affinity.get("nodeAffinity") or {}).get("requiredDuringSchedulingIgnoredDuringExecution")
    if not isinstance(required, Mapping):
        return True
    return any(_matches_term(term, node) for term in required.get("nodeSelectorTerms") or ())


def _matches_term(term: Mapping[str, Any], node: Node) -> bool:
    expressions, fields = term.get("matchExpressions") or (), term.get("matchFields") or ()
    if not expressions and not fields:
        return False
    return all(_matches(each, node.labels) for each in expressions) and all(
        _matches(each, {"metadata.name": node.name}) for each in fields
    )


def _matches(expression: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    value, values = labels.get(str(expression.get("key"))), expression.get("values") or ()
    tests: Mapping[str, Callable[[], bool]] = {
        "In": lambda: value in values,
        "NotIn": lambda: value not in values,
        "Exists": lambda: value is not None,
        "DoesNotExist": lambda: value is None,
        "Gt": lambda: _number(value) is not None and _compare(value, values) > 0,
        "Lt": lambda: _number(value) is not None and _compare(value, values) < 0,
    }
    # An operator of a later Kubernetes is left to the scheduler.
    return tests.get(str(expression.get("operator")), lambda: True)()


def _compare(value: str | None, values: Sequence[Any]) -> int:
    left, right = _number(value), _number(str(values[0])) if values else None
    return 0 if left is None or right is None else (left > right) - (left < right)


def _number(text: str | None) -> int | None:
    try:
        return None if text is None else int(text)
    except ValueError:
        return None
