# SPDX-License-Identifier: Apache-2.0
"""Our manager with a real CPU tier and our disk tier: everything but the model, the GPU and the scheduler.

`Rig.serve` asks for a prefix and loads it step by step as our scheduler does, and `Rig.offload` stores one.
"""

from __future__ import annotations

import functools
import hashlib
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from vllm.sampling_params import SamplingParams
from vllm.v1.kv_offload.base import (
    GPULoadStoreSpec,
    OffloadKey,
    ReqContext,
    ScheduleEndContext,
    get_offload_block_hash,
    get_offload_group_idx,
    make_offload_key,
)
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.request import Request
from waiting import until

from kvtier_connector.cascade.fetch import Load
from kvtier_connector.contract import engine
from kvtier_connector.store.blockstore import BlockStore
from kvtier_connector.store.fs import LOCAL, FileSystem
from kvtier_connector.store.layout import BlockKey
from kvtier_connector.store.permit import PERMIT_FILE, Permit, encode_permit
from kvtier_connector.vllm_adapter.cpu_tier import CpuTier
from kvtier_connector.vllm_adapter.fingerprint import Declared
from kvtier_connector.vllm_adapter.manager import KVTierManager
from kvtier_connector.vllm_adapter.secondary_tier import SharedVolumeTier
from kvtier_connector.vllm_adapter.spec import KVTierSpec

ROW_BYTES = 8192
IO_THREADS = 4
ON_THREADS = FileSystem()
"""The real system calls. As it is not `LOCAL`, I/O workers run on threads, which start faster."""
TOKENS_PER_BLOCK = 16
DIGEST = "0123456789abcdef"
DECLARED = Declared(("Attention/TEST",), "layout", "weights")
PATIENCE_SECONDS = 120.0
wait_until = functools.partial(until, seconds=PATIENCE_SECONDS, pause_seconds=0.002)


class UndecidedError(AssertionError):
    """The request was not decided within the steps that the test allows."""


class Served(NamedTuple):
    hit_blocks: int
    steps: int


def offloading_config(**changes: Any) -> OffloadingConfig:
    config = OffloadingConfig(
        groups=(OffloadingGroupConfig(tokens_per_block=TOKENS_PER_BLOCK, layer_names=("layer.0",), group_id=0),),
        worker_kv_bytes_per_block=ROW_BYTES,
        enable_kv_cache_events=True,
        extra_config={"cpu_bytes_to_use": 64 * ROW_BYTES},
        engine_id=f"test-{uuid.uuid4().hex}",
        model=OffloadingModelConfig(name="org/model", dtype="bfloat16"),
        cache=OffloadingCacheConfig(tokens_per_hash=TOKENS_PER_BLOCK, blocks_per_chunk=1),
        parallel=OffloadingParallelConfig(
            rank=0,
            data_parallel_index=0,
            data_parallel_rank_local=None,
            is_parallelism_agnostic=False,
            **dict.fromkeys(("world_size", "tp_size", "pp_size", "pcp_size", "dcp_size", "data_parallel_size"), 1),
        ),
        kv_cache_layout="NHD",
    )
    return replace(config, **changes)


def key(number: int, group: int = 0) -> OffloadKey:
    return make_offload_key(hashlib.sha256(str(number).encode()).digest(), group)


def keys(count: int, first: int = 0) -> list[OffloadKey]:
    return [key(number) for number in range(first, first + count)]


