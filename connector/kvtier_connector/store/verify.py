# SPDX-License-Identifier: Apache-2.0
"""Read one block file and believe none of its bytes before they are verified. No thread and no state of its own."""

from __future__ import annotations

from blake3 import blake3

from kvtier_connector.store.format import HEADER_BYTES, Fault, Header, decode_header
from kvtier_connector.store.fs import FileSystem, read_block
from kvtier_connector.store.layout import BlockKey

PIECE_BYTES = 512 << 10
"""Through the page cache, this much is read and hashed before more is read: it is still in the core's cache then."""


class _Verifier:
    """Takes in what has been read so far, and stops the read at the first thing that is wrong."""

    def __init__(self, key: BlockKey, page: memoryview, target: memoryview) -> None:
        self.header: Header | None = None
        self.fault: Fault | None = None
        self._key = key
        self._page = page
        self._target = target
        self._hasher = blake3()
        self._hashed = 0

    def take(self, done: int) -> bool:
        """Look at the first `done` bytes of the file; say whether the rest is wanted."""
        if done < HEADER_BYTES:
            return True
        if self.header is None:
            self._take_header()
        if self.fault is None:
            reached = done - HEADER_BYTES
            self._hasher.update(self._target[self._hashed : reached])
            self._hashed = reached
        return self.fault is None

    def digest(self) -> bytes:
        return self._hasher.digest()

    def _take_header(self) -> None:
        header = decode_header(self._page)
        if isinstance(header, Fault):
            self.fault = header
        elif header.key != self._key:
            self.fault = Fault.KEY
        elif header.payload_bytes != self._target.nbytes:
            self.header, self.fault = header, Fault.LENGTH
        else:
            self.header = header


def read_verified(  # noqa: PLR0913 - keywords
    fs: FileSystem, fd: int, key: BlockKey, *, page: memoryview, target: memoryview, is_direct: bool
) -> int | Fault:
    """Read a block into `target` and verify it on the way; return the bytes read, or what is wrong.

    With O_DIRECT all of it is asked for at once, since the device is faster with one large request and its bytes are
    in no cache yet.
    """
    verifier = _Verifier(key, page, target)
    bytes_read = read_block(
        fs,
        fd,
        (page, target),
        is_direct=is_direct,
        piece_bytes=0 if is_direct else PIECE_BYTES,
        is_wanted=verifier.take,
    )
    if verifier.fault is Fault.LENGTH and verifier.header is not None:
        is_short = fs.fstat(fd).st_size < HEADER_BYTES + verifier.header.payload_bytes
        return Fault.TRUNCATED if is_short else Fault.LENGTH
    if verifier.fault is not None:
        return verifier.fault
    if verifier.header is None:
        return Fault.TRUNCATED if bytes_read else Fault.EMPTY
    if bytes_read < HEADER_BYTES + target.nbytes:
        return Fault.TRUNCATED
    return bytes_read if verifier.digest() == verifier.header.checksum else Fault.CHECKSUM
