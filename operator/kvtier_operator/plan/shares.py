# SPDX-License-Identifier: Apache-2.0
"""The CPU tier of one engine in bytes, from an amount or from a share of a node. Pure."""

from __future__ import annotations

from typing import Final

from kvtier_operator.api import TierSpec
from kvtier_operator.api.reasons import Reason, Refusal
from kvtier_operator.names import TierRef
from kvtier_operator.plan import backends, digest, engine_args, nodes
from kvtier_operator.plan.decisions import Kept
from kvtier_operator.plan.sizing import SHM_OVERHEAD_BYTES, make_mover_bytes
from kvtier_operator.quantity import show_bytes
from kvtier_operator.snapshot import Nodes

_UNIT: Final = 256 << 20
"""Shares are rounded down to whole units, so that people recognise the number."""


def inputs(spec: TierSpec) -> str:
    """Return the digest of the fields that decide which nodes count and what the engine needs beside the CPU tier."""
    engine, template = spec.engine, spec.engine.pod_template
    asked = {"beside": nodes.beside(spec), "countables": nodes.countables(spec)}
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
    return spec.cpu.fraction is not None and kept.cpu.get("for") != inputs(spec)


def decide_cpu(spec: TierSpec, tier: TierRef, kept: Kept, found: Nodes | None) -> tuple[int, int | None] | Refusal:
    """Return the bytes of one engine's CPU tier, and what a node had left where they are a share of it."""
    if spec.cpu.size_bytes is not None:
        return spec.cpu.size_bytes, None
    if not needs_pods(spec, kept) and isinstance(kept.cpu.get("bytes"), int):
        return kept.cpu["bytes"], kept.cpu.get("nodeBytes")
    return _share(spec, tier, found)


ENDS_WITH_A_NODE: Final = frozenset({Reason.NO_NODE_MATCHES, Reason.DOES_NOT_FIT})
"""What another node can end; a pod that waits for one is how an autoscaler learns of it."""

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
            reason=Reason.NODES_UNKNOWN,
            message="spec.cpu.fraction: the operator cannot see the nodes, because it serves single namespaces or may "
            "not list nodes and pods of the whole cluster: set spec.cpu.size instead, or give it that right",
        )
    smallest = nodes.smallest(spec, tier, found)
    if smallest is None:
        return Refusal(
            reason=Reason.NO_NODE_MATCHES,
            message=f"spec.cpu.fraction: none of {len(found.nodes)} nodes takes these pods "
            f"({wanted_text(spec)}): correct spec.engine.podTemplate and spec.engine.accelerator, or set "
            "spec.cpu.size, which needs no node to be there yet",
        )
    node, left = smallest
    engines = engine_args.read(spec.engine.args).engines_per_pod
    each = left * percent // 100 // engines // _UNIT * _UNIT
    passing = backends.passing_bytes(spec.connector)
    movers = (
        engines * passing
        if passing is not None
        else make_mover_bytes(
            each,
            engines_per_pod=engines,
            workers_per_engine=spec.engine.tensor_parallel,
            compresses=spec.disk.compresses,
        )
    )
    beside = spec.engine.memory_bytes + engines * SHM_OVERHEAD_BYTES + movers + nodes.beside(spec)[0]
    if each == 0 or engines * each + beside > left:
        return Refusal(
            reason=Reason.DOES_NOT_FIT,
            message=f"spec.cpu.fraction: node {node.name} has {show_bytes(left)} left for one pod; {spec.cpu.fraction} "
            f"of it and the {show_bytes(beside)} that the pod needs beside (spec.engine.memory, shared memory, "
            "moving blocks and spec.engine.podTemplate.containers) do not fit: lower spec.cpu.fraction or "
            "spec.engine.memory",
        )
    return each, left


def wanted_text(spec: TierSpec) -> str:
    """Say what a node must have for the pods of a spec."""
    template, parts = spec.engine.pod_template, list[str]()
    parts += [f"{count} {resource}" for resource, count in nodes.countables(spec).items()]
    if template.node_selector:
        parts.append("labels " + ", ".join(f"{key}={value}" for key, value in sorted(template.node_selector.items())))
    if template.affinity and template.affinity.get("nodeAffinity"):
        parts.append("its node affinity")
    parts.append("no taint that it does not tolerate")
    return ", ".join(parts)
