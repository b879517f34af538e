# SPDX-License-Identifier: Apache-2.0
"""The keys that encrypt blocks, read from a mounted directory: each file is one key, and its name is the key's.

A Secret is mounted as a directory that the kubelet swaps whole when the Secret changes, so keys are read again when the
directory has changed. What a key is appears nowhere: not in a message, not in a representation, not on the volume.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hashlib
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from kvtier_connector.contract import KEY_BYTES
from kvtier_connector.store.checksums import HAS_AES
from kvtier_connector.store.format import KEY_CHECK_BYTES
from kvtier_connector.store.fs import FOLLOW_FLAGS, LOCAL, FileSystem
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
    # 32 hex digits are 16 bytes: no random key looks like that, and somebody's mistake does.
    is_raw = len(content) == KEY_BYTES and not _HEX.fullmatch(content)
    secret: bytes | None = content if is_raw else None
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

    `_reading` lets one thread read the directory; what it found replaces `_keys` whole, so nobody else needs the lock.
    """

    def __init__(
        self,
        directory: str,
        *,
        seconds: float = 5.0,
        fs: FileSystem = LOCAL,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Store the settings; nothing is read yet.

        Args:
            directory: Where the Secret is mounted.
            seconds: How often the directory is looked at for a change; for a key that is missing, each second.
            fs: The system calls.
            now: Seconds that never go back.
        """
        self._directory = directory
        self._seconds = seconds
        self._fs = fs
        self._now = now
        self._reading = threading.Lock()
        self._keys: dict[str, Key] = {}
        self._stamp: tuple[int, int] | None = None
        self._looked_at: float | None = None
        self._file_problem = ""
        self._active = ""

    def find(self, name: str) -> Key | None:
        """Return the key of this name, None if there is none."""
        key = self._keys.get(name)
        self._refresh(self._seconds if key is not None else min(_EAGER_SECONDS, self._seconds))
        return self._keys.get(name)

    def activate(self, name: str) -> None:
        """Encrypt with this key from now on; the empty name is no key."""
        self._active = name

    @property
    def active_name(self) -> str:
        """The name that `activate` was told last."""
        return self._active

    def active(self) -> Key | None:
        """Return the key that encrypts, None if there is none to use; `problem` says why."""
        return self.find(self._active) if self._active and HAS_AES else None

    @property
    def is_usable(self) -> bool:
        """Whether there was a key to encrypt with when somebody last asked for it."""
        return HAS_AES and self._active in self._keys

    @property
    def problem(self) -> str:
        """Why blocks cannot be encrypted, or which file is no key, and what to do; empty if all is well."""
        if not HAS_AES:
            return "this image lacks the Python package cryptography: use vLLM's own image, or add the package"
        if not self._active:
            return "no active key is set: set spec.disk.encryption.activeKey to an entry of the Secret"
        if self._active not in self._keys:
            return (
                f"the active key {self._active!r} is not in {self._directory}: add it to the Secret first, and then "
                f"make it active{'; ' + self._file_problem if self._file_problem else ''}"
            )
        return self._file_problem

    def _refresh(self, seconds: float) -> None:
        now = self._now()
        if self._looked_at is not None and now - self._looked_at < seconds:
            return
        with self._reading:
            if self._looked_at is not None and now - self._looked_at < seconds:
                return
            try:
                status = self._fs.stat(self._directory)
                stamp = (status.st_ino, status.st_mtime_ns)
                if stamp != self._stamp:
                    self._keys, self._file_problem = self._read()
                    self._stamp = stamp
            except OSError as error:
                # The keys that were read stay good: a mount that is being swapped must not stop the tier.
                self._file_problem = f"{self._directory}: cannot be read: {error.strerror}"
            # Last: a thread that asks meanwhile waits for the first keys instead of finding none.
            self._looked_at = now

    def _read(self) -> tuple[dict[str, Key], str]:
        keys: dict[str, Key] = {}
        bad = []
        for entry in self._fs.scandir(self._directory):
            # The kubelet keeps the files of a mounted Secret in directories whose names begin so.
            if entry.name.startswith("."):
                continue
            key = parse_key(entry.name, self._read_file(entry.name))
            if key is None:
                bad.append(entry.name)
            else:
                keys[entry.name] = key
        problem = (
            f"{', '.join(sorted(bad))} in {self._directory}: not a key; a key is {KEY_BYTES} bytes, raw, as "
            f"{_HEX_DIGITS} hex digits or in base64, and is named with up to 64 letters, digits, '.', '_' and '-'"
        )
        return keys, problem if bad else ""

    def _read_file(self, name: str) -> bytes:
        buffer = memoryview(bytearray(_MOST_BYTES))
        fd = self._fs.open(f"{self._directory}/{name}", FOLLOW_FLAGS)
        try:
            return bytes(buffer[: self._fs.preadv(fd, [buffer], 0)])
        finally:
            self._fs.close(fd)
