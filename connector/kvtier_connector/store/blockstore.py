# SPDX-License-Identifier: Apache-2.0
"""Reads and writes the blocks of one root: a block is there whole and verified, or it is not there.

The effect of a full, read-only, failing or damaged volume on a block is an outcome, not an exception. No threads live
here.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import stat
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kvtier_connector.contract import engine
from kvtier_connector.contract.errors import StoreUnavailable
from kvtier_connector.store.compression import Codec, Compression
from kvtier_connector.store.crypto import Keyring, encrypt, scratch_for, with_checksum
from kvtier_connector.store.fs import (
    FIRST_WRITE_FLAGS,
    LOCAL,
    DirectIo,
    FileSystem,
    make_directories,
    new_page,
    replacing,
    write_block,
)
from kvtier_connector.store.header import CHECKSUM_BYTES, HEADER_BYTES, NOT_PACKED, Fault, Header, Method, Packing
from kvtier_connector.store.journal import PurgeLog
from kvtier_connector.store.layout import NO_LINEAGE, BlockKey, Lineage, block_path
from kvtier_connector.store.reading import Access, Handing, Read, Take, mapped_verified, read_whole, stream_verified
from kvtier_connector.store.volume_profile import read_profile

_MOST_KNOWN = 1 << 14
"""Most directories to remember: four times those of one tenant. Beyond that they are learnt anew."""


class BlockDirectories:
    """Makes the directories of blocks with few calls, since each is a round trip on a network volume.

    There are 4096 of them, so many of the first blocks begin one. While directories are missing, each is made before a
    block is written; once they exist, none is asked for. Any thread may call: the memory is a hint, and a wrong hint
    costs a call.
    """

    def __init__(self, fs: FileSystem) -> None:
        """Store the settings; nothing is made yet."""
        self._fs = fs
        self._known: set[str] = set()
        """Directories that this process found or made."""
        self._is_new = False
        """Whether the last unknown directory had to be made."""
        self._gives_mode: set[str] = set()
        """Directories in which a new one has the right mode at once. It inherits a part of the mode from the directory
        above, which a copy of the volume may lack."""

    def prepare(self, directory: str) -> None:
        """Make the directory of a block that is about to be written, if it is likely not to be there."""
        if self._is_new and directory not in self._known:
            self.make(directory)

    def make(self, directory: str) -> None:
        """Make the directory of a block, and those above; one that is there already is fine."""
        try:
            self._is_new = self._make_one(directory)
        except FileNotFoundError:
            # The first block of all, or the tree was removed; a network volume may answer so for a while, too.
            self._is_new = True
            make_directories(self._fs, directory.rpartition("/")[0])
            try:
                self._make_one(directory)
            except FileNotFoundError:
                make_directories(self._fs, directory)
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
            self._gives_mode.clear()
        self._known.add(directory)

    def _make_one(self, directory: str) -> bool:
        """Make one; return whether it was missing."""
        try:
            self._fs.mkdir_plainly(directory)
        except FileExistsError:
            return False
        above = directory.rpartition("/")[0]
        if above not in self._gives_mode and self._fs.mend_mode(directory):
            self._gives_mode.add(above)
        return True


class Writers:
    """The blocks that are being written; `_changed` guards them, and is held while none is."""

    def __init__(self) -> None:
        """Start with none."""
        self._changed = threading.Condition()
        self._keys: set[BlockKey] = set()

    @contextlib.contextmanager
    def alone(self, key: BlockKey) -> Iterator[None]:
        """Wait until no other thread of this process writes the block."""
        with self._changed:
            self._changed.wait_for(lambda: key not in self._keys)
            self._keys.add(key)
        try:
            yield
        finally:
            with self._changed:
                self._keys.discard(key)
                self._changed.notify_all()


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
    NO_KEY = "no_key"
    """Blocks are to be encrypted, and there is no key to do it with; nothing is written in clear instead."""
    NO_SPACE = "no_space"
    """The volume, or the quota on it, is full."""
    READ_ONLY = "read_only"
    """The volume is mounted read-only, or the kernel made it so after an error."""
    DENIED = "denied"
    """This process may not write there."""
    PURGED = "purged"
    """A purge of the block came while it waited to be written."""
    RESOURCES = "resources"
    """This process or host has run out of memory or file descriptors; the volume is not to blame."""
    IO = "io"
    """Anything else that the system says while writing."""


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


class BlockStore:
    """The blocks under one root, for any number of threads and processes at once.

    Every method may be called from any thread. Between processes, atomic renames protect readers from half-written
    blocks, and a unique partial name protects writers from each other. Inside the process, `Writers` lets one
    thread write a block at a time. `Writers`, `Keyring` and `DirectIo` guard themselves. Each thread has its own header
    page. No lock is held over a system call of the volume, so a volume that hangs holds up only the threads that asked
    it for something.

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
            root: Where `claim` put the tier, named after its generation, as each block says too; directories that are
                missing are made when a block is written.
            fs: The system calls.
            direct: True or False to use O_DIRECT for aligned buffers or never; None asks the volume at first use.
            clock: Nanoseconds since 1970, for the header.
            keys_dir: Directory of the keys: blocks are then encrypted, and no others are read. `put` needs a key to be
                made active first; reading needs no more than this. Empty means that nothing is encrypted.
            compression: One of `contract.COMPRESSIONS`, of what is written; what others compressed is read with any.
        """
        self.keyring = Keyring(keys_dir) if keys_dir else None
        self._root = str(root)
        self._fs = fs = fs.rooted(self._root)
        self._clock = clock
        tier_dir = str(root.parent)
        self._direct = DirectIo(fs, self._root, direct=direct, advised=lambda: read_profile(fs, tier_dir).direct_io)
        self._compression = Compression(compression, lambda: read_profile(fs, tier_dir))
        self._directories = BlockDirectories(fs)
        self.purges = PurgeLog(fs, self._root)
        self._access = Access(fs, self._root)
        self._is_end_written_first = self._access.mount.is_end_written_first
        self._writers = Writers()
        self._of_thread = threading.local()

    def get(self, key: BlockKey, into: memoryview) -> Outcome:
        """Read a block into a writable buffer of exactly its payload's length.

        The buffer is undefined unless the answer is a Hit. A damaged file is moved to quarantine, so the
        next `get` is a Miss and the next `put` writes the block anew.
        """
        target, home = into.cast("B"), self._access.home
        if target.readonly or target.nbytes == 0:
            raise ValueError(f"the buffer for {key} must be writable and not empty")

        def read(fd: int, is_direct: bool) -> int | Fault | None:
            return read_whole(
                self._fs,
                fd,
                key,
                home,
                page=self._page(),
                target=target,
                is_direct=is_direct,
                keyring=self.keyring,
                codecs=self._codec,
            )

        return self._read(key, self._direct.flag(target), read) or Fault.IO

    def stream(self, key: BlockKey, buffer: memoryview, take: Take) -> Outcome | None:
        """Read a block through a writable buffer of its payload's length, and hand the payload on.

        Through the page cache it comes in pieces that are verified at the end only: the pieces are worth nothing
        unless the answer is a Hit. The system writes to nothing but `buffer`. None means that `take` ended the read.
        """
        whole, home = buffer.cast("B"), self._access.home

        def read(fd: int, is_direct: bool) -> int | Fault | None:
            how: Handing = {"take": take, "keyring": self.keyring, "codecs": self._codec}
            if not is_direct and (mapped := self._fs.map(fd)) is not None:
                return mapped_verified(self._fs, fd, key, home, mapped=mapped, buffer=whole, **how)
            page = self._page()
            if not is_direct:
                return stream_verified(self._fs, fd, key, home, page=page, buffer=whole, **how)
            return read_whole(self._fs, fd, key, home, page=page, target=whole, is_direct=True, **how)

        return self._read(key, self._direct.flag(whole), read)

    def put(  # noqa: PLR0913 - keywords with defaults
        self,
        key: BlockKey,
        payload: memoryview,
        lineage: Lineage = NO_LINEAGE,
        *,
        is_scratch: bool = False,
        is_wanted: Callable[[], bool] = lambda: True,
        queued: float | None = None,
    ) -> StoreOutcome:
        """Write a block, unless it is there already; all of it appears at once or none does.

        The payload must not change until this returns, unless `is_wanted` returns False from then on. It is asked after
        all is written, and False keeps the block from appearing. The call does not wait for the device: after a power
        failure a block may be damaged or gone, which its reader notices.

        Args:
            key: The block.
            payload: Its bytes.
            lineage: Its origin.
            is_scratch: The payload may be encrypted in place, and is lost then; else that takes more memory.
            is_wanted: See above.
            queued: `time.monotonic` when the block was handed over, by default now; a block purged since is PURGED.
        """
        data = payload.cast("B")
        if data.nbytes == 0:
            raise ValueError(f"the payload of {key} must not be empty")
        since = self._now_queued() if queued is None else queued

        def may_appear() -> bool:
            return is_wanted() and not self._is_purged(key, lineage, since)

        with self._writers.alone(key):
            if self._access.find(key, data.nbytes, self._page(), self.keyring).is_whole:
                return Present()
            encryption_key = None if self.keyring is None else self.keyring.active()
            if self.keyring is not None and encryption_key is None:
                return StoreFault.NO_KEY
            try:
                stored, packing = self._pack(data)
                header = Header(key, stored.nbytes, bytes(CHECKSUM_BYTES), self._clock(), self._access.home, lineage)
                header = header._replace(packing=packing)
                if encryption_key is None:
                    self._write(key, with_checksum(header, stored), stored, may_appear)
                else:
                    is_ours = is_scratch or packing != NOT_PACKED
                    sealed = stored if is_ours and not stored.readonly else scratch_for(stored)
                    self._write(key, encrypt(header, stored, sealed, encryption_key), sealed, may_appear)
            except OSError as error:
                if error.errno == errno.ECANCELED and self.purges.is_purged(key, lineage, since):
                    return StoreFault.PURGED
                return _STORE_FAULTS.get(error.errno or 0, StoreFault.IO)
        return Stored(HEADER_BYTES + stored.nbytes)

    def look_up(self, key: BlockKey, payload_bytes: int | None = None) -> bool | Fault:
        """Return whether the volume has a file for the block, of the right size if the payload's length is given.

        One system call, and the bytes are not verified: `get` may still answer otherwise. A client of NFS remembers for
        half a minute that a name was absent, so it is made to ask for the names of the directory, and asked again.
        """
        path = self._path(key)
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
        size = status.st_size
        if not stat.S_ISREG(status.st_mode):
            return False
        return size > HEADER_BYTES if payload_bytes is None else size == HEADER_BYTES + payload_bytes

    def delete(self, key: BlockKey) -> bool:
        """Remove a block; return whether it was there.

        Raises:
            StoreUnavailable: the volume refused.
        """
        path = self._path(key)
        try:
            self._fs.unlink(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            raise StoreUnavailable(f"{path}: cannot be removed: {error}") from error
        return True

    def _now_queued(self) -> float:
        """Return the time of a block that is handed over now; purges from before are learnt first."""
        if not self.purges.is_known:
            self.learn_purges()
        return time.monotonic()

    def _is_purged(self, key: BlockKey, lineage: Lineage, queued: float) -> bool:
        self.purges.look()
        return self.purges.is_purged(key, lineage, queued)

    def learn_purges(self) -> None:
        """Look which purges there were so far: `put` refuses what was queued before that and was purged ever."""
        with contextlib.suppress(OSError):
            self.purges.look(may_write=False)

    def _path(self, key: BlockKey) -> str:
        return f"{self._root}/{block_path(key)}"

    def _page(self) -> memoryview:
        """Return the calling thread's own header page."""
        page: memoryview | None = getattr(self._of_thread, "page", None)
        if page is None:
            page = self._of_thread.page = new_page()
        return page

    def _codec(self) -> Codec:
        """Return the calling thread's own codec."""
        found: Codec | None = getattr(self._of_thread, "codec", None)
        if found is None:
            found = self._of_thread.codec = Codec()
        return found

    def _pack(self, block: memoryview) -> tuple[memoryview, Packing]:
        """Return a block as it is to be written: compressed in memory of this thread, or as it is."""
        if not self._compression.is_considered:
            return block, NOT_PACKED
        scratch: memoryview | None = getattr(self._of_thread, "scratch", None)
        if scratch is None or scratch.nbytes < block.nbytes:
            scratch = self._of_thread.scratch = scratch_for(block)
        width = self._compression.width_for(block, self._codec(), scratch[: block.nbytes])
        packed_bytes = self._codec().pack(block, scratch[: block.nbytes], width) if width else 0
        if not packed_bytes:
            return block, NOT_PACKED
        return scratch[:packed_bytes], Packing(Method.ZSTD_PLANES, block.nbytes, width)

    def _read(self, key: BlockKey, direct: int, read: Read) -> Outcome | None:
        try:
            found = self._access.read(key, direct, read)
        except FileNotFoundError:
            return Miss()
        return Hit(found) if isinstance(found, int) else found

    def _write(self, key: BlockKey, first_page: bytes, data: memoryview, is_wanted: Callable[[], bool]) -> None:
        page = self._page()
        page[:] = first_page
        path = self._path(key)
        directory = path.rpartition("/")[0]
        self._directories.prepare(directory)
        for _ in range(_RETRIES):
            try:
                self._publish(path, page, data, is_wanted)
            except OSError as error:
                if error.errno in _IN_THE_WAY:
                    self._access.clear(key)
                elif error.errno in _GONE:
                    # The first block of its directory, or the tree or the partial file was removed meanwhile.
                    self._directories.make(directory)
                else:
                    raise
            else:
                return
        self._publish(path, page, data, is_wanted)

    def _publish(self, path: str, page: memoryview, data: memoryview, is_wanted: Callable[[], bool]) -> None:
        direct = self._direct.flag(data)
        # No other process makes the name. On NFS an exclusive create takes another round trip, for the mode.
        with replacing(self._fs, path, flags=FIRST_WRITE_FLAGS | direct, is_wanted=is_wanted) as fd:
            write_block(self._fs, fd, (page, data), is_direct=bool(direct), end_first=self._is_end_written_first)
