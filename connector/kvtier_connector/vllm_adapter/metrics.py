# SPDX-License-Identifier: Apache-2.0
"""The tier's metrics as data, with the classes that observe them.

vLLM carries them from the scheduler to ``/metrics``, adds its own labels (model, engine), and ends the engine's API
server at the first name that was not declared. So names exist here only, and observing another one fails here. The
prefix is vLLM's because it unregisters its own metrics, and only those, when a second engine starts in one process.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import OffloadingCounterMetadata, OffloadingGaugeMetadata, OffloadingMetricMetadata
from vllm.v1.request import Request


class Metric(NamedTuple):
    """One declared metric. Prometheus appends ``_total`` to the name of a counter."""

    name: str
    documentation: str
    labels: tuple[str, ...] = ()
    is_gauge: bool = False


_gauge = partial(Metric, is_gauge=True)

READ_BYTES = Metric("vllm:kvtier_disk_read_bytes", "Bytes read from the shared volume, headers included.")
LOADED_BLOCK_BYTES = Metric(
    "vllm:kvtier_disk_loaded_block_bytes",
    "Bytes of the blocks read from the shared volume; fewer were read of those that are compressed.",
)
READ_BLOCKS = Metric("vllm:kvtier_disk_read_blocks", "Blocks read from the shared volume and verified.")
READ_SECONDS = Metric("vllm:kvtier_disk_read_seconds", "Time spent reading blocks, summed over threads.")
WRITTEN_BYTES = Metric("vllm:kvtier_disk_written_bytes", "Bytes written to the shared volume, headers included.")
STORED_BLOCK_BYTES = Metric(
    "vllm:kvtier_disk_stored_block_bytes",
    "Bytes of the blocks written to the shared volume; fewer were written of those that were compressed.",
)
WRITTEN_BLOCKS = Metric("vllm:kvtier_disk_written_blocks", "Blocks written to the shared volume.")
WRITE_SECONDS = Metric("vllm:kvtier_disk_write_seconds", "Time spent writing blocks, summed over threads.")
PRESENT_BLOCKS = Metric(
    "vllm:kvtier_disk_present_blocks", "Blocks not written because the shared volume has them already."
)
MISSES = Metric(
    "vllm:kvtier_disk_misses",
    "Blocks that a lookup or a load could not serve, by cause. Of the request: min_tokens (the hit is too short), cost "
    "(computing is quicker), unwanted (its own parameters), tenant (unknown). Of its contents: media (a name of "
    "several pictures, sounds or videos), adapter (its weights are unknown or were replaced), weights (not compared "
    "yet since a reset). Of the engine: release (it compares blocks of another), budget (no room in the CPU tier), "
    "inert, mode, no_workers, shutdown. Of the volume: absent, late_probe (no answer in time), deadline (a load took "
    "too long), stuck (it holds up every worker), breaker (it fails), or the fault of the file.",
    ("cause",),
)
SKIPPED_STORES = Metric(
    "vllm:kvtier_disk_shed_stores",
    "Blocks that were not written, by cause. Tenant, media, adapter, weights, release, inert, mode, no_workers, stuck, "
    "breaker, deadline and shutdown are as for misses. Of the engine: queue_full (too much waits to be written), "
    "min_reuse (too few requests asked for them yet), no_key (no active key to encrypt with). Of the volume: no_permit "
    "(not renewed), no_budget (the permit is used up), no_quota (the tenant's is used up), purged, or its error. "
    "With no_journal, the volume has not taken the engine's journal for a minute.",
    ("cause",),
)
SAVED_SECONDS = Metric(
    "vllm:kvtier_disk_saved_seconds",
    "Seconds of computing that loading from the shared volume made needless, by tenant: for each hit, what a prompt of "
    "that length takes this engine, as measured while serving. Hits before the first measurement do not count.",
    ("tenant",),
)
DRAINED_BLOCKS = Metric(
    "vllm:kvtier_disk_drained_blocks",
    "Blocks whose store was open when the engine was told to end, or began later, by outcome: written or lost. The log "
    "says so, too, since Prometheus may not scrape the engine any more.",
    ("outcome",),
)
ACTIVE = _gauge("vllm:kvtier_disk_active", "1 while the engine uses the shared volume, 0 while it serves without.")
REFUSED = _gauge(
    "vllm:kvtier_disk_refused",
    "1 while the engine serves without the volume because the directory has another identity, by the first field of "
    "tier.json that differs. Or `generation`, or `replaced weights` while the weights are not those of the start.",
    ("field",),
)
RELEASE = _gauge(
    "vllm:kvtier_disk_release",
    "0: the blocks are of this release of vLLM or agree with it. 1: they are compared, and not used. 2: they differ.",
)
KEY_MISSING = _gauge(
    "vllm:kvtier_disk_key_missing",
    "1 while blocks are to be encrypted and there is no active key to do it with, so that none is stored.",
)
STUCK_THREADS = _gauge(
    "vllm:kvtier_disk_stuck_threads", "Processes that the volume holds up for longer than their deadline."
)
IO_PROCESSES = _gauge(
    "vllm:kvtier_disk_io_processes",
    "Processes that read and write blocks. 0 while none could be started or all died again and again: the engine "
    "serves without the volume then, and its log says so once.",
)
LOAD_BREAKER = _gauge(
    "vllm:kvtier_disk_load_breaker", "0 while loads are let through, 1 on trial, 2 while they are not."
)
STORE_BREAKER = _gauge(
    "vllm:kvtier_disk_store_breaker", "0 while stores are let through, 1 on trial, 2 while they are not."
)
MODE = _gauge("vllm:kvtier_disk_mode", "0 in mode ReadWrite, 1 in ReadOnly, 2 in Bypass.")
QUEUED_LOAD_BYTES = _gauge("vllm:kvtier_disk_queued_load_bytes", "Bytes of loads not finished yet.")
QUEUED_STORE_BYTES = _gauge("vllm:kvtier_disk_queued_store_bytes", "Bytes of stores not finished yet.")
QUEUED_JOBS = _gauge("vllm:kvtier_disk_queued_jobs", "Loads and stores not finished yet.")
OLDEST_JOB_SECONDS = _gauge("vllm:kvtier_disk_oldest_job_seconds", "Age of the oldest load or store not finished yet.")
WAITING_REQUESTS = _gauge(
    "vllm:kvtier_disk_waiting_requests", "Requests that wait for room in the CPU tier to be loaded."
)

CHUNK_BYTES = _gauge("vllm:kvtier_chunk_bytes", "Bytes of a chunk: a row of the CPU tier, and a file.")
TOKEN_BYTES = _gauge("vllm:kvtier_token_bytes", "Bytes of a token, over all ranks and KV groups.")

VERDICTS = Metric(
    "vllm:kvtier_disk_verdicts",
    "Requests that found blocks on the shared volume, by decision: load, split (the head was computed meanwhile), "
    "compute (quicker, by both rates), short (fewer tokens than configured).",
    ("verdict",),
)
SPLIT_TOKENS = Metric(
    "vllm:kvtier_disk_split_tokens",
    "Tokens of split hits, by cause: computed (their heads), loaded (their tails), discarded (read, and computed by "
    "then).",
    ("cause",),
)
SPLIT_JOINS = Metric("vllm:kvtier_disk_split_joins", "Split hits whose head met their tail.")
VOLUME_RATE = _gauge(
    "vllm:kvtier_disk_load_tokens_per_second",
    "Tokens a second that the shared volume gave to all requests when it was read last; 0 before that, and when it "
    "hangs.",
)
PREFILL_RATE = _gauge(
    "vllm:kvtier_disk_compute_tokens_per_second",
    "Tokens a second at which the engine computes the beginning of a prompt; 0 before the first.",
)

FIRST_TOKENS = Metric(
    "vllm:kvtier_first_tokens",
    "Requests that got their first token, by the source of the beginning of their prompt: disk (at least in part), "
    "memory (the CPU tier or the GPU), nothing (computed).",
    ("found",),
)
FIRST_TOKEN_SECONDS = Metric(
    "vllm:kvtier_first_token_seconds",
    "Time from the arrival of these requests at the engine to their first token, summed.",
    ("found",),
)
FIRST_TOKEN_PROMPTS = Metric(
    "vllm:kvtier_first_token_prompt_tokens", "Tokens of the prompts of these requests, summed.", ("found",)
)

ASKED_BLOCKS = Metric(
    "vllm:kvtier_asked_blocks",
    "Blocks that requests asked for, wherever they were found, by how many requests asked for them before: 0 to 4, or "
    "5+. Estimated from one block of 16, of the last 131,072 that were asked for.",
    ("before",),
)

HINTS = Metric(
    "vllm:kvtier_request_hints",
    "Requests that asked something of the cache, by what: no_load, no_store, kv.retain.",
    ("hint",),
)
IGNORED_HINTS = Metric(
    "vllm:kvtier_ignored_request_hints",
    "Ignored entries of kv_transfer_params and kv_hints of requests, by cause: key (unknown), value, action (unknown), "
    "version, payload.",
    ("cause",),
)

METRICS = tuple(each for each in tuple(globals().values()) if isinstance(each, Metric))
"""All of the above."""

WRITTEN = "written"
LOST = "lost"

ABSENT = "absent"
COMPUTED, LOADED, DISCARDED = "computed", "loaded", "discarded"
"""Tokens of split hits."""
LATE_PROBE = "late_probe"
STUCK = "stuck"
BUDGET = "budget"
INERT = "inert"
DEADLINE = "deadline"
SHUTDOWN = "shutdown"
BREAKER = "breaker"
NO_TENANT = "tenant"
NO_ADAPTER = "adapter"
NO_MEDIA = "media"
UNWANTED = "unwanted"
NEW_WEIGHTS = "weights"
UNVERIFIED = "release"
BYPASSED = "mode"
QUEUE_FULL = "queue_full"
UNREUSED = "min_reuse"
SLOWER = "cost"
SHORT = "min_tokens"

DISK, MEMORY, NOTHING = "disk", "memory", "nothing"
"""Where the beginning of a prompt came from: the volume, at least in part; the CPU tier or the GPU; or nowhere."""

ASKED_BEFORE = ("0", "1", "2", "3", "4", "5+")

MOST_TENANTS = 200
OTHERS = "(other)"


def definitions() -> dict[str, OffloadingMetricMetadata]:
    """Return the declarations as vLLM wants them."""
    return {
        metric.name: (OffloadingGaugeMetadata if metric.is_gauge else OffloadingCounterMetadata)(
            documentation=metric.documentation, labelnames=metric.labels
        )
        for metric in METRICS
    }


_LABELS = {metric.name: len(metric.labels) for metric in METRICS}


class Stats:
    """Observations since the last `take`. Scheduler thread only."""

    def __init__(self) -> None:
        """Start empty."""
        self._stats = OffloadingConnectorStats()
        self._counts: defaultdict[tuple[str, tuple[str, ...]], float] = defaultdict(float)
        """By name and labels, what the counters grew by: vLLM's own call takes as long as reading a chunk in."""
        self._tenants: set[str] = set()

    def count(self, metric: Metric, amount: float = 1, *, cause: str | None = None) -> None:
        """Add to a counter."""
        if amount:
            self._counts[self._checked(metric, cause), () if cause is None else (cause,)] += amount

    def count_saved(self, tenant: str, seconds: float) -> None:
        """Add the seconds of computing that a hit of a tenant saved; 0 is nothing, and makes no label.

        A label of a metric stays for as long as the engine runs. So tenants beyond `MOST_TENANTS` are counted together,
        as `OTHERS`, which is no tenant's name.
        """
        if seconds and tenant not in self._tenants and len(self._tenants) >= MOST_TENANTS:
            tenant = OTHERS
        elif seconds:
            self._tenants.add(tenant)
        self.count(SAVED_SECONDS, seconds, cause=tenant)

    def set(self, metric: Metric, value: float, *, label: str | None = None) -> None:
        """Set a gauge."""
        self._stats.set_gauge(self._checked(metric, label), value, () if label is None else (label,))

    def take(self) -> OffloadingConnectorStats:
        """Return the observations and start over."""
        taken, self._stats = self._stats, OffloadingConnectorStats()
        counts, self._counts = self._counts, defaultdict(float)
        for (name, labels), amount in counts.items():
            taken.increase_counter(name, amount, labels)
        return taken

    @property
    def has_counted(self) -> bool:
        """True if a counter grew since the last `take`."""
        return bool(self._counts)

    @staticmethod
    def _checked(metric: Metric, label: str | None) -> str:
        if _LABELS.get(metric.name) != (label is not None):
            raise ValueError(f"{metric.name}: declare it in METRICS, with the labels it is observed with")
        return metric.name


