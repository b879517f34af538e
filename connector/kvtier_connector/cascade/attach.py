# SPDX-License-Identifier: Apache-2.0
"""An engine's attachment to its directory on the volume: who may use it now, its I/O workers, and what it tells others.

Opening never holds up the engine: until the directory is claimed, and for ever if it belongs to another model or
layout, every lookup is a miss. A new engine gets no requests until one of both is known, or the volume has not answered
for the time of grace.

Two threads of their own wait for files, since each may hang. One claims the directory. When the engine looks blocks up
or stores some, this thread checks that the directory is still the same, reads the store permit and appends the journal.
An engine at rest touches its journal every ten minutes and asks the volume for nothing. The other thread reads the live
settings, which matter most while the volume hangs. The scheduler's thread makes, uses and closes an attachment.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from vllm.logger import init_logger
from vllm.v1.kv_offload.base import OffloadingSpec

from kvtier_connector.cascade.memory import BlockMemory
from kvtier_connector.contract import engine
from kvtier_connector.contract.engine import CONFIG_FILE, MOST_DEFAULT_IO_PROCESSES, REPLACED_WEIGHTS, ConnectorConfig
from kvtier_connector.contract.errors import ConfigInvalid, IdentityMismatch, StoreUnavailable
from kvtier_connector.io_workers.buffers import Region, shape_of_rows
from kvtier_connector.io_workers.lookups import LookupWorker
from kvtier_connector.io_workers.pool import FEWEST, WorkerPool
from kvtier_connector.io_workers.worker import PoolSettings
from kvtier_connector.pod_tools.ready import Phase, StartupReport
from kvtier_connector.store import identity
from kvtier_connector.store.blockstore import StoreFault
from kvtier_connector.store.crypto import Keyring
from kvtier_connector.store.fs import FileSystem, measure_round_trip
from kvtier_connector.store.health import Breaker, CircuitState, Direction
from kvtier_connector.store.journal import JournalWriter, Op
from kvtier_connector.store.layout import MAX_EPOCH_CHARACTERS, NO_LINEAGE, BlockKey, Home, Lineage
from kvtier_connector.store.permit import PERMIT_FILE, Mode, RuntimeSettings, StorePermit
from kvtier_connector.vllm_adapter import metrics
from kvtier_connector.vllm_adapter.fingerprint import Declared, engine_facts

logger = init_logger("vllm.kvtier.attachment")

CLOSE_WAIT_SECONDS = 5.0
RETRY_SECONDS = 30.0
LIVE_SECONDS = 5.0
CLOCK_SECONDS = 60.0
"""The time of the volume is read so often, at most."""
REST_SECONDS = 600.0
"""An engine at rest shows that it is there so often: generations that no engine uses are removed."""
UNREADABLE = "tier.json"
"""Stands for a field where the whole description of the directory cannot be understood."""
GENERATION = "generation"
"""Stands for a field where the settings are not those that the engine was started for."""
BYPASSED = "the mode is Bypass"

_WEIGHTS = "engine.weights"
_STATES = {CircuitState.CLOSED: 0, CircuitState.HALF_OPEN: 1, CircuitState.OPEN: 2}
_MODES = {Mode.READ_WRITE: 0, Mode.READ_ONLY: 1, Mode.BYPASS: 2}


def read_config(path: str) -> ConnectorConfig:
    """Return the settings that the operator wrote, from the file that is mounted into the pod.

    Raises:
        ConfigInvalid: the file cannot be read, or what it says cannot be used.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigInvalid(f"config_file {path}: cannot be read: {error}") from error
    return engine.decode(text)


