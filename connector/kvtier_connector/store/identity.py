# SPDX-License-Identifier: Apache-2.0
"""The owner of a directory of blocks: ``tier.json`` at its root, written once and compared at every start.

KV bytes are meaningless to any other model or layout, and nothing in them would show it. So a directory that does not
say exactly what the caller expects is refused. The search for such directories reads names only. It starts at a
generation, a tier or the root of a volume. No thread lives here.
"""

from __future__ import annotations

import enum
import errno
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvtier_connector.contract.errors import IdentityMismatch, StoreUnavailable
from kvtier_connector.store.fs import (
    CREATE_FLAGS,
    LOCAL,
    FileSystem,
    abandon,
    in_directory,
    list_directory,
    new_token,
    opened,
    read_file,
    write_all,
)
from kvtier_connector.store.header import FORMAT_VERSION
from kvtier_connector.store.layout import BESIDE_GENERATIONS, BLOCKS, TIER_FILE, partial_path

MAX_TIER_FILE_BYTES = 1 << 20
"""More than any list of fields needs; a longer file is not ours."""

_ABSENT = "(absent)"
_NO_HARD_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}


def claim(root: Path, identity: Mapping[str, Any], digest: str, *, fs: FileSystem = LOCAL) -> None:
    """Make the directory ours if it is new, and make sure that it is ours if it is not.

    Any number of processes may claim at once: one creates the file, and all compare it.

    Raises:
        IdentityMismatch: the directory belongs to another model or layout, or its file cannot be understood.
        StoreUnavailable: the volume cannot be used now.
    """
    # A tuple and a list are the same in JSON, and must not differ after a restart.
    ours = json.loads(json.dumps({"format": FORMAT_VERSION, "digest": digest, "identity": dict(identity)}))
    fs = fs.rooted(str(root))
    try:
        if (text := _read(fs, root)) is None:
            write_once(fs, f"{root}/{TIER_FILE}", json.dumps(ours, sort_keys=True, indent=2) + "\n")
            text = _read(fs, root)
    except OSError as error:
        raise StoreUnavailable(f"{root}: cannot be claimed: {error}") from error
    if text is None:
        raise StoreUnavailable(f"{root}/{TIER_FILE}: it was removed while it was being created; try again")
    _compare(root, ours, parse(text, where=f"{root}/{TIER_FILE}"))


class RootState(enum.Enum):
    """Present state of a directory that was claimed."""

    SAME = "same"
    GONE = "gone"
    """Nothing is at stake: it is made again with the next block."""
    OTHER = "other"
    """It is to be claimed again."""


_Seen = tuple[int, int, int, int]
"""Identifies a description without reading it: size, when it was written, device and inode."""


class RootClaim:
    """One directory that was claimed, and whether it still is; one thread at a time.

    The directory may be removed under an engine, and then be claimed for blocks of another kind.
    """

    def __init__(self, root: Path, identity: Mapping[str, Any], digest: str, *, fs: FileSystem = LOCAL) -> None:
        """Store the settings; `renew` claims."""
        self._root = root
        self._identity = dict(identity)
        self._digest = digest
        self._fs = fs.rooted(str(root))
        self._seen: _Seen | None = None

    def renew(self) -> bool:
        """Claim the directory again, and say whether its description was written since the last time.

        It was not where the volume was mounted anew, or gives one file a number after another, as some do.

        Raises:
            IdentityMismatch: as `claim`.
            StoreUnavailable: as `claim`.
        """
        before, self._seen = self._seen, None
        claim(self._root, self._identity, self._digest, fs=self._fs)
        self._seen = self._look()
        return before is None or self._seen is None or before[:2] != self._seen[:2]

    def look(self, *, may_write: bool) -> RootState:
        """Compare the description with that of the last claim: one system call if nothing changed.

        Where only the description is gone, it is to be written again, unless nothing may be written.

        Raises:
            StoreUnavailable: the volume cannot be used now.
        """
        try:
            seen = self._look()
            if seen is not None:
                return RootState.SAME if seen == self._seen else RootState.OTHER
            self._fs.require_mount(str(self._root))
            return RootState.OTHER if may_write and self._stat(str(self._root)) else RootState.GONE
        except OSError as error:
            raise StoreUnavailable(f"{self._root}/{TIER_FILE}: cannot be looked at: {error}") from error

    def _look(self) -> _Seen | None:
        status = self._stat(f"{self._root}/{TIER_FILE}")
        return status and (status.st_size, status.st_mtime_ns, status.st_dev, status.st_ino)

    def _stat(self, path: str) -> os.stat_result | None:
        try:
            return self._fs.stat(path)
        except FileNotFoundError:
            return None


