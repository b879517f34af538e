# SPDX-License-Identifier: Apache-2.0
"""One frozen look at the cluster: what a tier's decisions and its status are made from.

Data only, and pure: reading is another module's work, so every decision can be tested without a cluster.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

from kvtier_connector.contract.usage import Usage as VolumeUsage
from kvtier_operator.errors import ClusterError
from kvtier_operator.names import Manifest, ObjectKey, TierRef


@dataclass(frozen=True, kw_only=True)
class Live:
    """One object of ours as it stands: which incarnation, and in which version."""

    uid: str
    resource_version: str
    content: Manifest = field(default_factory=dict, repr=False)
    """The object as it was read."""


@dataclass(frozen=True, kw_only=True)
class LiveClaim:
    """The PersistentVolumeClaim that holds the blocks: the operator's own, or the user's."""

    name: str
    access_modes: tuple[str, ...]
    storage_class_name: str | None
    requested_bytes: int
    phase: str
    is_terminating: bool = False
    uid: str = ""
    capacity_bytes: int = 0
    """Capacity of the volume; 0 while none is bound."""
    resizing: str = ""
    """How far an expansion is, in the words of the claim's own condition; empty while none is under way."""


@dataclass(frozen=True, kw_only=True)
class Neighbour:
    """Another tier on the same claim."""

    name: str
    max_bytes: int | None
    """Limit of its blocks; None where there is none."""
    has_janitor: bool = True
    """Whether its janitor permits engines to store; True where its spec cannot be read."""


@dataclass(frozen=True, kw_only=True)
class Engines:
    """The Deployment as last seen; zeros where it does not exist yet."""

    generation: int = 0
    observed_generation: int = 0
    replicas: int = 0
    updated: int = 0
    ready: int = 0
    is_stalled: bool = False
    """The Deployment gave up waiting for progress (ProgressDeadlineExceeded)."""
    decisions: str = ""
    """Earlier decisions for this tier, as the Deployment carries them."""
    problem: str = ""
    """Why pods cannot even be created (quota, admission), in the API server's words."""
    rendered: str = ""
    """The operator's note on the Deployment: the spec and the template that its pods were made from."""


@dataclass(frozen=True, kw_only=True)
class EngineReport:
    """The report of an engine about its disk tier."""

    refused: tuple[str, ...] = ()
    """Fields of the cache identity that differ from those of the directory; empty where none does."""
    is_key_missing: bool = False
    """Blocks are to be encrypted, and the active key is not there or is none."""
    release: int = 0
    """Value of ``vllm:kvtier_disk_release``: compared, refused, or 0 where the engine uses the blocks."""
    is_detached: bool = False
    """It serves without the volume, which it was not refused by and is not told to leave alone."""
    unsupported: str = ""
    """Why the connector takes no part in this vLLM, with a remedy; empty where it does."""
    token_bytes: int = 0
    """Bytes of KV of one token, over all ranks and groups; 0 where it did not say, as below."""
    chunk_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class ContainerStatus:
    """The status of one container, as the kubelet last wrote it."""

    name: str
    image: str
    restarts: int = 0
    is_started: bool = True
    """Whether its startup probe has succeeded since it last started; True where the kubelet does not say."""
    waiting_reason: str = ""
    waiting_message: str = ""
    exit_code: int | None = None
    """Of the last run that ended; None when none did."""
    exit_reason: str = ""
    exit_message: str = ""
    """Its last words: the end of its log, if it ended with a failure."""


@dataclass(frozen=True, kw_only=True)
class Pod:
    """One engine pod."""

    name: str
    phase: str
    is_ready: bool
    is_terminating: bool
    is_scheduled: bool | None
    """None when the scheduler has not spoken yet."""
    scheduling_message: str
    config_digest: str
    hash_seed: str | None
    hash_algorithm: str | None
    containers: tuple[ContainerStatus, ...]
    uid: str = ""
    address: str = ""
    """IP address; empty until the pod has one."""
    ready_since: str = ""
    """When it last became ready, or ceased to be."""
    template_hash: str = ""
    """Tells the pods of one rollout from those of another."""
    is_held_up: bool = False
    """Whether no container of it has been started yet on its node."""
    mount_problem: str = ""
    """Why the kubelet cannot bring the volumes to the pod, in its own words."""
    report: EngineReport | None = None
    """The report of its engine; None while there is none."""
    is_awaited: bool = False
    """Whether it is being asked for the first time."""
    content: Manifest = field(default_factory=dict, repr=False)
    """The pod as it was read, where another owner made it."""
    claimed_by: str = ""
    """Name of another tier whose `spec.engine.external.selector` finds it, too."""


