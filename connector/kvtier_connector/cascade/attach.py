# SPDX-License-Identifier: Apache-2.0
"""An engine's attachment to its directory on the volume: the block store, the movers, and the state of the weights.

The scheduler's thread makes, uses and closes it.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from vllm.logger import init_logger
from vllm.v1.kv_offload.base import OffloadingSpec, OffloadKey, get_offload_group_idx

from kvtier_connector.cascade.requests import TierRequest
from kvtier_connector.cascade.transfers import Parts, Transfers
from kvtier_connector.cascade.volume import Volume
from kvtier_connector.contract.engine import MOST_DEFAULT_IO_PROCESSES, REPLACED_WEIGHTS, ConnectorConfig
from kvtier_connector.io_workers.buffers import Region
from kvtier_connector.io_workers.pool import WorkerPool
from kvtier_connector.io_workers.supervisor import FEWEST
from kvtier_connector.io_workers.tasks import MOST_PROBED, Lane, Task
from kvtier_connector.io_workers.worker import PoolSettings
from kvtier_connector.store.fs import FileSystem
from kvtier_connector.store.health import CircuitState, Direction
from kvtier_connector.store.layout import MAX_EPOCH_CHARACTERS, BlockKey, Home
from kvtier_connector.store.runtime_settings import Mode
from kvtier_connector.vllm_adapter import metrics
from kvtier_connector.vllm_adapter.fingerprint import Declared, engine_facts

logger = init_logger("vllm.kvtier.attachment")

CLOSE_WAIT_SECONDS = 5.0
PROBE_DEADLINE_SECONDS = 2.0
"""A probe is a few system calls; a volume that needs longer for them is slower than computing."""

_WEIGHTS = "engine.weights"
_NO_PREFIX = -1
"""Stands for the group of chunks that are no prefix."""
_STATES = {CircuitState.CLOSED: 0, CircuitState.HALF_OPEN: 1, CircuitState.OPEN: 2}
_MODES = {Mode.READ_WRITE: 0, Mode.READ_ONLY: 1, Mode.BYPASS: 2}


class Probes:
    """Questions to the volume about chunks of which the index cannot tell yet, and who waits for the answers.

    Each question is of one request, and of one prefix of it where it is about one: what follows a chunk of a prefix
    that is not there need not be looked for, and that says nothing of other requests, nor of the windows of a prompt,
    which vLLM looks for from its end.
    """

    def __init__(self) -> None:
        """Start with none."""
        self._waiting: dict[OffloadKey, list[TierRequest]] = {}
        self._unsent: dict[tuple[TierRequest, int], list[tuple[OffloadKey, BlockKey]]] = {}
        self._sent: dict[int, tuple[OffloadKey, ...]] = {}

    @property
    def asked(self) -> Mapping[OffloadKey, object]:
        """The chunks that are asked about."""
        return self._waiting

    @property
    def sent(self) -> Mapping[int, object]:
        """The movers' tasks that have not ended."""
        return self._sent

    def join(self, key: OffloadKey, request: TierRequest) -> bool:
        """Have a request wait for the answer about a chunk; False if nobody asks about it."""
        if (waiting := self._waiting.get(key)) is None:
            return False
        if request not in waiting:
            waiting.append(request)
        return True

    def ask(self, key: OffloadKey, name: BlockKey, request: TierRequest, *, is_prefix: bool) -> None:
        """Ask about a chunk with this step; `is_prefix` if those of its group are asked about in their order."""
        self._waiting[key] = [request]
        group = get_offload_group_idx(key) if is_prefix else _NO_PREFIX
        self._unsent.setdefault((request, group), []).append((key, name))

    def send(self, number: Callable[[], int]) -> list[tuple[int, Task]]:
        """Return the questions of this step for the movers; `number` makes one that no other task has."""
        tasks = []
        for (_, group), wanted in self._unsent.items():
            for first in range(0, len(wanted), MOST_PROBED):
                batch = wanted[first : first + MOST_PROBED]
                task = number()
                self._sent[task] = tuple(key for key, _ in batch)
                names = tuple(name for _, name in batch)
                tasks.append((task, Task(Lane.PROBE, names, is_prefix=group != _NO_PREFIX)))
        self._unsent.clear()
        return tasks

    def end(self, task: int) -> list[tuple[OffloadKey, list[TierRequest]]]:
        """Return the chunks that a task asked about, each with the requests that wait for the answer."""
        return [(key, self._waiting.pop(key)) for key in self._sent.pop(task)]


