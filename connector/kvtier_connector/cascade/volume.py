# SPDX-License-Identifier: Apache-2.0
"""Opens the shared volume without ever holding up the engine: an engine without its disk tier still serves.

Whatever waits for the volume or for a mounted file runs on threads of its own: one claims the directory and walks it,
one tells other engines and hears from them and the janitor, one reads the live settings. They are apart because each
can hang, and the live settings must be heard of most when the volume hangs. Until the directory is claimed, and for
ever if it belongs to somebody else, the tier is inert: every lookup is a miss. A new engine gets no requests until it
is known which of both it is, or the volume has not answered for the time of grace.
"""

from __future__ import annotations

import logging
import math
import random
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from vllm.logger import init_logger

from kvtier_connector.contract import engine
from kvtier_connector.contract.engine import CONFIG_FILE, ConnectorConfig
from kvtier_connector.contract.errors import ConfigInvalid, IdentityMismatch, StoreUnavailable
from kvtier_connector.io_workers.walker import WalkProcess
from kvtier_connector.pod_tools.ready import StartupReport
from kvtier_connector.store import identity
from kvtier_connector.store.fs import LOCAL, FileSystem
from kvtier_connector.store.runtime_settings import BRAKE_FILE, BrakeFile, LiveFile, Mode, stricter
from kvtier_connector.store.shared import SharedStore
from kvtier_connector.store.usage import Quotas
from kvtier_connector.store.volume_profile import mount_of
from kvtier_connector.store.walks import next_pause

logger = init_logger("vllm.kvtier.volume")

RETRY_SECONDS = 30.0
UNREADABLE = "tier.json"
"""Stands for a field where the whole description of the directory cannot be understood."""
GENERATION = "generation"
"""Stands for a field where the settings are not those that the engine was started for."""
LIVE_SECONDS = 5.0
REST_REFRESHES = 1.25
"""Of the refresh time: so often a volume at rest is asked whether there is news, with one system call."""
LOOK_REFRESHES = 20.0
"""Of the refresh time: so often what rings no bell is looked at, the brake and the description of the directory."""
BYPASSED = "the mode is Bypass"
_NEWS = {
    identity.RootState.GONE: "is gone; it is made again with the next block",
    identity.RootState.SAME: "is back; it is walked anew",
    identity.RootState.OTHER: "was made anew; it is ours, and is walked anew",
}


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


