# SPDX-License-Identifier: Apache-2.0
"""The worker's side of the connector: copies the pieces of loads, and tells when a request has all of its own.

vLLM's own side, which takes each load job for a whole request. Called from one thread, the engine worker's.
"""

from __future__ import annotations

from typing import Any

from typing_extensions import override
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker

from kvtier_connector.fingerprints.loaded_adapters import LoadedAdapters
from kvtier_connector.fingerprints.packing import Declared, describe
from kvtier_connector.fingerprints.weights import LoadedModel
from kvtier_connector.tier.exchange import KVTierMetadata, KVTierWorkerMetadata


class KVTierWorker(OffloadingConnectorWorker):
    """See the module."""

    @override
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._ended: dict[str, list[int]] = {}
        """Requests of which no further piece comes, with their GPU blocks that stay unwritten."""
        self._unwritten: set[int] = set()
        self._failed: set[str] = set()
        self._model: LoadedModel | None = None
        self._weights: dict[int, tuple[int, str | None]] = {}
        """What is to be told of the weights."""
        self._adapters: LoadedAdapters | None = None
        self.declared: Declared | None = None
        """What the scheduler's side must know of this worker; None before the KV caches are there."""
        self._is_declaring = False
        self._is_one_group = len(self.kv_cache_config.kv_cache_groups) == 1

    @override
    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        self._model = LoadedModel()
        self._adapters = LoadedAdapters(self._model.holder, self.spec.config.parallel.rank)
        backends, layout = describe(self.vllm_config, kv_caches, self.kv_cache_config.num_blocks)
        self.declared = Declared(backends, layout, self._model.digest())

    @override
    def start_kv_transfers(self, metadata: OffloadingConnectorMetadata) -> None:
        super().start_kv_transfers(metadata)
        if isinstance(metadata, KVTierMetadata):
            self._ended.update(metadata.ended_loads)
            self._is_declaring |= metadata.is_declaring
            if metadata.question:
                found = None if self._model is None else self._model.digest()
                self._weights[self.spec.config.parallel.rank] = (metadata.question, found)
            if metadata.adapters is not None and self._adapters is not None:
                self._adapters.obey(metadata.adapters)

    @override
    def build_connector_worker_meta(self) -> KVTierWorkerMetadata | None:
        made = super().build_connector_worker_meta()
        weights, self._weights = self._weights, {}
        told = [] if self._adapters is None else self._adapters.take_told()
        is_declaring, self._is_declaring = self._is_declaring and self.declared is not None, False
        if made is None and not weights and not told and not is_declaring:
            return None
        made, rank = made or OffloadingWorkerMetadata(), self.spec.config.parallel.rank
        adapters = {rank: told} if told else {}
        declared = {rank: self.declared} if is_declaring and self.declared is not None else {}
        return KVTierWorkerMetadata(made.completed_jobs, made.transfer_stats, weights, adapters, declared)

    @override
    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        sent, _ = super().get_finished(finished_req_ids)
        if not self._ended:
            return sent, set()
        under_way = set(self._load_jobs.values())
        received = {name for name in self._ended if name not in under_way}
        for name in received:
            unwritten = self._ended.pop(name)
            if self._adapters is not None and name in self._adapters.refused:
                self._failed.add(name)
            elif unwritten:
                if self._is_one_group:
                    self._unwritten.update(unwritten)
                else:
                    self._failed.add(name)
        return sent, received

    def take_unwritten(self) -> set[int]:
        """Return the GPU blocks of requests just reported that were not loaded."""
        unwritten, self._unwritten = self._unwritten, set()
        return unwritten

    def take_failed(self) -> set[str]:
        """Return the requests just reported that are computed whole: blocks of several groups share numbers."""
        failed, self._failed = self._failed, set()
        return failed
