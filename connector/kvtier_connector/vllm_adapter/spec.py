# SPDX-License-Identifier: Apache-2.0
"""The class that vLLM loads by name: its own tiered offloading, on one more platform and without stale memory files.

Imported in the scheduler, in every worker and in the API server, so importing it starts nothing.
"""

from __future__ import annotations

import itertools
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import torch
from typing_extensions import override
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingManager, OffloadingWorker
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvtier_connector.contract.errors import ConfigInvalid
from kvtier_connector.pod_tools.shm import clear_stale_regions, explaining_shortage
from kvtier_connector.vllm_adapter.cpu_build import CpuCopyWorker, make_region, make_worker
from kvtier_connector.vllm_adapter.cpu_tier import CpuTier
from kvtier_connector.vllm_adapter.manager import KVTierManager
from kvtier_connector.vllm_adapter.secondary_tier import SharedVolumeTier

logger = init_logger("vllm.kvtier.spec")


class KVTierSpec(TieringOffloadingSpec):
    """vLLM's tiering: GPU, pinned host memory, then the shared volume, which ``secondary_tiers`` names.

    The engine's processes share one region in /dev/shm; a worker makes it before the scheduler opens it. A region that
    a killed engine left is removed first, or the new one would not fit beside it. One that any process holds stays.
    """

    @override
    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        self.engine_config: VllmConfig | None = None
        """All of vLLM's configuration, in the scheduler; None where it is not known."""
        self.region_fd: int | None = None
        """The file behind the rows of the CPU tier, in the scheduler, while the manager lives."""
        self._cpu_worker: CpuCopyWorker | None = None

    _manager: OffloadingManager | None

    @override
    def get_manager(self) -> OffloadingManager:
        if self._manager is None:
            _clear_stale_regions()
            with explaining_shortage(self.num_chunks * self.kv_bytes_per_chunk):
                if not self._is_with_ours():
                    # vLLM's own manager, with its own tiers, on one platform more.
                    return super().get_manager()
                self._manager = self._make_manager()
        return self._manager

    @override
    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self._cpu_worker is None and self._worker is None:
            _clear_stale_regions()
        with explaining_shortage(self.num_chunks * self.kv_bytes_per_chunk):
            if not current_platform.is_cpu():
                is_new, worker = self._worker is None, super().get_worker(kv_caches)
                if is_new:
                    _use_one_stream(worker)
                return worker
            if self._cpu_worker is None:
                self._cpu_worker = make_worker(self, kv_caches)
        return self._cpu_worker

    def _is_with_ours(self) -> bool:
        classes = [SecondaryTierFactory.get_tier_class(config) for config in self.secondary_tier_configs]
        is_any = any(issubclass(made, SharedVolumeTier) for made in classes)
        if is_any and len(classes) > 1:
            raise ConfigInvalid(f"secondary_tiers: SharedVolumeTier stands alone, found {len(classes)} tiers")
        return is_any

    def _make_manager(self) -> KVTierManager:
        with ExitStack() as made:
            region = make_region(self, rank=None)
            made.callback(region.cleanup)
            primary = CpuTier(
                num_chunks=self.num_chunks,
                mmap_region=region,
                cache_policy=self.eviction_policy,
                cache_policy_module_path=self.cache_policy_module_path,
                enable_events=self.kv_events_config.enable_kv_cache_events,
                # Facts for a metric, since 0.33.
                **({"info": self.cpu_info} if hasattr(self, "cpu_info") else {}),
            )
            made.pop_all()
            made.callback(primary.shutdown)
            self.region_fd = region.fd
            tier = SecondaryTierFactory.create_secondary_tier(
                self.secondary_tier_configs[0], primary.get_kv_memoryview(), self
            )
            assert isinstance(tier, SharedVolumeTier)
            manager = KVTierManager(primary, tier)
            made.pop_all()
        return manager


def _use_one_stream(worker: Any) -> None:
    """Have all copies of a direction go by one stream of the GPU, of a priority of its own.

    A GPU has eight queues for its streams: of a dozen that wait for each other, some hold up the stream that computes.
    """
    for handler in (worker._store_handler, worker._load_handler) if current_platform.is_cuda() else ():  # noqa: SLF001 - no option
        streams = itertools.repeat(torch.cuda.Stream(priority=-1))
        handler._stream_pool = SimpleNamespace(pop=streams.__next__, append=lambda _: None, clear=lambda: None)  # noqa: SLF001 - as above


def _clear_stale_regions() -> None:
    for path in clear_stale_regions():
        logger.info("Removed %s, left by an engine that is gone", path)
