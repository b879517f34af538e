# SPDX-License-Identifier: Apache-2.0
"""Reads and writes the blocks of one root: a block is there whole and verified, or it is not there.

The effect of a full, read-only, failing or damaged volume on a block is an outcome, not an exception. No threads live
here.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import math
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvtier_connector.contract import engine
from kvtier_connector.store.compression import Codec, Compression, Take
from kvtier_connector.store.crypto import Keyring, encrypt, scratch_for, with_checksum
from kvtier_connector.store.fs import (
    FIRST_WRITE_FLAGS,
    LOCAL,
    DirectIo,
    FileSystem,
    make_directories,
    new_page,
    read_profile,
    replacing,
    write_block,
)
from kvtier_connector.store.header import CHECKSUM_BYTES, HEADER_BYTES, NOT_PACKED, Fault, Header, Method, Packing
from kvtier_connector.store.journal import PurgeLog
from kvtier_connector.store.layout import NO_LINEAGE, BlockKey, Lineage
from kvtier_connector.store.reading import Access, Expected, read_verified


@dataclass(frozen=True, slots=True)
class Hit:
    """The block is in the caller's buffer, verified."""

    bytes_read: int
    """From the volume: the payload and its header."""


@dataclass(frozen=True, slots=True)
class Miss:
    """The volume does not have the block."""


@dataclass(frozen=True, slots=True)
class Stored:
    """The block is on the volume."""

    bytes_written: int
    """To the volume: the payload, compressed if that was worth it, and its header."""


@dataclass(frozen=True, slots=True)
class Present:
    """The block was on the volume already, and was not written again."""


class StoreFault(enum.Enum):
    """Why a block could not be written. A fault is data: the caller counts it and goes on without."""

    NO_BUDGET = "no_budget"
    """The tier's own limit would be exceeded."""
    NO_QUOTA = "no_quota"
    """The quota of the block's tenant would be exceeded."""
    NO_PERMIT = "no_permit"
    """The janitor has not allowed engines to store, or not lately."""
    NO_JOURNAL = "no_journal"
    """The volume has not taken the journal for as long as a permit lasts, so the janitor counts too little."""
    NO_KEY = "no_key"
    """Blocks are to be encrypted, and there is no key to do it with; nothing is written in clear instead."""
    NO_SPACE = "no_space"
    READ_ONLY = "read_only"
    """The volume is mounted read-only, or the kernel made it so after an error."""
    DENIED = "denied"
    PURGED = "purged"
    """A purge of the block came while it waited to be written."""
    RESOURCES = "resources"
    """This process or host has run out of memory or file descriptors; the volume is not to blame."""
    IO = "io"


Outcome = Hit | Miss | Fault
"""Outcome of `BlockStore.get`."""
StoreOutcome = Stored | Present | StoreFault
"""Outcome of `BlockStore.put`."""

_RETRIES = 2
"""One for a directory that is not there yet, one for a cleaner that is faster than the writer."""
_GONE = {errno.ENOENT, errno.ESTALE}
_IN_THE_WAY = {errno.EISDIR, errno.ENOTEMPTY, errno.EEXIST}
"""A directory has the block's name."""
_STORE_FAULTS = {
    errno.ENOSPC: StoreFault.NO_SPACE,
    errno.EDQUOT: StoreFault.NO_SPACE,
    errno.EROFS: StoreFault.READ_ONLY,
    errno.EACCES: StoreFault.DENIED,
    errno.EPERM: StoreFault.DENIED,
    **dict.fromkeys((errno.EMFILE, errno.ENFILE, errno.ENOMEM), StoreFault.RESOURCES),
}


class _OfThread(threading.local):
    """Memory and codec of one thread."""

    def __init__(self) -> None:
        self.page = new_page()
        self.scratch = memoryview(b"")
        self._codec: Codec | None = None

    def codec(self) -> Codec:
        self._codec = self._codec or Codec()
        return self._codec


