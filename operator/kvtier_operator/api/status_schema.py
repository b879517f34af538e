# SPDX-License-Identifier: Apache-2.0
"""``status`` of a KVCacheTier: the operator's report about a tier. Pure."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AwareDatetime, ConfigDict, Field, StrictBool, StrictStr

from kvtier_operator.api.rules import Amount, ApiModel, Count, Keyed, Pasted


class Condition(ApiModel):
    """One thing that is true, false or unknown about the tier, with the reason and the remedy."""

    type: Annotated[StrictStr, Field(max_length=316)]
    """Name of the condition, such as `Ready`."""
    status: Literal["True", "False", "Unknown"]
    """The verdict."""
    reason: Annotated[
        StrictStr, Field(min_length=1, max_length=1024, pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$")
    ]
    """Why, as one word for programs."""
    message: Annotated[StrictStr, Field(max_length=32768)]
    """Why, as a sentence for people, and what to do about it."""
    last_transition_time: AwareDatetime
    """When `status` last changed."""
    observed_generation: Amount | None = None
    """`metadata.generation` that was judged."""


class PodSizing(ApiModel):
    """Sizes of one engine pod; each term is kept, so that the sums can be checked by hand."""

    model_config = ConfigDict(validate_by_name=True)

    cpu_bytes: Amount
    """Bytes of the CPU tier of one engine: `spec.cpu.size`, or `spec.cpu.fraction` of `nodeBytes` divided by
    `enginesPerPod`, rounded down to 256 MiB. They are pinned at startup."""
    engines_per_pod: Count
    """Engine cores in one pod (data parallelism); each has a CPU tier of its own."""
    shm_overhead_bytes: Amount
    """Bytes of shared memory beside the CPU tier: NCCL and message queues, 1 GiB per engine core."""
    shm_bytes: Amount
    """Bytes of the pod's `/dev/shm`: CPU tiers and overhead."""
    engine_memory_bytes: Amount
    """Bytes of host memory beside shared memory: `spec.engine.memory`."""
    io_worker_bytes: Amount
    """Bytes of the processes that move blocks, and of the page tables of all that map the CPU tier."""
    memory_bytes: Amount
    """Bytes of memory that the engine container requests and is limited to: engine memory, shared memory, which is
    charged to the pod, and `ioWorkerBytes`."""
    weight_bytes: Amount
    """Bytes of the weights: of the table of known models, or else as many as `spec.engine.memory` holds."""
    ephemeral_bytes: Amount
    """Bytes of the node's disk that the engine container requests, unless `spec.engine.ephemeralStorage` is set: 2 GiB
    of caches, and the weights where they are downloaded without a volume for them."""
    startup_base_seconds: Amount
    """Seconds allowed for imports, compilation and warm-up."""
    startup_pin_seconds: Amount
    """Seconds allowed for pinning the CPU tiers, at 2 GiB a second."""
    startup_load_seconds: Amount
    """Seconds allowed for loading the weights, at 0.5 GiB a second."""
    startup_seconds: Amount
    """Seconds that an engine may take to start before it is restarted: the sum of the three."""


class Capacity(ApiModel):
    """Bytes and tokens of the tiers of one engine; None where it cannot be told, and `notes` then say why."""

    model_config = ConfigDict(validate_by_name=True)

    kv_bytes_per_token: Amount | None = None
    """Bytes that a tier needs for one token of a prompt, over all layers and ranks. Left out where it is unknown."""
    kv_formula: Annotated[StrictStr, Field(max_length=1024)] | None = None
    """How they come about."""
    kv_groups: Count | None = None
    """Chunks that hold the same tokens: one for each group of layers of a kind."""
    chunk_tokens: Count | None = None
    """Tokens of one file on the volume, if a block of the engine has as many tokens as is usual."""
    chunk_bytes: Amount | None = None
    """Bytes of one file, less its header of 4 KiB."""
    cpu_tokens: Amount | None = None
    """Tokens that the CPU tier of one engine holds."""
    disk_bytes: Amount | None = None
    """Bytes that all files may take: `spec.disk.budget.maxBytes`, or the size of the claim."""
    disk_tokens: Amount | None = None
    """Tokens that the volume holds."""
    device_kv_bytes: Amount | None = None
    """Estimated bytes of the accelerators' own KV cache of one engine: 92 % of their memory (or
    `--gpu-memory-utilization`), less 2 GiB each and less the weights."""
    device_kv_tokens: Amount | None = None
    """Tokens that they hold, roughly."""
    device_formula: Annotated[StrictStr, Field(max_length=1024)] | None = None
    """How the estimate comes about."""
    notes: Annotated[tuple[Annotated[StrictStr, Field(max_length=1024)], ...], Field(max_length=8)] = ()
    """Sizes that are unknown, with the field that tells them, and sizes that make no sense together."""


class SizingStatus(Capacity, PodSizing):
    """Every term of the sizes of one engine pod, so that each sum can be checked by hand."""

    model_config = ConfigDict(json_schema_extra=lambda schema: schema.pop("required"))

    cpu_size: Annotated[StrictStr, Field(max_length=32)] | None = None
    """`cpuBytes` as a quantity, for people."""
    node_bytes: Amount | None = None
    """Bytes of memory that the smallest matching node had left when `spec.cpu.fraction` of it was decided."""


