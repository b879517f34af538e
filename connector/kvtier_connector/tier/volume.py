# SPDX-License-Identifier: Apache-2.0
"""Opens the shared volume without ever holding up the engine: an engine without its disk tier still serves.

Claiming the directory and counting its bytes are system calls on a network mount, so they run on a thread of their own.
Until they are done, and for ever if the directory belongs to somebody else, the tier is inert: every lookup is a miss.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm.logger import init_logger

from kvtier_connector.contract import ConnectorConfig
from kvtier_connector.errors import IdentityMismatch, StoreUnavailable
from kvtier_connector.store import identity
from kvtier_connector.store.blockstore import BlockStore
from kvtier_connector.store.fs import FileSystem

logger = init_logger("vllm.kvtier.volume")

RETRY_SECONDS = 30.0
RECOUNT_SECONDS = 300.0
"""What other pods and the janitor do to the volume is learnt this often; own writes are counted as they happen."""


class Volume:
    """One directory on the shared volume, and whether it may be used.

    The opening thread alone writes `_is_readable`, `_is_writable` and `_refusal`, and anybody reads them.
    """

    def __init__(self, config: ConnectorConfig, claimed: Mapping[str, Any], fs: FileSystem) -> None:
        """Store the settings; call `start`. `claimed` is what `tier.json` must say."""
        self._config = config
        self._claimed = dict(claimed)
        self._fs = fs
        self.store = BlockStore(Path(config.root), fs=fs, max_bytes=config.max_bytes)
        self._is_readable = False
        self._is_writable = False
        self._refusal = "the volume has not answered yet"
        self._settled = threading.Event()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvtier-volume", daemon=True)

    def start(self, wait_seconds: float) -> None:
        """Begin to open it, and wait this long at most for the first answer."""
        self._thread.start()
        if not self._settled.wait(wait_seconds):
            state = (
                "stores begin when it is counted" if self._is_readable else "serving without the disk tier until then"
            )
            logger.warning(
                "kvtier %s: %s is not open after %.0f s; %s", self._config.tier, self._config.root, wait_seconds, state
            )

    def close(self, timeout_seconds: float) -> None:
        """Stop; a thread that hangs in a system call is left behind."""
        self._closed.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_seconds)

    @property
    def is_readable(self) -> bool:
        """Whether the directory is known to hold blocks of this engine."""
        return self._is_readable

    @property
    def is_writable(self) -> bool:
        """Whether blocks may be written too: with a limit, not before the volume has been counted once."""
        return self._is_writable

    @property
    def is_counted(self) -> bool:
        """Whether the store knows how much the volume holds; without a limit nobody asks, and it is not counted."""
        return self._is_writable and self._config.max_bytes > 0

    @property
    def refusal(self) -> str:
        """Why the volume is not readable; empty if it is."""
        return self._refusal

    def _run(self) -> None:
        try:
            if self._claim() and self._config.max_bytes:
                self._count()
        except Exception:
            # The edge of the thread: without it the tier would stay inert and nobody would know why.
            logger.exception("kvtier %s: serving without the disk tier", self._config.tier)
        finally:
            self._settled.set()
        while self._is_readable and self._config.max_bytes and not self._closed.wait(RECOUNT_SECONDS):
            self._count()

    def _claim(self) -> bool:
        while not self._closed.is_set():
            try:
                identity.claim(Path(self._config.root), self._claimed, self._config.digest, fs=self._fs)
            except IdentityMismatch as error:
                self._refuse(error)
                return False
            except StoreUnavailable as error:
                self._refuse(error)
                self._settled.set()
                self._closed.wait(RETRY_SECONDS)
                continue
            if self._refusal:
                logger.info("kvtier %s: disk tier at %s", self._config.tier, self._config.root)
            self._refusal = ""
            self._is_readable = True
            self._is_writable = self._config.max_bytes == 0
            return True
        return False

    def _refuse(self, error: Exception) -> None:
        message = str(error)
        if message != self._refusal:
            # Once, not at every retry.
            logger.error("kvtier %s: serving without the disk tier: %s", self._config.tier, message)
        self._refusal = message

    def _count(self) -> None:
        try:
            self.store.refresh_usage()
        except StoreUnavailable as error:
            logger.warning("kvtier %s: the volume cannot be counted: %s", self._config.tier, error)
            return
        self._is_writable = True
