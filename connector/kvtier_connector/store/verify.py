# SPDX-License-Identifier: Apache-2.0
"""Read one block file and believe none of its bytes before they are verified. No thread and no state of its own."""

from __future__ import annotations

from collections.abc import Callable

from kvtier_connector.store.format import HEADER_BYTES, Fault, Header, decode_header, misplaced
from kvtier_connector.store.fs import FileSystem, read_block, read_page
from kvtier_connector.store.keyring import Keyring
from kvtier_connector.store.layout import BlockKey, Home
from kvtier_connector.store.sealing import Reading, begin_reading

PIECE_BYTES = 1 << 20
"""Through the page cache, this much is read and verified before more is read: it is still in the core's cache then."""
_MAPPED_PIECE_BYTES = 1 << 19
"""The same of a file that lies in memory and is mapped: fewer bytes than the smaller cache of a core holds."""

Take = Callable[[int, memoryview], bool]
"""Takes the payload's bytes from an offset on, before they are verified; False ends the read. The memory is reused."""


class _Verifier:
    """Takes in what has been read so far, and stops the read at the first thing that is wrong."""

    def __init__(
        self, key: BlockKey, home: Home, page: memoryview, target: memoryview, keyring: Keyring | None
    ) -> None:
        self.header: Header | None = None
        self.fault: Fault | None = None
        self._key = key
        self._home = home
        self._page = page
        self._target = target
        self._keyring = keyring
        self._reading: Reading | None = None
        self._taken = 0

    def take(self, done: int) -> bool:
        """Look at the first `done` bytes of the file; say whether the rest is wanted."""
        if done < HEADER_BYTES:
            return True
        if self.header is None:
            self._take_header()
        if self.fault is None and self._reading is not None:
            reached = done - HEADER_BYTES
            self._reading.take(self._target[self._taken : reached])
            self._taken = reached
        return self.fault is None

    def end(self) -> Fault | None:
        """Say what is wrong with a file that was read to its end."""
        return Fault.TRUNCATED if self._reading is None else self._reading.end()

    def _take_header(self) -> None:
        header = decode_header(self._page)
        if isinstance(header, Fault):
            self.fault = header
        elif (fault := misplaced(header, self._key, self._home)) is not None:
            self.fault = fault
        elif header.payload_bytes != self._target.nbytes:
            self.header, self.fault = header, Fault.LENGTH
        else:
            self.header = header
            begun = begin_reading(header, self._page, self._keyring)
            if isinstance(begun, Fault):
                self.fault = begun
            else:
                self._reading = begun


def read_verified(  # noqa: PLR0913 - keywords
    fs: FileSystem,
    fd: int,
    key: BlockKey,
    home: Home,
    *,
    page: memoryview,
    target: memoryview,
    is_direct: bool,
    keyring: Keyring | None = None,
) -> int | Fault:
    """Read a block into `target` and verify it on the way; return the bytes read, or what is wrong.

    With O_DIRECT all of it is asked for at once, since the device is faster with one large request and its bytes are
    in no cache yet.
    """
    verifier = _Verifier(key, home, page, target, keyring)
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
    return verifier.end() or bytes_read


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
) -> int | Fault | None:
    """Hand a block on piece by piece while it is in the core's cache, for files opened without O_DIRECT.

    The buffer is as long as the payload, but only its start is used. What was taken is worth nothing unless the answer
    is the number of bytes read; None means that `take` ended it.
    """
    payload_bytes = buffer.nbytes
    piece_bytes = min(PIECE_BYTES, payload_bytes)
    filled = fs.preadv(fd, [page, buffer[: min(piece_bytes, payload_bytes)]], 0) - HEADER_BYTES
    if filled < 0:
        filled = 0
        if (header_bytes := read_page(fs, fd, page)) < HEADER_BYTES:
            return Fault.TRUNCATED if header_bytes else Fault.EMPTY
    header = _expect(fs, fd, key, home, page, payload_bytes)
    if isinstance(header, Fault):
        return header
    reading = begin_reading(header, page, keyring)
    if isinstance(reading, Fault):
        return reading
    done = 0
    while True:
        if filled:
            piece = buffer[:filled]
            reading.take(piece)
            if not take(done, piece):
                return None
            done += filled
        if done == payload_bytes:
            return reading.end() or HEADER_BYTES + done
        filled = fs.preadv(fd, [buffer[: min(piece_bytes, payload_bytes - done)]], HEADER_BYTES + done)
        if not filled:
            return Fault.TRUNCATED


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
) -> int | Fault | None:
    """Do as `stream_verified` does with a file that is mapped; what is in clear there is handed on without a copy.

    Whoever changes the file in place between the look and the copy changes it as if the row was changed later: blocks
    are written once and renamed, and a checksum keeps out damage, not an attacker.
    """
    if mapped.nbytes < HEADER_BYTES:
        return Fault.TRUNCATED
    page = mapped[:HEADER_BYTES]
    header = _expect(fs, fd, key, home, page, buffer.nbytes)
    if isinstance(header, Fault):
        return header
    reading = begin_reading(header, page, keyring)
    if isinstance(reading, Fault):
        return reading
    payload = mapped[HEADER_BYTES : HEADER_BYTES + buffer.nbytes]
    for start in range(0, payload.nbytes, _MAPPED_PIECE_BYTES):
        piece = payload[start : start + _MAPPED_PIECE_BYTES]
        if keyring is not None:
            # It is decrypted where it is.
            buffer[: piece.nbytes] = piece
            piece = buffer[: piece.nbytes]
        reading.take(piece)
        if not take(start, piece):
            return None
    if payload.nbytes < buffer.nbytes:
        return Fault.TRUNCATED
    return reading.end() or HEADER_BYTES + payload.nbytes


def _expect(  # noqa: PLR0913, PLR0917 - what is expected of a file
    fs: FileSystem, fd: int, key: BlockKey, home: Home, page: memoryview, payload_bytes: int
) -> Header | Fault:
    header = decode_header(page)
    if isinstance(header, Fault):
        return header
    if (fault := misplaced(header, key, home)) is not None:
        return fault
    if header.payload_bytes != payload_bytes:
        is_short = fs.fstat(fd).st_size < HEADER_BYTES + header.payload_bytes
        return Fault.TRUNCATED if is_short else Fault.LENGTH
    return header
