# SPDX-License-Identifier: Apache-2.0
"""One directory on the volume as an engine uses it, with the movers of its blocks: an engine leaves it as a whole.

Made and left by the scheduler's thread. What is left is closed on a thread of its own, which a volume that hangs may
hold up.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.kv_offload.base import OffloadingSpec, OffloadKey, get_offload_group_idx

from kvtier_connector.contract import MUST_BE_KNOWN, ConnectorConfig
from kvtier_connector.fingerprints.facts import engine_facts
from kvtier_connector.fingerprints.packing import Declared
from kvtier_connector.fingerprints.weights import Weights, can_change_unseen, join
from kvtier_connector.movers.engine import Movers
from kvtier_connector.movers.mover import MoversSettings
from kvtier_connector.movers.rows import Region
from kvtier_connector.movers.sizing import FEWEST
from kvtier_connector.movers.tasks import MOST_PROBED, Lane, Task
from kvtier_connector.store.breaker import Direction, State
from kvtier_connector.store.fs import FileSystem
from kvtier_connector.store.layout import BlockKey, Home
from kvtier_connector.store.mode import Mode
from kvtier_connector.tier import metrics
from kvtier_connector.tier.requests import TierRequest
from kvtier_connector.tier.transfers import Parts, Transfers
from kvtier_connector.tier.volume import Volume

logger = init_logger("vllm.kvtier.site")

CLOSE_WAIT_SECONDS = 5.0
RETRY_SECONDS = 1.0
"""After which a directory that there was no room for is tried again."""
PROBE_DEADLINE_SECONDS = 2.0
"""A probe is a few system calls; a volume that needs longer for them is slower than computing."""

_NO_PREFIX = -1
"""Stands for the group of chunks that are no prefix."""
_STATES = {State.CLOSED: 0, State.HALF_OPEN: 1, State.OPEN: 2}
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


class Site:
    """See the module."""

    def __init__(self, config: ConnectorConfig, parts: Parts, fs: FileSystem, *, generation: str) -> None:
        """Prepare; `volume.start` and `movers.start` begin."""
        self._parts = parts
        self.volume = Volume(config, fs, generation=generation)
        self.store = self.volume.store
        rows = parts.rows
        self.movers = Movers(
            _movers_settings(config),
            store=self.store,
            breaker=parts.breaker,
            rows=rows.view,
            regions=() if rows.fd is None else (Region(rows.fd, 0, rows.number),),
            fs=fs,
        )
        self.transfers = Transfers(self.movers, self.store, parts)
        self.probes = Probes()

    def observe(self, now: float, *, waiting: int) -> None:
        """Set the metrics that change without an event; `waiting` requests wait for room in the CPU tier."""
        stats, volume, transfers, movers = self._parts.stats, self.volume, self.transfers, self.movers
        breaker, admission, row_bytes = self._parts.breaker, self._parts.admission, self._parts.rows.length
        stats.set(metrics.ACTIVE, int(volume.is_readable))
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


class Sites:
    """The directories that an engine uses, one after the other: another one when its weights were replaced."""

    def __init__(self, config: ConnectorConfig, parts: Parts, fs: FileSystem, *, generation: str) -> None:
        """Prepare the generation's own directory; `open` begins."""
        self._config = config
        self._parts = parts
        self._fs = fs
        self._generation = generation
        self._facts: dict[str, Any] = {}
        self._left: list[threading.Thread] = []
        self._problem = ""
        """Why the directory could not be left the last time."""
        self._next_try = 0.0
        self._epoch = ""
        """Of the weights that the directory in use is of."""
        self.weights = Weights(None, is_shared=True)
        self.here = Site(config, parts, fs, generation=generation)
        """The one in use."""

    def open(self, spec: OffloadingSpec, declared: Sequence[Declared], wait_seconds: float) -> None:
        """Begin to use a directory, and wait this long at most for the volume's first answer."""
        config: VllmConfig | None = getattr(spec, "engine_config", None)
        before = self.weights
        self.weights = Weights(join([each.weights for each in declared]), is_shared=not can_change_unseen(config))
        if before.is_doubted:
            # What was declared is of the start, and they may have been replaced since.
            self.weights.doubt(is_clean=before.is_clean)
        revision = str(self._config.identity.get("model_revision", "main"))
        self._facts = engine_facts(spec, declared, bytes_per_chunk=self._parts.rows.length, revision=revision)
        if self.weights.epoch:
            self._move()
        self._start(wait_seconds)

    def settle(self, found: Sequence[str | None]) -> bool:
        """Take in which weights the workers have found; return whether that leads to another directory."""
        self.weights.settle(join(found))
        return self.follow()

    @property
    def is_elsewhere(self) -> bool:
        """Whether the directory in use is that of other weights, for want of room for the movers of theirs."""
        return self.weights.epoch != self._epoch

    def follow(self) -> bool:
        """Go to the directory of the weights, if it is another one; return whether that was possible."""
        if not self.is_elsewhere or time.monotonic() < self._next_try:
            return False
        try:
            self._move()
        except OSError as error:
            if self._problem != str(error):
                logger.error("kvtier %s: no room for other weights' directory: %s", self._config.tier, error)  # noqa: TRY400 - no defect of ours
            self._problem = str(error)
            # To try takes milliseconds, which each step would wait for.
            self._next_try = time.monotonic() + RETRY_SECONDS
            return False
        self._problem = ""
        logger.warning("kvtier %s: other weights than before: blocks go to %s", self._config.tier, self._name)
        self._start(0.0)
        return True

    def close(self) -> None:
        """Stop within seconds."""
        self.here.close()
        for thread in self._left:
            thread.join(CLOSE_WAIT_SECONDS)

    @property
    def _name(self) -> str:
        return str(Home(self._config.digest, self.weights.epoch))

    def _move(self) -> None:
        """Leave the directory for the one of these weights; raise OSError where there is no room for its movers."""
        root = f"{self._config.root.rstrip('/').rpartition('/')[0]}/{self._name}"
        config = replace(self._config, digest=self._name, root=root)
        # One that was started for another generation is refused with any weights.
        generation = "" if self._generation == self._config.digest else self._generation
        left, self.here = self.here, Site(config, self._parts, self._fs, generation=generation)
        self._epoch = self.weights.epoch
        leaving = threading.Thread(target=left.close, name="kvtier-leaving", daemon=True)
        leaving.start()
        if left.volume.refused_field:
            # A gauge stays as it was set last.
            self._parts.stats.set(metrics.REFUSED, 0, label=left.volume.refused_field)
        self._left = [*(thread for thread in self._left if thread.is_alive()), leaving]
        self.here.transfers.take_over(left.transfers)

    def _start(self, wait_seconds: float) -> None:
        self.here.movers.start()
        claimed = {**self._config.identity, **self._facts, "engine.epoch": self.weights.epoch}
        if self.weights.is_mixed:
            # What the GPU holds is of several, so nobody can say of which a block is.
            claimed.update(dict.fromkeys(MUST_BE_KNOWN))
        self.here.volume.start(claimed, wait_seconds)


def _movers_settings(config: ConnectorConfig) -> MoversSettings:
    return MoversSettings(
        root=config.root,
        direct=config.direct_io,
        keys_dir=config.keys_dir,
        compression=config.compression,
        processes=config.io_threads if config.io_processes is None else config.io_processes,
        first_processes=max(FEWEST, len(os.sched_getaffinity(0))) if config.io_processes is None else 0,
        threads=config.io_threads,
        deadline_seconds=config.load_deadline_seconds,
        probe_seconds=min(PROBE_DEADLINE_SECONDS, config.load_deadline_seconds),
    )
