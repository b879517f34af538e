# SPDX-License-Identifier: Apache-2.0
"""Renews the store permit of a tier, and tells the time of the volume.

Engines store only while they hold a permit that is not expired, so a janitor that cannot count, hangs or lost its Lease
stops them by doing nothing. The file has one length and is overwritten in place, since a full volume has no room for a
new file. Ages of files are never differences of two hosts' clocks: the volume stamps a file once a minute, and a
monotonic clock continues from that.
"""

from __future__ import annotations

import contextlib
import errno
import math
import time
from collections.abc import Callable, Collection
from datetime import timedelta

from kvtier_connector.janitor.catalog import CATALOG_FILE
from kvtier_connector.janitor.policy import Room
from kvtier_connector.store.fs import CREATE_FLAGS, FIRST_WRITE_FLAGS, NO_FILE, FileSystem, new_token, opened
from kvtier_connector.store.layout import partial_path
from kvtier_connector.store.permit import PERMIT_FILE, UNLIMITED_BYTES, Permit, encode_permit

PERMIT_SECONDS = 60.0
"""How long a permit lasts."""
RENEW_SECONDS = 20.0
"""A permit is renewed so often, and at once when its answer changes."""
JUMP_SECONDS = 300.0
"""A volume's time that is further ahead of the expected time is a jump."""
HOLD_SECONDS = 3600.0
"""A jump is used only after this: time to set the clock right."""
TTL_HELD = (
    "ttl: nearly all blocks are too old at once, so they stay for an hour in case the clock is wrong. Set it right, or "
    "remove the blocks now: with kvtier purge, those of vLLM's own tier by hand"
)
_ASK_SECONDS = 60.0
_UNREAD_PERMITS = 4
"""Permits under which engines may write before their journals tell of the first: so long a record may take."""

_LEAST_WRITERS = 4
"""A permit is shared as if there were so many writers: new ones, and restarted ones, use the same permit."""


