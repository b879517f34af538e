# SPDX-License-Identifier: Apache-2.0
"""Permissions of an engine on the volume: the mode in the runtime settings, and the store permit of the janitor.

The runtime settings are one key of a ConfigMap and change while engines run. Kubernetes swaps a symbolic link above the
file, so a read by path sees the old text or the new one and never a mixture.

The store permit is a small file in which the janitor says how many bytes each engine may write until the next permit.
The janitor alone knows the contents of the volume, so engines write only while they hold a permit. The file has a
constant length and is overwritten in place, since a full volume has no room for a new file. Nothing in it is a time of
day: it lasts for some seconds after its own modification time, which the volume's clock stamps. An engine compares that
with the modification time of a file that it has touched itself.
"""

from __future__ import annotations

import enum
import json
import math
import threading
import time
import zlib
from collections.abc import Callable
from typing import NamedTuple

from kvtier_connector.contract.engine import LiveSettings, decode_live
from kvtier_connector.contract.errors import ConfigInvalid
from kvtier_connector.store.blockstore import StoreFault
from kvtier_connector.store.fs import FOLLOW_FLAGS, LOCAL, FileSystem, opened, read_bytes, read_file

PERMIT_FILE = "permit.json"
"""Name of the file, beside the generations of the tier."""
PERMIT_BYTES = 16_384
"""Length of the file, whatever it says."""
UNLIMITED_BYTES = 1 << 62
"""For a tier without a budget."""
ALL_TENANTS = "*"
"""In `Permit.tenants`: every named tenant is over its quota, or there are too many to list."""

_MOST_REASON = 1000
_MOST_SECONDS = 3600.0
_AHEAD_SECONDS = 5.0
"""A permit whose modification time is further ahead of the volume's clock cannot be compared with it."""


class Permit(NamedTuple):
    """A permit of the janitor, the same for each engine of the tier."""

    number: str
    """New and random with each renewal."""
    seconds: float
    """How long the permit lasts after the modification time of its file."""
    bytes: int
    """Each engine may write so much while this number is the last one."""
    tenants: frozenset[str] = frozenset()
    """Tenants over their quotas, whose blocks are refused."""
    reason: str = ""
    """Why nothing may be written, for people; empty otherwise."""


def encode_permit(permit: Permit) -> bytes:
    """Return the content of the file, always `PERMIT_BYTES` long; tenants that do not fit become `ALL_TENANTS`."""
    reason = permit.reason.encode("ascii", "replace").decode()[:_MOST_REASON]
    tenants = sorted(permit.tenants)
    while True:
        fields = json.dumps([permit.number, permit.seconds, permit.bytes, tenants, reason])
        text = json.dumps({"crc32": zlib.crc32(fields.encode()), "permit": fields}).encode()
        if len(text) < PERMIT_BYTES:
            return text.ljust(PERMIT_BYTES - 1) + b"\n"
        tenants = [ALL_TENANTS]


def decode_permit(content: bytes) -> Permit:
    """Read what `encode_permit` wrote.

    Raises:
        ConfigInvalid: the content is no permit, or a part of one.
    """
    try:
        document = json.loads(content)
        fields = document["permit"]
        if zlib.crc32(fields.encode()) != document["crc32"]:
            raise ConfigInvalid("not a store permit: its checksum is wrong")
        number, seconds, limit, tenants, reason = json.loads(fields)
        permit = Permit(str(number), float(seconds), limit, frozenset(map(str, tenants)), str(reason))
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ConfigInvalid(f"not a store permit: {content[:80]!r}") from error
    if type(limit) is not int or limit < 0 or not 0 <= permit.seconds <= _MOST_SECONDS:
        raise ConfigInvalid(f"not a store permit: bytes={limit!r} and seconds={seconds!r} must be 0 or more")
    return permit


