# SPDX-License-Identifier: Apache-2.0
"""Every size the pod needs, derived from the CPU tier and the engine's own memory.

Pure. CPU tier, shared memory, container memory and startup budget, which people otherwise keep equal by hand, come from
one number. Each term is kept so that status can show the sum.
"""

from __future__ import annotations

import math
from typing import Final

from kvtier_connector.contract.engine import COMPRESSION_OFF, MOST_DEFAULT_IO_PROCESSES, worker_memory_bytes
from kvtier_operator import names
from kvtier_operator.api import TierSpec
from kvtier_operator.api.status_schema import PodSizing
from kvtier_operator.plan import engine_args
from kvtier_operator.plan.decisions import Decisions

GIB: Final = 1 << 30

SHM_OVERHEAD_BYTES: Final = GIB
"""NCCL's and the message queues' share of /dev/shm, per engine."""

STARTUP_BASE_SECONDS: Final = 300
"""Imports, weight loading from a warm page cache, kernel compilation and warm-up of a small model."""

PIN_BYTES_PER_SECOND: Final = 2 * GIB
"""How fast the kernel pins host memory, at least."""

LOAD_BYTES_PER_SECOND: Final = GIB // 2
"""How fast weights come from storage, at least."""


MOST_CHUNK_BYTES: Final = 16 << 20
"""A chunk is chosen to be no longer, where it can be chosen."""

STEP_BYTES: Final = 256 << 20

MAPPED_PER_BYTE: Final = 512
"""A process that maps memory keeps eight bytes for each page of 4 KiB."""

SCRATCH_BYTES: Final = 2 * GIB
"""Compiled kernels, caches and logs on the node's disk."""


def make_sizing(spec: TierSpec, decisions: Decisions) -> PodSizing:
    """Return the sizes of one engine pod."""
    connector, memory = spec.connector, spec.engine.memory_bytes
    engines = engine_args.read(spec.engine.args).engines_per_pod
    # A file in its place is no memory.
    cpu_bytes = 0 if connector.is_on_node_disk else decisions.cpu_bytes
    # Weights pass through the engine's memory, so it bounds them where the model is unknown.
    weight_bytes = memory if decisions.weight_bytes is None else decisions.weight_bytes
    overhead, pinned = engines * SHM_OVERHEAD_BYTES, engines * cpu_bytes
    passing = make_io_worker_bytes(spec, cpu_bytes)
    pin_seconds = math.ceil(pinned / PIN_BYTES_PER_SECOND)
    load_seconds = math.ceil(weight_bytes / LOAD_BYTES_PER_SECOND)
    return PodSizing(
        cpu_bytes=cpu_bytes,
        engines_per_pod=engines,
        shm_overhead_bytes=overhead,
        shm_bytes=(pinned if connector.kind.is_in_shm else 0) + overhead,
        engine_memory_bytes=memory,
        io_worker_bytes=passing,
        # tmpfs pages are charged to the pod that wrote them, so the limit has to hold both.
        memory_bytes=memory + pinned + overhead + passing,
        weight_bytes=weight_bytes,
        # In whole GiB, as an estimate is written.
        ephemeral_bytes=SCRATCH_BYTES
        + engines * connector.file_bytes(decisions.cpu_bytes)
        + (math.ceil(weight_bytes / GIB) * GIB if _keeps_weights(spec) else 0),
        startup_base_seconds=STARTUP_BASE_SECONDS,
        startup_pin_seconds=pin_seconds,
        startup_load_seconds=load_seconds,
        startup_seconds=STARTUP_BASE_SECONDS + pin_seconds + load_seconds,
    )


def _keeps_weights(spec: TierSpec) -> bool:
    """Tell whether weights are downloaded to the node's disk, and not to a volume of the user's."""
    mounts = (f"{mount['mountPath'].rstrip('/')}/" for mount in spec.engine.pod_template.volume_mounts)
    return not spec.model.name.startswith("/") and not any(
        mount.startswith(f"{names.MODEL_CACHE}/") for mount in mounts
    )


def make_io_worker_bytes(spec: TierSpec, cpu_bytes: int) -> int:
    """Return what moving blocks takes in one pod beside CPU tiers of so many bytes.

    Each worker and the scheduler map the whole CPU tier, those that move blocks a part of it, and have a buffer.
    """
    engines = engine_args.read(spec.engine.args).engines_per_pod
    if spec.connector.passing_bytes is not None:
        return engines * spec.connector.passing_bytes
    tables = (spec.engine.tensor_parallel + 1) * -(-cpu_bytes // MAPPED_PER_BYTE)
    blocks = worker_memory_bytes(
        cpu_bytes,
        workers=MOST_DEFAULT_IO_PROCESSES,
        chunk_bytes=MOST_CHUNK_BYTES,
        compresses=spec.disk.compression != COMPRESSION_OFF,
    )
    # In steps that people recognise.
    return -(-engines * (blocks + tables) // STEP_BYTES) * STEP_BYTES
