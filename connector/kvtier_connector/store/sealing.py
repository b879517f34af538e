# SPDX-License-Identifier: Apache-2.0
"""What makes the payload of a block trustworthy: a checksum, or encryption with a key of the ring. No thread, no I/O.

AES-256-GCM encrypts the payload and authenticates it together with the header. So a block cannot be passed off as
another one's, or another tenant's, by whoever can write to the volume but has no key.
"""

from __future__ import annotations

import mmap
import os
from typing import Protocol

from kvtier_connector.store import codec
from kvtier_connector.store.checksums import (
    CHECKSUM_BYTES,
    DEFAULT_ALGORITHM,
    HAS_AES,
    Algorithm,
    Hasher,
    can_compute,
    checksum,
    new_hasher,
)
from kvtier_connector.store.format import (
    CHECKSUM_PLACE,
    CRC_OFFSET,
    NONCE_BYTES,
    NOT_PACKED,
    TAG_BYTES,
    Encryption,
    Fault,
    Header,
    Seal,
    encode_header,
)
from kvtier_connector.store.keyring import Key, Keyring

if HAS_AES:
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

_PIECE_BYTES = 1 << 20
_NO_TAG = bytes(CHECKSUM_BYTES)


class Reading(Protocol):
    """Takes in the payload of one block piece by piece, and says at its end whether it is what its writer wrote."""

    def take(self, piece: memoryview) -> None:
        """Take in the next bytes; encrypted ones are decrypted where they are."""

    def end(self) -> Fault | None:
        """Say what is wrong with the payload, None if it is right; call it once, after the last piece."""


class _Checking:
    def __init__(self, header: Header, hasher: Hasher) -> None:
        self._header = header
        self._hasher = hasher

    def take(self, piece: memoryview) -> None:
        self._hasher.update(piece)

    def end(self) -> Fault | None:
        return None if self._hasher.digest() == self._header.checksum else Fault.CHECKSUM


class _Decrypting:
    def __init__(self, header: Header, page: memoryview, key: Key) -> None:
        self._tag = header.checksum[:TAG_BYTES]
        self._decryptor = Cipher(algorithms.AES(key.secret), modes.GCM(header.seal.nonce)).decryptor()
        self._decryptor.authenticate_additional_data(_associated(bytes(page)))

    def take(self, piece: memoryview) -> None:
        self._decryptor.update_into(piece, piece)

    def end(self) -> Fault | None:
        try:
            self._decryptor.finalize_with_tag(self._tag)
        except InvalidTag:
            return Fault.TAG
        return None


def begin_reading(header: Header, page: memoryview, keyring: Keyring | None) -> Reading | Fault:
    """Return what verifies, and decrypts, the payload of a block, or why that is not possible here.

    Args:
        header: What `page` says.
        page: The header's bytes.
        keyring: None reads blocks that are not encrypted, and only those; a ring reads encrypted ones, and only those.
    """
    fault = _find_fault(header, keyring)
    if fault is not None:
        return fault
    if keyring is None:
        hasher = new_hasher(header.algorithm)
        return Fault.ALGORITHM if hasher is None else _Checking(header, hasher)
    key = keyring.find(header.seal.key_id)
    # The ring may have changed since.
    return Fault.KEY_MISSING if key is None else _Decrypting(header, page, key)


def can_read(header: Header, keyring: Keyring | None) -> bool:
    """Say whether a block with this header can be read here, as far as the header tells."""
    return can_unpack(header) and _find_fault(header, keyring) is None


def can_unpack(header: Header) -> bool:
    """Say whether a block with this header is not compressed, or can be decompressed here."""
    return header.packing == NOT_PACKED or codec.is_available()


def _find_fault(header: Header, keyring: Keyring | None) -> Fault | None:
    if header.encryption == Encryption.NONE:
        if keyring is not None:
            return Fault.CLEAR
        return None if can_compute(header.algorithm) else Fault.ALGORITHM
    key = None if keyring is None or not HAS_AES else keyring.find(header.seal.key_id)
    if key is None:
        return Fault.KEY_MISSING
    return None if key.check == header.seal.key_check else Fault.KEY_WRONG


def with_checksum(header: Header, payload: memoryview) -> bytes:
    """Return the first page of a block that is not encrypted; the header's checksum and algorithm are set here."""
    return encode_header(
        header._replace(checksum=checksum(payload), algorithm=DEFAULT_ALGORITHM, encryption=Encryption.NONE)
    )


def encrypt(header: Header, payload: memoryview, into: memoryview, key: Key) -> bytes:
    """Encrypt the payload into memory of the same length, which may be the payload's own; return the first page.

    Each call takes a new random nonce. Two blocks of one key have the same with a chance of 2^-32 after 2^32 blocks,
    which is when a key should have been replaced long ago.
    """
    nonce = os.urandom(NONCE_BYTES)
    sealed = header._replace(
        checksum=_NO_TAG,
        algorithm=Algorithm.NONE,
        encryption=Encryption.AES_256_GCM,
        seal=Seal(key.name, key.check, nonce),
    )
    encryptor = Cipher(algorithms.AES(key.secret), modes.GCM(nonce)).encryptor()
    encryptor.authenticate_additional_data(_associated(encode_header(sealed)))
    for start in range(0, payload.nbytes, _PIECE_BYTES):
        encryptor.update_into(payload[start : start + _PIECE_BYTES], into[start : start + _PIECE_BYTES])
    encryptor.finalize()
    return encode_header(sealed._replace(checksum=encryptor.tag.ljust(CHECKSUM_BYTES, b"\0")))


def scratch_for(payload: memoryview) -> memoryview:
    """Return page-aligned memory of the payload's length, for what must not be changed in place."""
    return memoryview(mmap.mmap(-1, payload.nbytes))


def _associated(page: bytes) -> bytes:
    """Return what the tag covers of the header: all of it but the tag itself and the header's own checksum."""
    return page[: CHECKSUM_PLACE.start] + _NO_TAG + page[CHECKSUM_PLACE.stop : CRC_OFFSET]