class FirstTokens:
    """The requests of one engine that have not answered yet. Scheduler thread only.

    The scheduler sees a first token when it looks at its requests in the step after, or when one ends. The time runs
    from the request's arrival at the engine, so waiting for room and for the volume counts, too. A request that has
    answered costs a step nothing.
    """

    def __init__(self, stats: Stats, clock: Callable[[], float] = time.time) -> None:
        """Store the counters; the clock is the one that vLLM stamps arrivals with."""
        self._stats = stats
        self._clock = clock
        self._waiting: dict[str, tuple[Request, str]] = {}

    def begin(self, request: Request, found: str) -> None:
        """Note that a request got its blocks; after a load, or a preemption, it gets more, and what was found stays."""
        if not request.num_output_tokens:
            _, before = self._waiting.get(request.request_id, (request, NOTHING))
            self._waiting[request.request_id] = request, found if before == NOTHING else before

    def look(self) -> None:
        """Count those that have answered since the last step."""
        for name in [name for name, (request, _) in self._waiting.items() if request.num_output_tokens]:
            self.end(name)

    def end(self, name: str) -> None:
        """Forget a request, and count it if it has answered."""
        request, found = self._waiting.pop(name, (None, NOTHING))
        if request is None or not request.num_output_tokens:
            return
        self._stats.count(FIRST_TOKENS, cause=found)
        self._stats.count(FIRST_TOKEN_SECONDS, max(0.0, self._clock() - request.arrival_time), cause=found)
        self._stats.count(FIRST_TOKEN_PROMPTS, request.num_prompt_tokens, cause=found)
