# SPDX-License-Identifier: Apache-2.0
"""What we override exists in vLLM with the signature we know: an upgrade fails here, readably, and not in a pod."""

from __future__ import annotations

import inspect
import subprocess
import sys
from dataclasses import fields

import pytest
from vllm.v1.kv_offload.base import GPULoadStoreSpec, OffloadingWorker, ReqContext, ScheduleEndContext
from vllm.v1.kv_offload.config import OffloadingConfig, OffloadingParallelConfig
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvtier_connector.tier.cpu_worker import CpuCopyWorker
from kvtier_connector.tier.manager import SharedVolumeTier
from kvtier_connector.tier.spec import KVTierSpec

OVERRIDDEN = {
    (SharedVolumeTier, SecondaryTierManager): (
        "lookup",
        "submit_load",
        "submit_store",
        "get_finished_jobs",
        "has_pending_work",
        "take_events",
        "on_new_request",
        "on_request_finished",
        "on_schedule_end",
        "drain_jobs",
        "shutdown",
        "build_metric_definitions",
        "get_stats",
    ),
    (CpuCopyWorker, OffloadingWorker): ("submit_store", "submit_load", "get_finished", "wait", "shutdown"),
    (KVTierSpec, TieringOffloadingSpec): ("__init__", "get_manager", "get_worker"),
}
CASES = [(ours, theirs, name) for (ours, theirs), names in OVERRIDDEN.items() for name in names]


@pytest.mark.parametrize(("ours", "theirs", "name"), CASES, ids=[f"{case[0].__name__}.{case[2]}" for case in CASES])
def test_an_overridden_hook_takes_what_vllm_passes(ours: type, theirs: type, name: str) -> None:
    mine, upstream = (inspect.signature(getattr(owner, name)).parameters for owner in (ours, theirs))
    assert [(p.name, p.kind) for p in mine.values()] == [(p.name, p.kind) for p in upstream.values()]


def test_every_abstract_method_of_vllm_is_implemented() -> None:
    assert not SharedVolumeTier.__abstractmethods__
    assert not CpuCopyWorker.__abstractmethods__


def test_the_tier_is_constructed_with_the_arguments_that_vllm_passes() -> None:
    mine = inspect.signature(SharedVolumeTier.__init__).parameters
    for name in inspect.signature(SecondaryTierManager.__init__).parameters:
        assert name in mine


def test_vllm_finds_the_tier_by_the_configuration_that_the_operator_writes() -> None:
    config = {
        "type": "SharedVolumeTier",
        "module_path": "kvtier_connector.tier.manager",
        "config_file": "/etc/kvtier/connector.json",
        "generation": "0123456789abcdef",
    }
    assert SecondaryTierFactory.get_tier_class(config) is SharedVolumeTier


@pytest.mark.parametrize(
    ("record", "used"),
    [
        (TransferJob, {"job_id", "keys", "chunk_ids", "is_promotion", "req_context"}),
        (JobResult, {"job_id", "success", "successful_keys", "transfer_time", "transfer_bytes"}),
        (ReqContext, {"req_id", "_offload_key_positions"}),
        (
            OffloadingConfig,
            {
                "groups",
                "model",
                "cache",
                "parallel",
                "engine_id",
                "canonical_layout",
                "replicated_layout",
                "kv_cache_layout",
            },
        ),
        (
            OffloadingParallelConfig,
            {"rank", "world_size", "tp_size", "pp_size", "pcp_size", "dcp_size", "is_parallelism_agnostic"},
        ),
    ],
)
def test_the_fields_that_we_use_exist(record: type, used: set[str]) -> None:
    assert used <= {field.name for field in fields(record)}


def test_the_step_context_tells_which_requests_were_scheduled() -> None:
    assert ScheduleEndContext._fields == ("new_req_ids", "preempted_req_ids")


def test_a_region_is_made_with_the_arguments_that_we_pass() -> None:
    parameters = set(inspect.signature(SharedOffloadRegion.__init__).parameters)
    assert {"engine_id", "num_chunks", "rank", "kv_bytes_per_chunk", "cpu_page_size"} <= parameters
    assert hasattr(SharedOffloadRegion, "create_next_worker_view")


def test_a_gpu_spec_carries_what_the_copy_needs() -> None:
    spec = GPULoadStoreSpec([3, 4], group_sizes=[2], block_indices=[0])
    assert (list(spec.block_ids), spec.group_sizes, spec.block_indices) == ([3, 4], [2], [0])


def test_importing_the_spec_and_the_tier_starts_nothing() -> None:
    script = (
        "import threading, torch, kvtier_connector.tier.spec, kvtier_connector.tier.manager\n"
        "assert not torch.cuda.is_initialized()\n"
        "assert not [thread for thread in threading.enumerate() if thread.name.startswith('kvtier')]\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", script], check=True, capture_output=True)
