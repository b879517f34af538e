# SPDX-License-Identifier: Apache-2.0
"""What the two sides of the connector tell each other with a step, beside what vLLM's own sides do."""

from __future__ import annotations

from dataclasses import dataclass, field

from typing_extensions import override
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)

from kvtier_connector.tier.adapters import Orders, Told


@dataclass
class KVTierMetadata(OffloadingConnectorMetadata):
    """What a step tells the workers; each of ``load_jobs`` is a piece of a load."""

    ended_loads: dict[str, list[int]] = field(default_factory=dict)
    """Requests whose last piece was handed over, with their GPU blocks that stay unwritten."""
    question: int = 0
    """If it is not 0, the workers are to tell which weights they have, and say to which question."""
    adapters: Orders | None = None


@dataclass
class KVTierWorkerMetadata(OffloadingWorkerMetadata):
    """vLLM's, with the digests of the weights that were asked for, and of adapters."""

    weights: dict[int, tuple[int, str | None]] = field(default_factory=dict)
    """By rank, the number of the question and the answer."""
    adapters: dict[int, list[Told]] = field(default_factory=dict)
    """By rank, what is told of adapters."""

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
        )
