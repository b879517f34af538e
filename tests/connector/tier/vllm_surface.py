# SPDX-License-Identifier: Apache-2.0
"""All that kvtier calls and reads of vLLM's private interface, and a comparison with the installed vLLM."""

from __future__ import annotations

import dis
import importlib
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from types import FunctionType
from typing import Any, NamedTuple


@dataclass(frozen=True, slots=True)
class Use:
    """Names of one module or class. A method is written as it is called: ``lookup(key, context)``.

    A parameter or a name with a question mark is absent in some supported release.
    """

    owner: str
    """``package.module`` or ``package.module:Class``."""
    names: str
    """Functions and methods that kvtier calls, with the arguments, ``__init__`` for a constructor; then attributes."""

    @property
    def called(self) -> list[str]:
        return re.findall(r"\w+\([^)]*\)", self.names)

    @property
    def read(self) -> list[str]:
        return re.sub(r"\w+\([^)]*\)", "", self.names).split()

    def differences(self) -> Iterator[str]:
        module_name, _, class_name = self.owner.partition(":")
        owner: Any = importlib.import_module(module_name)
        if class_name and (owner := getattr(owner, class_name, None)) is None:
            yield f"{module_name} has no {class_name}"
            return
        shown = self.owner.rpartition(".")[2].replace(":", ".")
        for written in self.called:
            yield from _mismatch(shown, owner, _Call.parse(written))
        known = names_of(owner) if self.read else set()
        yield from (f"{shown} has no {name}" for name in self.read if name not in known and name[-1] != "?")


class _Call(NamedTuple):
    name: str
    parameters: tuple[str, ...]
    optional: frozenset[str]

    @classmethod
    def parse(cls, written: str) -> _Call:
        name, inside = re.fullmatch(r"(\w+)\((.*)\)", written).groups()  # type: ignore[union-attr]  # ours
        words = [word.strip() for word in inside.split(",") if word.strip()]
        return cls(name, tuple(w.rstrip("?") for w in words), frozenset(w[:-1] for w in words if w.endswith("?")))


def _mismatch(shown: str, owner: Any, call: _Call) -> Iterator[str]:
    function = getattr(owner, call.name, None)
    if not callable(function):
        yield f"{shown} has no {call.name}"
        return
    parameters = list(inspect.signature(function).parameters.values())
    # A function taken from the class has `self` as its first parameter; a class method is bound already.
    if isinstance(owner, type) and not inspect.ismethod(function):
        is_static = isinstance(inspect.getattr_static(owner, call.name), staticmethod)
        parameters = parameters if is_static else parameters[1:]
    named = [each for each in parameters if each.kind not in {each.VAR_POSITIONAL, each.VAR_KEYWORD}]
    theirs = [each.name for each in named]
    lacking = [name for name in call.parameters if name not in theirs and name not in call.optional]
    surplus = [each.name for each in named if each.default is each.empty and each.name not in call.parameters]
    in_order = [name for name in call.parameters if name in theirs]
    if lacking or surplus or in_order != [name for name in theirs if name in call.parameters]:
        yield f"{shown}.{call.name} takes ({', '.join(theirs)}), and we know ({', '.join(call.parameters)})"


def names_of(owner: Any) -> set[str]:
    """Return the attributes of a module or class, and of what a class sets on its instances."""
    names = set(dir(owner))
    if is_dataclass(owner):
        names.update(field.name for field in fields(owner))
    if isinstance(owner, type):
        for base in owner.__mro__:
            names.update(getattr(base, "__annotations__", ()))
            for method in ("__init__", "__post_init__"):
                names.update(_set_by(vars(base).get(method)))
    return names


def _set_by(method: Any) -> Iterator[str]:
    if isinstance(method := inspect.unwrap(method) if callable(method) else method, FunctionType):
        yield from (step.argval for step in dis.get_instructions(method) if step.opname == "STORE_ATTR")


