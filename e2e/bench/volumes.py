# SPDX-License-Identifier: Apache-2.0
"""Directories that stand for a volume: their block files, and dropping them from the page cache."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path


def block_files(directory: Path, *, at_least: int) -> Iterator[os.DirEntry[str]]:
    """Find the finished block files of any backend: those as large as a block's payload."""
    try:
        entries = list(os.scandir(directory))
    except FileNotFoundError:
        return
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            yield from block_files(Path(entry.path), at_least=at_least)
        elif not entry.name.endswith((".tmp", ".partial")):
            with contextlib.suppress(FileNotFoundError):
                if entry.stat(follow_symlinks=False).st_size >= at_least:
                    yield entry


def wait_for_blocks(
    directory: Path, *, at_least: int, expected: int, quiet_seconds: float, limit_seconds: float
) -> int:
    """Wait until so many blocks are there, or until nothing is added for a while; return how many there are.

    A backend may decline to store some, so the count alone may never be reached.
    """
    began = changed = time.monotonic()
    count = sum(1 for _ in block_files(directory, at_least=at_least))
    while count < expected:
        time.sleep(0.02)
        now = time.monotonic()
        found = sum(1 for _ in block_files(directory, at_least=at_least))
        if found != count:
            count, changed = found, now
        if now - changed > quiet_seconds or now - began > limit_seconds:
            break
    return count


def remove_blocks(directory: Path, *, at_least: int) -> None:
    """Remove the block files and leave what describes the directory."""
    for entry in list(block_files(directory, at_least=at_least)):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(entry.path)  # noqa: PTH108 - thousands of them


def forget_pages(directory: Path) -> None:
    """Make the next read of every file come from the device; needs no privilege and leaves other files' pages."""
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(_forget, [path for path in directory.rglob("*") if path.is_file()]))


def _forget(path: Path) -> None:
    try:
        fd = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return
    try:
        # Only clean pages can be dropped.
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
