# SPDX-License-Identifier: Apache-2.0
"""Checks behind the conditions of the engines, in the order in which they are reported. Pure.

A check looks at one thing and returns the problem it found, with the remedy, or None. Its docstring is the claim that
it tests.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from kvtier_operator import names, quantity
from kvtier_operator.api.reasons import Reason
from kvtier_operator.api.status_schema import PodSizing
from kvtier_operator.conditions import Check, PlannedStage, Problem, Status, checked, listed, met, quoted, unknown
from kvtier_operator.parts import crash_causes
from kvtier_operator.plan import TierPlan, nodes
from kvtier_operator.snapshot import ContainerStatus, Node, Nodes, Pod, Snapshot


def _alive(snapshot: Snapshot) -> list[Pod]:
    """Return the engine pods that are meant to stay."""
    return [pod for pod in snapshot.pods if not pod.is_terminating and pod.phase not in {"Succeeded", "Failed"}]


def engines_are_wanted(stage: PlannedStage) -> Problem | None:
    """There is something to find a node for: a tier scaled to nothing may have let its nodes go."""
    if stage.spec.replicas > 0 or _alive(stage.snapshot):
        return None
    return unknown(Reason.NO_ENGINES, "spec.replicas is 0: nothing needs a node")


def a_share_was_taken_of_a_node(stage: PlannedStage) -> Problem | None:
    """A share of a node was asked for, and there was a node to take it of."""
    assumed = stage.plan.decisions.assumed
    if assumed is None:
        return None
    return Problem(
        assumed.reason,
        f"{assumed.message}; until then an engine asks for {quantity.show_bytes(stage.sizing.cpu_bytes)}, "
        "so that its pod waits and an autoscaler adds a node",
    )


def a_node_is_large_enough(stage: PlannedStage) -> Problem | None:
    """Some node could take an engine, were it empty. Told before a pod waits, and never against what was scheduled."""
    found, spec = stage.snapshot.nodes, stage.spec
    if found is None or any(pod.is_scheduled for pod in _alive(stage.snapshot)):
        return None
    matching = nodes.matching(spec, found)
    if not matching:
        return Problem(
            Reason.NO_NODE_MATCHES,
            f"none of {len(found.nodes)} nodes takes the engines ({nodes.wanted_text(spec)}): correct "
            "spec.engine.podTemplate or spec.engine.accelerator, or add such a node; if nodes are added on demand, "
            "this passes",
        )
    count = (spec.replicas or 1) if stage.plan.is_on_one_node else 1
    if hosts(stage.plan, found, count):
        return None
    memory, millis = pod_requests(stage.plan)
    if hosts(stage.plan, found, 1):
        devices = "".join(f", {count * each} {name}" for name, each in nodes.countables(spec).items())
        return Problem(
            Reason.DOES_NOT_FIT,
            f"{count} engines need {quantity.show_bytes(count * memory)} of memory, {count * millis / 1000:g} "
            f"CPUs{devices} on one node, since the volume is ReadWriteOnce. No node has that: lower spec.replicas, "
            "spec.cpu, spec.engine.memory or spec.engine.cpu, add a larger node, or create another KVCacheTier with "
            "spec.volume.claim.accessModes: [ReadWriteMany]",
        )
    beside = memory - stage.sizing.memory_bytes
    largest = max(matching, key=lambda node: (node.memory_bytes, node.name))
    return Problem(
        Reason.DOES_NOT_FIT,
        f"an engine needs {quantity.show_bytes(memory)} of memory ({_sum(stage.sizing, beside)}) and "
        f"{millis / 1000:g} CPUs. The largest of {len(matching)} matching nodes, {largest.name}, has "
        f"{quantity.show_bytes(largest.memory_bytes)} and {largest.cpu_millis / 1000:g}: lower spec.cpu.size to at "
        f"most {quantity.show_bytes(_most_cpu_bytes(stage.sizing, largest.memory_bytes - beside))}, or "
        "spec.engine.memory or spec.engine.cpu, or add a larger node",
    )


def hosts(plan: TierPlan, found: Nodes, count: int) -> list[Node]:
    """Return the nodes that could hold so many engine pods, were they empty."""
    (memory, millis), devices = pod_requests(plan), nodes.countables(plan.spec).items()
    return [
        node
        for node in nodes.matching(plan.spec, found)
        if node.memory_bytes >= count * memory and node.cpu_millis >= count * millis
        if all(node.devices.get(name, 0) >= count * each for name, each in devices)
    ]


def pod_requests(plan: TierPlan) -> tuple[int, int]:
    """Return the bytes of memory and the thousandths of a CPU that one engine pod asks for."""
    memory, millis = nodes.sidecar_requests(plan.spec)
    return memory + plan.sizing.memory_bytes, millis + quantity.parse_millis(plan.spec.engine.cpu)


def _sum(sizing: PodSizing, beside: int) -> str:
    """Write the terms of the memory of a pod."""
    each = "" if sizing.engines_per_pod == 1 else f"{sizing.engines_per_pod} x "
    more = f" + {quantity.show_bytes(beside)} of spec.engine.podTemplate.containers" if beside else ""
    return (
        f"engine {quantity.show_bytes(sizing.engine_memory_bytes)} + CPU tier {each}"
        f"{quantity.show_bytes(sizing.cpu_bytes)} + shared memory of vLLM "
        f"{quantity.show_bytes(sizing.shm_overhead_bytes)} + {quantity.show_bytes(sizing.io_worker_bytes)} to move "
        f"blocks{more}"
    )


def _most_cpu_bytes(sizing: PodSizing, memory_bytes: int) -> int:
    """Return the largest CPU tier of one engine that a node with so much memory can hold."""
    beside = sizing.engine_memory_bytes + sizing.shm_overhead_bytes + sizing.io_worker_bytes
    return max(0, memory_bytes - beside) // sizing.engines_per_pod


def engines_fit(stage: PlannedStage) -> Problem | None:
    """The scheduler found room for every engine it was asked about."""
    waiting = [pod for pod in _alive(stage.snapshot) if pod.is_scheduled is False]
    short = next((pod for pod in waiting if "Insufficient" in pod.scheduling_message), None)
    if short is None:
        return None
    device = stage.spec.engine.accelerator.resource
    if f"Insufficient {device}" in short.scheduling_message:
        return Problem(
            Reason.DEVICE_MISSING,
            f"pod {short.name} needs {stage.spec.engine.accelerator.per_pod} {device} on one node: "
            f"{short.scheduling_message}; add such a node, check that its device plugin runs, or lower "
            "spec.engine.accelerator.perPod or spec.replicas",
        )
    memory, engine = quantity.format_bytes(stage.sizing.memory_bytes), stage.spec.engine
    asked = [
        f"{memory} of memory",
        f"{quantity.parse_millis(engine.cpu) / 1000:g} CPUs",
        *(f"{count} {resource}" for resource, count in engine.accelerator.of_plugin.items()),
    ]
    return Problem(
        Reason.DOES_NOT_FIT,
        f"pod {short.name} needs {', '.join(asked[:-1])} and {asked[-1]}: {short.scheduling_message}; lower "
        "spec.cpu.size, spec.engine.memory or spec.replicas, or add a node",
    )


def engines_were_scheduled(stage: PlannedStage) -> Problem | None:
    """At least one engine tells whether the sizes fit."""
    if any(pod.is_scheduled for pod in _alive(stage.snapshot)):
        return None
    return unknown(Reason.NO_ENGINES, "no engine has been scheduled yet")


def pods_can_be_created(stage: PlannedStage) -> Problem | None:
    """Neither a quota nor admission stands in the way of the pods."""
    if not stage.snapshot.engines.problem:
        return None
    if "RuntimeClass" in stage.snapshot.engines.problem:
        return Problem(
            Reason.RUNTIME_CLASS_MISSING,
            f"engine pods cannot be created: {stage.snapshot.engines.problem}; correct "
            "spec.engine.podTemplate.runtimeClassName, or create that RuntimeClass",
        )
    return Problem(
        Reason.PODS_REFUSED,
        f"engine pods cannot be created: {stage.snapshot.engines.problem}; raise the quota, or change what was "
        "refused in spec.engine.podTemplate",
    )


def _of_containers(check: Callable[[PlannedStage, Pod, ContainerStatus], Problem | None]) -> Check:
    """Ask of each container of the engine pods that do not serve: what a pod got over is no problem any more."""

    @functools.wraps(check)
    def first_problem(stage: PlannedStage) -> Problem | None:
        unready = (
            (pod, container) for pod in _alive(stage.snapshot) if not pod.is_ready for container in pod.containers
        )
        return next(filter(None, (check(stage, pod, container) for pod, container in unready)), None)

    return first_problem


_ADDED: Final = "spec.engine.podTemplate.containers or initContainers"
_IMAGES: Final = {
    names.ENGINE_CONTAINER: "spec.engine.image",
    names.INSTALL_CONTAINER: "connectorImage of the operator's chart",
}
"""Container to what names its image; the user's own stand in the template."""