class Attachment:
    """See the module."""

    def __init__(self, config: ConnectorConfig, parts: Parts, fs: FileSystem, *, generation: str) -> None:
        """Prepare the generation's directory; `open` begins to use it."""
        self._config, self._parts, self._fs, self._generation = config, parts, fs, generation
        self.is_current = True
        """True while the weights are those that the engine started with: the names of blocks stand for them."""
        self._is_clean = False
        """True if the last reset of the caches left nothing of earlier weights on the GPU."""
        self._attach(config)

    def _attach(self, config: ConnectorConfig) -> None:
        self.volume = Volume(config, self._fs, generation=self._generation)
        self.store = self.volume.store
        rows = self._parts.rows
        self.movers = WorkerPool(
            _pool_settings(config),
            store=self.store,
            breaker=self._parts.breaker,
            rows=rows.view,
            regions=() if rows.fd is None else (Region(rows.fd, 0, rows.number),),
            fs=self._fs,
        )
        self.transfers = Transfers(self.movers, self.store, self._parts)
        self.probes = Probes()

    def open(self, spec: OffloadingSpec, declared: Sequence[Declared], wait_seconds: float) -> None:
        """Begin to use the directory, and wait this long at most for the volume's first answer.

        Weights that neither files nor a digest identify get a directory that no other engine uses.
        """
        config = self._config
        revision = str(config.identity.get("model_revision", "main"))
        facts = engine_facts(spec, declared, bytes_per_chunk=self._parts.rows.length, revision=revision)
        if facts[_WEIGHTS] is None and self._generation in {"", config.digest}:
            alone = f"p{uuid.uuid4().hex}"[:MAX_EPOCH_CHARACTERS]
            name = str(Home(config.digest, alone))
            logger.warning(
                "kvtier %s: neither files nor a digest identify the weights of this engine: its blocks lie in %s, "
                "which no other engine reads",
                config.tier,
                name,
            )
            facts[_WEIGHTS], self._generation = alone, ""
            self.movers.close(0.0)
            self._attach(replace(config, digest=name, root=f"{config.root.rstrip('/').rpartition('/')[0]}/{name}"))
        self.movers.start()
        self.volume.start({**config.identity, **facts}, wait_seconds)

    def note_reset(self, *, is_clean: bool) -> None:
        """Note a reset of the caches; `is_clean` is whether it left nothing on the GPU."""
        self._is_clean = is_clean

    def note_weights(self, *, is_original: bool) -> None:
        """Take in a comparison of the weights by a worker.

        The engine comes back only after a comparison of all weights that follows a clean reset: the GPU and the CPU
        tier may hold blocks of other weights until then.
        """
        if not is_original and self.is_current:
            self.is_current = False
            logger.error(
                "kvtier %s: the weights of this engine were replaced. It loads and stores no blocks until it restarts, "
                "or has its first weights again after reset_prefix_cache(reset_running_requests=True, "
                "reset_connector=True)",
                self._config.tier,
            )

    def note_all_weights(self, *, are_original: bool) -> None:
        """Take in a comparison of all weights by all workers, the first one after a reset."""
        self.note_weights(is_original=are_original)
        if are_original and not self.is_current and self._is_clean:
            self.is_current = True
            # A gauge stays as it was set last.
            self._parts.stats.set(metrics.REFUSED, 0, label=REPLACED_WEIGHTS)
            logger.warning("kvtier %s: the weights are those of the start again: blocks are used", self._config.tier)

    def observe(self, now: float, *, waiting: int) -> None:
        """Set the metrics that change without an event; `waiting` requests wait for room in the CPU tier."""
        stats, volume, transfers, movers = self._parts.stats, self.volume, self.transfers, self.movers
        breaker, admission, row_bytes = self._parts.breaker, self._parts.admission, self._parts.rows.length
        stats.set(metrics.ACTIVE, int(volume.is_readable and self.is_current and movers.is_usable))
        if not self.is_current:
            stats.set(metrics.REFUSED, 1, label=REPLACED_WEIGHTS)
        if volume.refused_field:
            stats.set(metrics.REFUSED, 1, label=volume.refused_field)
        stats.set(metrics.KEY_MISSING, int(not volume.has_key))
        stats.set(metrics.LOAD_BREAKER, _STATES[breaker.view(Direction.LOAD).state])
        stats.set(metrics.STORE_BREAKER, _STATES[breaker.view(Direction.STORE).state])
        stats.set(metrics.MODE, _MODES[volume.mode])
        stats.set(metrics.KNOWN_BLOCKS, self.store.known_blocks)
        if volume.is_counted:
            stats.set(metrics.USED_BYTES, self.store.usage_bytes())
        counts = movers.counts()
        stats.set(metrics.STUCK_THREADS, counts.stuck)
        stats.set(metrics.IO_PROCESSES, counts.processes)
        stats.set(metrics.QUEUED_LOAD_BYTES, transfers.loading * row_bytes)
        stats.set(metrics.QUEUED_STORE_BYTES, transfers.storing * row_bytes)
        stats.set(metrics.QUEUED_JOBS, len(transfers))
        began = transfers.oldest_began
        stats.set(metrics.OLDEST_JOB_SECONDS, 0.0 if began is None else now - began)
        stats.set(metrics.WAITING_REQUESTS, waiting)
        stats.set(metrics.LOAD_PACE, admission.load_tokens_per_second)
        stats.set(metrics.COMPUTE_PACE, admission.compute_tokens_per_second)
        stats.set(metrics.BREAK_EVEN_TOKENS, admission.break_even_tokens)

    def close(self) -> None:
        """Stop within seconds, whatever the volume does: a mover that hangs is left behind and touches nothing."""
        deadline = time.monotonic() + CLOSE_WAIT_SECONDS
        # Both are told first, and waited for together: on a volume that hangs each takes all of that time.
        self.volume.close(0.0)
        is_ended = self.movers.close(CLOSE_WAIT_SECONDS)
        self.volume.close(deadline - time.monotonic())
        if not is_ended:
            logger.warning("Some I/O threads or processes still wait for the volume and are left behind")


def _pool_settings(config: ConnectorConfig) -> PoolSettings:
    return PoolSettings(
        root=config.root,
        direct=config.direct_io,
        keys_dir=config.keys_dir,
        compression=config.compression,
        workers=MOST_DEFAULT_IO_PROCESSES if config.io_processes is None else config.io_processes,
        first_workers=max(FEWEST, len(os.sched_getaffinity(0))) if config.io_processes is None else 0,
        deadline_seconds=config.load_deadline_seconds,
        probe_seconds=min(PROBE_DEADLINE_SECONDS, config.load_deadline_seconds),
    )
