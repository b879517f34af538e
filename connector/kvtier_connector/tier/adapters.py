# SPDX-License-Identifier: Apache-2.0
"""Tells LoRA adapters apart by what they hold: vLLM's block hashes cover an adapter's name and path, not its contents.

An adapter that was written anew at its path would otherwise find blocks of the old one for ever, on every replica. So
the hash of a block on the volume covers a fingerprint of the adapter's files as well, and where nobody can tell which
contents an engine computes with, its requests are kept off the volume, which is counted.

An engine reads an adapter at a time of its own, and may read it again. So its contents are known only while no file of
it has changed since the engine started. Files are read on one thread of their own: the path may be a network mount.
"""

from __future__ import annotations

import hashlib
import json
import stat
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from vllm.logger import init_logger

from kvtier_connector.store.layout import ADAPTER_CHARACTERS, adapter_name_label
from kvtier_connector.tier.model_files import WEIGHT_SUFFIXES, cached_directory

logger = init_logger("vllm.kvtier.adapters")

PATIENCE_SECONDS: Final = 2.0
"""How long a request waits to know its adapter, and how long one look may take before others do without."""
_DESCRIPTION: Final = "adapter_config.json"
_REVISION: Final = "main"
"""That vLLM asks the hub for."""
_PIECE_BYTES: Final = 1 << 20
_MOST_KNOWN: Final = 4096


@dataclass(frozen=True, slots=True)
class Lora:
    """The adapter of a request, as vLLM names it."""

    name: str
    path: str


class AdapterIdentity(NamedTuple):
    """What tells the blocks of an adapter from those of the model and of other adapters."""

    label: str
    """Stands in the header of its blocks: whose they are, for people and the janitor."""
    mark: bytes
    """Goes into the hash of its blocks: name, path and contents."""

    def hash_of(self, block_hash: bytes) -> bytes:
        """Return the hash under which the volume has a block of the adapter."""
        return hashlib.sha256(b"kvtier adapter block\0" + self.mark + block_hash).digest()


@dataclass(slots=True)
class Reading:
    """One look at an adapter. The thread that reads sets `identity`, then `is_done`; others only read."""

    began: float = field(default_factory=time.monotonic)
    identity: AdapterIdentity | None = None
    """None where it is not known."""
    is_done: bool = False

    def is_pending(self) -> bool:
        """Say whether it is worth waiting for; what comes later is not believed any more."""
        if not self.is_done and time.monotonic() - self.began > PATIENCE_SECONDS:
            self.is_done = True
        return not self.is_done


class _File(NamedTuple):
    name: str
    size: int
    written_ns: int
    changed_ns: int
    inode: int


class _Known(NamedTuple):
    files: tuple[_File, ...]
    identity: AdapterIdentity


class _UnknownError(Exception):
    """Why nobody can tell what an adapter holds."""