class Attachment:
    """See the module.

    The thread that opens the directory alone writes `is_readable`, `refusal` and `refused_field`; any thread reads
    them. `memory`, `workers` and `lookups` are the scheduler's.
    """

    def __init__(  # noqa: PLR0913 - keywords
        self,
        config: ConnectorConfig,
        *,
        rows: memoryview,
        rows_fd: int | None,
        breaker: Breaker,
        stats: metrics.Stats,
        fs: FileSystem,
        generation: str = "",
        image: str = "",
    ) -> None:
        """Prepare the directory; `open` begins to use it.

        Args:
            config: The settings of the tier.
            rows: The CPU tier, a row for each chunk.
            rows_fd: The file behind them, if other processes can map it.
            breaker: Stops what fails.
            stats: Where metrics are counted.
            fs: The system calls.
            generation: Digest of the blocks that the engine was started for; empty where it was not told.
            image: The engine's image; empty where that was not told.
        """
        self._fs, self._breaker, self._stats = fs, breaker, stats
        self._rows, self._rows_fd = rows, rows_fd
        self._generation, self._image = generation, image
        self.keyring = Keyring(config.keys_dir) if config.keys_dir else None
        self.memory = BlockMemory()
        self.is_current = True
        """True while the weights are those that the engine started with: the names of blocks stand for them."""
        self._look_seconds = config.refresh_seconds
        self._live_seconds = min(LIVE_SECONDS, config.refresh_seconds)
        self._live_file = RuntimeSettings(config.live_file, seconds=self._live_seconds)
        self._problems: dict[str, str] = {}
        """By topic, the message that was logged last."""
        self.is_readable = False
        """Whether the directory is known to hold blocks of this engine."""
        self.refusal = "the volume has not answered yet"
        """Why the volume is not readable; empty if it is."""
        self.refused_field = ""
        """By which field of its identity the directory belongs to another model or layout; empty if it does not."""
        self.looked_at = -math.inf
        """When the directory was last known to be the same: a worker that saw another one since names no block."""
        self._is_replaced = False
        """Whether the directory was removed or made anew since the scheduler's thread last asked."""
        self._timed_at = -math.inf
        """When the journal was written whose modification time the volume's clock was set by."""
        self._decided = threading.Event()
        self._closed = threading.Event()
        self._has_work = threading.Event()
        self._prepare(config)
        self._report = StartupReport(config.state_dir, config.tier)
        self._patience = threading.Timer(config.attach_grace_seconds, self._give_up)
        self._patience.name, self._patience.daemon = "kvtier-patience", True
        work: dict[str, Callable[[], None]] = {"volume": self._run}
        if config.live_file or config.keys_dir:
            work["live"] = self._follow_live
        self._threads = [
            threading.Thread(target=self._guard, args=(action,), name=f"kvtier-{name}", daemon=True)
            for name, action in work.items()
        ]

    def _prepare(self, config: ConnectorConfig) -> None:
        """Make the parts of a directory; another directory gets new ones."""
        root = Path(config.root)
        self._config, settings = config, _pool_settings(config)
        self._journal = JournalWriter(root, fs=self._fs)
        self._permit = StorePermit(str(root.parent / PERMIT_FILE), fs=self._fs)
        self._permit.is_needed = False
        row_count, _ = shape_of_rows(self._rows)
        self.workers = WorkerPool(
            settings,
            permit=self._permit,
            keyring=self.keyring,
            breaker=self._breaker,
            rows=self._rows,
            regions=() if self._rows_fd is None else (Region(self._rows_fd, 0, row_count),),
            fs=self._fs,
        )
        """The processes that move blocks."""
        self.lookups = LookupWorker(settings, fs=self._fs)
        """The process that looks blocks up."""

    def open(self, spec: OffloadingSpec, declared: Sequence[Declared], wait_seconds: float) -> None:
        """Begin to use the directory, and wait this long at most for the volume's first answer.

        Weights that neither files nor a digest identify get a directory that no other engine uses.
        """
        config, fs = self._config, self._fs
        revision = str(config.identity.get("model_revision", "main"))
        facts = engine_facts(spec, declared, bytes_per_chunk=shape_of_rows(self._rows)[1], revision=revision)
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
            self.workers.close(0.0)
            config = replace(config, digest=name, root=f"{config.root.rstrip('/').rpartition('/')[0]}/{name}")
            self._prepare(config)
        self.workers.start()
        self.lookups.start()
        self._facts = facts
        self._claim = identity.RootClaim(Path(config.root), {**config.identity, **facts}, config.digest, fs=fs)
        # Before the engine can answer a request, so that the startup probe waits for all engines of the pod.
        self._tell(lambda: self._report.begin(self.refusal))
        self._patience.start()
        for thread in self._threads:
            thread.start()
        if not self._decided.wait(wait_seconds):
            logger.warning(
                "kvtier %s: %s is not open after %.0f s; serving without the disk tier until then",
                config.tier,
                config.root,
                wait_seconds,
            )

    def close(self) -> None:
        """Stop within seconds, whatever the volume does: a worker that hangs is left behind and touches nothing."""
        deadline = time.monotonic() + CLOSE_WAIT_SECONDS
        self._closed.set()
        self._has_work.set()
        self._patience.cancel()
        self._tell(self._report.end)
        self.lookups.close()
        if not self.workers.close(CLOSE_WAIT_SECONDS):
            logger.warning("Some I/O workers still wait for the volume and are left behind")
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, deadline - time.monotonic()))

    @property
    def mode(self) -> Mode:
        """The permitted use of the volume, as the live settings say."""
        return self._live_file.mode

    def why_not(self, direction: Direction, *, is_stuck: bool) -> str | None:
        """Return why no chunk is moved that way at present, None if chunks are; `is_stuck`: none would start."""
        is_store = direction is Direction.STORE
        if not (self.mode.may_store if is_store else self.mode.may_load):
            return metrics.BYPASSED
        if not self.is_readable:
            return metrics.INERT
        if not self.is_current:
            return metrics.NEW_WEIGHTS
        if is_store and self.keyring is not None and not self.keyring.is_usable:
            return StoreFault.NO_KEY.value
        if is_store and (refusal := self._permit.refusal()) is not None:
            return refusal.value
        if is_stuck:
            return metrics.STUCK
        return None if self._breaker.has_room(direction) else metrics.BREAKER

    def note_use(self) -> None:
        """Have the directory looked at soon: the engine looks blocks up or stores some."""
        self._has_work.set()

    def tell_janitor(
        self, op: Op, key: BlockKey, payload_bytes: int, lineage: Lineage = NO_LINEAGE, *, ahead_seconds: float = 0.0
    ) -> None:
        """Note for the janitor what was done; only memory is touched, and a journal is appended soon."""
        self._journal.append(op, key, payload_bytes, lineage, ahead_seconds=ahead_seconds)
        self.note_use()

    def look_after(self) -> None:
        """Take over what the other thread found out; call it in each step."""
        if self._is_replaced:
            self._is_replaced = False
            self.memory.clear()

    def note_weights(self, *, is_original: bool, may_return: bool = False) -> None:
        """Take in a comparison of the weights by a worker.

        Args:
            is_original: True if the weights are those of the start.
            may_return: True if all workers compared all weights after a reset that left nothing on the GPU. The GPU and
                the CPU tier may hold blocks of other weights until then.
        """
        if not is_original and self.is_current:
            self.is_current = False
            logger.error(
                "kvtier %s: the weights of this engine were replaced. It loads and stores no blocks until it restarts, "
                "or has its first weights again after reset_prefix_cache(reset_running_requests=True, "
                "reset_connector=True)",
                self._config.tier,
            )
        elif is_original and may_return and not self.is_current:
            self.is_current = True
            # A gauge stays as it was set last.
            self._stats.set(metrics.REFUSED, 0, label=REPLACED_WEIGHTS)
            logger.warning("kvtier %s: the weights are those of the start again: blocks are used", self._config.tier)

    def observe(self) -> None:
        """Set the metrics that change without an event."""
        stats = self._stats
        stats.set(metrics.ACTIVE, int(self.is_readable and self.is_current and self.workers.is_usable))
        if not self.is_current:
            stats.set(metrics.REFUSED, 1, label=REPLACED_WEIGHTS)
        if self.refused_field:
            stats.set(metrics.REFUSED, 1, label=self.refused_field)
        stats.set(metrics.KEY_MISSING, int(self.keyring is not None and not self.keyring.is_usable))
        stats.set(metrics.LOAD_BREAKER, _STATES[self._breaker.state(Direction.LOAD)])
        stats.set(metrics.STORE_BREAKER, _STATES[self._breaker.state(Direction.STORE)])
        stats.set(metrics.MODE, _MODES[self.mode])
        counts = self.workers.counts()
        stats.set(metrics.STUCK_THREADS, counts.stuck)
        stats.set(metrics.IO_PROCESSES, counts.processes)

    def _guard(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception:
            # The edge of the thread: without it the tier would stay as it is and no log would tell why.
            logger.exception("kvtier %s: the disk tier is not kept up to date any more", self._config.tier)
        finally:
            self._decided.set()

    def _run(self) -> None:
        self._refresh_live()
        if not self._attach():
            return
        self._look()
        self._decided.set()
        while not self._closed.is_set():
            if is_used := self._has_work.wait(REST_SECONDS):
                self._has_work.clear()
            if self.mode.may_load:
                (self._look if is_used else self._show_life)()
            self._closed.wait(self._look_seconds)
        if self.is_readable and self.mode.may_load:
            # The last blocks are worth telling, too.
            self._append_journal()

    def _look(self) -> None:
        """Look at the directory, read the permit, and append the journal."""
        if self.is_readable:
            self._stay_claimed()
        if self.is_readable:
            self._append_journal()
            self._refresh_permit()

    def _refresh_permit(self) -> None:
        permit = self._permit
        if not permit.is_needed or not self.mode.may_store:
            return
        before = permit.reason
        permit.refresh()
        if permit.reason != before:
            logger.info("kvtier %s: %s", self._config.tier, permit.reason or "the janitor permits stores")

    def _append_journal(self) -> None:
        if not self.mode.may_store:
            self._show_life()
            return
        problem = ""
        try:
            self._journal.flush()
        except StoreUnavailable as error:
            problem = str(error)
        self._permit.untold_since = self._journal.refused_at
        self._complain("journal", problem, "kvtier %s: the janitor is not told of blocks, and soon none is stored: %s")
        self._take_time()

    def _show_life(self) -> None:
        self._journal.show_life()
        self._take_time()

    def _take_time(self) -> None:
        """Read what time it is on the volume from the journal, if that was written just now."""
        written_at = self._journal.written_at
        if not self._permit.is_needed or written_at - self._timed_at < CLOCK_SECONDS:
            return
        if (modified_ns := self._journal.ask_modified_ns()) is not None:
            self._timed_at = written_at
            self._permit.set_time(modified_ns)

    def _follow_live(self) -> None:
        while not self._closed.wait(self._live_seconds):
            self._refresh_live()

    def _refresh_live(self) -> None:
        before = self._live_file.settings
        live = self._live_file.refresh()
        if live != before:
            logger.info("kvtier %s: %s", self._config.tier, live)
        self._complain("settings", self._live_file.problem)
        self._permit.is_needed = live.needs_permit
        if self.keyring is not None:
            self.keyring.active_name = live.active_key
            self.keyring.active()
            self._complain("keys", self.keyring.problem, "kvtier %s: encryption: %s", logging.ERROR)

    def _complain(self, topic: str, problem: str, message: str = "kvtier %s: %s", level: int = logging.WARNING) -> None:
        """Log what is wrong, once and not again with each look."""
        if problem and problem != self._problems.get(topic):
            logger.log(level, message, self._config.tier, problem)
        self._problems[topic] = problem

    def _attach(self) -> bool:
        config = self._config
        if self._generation not in {"", config.digest}:
            # An old pod whose container was restarted in a rollout: its blocks must not open the new generation.
            self.refused_field = GENERATION
            self._refuse(
                IdentityMismatch(
                    f"this engine was started for generation {self._generation} and {CONFIG_FILE} is of "
                    f"{config.digest}: the spec changed meanwhile; the rollout replaces the pod, or delete it"
                )
            )
            return False
        while not self._closed.is_set():
            if not self.mode.may_load:
                if self.refusal != BYPASSED:
                    self.refusal = BYPASSED
                    self._tell(lambda: self._report.say(Phase.WITHOUT, BYPASSED))
                self._decided.set()
                self._closed.wait(self._live_seconds)
                self._refresh_live()
                continue
            try:
                self._claim_root()
            except IdentityMismatch as error:
                self.refused_field = error.field or UNREADABLE
                self._refuse(error)
                self._tell(lambda: self._report.say(Phase.WITHOUT, self.refusal))
                return False
            except StoreUnavailable as error:
                self._refuse(error)
                self._decided.set()
                self._closed.wait(RETRY_SECONDS)
                continue
            root, self.refusal = self._config.root, ""
            logger.info("kvtier %s: disk tier at %s", config.tier, root)
            self.workers.round_trip_seconds = measure_round_trip(self._fs.rooted(root), root)
            self.looked_at, self.is_readable = time.monotonic(), True
            self._tell(lambda: self._report.say(Phase.ATTACHED))
            return True
        return False

    def _claim_root(self) -> bool:
        return self._claim.renew()

    def _stay_claimed(self) -> None:
        """Compare the description where it is another than before, and stop for ever if it is not of this engine.

        A directory that was removed is made again with the next block; what was known of it is forgotten.
        """
        began = time.monotonic()
        try:
            state = self._claim.look(may_write=self.mode.may_store)
            is_new = self._claim_root() if state is identity.RootState.OTHER else state is identity.RootState.GONE
        except IdentityMismatch as error:
            self.refused_field = error.field or UNREADABLE
            self.is_readable = False
            self._refuse(error)
        except StoreUnavailable:
            # Whatever it is, loads and stores meet it as well.
            return
        else:
            self.looked_at = began
            if is_new:
                self._is_replaced = True
            gone = "was removed or made anew; its blocks are forgotten"
            self._complain("directory", gone if is_new else "", f"kvtier %s: {self._config.root} %s")

    def _refuse(self, error: Exception) -> None:
        self.refusal = str(error)
        self._complain("refusal", self.refusal, "kvtier %s: serving without the disk tier: %s", logging.ERROR)

    def _give_up(self) -> None:
        reason = self.refusal
        if self._tell(lambda: self._report.say(Phase.WITHOUT, reason, only_after=Phase.OPENING)):
            logger.error(
                "kvtier %s: after %.0f s, serving without the disk tier until the volume answers: %s",
                self._config.tier,
                self._config.attach_grace_seconds,
                reason,
            )

    def _tell(self, say: Callable[[], object]) -> object:
        try:
            return say()
        except OSError as error:
            # The probe goes on waiting, and says for what.
            logger.error("kvtier %s: the startup probe cannot be told: %s", self._config.tier, error)  # noqa: TRY400 - no defect of ours
            return None


def _pool_settings(config: ConnectorConfig) -> PoolSettings:
    return PoolSettings(
        root=config.root,
        direct=config.direct_io,
        keys_dir=config.keys_dir,
        compression=config.compression,
        workers=MOST_DEFAULT_IO_PROCESSES if config.io_processes is None else config.io_processes,
        first_workers=max(FEWEST, len(os.sched_getaffinity(0))) if config.io_processes is None else 0,
        deadline_seconds=config.load_deadline_seconds,
    )
