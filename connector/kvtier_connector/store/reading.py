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
from kvtier_connector.store.fs import READ_FLAGS, FileSystem, make_directories, new_token, opened, read_into
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
    fs: FileSystem, fd: int, expected: Expected, *, page: memoryview, buffer: memoryview, take: Take, is_direct: bool
) -> int | Fault | None:
    """Read a block, verify it, and hand it on piece by piece; return the bytes read, or the fault.

    None means that `take` ended it. The pieces are worth nothing unless the answer is a number. A device is fastest
    with one large request, so a file that was opened with O_DIRECT is read whole. Others are read in pieces, or where
    they lie in memory. A writer that changes a file in place between verification and copy could as well change it
    later. A checksum keeps out damage, not an attacker. The buffer is as long as the block.
    """
    # An encrypted payload is decrypted in the buffer.
    mapped = None if is_direct or expected.keyring is not None else fs.map(fd)
    if mapped is None:
        filled = fs.preadv(fd, [page, buffer if is_direct else buffer[:PIECE_BYTES]], 0) - HEADER_BYTES
        header_bytes = read_into(fs, fd, page) if filled < 0 and not is_direct else HEADER_BYTES + filled
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
    if mapped is None:
        payload = buffer[:end]
        # A compressed payload stays in its place until the end.
        pieces = _read_pieces(fs, fd, buffer, end, max(0, filled), is_direct=is_direct, is_kept=is_direct or is_packed)
    else:
        payload = mapped[HEADER_BYTES : HEADER_BYTES + end]
        starts = range(0, payload.nbytes, _MAPPED_PIECE_BYTES)
        pieces = (payload[start : start + _MAPPED_PIECE_BYTES] for start in starts)
    done = 0
    for piece in pieces:
        reader.take(piece)
        if not is_packed and not take(done, piece):
            return None
        done += piece.nbytes
    fault = Fault.TRUNCATED if done < end else reader.end()
    if fault is None and is_packed:
        is_taken = expected.codec().unpack(payload, header.block_bytes, header.packing.width, take)
        fault = Fault.PACKING if is_taken is False else None
        if is_taken is None:
            return None
    return fault or HEADER_BYTES + end


def _read_pieces(  # noqa: PLR0913 - keywords
    fs: FileSystem, fd: int, buffer: memoryview, end: int, filled: int, *, is_direct: bool, is_kept: bool
) -> Iterator[memoryview]:
    """Yield a payload; the buffer has its first `filled` bytes. Fewer than `end` come where the file ends.

    Each piece has its own place in the buffer if it is kept; else all are read to its start.
    """
    done, place = 0, buffer
    while True:
        piece = place[: min(filled, end - done)]
        if is_direct and piece.nbytes < end - done:
            # O_DIRECT continues at page boundaries only.
            piece = piece[: piece.nbytes - piece.nbytes % ALIGNMENT]
        if piece.nbytes:
            yield piece
            done += piece.nbytes
        if done == end:
            return
        place = buffer[done if is_kept else 0 :]
        if not is_direct:
            place = place[: min(PIECE_BYTES, end - done)]
        filled = fs.preadv(fd, [place], HEADER_BYTES + done)
        if filled < min(end - done, ALIGNMENT if is_direct else 1):
            return


