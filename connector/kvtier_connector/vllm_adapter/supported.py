# SPDX-License-Identifier: Apache-2.0
"""Holds what is relied on of modules and classes of somebody else against what they are: names and parameters.

Nothing is imported before the question is asked, and an answer never raises.

Says whether the vLLM at hand looks inside as the tier expects: a table of what we rely on, held against it.

The tier derives from classes of vLLM that are no public interface, and a release may change any of them. What we
override, call and read is listed here, so that another release is found out before an engine is built on it, and not in
the middle of a request. The table says names and parameters; what a method does, the tests find out, which run with the
releases of `contract.SUPPORTED_VLLM`.

Nothing of vLLM is imported before the question is asked, and an answer never raises.
"""

from __future__ import annotations

import dis
import enum
import importlib
import inspect
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from types import FunctionType
from typing import Any, NamedTuple

from kvtier_connector.contract.engine import SUPPORTED_VLLM, vllm_release


@dataclass(frozen=True, slots=True)
class Reliance:
    """What is needed of one module or class. Methods are written as they are called: ``lookup(key, context)``.

    A parameter or a name with a question mark may be there or not.
    """

    owner: str
    """``package.module`` or ``package.module:Class``."""
    overridden: tuple[str, ...] = ()
    """Methods that a derived class replaces, with every parameter that may be passed, in order."""
    called: tuple[str, ...] = ()
    """Functions and methods that are called, with what is passed; ``__init__`` for what is constructed."""
    read: tuple[str, ...] = ()
    """Names of the module or class, and of what it sets on its instances."""

    def differences(self) -> Iterator[str]:
        """Yield, in words, what is not there."""
        module_name, _, class_name = self.owner.partition(":")
        try:
            owner: Any = importlib.import_module(module_name)
        except Exception as error:  # noqa: BLE001 - importing what is not known may fail in any way
            yield f"{module_name} cannot be imported ({error})"
            return
        if class_name and (owner := getattr(owner, class_name, None)) is None:
            yield f"{module_name} has no {class_name}"
            return
        shown = self.owner.rpartition(".")[2].replace(":", ".")
        for written in self.overridden:
            yield from _mismatch(shown, owner, _Call.parse(written), is_overridden=True)
        for written in self.called:
            yield from _mismatch(shown, owner, _Call.parse(written), is_overridden=False)
        known = names_of(owner) if self.read else set()
        yield from (f"{shown} has no {name}" for name in self.read if name not in known and not name.endswith("?"))


class _Call(NamedTuple):
    name: str
    parameters: tuple[str, ...]
    optional: frozenset[str]
    """Those that may be there or not."""

    @classmethod
    def parse(cls, written: str) -> _Call:
        name, inside = re.fullmatch(r"(\w+)\((.*)\)", written).groups()  # type: ignore[union-attr]  # ours; tested
        words = [word.strip() for word in inside.split(",") if word.strip()]
        return cls(name, tuple(w.rstrip("?") for w in words), frozenset(w[:-1] for w in words if w.endswith("?")))


def _mismatch(shown: str, owner: Any, call: _Call, *, is_overridden: bool) -> Iterator[str]:
    function = getattr(owner, call.name, None)
    if not callable(function):
        yield f"{shown} has no {call.name}"
        return
    parameters = list(inspect.signature(function).parameters.values())
    # What is read off the class is not bound yet, except class methods.
    if isinstance(owner, type) and not inspect.ismethod(function):
        is_static = isinstance(inspect.getattr_static(owner, call.name), staticmethod)
        parameters = parameters if is_static else parameters[1:]
    named = [each for each in parameters if each.kind not in {each.VAR_POSITIONAL, each.VAR_KEYWORD}]
    theirs = [each.name for each in named]
    lacking = [name for name in call.parameters if name not in theirs and name not in call.optional]
    if is_overridden:
        surplus = [name for name in theirs if name not in call.parameters]
    else:
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
    """Yield the attributes that the method sets."""
    if isinstance(method := inspect.unwrap(method) if callable(method) else method, FunctionType):
        yield from (step.argval for step in dis.get_instructions(method) if step.opname == "STORE_ATTR")


