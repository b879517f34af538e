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
from collections.abc import Callable, Iterator
from typing import NamedTuple

from kvtier_connector.store.compression import Codec, Take
from kvtier_connector.store.crypto import Keyring, begin_reading, can_read, can_unpack
from kvtier_connector.store.fs import (
    READ_FLAGS,
    FileSystem,
    make_directories,
    new_token,
    read_page,
)
from kvtier_connector.store.header import HEADER_BYTES, NOT_PACKED, Fault, Header, decode_header, misplaced
from kvtier_connector.store.layout import ALIGNMENT, BlockKey, Home, block_path, home_of, quarantine_path
from kvtier_connector.store.mounts import mount_of

PIECE_BYTES = 1 << 20
"""Through the page cache, this much is read and verified before more is read: it is still in the core's cache then."""
_MAPPED_PIECE_BYTES = 1 << 19
"""The same of a file that lies in memory and is mapped: fewer bytes than the smaller cache of a core holds."""


class Expected(NamedTuple):
    """The block that a reader expects in a file, and the means to decode it."""

    key: BlockKey
    home: Home
    keyring: Keyring | None
    codec: Callable[[], Codec]
    """Returns the codec of the calling thread."""


def read_verified(  # noqa: PLR0913 - keywords
    fs: FileSystem,
    fd: int,
    expected: Expected,
    *,
    page: memoryview,
    buffer: memoryview,
    take: Take | None,
    is_direct: bool,
) -> int | Fault | None:
    """Read a block, verify it, and hand it on piece by piece; return the bytes read, or the fault.

    The pieces are worth nothing unless the answer is a number. A device is fastest with one large request, so a file
    that was opened with O_DIRECT is read whole. Others are read in pieces, or where they lie in memory. A writer that
    changes a file in place between verification and copy could as well change it later. A checksum keeps out damage,
    not an attacker.

    Args:
        fs: The system calls.
        fd: The open file.
        expected: The block.
        page: Memory for the header.
        buffer: As long as the block; its content is undefined afterwards, unless there is no `take`.
        take: None leaves the block in the buffer. Where it returns False, the answer is None.
        is_direct: Whether the file was opened with O_DIRECT.
    """
    is_whole = is_direct or take is None
    mapped = None if is_whole else fs.map(fd)
    piece_bytes = buffer.nbytes if is_whole else PIECE_BYTES if mapped is None else _MAPPED_PIECE_BYTES
    if mapped is None:
        filled = fs.preadv(fd, [page, buffer[:piece_bytes]], 0) - HEADER_BYTES
        header_bytes = read_page(fs, fd, page) if filled < 0 and not is_direct else HEADER_BYTES + filled
    else:
        filled, header_bytes, page = 0, mapped.nbytes, mapped[:HEADER_BYTES]
    if header_bytes < HEADER_BYTES:
        return Fault.TRUNCATED if header_bytes else Fault.EMPTY
    header = _expect(fs, fd, expected, page, buffer.nbytes)
    if isinstance(header, Fault):
        return header
    reader = begin_reading(header, page, expected.keyring)
    if isinstance(reader, Fault):
        return reader
    end, is_packed = header.payload_bytes, header.packing != NOT_PACKED
    # A compressed payload stays in its place until the end.
    is_kept = is_whole or is_packed
    if mapped is None:
        how = _Requests(end, piece_bytes, is_direct=is_direct, is_kept=is_kept)
        pieces = _read_pieces(fs, fd, buffer, max(0, filled), how)
    else:
        mapped = mapped[HEADER_BYTES : HEADER_BYTES + end]
        pieces = _mapped_pieces(mapped, None if expected.keyring is None else buffer, is_kept=is_kept)
    done = 0
    for piece in pieces:
        reader.take(piece)
        if take is not None and not is_packed and not take(done, piece):
            return None
        done += piece.nbytes
    fault = Fault.TRUNCATED if done < end else reader.end()
    if fault is None and is_packed:
        packed = mapped if mapped is not None and expected.keyring is None else buffer[:end]
        if take is None:
            packed = memoryview(bytes(packed))
        return _unpack(expected, header, packed, take or _filling(buffer))
    return fault or HEADER_BYTES + end


def _unpack(expected: Expected, header: Header, packed: memoryview, take: Take) -> int | Fault | None:
    """Decompress a payload that was verified; return as `read_verified` does."""
    is_taken = expected.codec().unpack(packed, header.block_bytes, header.packing.width, take)
    if is_taken is None:
        return None
    return HEADER_BYTES + packed.nbytes if is_taken else Fault.PACKING