class Adapters:
    """`read` is the scheduler's; the thread owns `_known` and `_told`; `_lock` guards `_wanted` and `_busy_since`."""

    def __init__(self, *, skew_seconds: float) -> None:
        """Store; the thread starts with the first adapter.

        Args:
            skew_seconds: By how much the clock of a file server may be behind this one's.
        """
        self._started_ns = int((time.time() - skew_seconds) * 1e9)
        self._known: OrderedDict[Lora, _Known] = OrderedDict()
        self._lock = threading.Lock()
        self._wanted: OrderedDict[Lora, Reading] = OrderedDict()
        self._busy_since: float | None = None
        self._is_due = threading.Event()
        self._is_closed = False
        self._thread: threading.Thread | None = None
        self._told: set[tuple[Lora, str]] = set()

    def read(self, lora: Lora) -> Reading:
        """Have an adapter looked at, as it is now; those who ask before the look begins share it."""
        with self._lock:
            stuck_since = self._busy_since
            if stuck_since is not None and time.monotonic() - stuck_since > PATIENCE_SECONDS:
                return Reading(is_done=True)
            reading = self._wanted.get(lora)
            if reading is None:
                reading = self._wanted[lora] = Reading()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kvtier-adapters", daemon=True)
            self._thread.start()
        self._is_due.set()
        return reading

    def close(self) -> None:
        """Stop; a look that hangs is left behind."""
        self._is_closed = True
        self._is_due.set()

    def _run(self) -> None:
        while not self._is_closed:
            self._is_due.wait()
            self._is_due.clear()
            while (wanted := self._next()) is not None:
                lora, reading = wanted
                identity = self._look(lora)
                if not reading.is_done:
                    reading.identity = identity
                    reading.is_done = True

    def _next(self) -> tuple[Lora, Reading] | None:
        with self._lock:
            self._busy_since = time.monotonic() if self._wanted else None
            return self._wanted.popitem(last=False) if self._wanted else None

    def _look(self, lora: Lora) -> AdapterIdentity | None:
        try:
            return self._identity_of(lora, _directory(lora.path))
        except (OSError, _UnknownError) as error:
            self._tell(lora, str(error))
            return None

    def _identity_of(self, lora: Lora, directory: Path) -> AdapterIdentity:
        files = self._list(directory)
        known = self._known.get(lora)
        if known is None:
            known = _Known(files, _identify(lora, directory, files))
            self._remember(lora, known)
        if known.files != self._list(directory):
            # What was computed with the old contents may still lie in the GPU and the CPU tier, under the same keys.
            raise _UnknownError("its files are others than they were")
        return known.identity

    def _list(self, directory: Path) -> tuple[_File, ...]:
        """Return the files of an adapter, which have not changed since the engine started."""
        weights = [_file(path) for path in sorted(directory.iterdir()) if path.suffix in WEIGHT_SUFFIXES]
        if not weights or not (directory / _DESCRIPTION).is_file():
            raise _UnknownError(f"{directory} lacks {_DESCRIPTION} or weights")
        found = [_file(directory), _file(directory / _DESCRIPTION), *weights]
        # In the cache of the hub the name of the revision leads to the directory, as a link does.
        pointer = directory.parent.parent / "refs" / _REVISION
        if (
            max(each.changed_ns for each in [*found, *([_file(pointer)] if pointer.is_file() else [])])
            >= self._started_ns
        ):
            raise _UnknownError("its files changed since this engine started, which may have read them before or after")
        return tuple(found)

    def _remember(self, lora: Lora, known: _Known) -> None:
        self._known[lora] = known
        while len(self._known) > _MOST_KNOWN:
            self._known.popitem(last=False)

    def _tell(self, lora: Lora, problem: str) -> None:
        if (lora, problem) not in self._told:
            self._told.add((lora, problem))
            logger.warning(
                "Requests with the LoRA adapter %s are neither stored nor loaded: it cannot be told what it holds: %s; "
                "give changed weights a new path, or restart the engine",
                lora.name,
                problem,
            )


def _directory(path: str) -> Path:
    """Return where vLLM reads an adapter: a directory, or what the cache of the hub has."""
    directory = Path(path).expanduser()
    found = directory if directory.is_dir() else cached_directory(path, _REVISION, [_DESCRIPTION])
    if found is None:
        raise _UnknownError(f"{path} is no directory here, and not in the cache of the hub")
    return found


def _file(path: Path) -> _File:
    """Return what shows that a file is another than before; of a link, the change of what is newer."""
    link, status = path.lstat(), path.stat()
    changed_ns = max(link.st_ctime_ns, status.st_ctime_ns)
    size = 0 if stat.S_ISDIR(status.st_mode) else status.st_size
    return _File(path.name, size, status.st_mtime_ns, changed_ns, status.st_ino)


def _identify(lora: Lora, directory: Path, files: tuple[_File, ...]) -> AdapterIdentity:
    contents = []
    for each in files[1:]:
        digest = hashlib.sha256()
        with (directory / each.name).open("rb", buffering=0) as file:
            while piece := file.read(_PIECE_BYTES):
                digest.update(piece)
        contents.append([each.name, digest.hexdigest()])
    text = json.dumps([lora.name, lora.path, contents], separators=(",", ":"))
    mark = hashlib.sha256(text.encode()).digest()
    return AdapterIdentity(adapter_name_label(lora.name) + mark.hex()[: ADAPTER_CHARACTERS // 2], mark)
