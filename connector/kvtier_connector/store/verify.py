# SPDX-License-Identifier: Apache-2.0
"""Read one block file and believe none of its bytes before they are verified. No thread and no state of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypedDict

from kvtier_connector.store.codec import Codec
from kvtier_connector.store.format import HEADER_BYTES, NOT_PACKED, Fault, Header, decode_header, misplaced
from kvtier_connector.store.fs import FileSystem, read_block, read_page
from kvtier_connector.store.keyring import Keyring
from kvtier_connector.store.layout import BlockKey, Home
from kvtier_connector.store.sealing import Reading, begin_reading, can_unpack

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
        if self.fault is None and self._reading is not None and self.header is not None:
            reached = min(done - HEADER_BYTES, self.header.payload_bytes)
            self._reading.take(self._target[self._taken : reached])
            self._taken = reached
        return self.fault is None and not self.is_whole

    @property
    def is_whole(self) -> bool:
        """Whether all of the payload has been taken in."""
        return self.header is not None and self._taken == self.header.payload_bytes

    def end(self) -> Fault | None:
        """Say what is wrong with a file that was read to its end."""
        return Fault.TRUNCATED if self._reading is None else self._reading.end()

    def _take_header(self) -> None:
        header = decode_header(self._page)
        if isinstance(header, Fault):
            self.fault = header
        elif (fault := misplaced(header, self._key, self._home)) is not None:
            self.fault = fault
        elif header.block_bytes != self._target.nbytes:
            self.header, self.fault = header, Fault.LENGTH
        else:
            self.header = header
            begun = _begin(header, self._page, self._keyring)
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
    codecs: Codecs,
    take: Take | None = None,
) -> int | Fault | None:
    """Read a block into `target` and verify it on the way; return the bytes read, or what is wrong.

    With O_DIRECT all of it is asked for at once, since the device is faster with one large request and its bytes are
    in no cache yet. A compressed block is read into the start of `target`. With `take` the block is handed on once it
    is verified, and None means that it ended that.
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
    if not verifier.is_whole:
        return Fault.TRUNCATED
    if (fault := verifier.end()) is not None:
        return fault
    stored = target[: verifier.header.payload_bytes]
    is_taken: bool | Fault
    if verifier.header.packing == NOT_PACKED:
        is_taken = take is None or take(0, stored)
    elif take is None:
        # The packed bytes lie where the block is to be.
        is_taken = _unpack(verifier.header, memoryview(bytes(stored)), _filling(target), codecs)
    else:
        is_taken = _unpack(verifier.header, stored, take, codecs)
    if isinstance(is_taken, Fault):
        return is_taken
    return HEADER_BYTES + stored.nbytes if is_taken else None


def _filling(target: memoryview) -> Take:
    def fill(offset: int, piece: memoryview) -> bool:
        target[offset : offset + piece.nbytes] = piece
        return True

    return fill


def _unpack(header: Header, packed: memoryview, take: Take, codecs: Codecs) -> bool | Fault:
    """Hand a compressed block on, whose bytes have been verified; say whether `take` wanted all of it."""
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

    The buffer is as long as the block, but only its start is used, unless the block is compressed. What was taken is
    worth nothing unless the answer is the number of bytes read; None means that `take` ended it.
    """
    piece_bytes = min(PIECE_BYTES, buffer.nbytes)
    filled = _read_start(fs, fd, page, buffer[:piece_bytes])
    if isinstance(filled, Fault):
        return filled
    header = _expect(fs, fd, key, home, page, buffer.nbytes)
    if isinstance(header, Fault):
        return header
    reading = _begin(header, page, keyring)
    if isinstance(reading, Fault):
        return reading
    if header.packing != NOT_PACKED:
        packed = buffer[: header.payload_bytes]
        return _read_packed(fs, fd, packed, filled, reading) or _hand_on(header, packed, take, codecs)
    payload_bytes, done = buffer.nbytes, 0
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


def _read_start(fs: FileSystem, fd: int, page: memoryview, piece: memoryview) -> int | Fault:
    """Read the header and what follows it with one call; return how much of the piece was filled."""
    filled = fs.preadv(fd, [page, piece], 0) - HEADER_BYTES
    if filled < 0 and (header_bytes := read_page(fs, fd, page)) < HEADER_BYTES:
        return Fault.TRUNCATED if header_bytes else Fault.EMPTY
    return max(0, filled)


def _read_packed(fs: FileSystem, fd: int, packed: memoryview, filled: int, reading: Reading) -> Fault | None:
    """Read what is missing of a compressed payload, and verify all of it; return what is wrong."""
    done = 0
    while True:
        reached = min(done + filled, packed.nbytes)
        if reached > done:
            reading.take(packed[done:reached])
        done = reached
        if done == packed.nbytes:
            return reading.end()
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

    Whoever changes the file in place between the look and the copy changes it as if the row was changed later: blocks
    are written once and renamed, and a checksum keeps out damage, not an attacker.
    """
    if mapped.nbytes < HEADER_BYTES:
        return Fault.TRUNCATED
    page = mapped[:HEADER_BYTES]
    header = _expect(fs, fd, key, home, page, buffer.nbytes)
    if isinstance(header, Fault):
        return header
    reading = _begin(header, page, keyring)
    if isinstance(reading, Fault):
        return reading
    is_packed = header.packing != NOT_PACKED
    payload = mapped[HEADER_BYTES : HEADER_BYTES + header.payload_bytes]
    for start in range(0, payload.nbytes, _MAPPED_PIECE_BYTES):
        piece = payload[start : start + _MAPPED_PIECE_BYTES]
        if keyring is not None:
            # It is decrypted where it is.
            place = start if is_packed else 0
            buffer[place : place + piece.nbytes] = piece
            piece = buffer[place : place + piece.nbytes]
        reading.take(piece)
        if not is_packed and not take(start, piece):
            return None
    if payload.nbytes < header.payload_bytes:
        return Fault.TRUNCATED
    fault = reading.end()
    if fault is None and is_packed:
        return _hand_on(header, payload if keyring is None else buffer[: payload.nbytes], take, codecs)
    return fault or HEADER_BYTES + payload.nbytes


def _begin(header: Header, page: memoryview, keyring: Keyring | None) -> Reading | Fault:
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
