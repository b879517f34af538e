# SPDX-License-Identifier: Apache-2.0
"""Opens the file of a block, and tells one that is not there, or is no file, from a volume that fails.

Everything on a shared volume may have been put there by another writer, so what stands where a file should be can be a
link, a pipe or a directory. No thread and no state of its own.
"""

from __future__ import annotations

import contextlib
import errno
import stat
from collections.abc import Callable
from typing import NamedTuple

from kvtier_connector.store.filesystems import mount_of
from kvtier_connector.store.format import HEADER_BYTES, Fault, Header, decode_header, misplaced
from kvtier_connector.store.fs import READ_FLAGS, FileSystem, read_page
from kvtier_connector.store.keyring import Keyring
from kvtier_connector.store.layout import BlockKey, block_path, home_of
from kvtier_connector.store.quarantine import quarantine
from kvtier_connector.store.sealing import can_read

Read = Callable[[int, bool], int | Fault | None]
"""Reads an open file, told whether it was opened with O_DIRECT; as `read_verified` and `stream_verified`."""


class Found(NamedTuple):
    """What is on the volume under a block's name before the block is written."""

    size: int
    is_whole: bool


class Access:
    """The files of the blocks under one root; any thread may call, and waits for as long as the volume does."""

    def __init__(self, fs: FileSystem, root: str, on_freed: Callable[[int, str], None]) -> None:
        """Store the settings; `on_freed` is told the bytes and the tenant of a damaged file that had to be removed."""
        self._fs = fs
        self._root = root
        self.home = home_of(root)
        """Whose blocks these are."""
        self._on_freed = on_freed
        self.mount = mount_of(root)
        """What holds the root."""
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

    def find(self, key: BlockKey, block_bytes: int, page: memoryview, keyring: Keyring | None) -> Found:
        """Look at the file that has the block's name: its size, and whether length and header are right."""
        try:
            fd = self._fs.open(self._path(key), READ_FLAGS)
        except OSError:
            return Found(0, is_whole=False)
        try:
            size = self._fs.fstat(fd).st_size
            header = decode_header(page[: read_page(self._fs, fd, page)])
        except OSError:
            return Found(0, is_whole=False)
        finally:
            with contextlib.suppress(OSError):
                self._fs.close(fd)
        is_ours = isinstance(header, Header) and misplaced(header, key, self.home) is None
        if not isinstance(header, Header) or not is_ours or header.block_bytes != block_bytes:
            return Found(size, is_whole=False)
        return Found(size, size == HEADER_BYTES + header.payload_bytes and can_read(header, keyring))

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
                self._on_freed(quarantine(self._fs, self._root, self._fs.fstat(fd), key, found), key.tenant)
            return found
        finally:
            with contextlib.suppress(OSError):
                self._fs.release(fd)

    def _explain(self, key: BlockKey) -> Fault:
        """Say of a file that cannot be read whether the volume fails, or whether it is none; that is put away.

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
            # Nobody can have stored anything in a link, a pipe or a device.
            self._fs.unlink(self._path(key))
        except OSError:
            quarantine(self._fs, self._root, status, key, Fault.MAGIC)
        return Fault.MAGIC

    def _ask_anew(self, key: BlockKey, reason: int | None) -> bool:
        """Have the node ask the server for what its caches may have wrong; say whether that may change the answer."""
        if reason == errno.ESTALE:
            # Some nodes open what they have in mind for another second.
            with contextlib.suppress(OSError):
                self._fs.look_again(self._path(key))
            return True
        return reason == errno.ENOENT and self._ask_for_names(key)

    def _ask_for_names(self, key: BlockKey) -> bool:
        """Have the node ask the server which names there are above a block; say whether there are directories.

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
