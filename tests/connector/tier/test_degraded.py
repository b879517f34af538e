# SPDX-License-Identifier: Apache-2.0
"""Where vLLM looks different inside, an engine serves without the tier: with vLLM's CPU tier alone, or with nothing."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1, KVConnectorRole, supports_hma
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.platforms import current_platform
from vllm.utils.func_utils import supports_kw
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.kv_offload.factory import OffloadingSpecFactory

from kvtier_connector.vllm_adapter.connector import connector_without_tier, without_tier

EXTRA = {
    "spec_name": "KVTierSpec",
    "spec_module_path": "kvtier_connector.vllm_adapter.spec",
    "cpu_bytes_to_use": 1 << 20,
    "block_size": 64,
    "eviction_policy": "lru",
    "offload_prompt_only": True,
    "secondary_tiers": [{"type": "SharedVolumeTier"}],
}


def engine_config(**extra: Any) -> SimpleNamespace:
    return SimpleNamespace(
        kv_transfer_config=KVTransferConfig(
            kv_connector="KVTierConnector",
            kv_connector_module_path="kvtier_connector.vllm_adapter.entry",
            kv_role="kv_both",
            kv_connector_extra_config={**EXTRA, **extra},
        )
    )


def make_idle(role: KVConnectorRole = KVConnectorRole.SCHEDULER) -> Any:
    return connector_without_tier()(engine_config(), role, None)


def test_on_vllms_cpu_build_which_has_no_cpu_tier_nothing_is_looked_up_held_or_moved() -> None:
    idle = make_idle()
    assert isinstance(idle, KVConnectorBase_V1)
    assert idle.get_num_new_matched_tokens("request", 0) == (0, False)
    assert isinstance(idle.build_connector_meta("output"), KVConnectorMetadata)
    assert idle.request_finished("request", [1]) == (False, None)
    assert idle.request_finished_all_groups("request", ([1],)) == (False, None)
    assert not idle.requires_kv_delivery
    assert not idle.has_pending_push_work()
    assert not idle.reset_cache()
    assert list(idle.take_events()) == []


def test_a_worker_that_moves_nothing_takes_every_call_of_a_step() -> None:
    idle = make_idle(KVConnectorRole.WORKER)
    idle.register_kv_caches({})
    idle.handle_preemptions(KVConnectorMetadata())
    idle.bind_connector_metadata(KVConnectorMetadata())
    idle.start_load_kv("context", request_ids=[])
    idle.wait_for_layer_load("layer")
    idle.save_kv_layer("layer", None, None)
    idle.wait_for_save()
    results = idle.get_transfer_results(set())
    idle.clear_connector_metadata()
    assert not results.finished_sending
    assert not results.finished_recving
    assert not idle.get_block_ids_with_load_errors()


def test_vllm_takes_it_for_models_with_several_groups_of_layers_and_by_its_constructor() -> None:
    assert supports_hma(connector_without_tier())
    assert supports_kw(connector_without_tier(), "kv_cache_config")


def test_what_a_later_release_asks_of_every_connector_is_answered_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def warm_up(self: object, blocks: int) -> int: ...

    warm_up.__isabstractmethod__ = True  # type: ignore[attr-defined]  # as the decorator does
    monkeypatch.setattr(KVConnectorBase_V1, "warm_up", warm_up, raising=False)
    asked = KVConnectorBase_V1.__abstractmethods__ | {"warm_up"}
    monkeypatch.setattr(KVConnectorBase_V1, "__abstractmethods__", asked)
    assert make_idle().warm_up(3) is None


def test_on_a_gpu_vllms_own_cpu_tier_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(current_platform), "is_cuda_alike", lambda _: True)
    chosen = connector_without_tier()
    assert issubclass(chosen, OffloadingConnector)
    assert supports_kw(chosen, "kv_cache_config")


def test_on_a_gpu_whose_vllm_builds_its_connector_otherwise_nothing_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(self: object, vllm_config: object, role: object, kv_cache_config: object, planner: object) -> None: ...

    monkeypatch.setattr(type(current_platform), "is_cuda_alike", lambda _: True)
    monkeypatch.setattr(OffloadingConnector, "__init__", init)
    assert not issubclass(connector_without_tier(), OffloadingConnector)


def test_the_cpu_tier_alone_keeps_its_size_and_nothing_of_the_disk() -> None:
    config = engine_config()
    before = dict(config.kv_transfer_config.kv_connector_extra_config)
    extra = without_tier(config).kv_transfer_config.kv_connector_extra_config

    assert extra == {
        "spec_name": "CPUOffloadingSpec",
        "cpu_bytes_to_use": 1 << 20,
        "block_size": 64,
        "eviction_policy": "lru",
        "offload_prompt_only": True,
    }
    assert OffloadingSpecFactory.get_spec_cls(extra) is CPUOffloadingSpec
    assert config.kv_transfer_config.kv_connector_extra_config == before


def test_an_eviction_policy_of_ours_is_not_asked_of_vllm() -> None:
    config = without_tier(engine_config(eviction_policy="tail_first", cache_policy_module_path="kvtier_connector.x"))
    assert "eviction_policy" not in config.kv_transfer_config.kv_connector_extra_config
    assert "cache_policy_module_path" not in config.kv_transfer_config.kv_connector_extra_config


def test_every_question_of_a_connector_has_an_answer() -> None:
    assert not inspect.isabstract(connector_without_tier())