def _filling(target: memoryview) -> Take:
    def fill(offset: int, piece: memoryview) -> bool:
        target[offset : offset + piece.nbytes] = piece
        return True

    return fill


class _Requests(NamedTuple):
    end: int
    """Length of the payload."""
    piece_bytes: int
    is_direct: bool
    is_kept: bool
    """Whether each piece of the payload has its own place in the buffer; else all are read to its start."""


def _read_pieces(fs: FileSystem, fd: int, buffer: memoryview, filled: int, how: _Requests) -> Iterator[memoryview]:
    """Yield a payload; the buffer has its first `filled` bytes. Fewer come where the file ends."""
    done, place, end = 0, buffer, how.end
    while True:
        piece = place[: min(filled, end - done)]
        if how.is_direct and piece.nbytes < end - done:
            # O_DIRECT continues at page boundaries only.
            piece = piece[: piece.nbytes - piece.nbytes % ALIGNMENT]
        if piece.nbytes:
            yield piece
            done += piece.nbytes
        if done == end:
            return
        place = buffer[done if how.is_kept else 0 :][: how.piece_bytes]
        if not how.is_direct:
            place = place[: end - done]
        filled = fs.preadv(fd, [place], HEADER_BYTES + done)
        if filled < min(end - done, ALIGNMENT if how.is_direct else 1):
            return


def _mapped_pieces(payload: memoryview, buffer: memoryview | None, *, is_kept: bool) -> Iterator[memoryview]:
    """Yield a payload that is mapped; with a buffer, a copy of it that may be decrypted where it is."""
    for start in range(0, payload.nbytes, _MAPPED_PIECE_BYTES):
        piece = payload[start : start + _MAPPED_PIECE_BYTES]
        if buffer is not None:
            place = buffer[start if is_kept else 0 :][: piece.nbytes]
            place[:] = piece
            piece = place
        yield piece


def _expect(fs: FileSystem, fd: int, expected: Expected, page: memoryview, block_bytes: int) -> Header | Fault:
    header = decode_header(page)
    if isinstance(header, Fault):
        return header
    if (fault := misplaced(header, expected.key, expected.home)) is not None:
        return fault
    if header.block_bytes != block_bytes:
        is_short = fs.fstat(fd).st_size < HEADER_BYTES + header.payload_bytes
        return Fault.TRUNCATED if is_short else Fault.LENGTH
    return header if can_unpack(header) else Fault.ALGORITHM


Read = Callable[[int, bool], int | Fault | None]
"""Reads an open file, told whether it was opened with O_DIRECT."""


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

    def has_whole(self, key: BlockKey, block_bytes: int, page: memoryview, keyring: Keyring | None) -> bool:
        """Return whether length and header of the file that has the block's name are right."""
        try:
            fd = self._fs.open(self._path(key), READ_FLAGS)
        except OSError:
            return False
        try:
            size = self._fs.fstat(fd).st_size
            header = decode_header(page[: read_page(self._fs, fd, page)])
        except OSError:
            return False
        finally:
            with contextlib.suppress(OSError):
                self._fs.close(fd)
        if isinstance(header, Fault) or misplaced(header, key, self.home) is not None:
            return False
        is_sized_right = header.block_bytes == block_bytes and size == HEADER_BYTES + header.payload_bytes
        return is_sized_right and can_read(header, keyring)

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
                self._quarantine(self._fs.fstat(fd), key, found)
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
            self._quarantine(status, key, Fault.MAGIC)
        return Fault.MAGIC

    def _quarantine(self, bad: os.stat_result, key: BlockKey, fault: Fault) -> None:
        """Move the file away, unless the name means another file by now; give up quietly where that fails."""
        path, fs = self._path(key), self._fs
        moved = f"{self._root}/{quarantine_path(key, fault.value, new_token())}"
        with contextlib.suppress(OSError):
            if not os.path.samestat(bad, fs.stat(path)):
                return
            try:
                try:
                    fs.rename(path, moved)
                except FileNotFoundError:
                    make_directories(fs, moved.rpartition("/")[0])
                    fs.rename(path, moved)
            except FileNotFoundError:
                return
            except OSError:
                # A full volume has no room for the new name. The block must go all the same, or no writer replaces it.
                fs.unlink(path)
                return
            if not os.path.samestat(bad, fs.stat(moved)):
                # A writer replaced the file between our two calls: this is its block, and it goes back.
                fs.rename(moved, path)

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