_PACKAGES = {
    "connector": "vllm.distributed.kv_transfer.kv_connector.v1",
    "core": "vllm.v1.core",
    "offload": "vllm.v1.kv_offload",
}
_USES = """
connector.offloading_connector:OffloadingConnector _canonical_layout connector_scheduler connector_worker
connector.base:KVConnectorBase_V1 __init__(vllm_config, role, kv_cache_config)
connector.base:KVConnectorTransferResults failed_recving
connector.offloading.config build_offloading_config(vllm_config, kv_cache_config)
offload.factory:OffloadingSpecFactory create_spec(config)
vllm.config:KVTransferConfig kv_connector_extra_config kv_load_failure_policy
core.sched.scheduler:Scheduler __init__(vllm_config, kv_cache_config, structured_output_manager, block_size)
    _inflight_prefill_reserved_blocks() _preempt_request(request, timestamp, drop_stale_output) _pause_state
    _update_from_kv_xfer_finished(kv_connector_output)
    block_size connector connector_prefix_cache_stats kv_cache_manager max_num_active_reqs max_num_scheduled_tokens
    pause_state running vllm_config waiting
connector.offloading.scheduler:OffloadingConnectorScheduler _generate_job_id()
    _build_store_jobs(scheduler_output) manager config _req_status _jobs
    _current_batch_load_jobs _current_batch_jobs_to_flush
    _chunks_being_loaded _full_attention_groups _sliding_window_groups _events_tracker
connector.offloading.scheduler:RequestOffloadState __init__(config, req, req_context, offloading_context)
    update_offload_keys() req req_context offloading_context group_states max_load_tokens max_offload_tokens
    num_locally_computed_tokens transfer_jobs
connector.offloading.scheduler:RequestGroupState offload_keys next_stored_chunk_idx
connector.offloading.scheduler:GroupOffloadConfig load_window_size_in_chunks(num_tokens) tokens_per_chunk
    kv_cache_spec sliding_window_size_in_chunks
vllm.v1.kv_cache_interface:SlidingWindowSpec sliding_window extra_retained_tokens
connector.offloading.scheduler:SchedulerOffloadConfig kv_group_configs blocks_per_chunk num_workers
connector.offloading.scheduler:TransferJobStatus __init__(req_id, pending_count, keys, is_store) pending_count
connector.offloading.common:TransferJob __init__(req_id, src_spec, dst_spec) dst_spec
connector.offloading.common:OffloadingConnectorMetadata __init__(load_jobs, store_jobs, jobs_to_flush) load_jobs
    store_jobs jobs_to_flush
connector.offloading.common:OffloadingWorkerMetadata __init__(completed_jobs, transfer_stats) completed_jobs
    transfer_stats
connector.offloading.events:OffloadingEventsTracker record_lookup(req, group_config, chunk_idx, offload_key)
    self_describing_enabled
core.sched.output:SchedulerOutput num_scheduled_tokens preempted_req_ids finished_req_ids
    kv_connector_block_state has_sync_kv_loads
core.kv_cache_manager:KVCacheBlocks __init__(blocks) blocks
core.kv_cache_utils:KVCacheBlock __init__(block_id) block_id is_null
core.sched.output:KVConnectorBlockState boundary_state_offloads
core.kv_cache_manager:KVCacheManager prefix_cache_lookup_enabled(request) block_pool coordinator
core.block_pool:BlockPool get_num_free_blocks() cached_block_hash_to_block num_gpu_blocks
core.kv_cache_coordinator:KVCacheCoordinator find_longest_cache_hit(block_hashes, max_cache_hit_length)
vllm.v1.outputs:KVConnectorOutput finished_recving kv_connector_worker_meta
vllm.v1.request:Request request_id cache_salt kv_hints? kv_transfer_params lora_request block_hashes num_tokens
    num_prompt_tokens num_output_tokens num_preemptions arrival_time skip_reading_prefix_cache num_in_flight_tokens
    num_stale_output_tokens drop_stale_output num_output_placeholders events prefill_stats num_computed_tokens
    num_tokens_with_spec sampling_params mm_features
offload.tiering.manager:TieringOffloadingManager __init__(primary_tier, secondary_tiers)
    create_store_job(keys, req_context, tier_idx) _maybe_process_finished_jobs() _next_job_id()
    _register_job(transfer_job, tier_idx) primary_tier _jobs _metrics _request_load_sources
offload.tiering.manager:CPUPrimaryTierOffloadingManager
    __init__(num_chunks, mmap_region, cache_policy, cache_policy_module_path, enable_events, info?)
    get_kv_memoryview() prepare_load(keys, req_context) complete_load(keys, req_context)
    prepare_read(keys, req_context) prepare_store(keys, req_context) _get_num_free_chunks() shutdown() _policy
    _num_evictable_cache_chunks _num_write_pending_chunks events prepare_write complete_write complete_read
offload.cpu.policies.base:CachePolicy get(key)
offload.cpu.policies.base:ChunkStatus chunk_id is_ready
offload.cpu.common:CPULoadStoreSpec __init__(block_ids) block_ids
offload.base:PrepareStoreOutput keys_to_store store_spec
offload.tiering.metrics:TieringMetricsTracker on_promotion_allocation_failure()
connector.offloading.metrics:OffloadingConnectorStats
    increase_counter(counter_name, counter_increase_value, labelvalues)
    set_gauge(gauge_name, gauge_value, labelvalues)
connector.offloading.worker:OffloadingConnectorWorker _load_jobs _unsubmitted_store_jobs kv_cache_config spec
    vllm_config worker
offload.base:OffloadingWorker wait(job_ids)
offload.cpu.spec:CPUOffloadingSpec num_chunks kv_bytes_per_chunk cpu_page_size_per_worker blocks_per_chunk config
offload.cpu.shared_offload_region:SharedOffloadRegion
    __init__(engine_id, num_chunks, rank, kv_bytes_per_chunk, cpu_page_size) create_next_worker_view(tensor_page_size)
    cleanup()
offload.base:GPULoadStoreSpec __init__(block_ids, group_sizes, block_indices) block_ids group_sizes block_indices
vllm.lora.model_manager:LoRAModelManager list_adapters()
vllm.v1.worker.lora_model_runner_mixin:LoRAModelRunnerMixin add_lora(lora_request)
vllm.v1.worker.gpu_model_runner:GPUModelRunner get_model() add_lora(lora_request)
offload.base:CanonicalKVCaches tensors group_data_refs
offload.base:CanonicalKVCacheTensor tensor page_size_bytes
offload.base:CanonicalKVCacheRef tensor_idx page_size_bytes
offload.base:TransferResult __init__(job_id, success, transfer_size, transfer_time)
offload.tiering.factory:SecondaryTierFactory create_secondary_tier(tier_config, primary_kv_view, offloading_spec)
offload.tiering.base:SecondaryTierManager locality medium cache_hit_source
offload.tiering.spec:TieringOffloadingSpec _manager _worker cache_policy_module_path eviction_policy kv_events_config
    secondary_tier_configs blocks_per_chunk config cpu_page_size_per_worker kv_bytes_per_chunk num_chunks
    replicated_layout cpu_info?
offload.base:ReqContext get_state(cls) set_state(val) get_offload_key_position(key) req_id kv_transfer_params
    _offload_key_positions
offload.base:LookupResult HIT HIT_PENDING MISS RETRY
offload.tiering.base:TransferJob job_id keys chunk_ids is_promotion req_context
offload.tiering.base:JobResult __init__(job_id, success, successful_keys, transfer_time, transfer_bytes)
offload.config:OffloadingConfig groups model cache parallel engine_id canonical_layout replicated_layout
    kv_cache_layout
offload.config:OffloadingParallelConfig rank world_size tp_size pp_size pcp_size dcp_size is_parallelism_agnostic
"""
"""An owner in each line, by a package's short name or its whole one, and what is used of it."""


def _use(line: str) -> Use:
    owner, names = line.split(maxsplit=1)
    package, _, rest = owner.partition(".")
    return Use(f"{_PACKAGES.get(package, package)}.{rest}", names)


USES = tuple(_use(line) for line in re.sub(r"\n +", " ", _USES).strip().splitlines())