@dataclass(frozen=True, kw_only=True)
class LiveJanitor:
    """The janitor's pods, and what the active one reports."""

    pods: tuple[Pod, ...] = ()
    usage: VolumeUsage | None = None
    """Its last report; None where there is none."""
    silence: str = ""
    """Why there is none, if it was asked."""
    is_missing: bool = False
    """Whether no pod of it is ready, as its Deployment says."""
    is_overdue: bool = False
    """Whether that is so for longer than a start takes."""
    is_awaited: bool = False
    """Whether it is being asked for the first time."""


@dataclass(frozen=True, kw_only=True)
class SeenJob:
    """The Job that tries a claim, and its pods, as last seen."""

    key: str = ""
    """Of what it is for; empty where there is no Job."""
    uid: str = ""
    is_foreign: bool = False
    """Something else stands under its name."""
    failure: str = ""
    """Why the Job gave up, in the words of its controller."""
    waiting: str = ""
    """The reason why its pod waits."""
    exit_code: int | None = None
    message: str = ""
    """Its pod's last words."""

    @property
    def result(self) -> Mapping[str, Any]:
        """The document that its last words are; empty where they are none."""
        return last_words(self.message)


def last_words(message: str) -> Mapping[str, Any]:
    """Return the document on the last line that a container wrote when it ended; empty where there is none."""
    try:
        found = json.loads(message.strip().splitlines()[-1]) if message.strip() else {}
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


@dataclass(frozen=True, kw_only=True)
class Node:
    """One node, as far as it decides whether an engine fits."""

    name: str
    labels: Mapping[str, str]
    taints: tuple[Mapping[str, str], ...]
    is_open: bool
    """Whether it is ready and takes new pods."""
    memory_bytes: int
    cpu_millis: int
    devices: Mapping[str, int]
    """Everything countable that it offers: devices by the name of their resource."""


@dataclass(frozen=True)
class NodeGroup:
    """The nodes that take pods of one placement."""

    nodes: tuple[Node, ...]

    @cached_property
    def device_bytes(self) -> int | None:
        """The least memory of one device, of all nodes that say it by their label; None where none does."""
        labels = (node.labels.get(DEVICE_MEMORY_LABEL, "") for node in self.nodes)
        sizes = (int(label) << 20 for label in labels if label.isascii() and label.isdecimal() and len(label) < _LONG)
        return min(sizes, default=None)


DEVICE_MEMORY_LABEL: Final = "nvidia.com/gpu.memory"
"""MiB of one device, as NVIDIA's feature discovery writes it."""

_LONG: Final = 12


@dataclass(frozen=True, kw_only=True)
class PodUsage:
    """The requests of one pod on its node."""

    node: str
    namespace: str
    tier: str
    """Name of the tier whose engine it is; empty for everybody else's pods."""
    memory_bytes: int
    devices: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """The nodes of the cluster, and what runs on them."""

    nodes: tuple[Node, ...]
    usage: tuple[PodUsage, ...] | None = None
    """None where the pods were not read."""
    matches: dict[str, NodeGroup] = field(default_factory=dict, compare=False, repr=False)
    """Those that take pods of some placement, once found: thousands of tiers ask the same of thousands of nodes."""


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """Everything read for one reconcile of one tier."""

    tier: TierRef
    claim: LiveClaim | None = None
    engines: Engines = Engines()
    pods: tuple[Pod, ...] = ()
    live: Mapping[ObjectKey, Live] = field(default_factory=dict)
    """Objects of ours."""
    janitor: LiveJanitor = LiveJanitor()
    routers: tuple[Pod, ...] = ()
    """The pods of the router."""
    stores: tuple[Pod, ...] = ()
    """The pods of Redis and of Mooncake's master."""
    preflight: SeenJob = SeenJob()
    neighbours: tuple[Neighbour, ...] = ()
    """The other tiers on its claim, by name."""
    nodes: Nodes | None = None
    """None where the operator may not read nodes."""
    unreadable: Mapping[str, ClusterError] = field(default_factory=dict)
    """Why objects of a kind could not be read, by their kind."""
    foreign: frozenset[ObjectKey] = frozenset()
    """Objects that stand under a name we need and are not ours: never overwritten."""
