# SPDX-License-Identifier: Apache-2.0
"""Opens, reads and verifies the file of one block, and quarantines a damaged one. No thread and no state of its own.

No byte of a file is believed before it is verified. Any writer of a shared volume can put a link, a pipe or a directory
in the place of a file, so these differ from a volume that fails. Quarantine never moves a good file
that a writer put in the place of the damaged one meanwhile.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable
from typing import NamedTuple, TypedDict

from kvtier_connector.store.compression import Codec
from kvtier_connector.store.crypto import Keyring, PayloadReader, begin_reading, can_read, can_unpack
from kvtier_connector.store.fs import READ_FLAGS, FileSystem, make_directories, new_token, read_block, read_page
from kvtier_connector.store.header import HEADER_BYTES, NOT_PACKED, Fault, Header, decode_header, misplaced
from kvtier_connector.store.layout import BlockKey, Home, block_path, home_of, quarantine_path
from kvtier_connector.store.volume_profile import mount_of

PIECE_BYTES = 1 << 20
"""Through the page cache, this much is read and verified before more is read: it is still in the core's cache then."""
_MAPPED_PIECE_BYTES = 1 << 19
"""The same of a file that lies in memory and is mapped: fewer bytes than the smaller cache of a core holds."""

Take = Callable[[int, memoryview], bool]
"""Takes the block's bytes from an offset on, before they are verified; False ends the read. The memory is reused."""
Codecs = Callable[[], Codec]
"""Makes the codec of the calling thread, or returns it."""


class Handing(TypedDict):
    """How a block that is read is handed on."""

    take: Take
    keyring: Keyring | None
    """With what it is decrypted."""
    codecs: Codecs
    """With what it is decompressed."""


def read_whole(  # noqa: PLR0913 - keywords
    fs: FileSystem,
    fd: int,
    key: BlockKey,
    home: Home,
    *,
    page: memoryview,
    target: memoryview,
    is_direct: bool,
    keyring: Keyring | None = None,
    codecs: Codecs,
    take: Take | None = None,
) -> int | Fault | None:
    """Read a block into `target` with one request and verify it; return the bytes read, or the fault.

    A device is fastest with one large request, so this is the way for O_DIRECT. A compressed block is read into the
    start of `target`. With `take` the verified block is handed on, and None means that `take` ended that.
    """
    found: list[Header | Fault] = []

    def is_wanted(done: int) -> bool:
        if not found and done >= HEADER_BYTES:
            found.append(_expect(fs, fd, key, home, page, target.nbytes))
        header = found[0] if found else None
        return header is None or (isinstance(header, Header) and done < HEADER_BYTES + header.payload_bytes)

    bytes_read = read_block(fs, fd, (page, target), is_direct=is_direct, is_wanted=is_wanted)
    if not found:
        return Fault.TRUNCATED if bytes_read else Fault.EMPTY
    header = found[0]
    if isinstance(header, Fault):
        return header
    reader = _begin(header, page, keyring)
    if isinstance(reader, Fault):
        return reader
    if bytes_read < HEADER_BYTES + header.payload_bytes:
        return Fault.TRUNCATED
    stored = target[: header.payload_bytes]
    reader.take(stored)
    if (fault := reader.end()) is not None:
        return fault
    if header.packing != NOT_PACKED:
        # Without `take` the block goes where the packed bytes lie.
        packed = memoryview(bytes(stored)) if take is None else stored
        return _hand_on(header, packed, take or _filling(target), codecs)
    return HEADER_BYTES + stored.nbytes if take is None or take(0, stored) else None


def _filling(target: memoryview) -> Take:
    def fill(offset: int, piece: memoryview) -> bool:
        target[offset : offset + piece.nbytes] = piece
        return True

    return fill


def _unpack(header: Header, packed: memoryview, take: Take, codecs: Codecs) -> bool | Fault:
    """Hand a compressed block on, whose bytes have been verified; return whether `take` wanted all of it."""
    _, block_bytes, width = header.packing
    found = codecs().unpack(packed, block_bytes, width, take)
    if found is None:
        return False
    return found or Fault.PACKING


