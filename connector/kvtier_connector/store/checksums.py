# SPDX-License-Identifier: Apache-2.0
"""Checksums of payloads: they show damage, and nothing about who wrote.

AES-GMAC is the tag of AES-GCM over data that is not encrypted. The instructions of the processor make it three times as
fast as BLAKE3. Its key and nonce are written below for everybody to read, so it authenticates nothing: whoever can
write to the volume can compute it. It needs ``cryptography``, which vLLM's images have; without it, blocks are written
with BLAKE3, and blocks with the other checksum are a miss.
"""

from __future__ import annotations

import enum
import functools
from typing import Final, Protocol

from blake3 import blake3

try:
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
except ImportError:
    HAS_AES = False
else:
    HAS_AES = True

CHECKSUM_BYTES = 32
"""Room in the header; a shorter checksum is followed by zeros."""

_GMAC_KEY = b"kvtier checksum2"
_GMAC_NONCE = bytes(12)


class Algorithm(enum.IntEnum):
    """How the payload's checksum is computed."""

    NONE = 0
    """The payload is encrypted, and the tag of its encryption stands in the place of the checksum."""
    BLAKE3_256 = 1
    AES_GMAC = 2


class Hasher(Protocol):
    """Takes in a payload piece by piece."""

    def update(self, piece: memoryview, /) -> object:
        """Take in the next bytes."""

    def digest(self) -> bytes:
        """Return the checksum, once, after the last piece."""


@functools.cache
def _gmac_cipher() -> Cipher[modes.GCM]:
    """Return what is the same for every payload; to make it takes longer than to read a small chunk."""
    return Cipher(algorithms.AES(_GMAC_KEY), modes.GCM(_GMAC_NONCE))


class _Gmac:
    def __init__(self) -> None:
        self._encryptor = _gmac_cipher().encryptor()

    def update(self, piece: memoryview, /) -> None:
        self._encryptor.authenticate_additional_data(piece)

    def digest(self) -> bytes:
        self._encryptor.finalize()
        return self._encryptor.tag.ljust(CHECKSUM_BYTES, b"\0")


DEFAULT_ALGORITHM: Final = Algorithm.AES_GMAC if HAS_AES else Algorithm.BLAKE3_256
"""Of new blocks."""


def can_compute(algorithm: int) -> bool:
    """Say whether this checksum can be computed here."""
    return algorithm == Algorithm.BLAKE3_256 or (algorithm == Algorithm.AES_GMAC and HAS_AES)


def new_hasher(algorithm: int) -> Hasher | None:
    """Return what computes this checksum, None if that is not possible here."""
    if algorithm == Algorithm.BLAKE3_256:
        return blake3()
    return _Gmac() if algorithm == Algorithm.AES_GMAC and HAS_AES else None


def checksum(payload: memoryview, algorithm: Algorithm = DEFAULT_ALGORITHM) -> bytes:
    """Return the checksum of a whole payload; raise ValueError for an algorithm that is not possible here."""
    hasher = new_hasher(algorithm)
    if hasher is None:
        raise ValueError(f"{algorithm!r}: this checksum cannot be computed here")
    hasher.update(payload)
    return hasher.digest()
