# SPDX-License-Identifier: Apache-2.0
"""Nodes that an engine pod may run on, their room for it, and the CPU tier as a share of it.

Pure. Follows the scheduler as far as a spec can say where its pods go: node selector, required node affinity, taints,
and the devices that a node offers. Topology of volumes and affinity between pods are left to the scheduler.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from kvtier_operator import quantity
from kvtier_operator.api import TierSpec, pod_template
from kvtier_operator.api.engine_spec import NO_ACCELERATOR
from kvtier_operator.api.reasons import Reason, Refusal
from kvtier_operator.names import TierName, TierRef
from kvtier_operator.plan import digest, engine_args
from kvtier_operator.plan.decisions import Kept
from kvtier_operator.plan.sizing import SHM_OVERHEAD_BYTES, make_io_worker_bytes
from kvtier_operator.quantity import show_bytes
from kvtier_operator.snapshot import Node, NodeGroup, Nodes, PodUsage

_KEEPS_AWAY: Final = frozenset({"NoSchedule", "NoExecute"})


def matching(spec: TierSpec, nodes: Nodes) -> tuple[Node, ...]:
    """Return the nodes that the pods of a spec may run on, were they empty."""
    return _group(spec, nodes).nodes


def _group(spec: TierSpec, nodes: Nodes) -> NodeGroup:
    template, plugin, wanted = spec.engine.pod_template, spec.engine.accelerator.of_plugin, countables(spec)
    placement = (template.node_selector, template.affinity, template.tolerations, sorted(plugin), wanted)
    key = json.dumps(placement, sort_keys=True)
    found = nodes.matches.get(key)
    if found is None:
        if len(nodes.matches) >= _MOST_PLACEMENTS:
            nodes.matches.clear()
        found = nodes.matches[key] = NodeGroup(tuple(node for node in nodes.nodes if _may_run_on(spec, node, wanted)))
    return found


_MOST_PLACEMENTS: Final = 200


def _may_run_on(spec: TierSpec, node: Node, wanted: Mapping[str, int]) -> bool:
    """Tell whether a node takes new pods, has the labels and devices, and no taint that the pods do not tolerate."""
    template = spec.engine.pod_template
    return (
        node.is_open
        and all(node.labels.get(key) == value for key, value in template.node_selector.items())
        and _is_affine(template.affinity or {}, node)
        and all(_is_tolerated(spec, taint) for taint in node.taints)
        and all(node.devices.get(resource, 0) >= count for resource, count in wanted.items())
    )


def countables(spec: TierSpec) -> dict[str, int]:
    """Return the accelerators and the other extended resources that one pod asks for."""
    found = Counter(spec.engine.accelerator.of_plugin)
    for container in spec.engine.pod_template.containers:
        for resource, amount in pod_template.amounts(container, "limits").items():
            # A slash tells what device plugins offer from memory, CPUs and the like.
            if "/" in resource and quantity.is_quantity(str(amount)):
                found[resource] += quantity.parse_bytes(str(amount))
    return dict(found)


def sidecar_requests(spec: TierSpec) -> tuple[int, int]:
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


def smallest_node(spec: TierSpec, tier: TierName, nodes: Nodes) -> tuple[Node, int] | None:
    """Return the matching node that has the least memory left beside the pods of others, and how much that is.

    A node whose devices are taken by others gets no pod of ours, so it counts only where all are taken.
    """
    used: dict[str, list[PodUsage]] = {}
    for each in nodes.usage or ():
        used.setdefault(each.node, []).append(each)
    left = [(node, *_left(spec, tier, node, used.get(node.name, ()))) for node in matching(spec, nodes)]
    wanted = sum(spec.engine.accelerator.of_plugin.values())
    free = [entry for entry in left if entry[2] >= wanted] or left
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
    return _group(spec, nodes).device_bytes


def _left(spec: TierSpec, tier: TierName, node: Node, usage: Iterable[PodUsage]) -> tuple[int, int]:
    """Return the memory and the devices that others leave on a node."""
    resource = spec.engine.accelerator.resource
    memory, devices = node.memory_bytes, node.devices.get(resource, 0)
    for each in usage:
        if (each.namespace, each.tier) != (tier.namespace, tier.name):
            memory -= each.memory_bytes
            devices -= each.devices.get(resource, 0)
    return max(0, memory), max(0, devices)


def _is_tolerated(spec: TierSpec, taint: Mapping[str, str]) -> bool:
    """Tell whether a taint lets the pods in.

    Kubernetes lets in who asks for the device that a taint is named after, if it is set up so; else the scheduler says.
    """
    return (
        taint.get("effect") not in _KEEPS_AWAY
        or taint.get("key") in spec.engine.accelerator.of_plugin
        or any(_tolerates(each, taint) for each in spec.engine.pod_template.tolerations)
    )


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
    value, values = labels.get(str(expression.get("key"))), expression.get("values") or (None,)
    tests: Mapping[str, Callable[[], bool]] = {
        "In": lambda: value is not None and value in values,
        "NotIn": lambda: value is None or value not in values,
        "Exists": lambda: value is not None,
        "DoesNotExist": lambda: value is None,
        "Gt": lambda: _is_more(value, values[0]),
        "Lt": lambda: _is_more(values[0], value),
    }
    # An operator of a later Kubernetes is left to the scheduler.
    return tests.get(str(expression.get("operator")), lambda: True)()


def _is_more(left: str | None, right: str | None) -> bool:
    """Tell whether both are whole numbers and the first is the larger one."""
    try:
        return left is not None and right is not None and int(left) > int(right)
    except ValueError:
        return False


_UNIT: Final = 256 << 20
"""Shares are rounded down to whole units, so that people recognise the number."""


def share_inputs(spec: TierSpec) -> str:
    """Return the digest of the fields that decide which nodes count and what the engine needs beside the CPU tier."""
    engine, template = spec.engine, spec.engine.pod_template
    asked = {"beside": sidecar_requests(spec), "countables": countables(spec)}
    without = {"beside": (0, 0), "countables": dict(engine.accelerator.of_plugin)}
    return digest.digest(
        {
            # Left out where they say nothing, so that what was decided before they were known stays.
            **{name: value for name, value in asked.items() if value != without[name]},
            "size": spec.cpu.size,
            "fraction": spec.cpu.fraction,
            "memory": engine.memory,
            "enginesPerPod": engine_args.read(engine.args).engines_per_pod,
            "resource": engine.accelerator.resource,
            "perPod": engine.accelerator.per_pod,
            "nodeSelector": dict(template.node_selector),
            "tolerations": list(template.tolerations),
            "affinity": (template.affinity or {}).get("nodeAffinity"),
        }
    )


def needs_pods(spec: TierSpec, kept: Kept) -> bool:
    """Tell whether a share is still to be decided, which takes a look at all pods."""
    return spec.cpu.fraction is not None and kept.cpu.get("for") != share_inputs(spec)


def decide_cpu(spec: TierSpec, tier: TierRef, kept: Kept, found: Nodes | None) -> tuple[int, int | None] | Refusal:
    """Return the bytes of one engine's CPU tier, and what a node had left where they are a share of it."""
    if spec.cpu.size_bytes is not None:
        return spec.cpu.size_bytes, None
    if not needs_pods(spec, kept) and isinstance(kept.cpu.get("bytes"), int):
        return kept.cpu["bytes"], kept.cpu.get("nodeBytes")
    return _share(spec, tier, found)