def stream_verified(  # noqa: PLR0913 - keywords
    fs: FileSystem,
    fd: int,
    key: BlockKey,
    home: Home,
    *,
    page: memoryview,
    buffer: memoryview,
    take: Take,
    keyring: Keyring | None = None,
    codecs: Codecs,
) -> int | Fault | None:
    """Hand a block on piece by piece while it is in the core's cache, for files opened without O_DIRECT.

    The buffer is as long as the block, but only its start is used, unless the block is compressed. The pieces are
    worth nothing unless the answer is the number of bytes read; None means that `take` ended it.
    """
    piece_bytes = min(PIECE_BYTES, buffer.nbytes)
    filled = _read_start(fs, fd, page, buffer[:piece_bytes])
    if isinstance(filled, Fault):
        return filled
    header = _expect(fs, fd, key, home, page, buffer.nbytes)
    if isinstance(header, Fault):
        return header
    reader = _begin(header, page, keyring)
    if isinstance(reader, Fault):
        return reader
    if header.packing != NOT_PACKED:
        packed = buffer[: header.payload_bytes]
        return _read_packed(fs, fd, packed, filled, reader) or _hand_on(header, packed, take, codecs)
    payload_bytes, done = buffer.nbytes, 0
    while True:
        if filled:
            piece = buffer[:filled]
            reader.take(piece)
            if not take(done, piece):
                return None
            done += filled
        if done == payload_bytes:
            return reader.end() or HEADER_BYTES + done
        filled = fs.preadv(fd, [buffer[: min(piece_bytes, payload_bytes - done)]], HEADER_BYTES + done)
        if not filled:
            return Fault.TRUNCATED


def _read_start(fs: FileSystem, fd: int, page: memoryview, piece: memoryview) -> int | Fault:
    """Read the header and what follows it with one call; return how much of the piece was filled."""
    filled = fs.preadv(fd, [page, piece], 0) - HEADER_BYTES
    if filled < 0 and (header_bytes := read_page(fs, fd, page)) < HEADER_BYTES:
        return Fault.TRUNCATED if header_bytes else Fault.EMPTY
    return max(0, filled)


def _read_packed(fs: FileSystem, fd: int, packed: memoryview, filled: int, reader: PayloadReader) -> Fault | None:
    """Read what is missing of a compressed payload, and verify all of it; return what is wrong."""
    done = 0
    while True:
        reached = min(done + filled, packed.nbytes)
        if reached > done:
            reader.take(packed[done:reached])
        done = reached
        if done == packed.nbytes:
            return reader.end()
        filled = fs.preadv(fd, [packed[done : done + PIECE_BYTES]], HEADER_BYTES + done)
        if not filled:
            return Fault.TRUNCATED


def _hand_on(header: Header, packed: memoryview, take: Take, codecs: Codecs) -> int | Fault | None:
    is_taken = _unpack(header, packed, take, codecs)
    if isinstance(is_taken, Fault):
        return is_taken
    return HEADER_BYTES + packed.nbytes if is_taken else None


