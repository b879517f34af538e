# SPDX-License-Identifier: Apache-2.0
"""vLLM's offloading connector with the scheduler's and the worker's side of kvtier."""

from __future__ import annotations

from typing import TYPE_CHECKING

from typing_extensions import override
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1, KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata, KVConnectorTransferResults
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_offload.factory import OffloadingSpecFactory
from vllm.v1.request import Request

from kvtier_connector.contract.errors import ConfigInvalid
from kvtier_connector.vllm_adapter.fingerprint import Declared
from kvtier_connector.vllm_adapter.manager import KVTierManager
from kvtier_connector.vllm_adapter.request_log import scheduler_class
from kvtier_connector.vllm_adapter.scheduler import KVTierScheduler
from kvtier_connector.vllm_adapter.spec import KVTierSpec
from kvtier_connector.vllm_adapter.worker import KVTierWorker

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager

logger = init_logger("vllm.kvtier.connector")


class KVTierConnector(OffloadingConnector):
    """GPU, pinned host memory, shared volume."""

    @override
    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        # vLLM's own constructor, with our classes in place of its own.
        KVConnectorBase_V1.__init__(self, vllm_config, role, kv_cache_config)
        config = build_offloading_config(vllm_config, kv_cache_config)
        self._canonical_layout = config.canonical_layout
        spec = OffloadingSpecFactory.create_spec(config)
        self.connector_scheduler: KVTierScheduler | None = None
        self.connector_worker: KVTierWorker | None = None
        if role is KVConnectorRole.SCHEDULER:
            if isinstance(spec, KVTierSpec):
                spec.engine_config = vllm_config
            recompute_failed_loads(vllm_config)
            if not isinstance(spec.get_manager(), KVTierManager):
                raise ConfigInvalid("KVTierConnector needs KVTierSpec and one SharedVolumeTier in secondary_tiers")
            self.connector_scheduler = scheduler_class()(spec, vllm_config, kv_cache_config)
        elif role is KVConnectorRole.WORKER:
            self.connector_worker = KVTierWorker(spec, vllm_config, kv_cache_config)

    @override
    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        assert self.connector_scheduler is not None

        def count_local_tokens(request: Request) -> int:
            if not kv_cache_manager.prefix_cache_lookup_enabled(request):
                return 0
            found = kv_cache_manager.coordinator.find_longest_cache_hit(request.block_hashes, request.num_tokens - 1)
            return int(found[1])

        def is_gpu_empty() -> bool:
            pool = kv_cache_manager.block_pool
            # One block is never given away.
            return not len(pool.cached_block_hash_to_block) and pool.get_num_free_blocks() == pool.num_gpu_blocks - 1

        self.connector_scheduler.count_local_tokens = count_local_tokens
        self.connector_scheduler.manager.is_gpu_empty = is_gpu_empty

    @override
    def get_handshake_metadata(self) -> Declared | None:
        return None if self.connector_worker is None else self.connector_worker.declared

    @override
    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        assert self.connector_scheduler is not None
        declared = [metadata[rank] for rank in sorted(metadata)]
        self.connector_scheduler.begin([each for each in declared if isinstance(each, Declared)])

    @override
    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = super().get_transfer_results(finished_req_ids)
        assert self.connector_worker is not None
        results.failed_recving |= self.connector_worker.take_failed()
        return results

    @override
    def get_block_ids_with_load_errors(self) -> set[int]:
        return set() if self.connector_worker is None else self.connector_worker.take_unwritten()

    @classmethod
    @override
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str:
        """Prefer all layers of a block side by side: then a block is one copy instead of one for each layer.

        vLLM keeps to what the backend can do. Its canonical layout, and its kernel for MiniMax-M3's index, go by layer.
        """
        transfer, model = vllm_config.kv_transfer_config, vllm_config.model_config
        is_canonical = transfer is not None and transfer.kv_connector_extra_config.get("canonical_layout")
        if current_platform.is_cpu() or is_canonical or (model and "MiniMaxM3" in str(model.architectures)):
            return str(super().get_required_kvcache_layout(vllm_config))
        return "BLHNC"


def recompute_failed_loads(vllm_config: VllmConfig) -> None:
    """Set ``kv_load_failure_policy`` to recompute: vLLM's default ends a request whose load fails.

    vLLM's scheduler reads the setting after it has made the connector. In a MultiConnector it reads the outer one,
    which the operator sets.
    """
    transfer = vllm_config.kv_transfer_config
    if transfer is not None and transfer.kv_load_failure_policy != "recompute":
        logger.warning(
            "kv_load_failure_policy is set to recompute, so that a block that cannot be read costs no request; "
            'write "kv_load_failure_policy": "recompute" into --kv-transfer-config, also of a MultiConnector'
        )
        transfer.kv_load_failure_policy = "recompute"
