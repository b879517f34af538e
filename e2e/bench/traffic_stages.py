# SPDX-License-Identifier: Apache-2.0
"""The stages of the traffic benchmark, each an engine's memory and what it serves, and what is the same for all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvtier_cli.bench.workloads import Cell, Sizes

PREPARE = "prepare"
"""Puts on the volume what the cells after a restart ask for."""


@dataclass(frozen=True, slots=True)
class Stage:
    """An engine's memory, and what it serves."""

    gpu_tokens: int
    """What the GPU's prefix cache holds; 0 for all that there is room for."""
    cpu_bytes: int
    cells: tuple[str, ...]
    keeps_volume: bool = False
    """Finds what the stage before left."""


STAGES = {
    "traffic": Stage(131072, 16_000_000_000, (Cell.CONVERSATIONS, Cell.SHORT, PREPARE)),
    "restart": Stage(0, 24_000_000_000, (Cell.ARRIVALS, Cell.SHARED, Cell.SINGLE, Cell.USERS), keeps_volume=True),
    "fits": Stage(98304, 40_000_000_000, (Cell.FITTING,)),
    "all-in-gpu": Stage(0, 0, (Cell.CONVERSATIONS, Cell.SHORT)),
}
TINY_STAGES = {
    "traffic": Stage(2304, 32 << 20, STAGES["traffic"].cells),
    "restart": Stage(0, 64 << 20, STAGES["restart"].cells, keeps_volume=True),
    "fits": Stage(2304, 256 << 20, STAGES["fits"].cells),
    "all-in-gpu": Stage(0, 0, STAGES["all-in-gpu"].cells),
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is the same for every stage."""

    work: Path
    volume: Path
    repository: Path
    lifeboat: Path | None
    sizes: Sizes
    stages: Mapping[str, Stage]
    engine: Mapping[str, Any]
    is_cpu_build: bool
    block_tokens: int
    block_bytes: int
    vocabulary: int
    kvtier: Mapping[str, Any] = field(default_factory=dict)
    variant: str = ""
    """What is special about this run, for the report."""
    rounds: int = 1
    """How often conversations and short prompts are played, each time others."""
    profiled: Sequence[str] = ()
    """Cells around whose calls clocks are put."""
    traced: Sequence[str] = ()
    """Cells of which it is recorded when each call began and ended."""
    sampler: str = ""
    """Command of a sampling profiler, with `{pid}` and `{out}`."""
    deadline: float = 0.0
    """On the monotonic clock; 0 for none."""