def mapped_verified(  # noqa: PLR0913 - keywords
    fs: FileSystem,
    fd: int,
    key: BlockKey,
    home: Home,
    *,
    mapped: memoryview,
    buffer: memoryview,
    take: Take,
    keyring: Keyring | None,
    codecs: Codecs,
) -> int | Fault | None:
    """Do as `stream_verified` does with a file that is mapped; what is in clear there is handed on without a copy.

    A writer that changes the file in place between verification and copy could as well change it later. Blocks are
    written once and renamed, and a checksum keeps out damage, not an attacker.
    """
    if mapped.nbytes < HEADER_BYTES:
        return Fault.TRUNCATED
    page = mapped[:HEADER_BYTES]
    header = _expect(fs, fd, key, home, page, buffer.nbytes)
    if isinstance(header, Fault):
        return header
    reader = _begin(header, page, keyring)
    if isinstance(reader, Fault):
        return reader
    is_packed = header.packing != NOT_PACKED
    payload = mapped[HEADER_BYTES : HEADER_BYTES + header.payload_bytes]
    for start in range(0, payload.nbytes, _MAPPED_PIECE_BYTES):
        piece = payload[start : start + _MAPPED_PIECE_BYTES]
        if keyring is not None:
            # It is decrypted where it is.
            place = start if is_packed else 0
            buffer[place : place + piece.nbytes] = piece
            piece = buffer[place : place + piece.nbytes]
        reader.take(piece)
        if not is_packed and not take(start, piece):
            return None
    if payload.nbytes < header.payload_bytes:
        return Fault.TRUNCATED
    fault = reader.end()
    if fault is None and is_packed:
        return _hand_on(header, payload if keyring is None else buffer[: payload.nbytes], take, codecs)
    return fault or HEADER_BYTES + payload.nbytes


def _begin(header: Header, page: memoryview, keyring: Keyring | None) -> PayloadReader | Fault:
    return begin_reading(header, page, keyring) if can_unpack(header) else Fault.ALGORITHM


def _expect(  # noqa: PLR0913, PLR0917 - what is expected of a file
    fs: FileSystem, fd: int, key: BlockKey, home: Home, page: memoryview, block_bytes: int
) -> Header | Fault:
    header = decode_header(page)
    if isinstance(header, Fault):
        return header
    if (fault := misplaced(header, key, home)) is not None:
        return fault
    if header.block_bytes != block_bytes:
        is_short = fs.fstat(fd).st_size < HEADER_BYTES + header.payload_bytes
        return Fault.TRUNCATED if is_short else Fault.LENGTH
    return header


def quarantine(fs: FileSystem, root: str, bad: os.stat_result, key: BlockKey, fault: Fault) -> None:
    """Move the file away, unless the name means another file by now; give up quietly where that fails."""
    path = f"{root}/{block_path(key)}"
    moved = f"{root}/{quarantine_path(key, fault.value, new_token())}"
    with contextlib.suppress(OSError):
        if not os.path.samestat(bad, fs.stat(path)):
            return
        try:
            _rename(fs, path, moved)
        except FileNotFoundError:
            return
        except OSError:
            # A full volume has no room for the new name. The block must go all the same, or no writer replaces it.
            fs.unlink(path)
            return
        if not os.path.samestat(bad, fs.stat(moved)):
            # A writer replaced the file between our two calls: this is its block, and it goes back.
            fs.rename(moved, path)


def _rename(fs: FileSystem, path: str, moved: str) -> None:
    try:
        fs.rename(path, moved)
    except FileNotFoundError:
        make_directories(fs, moved.rpartition("/")[0])
        fs.rename(path, moved)


Read = Callable[[int, bool], int | Fault | None]
"""Reads an open file, told whether it was opened with O_DIRECT; as `read_whole` and `stream_verified`."""


class ExistingFile(NamedTuple):
    """The file under a block's name before the block is written."""

    size: int
    is_whole: bool