class BlockStore:
    """The blocks under one root, for any number of threads and processes at once.

    Every method may be called from any thread. Atomic renames protect readers from half-written blocks, and a unique
    partial name protects writers from each other. No lock is held over a system call of the volume, so a volume that
    hangs holds up only the threads that asked it for something.

    A method blocks for as long as the volume does: never call one from a thread that must not wait.
    """

    def __init__(  # noqa: PLR0913 - keywords with defaults
        self,
        root: Path,
        *,
        fs: FileSystem = LOCAL,
        direct: bool | None = None,
        clock: Callable[[], int] = time.time_ns,
        keys_dir: str = "",
        compression: str = engine.COMPRESSION_OFF,
    ) -> None:
        """Store the settings; nothing is read or written yet.

        Args:
            root: Named after its generation, as each block says too; directories are made when a block is written.
            fs: Any file system.
            direct: True or False to use O_DIRECT for aligned buffers or never; None asks the volume at first use.
            clock: Nanoseconds since 1970, for the header.
            keys_dir: Directory of the keys: blocks are then encrypted with the active key, and no others are read.
            compression: One of `contract.COMPRESSIONS`, of what is written; what others compressed is read with any.
        """
        self.keyring = Keyring(keys_dir) if keys_dir else None
        self._root = str(root)
        self._fs = fs = fs.rooted(self._root)
        self._clock = clock
        tier_dir = str(root.parent)
        self._direct = DirectIo(fs, self._root, direct=direct, advised=lambda: read_profile(fs, tier_dir).direct_io)
        self._compression = Compression(compression, lambda: read_profile(fs, tier_dir))
        self.purges = PurgeLog(fs, self._root)
        self._access = Access(fs, self._root)
        self._own = _OfThread()

    def get(self, key: BlockKey, into: memoryview) -> Outcome:
        """Read a block into a writable buffer of exactly its payload's length.

        It is undefined unless the answer is a Hit. A damaged file is moved to quarantine, so the next `get` is a Miss
        and the next `put` writes the block anew.
        """
        if into.readonly or into.nbytes == 0:
            raise ValueError(f"the buffer for {key} must be writable and not empty")
        target = into.cast("B")

        def take(offset: int, piece: memoryview) -> bool:
            target[offset : offset + piece.nbytes] = piece
            return True

        return self.stream(key, scratch_for(target), take) or Fault.IO

    def stream(self, key: BlockKey, buffer: memoryview, take: Take) -> Outcome | None:
        """Read a block through a writable buffer of its payload's length, and hand the payload on.

        It comes in pieces that are verified at the end only: the pieces are worth nothing unless the answer is a Hit.
        The system writes to nothing but `buffer`. None means that `take` ended the read.
        """
        own, view = self._own, buffer.cast("B")
        expected = Expected(key, self._access.home, self.keyring, own.codec)

        def read(fd: int, is_direct: bool) -> int | Fault | None:
            return read_verified(self._fs, fd, expected, page=own.page, buffer=view, take=take, is_direct=is_direct)

        try:
            found = self._access.read(key, self._direct.flag(view), read)
        except (FileNotFoundError, NotADirectoryError):
            return Miss()
        return Hit(found) if isinstance(found, int) else found

    def put(  # noqa: PLR0913 - keywords with defaults
        self,
        key: BlockKey,
        payload: memoryview,
        lineage: Lineage = NO_LINEAGE,
        *,
        is_scratch: bool = False,
        is_wanted: Callable[[], bool] = lambda: True,
        queued: float = math.inf,
    ) -> StoreOutcome:
        """Write a block, unless it is there already; all of it appears at once or none does.

        The payload must not change until this returns, unless `is_wanted` returns False from then on. It is asked after
        all is written, and False keeps the block from appearing. The call does not wait for the device: after a power
        failure a block may be damaged or gone, which its reader notices.

        A scratch payload may be encrypted in place, and is lost then; else that takes more memory. A block that was
        purged since it was `queued`, on `time.monotonic`, is PURGED.
        """
        data = payload.cast("B")
        if data.nbytes == 0:
            raise ValueError(f"the payload of {key} must not be empty")

        def may_appear() -> bool:
            self.purges.look()
            return is_wanted() and not self.purges.is_purged(key, lineage, queued)

        if self._access.has_whole(key, data.nbytes, self._own.page, self.keyring):
            return Present()
        encryption_key = None if self.keyring is None else self.keyring.active()
        if self.keyring is not None and encryption_key is None:
            return StoreFault.NO_KEY
        try:
            stored, packing = self._pack(data)
            header = Header(
                key, stored.nbytes, bytes(CHECKSUM_BYTES), self._clock(), self._access.home, lineage, packing=packing
            )
            if encryption_key is None:
                self._write(key, with_checksum(header, stored), stored, may_appear)
            else:
                is_ours = is_scratch or packing != NOT_PACKED
                sealed = stored if is_ours and not stored.readonly else scratch_for(stored)
                self._write(key, encrypt(header, stored, sealed, encryption_key), sealed, may_appear)
        except OSError as error:
            if error.errno == errno.ECANCELED and self.purges.is_purged(key, lineage, queued):
                return StoreFault.PURGED
            return _STORE_FAULTS.get(error.errno or 0, StoreFault.IO)
        return Stored(HEADER_BYTES + stored.nbytes)

    def look_up(self, key: BlockKey) -> bool | Fault:
        """Return whether the volume has a file for the block.

        One system call, and the bytes are not verified: `get` may still answer otherwise. A client of NFS remembers for
        half a minute that a name was absent, so it is made to ask for the names of the directory, and asked again.
        """
        path = self._access.path(key)
        try:
            try:
                status = self._fs.stat(path)
            except FileNotFoundError:
                if not self._access.ask_for_names(key):
                    return False
                status = self._fs.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            return Fault.IO
        return stat.S_ISREG(status.st_mode) and status.st_size > HEADER_BYTES

    def learn_purges(self) -> None:
        """Look which purges there were so far: `put` refuses what was queued before that and was purged ever."""
        with contextlib.suppress(OSError):
            self.purges.look(may_write=False)

    def _pack(self, block: memoryview) -> tuple[memoryview, Packing]:
        """Return a block as it is to be written: compressed in memory of this thread, or as it is."""
        if not self._compression.is_considered:
            return block, NOT_PACKED
        own = self._own
        if own.scratch.nbytes < block.nbytes:
            own.scratch = scratch_for(block)
        scratch = own.scratch[: block.nbytes]
        width = self._compression.width_for(block, own.codec(), scratch)
        packed_bytes = own.codec().pack(block, scratch, width) if width else 0
        if not packed_bytes:
            return block, NOT_PACKED
        return scratch[:packed_bytes], Packing(Method.ZSTD_PLANES, block.nbytes, width)

    def _write(self, key: BlockKey, first_page: bytes, data: memoryview, is_wanted: Callable[[], bool]) -> None:
        page = self._own.page
        page[:] = first_page
        path = self._access.path(key)
        for _ in range(_RETRIES):
            try:
                self._publish(path, page, data, is_wanted)
            except OSError as error:
                if error.errno in _IN_THE_WAY:
                    self._access.clear(key)
                elif error.errno in _GONE:
                    # The first block of its directory, or the tree or the partial file was removed meanwhile.
                    make_directories(self._fs, path.rpartition("/")[0])
                else:
                    raise
            else:
                return
        self._publish(path, page, data, is_wanted)

    def _publish(self, path: str, page: memoryview, data: memoryview, is_wanted: Callable[[], bool]) -> None:
        direct = self._direct.flag(data)
        # No other process makes the name. On NFS an exclusive create takes another round trip, for the mode.
        with replacing(self._fs, path, flags=FIRST_WRITE_FLAGS | direct, is_wanted=is_wanted) as fd:
            write_block(
                self._fs, fd, (page, data), is_direct=bool(direct), end_first=self._access.mount.is_end_written_first
            )