def differences(table: Sequence[Reliance]) -> list[str]:
    """Return, in words, what is relied on and is not there."""
    return [each for reliance in table for each in reliance.differences()]


class Standing(enum.Enum):
    """How kvtier gets on with a vLLM."""

    TESTED = "tested"
    UNTESTED = "untested"
    """Another release than those that we are tested with; it looks the same inside."""
    FOREIGN = "foreign"
    """It looks different inside, and the engine serves without the tier."""


RELEASE_METRIC = "vllm:kvtier_vllm_release"
RELEASE_LABELS = ("version", "standing")
RELEASE_DOCUMENTATION = (
    "1, with the version of vLLM and how kvtier gets on with it: tested; untested (another release than those that "
    "kvtier is tested with; it looks the same inside, and the tier is used); foreign (it looks different inside, and "
    "the engine serves without the tier)."
)


class Finding(NamedTuple):
    """What was found out about the vLLM at hand."""

    version: str
    standing: Standing
    missing: tuple[str, ...]
    """In words, what we rely on and it does not have."""


def examine() -> Finding:
    """Find out which vLLM this is, and whether the tier can be used with it."""
    version = str(getattr(importlib.import_module("vllm"), "__version__", "unknown"))
    lacking = tuple(differences(RELIED_ON))
    is_tested = vllm_release(version) in SUPPORTED_VLLM
    standing = Standing.FOREIGN if lacking else Standing.TESTED if is_tested else Standing.UNTESTED
    return Finding(version, standing, lacking)


_OFFLOAD = "vllm.v1.kv_offload"
_CORE = "vllm.v1.core"
_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1"
_OFFLOADING = f"{_CONNECTOR}.offloading"

_OF_THE_CONNECTOR = (
    Reliance(
        f"{_CONNECTOR}.offloading_connector:OffloadingConnector",
        overridden=(
            "__init__(vllm_config, role, kv_cache_config)",
            "bind_kv_cache_manager(kv_cache_manager)",
            "get_transfer_results(finished_req_ids)",
            "get_block_ids_with_load_errors()",
            "get_handshake_metadata()",
            "set_xfer_handshake_metadata_pp_aware(metadata)",
            "get_required_kvcache_layout(vllm_config)",
            "build_prom_metrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)",
        ),
        read=("_canonical_layout", "connector_scheduler", "connector_worker"),
    ),
    Reliance(f"{_CONNECTOR}.base:KVConnectorBase_V1", called=("__init__(vllm_config, role, kv_cache_config)",)),
    Reliance(f"{_CONNECTOR}.base:KVConnectorTransferResults", read=("failed_recving",)),
    Reliance(f"{_OFFLOADING}.config", called=("build_offloading_config(vllm_config, kv_cache_config)",)),
    Reliance(f"{_OFFLOAD}.factory:OffloadingSpecFactory", called=("create_spec(config)",)),
    Reliance("vllm.config:KVTransferConfig", read=("kv_connector_extra_config", "kv_load_failure_policy")),
)

