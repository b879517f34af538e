# SPDX-License-Identifier: Apache-2.0
"""The checks behind each condition, in the order in which their problems are told. Pure.

A check looks at one thing and returns the problem it found, with the remedy, or None. Its docstring is the claim that
it tests.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Final

from kvtier_operator import names, quantity
from kvtier_operator.plan import nodes, shares
from kvtier_operator.plan.sizing import Sizing
from kvtier_operator.snapshot import Container, Pod, Snapshot
from kvtier_operator.status import crashes, disk
from kvtier_operator.status.problems import Check, Look, Problem, listed, quoted
from kvtier_operator.status.reasons import Reason


def _alive(snapshot: Snapshot) -> list[Pod]:
    """Return the engine pods that are meant to stay."""
    return [pod for pod in snapshot.pods if not pod.is_terminating and pod.phase not in {"Succeeded", "Failed"}]


def claim_exists(look: Look) -> Problem | None:
    """There is a claim, and nobody deleted it."""
    if look.snapshot.claim is None:
        name = look.spec.volume.existing_claim or names.claim(look.snapshot.tier)
        return Problem(reason=Reason.CLAIM_MISSING, message=f"PersistentVolumeClaim/{name} does not exist yet")
    if look.snapshot.claim.is_terminating:
        return Problem(
            reason=Reason.CLAIM_TERMINATING,
            message=f"PersistentVolumeClaim/{look.snapshot.claim.name} was deleted and goes when no pod uses it: back "
            "up what you need, then set spec.replicas to 0 to let it go",
        )
    return None


def claim_is_bound(look: Look) -> Problem | None:
    """A volume stands behind the claim."""
    claim = look.snapshot.claim
    if claim is None or claim.phase == "Bound":
        return None
    if claim.phase == "Lost":
        return Problem(
            reason=Reason.CLAIM_LOST,
            message=f"the volume of PersistentVolumeClaim/{claim.name} is gone: delete the claim so that a new one can "
            "be made; what was cached is lost",
        )
    return Problem(
        reason=Reason.CLAIM_PENDING,
        message=f"PersistentVolumeClaim/{claim.name} (storage class {claim.storage_class_name or 'by default'}) is "
        f"{claim.phase}: `kubectl describe pvc {claim.name}` says why; a class with WaitForFirstConsumer binds when "
        "the first engine is scheduled",
    )


def claim_has_its_size(look: Look) -> Problem | None:
    """The volume is as large as was asked for; a claim that still grows serves meanwhile."""
    claim = look.snapshot.claim
    if claim is None or (not claim.resizing and not 0 < claim.capacity_bytes < claim.requested_bytes):
        return None
    has, wants = quantity.format_bytes(claim.capacity_bytes), quantity.format_bytes(claim.requested_bytes)
    remedy = (
        "the storage class's driver grows it when a pod mounts it next: set the annotation kvtier.dev/restart if it "
        "stays so"
        if "FileSystemResizePending" in claim.resizing
        else f"`kubectl describe pvc {claim.name}` shows how far it is"
    )
    return Problem(
        reason=Reason.CLAIM_EXPANDING,
        message=f"the claim is bound; it grows from {has} to {wants}{quoted(claim.resizing)}; {remedy}",
        is_met=True,
    )


def engines_are_wanted(look: Look) -> Problem | None:
    """There is something to find a node for: a tier scaled to nothing may have let its nodes go."""
    if look.spec.replicas > 0 or _alive(look.snapshot):
        return None
    return Problem(reason=Reason.NO_ENGINES, message="spec.replicas is 0: nothing needs a node", is_known=False)


def a_node_is_large_enough(look: Look) -> Problem | None:
    """Some node could take an engine, were it empty. Told before a pod waits, and never against what was scheduled."""
    found, spec = look.snapshot.nodes, look.spec
    if found is None or any(pod.is_scheduled for pod in _alive(look.snapshot)):
        return None
    matching = nodes.matching(spec, found.nodes)
    if not matching:
        return Problem(
            reason=Reason.NO_NODE_MATCHES,
            message=f"none of {len(found.nodes)} nodes takes the engines ({shares.wanted_text(spec)}): correct "
            "spec.engine.podTemplate or spec.engine.accelerator, or add such a node; if nodes are added on demand, "
            "this passes",
        )
    memory, millis = look.sizing.memory_bytes, quantity.parse_millis(spec.engine.cpu)
    if any(node.memory_bytes >= memory and node.cpu_millis >= millis for node in matching):
        return None
    largest = max(matching, key=lambda node: (node.memory_bytes, node.name))
    return Problem(
        reason=Reason.DOES_NOT_FIT,
        message=f"an engine needs {quantity.show_bytes(memory)} of memory ({_sum(look.sizing)}) and {spec.engine.cpu} "
        f"CPUs; the largest of {len(matching)} matching nodes, {largest.name}, has "
        f"{quantity.show_bytes(largest.memory_bytes)} and {largest.cpu_millis / 1000:g}: lower spec.cpu.size to at "
        f"most {quantity.show_bytes(_most_cpu_bytes(look.sizing, largest.memory_bytes))}, or spec.engine.memory or "
        "spec.engine.cpu, or add a larger node",
    )


def _sum(sizing: Sizing) -> str:
    """Write the terms of the memory of a pod."""
    each = "" if sizing.engines_per_pod == 1 else f"{sizing.engines_per_pod} x "
    return (
        f"engine {quantity.show_bytes(sizing.engine_memory_bytes)} + CPU tier {each}"
        f"{quantity.show_bytes(sizing.cpu_bytes)} + shared memory of vLLM "
        f"{quantity.show_bytes(sizing.shm_overhead_bytes)}"
    )


def _most_cpu_bytes(sizing: Sizing, memory_bytes: int) -> int:
    """Return the largest CPU tier of one engine that a node with so much memory can hold."""
    return max(0, memory_bytes - sizing.engine_memory_bytes - sizing.shm_overhead_bytes) // sizing.engines_per_pod


def engines_fit(look: Look) -> Problem | None:
    """The scheduler found room for every engine it was asked about."""
    waiting = [pod for pod in _alive(look.snapshot) if pod.is_scheduled is False]
    short = next((pod for pod in waiting if "Insufficient" in pod.scheduling_message), None)
    if short is None:
        return None
    device = look.spec.engine.accelerator.resource
    if f"Insufficient {device}" in short.scheduling_message:
        return Problem(
            reason=Reason.DEVICE_MISSING,
            message=f"pod {short.name} needs {look.spec.engine.accelerator.per_pod} {device} on one node: "
            f"{short.scheduling_message}; add such a node, check that its device plugin runs, or lower "
            "spec.engine.accelerator.perPod or spec.replicas",
        )
    memory, engine = quantity.format_bytes(look.sizing.memory_bytes), look.spec.engine
    return Problem(
        reason=Reason.DOES_NOT_FIT,
        message=f"pod {short.name} needs {memory} of memory, {engine.cpu} CPUs and {engine.accelerator.per_pod} "
        f"{engine.accelerator.resource}: {short.scheduling_message}; lower "
        "spec.cpu.size, spec.engine.memory or spec.replicas, or add a node",
    )


def engines_were_scheduled(look: Look) -> Problem | None:
    """At least one engine tells whether the sizes fit."""
    if any(pod.is_scheduled for pod in _alive(look.snapshot)):
        return None
    return Problem(reason=Reason.NO_ENGINES, message="no engine has been scheduled yet", is_known=False)


def pods_can_be_created(look: Look) -> Problem | None:
    """Neither a quota nor admission stands in the way of the pods."""
    if not look.snapshot.engines.problem:
        return None
    if "RuntimeClass" in look.snapshot.engines.problem:
        return Problem(
            reason=Reason.RUNTIME_CLASS_MISSING,
            message=f"engine pods cannot be created: {look.snapshot.engines.problem}; correct "
            "spec.engine.podTemplate.runtimeClassName, or create that RuntimeClass",
        )
    return Problem(
        reason=Reason.PODS_REFUSED,
        message=f"engine pods cannot be created: {look.snapshot.engines.problem}; raise the quota, or change what was "
        "refused in spec.engine.podTemplate",
    )


def _of_containers(check: Callable[[Look, Pod, Container], Problem | None]) -> Check:
    """Ask of each container of the engine pods that do not serve: what a pod got over is no problem any more."""

    @functools.wraps(check)
    def first_problem(look: Look) -> Problem | None:
        unready = (
            (pod, container) for pod in _alive(look.snapshot) if not pod.is_ready for container in pod.containers
        )
        return next(filter(None, (check(look, pod, container) for pod, container in unready)), None)

    return first_problem


@_of_containers
def images_are_pulled(_look: Look, pod: Pod, container: Container) -> Problem | None:
    """Every image of every engine pod is there."""
    if container.waiting_reason not in {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"}:
        return None
    return Problem(
        reason=Reason.IMAGE_PULL_FAILED,
        message=f"pod {pod.name} cannot pull {container.image} ({container.waiting_reason}"
        f"{quoted(container.waiting_message)}): correct spec.engine.image, or give a pull secret in "
        "spec.engine.podTemplate.imagePullSecrets",
    )


@_of_containers
def references_resolve(_look: Look, pod: Pod, container: Container) -> Problem | None:
    """What containers take from Secrets and ConfigMaps exists."""
    if container.waiting_reason not in {"CreateContainerConfigError", "CreateContainerError"}:
        return None
    return Problem(
        reason=Reason.CONFIG_MISSING,
        message=f"container {container.name} of pod {pod.name} cannot be created"
        f"{quoted(container.waiting_message)}: create the object it names, or correct "
        "spec.model.tokenSecretRef or spec.engine.env",
    )


@_of_containers
def connector_is_installed(_look: Look, pod: Pod, container: Container) -> Problem | None:
    """The init container did its work."""
    if container.name != names.INSTALL_CONTAINER or not container.exit_code:
        return None
    return Problem(
        reason=Reason.INSTALL_FAILED,
        message=f"the connector could not be installed in pod {pod.name} (exit code {container.exit_code}): "
        f"`kubectl logs {pod.name} -c {container.name}` says why",
    )


@_of_containers
def engines_have_memory(look: Look, pod: Pod, container: Container) -> Problem | None:
    """No engine was killed for its memory."""
    if container.exit_reason != "OOMKilled":
        return None
    limit = quantity.format_bytes(look.sizing.memory_bytes)
    return Problem(
        reason=Reason.OUT_OF_MEMORY,
        message=f"container {container.name} of pod {pod.name} was killed at {limit} of memory "
        f"(spec.engine.memory {look.spec.engine.memory} and the shared memory of the CPU tier): raise "
        "spec.engine.memory, or lower spec.cpu.size",
    )


@_of_containers
def engines_stay_up(_look: Look, pod: Pod, container: Container) -> Problem | None:
    """No engine ended by itself."""
    has_ended = container.waiting_reason == "CrashLoopBackOff" or container.restarts > 0 or bool(container.exit_code)
    return _crash(pod, container) if has_ended and container.name == names.ENGINE_CONTAINER else None


def _crash(pod: Pod, container: Container) -> Problem:
    cause = crashes.explain(container.exit_message, container.exit_code)
    ended = f"the engine of pod {pod.name} ended with exit code {container.exit_code}"
    log = f"`kubectl logs {pod.name} -c {container.name} --previous`"
    if cause is None:
        return Problem(
            reason=Reason.ENGINE_CRASHED,
            message=f"{ended} and was restarted {container.restarts} times: {log} says why",
        )
    quote = f' ("{cause.quote}")' if cause.quote else ""
    return Problem(reason=cause.reason, message=f"{ended}{quote}: {cause.remedy}; {log} says more")


def volumes_are_mounted(look: Look) -> Problem | None:
    """No pod waits for its node to mount what it needs."""
    for pod in _alive(look.snapshot):
        if pod.mount_problem and not pod.is_ready:
            reason, remedy = crashes.explain_mount(pod.mount_problem)
            return Problem(reason=reason, message=f"pod {pod.name} cannot start: {pod.mount_problem}; {remedy}")
    return None


def engines_are_scheduled(look: Look) -> Problem | None:
    """No engine waits for a node."""
    for pod in _alive(look.snapshot):
        if pod.is_scheduled is False:
            return Problem(
                reason=Reason.NOT_SCHEDULED,
                message=f"no node takes pod {pod.name}{quoted(pod.scheduling_message)}: change "
                "spec.engine.podTemplate (nodeSelector, tolerations, affinity) or add a node",
            )
    return None


def rollout_progresses(look: Look) -> Problem | None:
    """The Deployment has not given up."""
    if not look.snapshot.engines.is_stalled:
        return None
    return Problem(
        reason=Reason.ROLLOUT_STALLED,
        message=f"new engines did not become ready in time: `kubectl logs "
        f"deployment/{names.engine(look.snapshot.tier)}` and `kubectl describe pods` say why",
    )


def engines_are_ready(look: Look) -> Problem | None:
    """As many engines of this very spec serve as were asked for, and no others are left."""
    engines, wanted = look.snapshot.engines, look.spec.replicas
    is_current = engines.generation > 0 and engines.observed_generation >= engines.generation
    if is_current and engines.ready == engines.updated == engines.replicas == wanted:
        return None
    return Problem(
        reason=Reason.ENGINES_STARTING,
        message=f"{engines.ready} of {wanted} engines are ready, {engines.updated} run the latest spec",
    )


def seeds_agree(look: Look) -> Problem | None:
    """Every engine that runs hashes blocks the same way."""
    alive = _alive(look.snapshot)
    wanted = (look.spec.hash.seed, look.spec.hash.algorithm)
    strays = [pod for pod in alive if (pod.hash_seed, pod.hash_algorithm) != wanted]
    if strays:
        found = listed([f"{pod.name} ({pod.hash_seed}, {pod.hash_algorithm})" for pod in strays])
        return Problem(
            reason=Reason.SEEDS_DIFFER,
            message=f"not hashing with seed {look.spec.hash.seed!r} and {look.spec.hash.algorithm}: {found}; no "
            "block of theirs is found by the others, or the other way round; they are replaced as the rollout goes on; "
            "if they stay, something else sets PYTHONHASHSEED in these pods",
        )
    if not alive:
        return Problem(reason=Reason.NO_ENGINES, message="no engine runs", is_known=False)
    return None


VOLUME: Final[tuple[Check, ...]] = (claim_exists, claim_is_bound, claim_has_its_size)
SIZING: Final[tuple[Check, ...]] = (
    engines_are_wanted,
    a_node_is_large_enough,
    engines_fit,
    engines_were_scheduled,
)
SEEDS: Final[tuple[Check, ...]] = (seeds_agree,)
ENGINES: Final[tuple[Check, ...]] = (
    pods_can_be_created,
    images_are_pulled,
    references_resolve,
    volumes_are_mounted,
    connector_is_installed,
    engines_have_memory,
    engines_stay_up,
    engines_are_scheduled,
    rollout_progresses,
    engines_are_ready,
)

SUMMARY: Final[tuple[tuple[str, tuple[Check, ...], Reason, str], ...]] = (
    ("VolumeBound", VOLUME, Reason.BOUND, "the claim is bound"),
    ("SizingFits", SIZING, Reason.FITS, "engines found nodes with room"),
    ("EnginesReady", ENGINES, Reason.ENGINES_READY, "all engines are ready"),
    ("HashSeedConsistent", SEEDS, Reason.SEEDS_AGREE, "all engines hash alike"),
    (disk.WITHIN_BUDGET, disk.BUDGET, Reason.WITHIN_BUDGET, "the blocks take no more than they may"),
    (disk.HEALTHY, disk.HEALTH, Reason.HEALTHY, "engines and janitor work on the volume"),
)
"""Conditions in the order in which Ready reports their problems."""