ENDS_WITH_A_NODE: Final = frozenset({Reason.NO_NODE_MATCHES, Reason.DOES_NOT_FIT})
"""Refusals that another node can end; an autoscaler adds one for a pod that waits."""

LEAST_BYTES: Final = 1 << 30
"""CPU tier of an engine for which no size was ever decided, until a node is there to take a share of."""


def assume(kept: Kept) -> int:
    """Return the CPU tier of an engine until its share can be decided: what was decided last, or the least."""
    last = kept.cpu.get("bytes")
    return last if isinstance(last, int) else LEAST_BYTES


def _share(spec: TierSpec, tier: TierRef, found: Nodes | None) -> tuple[int, int] | Refusal:
    percent = spec.cpu.percent
    assert percent is not None
    if found is None or found.usage is None:
        return Refusal(
            Reason.NODES_UNKNOWN,
            "spec.cpu.fraction: the operator cannot see the nodes, for it serves single namespaces or may not "
            "list nodes and pods: set spec.cpu.size instead, or give it that right",
        )
    smallest = smallest_node(spec, tier, found)
    if smallest is None:
        return Refusal(
            Reason.NO_NODE_MATCHES,
            f"spec.cpu.fraction: none of {len(found.nodes)} nodes takes these pods "
            f"({wanted_text(spec)}): correct spec.engine.podTemplate and spec.engine.accelerator, or set "
            "spec.cpu.size, which needs no node to be there yet",
        )
    node, left = smallest
    engines = engine_args.read(spec.engine.args).engines_per_pod
    each = left * percent // 100 // engines // _UNIT * _UNIT
    workers = make_io_worker_bytes(spec, each)
    beside = spec.engine.memory_bytes + engines * SHM_OVERHEAD_BYTES + workers + sidecar_requests(spec)[0]
    if each == 0 or engines * each + beside > left:
        return Refusal(
            Reason.DOES_NOT_FIT,
            f"spec.cpu.fraction: node {node.name} has {show_bytes(left)} left for one pod; {spec.cpu.fraction} "
            f"of it does not fit beside {show_bytes(beside)} of spec.engine.memory, shared memory, moving blocks and "
            "spec.engine.podTemplate.containers: lower spec.cpu.fraction or spec.engine.memory",
        )
    return each, left


def wanted_text(spec: TierSpec) -> str:
    """Say what a node must have for the pods of a spec."""
    template, parts = spec.engine.pod_template, list[str]()
    parts += [f"{count} {resource}" for resource, count in countables(spec).items()]
    if template.node_selector:
        parts.append("labels " + ", ".join(f"{key}={value}" for key, value in sorted(template.node_selector.items())))
    if template.affinity and template.affinity.get("nodeAffinity"):
        parts.append("its node affinity")
    parts.append("no taint that it does not tolerate")
    return ", ".join(parts)