def _expect(fs: FileSystem, fd: int, expected: Expected, page: memoryview, block_bytes: int) -> Header | Fault:
    header = decode_header(page)
    if isinstance(header, Fault):
        return header
    if (fault := misplaced(header, expected.key, expected.home)) is not None:
        return fault
    if header.block_bytes != block_bytes:
        return Fault.TRUNCATED if fs.fstat(fd).st_size < HEADER_BYTES + header.payload_bytes else Fault.LENGTH
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

    def read(self, key: BlockKey, direct: int, read: Read) -> int | Fault | None:
        """Open and read a block's file, and move it out of the way if it is damaged.

        A network file system says ESTALE of an open file that was removed or replaced on the server. Its name is asked
        for once more then, and `read` is called again: whatever is there now is the answer. Servers that go on to say
        so are a volume that fails. A name that was looked for in vain before is asked for once more too where the node
        answers from a cache. `direct` is O_DIRECT or 0.

        Raises:
            FileNotFoundError: the volume does not have the block; or NotADirectoryError, likewise.
        """
        try:
            try:
                return self._read_once(key, direct, read)
            except OSError as error:
                if not self._ask_anew(key, error.errno):
                    raise
            return self._read_once(key, direct, read)
        except (FileNotFoundError, NotADirectoryError):
            raise
        except OSError:
            return self._explain(key)

    def has_whole(self, key: BlockKey, block_bytes: int, page: memoryview, keyring: Keyring | None) -> bool:
        """Return whether length and header of the file that has the block's name are right."""
        try:
            with opened(self._fs, self.path(key)) as fd:
                size = self._fs.fstat(fd).st_size
                header = decode_header(page[: read_into(self._fs, fd, page)])
        except OSError:
            return False
        if isinstance(header, Fault) or misplaced(header, key, self.home) is not None:
            return False
        is_sized_right = header.block_bytes == block_bytes and size == HEADER_BYTES + header.payload_bytes
        return is_sized_right and can_read(header, keyring)

    def clear(self, key: BlockKey) -> None:
        """Put away what is no file in the place of a block, since no file can be renamed over a directory."""
        with contextlib.suppress(FileNotFoundError):
            self._explain(key)

    def _read_once(self, key: BlockKey, direct: int, read: Read) -> int | Fault | None:
        with opened(self._fs, self.path(key), READ_FLAGS | direct) as fd:
            found = read(fd, bool(direct))
            if isinstance(found, int) and self._fs.fstat(fd).st_size != found:
                found = Fault.TRAILING
            if isinstance(found, Fault) and found.is_damage:
                # Before the close: the open file keeps its inode number from being given to another.
                self._quarantine(self._fs.fstat(fd), key, found)
            return found

    def _explain(self, key: BlockKey) -> Fault:
        """Return why a file cannot be read: the volume fails, or it is no file. The latter is put away.

        Raises:
            FileNotFoundError: it is not there any more. Network file systems say many things of a file that another
                node removes while it is read.
        """
        try:
            status = self._fs.stat(self.path(key))
        except FileNotFoundError:
            raise
        except OSError:
            return Fault.IO
        if stat.S_ISREG(status.st_mode):
            return Fault.IO
        try:
            # A link, a pipe or a device holds no data of a writer.
            self._fs.unlink(self.path(key))
        except OSError:
            self._quarantine(status, key, Fault.MAGIC)
        return Fault.MAGIC

    def _quarantine(self, bad: os.stat_result, key: BlockKey, fault: Fault) -> None:
        """Move the file away, unless the name means another file by now; give up quietly where that fails."""
        path, fs = self.path(key), self._fs
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
            if os.path.samestat(bad, fs.stat(moved)):
                # It is kept for a time from now on, however old the block is.
                fs.touch(moved)
            else:
                # A writer replaced the file between our two calls: this is its block, and it goes back.
                fs.rename(moved, path)

    def _ask_anew(self, key: BlockKey, reason: int | None) -> bool:
        """Have the node ask the server past its caches; return whether that may change the answer."""
        if reason == errno.ESTALE:
            # Some nodes open what they have in mind for another second.
            self._fs.look_again(self.path(key))
            return True
        return reason == errno.ENOENT and self.ask_for_names(key)

    def ask_for_names(self, key: BlockKey) -> bool:
        """Have the node ask the server which names there are above a block; return whether there are directories.

        A client of NFS takes a name that it looked for in vain as absent for half a minute. It asks whenever a
        directory is opened, and forgets then what was absent if anything has changed.
        """
        if not self.mount.is_nfs:
            return False
        directory = self._root
        try:
            for name in block_path(key).split("/"):
                self._fs.close(self._fs.open(directory, READ_FLAGS))
                directory = f"{directory}/{name}"
        except OSError:
            return False
        return True

    def path(self, key: BlockKey) -> str:
        """Return the path of the block's file."""
        return f"{self._root}/{block_path(key)}"