_OF_THE_SCHEDULER = (
    Reliance(
        f"{_OFFLOADING}.scheduler:OffloadingConnectorScheduler",
        overridden=(
            "__init__(spec, vllm_config, kv_cache_config)",
            "on_new_request(request)",
            "get_num_new_matched_tokens(request, num_computed_tokens, max_num_new_tokens)",
            "update_state_after_alloc(request, blocks, num_external_tokens)",
            "build_connector_meta(scheduler_output)",
            "update_connector_output(connector_output)",
            "has_pending_push_work()",
            "request_finished(request)",
            "reset_cache()",
            "_lookup(req_status, max_num_new_tokens)",
            "_maximal_prefix_lookup(keys, req_context, req, group_config, start_chunk_idx)",
            "_update_req_states(scheduler_output)",
            "_build_store_jobs(scheduler_output)",
            "_build_partial_tail_store_jobs(scheduler_output)",
        ),
        called=("_generate_job_id()", "_calc_num_offloadable_tokens(req_status, num_computed_tokens)"),
        read=(
            "manager",
            "config",
            "_req_status",
            "_jobs",
            "_current_batch_load_jobs",
            "_current_batch_jobs_to_flush",
            "_current_batch_sync_loads?",
            "_current_batch_sync_load_bytes?",
            "_chunks_being_loaded",
            "_sliding_window_groups",
            "_events_tracker",
        ),
    ),
    Reliance(
        f"{_OFFLOADING}.scheduler:RequestOffloadState",
        called=("update_offload_keys()",),
        read=(
            "req",
            "req_context",
            "group_states",
            "max_load_tokens",
            "max_offload_tokens",
            "num_locally_computed_tokens",
            "transfer_jobs",
        ),
    ),
    Reliance(f"{_OFFLOADING}.scheduler:RequestGroupState", read=("offload_keys", "next_stored_chunk_idx")),
    Reliance(f"{_OFFLOADING}.scheduler:GroupOffloadConfig", called=("load_window_size_in_chunks(num_tokens)",)),
    Reliance(f"{_OFFLOADING}.scheduler:GroupOffloadConfig", read=("tokens_per_chunk",)),
    Reliance(
        f"{_OFFLOADING}.scheduler:SchedulerOffloadConfig",
        read=("kv_group_configs", "blocks_per_chunk", "num_workers", "offload_prompt_only"),
    ),
    Reliance(
        f"{_OFFLOADING}.scheduler:TransferJobStatus",
        called=("__init__(req_id, pending_count, keys, is_store)",),
        read=("pending_count", "is_store"),
    ),
    Reliance(f"{_OFFLOADING}.common:TransferJob", called=("__init__(req_id, src_spec, dst_spec)",), read=("dst_spec",)),
    Reliance(
        f"{_OFFLOADING}.common:OffloadingConnectorMetadata",
        called=("__init__(load_jobs, store_jobs, jobs_to_flush)",),
        read=("load_jobs", "store_jobs", "jobs_to_flush"),
    ),
    Reliance(
        f"{_OFFLOADING}.common:OffloadingWorkerMetadata",
        overridden=("aggregate(other)",),
        called=("__init__(completed_jobs, transfer_stats)",),
        read=("completed_jobs", "transfer_stats"),
    ),
    Reliance(
        f"{_OFFLOADING}.events:OffloadingEventsTracker",
        called=("record_lookup(req, group_config, chunk_idx, offload_key)",),
        read=("self_describing_enabled",),
    ),
    Reliance(
        f"{_CORE}.sched.output:SchedulerOutput",
        read=(
            "scheduled_new_reqs",
            "scheduled_cached_reqs",
            "num_scheduled_tokens",
            "finished_req_ids",
            "preempted_req_ids",
            "kv_connector_block_state",
        ),
    ),
    Reliance(f"{_CORE}.sched.output:KVConnectorBlockState", read=("boundary_state_offloads",)),
    Reliance(f"{_CORE}.sched.output:CachedRequestData", read=("req_ids", "resumed_req_ids", "new_block_ids")),
    Reliance(f"{_CORE}.sched.output:NewRequestData", read=("req_id",)),
    Reliance(f"{_CORE}.kv_cache_manager:KVCacheManager", called=("prefix_cache_lookup_enabled(request)",)),
    Reliance(f"{_CORE}.kv_cache_manager:KVCacheManager", read=("block_pool", "coordinator")),
    Reliance(f"{_CORE}.block_pool:BlockPool", called=("get_num_free_blocks()",)),
    Reliance(f"{_CORE}.block_pool:BlockPool", read=("cached_block_hash_to_block", "num_gpu_blocks")),
    Reliance(
        f"{_CORE}.kv_cache_coordinator:KVCacheCoordinator",
        called=("find_longest_cache_hit(block_hashes, max_cache_hit_length)",),
    ),
    Reliance("vllm.v1.outputs:KVConnectorOutput", read=("finished_recving", "kv_connector_worker_meta")),
    Reliance(
        "vllm.v1.request:Request",
        read=(
            "request_id",
            "cache_salt",
            "kv_hints?",
            "kv_transfer_params",
            "lora_request",
            "block_hashes",
            "num_tokens",
            "num_prompt_tokens",
            "num_output_tokens",
            "num_preemptions",
            "arrival_time",
            "skip_reading_prefix_cache",
        ),
    ),
)