def read(root: Path, *, fs: FileSystem = LOCAL) -> dict[str, Any] | None:
    """Return the document of ``tier.json``, None if there is no such file.

    Raises:
        IdentityMismatch: it cannot be understood.
        StoreUnavailable: it cannot be read.
    """
    try:
        text = _read(fs, root)
    except OSError as error:
        raise StoreUnavailable(f"{root}/{TIER_FILE}: cannot be read: {error}") from error
    return None if text is None else parse(text, where=f"{root}/{TIER_FILE}")


def parse(text: bytes, *, where: str) -> dict[str, Any]:
    """Return the document; raise IdentityMismatch if this is none."""
    remedy = (
        "restore the file, or remove the directory (its blocks will be computed again), and restart the engines, which "
        "do without it until then"
    )
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise IdentityMismatch(f"{where}: not JSON: {error}; {remedy}") from error
    if not isinstance(document, dict) or not isinstance(document.get("identity"), dict):
        raise IdentityMismatch(f"{where}: not the description of a tier; {remedy}")
    return document


def _compare(root: Path, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    """Raise for the first field that differs; a field of the identity says more than the digest over all of them."""
    pairs = [
        (f"identity.{name}", ours["identity"], theirs["identity"], name)
        for name in sorted({**ours["identity"], **theirs["identity"]})
    ]
    pairs += [(name, ours, theirs, name) for name in ("digest", "format")]
    for label, mine, found, name in pairs:
        expected, actual = mine.get(name, _ABSENT), found.get(name, _ABSENT)
        if expected != actual:
            raise IdentityMismatch(
                f"{root}/{TIER_FILE}: {label} is {actual!r} there and {expected!r} here; give this tier another "
                "volume.path, or remove the directory if nothing uses it any more",
                field=name,
            )


def _read(fs: FileSystem, root: Path) -> bytes | None:
    try:
        return read_file(fs, f"{root}/{TIER_FILE}", most_bytes=MAX_TIER_FILE_BYTES)
    except FileNotFoundError:
        return None


def write_once(fs: FileSystem, path: str, text: str, *, is_replacing: bool = False) -> bool:
    """Write the file aside and give it its name only when it is whole; keep one that is there, unless told to replace.

    It is written once in the life of a directory, so waiting for the device costs nothing here. True: the volume has no
    hard links, so writers at once replace each other's file.
    """
    return in_directory(fs, path, lambda at: _write_once(fs, at, text, is_replacing=is_replacing))


def _write_once(fs: FileSystem, path: str, text: str, *, is_replacing: bool) -> bool:
    partial = partial_path(path, new_token())
    is_renamed = False
    try:
        with opened(fs, partial, CREATE_FLAGS) as fd:
            write_all(fs, fd, memoryview(text.encode()))
            fs.fsync(fd)
        try:
            if not is_replacing:
                fs.link(partial, path)
                return False
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in _NO_HARD_LINKS:
                raise
        fs.rename(partial, path)
        is_renamed = True
        return not is_replacing
    finally:
        if not is_renamed:
            abandon(fs, -1, partial)


MOST_LEVELS = 6
"""A path inside the claim, the tier and the digest; deeper directories are not ours."""

_OF_VLLM = re.compile(r"(.+_[0-9a-f]{12})_r[0-9]+")
"""Directory of vLLM's fs tier for one rank, beside one that describes it: hundreds of thousands may lie below."""


def find_generations(directory: Path, *, fs: FileSystem = LOCAL) -> list[Path]:
    """Return every directory at or below this one that has a ``tier.json`` or blocks, in the order of their paths.

    Raises:
        StoreUnavailable: a directory cannot be looked at.
    """
    try:
        return sorted(_find(fs, directory, MOST_LEVELS))
    except OSError as error:
        raise StoreUnavailable(f"{directory}: cannot be walked: {error}") from error


def is_new_tier(directory: Path, *, fs: FileSystem = LOCAL) -> bool:
    """Return whether the directory can be a tier without generations: absent, empty, or with kvtier's own files only.

    Raises:
        StoreUnavailable: it cannot be looked at.
    """
    try:
        names = {entry.name for entry in fs.scandir(str(directory))}
    except FileNotFoundError:
        return True
    except OSError as error:
        raise StoreUnavailable(f"{directory}: cannot be walked: {error}") from error
    return all(name in BESIDE_GENERATIONS or name.startswith(".") for name in names)


def _find(fs: FileSystem, directory: Path, levels: int) -> Iterator[Path]:
    entries = list_directory(fs, str(directory))
    names = {entry.name for entry in entries}
    if {TIER_FILE, BLOCKS} & names:
        # A generation holds no other: its thousands of directories need not be looked at.
        yield directory
        return
    for entry in entries:
        rank = _OF_VLLM.fullmatch(entry.name)
        if rank is not None and rank[1] in names:
            continue
        if levels > 1 and entry.is_dir(follow_symlinks=False):
            yield from _find(fs, directory / entry.name, levels - 1)