class Volume:
    """One directory on the shared volume, and whether it may be used.

    The opening thread alone writes `is_readable`, `is_writable`, `refusal` and `refused_field` until it has claimed
    the directory; then the one that follows the news does, but for `is_writable`. Anybody reads them.
    """

    def __init__(self, config: ConnectorConfig, fs: FileSystem, *, generation: str = "") -> None:
        """Store the settings; call `start`.

        Args:
            config: the settings of the tier.
            fs: the system calls.
            generation: digest of the blocks that the engine was started for; empty where nobody said.
        """
        self._config = config
        self._fs = fs
        self._generation = generation
        self._ownership = identity.RootClaim(Path(config.root), {}, config.digest, fs=fs)
        self.store = SharedStore(
            Path(config.root),
            fs=fs,
            direct=config.direct_io,
            max_bytes=config.max_bytes,
            keys_dir=config.keys_dir,
            quotas=Quotas(config.tenant_quotas, config.default_quota_bytes),
            scan_threads=config.scan_threads,
            is_bell_cached=mount_of(config.root).is_nfs,
            # Another process knows the real system calls only.
            walk=WalkProcess(config.scan_threads) if fs is LOCAL else None,
        )
        # The file is mounted from a ConfigMap and not on the volume.
        self._live_file = LiveFile(config.live_file, seconds=min(LIVE_SECONDS, config.refresh_seconds))
        self._brake_file = BrakeFile(str(Path(config.root).parent / BRAKE_FILE), fs=fs)
        self._max_bytes = config.max_bytes
        self._problems: dict[str, str] = {}
        """What was last found wrong, by what it is about."""
        self.is_readable = False
        """Whether the directory is known to hold blocks of this engine."""
        self.is_writable = False
        """Whether blocks may be written too: with a limit, not before the volume has been counted once."""
        self.refusal = "the volume has not answered yet"
        """Why the volume is not readable; empty if it is."""
        self.refused_field = ""
        """By which field of its identity the directory belongs to somebody else; empty if it does not."""
        self._settled = threading.Event()
        self._closed = threading.Event()
        self._is_walk_due = threading.Event()
        self._standing = identity.RootState.SAME
        self._report = StartupReport(config.state_dir, config.tier)
        self._patience = threading.Timer(config.attach_grace_seconds, self._give_up)
        self._patience.name, self._patience.daemon = "kvtier-patience", True
        work: dict[str, Callable[[], None]] = {"volume": self._run, "news": self._follow}
        if config.live_file or config.keys_dir:
            work["live"] = self._watch
        self._threads = [
            threading.Thread(target=self._guard, args=(action,), name=f"kvtier-{name}", daemon=True)
            for name, action in work.items()
        ]

    def start(self, claimed: Mapping[str, Any], wait_seconds: float) -> None:
        """Begin to open it, and wait this long at most for the first answer.

        Args:
            claimed: What `tier.json` must say.
            wait_seconds: How long.
        """
        self._ownership = identity.RootClaim(Path(self._config.root), claimed, self._config.digest, fs=self._fs)
        # Before the engine can answer anybody, so that the startup probe waits for all engines of the pod.
        self._tell(lambda: self._report.begin(self.refusal))
        self._patience.start()
        for thread in self._threads:
            thread.start()
        if not self._settled.wait(wait_seconds):
            state = (
                "stores begin when it is counted" if self.is_readable else "serving without the disk tier until then"
            )
            logger.warning(
                "kvtier %s: %s is not open after %.0f s; %s", self._config.tier, self._config.root, wait_seconds, state
            )

    def close(self, timeout_seconds: float) -> None:
        """Stop, and wait so long for its threads; one that hangs is left behind. May be called again."""
        deadline = time.monotonic() + timeout_seconds
        if not self._closed.is_set():
            self._closed.set()
            self._is_walk_due.set()
            self.store.has_news.set()
            self._patience.cancel()
            self._tell(self._report.end)
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, deadline - time.monotonic()))

    @property
    def mode(self) -> Mode:
        """What the volume may be used for now: the user and the janitor both say, and the stricter counts."""
        return stricter(self._live_file.mode, self._brake_file.mode)

    @property
    def root(self) -> str:
        """The directory."""
        return self._config.root

    @property
    def has_key(self) -> bool:
        """Whether blocks can be written as they have to be: encrypted, if there is a directory of keys."""
        return self.store.blocks.keyring is None or self.store.blocks.keyring.is_usable

    @property
    def is_counted(self) -> bool:
        """Whether the store knows how much the volume holds; without a limit nobody asks, and it is not counted."""
        return self.is_writable and self._max_bytes > 0

    def _guard(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception:
            # The edge of the thread: without it the tier would stay as it is and nobody would know why.
            logger.exception("kvtier %s: the disk tier is not kept up to date any more", self._config.tier)
        finally:
            self._settled.set()

    def _run(self) -> None:
        self._refresh_live()
        if not self._claim():
            return
        if not self._max_bytes:
            self._settled.set()
        pause = first = self._config.rescan_seconds
        while True:
            self._is_walk_due.clear()
            if self._is_over():
                return
            is_whole = False
            if self.mode.may_load:
                is_whole = self._walk()
                self._settled.set()
            # Not all engines of a fleet at the same time.
            is_called = self._is_walk_due.wait(pause * random.uniform(0.8, 1.2))  # noqa: S311  no secret
            pause = first if is_called or not is_whole else next_pause(pause, first)

    def _follow(self) -> None:
        refresh = self._config.refresh_seconds
        looked = synchronized = -math.inf
        while not self._closed.is_set():
            # Whoever has something to tell does soon; a volume at rest is asked once in a while.
            self.store.has_news.wait(REST_REFRESHES * refresh)
            if self._closed.wait(max(0.0, synchronized + refresh / 2 - time.monotonic())):
                break
            synchronized = time.monotonic()
            if not self._live_file.mode.may_load:
                continue
            may_have_news = self.store.may_have_news()
            if may_have_news or time.monotonic() - looked >= LOOK_REFRESHES * refresh:
                looked = time.monotonic()
                self._refresh_brake()
                if self.is_readable and self.mode.may_load:
                    self._stay_claimed()
            if self.is_readable and self.mode.may_load:
                self._synchronize(may_have_news=may_have_news)
        if self.is_readable and self.mode.may_load:
            # What was stored last is worth telling, too.
            self._synchronize(may_have_news=False)

    def _synchronize(self, *, may_have_news: bool) -> None:
        may_store = self.mode.may_store
        problem = self.store.synchronize(may_write=may_store, may_have_news=may_have_news).problem
        if not may_store:
            self.store.has_news.clear()
            self.store.show_life()
        self._complain("news", problem, "kvtier %s: other engines are not heard of: %s")

    def _watch(self) -> None:
        while not self._closed.wait(min(LIVE_SECONDS, self._config.refresh_seconds)):
            self._refresh_live()

    def _refresh_live(self) -> None:
        before, was_bypassed = self._live_file.settings, not self._live_file.mode.may_load
        live = self._live_file.refresh()
        if live != before:
            logger.info("kvtier %s: %s", self._config.tier, live)
        if was_bypassed and self._live_file.mode.may_load:
            # What others told of meanwhile may be gone by now.
            self._is_walk_due.set()
        self._complain("settings", self._live_file.problem)
        self._max_bytes = self._config.max_bytes if live.max_bytes is None else live.max_bytes
        self.store.blocks.set_limit(self._max_bytes)
        if (keyring := self.store.blocks.keyring) is not None:
            keyring.activate(live.active_key)
            keyring.active()
            self._complain("keys", keyring.problem, "kvtier %s: encryption: %s", logging.ERROR)

    def _refresh_brake(self) -> None:
        before = self._brake_file.mode
        mode = self._brake_file.refresh()
        if mode is not before:
            reason = self._brake_file.reason or "it let go again"
            logger.info("kvtier %s: the janitor asks for mode %s: %s", self._config.tier, mode.value, reason)
        self._complain("brake", self._brake_file.problem)

    def _complain(self, about: str, problem: str, message: str = "kvtier %s: %s", level: int = logging.WARNING) -> None:
        """Say what is wrong, once and not again with each look."""
        if problem and problem != self._problems.get(about):
            logger.log(level, message, self._config.tier, problem)
        self._problems[about] = problem

    def _claim(self) -> bool:
        if self._generation not in {"", self._config.digest}:
            # An old pod whose container was restarted in a rollout: its blocks must not open the new generation.
            self.refused_field = GENERATION
            self._refuse(
                IdentityMismatch(
                    f"this engine was started for generation {self._generation} and {CONFIG_FILE} is of "
                    f"{self._config.digest}: the spec changed meanwhile; the rollout replaces the pod, or delete it"
                )
            )
            return False
        while not self._closed.is_set():
            if not self.mode.may_load:
                if self.refusal != BYPASSED:
                    self.refusal = BYPASSED
                    self._tell(lambda: self._report.serve_without(BYPASSED))
                self._settled.set()
                self._closed.wait(min(LIVE_SECONDS, self._config.refresh_seconds))
                continue
            try:
                self._ownership.renew()
            except IdentityMismatch as error:
                self.refused_field = error.field or UNREADABLE
                self._refuse(error)
                self._tell(lambda: self._report.serve_without(self.refusal))
                return False
            except StoreUnavailable as error:
                self._refuse(error)
                self._settled.set()
                self._closed.wait(RETRY_SECONDS)
                continue
            if self.refusal:
                logger.info("kvtier %s: disk tier at %s", self._config.tier, self._config.root)
            self.refusal = ""
            self.store.measure_round_trip()
            self.is_writable = self._max_bytes == 0
            self.is_readable = True
            self._tell(self._report.attach)
            return True
        return False

    def _stay_claimed(self) -> None:
        """Compare the description where it is another than before, and stop for ever if it is not of this engine.

        What others write between their claim and this call could be read as ours, so it is made with each refresh. A
        directory that went, came back or was made anew is walked at once: what is known of it is of another time.
        """
        try:
            standing = self._ownership.look(may_write=self.mode.may_store)
            is_news = standing is not self._standing
            if standing is identity.RootState.OTHER:
                is_news = self._ownership.renew() or self._standing is identity.RootState.GONE
        except IdentityMismatch as error:
            self.refused_field = error.field or UNREADABLE
            self.is_readable = False
            self._refuse(error)
        except StoreUnavailable:
            # Whatever it is, loads and stores meet it as well.
            return
        else:
            self._standing = identity.RootState.SAME if standing is identity.RootState.OTHER else standing
            if is_news:
                logger.warning("kvtier %s: %s %s", self._config.tier, self._config.root, _NEWS[standing])
                self._is_walk_due.set()

    def _refuse(self, error: Exception) -> None:
        message = str(error)
        if message != self.refusal:
            # Once, not at every retry.
            logger.error("kvtier %s: serving without the disk tier: %s", self._config.tier, message)
        self.refusal = message

    def _give_up(self) -> None:
        reason, seconds = self.refusal, self._config.attach_grace_seconds

        def serve() -> None:
            if self._report.give_up(reason):
                logger.error(
                    "kvtier %s: after %.0f s, serving without the disk tier until the volume answers: %s",
                    self._config.tier,
                    seconds,
                    reason,
                )

        self._tell(serve)

    def _tell(self, say: Callable[[], object]) -> None:
        try:
            say()
        except OSError as error:
            # The probe goes on waiting, and says for what.
            logger.error("kvtier %s: the startup probe cannot be told: %s", self._config.tier, error)  # noqa: TRY400 - no defect of ours

    def _is_over(self) -> bool:
        """Say whether the directory is to be left alone: a walk counts, and removes what others left behind."""
        return self._closed.is_set() or bool(self.refused_field)

    def _walk(self) -> bool:
        try:
            is_whole = self.store.rescan(is_stopped=self._is_over, may_write=self.mode.may_store)
        except StoreUnavailable as error:
            logger.warning("kvtier %s: the volume cannot be walked: %s", self._config.tier, error)
            return False
        if is_whole:
            self.is_writable = True
        return is_whole