class GenerationStatus(ApiModel):
    """The set of blocks that engines of this spec can read."""

    current: Annotated[StrictStr, Field(max_length=64)] | None = None
    """Digest of everything that decides whether a block may be read: model, revision, image, layout, hash."""
    root: Annotated[StrictStr, Field(max_length=1024)] | None = None
    """Directory of its blocks, as the pods see it; left out where `spec.connector` keeps none on the volume."""


class Storage(ApiModel):
    """Facts about the volume: from trying it while it was new, and from engines that use it."""

    key: Annotated[StrictStr, Field(max_length=64)] | None = None
    """The claim, and the user of the pods, that was tried; another one is tried anew."""
    problem: Annotated[StrictStr, Field(max_length=4096)] | None = None
    """Why the volume cannot be used; absent if it can."""
    direct_io: StrictBool | None = None
    """Whether the page cache can be bypassed (O_DIRECT)."""
    total_bytes: Amount | None = None
    """Bytes that the volume holds, as it says itself."""
    free_bytes: Amount | None = None
    """Bytes that were free then."""
    write_bytes_per_second: Amount | None = None
    """Bytes a second that four threads wrote."""
    read_bytes_per_second: Amount | None = None
    """Bytes a second that four threads read."""
    stat_microseconds: Amount | None = None
    """Microseconds to look a file up."""
    file_system: Annotated[StrictStr, Field(max_length=256)] | None = None
    """File system of the volume, as the kernel calls it."""
    round_trip_microseconds: Amount | None = None
    """Microseconds until the volume said that it does not have a file."""
    chosen: Annotated[StrictStr, Field(max_length=1024)] | None = None
    """Ways in which engines use this volume, and why."""
    advice: Annotated[StrictStr, Field(max_length=1024)] | None = None
    """Advice about the mount; absent if there is none."""


class GenerationEntry(ApiModel):
    """One generation on the volume."""

    digest: Annotated[StrictStr, Field(max_length=64)]
    """Digest of its identity, and the name of its directory."""
    role: Literal["Current", "Previous", "Release", "Unshared"] | None = None
    """Engines use the `Current` one, or that of their `Release` of vLLM. Those that are `Previous` stay for a rollback,
    see `spec.generations`. Those that are `Unshared` hold blocks of one engine whose weights cannot be told, and go an
    hour after its last use."""
    used_bytes: Amount | None = None
    """Bytes that its blocks take, to about a percent."""
    blocks: Amount | None = None
    """Blocks in it, to about a percent."""
    created: AwareDatetime | None = None
    """When the first engine of it started."""
    last_used: AwareDatetime | None = None
    """When a block of it was last stored or read, to the hour."""


class TierUsage(ApiModel):
    """Capacity and use of one tier."""

    name: Annotated[StrictStr, Field(max_length=16)]
    """`cpu` is the host memory of one engine, `disk` the volume."""
    capacity_bytes: Amount | None = None
    """Bytes that it can hold: `spec.cpu.size`; `spec.disk.budget.maxBytes`, or else the size of the volume."""
    used_bytes: Amount | None = None
    """Bytes that blocks of all generations take, to about a percent, as the janitor counted them."""
    blocks: Amount | None = None
    """Blocks in it, to about a percent."""
    used: Annotated[StrictStr, Field(max_length=16)] | None = None
    """`usedBytes` as a share of `capacityBytes`, for people."""


class ProofStatus(ApiModel):
    """Results of asking the engines, beside the conditions."""

    rollout: Annotated[StrictStr, Field(max_length=64)] | None = None
    """Engines that `SharedCacheVerified` is about; others have to be proven anew."""


class RoutingStatus(ApiModel):
    """How requests come to the engines."""

    service: Annotated[StrictStr, Field(max_length=512)] | None = None
    """Where clients in the cluster send them: `name.namespace.svc:port`."""
    inference_pool: Annotated[StrictStr, Field(max_length=253)] | None = None
    """The `InferencePool` that was made."""


class TierStatus(ApiModel):
    """State of the tier, as the operator sees it."""

    observed_generation: Amount | None = None
    """`metadata.generation` that this status describes."""
    replicas: Count | None = None
    """Engine pods that exist."""
    ready_replicas: Count | None = None
    """Engine pods that serve."""
    selector: Annotated[StrictStr, Field(max_length=1024)] | None = None
    """Label selector of the engine pods, for HPA and `kubectl get pods -l`."""
    conditions: Annotated[
        tuple[Annotated[dict[str, object], Pasted(Condition)], ...], Field(max_length=32), Keyed("type")
    ] = ()
    """Conditions of the tier. `Ready` is the summary."""
    sizing: SizingStatus | None = None
    """The sizes of one engine pod, term by term."""
    proof: ProofStatus | None = None
    """Results of asking the engines."""
    storage: Storage | None = None
    """Facts about the volume."""
    routing: RoutingStatus | None = None
    """How requests come to the engines."""
    generation: GenerationStatus | None = None
    """The set of blocks that engines of this spec can read."""
    generations: Annotated[
        tuple[Annotated[dict[str, object], Pasted(GenerationEntry)], ...], Field(max_length=64), Keyed("digest")
    ] = ()
    """The generations on the volume, the current one first, the others as they were last used. Left out where no
    janitor counts them."""
    tiers: Annotated[
        tuple[Annotated[dict[str, object], Pasted(TierUsage)], ...], Field(max_length=8), Keyed("name")
    ] = ()
    """Capacity and use of each tier."""
    idle_digest: Annotated[StrictStr, Field(max_length=64)] | None = None
    """Digest of the tier, its objects and the operator, of a time when nothing was left to do. An operator that starts
    and finds the same reconciles other tiers first."""
