# SPDX-License-Identifier: Apache-2.0
"""The class that vLLM loads by name: built as vLLM builds it, on the CPU platform."""

from __future__ import annotations

import ctypes
import os
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from rig import ROW_BYTES, Rigs, offloading_config
from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor

from kvtier_connector.contract.errors import ConfigInvalid
from kvtier_connector.vllm_adapter.cpu_build import CpuCopyWorker
from kvtier_connector.vllm_adapter.metrics import METRICS
from kvtier_connector.vllm_adapter.secondary_tier import SharedVolumeTier
from kvtier_connector.vllm_adapter.spec import KVTierSpec


def extra_config(rigs: Rigs) -> dict[str, object]:
    return {
        "cpu_bytes_to_use": 8 * ROW_BYTES,
        "secondary_tiers": [
            {
                "type": "SharedVolumeTier",
                "module_path": "kvtier_connector.vllm_adapter.secondary_tier",
                "config_file": str(rigs.config_file()),
            }
        ],
    }


def one_tensor() -> CanonicalKVCaches:
    tensor = torch.zeros((4, ROW_BYTES), dtype=torch.int8)
    return CanonicalKVCaches([CanonicalKVCacheTensor(tensor, ROW_BYTES)], [[CanonicalKVCacheRef(0, ROW_BYTES)]])


def test_worker_and_manager_of_one_engine_share_one_region(rigs: Rigs) -> None:
    config = offloading_config(extra_config=extra_config(rigs))
    # The worker first, as in an engine; the scheduler's clearing must leave its region alone.
    worker = KVTierSpec(config).get_worker(one_tensor())
    manager = KVTierSpec(config).get_manager()

    assert isinstance(worker, CpuCopyWorker)
    (tier,) = manager.secondary_tiers
    assert isinstance(tier, SharedVolumeTier)
    assert Path(f"/dev/shm/vllm_offload_{config.engine_id}.mmap").exists()
    manager.shutdown()
    worker.shutdown()
    assert not Path(f"/dev/shm/vllm_offload_{config.engine_id}.mmap").exists()


def test_a_region_that_a_dead_engine_left_is_removed_before_the_new_one_is_made(rigs: Rigs) -> None:
    stale = Path(f"/dev/shm/vllm_offload_test-stale-{uuid.uuid4().hex}.mmap")
    stale.write_bytes(bytes(4096))
    worker = KVTierSpec(offloading_config(extra_config=extra_config(rigs))).get_worker(one_tensor())

    assert not stale.exists()
    worker.shutdown()


def test_the_metrics_of_the_tier_are_declared_through_the_spec(rigs: Rigs) -> None:
    declared = KVTierSpec.build_metric_definitions(extra_config(rigs))
    assert {metric.name for metric in METRICS} <= set(declared)


def test_the_canonical_layout_is_refused_where_vllm_does_not_certify_a_layer(rigs: Rigs) -> None:
    spec = KVTierSpec(offloading_config(canonical_layout=True, extra_config=extra_config(rigs)))
    with pytest.raises(ConfigInvalid, match="canonicalLayout"):
        spec.get_worker(one_tensor())


NEW_MOUNTS = 0x00020000
PRIVATE_AND_BELOW = 0x00044000


def with_little_shared_memory(action: Callable[[], None]) -> None:
    """Run it on a thread that sees a /dev/shm of 1 MiB; nobody else does."""
    libc = ctypes.CDLL(None, use_errno=True)

    def run() -> None:
        assert libc.unshare(NEW_MOUNTS) == 0
        assert libc.mount(b"none", b"/", None, PRIVATE_AND_BELOW, None) == 0
        assert libc.mount(b"none", b"/dev/shm", b"tmpfs", 0, b"size=1m") == 0
        action()

    if os.geteuid() != 0:
        pytest.skip("only root can mount here")
    with ThreadPoolExecutor(1) as pool:
        pool.submit(run).result()


REMEDY = (
    r"^/dev/shm is too small: the CPU tier needs 2 MiB there and [01] of 1 MiB are free .*\. Lower spec.cpu.size of "
    "the KVCacheTier. In a pod of your own, lower cpu_bytes_to_use or mount a larger emptyDir"
)


def test_a_cpu_tier_that_does_not_fit_into_shared_memory_names_the_setting_to_change(rigs: Rigs) -> None:
    def start() -> None:
        config = offloading_config(extra_config={**extra_config(rigs), "cpu_bytes_to_use": 2 << 20})
        with pytest.raises(ConfigInvalid, match=REMEDY):
            KVTierSpec(config).get_worker(one_tensor())
        assert list(Path("/dev/shm").iterdir()) == []

    with_little_shared_memory(start)


def test_shared_memory_that_somebody_else_takes_meanwhile_names_the_setting_too(
    rigs: Rigs, monkeypatch: pytest.MonkeyPatch
) -> None:
    # vLLM looks at what is free before it takes it, and so does the other engine of a pod.
    monkeypatch.setattr("vllm.v1.kv_offload.cpu.shared_offload_region.check_shm_free_space", lambda *_, **__: None)

    def start() -> None:
        config = offloading_config(extra_config={**extra_config(rigs), "cpu_bytes_to_use": 2 << 20})
        with pytest.raises(ConfigInvalid, match=REMEDY):
            KVTierSpec(config).get_worker(one_tensor())

    with_little_shared_memory(start)


def test_an_error_that_is_not_of_shared_memory_passes(rigs: Rigs, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("something else")

    monkeypatch.setattr("vllm.v1.kv_offload.cpu.shared_offload_region.check_shm_free_space", refuse)
    with pytest.raises(RuntimeError, match=r"^something else$"):
        KVTierSpec(offloading_config(extra_config=extra_config(rigs))).get_worker(one_tensor())