def payload(of: OffloadKey) -> bytes:
    return hashlib.sha256(of).digest() * (ROW_BYTES // 32)


def note_positions(context: ReqContext, prefix: Sequence[OffloadKey]) -> None:
    """Note where each chunk of a prompt ends, as vLLM's scheduler does: group by group, in order."""
    ends: dict[int, int] = {}
    for of in prefix:
        group = get_offload_group_idx(of)
        ends[group] = ends.get(group, 0) + TOKENS_PER_BLOCK
        context.set_offload_key_position(of, ends[group])


class Rig:
    def __init__(
        self,
        config_file: Path,
        *,
        chunks: int,
        fs: FileSystem = ON_THREADS,
        config: OffloadingConfig | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        config = config or offloading_config()
        spec = KVTierSpec(config)
        region = SharedOffloadRegion(
            engine_id=config.engine_id,
            num_chunks=chunks,
            rank=None,
            kv_bytes_per_chunk=ROW_BYTES,
            cpu_page_size=ROW_BYTES,
        )
        self.primary = CpuTier(num_chunks=chunks, mmap_region=region)
        spec.region_fd = region.fd
        self.tier: SharedVolumeTier = type("TierUnderTest", (SharedVolumeTier,), {"fs": fs, "stats_seconds": 0.0})(
            offloading_spec=spec,
            primary_kv_view=self.primary.get_kv_memoryview(),
            tier_type="SharedVolumeTier",
            config_file=str(config_file),
            **(options or {}),
        )
        self.tier.open([DECLARED])
        wait_until(lambda: self.is_looking_up, "the worker for lookups is ready")
        self.manager = KVTierManager(self.primary, self.tier)
        self.params: dict[str, Any] | None = None
        """The kv_transfer_params of the requests that follow."""
        self.salt: str | None = None
        """Their cache salt, as the hook notes it; None if no hook did."""
        self._observed: dict[tuple[str, tuple[str, ...]], float] = {}

    @property
    def is_looking_up(self) -> bool:
        """Whether the worker for lookups has started, or cannot."""
        list(self.tier.get_finished_jobs())
        lookups = self.tier.attachment.lookups
        return lookups.is_ready or lookups.is_stuck

    def close(self) -> None:
        self.manager.shutdown()

    def request(self, request_id: str) -> ReqContext:
        context = ReqContext(req_id=request_id, kv_transfer_params=self.params)
        if self.salt is not None:
            context.set_state(Request("salted", [0], SamplingParams(), None, cache_salt=self.salt))
        self.manager.on_new_request(context)
        return context

    def finish(self, context: ReqContext) -> None:
        self.manager.on_request_finished(context)

    def end_step(self, new: Sequence[str] = ()) -> None:
        self.manager.on_schedule_end(ScheduleEndContext(new_req_ids=set(new), preempted_req_ids=set()))

    def settle(self) -> None:
        wait_until(lambda: self.end_step() or not self.manager.has_pending_work(), "the engine has no transfer left")

    def begin_offload(self, wanted: Sequence[OffloadKey], request_id: str = "writer") -> ReqContext:
        """Put blocks into the CPU tier as the GPU would, from where vLLM hands them to the disk tier."""
        context = self.request(request_id)
        note_positions(context, wanted)
        prepared = self.manager.prepare_store(list(wanted), context)
        for stored, row in zip(prepared.keys_to_store, prepared.store_spec.block_ids, strict=True):
            self.row(int(row))[:] = payload(stored)
        if prepared.keys_to_store:
            self.manager.complete_store(prepared.keys_to_store, context)
            self.tier.transfers.catch_up(len(wanted))
        return context

    def offload(self, wanted: Sequence[OffloadKey], request_id: str = "writer") -> None:
        context = self.begin_offload(wanted, request_id)
        self.settle()
        self.finish(context)

    def find_prefix(self, wanted: Sequence[OffloadKey], context: ReqContext) -> int | None:
        """Return the length of the prefix that can be loaded, None while that is not decided: as our scheduler."""
        self.manager.request(context).on_volume.clear()
        found, unknown = self.manager.match_prefix(wanted, context)
        if unknown is not None:
            return None
        if found and not self.manager.decide(context, wanted[:found]).reads:
            found, _ = self.manager.match_prefix(wanted, context)
        return found

    def find(self, wanted: Sequence[OffloadKey], context: ReqContext) -> int | None:
        found = self.find_prefix(wanted, context)
        self.end_step()
        return found

    def poll(self) -> bool:
        self.manager.poll()
        return True

    def serve(
        self, wanted: Sequence[OffloadKey], request_id: str = "reader", *, max_steps: int | None = None
    ) -> Served:
        """Run a request until its prefix is found, load that, and compare every byte of what comes."""
        context = self.request(request_id)
        note_positions(context, wanted)
        steps = 0
        deadline = time.monotonic() + PATIENCE_SECONDS
        found: int | None = None
        load: Load | None = None
        loaded = 0
        while load is None or not load.is_handed_over:
            if load is None and (found := self.find_prefix(wanted, context)) is not None:
                if not found:
                    break
                load = self.begin_load(wanted[:found], context)
            if load is not None:
                loaded += self.take_piece(load)
            steps += 1
            self.end_step()
            if max_steps is not None and steps > max_steps:
                raise UndecidedError(f"{request_id}: not served after {steps} steps")
            if time.monotonic() > deadline:
                raise UndecidedError(f"{request_id}: not served after {PATIENCE_SECONDS} s and {steps} steps")
            # A step of an engine takes a millisecond at least.
            threading.Event().wait(0.001)
        if load is not None:
            self.manager.release_load(request_id)
        self.end_step(new=[request_id])
        self.finish(context)
        self.end_step()
        return Served(loaded, steps)

    def begin_load(self, wanted: Sequence[OffloadKey], context: ReqContext) -> Load:
        """Order a load, as vLLM does when the GPU has blocks for it."""
        self.manager.prepare_load(list(wanted), context)
        load = self.manager.load_of(context.req_id)
        load.aim(GPULoadStoreSpec(list(range(len(wanted))), group_sizes=[len(wanted)], block_indices=[0]), 1)
        return load

    def take_piece(self, load: Load) -> int:
        """Copy what is ready, as the worker does; return how many chunks that were."""
        self.manager.poll()
        if not load.has_piece:
            return 0
        piece = load.take_piece()
        self.manager.copying += len(piece.keys)
        for row, number in zip(piece.source.block_ids, piece.target.block_ids, strict=True):
            assert bytes(self.row(int(row))) == payload(load.keys[number]), "the CPU tier holds other bytes"
        self.manager.complete_load(piece.keys, load.context)
        return len(piece.keys)

    def row(self, number: int) -> memoryview:
        return self.primary.get_kv_memoryview().cast("B")[number * ROW_BYTES : (number + 1) * ROW_BYTES]

    def metric(self, name: str, *labels: str) -> float:
        """Return a metric of the disk tier, summed since the start; 0 if it was never observed."""
        add_up(self.tier.get_stats(), self._observed)
        return self._observed.get((name, labels), 0)


def add_up(stats: Any, observed: dict[tuple[str, tuple[str, ...]], float]) -> None:
    """Add counters to what was observed before, and note what gauges are now."""
    for metric, values in stats.data["data"].items() if stats else ():
        for labels, value in values.items():
            series = (metric, tuple(labels))
            observed[series] = value + (observed.get(series, 0) if (stats.data["types"][metric] == "counter") else 0)


class Rigs:
    """Makes engines on one shared directory, and closes those that were not closed."""

    def __init__(self, directory: Path) -> None:
        self.root = directory / "volume" / DIGEST
        self._directory = directory
        self._made: list[Rig] = []

    def config_file(self, **changes: Any) -> Path:
        config = engine.ConnectorConfig(
            **{
                "tier": "ns/tier",
                "root": str(self.root),
                "digest": DIGEST,
                "identity": {"model_name": "org/model"},
                "io_processes": IO_THREADS,
                "load_deadline_seconds": 20.0,
                **changes,
            }
        )
        path = self._directory / f"{uuid.uuid4().hex}.json"
        path.write_text(engine.encode(config))
        return path

    def permit(self, count: int, *, tenants: Sequence[str] = (), reason: str = "") -> None:
        """Say, as the janitor, how many bytes each engine may write from now on."""
        self.root.parent.mkdir(parents=True, exist_ok=True)
        permit = Permit(uuid.uuid4().hex, 60.0, count, frozenset(tenants), reason)
        (self.root.parent / PERMIT_FILE).write_bytes(encode_permit(permit))

    def live_file(self, mode: str = "ReadWrite", **settings: Any) -> Path:
        """Write live settings for engines that are made afterwards."""
        path = self._directory / f"{uuid.uuid4().hex}.live.json"
        path.write_text(engine.encode_live(mode, **settings))
        return path

    def make(
        self,
        *,
        chunks: int = 64,
        fs: FileSystem | None = None,
        config: OffloadingConfig | None = None,
        options: dict[str, Any] | None = None,
        **changes: Any,
    ) -> Rig:
        """Make an engine; its workers are processes if `io_processes` is given without a file system, and not 0."""
        if changes.get("io_processes") == 0:
            del changes["io_processes"]
        if fs is None:
            fs = LOCAL if "io_processes" in changes else ON_THREADS
        rig = Rig(self.config_file(**changes), chunks=chunks, fs=fs, config=config, options=options)
        self._made.append(rig)
        return rig

    def block_file(self, of: OffloadKey) -> Path:
        name = f"{get_offload_block_hash(of).hex()}_g{get_offload_group_idx(of)}.kvb"
        return next((self.root / "blocks").rglob(name))

    def write(self, wanted: Sequence[OffloadKey], *, clock: Callable[[], int] = time.time_ns) -> None:
        store = BlockStore(self.root, clock=clock)
        for block in wanted:
            store.put(BlockKey(get_offload_block_hash(block), get_offload_group_idx(block)), memoryview(payload(block)))

    def close(self) -> None:
        for rig in self._made:
            rig.close()