def share_of(room: Room, *, writers: int, largest_bytes: int) -> int:
    """Return how many bytes each engine may write under one permit.

    Each permit gives away a quarter of the room, so that engines cannot exceed it before their journals are read. It is
    always good for at least one block, as long as the room holds one.
    """
    if room.bytes is None:
        return UNLIMITED_BYTES
    if room.bytes <= 0 or room.bytes < largest_bytes:
        return 0
    return max(room.bytes // (_UNREAD_PERMITS * max(_LEAST_WRITERS, writers)), largest_bytes)


class PermitWriter:
    """The permit of one tier. Owned by one thread."""

    def __init__(self, tier_dir: str, *, fs: FileSystem, now: Callable[[], float] = time.monotonic) -> None:
        """Store the settings; nothing is written yet."""
        self._path = f"{tier_dir}/{PERMIT_FILE}"
        self._fs = fs
        self._now = now
        self.renewed_at = -math.inf
        """When the volume last took a permit, by `now`."""
        self._share = 0
        self._writers = 0
        self._used_bytes = 0
        self.tenants: frozenset[str] = frozenset()
        """Tenants over their quota, in the last permit that the volume took."""
        self.reason = ""
        """Why engines may not store, in the last permit that the volume took; empty while they may."""

    def renew(  # noqa: PLR0913 - keywords
        self,
        room: Room,
        *,
        used_bytes: int,
        writers: int,
        largest_bytes: int,
        tenants: Collection[str],
        knows_writes: Callable[[bool], bool] = lambda _is_early: True,
    ) -> None:
        """Write a new permit if it is time to, if half of the last one is used up, or if its answer changes.

        `tenants` are those over their quota. `knows_writes` is called with whether the permit is early; False puts off
        a permit for more bytes.

        Raises:
            OSError: the volume does not take it.
        """
        share = share_of(room, writers=writers, largest_bytes=largest_bytes)
        refused = frozenset(tenants)
        is_same = (share > 0, refused) == (self._share > 0, self.tenants) and writers <= self._writers
        is_used_up = 0 < self._share * max(1, self._writers) // 2 <= used_bytes - self._used_bytes
        is_early = self._now() - self.renewed_at < RENEW_SECONDS
        if (is_same and not is_used_up and is_early) or (share and not knows_writes(is_early)):
            return
        reason = "" if share else room.reason or "there is room for less than a block"
        permit = Permit(number=new_token(), seconds=PERMIT_SECONDS, bytes=share, tenants=refused, reason=reason)
        self._write(encode_permit(permit))
        self._share, self._writers, self._used_bytes, self.tenants = share, writers, used_bytes, refused
        self.renewed_at, self.reason = self._now(), reason

    def _write(self, content: bytes) -> None:
        try:
            self._overwrite(content)
        except OSError as error:
            if error.errno not in {*NO_FILE, errno.EACCES, errno.EPERM}:
                raise
            # A link or pipe stands in its place, through which no permit would reach the engines; or it is the file of
            # the user that the janitor ran as before.
            self._fs.unlink(self._path)
            self._overwrite(content)

    def _overwrite(self, content: bytes) -> None:
        with opened(self._fs, self._path, FIRST_WRITE_FLAGS) as fd:
            # One call, so that a reader sees one text or the other.
            self._fs.pwritev(fd, [memoryview(content)], 0)


def ask_volume_ns(fs: FileSystem, tier_dir: str) -> int | None:
    """Return the time that the volume gives a file, in nanoseconds since 1970; None where it refuses.

    The permit is not touched for that: its time says until when it lasts.
    """
    path = f"{tier_dir}/{CATALOG_FILE}"
    with contextlib.suppress(OSError):
        try:
            fs.touch(path)
            return fs.stat(path).st_mtime_ns
        except (FileNotFoundError, PermissionError):
            partial = partial_path(path, new_token())
            fs.close(fs.open(partial, CREATE_FLAGS))
            try:
                return fs.stat(partial).st_mtime_ns
            finally:
                fs.unlink(partial)
    return None


class VolumeTime:
    """The volume's time. Owned by one thread; `time_ns` may be called by any."""

    def __init__(
        self,
        *,
        ask: Callable[[], int | None],
        clock: Callable[[], int] = time.time_ns,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Store the settings; the volume is not asked yet.

        Args:
            ask: Asks the volume for its time, in nanoseconds since 1970; None where it does not tell.
            clock: This host's time, likewise; used until the first answer, and never for an age.
            now: Seconds that never go back or jump.
        """
        self._ask = ask
        self._now = now
        self._ask_at = now()
        self._offset_ns = clock() - int(now() * 1e9)
        self.is_known = False
        """Whether the volume has answered; nothing is removed by its age before."""
        self._jumped_until: float | None = None
        self._jump_seconds = 0.0

    def time_ns(self) -> int:
        """Return the volume's time in nanoseconds since 1970; before the first answer, this host's."""
        return self._offset_ns + int(self._now() * 1e9)

    @property
    def problem(self) -> str:
        """Message about the volume's clock; empty without a problem."""
        if not self.is_known:
            return "clock: the volume does not tell its time, so nothing is removed by its age"
        if self._jumped_until is None:
            return ""
        jump = timedelta(minutes=round(self._jump_seconds / 60))
        return f"clock: the volume's jumped ahead by {jump}; the jump is ignored for an hour"

    def look(self) -> None:
        """Ask the volume, once a minute."""
        if self._now() < self._ask_at:
            return
        there_ns = self._ask()
        if there_ns is None:
            return
        now = self._now()
        self._ask_at = now + _ASK_SECONDS
        offset_ns = there_ns - int(now * 1e9)
        self._jump_seconds = (offset_ns - self._offset_ns) / 1e9
        if self.is_known and self._jump_seconds > JUMP_SECONDS:
            if self._jumped_until is None:
                self._jumped_until = now + HOLD_SECONDS
            if now < self._jumped_until:
                return
        self._offset_ns, self._jumped_until, self.is_known = offset_ns, None, True
