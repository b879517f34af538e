# SPDX-License-Identifier: Apache-2.0
"""vLLM's offloading to host memory on vLLM's CPU build, which refuses it by itself: the same, with a memcpy worker.

Named to vLLM by the operator where a tier has no accelerator, so that the connector can be tried on a laptop. Imported
in the scheduler, in every worker and in the API server, so importing it starts nothing.
"""

from __future__ import annotations

from typing_extensions import override
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

from kvtier_connector.shm import clear_stale_regions, explaining_shortage
from kvtier_connector.tier.cpu_worker import CpuCopyWorker


class CpuBuildOffloadingSpec(CPUOffloadingSpec):
    """vLLM's spec of the same settings; each rank has its part of one region in /dev/shm."""

    _cpu_worker: CpuCopyWorker | None = None

    @override
    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self._cpu_worker is None:
            clear_stale_regions()
            with explaining_shortage(self.num_chunks * self.kv_bytes_per_chunk):
                region = SharedOffloadRegion(
                    engine_id=self.config.engine_id,
                    num_chunks=self.num_chunks,
                    rank=self.config.parallel.rank,
                    kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                    cpu_page_size=self.cpu_page_size_per_worker,
                )
                try:
                    self._cpu_worker = CpuCopyWorker(kv_caches, blocks_per_chunk=self.blocks_per_chunk, region=region)
                except Exception:
                    region.cleanup()
                    raise
        return self._cpu_worker
