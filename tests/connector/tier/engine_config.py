# SPDX-License-Identifier: Apache-2.0
"""The settings of a simulated engine, as vLLM has them."""

from __future__ import annotations

import uuid
from pathlib import Path

from engine_parts import BLOCK_TOKENS, PAGE_BYTES, Shape, model_config
from vllm.config import CacheConfig, DeviceConfig, KVTransferConfig, SchedulerConfig, VllmConfig


def engine_config(shape: Shape, config_file: Path) -> VllmConfig:
    """Return what vLLM knows of an engine of this shape, whose tier has the settings of a file."""
    cache = CacheConfig(block_size=BLOCK_TOKENS, enable_prefix_caching=True)
    cache.num_gpu_blocks = shape.gpu_blocks
    model = model_config()
    return VllmConfig(
        model_config=model,
        cache_config=cache,
        device_config=DeviceConfig("cpu"),
        scheduler_config=SchedulerConfig(
            max_num_seqs=shape.most_running,
            max_num_batched_tokens=shape.most_tokens,
            max_model_len=model.max_model_len,
            enable_chunked_prefill=shape.is_chunking,
            is_encoder_decoder=False,
            async_scheduling=False,
        ),
        kv_transfer_config=KVTransferConfig(
            kv_connector="KVTierConnector",
            kv_connector_module_path="kvtier_connector.vllm_adapter.connector",
            kv_role="kv_both",
            kv_load_failure_policy=shape.load_failure_policy,
            engine_id=f"test-{uuid.uuid4().hex}",
            kv_connector_extra_config={
                "spec_name": "KVTierSpec",
                "spec_module_path": "kvtier_connector.vllm_adapter.spec",
                "cpu_bytes_to_use": shape.cpu_chunks * shape.blocks_per_chunk * PAGE_BYTES,
                "blocks_per_chunk": shape.blocks_per_chunk,
                "offload_prompt_only": shape.prompt_only,
                "secondary_tiers": [
                    {"type": "TierUnderTest", "module_path": "engine_rig", "config_file": str(config_file)}
                ],
            },
        ),
    )
