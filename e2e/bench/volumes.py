# SPDX-License-Identifier: Apache-2.0
"""Directories that stand for a volume: their block files, and dropping them from the page cache."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
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


def enlarge_shared_memory(wanted_bytes: int, say: Callable[[str], None]) -> None:
    """Let /dev/shm hold so much; a machine whose memory grows as it is used starts with a small one."""
    status = os.statvfs("/dev/shm")
    if status.f_blocks * status.f_frsize >= wanted_bytes:
        return
    command = ["mount", "-o", f"remount,size={wanted_bytes}", "/dev/shm"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    say(f"shared memory enlarged to {wanted_bytes >> 30} GiB" if result.returncode == 0 else result.stderr.strip())


@contextlib.contextmanager
def tmpfs(directory: Path, size_bytes: int) -> Iterator[Path]:
    """Mount a tmpfs there, or make a directory in /dev/shm where that is not allowed."""
    directory.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes},mode=0700", "tmpfs", str(directory)]
    is_mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    place = directory if is_mounted else Path("/dev/shm/kvtier-bench")
    place.mkdir(exist_ok=True)
    try:
        yield place
    finally:
        if is_mounted:
            subprocess.run(["umount", str(directory)], capture_output=True, check=False)
        else:
            shutil.rmtree(place, ignore_errors=True)
