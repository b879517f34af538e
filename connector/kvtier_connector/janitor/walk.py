# SPDX-License-Identifier: Apache-2.0
"""Walks one generation piece by piece: which blocks, partial files and trees of tenants it has.

A piece is one of the 4096 directories below ``blocks``, of the tier or of a tenant. Names only; a file that the caller
does not know is opened for its header, once in its life. What cannot be read is named, and the rest is read.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from collections.abc import Iterable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import NamedTuple

from kvtier_connector.store.format import HEADER_BYTES, Header, decode_header
from kvtier_connector.store.fs import NO_FILE, READ_FLAGS, FileSystem, read_page
from kvtier_connector.store.layout import (
    BLOCKS,
    TENANTS,
    BlockKey,
    block_path,
    is_partial,
    is_tenant,
    parse_block_path,
    tenant_directory,
)

_PIECE = re.compile("[0-9a-f]{3}")
_NO_BLOCK = {errno.ENOENT, errno.ENOTDIR, errno.ESTALE, *NO_FILE}


class Piece(NamedTuple):
    """One directory of blocks."""

    generation: str
    """Digest: the name of the directory beside the others."""
    path: str
    """Relative to the generation's root."""


class Unread(NamedTuple):
    """A directory that could not be read, or a file in it."""

    path: str
    """Relative to the generation's root."""
    error: OSError


@dataclass(slots=True)
class Found:
    """What a piece holds."""

    piece: Piece
    keys: list[BlockKey] = field(default_factory=list)
    partials: dict[str, int] = field(default_factory=dict)
    """Bytes of half-written files, by path relative to the generation's root."""
    error: OSError | None = None
    """Why it could not be read."""


class Met(NamedTuple):
    """A block that was opened for its header."""

    key: BlockKey
    size: int
    mtime_ns: int
    header: Header | None
    """None for one that is damaged, or of another release: it takes room all the same."""


def list_own(fs: FileSystem, path: str) -> list[os.DirEntry[str]]:
    """List a directory, nothing if there is none; raise OSError if it cannot be looked at.

    A link is not followed: whoever can write to the volume could have the janitor remove what lies somewhere else.
    """
    try:
        return fs.scandir(path) if stat.S_ISDIR(fs.stat(path).st_mode) else []
    except (FileNotFoundError, NotADirectoryError):
        return []


def find_tenants(fs: FileSystem, root: str) -> list[str]:
    """Return the tenants that have a tree under the root; raise OSError if it cannot be looked at."""
    entries = list_own(fs, f"{root}/{TENANTS}")
    return sorted(entry.name for entry in entries if is_tenant(entry.name) and entry.is_dir(follow_symlinks=False))


def find_pieces(fs: FileSystem, tier_dir: str, generation: str) -> tuple[list[Piece], list[Unread]]:
    """Return the pieces of a generation, and which trees cannot be looked at."""
    root = f"{tier_dir}/{generation}"
    pieces: list[Piece] = []
    unread: list[Unread] = []
    tenants: list[str] = []
    try:
        tenants = find_tenants(fs, root)
    except OSError as error:
        unread.append(Unread(TENANTS, error))
    for tenant in ["", *tenants]:
        blocks = f"{tenant_directory(tenant)}{BLOCKS}"
        try:
            entries = list_own(fs, f"{root}/{blocks}")
        except OSError as error:
            unread.append(Unread(blocks, error))
            continue
        names = [each.name for each in entries if _PIECE.fullmatch(each.name) and each.is_dir(follow_symlinks=False)]
        pieces += [Piece(generation, f"{blocks}/{name}") for name in sorted(names)]
    return pieces, unread


def list_piece(fs: FileSystem, tier_dir: str, piece: Piece) -> Found:
    """Return what the piece holds."""
    found = Found(piece)
    try:
        entries = list_own(fs, f"{tier_dir}/{piece.generation}/{piece.path}")
    except OSError as error:
        found.error = error
        return found
    for entry in entries:
        key = parse_block_path(f"{piece.path}/{entry.name}")
        if not entry.is_file(follow_symlinks=False):
            # A link, a pipe or a directory takes no room, and an engine that wants its place removes it.
            continue
        if key is not None:
            found.keys.append(key)
        elif is_partial(entry.name):
            path = f"{piece.path}/{entry.name}"
            # One that is renamed meanwhile is a block.
            with contextlib.suppress(OSError):
                found.partials[path] = fs.stat(f"{tier_dir}/{piece.generation}/{path}").st_size
    return found


def meet(fs: FileSystem, root: str, key: BlockKey) -> Met | None:
    """Open a block for its header; None if it is gone, or no file. Raises OSError if the volume does not answer."""
    try:
        fd = fs.open(f"{root}/{block_path(key)}", READ_FLAGS)
        try:
            status = fs.fstat(fd)
            page = memoryview(bytearray(HEADER_BYTES))
            header = decode_header(page[: read_page(fs, fd, page)])
        finally:
            with contextlib.suppress(OSError):
                fs.close(fd)
    except OSError as error:
        if error.errno in _NO_BLOCK:
            return None
        raise
    is_sound = isinstance(header, Header) and header.key == key
    return Met(key, status.st_size, status.st_mtime_ns, header if is_sound and isinstance(header, Header) else None)


def look_all(pool: Executor, fs: FileSystem, paths: Iterable[str]) -> list[os.stat_result | OSError | None]:
    """Look at several files at once, without opening them: None without a file, OSError if the volume refuses."""

    def look(path: str) -> os.stat_result | OSError | None:
        try:
            status = fs.stat(path)
        except OSError as error:
            return None if error.errno in _NO_BLOCK else error
        return status if stat.S_ISREG(status.st_mode) else None

    return list(pool.map(look, paths))


def meet_all(pool: Executor, fs: FileSystem, root: str, keys: Iterable[BlockKey]) -> tuple[list[Met], list[Unread]]:
    """Do as `meet` does for many, several at once; return those there are, and which directories have others."""

    def try_to_meet(key: BlockKey) -> Met | Unread | None:
        try:
            return meet(fs, root, key)
        except OSError as error:
            return Unread(block_path(key).rpartition("/")[0], error)

    answers = list(pool.map(try_to_meet, keys))
    return [met for met in answers if isinstance(met, Met)], [each for each in answers if isinstance(each, Unread)]
