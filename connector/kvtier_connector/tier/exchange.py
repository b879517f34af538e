# SPDX-License-Identifier: Apache-2.0
"""What the two sides of the connector tell each other with a step, beside what vLLM's own sides do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from typing_extensions import override
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)

from kvtier_connector.fingerprints.adapters import Orders, Told
from kvtier_connector.fingerprints.packing import Declared


@dataclass
class KVTierMetadata(OffloadingConnectorMetadata):
    """What a step tells the workers; each of ``load_jobs`` is a piece of a load."""

    ended_loads: dict[str, list[int]] = field(default_factory=dict)
    """Requests whose last piece was handed over, with their GPU blocks that stay unwritten."""
    question: int = 0
    """If it is not 0, the workers are to tell which weights they have, and say to which question."""
    adapters: Orders | None = None
    is_declaring: bool = False
    """Whether the workers are to declare themselves: nobody has passed on what they did before the first step."""


@dataclass
class KVTierWorkerMetadata(OffloadingWorkerMetadata):
    """vLLM's, with the digests of the weights that were asked for, and of adapters."""

    weights: dict[int, tuple[int, str | None]] = field(default_factory=dict)
    """By rank, the number of the question and the answer."""
    adapters: dict[int, list[Told]] = field(default_factory=dict)
    """By rank, what is told of adapters."""
    declared: dict[int, Declared] = field(default_factory=dict)
    """By rank, where it was asked for."""

    @override
    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVTierWorkerMetadata:
        assert isinstance(other, KVTierWorkerMetadata)
        merged = OffloadingWorkerMetadata.aggregate(self, other)
        assert isinstance(merged, OffloadingWorkerMetadata)
        return KVTierWorkerMetadata(
            merged.completed_jobs,
            merged.transfer_stats,
            {**self.weights, **other.weights},
            {**self.adapters, **other.adapters},
            {**self.declared, **other.declared},
        )


class Declarations:
    """Takes what the workers declare before the first step, or asks them with the steps. The scheduler's thread only.

    MultiConnector passes on what the first of its children declares, which may be another connector.
    """

    def __init__(self, workers: int, use: Callable[..., None]) -> None:
        """Start with none.

        Args:
            workers: how many there are.
            use: gets what all of them declare, in the order of their ranks, once, and, where requests wait already, for
                how many seconds it may wait for the volume.
        """
        self._workers = workers
        self._use = use
        self._found: dict[int, Declared] = {}
        self.is_asking = False

    def begin(self, declared: Sequence[Declared]) -> None:
        """Take what came through before the first step, in the order of the ranks."""
        if len(declared) == self._workers:
            self._use(declared)
        else:
            self.is_asking = True

    def take(self, told: Mapping[int, Declared]) -> None:
        """Take the answers that came with a step, by rank."""
        if not self.is_asking:
            return
        self._found.update(told)
        if len(self._found) == self._workers:
            self.is_asking = False
            # Requests wait for this step.
            self._use([self._found[rank] for rank in sorted(self._found)], 0.0)
