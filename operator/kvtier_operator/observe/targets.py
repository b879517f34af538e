# SPDX-License-Identifier: Apache-2.0
"""Which engines to ask, and whether to send a canary now: decided by the snapshot of a reconcile. Pure."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from kvtier_operator import names
from kvtier_operator.api import TierSpec
from kvtier_operator.api.generations_spec import COMPARED
from kvtier_operator.observe.canary import TEXT_ALONE, Chunk, Subjects
from kvtier_operator.observe.engine_client import KeySource, find_key
from kvtier_operator.plan import engine_args
from kvtier_operator.plan.decisions import config_of
from kvtier_operator.snapshot import Pod, Snapshot


class NoCanary(enum.Enum):
    """Why no canary is sent."""

    OFF = enum.auto()
    """spec.proof.canary.enabled is false, or the connector is another than kvtier's and does not tell what it loads."""
    NOT_WRITTEN = enum.auto()
    """spec.disk.mode keeps engines from storing."""
    SINGLE_REPLICA = enum.auto()
    NO_ENGINES = enum.auto()
    ROLLING = enum.auto()
    """Engines are on their way, or compare blocks of another release of vLLM; afterwards."""


@dataclass(frozen=True, kw_only=True, order=True)
class EngineTarget:
    """One engine pod."""

    pod: str
    address: str
    """IP address; in brackets and with the port behind it where that is not 8000."""


@dataclass(frozen=True, kw_only=True)
class ObservationPlan:
    """The engines of a tier that may be asked now, and the canary to send."""

    rollout: str
    """Changes when engines are replaced by others, or read and write other blocks: then the proof is void."""
    targets: tuple[EngineTarget, ...]
    """Engines that serve."""
    refusal: NoCanary | None
    interval_seconds: float
    min_reuse: int
    chunk: Chunk
    subjects: Subjects = TEXT_ALONE
    key: KeySource | None = None
    """Of the engines' API."""


def make_observation_plan(spec: TierSpec, snapshot: Snapshot, *, generation: str, chunk: Chunk) -> ObservationPlan:
    """Decide what may be asked of a tier whose engines read and write a generation."""
    ready = (pod for pod in snapshot.pods if pod.is_ready and not pod.is_terminating and pod.address)
    serving = tuple(pod for pod in ready if spec.engine.external is None or is_attached(pod))
    return ObservationPlan(
        rollout=_rollout(serving, generation),
        targets=tuple(sorted(EngineTarget(pod=pod.name, address=_address(spec, pod)) for pod in serving)),
        refusal=_refusal(spec, snapshot, serving),
        interval_seconds=spec.proof.canary.interval_seconds,
        min_reuse=spec.disk.admission.min_reuse,
        chunk=chunk,
        subjects=_subjects(spec),
        key=find_key(spec),
    )


def is_attached(pod: Pod) -> bool:
    """Tell whether a pod of another owner is an engine of this tier: no other one is sent the key of the API."""
    containers = pod.content.get("spec", {}).get("containers", ())
    variables = {each["name"] for container in containers for each in container.get("env") or ()}
    return names.CONFIG_VARIABLE in variables and not pod.claimed_by


def _address(spec: TierSpec, pod: Pod) -> str:
    external = spec.engine.external
    is_usual = external is None or external.port == names.HTTP_PORT
    return pod.address if external is None or is_usual else f"[{pod.address}]:{external.port}"


def _subjects(spec: TierSpec) -> Subjects:
    config = config_of(spec) or {}
    return Subjects(
        # An adapter from the hub is written while the engine starts: its contents as read are not known.
        adapters=tuple(lora["name"] for lora in spec.model.loras if "claim" in lora["source"]),
        has_pictures="vision_config" in config and not engine_args.read(spec.engine.args).has("language-model-only"),
    )


def _rollout(serving: tuple[Pod, ...], generation: str) -> str:
    return "-".join((generation, *sorted({pod.template_hash or pod.config_digest for pod in serving})))[:63]


def _refusal(spec: TierSpec, snapshot: Snapshot, serving: tuple[Pod, ...]) -> NoCanary | None:
    if not spec.proof.canary.enabled or not spec.connector.is_ours:
        return NoCanary.OFF
    if spec.disk.mode != "ReadWrite":
        return NoCanary.NOT_WRITTEN
    replicas = spec.replicas if spec.engine.external is None else len(snapshot.pods)
    if replicas == 0:
        return NoCanary.NO_ENGINES
    if replicas == 1:
        return NoCanary.SINGLE_REPLICA
    engines = snapshot.engines
    is_rolling = engines.updated < engines.replicas or engines.observed_generation < engines.generation
    is_rolling |= any(pod.report is not None and pod.report.release == COMPARED for pod in serving)
    # Pods of several owners have templates of their own.
    one_rollout = spec.engine.external is not None or len({pod.template_hash for pod in serving}) == 1
    return NoCanary.ROLLING if is_rolling or not one_rollout or len(serving) < 2 else None  # noqa: PLR2004  a pair
