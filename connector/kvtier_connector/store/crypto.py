# SPDX-License-Identifier: Apache-2.0
"""Keys, encryption and verification of payloads. No thread; the only I/O reads keys from a mounted directory.

Each file of the directory is one key, named after the file. A Secret is mounted as a directory that the kubelet swaps
whole when the Secret changes, so keys are read again when the directory has changed. A key's bytes appear nowhere: in
no message, no representation and not on the volume.

AES-256-GCM encrypts the payload and authenticates it together with the header. So a writer of the volume without a key
cannot pass a block off as another block, or as another tenant's.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hashlib
import mmap
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from kvtier_connector.contract.engine import KEY_BYTES
from kvtier_connector.store import compression
from kvtier_connector.store.fs import FOLLOW_FLAGS, LOCAL, read_file
from kvtier_connector.store.header import (
    CHECKSUM_BYTES,
    CHECKSUM_PLACE,
    CRC_OFFSET,
    DEFAULT_ALGORITHM,
    HAS_AES,
    KEY_CHECK_BYTES,
    NONCE_BYTES,
    NOT_PACKED,
    TAG_BYTES,
    Algorithm,
    Encryption,
    Fault,
    Hasher,
    Header,
    Seal,
    checksum,
    encode_header,
    new_hasher,
)
from kvtier_connector.store.layout import is_key_id

_MOST_BYTES = 4096
_HEX_DIGITS = 2 * KEY_BYTES
_HEX = re.compile(rb"[0-9a-fA-F]+")
_CHECK_LABEL = b"kvtier key check\0"
_EAGER_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Key:
    """One key. Its representation does not show it."""

    name: str
    check: bytes
    """Tells it from another key of the same name, and nothing else about it."""
    secret: bytes = field(repr=False)


def parse_key(name: str, content: bytes) -> Key | None:
    """Return the key that a file holds: 32 bytes, or these as 64 hex digits or in base64; None if it holds none."""
    # 32 hex digits are 16 bytes: no random key looks like that, so it is a mistake.
    secret: bytes | None = content if len(content) == KEY_BYTES and not _HEX.fullmatch(content) else None
    text = content.strip()
    if secret is None and len(text) == _HEX_DIGITS:
        with contextlib.suppress(ValueError):
            secret = bytes.fromhex(text.decode("ascii"))
    if secret is None:
        with contextlib.suppress(binascii.Error):
            secret = base64.b64decode(text, validate=True)
    if secret is None or len(secret) != KEY_BYTES or not is_key_id(name):
        return None
    return Key(name, hashlib.sha256(_CHECK_LABEL + secret).digest()[:KEY_CHECK_BYTES], secret)


class Keyring:
    """Every method may be called from any thread that may wait for a local file; properties only touch memory.

    Keys that were read replace `_keys` whole, so threads need no lock.
    """

    def __init__(self, directory: str, *, seconds: float = 5.0, now: Callable[[], float] = time.monotonic) -> None:
        """Store the settings; nothing is read yet.

        The directory is looked at for a change after so many seconds; for a key that is missing, each second.
        """
        self._directory = directory
        self._seconds = seconds
        self._now = now
        self._keys: dict[str, Key] = {}
        self._stamp: tuple[int, int] | None = None
        self._looked_at: float | None = None
        self._file_problem = ""
        self.active_name = ""
        """The key with which blocks are encrypted from now on; empty for no key."""

    def find(self, name: str) -> Key | None:
        """Return the key of this name, None if there is none."""
        self._refresh(self._seconds if name in self._keys else min(_EAGER_SECONDS, self._seconds))
        return self._keys.get(name)

    def active(self) -> Key | None:
        """Return the key that encrypts, None if there is none to use; `problem` says why."""
        return self.find(self.active_name) if self.active_name and HAS_AES else None

    @property
    def is_usable(self) -> bool:
        """Whether there was a key to encrypt with at the last call of `active`."""
        return HAS_AES and self.active_name in self._keys

    @property
    def problem(self) -> str:
        """Why blocks cannot be encrypted, or which file is no key, and what to do; empty if all is well."""
        if not HAS_AES:
            return "this image lacks the Python package cryptography: use vLLM's own image, or add the package"
        if not self.active_name:
            return "no active key is set: set spec.disk.encryption.activeKey to an entry of the Secret"
        if self.active_name not in self._keys:
            return (
                f"the active key {self.active_name!r} is not in {self._directory}: add it to the Secret first, and "
                f"then make it active{'; ' + self._file_problem if self._file_problem else ''}"
            )
        return self._file_problem

    def _refresh(self, seconds: float) -> None:
        now = self._now()
        if self._looked_at is not None and now - self._looked_at < seconds:
            return
        try:
            status = LOCAL.stat(self._directory)
            stamp = (status.st_ino, status.st_mtime_ns)
            if stamp != self._stamp:
                self._keys, self._file_problem = self._read()
                self._stamp = stamp
        except OSError as error:
            # The keys that were read stay good: a mount that is being swapped must not stop the tier.
            self._file_problem = f"{self._directory}: cannot be read: {error.strerror}"
        # Last: a thread that asks meanwhile reads the first keys, too, instead of finding none.
        self._looked_at = now

    def _read(self) -> tuple[dict[str, Key], str]:
        keys: dict[str, Key] = {}
        bad = []
        for entry in LOCAL.scandir(self._directory):
            # The kubelet keeps the files of a mounted Secret in directories whose names begin so.
            if entry.name.startswith("."):
                continue
            path = f"{self._directory}/{entry.name}"
            key = parse_key(entry.name, read_file(LOCAL, path, most_bytes=_MOST_BYTES, flags=FOLLOW_FLAGS))
            if key is None:
                bad.append(entry.name)
            else:
                keys[entry.name] = key
        problem = (
            f"{', '.join(sorted(bad))} in {self._directory}: not a key; a key is {KEY_BYTES} bytes, raw, as "
            f"{_HEX_DIGITS} hex digits or in base64, and is named with up to 64 letters, digits, '.', '_' and '-'"
        )
        return keys, problem if bad else ""


if HAS_AES:
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

_PIECE_BYTES = 1 << 20
_NO_TAG = bytes(CHECKSUM_BYTES)


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


PayloadReader = _Checking | _Decrypting
"""Takes the payload of one block piece by piece, and decrypts it where it is; `end` says whether it is as written."""


def begin_reading(header: Header, page: memoryview, keyring: Keyring | None) -> PayloadReader | Fault:
    """Return what verifies, and decrypts, the payload of a block, or why that is not possible here.

    Without a keyring only blocks that are not encrypted are read, and with one only those that are.
    """
    key = _find_key(header, keyring)
    if isinstance(key, Fault):
        return key
    return _Checking(header, new_hasher(header.algorithm)) if key is None else _Decrypting(header, page, key)


def can_read(header: Header, keyring: Keyring | None) -> bool:
    """Return whether a block with this header can be read here, as far as the header tells."""
    return can_unpack(header) and not isinstance(_find_key(header, keyring), Fault)


def can_unpack(header: Header) -> bool:
    """Return whether a block with this header is not compressed, or can be decompressed here."""
    return header.packing == NOT_PACKED or compression.is_available()


def _find_key(header: Header, keyring: Keyring | None) -> Key | Fault | None:
    """Return the block's key, None for one that is not encrypted, or why it cannot be read."""
    if header.encryption == Encryption.NONE:
        if keyring is not None:
            return Fault.CLEAR
        return None if HAS_AES or header.algorithm != Algorithm.AES_GMAC else Fault.ALGORITHM
    key = None if keyring is None or not HAS_AES else keyring.find(header.seal.key_id)
    if key is None:
        return Fault.KEY_MISSING
    return key if key.check == header.seal.key_check else Fault.KEY_WRONG


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