class StorePermit:
    """The permit as one engine holds it.

    `refresh` reads the file, which may hang: one background thread calls it. The scheduler's thread calls all other
    methods, which touch memory only; `_permit` and `_expires` are replaced by the former and read by the latter.
    """

    def __init__(self, path: str, *, fs: FileSystem = LOCAL, now: Callable[[], float] = time.monotonic) -> None:
        """Store the settings; nothing may be stored before the first `refresh`."""
        self._path, self._fs, self._now = path, fs, now
        self._ahead: float | None = None
        """Seconds by which the volume's time is ahead of `now`; None while it is not known."""
        self.is_needed = True
        """False where the tier has no janitor: then there is no limit. Written by the thread of `refresh`."""
        self.untold_since = math.inf
        """Since when the janitor has not been told of stores, as `JournalWriter.refused_at`. Written likewise."""
        self.problem = ""
        """Why the file was not understood at the last `refresh`; empty if it was."""
        self._permit: Permit | None = None
        self._expires = -math.inf
        self._read_at = -math.inf
        """When the last `refresh` that found a permit began."""
        self._is_timed = False
        """Whether the volume's time was known when the last permit was compared with it."""
        self._counted = ""
        """Number of the permit that `_spent` belongs to."""
        self._spent = self._held = 0

    @property
    def reason(self) -> str:
        """Why nothing may be stored now, for people; empty if blocks may be."""
        if not self.is_needed:
            return ""
        if self._permit is None or self._now() >= self._expires:
            return self.problem or f"{self._path}: the janitor has not renewed its permit"
        return self._permit.reason

    def set_time(self, modified_ns: int) -> None:
        """Take the modification time of a file that this engine has just touched for the volume's time."""
        self._ahead = modified_ns / 1e9 - self._now()

    def refresh(self) -> None:
        """Read the file, and find out until when its permit lasts."""
        began = self._now()
        try:
            with opened(self._fs, self._path) as fd:
                permit = decode_permit(read_bytes(self._fs, fd, PERMIT_BYTES))
                modified_ns = self._fs.fstat(fd).st_mtime_ns
        except (FileNotFoundError, NotADirectoryError):
            self.problem = f"{self._path}: the janitor has not written a permit"
            return
        except (OSError, ConfigInvalid) as error:
            self.problem = f"{self._path}: {error}"
            return
        self.problem = ""
        last = self._permit
        is_new = last is None or permit.number != last.number
        if is_new or not self._is_timed:
            age = None if self._ahead is None else self._ahead + self._now() - modified_ns / 1e9
            self._expires = self._now() + self._remaining(permit, age, is_renewed=is_new and last is not None)
            self._permit, self._is_timed = permit, age is not None
        self._read_at = began

    def refusal(self, tenant: str = "") -> StoreFault | None:
        """Return why no block of the tenant may be stored now, None if the permit allows some."""
        if not self.is_needed:
            return None
        permit = self._permit
        if permit is None or self._now() >= self._expires:
            return StoreFault.NO_PERMIT
        if self._now() - self.untold_since > permit.seconds:
            return StoreFault.NO_JOURNAL
        if tenant and (tenant in permit.tenants or ALL_TENANTS in permit.tenants):
            return StoreFault.NO_QUOTA
        return None if self._left(permit) > 0 else StoreFault.NO_BUDGET

    def reserve(self, count: int, tenant: str = "") -> StoreFault | None:
        """Take bytes of the permit for a block; None means that they were granted, and obliges to call `end`."""
        if (refusal := self.refusal(tenant)) is not None:
            return refusal
        # The janitor may not know of a block as large as this: one is allowed while nothing else is under way.
        is_more = self.is_needed and self._permit is not None and count > self._left(self._permit)
        if is_more and (self._spent or self._held):
            return StoreFault.NO_BUDGET
        self._held += count
        return None

    def end(self, reserved: int, written: int) -> None:
        """Turn reserved bytes into bytes written; what was not written may be used for other blocks."""
        self._held -= reserved
        self._spent += written

    def _left(self, permit: Permit) -> int:
        if permit.number != self._counted:
            self._counted, self._spent = permit.number, 0
        return permit.bytes - self._spent - self._held

    def _remaining(self, permit: Permit, age: float | None, *, is_renewed: bool) -> float:
        """Return for how many seconds a permit lasts that is seen for the first time.

        By the volume's clock; and a permit that replaced one was written after that one was read, so that it lasts at
        least `seconds` from then on, whatever clocks say.
        """
        by_clock = 0.0 if age is None or age < -_AHEAD_SECONDS else permit.seconds - max(0.0, age)
        return max(by_clock, permit.seconds - (self._now() - self._read_at) if is_renewed else 0.0)


class Mode(enum.Enum):
    """The values are those of the resource's field."""

    READ_WRITE = "ReadWrite"
    READ_ONLY = "ReadOnly"
    """Blocks are loaded and none is written; engines still write ``tier.json`` and a journal, as a sign of life."""
    BYPASS = "Bypass"
    """The volume is not touched."""

    @property
    def may_load(self) -> bool:
        """Return whether blocks may be read."""
        return self is not Mode.BYPASS

    @property
    def may_store(self) -> bool:
        """Return whether anything may be written, journals included."""
        return self is Mode.READ_WRITE


_MOST_BYTES = 4096


class RuntimeSettings:
    """The runtime settings of one tier. `settings` is memory and may be read from any thread.

    `refresh` reads the file: call it from a background thread; `_refreshing` lets one in at a time.
    """

    def __init__(
        self, path: str, *, seconds: float = 5.0, fs: FileSystem = LOCAL, now: Callable[[], float] = time.monotonic
    ) -> None:
        """Start with ReadWrite until the first refresh; an empty path keeps it for ever.

        The file is read after so many seconds at the earliest, however often `refresh` is called.
        """
        self._path, self._seconds, self._fs, self._now = path, seconds, fs, now
        self._refreshing = threading.Lock()
        self._next_read = now()
        self.problem = ""
        """Why the file was not understood at the last read, and what to write; empty if it was."""
        self.settings = LiveSettings()
        """The last settings that could be read."""

    @property
    def mode(self) -> Mode:
        """Permitted use of the volume by the settings."""
        return Mode(self.settings.mode)

    def refresh(self) -> LiveSettings:
        """Read the file if it is time to, and return the settings."""
        with self._refreshing:
            if self._path and self._now() >= self._next_read:
                self._next_read = self._now() + self._seconds
                self._take()
        return self.settings

    def _take(self) -> None:
        staying = f"staying with mode {self.settings.mode}"
        try:
            content = read_file(self._fs, self._path, most_bytes=_MOST_BYTES, flags=FOLLOW_FLAGS)
            self.settings = decode_live(content.decode())
        except OSError as error:
            self.problem = f"{self._path}: cannot be read: {error}; {staying}"
        except (ConfigInvalid, UnicodeDecodeError) as error:
            self.problem = f"{self._path}: {error}; {staying}"
        else:
            self.problem = ""