@_of_containers
def images_are_pulled(_stage: PlannedStage, pod: Pod, container: ContainerStatus) -> Problem | None:
    """Every image of every engine pod is there."""
    if container.waiting_reason not in {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"}:
        return None
    return Problem(
        Reason.IMAGE_PULL_FAILED,
        f"pod {pod.name} cannot pull {container.image} ({container.waiting_reason}"
        f"{quoted(container.waiting_message)}): correct {_IMAGES.get(container.name, _ADDED)}, or give "
        "a pull secret in spec.engine.podTemplate.imagePullSecrets",
    )


@_of_containers
def references_resolve(_stage: PlannedStage, pod: Pod, container: ContainerStatus) -> Problem | None:
    """The Secrets and ConfigMaps that containers refer to exist."""
    if container.waiting_reason not in {"CreateContainerConfigError", "CreateContainerError"}:
        return None
    return Problem(
        Reason.CONFIG_MISSING,
        f"container {container.name} of pod {pod.name} cannot be created"
        f"{quoted(container.waiting_message)}: create the object it names, or correct "
        "spec.model.tokenSecretRef or spec.engine.env",
    )


@_of_containers
def connector_is_installed(_stage: PlannedStage, pod: Pod, container: ContainerStatus) -> Problem | None:
    """The init container did its work."""
    if container.name != names.INSTALL_CONTAINER or not container.exit_code:
        return None
    return Problem(
        Reason.INSTALL_FAILED,
        f"the connector could not be installed in pod {pod.name} (exit code {container.exit_code}): "
        f"`kubectl logs {pod.name} -c {container.name}` says why",
    )


@_of_containers
def engines_have_memory(stage: PlannedStage, pod: Pod, container: ContainerStatus) -> Problem | None:
    """No engine was killed for its memory."""
    if container.exit_reason != "OOMKilled":
        return None
    if container.name not in _IMAGES:
        return Problem(
            Reason.OUT_OF_MEMORY,
            f"container {container.name} of pod {pod.name} was killed at its limit of memory: raise it in {_ADDED}",
        )
    limit = quantity.format_bytes(stage.sizing.memory_bytes)
    return Problem(
        Reason.OUT_OF_MEMORY,
        f"container {container.name} of pod {pod.name} was killed at {limit} of memory "
        f"(spec.engine.memory {stage.spec.engine.memory} and the shared memory of the CPU tier): raise "
        "spec.engine.memory, or lower spec.cpu.size",
    )


@_of_containers
def engines_stay_up(_stage: PlannedStage, pod: Pod, container: ContainerStatus) -> Problem | None:
    """No engine ended by itself."""
    has_ended = container.waiting_reason == "CrashLoopBackOff" or container.restarts > 0 or bool(container.exit_code)
    return _crash(pod, container) if has_ended and container.name == names.ENGINE_CONTAINER else None


def _crash(pod: Pod, container: ContainerStatus) -> Problem:
    cause = crash_causes.explain(container.exit_message, container.exit_code)
    ended = f"the engine of pod {pod.name} ended with exit code {container.exit_code}"
    log = f"`kubectl logs {pod.name} -c {container.name} --previous`"
    if cause is None:
        return Problem(Reason.ENGINE_CRASHED, f"{ended} and was restarted {container.restarts} times: {log} says why")
    quote = f' ("{cause.quote}")' if cause.quote else ""
    return Problem(cause.reason, f"{ended}{quote}: {cause.remedy}; {log} says more")


@_of_containers
def added_containers_stay_up(_stage: PlannedStage, pod: Pod, container: ContainerStatus) -> Problem | None:
    """No container that a user added ended by itself."""
    if container.name in _IMAGES or not (container.waiting_reason == "CrashLoopBackOff" or container.exit_code):
        return None
    return Problem(
        Reason.CONTAINER_CRASHED,
        f"container {container.name} of pod {pod.name} ended with exit code {container.exit_code}"
        f"{quoted(container.exit_message[-200:])}: correct it in {_ADDED}; `kubectl logs {pod.name} -c "
        f"{container.name} --previous` says more",
    )


def volumes_are_mounted(stage: PlannedStage) -> Problem | None:
    """No pod waits for its node to mount what it needs."""
    for pod in _alive(stage.snapshot):
        if pod.mount_problem and not pod.is_ready:
            if (missing := _missing_key(stage, pod)) is not None:
                return missing
            reason, remedy = crash_causes.explain_mount(pod.mount_problem)
            return Problem(reason, f"pod {pod.name} cannot start: {pod.mount_problem}; {remedy}")
    return None


def _missing_key(stage: PlannedStage, pod: Pod) -> Problem | None:
    """Return that the Secret with the keys of blocks is missing, where the kubelet says so."""
    encryption = stage.spec.disk.encryption
    if encryption is None or f'secret "{encryption.secret_name}" not found' not in pod.mount_problem:
        return None
    name, entry = encryption.secret_name, encryption.active_key
    return Problem(
        Reason.KEY_MISSING,
        f"pod {pod.name} cannot start: Secret {name} of spec.disk.encryption.secretName does not exist: "
        f"`kubectl create secret generic {name} -n {stage.tier.namespace} "
        f'--from-literal={entry}="$(openssl rand -base64 32)"` makes one with a new key',
    )


def engines_are_scheduled(stage: PlannedStage) -> Problem | None:
    """No engine waits for a node."""
    for pod in _alive(stage.snapshot):
        if pod.is_scheduled is False:
            return Problem(
                Reason.NOT_SCHEDULED,
                f"no node takes pod {pod.name}{quoted(pod.scheduling_message)}: change "
                "spec.engine.podTemplate (nodeSelector, tolerations, affinity) or add a node",
            )
    return None


def rollout_progresses(stage: PlannedStage) -> Problem | None:
    """The Deployment has not given up."""
    if not stage.snapshot.engines.is_stalled:
        return None
    return Problem(
        Reason.ROLLOUT_STALLED,
        f"new engines did not become ready in time: `kubectl logs "
        f"deployment/{names.engine(stage.snapshot.tier)}` and `kubectl describe pods` say why",
    )


def engines_are_ready(stage: PlannedStage) -> Problem | None:
    """As many engines of this very spec serve as were asked for, and no others are left."""
    engines, wanted = stage.snapshot.engines, stage.spec.replicas
    is_current = engines.generation > 0 and engines.observed_generation >= engines.generation
    awaited = [
        *(() if is_current else ("the latest change is yet to reach the pods",)),
        *(() if engines.ready >= wanted else (f"{engines.ready} of {wanted} engines are ready",)),
        *(() if engines.updated >= wanted else (f"{engines.updated} of {wanted} run the latest spec",)),
        *(() if engines.replicas <= wanted else (f"{engines.replicas - wanted} more than {wanted} are yet to end",)),
    ]
    if not awaited and engines.ready == engines.updated == engines.replicas == wanted:
        return None
    return Problem(
        Reason.ENGINES_STARTING, ", ".join(awaited) or f"{wanted} engines are ready, and others are yet to end"
    )


def seeds_agree(stage: PlannedStage) -> Problem | None:
    """Every engine that runs hashes blocks the same way."""
    alive = _alive(stage.snapshot)
    wanted = (stage.spec.hash.seed, stage.spec.hash.algorithm)
    strays = [pod for pod in alive if (pod.hash_seed, pod.hash_algorithm) != wanted]
    if strays:
        found = listed([f"{pod.name} ({pod.hash_seed}, {pod.hash_algorithm})" for pod in strays])
        return Problem(
            Reason.SEEDS_DIFFER,
            f"not hashing with seed {stage.spec.hash.seed!r} and {stage.spec.hash.algorithm}: {found}. "
            "These engines and the others do not find each other's blocks. The rollout replaces them; if they stay, "
            "something else sets PYTHONHASHSEED in these pods",
        )
    if not alive:
        return unknown(Reason.NO_ENGINES, "no engine runs")
    return None


_SIZING: Final[tuple[Check, ...]] = (
    engines_are_wanted,
    a_share_was_taken_of_a_node,
    a_node_is_large_enough,
    engines_fit,
    engines_were_scheduled,
)


_FITS: Final = checked("SizingFits", _SIZING, ok=Reason.FITS, text="engines found nodes with room")


def _judge_sizes(stage: PlannedStage, previous: Status) -> Problem:
    """Add the notes on sizes that fit."""
    found = _FITS.judge(stage, previous)
    return (
        found
        if found.reason is not Reason.FITS
        else met(found.reason, "; ".join((found.message, *stage.capacity.notes)))
    )


FITS: Final = replace(_FITS, judge=_judge_sizes)
READY: Final = checked(
    "EnginesReady",
    (
        pods_can_be_created,
        images_are_pulled,
        references_resolve,
        volumes_are_mounted,
        connector_is_installed,
        engines_have_memory,
        engines_stay_up,
        added_containers_stay_up,
        engines_are_scheduled,
        rollout_progresses,
        engines_are_ready,
    ),
    ok=Reason.ENGINES_READY,
    text="all engines are ready",
)
SEEDS: Final = checked("HashSeedConsistent", (seeds_agree,), ok=Reason.SEEDS_AGREE, text="all engines hash alike")
