# SPDX-License-Identifier: Apache-2.0
"""Every size the pod needs, derived from the CPU tier and the engine's own memory.

Pure. CPU tier, shared memory, container memory and startup budget, which people otherwise keep equal by hand, come from
one number. Each term is kept so that status can show the sum.
"""

from __future__ import annotations

import math
from typing import Final

from kvtier_connector.contract.engine import MOST_DEFAULT_IO_PROCESSES, worker_memory_bytes
from kvtier_operator.api.status_schema import PodSizing

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


def make_sizing(  # noqa: PLR0913 - what a pod is made of, by name
    *,
    cpu_bytes: int,
    engine_memory_bytes: int,
    engines_per_pod: int = 1,
    workers_per_engine: int = 1,
    compresses: bool = False,
    weight_bytes: int = 0,
    keeps_weights: bool = False,
    is_in_shm: bool = True,
    passing_bytes: int | None = None,
    file_bytes: int = 0,
) -> PodSizing:
    """Return the sizes of one pod.

    Args:
        cpu_bytes: pinned host memory of one engine, over all its workers.
        engine_memory_bytes: what the engine needs beside shared memory: working set and weights on their way.
        engines_per_pod: engine cores in one pod (data parallelism).
        workers_per_engine: processes of one engine that each drive an accelerator.
        compresses: whether blocks may be written compressed.
        weight_bytes: size of the weights, or what it can be at most; 0 leaves the base to do.
        keeps_weights: whether they are downloaded to the node's disk.
        is_in_shm: whether the CPU tier is a file in /dev/shm; otherwise it is memory of the processes themselves.
        passing_bytes: what blocks pass through on their way to the next tier; None for kvtier's own I/O workers.
        file_bytes: what blocks take on the node's disk.
    """
    overhead = engines_per_pod * SHM_OVERHEAD_BYTES
    pinned = engines_per_pod * cpu_bytes
    shm = (pinned if is_in_shm else 0) + overhead
    passing = (
        engines_per_pod * passing_bytes
        if passing_bytes is not None
        else make_io_worker_bytes(
            cpu_bytes, engines_per_pod=engines_per_pod, workers_per_engine=workers_per_engine, compresses=compresses
        )
    )
    pin_seconds = math.ceil(pinned / PIN_BYTES_PER_SECOND)
    load_seconds = math.ceil(weight_bytes / LOAD_BYTES_PER_SECOND)
    return PodSizing(
        cpu_bytes=cpu_bytes,
        engines_per_pod=engines_per_pod,
        shm_overhead_bytes=overhead,
        shm_bytes=shm,
        engine_memory_bytes=engine_memory_bytes,
        io_worker_bytes=passing,
        # tmpfs pages are charged to the pod that wrote them, so the limit has to hold both.
        memory_bytes=engine_memory_bytes + pinned + overhead + passing,
        weight_bytes=weight_bytes,
        # In whole GiB, as an estimate is written.
        ephemeral_bytes=SCRATCH_BYTES
        + engines_per_pod * file_bytes
        + (math.ceil(weight_bytes / GIB) * GIB if keeps_weights else 0),
        startup_base_seconds=STARTUP_BASE_SECONDS,
        startup_pin_seconds=pin_seconds,
        startup_load_seconds=load_seconds,
        startup_seconds=STARTUP_BASE_SECONDS + pin_seconds + load_seconds,
    )


def make_io_worker_bytes(cpu_bytes: int, *, engines_per_pod: int, workers_per_engine: int, compresses: bool) -> int:
    """Return what moving blocks takes beside the CPU tiers themselves.

    Each worker and the scheduler map the whole CPU tier, those that move blocks a part of it, and have a buffer.
    """
    tables = (workers_per_engine + 1) * -(-cpu_bytes // MAPPED_PER_BYTE)
    blocks = worker_memory_bytes(
        cpu_bytes, workers=MOST_DEFAULT_IO_PROCESSES, chunk_bytes=MOST_CHUNK_BYTES, compresses=compresses
    )
    each = blocks + tables
    # In steps that people recognise.
    return -(-engines_per_pod * each // STEP_BYTES) * STEP_BYTES