_OF_THE_MANAGER = (
    Reliance(
        f"{_OFFLOAD}.tiering.manager:TieringOffloadingManager",
        overridden=(
            "lookup(key, req_context, exclude_tier_idx)",
            "prepare_store(keys, req_context)",
            "prepare_load(keys, req_context)",
            "complete_load(keys, req_context)",
            "on_schedule_end(context)",
            "on_request_finished(req_context, exclude_tier_idx)",
            "has_pending_work()",
            "reset_cache()",
            "_process_finished_jobs(tiers?)",
            "_complete_promotion(job_metadata, completed_job)",
        ),
        called=(
            "__init__(primary_tier, secondary_tiers)",
            "create_store_job(keys, req_context, tier_idx)",
            "_maybe_process_finished_jobs()",
            "_next_job_id()",
            "_register_job(transfer_job, tier_idx)",
        ),
        read=("primary_tier", "_jobs", "_metrics", "_request_load_sources"),
    ),
    Reliance(
        f"{_OFFLOAD}.tiering.manager:CPUPrimaryTierOffloadingManager",
        called=(
            "__init__(num_chunks, mmap_region, cache_policy, cache_policy_module_path, enable_events, info?)",
            "get_kv_memoryview()",
            "prepare_load(keys, req_context)",
            "complete_load(keys, req_context)",
            "prepare_read(keys, req_context)",
            "prepare_store(keys, req_context)",
            "complete_store(keys, req_context, success)",
            "_get_num_free_chunks()",
            "shutdown()",
        ),
        read=(
            "_policy",
            "_num_chunks",
            "_num_evictable_cache_chunks",
            "_num_write_pending_chunks",
            "events",
            "prepare_write",
            "complete_write",
            "complete_read",
        ),
    ),
    Reliance(f"{_OFFLOAD}.cpu.policies.base:CachePolicy", called=("get(key)",)),
    Reliance(f"{_OFFLOAD}.cpu.policies.base:ChunkStatus", read=("chunk_id", "is_ready", "ref_cnt")),
    Reliance(f"{_OFFLOAD}.cpu.common:CPULoadStoreSpec", called=("__init__(block_ids)",), read=("block_ids",)),
    Reliance(f"{_OFFLOAD}.base:PrepareStoreOutput", read=("keys_to_store", "store_spec")),
    Reliance(
        f"{_OFFLOAD}.tiering.metrics:TieringMetricsTracker",
        called=("tier_label(tier_idx)", "on_promotion_allocation_failure()"),
        read=("primary_tier_label", "_stats"),
    ),
    Reliance(
        f"{_OFFLOADING}.metrics:OffloadingConnectorStats",
        called=(
            "increase_counter(counter_name, counter_increase_value, labelvalues)",
            "set_gauge(gauge_name, gauge_value, labelvalues)",
            "aggregate(other)",
            "is_empty()",
        ),
    ),
)

_OF_THE_WORKER = (
    Reliance(
        f"{_OFFLOADING}.worker:OffloadingConnectorWorker",
        overridden=(
            "__init__(spec, vllm_config, kv_cache_config)",
            "register_kv_caches(kv_caches)",
            "handle_preemptions(kv_connector_metadata)",
            "start_kv_transfers(metadata)",
            "get_finished(finished_req_ids)",
            "build_connector_worker_meta()",
        ),
        read=("_load_jobs", "_unsubmitted_store_jobs", "kv_cache_config", "spec", "vllm_config"),
    ),
    Reliance(
        f"{_OFFLOAD}.cpu.spec:CPUOffloadingSpec",
        overridden=("get_worker(kv_caches)",),
        read=("num_chunks", "kv_bytes_per_chunk", "cpu_page_size_per_worker", "blocks_per_chunk", "config"),
    ),
    Reliance(
        f"{_OFFLOAD}.base:OffloadingWorker",
        overridden=(
            "submit_store(job_id, src_spec, dst_spec)",
            "submit_load(job_id, src_spec, dst_spec, expedited?)",
            "get_finished()",
            "wait(job_ids)",
            "shutdown()",
        ),
    ),
    Reliance(
        f"{_OFFLOAD}.cpu.shared_offload_region:SharedOffloadRegion",
        called=(
            "__init__(engine_id, num_chunks, rank, kv_bytes_per_chunk, cpu_page_size)",
            "create_next_worker_view(tensor_page_size)",
            "cleanup()",
        ),
    ),
    Reliance(
        f"{_OFFLOAD}.base:GPULoadStoreSpec",
        called=("__init__(block_ids, group_sizes, block_indices)",),
        read=("block_ids", "group_sizes", "block_indices"),
    ),
    Reliance(f"{_OFFLOAD}.base:CanonicalKVCaches", read=("tensors", "group_data_refs")),
    Reliance(f"{_OFFLOAD}.base:CanonicalKVCacheTensor", read=("tensor", "page_size_bytes")),
    Reliance(f"{_OFFLOAD}.base:CanonicalKVCacheRef", read=("tensor_idx", "page_size_bytes")),
    Reliance(f"{_OFFLOAD}.base:TransferResult", called=("__init__(job_id, success, transfer_size, transfer_time)",)),
)