class Access:
    """The files of the blocks under one root; any thread may call, and waits for as long as the volume does."""

    def __init__(self, fs: FileSystem, root: str) -> None:
        """Store the settings."""
        self._fs = fs
        self._root = root
        self.home = home_of(root)
        """Whose blocks these are."""
        self.mount = mount_of(root)
        """The mount that holds the root."""
        self._absent_from_cache = self.mount.is_nfs
        """Whether a name that was looked for in vain stays absent for this node, for half a minute with NFS."""

    def read(self, key: BlockKey, direct: int, read: Read) -> int | Fault | None:
        """Open and read a block's file, and move it out of the way if it is damaged.

        A network file system says ESTALE of an open file that was removed or replaced on the server. Its name is asked
        for once more then: whatever is there now is the answer. Servers that go on to say so are a volume that fails.
        A name that was looked for in vain before is asked for once more too where the node answers from a cache.

        Args:
            key: The block.
            direct: O_DIRECT or 0.
            read: Called again from the start where the file was stale.

        Raises:
            FileNotFoundError: the volume does not have the block.
        """
        try:
            try:
                return self._read_once(key, direct, read)
            except OSError as error:
                if not self._ask_anew(key, error.errno):
                    raise
            return self._read_once(key, direct, read)
        except FileNotFoundError:
            raise
        except NotADirectoryError as error:
            raise FileNotFoundError(error.errno, error.strerror) from error
        except OSError:
            return self._explain(key)

    def find(self, key: BlockKey, block_bytes: int, page: memoryview, keyring: Keyring | None) -> ExistingFile:
        """Look at the file that has the block's name: its size, and whether length and header are right."""
        try:
            fd = self._fs.open(self._path(key), READ_FLAGS)
        except OSError:
            return ExistingFile(0, is_whole=False)
        try:
            size = self._fs.fstat(fd).st_size
            header = decode_header(page[: read_page(self._fs, fd, page)])
        except OSError:
            return ExistingFile(0, is_whole=False)
        finally:
            with contextlib.suppress(OSError):
                self._fs.close(fd)
        is_ours = isinstance(header, Header) and misplaced(header, key, self.home) is None
        if not isinstance(header, Header) or not is_ours or header.block_bytes != block_bytes:
            return ExistingFile(size, is_whole=False)
        return ExistingFile(size, size == HEADER_BYTES + header.payload_bytes and can_read(header, keyring))

    def clear(self, key: BlockKey) -> None:
        """Put away what is no file in the place of a block, since no file can be renamed over a directory."""
        with contextlib.suppress(FileNotFoundError):
            self._explain(key)

    def _read_once(self, key: BlockKey, direct: int, read: Read) -> int | Fault | None:
        fd = self._fs.open(self._path(key), READ_FLAGS | direct)
        try:
            found = read(fd, bool(direct))
            if isinstance(found, int) and self._fs.fstat(fd).st_size != found:
                found = Fault.TRAILING
            if isinstance(found, Fault) and found.is_damage:
                # Before the close: the open file keeps its inode number from being given to another.
                quarantine(self._fs, self._root, self._fs.fstat(fd), key, found)
            return found
        finally:
            with contextlib.suppress(OSError):
                self._fs.release(fd)

    def _explain(self, key: BlockKey) -> Fault:
        """Return why a file cannot be read: the volume fails, or it is no file. The latter is put away.

        Raises:
            FileNotFoundError: it is not there any more. Network file systems say many things of a file that another
                node removes while it is read.
        """
        try:
            status = self._fs.stat(self._path(key))
        except FileNotFoundError:
            raise
        except OSError:
            return Fault.IO
        if stat.S_ISREG(status.st_mode):
            return Fault.IO
        try:
            # A link, a pipe or a device holds no data of a writer.
            self._fs.unlink(self._path(key))
        except OSError:
            quarantine(self._fs, self._root, status, key, Fault.MAGIC)
        return Fault.MAGIC

    def _ask_anew(self, key: BlockKey, reason: int | None) -> bool:
        """Have the node ask the server past its caches; return whether that may change the answer."""
        if reason == errno.ESTALE:
            # Some nodes open what they have in mind for another second.
            with contextlib.suppress(OSError):
                self._fs.look_again(self._path(key))
            return True
        return reason == errno.ENOENT and self.ask_for_names(key)

    def ask_for_names(self, key: BlockKey) -> bool:
        """Have the node ask the server which names there are above a block; return whether there are directories.

        A client of NFS asks whenever a directory is opened, and forgets then what was absent if anything has changed.
        """
        if not self._absent_from_cache:
            return False
        directory = self._root
        try:
            for name in block_path(key).split("/"):
                self._fs.close(self._fs.open(directory, READ_FLAGS))
                directory = f"{directory}/{name}"
        except OSError:
            return False
        return True

    def _path(self, key: BlockKey) -> str:
        return f"{self._root}/{block_path(key)}"
