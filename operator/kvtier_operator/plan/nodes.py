# SPDX-License-Identifier: Apache-2.0
"""Which nodes an engine pod may run on, and what they have left for it.

Pure. Follows the scheduler as far as a spec can say where its pods go: node selector, required node affinity, taints,
and the devices that a node offers. What it cannot know (topology of volumes, affinity between pods) it leaves open.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from kvtier_operator import quantity
from kvtier_operator.api import TierSpec, pod_template
from kvtier_operator.api.engine_spec import NO_ACCELERATOR
from kvtier_operator.names import TierName, TierRef
from kvtier_operator.snapshot import Node, Nodes, Usage

_KEEPS_AWAY: Final = frozenset({"NoSchedule", "NoExecute"})

DEVICE_MEMORY_LABEL: Final = "nvidia.com/gpu.memory"
"""MiB of one device, as NVIDIA's feature discovery writes it."""


def matching(spec: TierSpec, nodes: Nodes) -> tuple[Node, ...]:
    """Return the nodes that the pods of a spec may run on, were they empty."""
    template, plugin, wanted = spec.engine.pod_template, spec.engine.accelerator.of_plugin, countables(spec)
    placement = (template.node_selector, template.affinity, template.tolerations, sorted(plugin), wanted)
    key = json.dumps(placement, sort_keys=True)
    found = nodes.matches.get(key)
    if found is None:
        if len(nodes.matches) >= _MOST_PLACEMENTS:
            nodes.matches.clear()
        found = nodes.matches[key] = tuple(node for node in nodes.nodes if _may_run_on(spec, node, wanted))
    return found


_MOST_PLACEMENTS: Final = 200


def _may_run_on(spec: TierSpec, node: Node, wanted: Mapping[str, int]) -> bool:
    """Tell whether a node takes new pods, has the labels and devices, and no taint that the pods do not tolerate."""
    template = spec.engine.pod_template
    return (
        node.is_open
        and all(node.labels.get(key) == value for key, value in template.node_selector.items())
        and _is_affine(template.affinity or {}, node)
        and all(_is_tolerated(taint, template.tolerations) or _is_of_device(spec, taint) for taint in node.taints)
        and all(node.devices.get(resource, 0) >= count for resource, count in wanted.items())
    )


def _is_of_device(spec: TierSpec, taint: Mapping[str, str]) -> bool:
    """Tell whether a taint keeps away who does not ask for the device: Kubernetes lets in who does, if it is set up so.

    Where it is not, the scheduler says so.
    """
    return taint.get("key") in spec.engine.accelerator.of_plugin


def devices_wanted(spec: TierSpec) -> int:
    """Return the accelerators that one pod asks a device plugin for."""
    return sum(spec.engine.accelerator.of_plugin.values())


def countables(spec: TierSpec) -> dict[str, int]:
    """Return the accelerators and the other extended resources that one pod asks for."""
    found = Counter(spec.engine.accelerator.of_plugin)
    for container in spec.engine.pod_template.containers:
        for resource, amount in pod_template.amounts(container, "limits").items():
            # A slash tells what device plugins offer from memory, CPUs and the like.
            if "/" in resource and quantity.is_quantity(str(amount)):
                found[resource] += quantity.parse_bytes(str(amount))
    return dict(found)


def beside(spec: TierSpec) -> tuple[int, int]:
    """Return the bytes of memory and the thousandths of a CPU that the user's own containers ask for in each pod."""
    template = spec.engine.pod_template
    sidecars = [
        *(each for each in template.containers if each["name"] != pod_template.ENGINE),
        *(each for each in template.init_containers if each.get("restartPolicy") == "Always"),
    ]
    memory, millis = 0, 0
    for each in sidecars:
        # Kubernetes sets aside what may be used at most where nothing else is asked for.
        asked = {**pod_template.amounts(each, "limits"), **pod_template.amounts(each, "requests")}
        known = {name: str(amount) for name, amount in asked.items() if quantity.is_quantity(str(amount))}
        memory += quantity.parse_bytes(known.get("memory", "0"))
        millis += quantity.parse_millis(known.get("cpu", "0"))
    return memory, millis


def smallest(spec: TierSpec, tier: TierName | TierRef, nodes: Nodes) -> tuple[Node, int] | None:
    """Return the matching node that has the least memory left beside the pods of others, and how much that is.

    A node whose devices are taken by others gets no pod of ours, so it counts only where all are taken.
    """
    used: dict[str, list[Usage]] = {}
    for each in nodes.usage or ():
        used.setdefault(each.node, []).append(each)
    left = [(node, *_left(spec, tier, node, used.get(node.name, ()))) for node in matching(spec, nodes)]
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
    labels = [node.labels.get(DEVICE_MEMORY_LABEL, "") for node in matching(spec, nodes)]
    sizes = [int(label) << 20 for label in labels if label.isascii() and label.isdecimal() and len(label) < _LONG]
    return min(sizes, default=None)


_LONG: Final = 12


def _left(spec: TierSpec, tier: TierName | TierRef, node: Node, usage: Iterable[Usage]) -> tuple[int, int]:
    """Return the memory and the devices that others leave on a node."""
    resource = spec.engine.accelerator.resource
    memory, devices = node.memory_bytes, node.devices.get(resource, 0)
    for each in usage:
        if (each.namespace, each.tier) != (tier.namespace, tier.name):
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