_OF_THE_TIER = (
    Reliance(
        f"{_OFFLOAD}.tiering.factory:SecondaryTierFactory",
        called=("create_secondary_tier(tier_config, primary_kv_view, offloading_spec)",),
    ),
    Reliance(
        f"{_OFFLOAD}.tiering.base:SecondaryTierManager",
        overridden=(
            "__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)",
            "build_metric_definitions(extra_config)",
            "on_new_request(req_context)",
            "lookup(key, req_context)",
            "submit_load(job_metadata)",
            "submit_store(job_metadata)",
            "get_finished_jobs()",
            "on_schedule_end(context)",
            "on_request_finished(req_context)",
            "has_pending_work()",
            "take_events()",
            "drain_jobs()",
            "get_stats()",
            "shutdown()",
        ),
        read=("locality", "medium", "cache_hit_source"),
    ),
    Reliance(
        f"{_OFFLOAD}.tiering.spec:TieringOffloadingSpec",
        overridden=("__init__(config)", "get_manager()", "get_worker(kv_caches)"),
        read=(
            "_manager",
            "_worker",
            "cache_policy_module_path",
            "eviction_policy",
            "kv_events_config",
            "secondary_tier_configs",
            "blocks_per_chunk",
            "config",
            "cpu_page_size_per_worker",
            "kv_bytes_per_chunk",
            "num_chunks",
            "replicated_layout",
        ),
    ),
    Reliance(
        f"{_OFFLOAD}.base:ReqContext",
        called=("get_state(cls)", "set_state(val)", "get_offload_key_position(key)"),
        read=("req_id", "kv_transfer_params", "_offload_key_positions"),
    ),
    Reliance(f"{_OFFLOAD}.base:ScheduleEndContext", read=("new_req_ids", "preempted_req_ids")),
    Reliance(f"{_OFFLOAD}.base:LookupResult", read=("HIT", "HIT_PENDING", "MISS", "RETRY")),
    Reliance(
        f"{_OFFLOAD}.tiering.base:TransferJob", read=("job_id", "keys", "chunk_ids", "is_promotion", "req_context")
    ),
    Reliance(
        f"{_OFFLOAD}.tiering.base:JobResult",
        called=("__init__(job_id, success, successful_keys, transfer_time, transfer_bytes)",),
    ),
    Reliance(
        f"{_OFFLOAD}.config:OffloadingConfig",
        read=(
            "groups",
            "model",
            "cache",
            "parallel",
            "engine_id",
            "canonical_layout",
            "replicated_layout",
            "kv_cache_layout",
        ),
    ),
    Reliance(
        f"{_OFFLOAD}.config:OffloadingParallelConfig",
        read=("rank", "world_size", "tp_size", "pp_size", "pcp_size", "dcp_size", "is_parallelism_agnostic"),
    ),
)

RELIED_ON = (*_OF_THE_CONNECTOR, *_OF_THE_SCHEDULER, *_OF_THE_MANAGER, *_OF_THE_WORKER, *_OF_THE_TIER)
"""All that the tier overrides, calls and reads of vLLM beyond what it imports by name."""
