# SPDX-License-Identifier: Apache-2.0
"""Try a volume before engines depend on it: ``python3 -m kvtier_connector.pod_tools.preflight --root DIR``.

Runs once, as the engines' user, in a Job. It writes, renames and reads a bounded amount in a directory of its own and
removes it. The result is one JSON object, on standard output and in the file that the kubelet takes a container's last
words from. Exit status: 0 the volume can be used, 1 it cannot. Like the installer it runs in the connector's image, so
it needs Python and nothing else.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import functools
import json
import mmap
import os
import sys
import threading
import time
import timeit
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from kvtier_connector.store.fs import (
    CREATE_FLAGS,
    FIRST_WRITE_FLAGS,
    LOCAL,
    NEXT_WRITE_FLAGS,
    READ_FLAGS,
    DirectIo,
    FileSystem,
    VolumeProfile,
    make_directories,
    measure_round_trip,
    new_token,
    opened,
    read_file,
    read_into,
    write_block,
    write_profile,
)
from kvtier_connector.store.mounts import advice, mount_of

FILE_BYTES = 4 << 20
"""Length of each file, about that of a block file."""
LEAST_FREE_BYTES = 64 << 20
THREADS = 4
RENAMES = 50
STATS = 100
_CLEARLY = 1.1
"""A rate that is higher by less is the same."""
_INSTEAD = "use a file system of POSIX semantics (CephFS, NFS, Lustre, EFS), not an object store behind a mount"

PIECE_BYTES = 1 << 20
"""As the store reads through the page cache."""
_PREFIX = ".preflight-"
_ABANDONED_SECONDS = 3600.0
_REFUSED: Final = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EACCES})
_NAMES: Final = 20
_LONG_AGO_SECONDS: Final = 1000


@dataclass(frozen=True, kw_only=True)
class PreflightReport:
    """Measurements of a volume; 0 and None where it was not measured."""

    problem: str = ""
    """Why it cannot be used; empty if it can."""
    direct_io: bool | None = None
    """Whether the page cache can be bypassed."""
    total_bytes: int = 0
    free_bytes: int = 0
    write_bytes_per_second: int = 0
    read_bytes_per_second: int = 0
    """The faster way."""
    stat_microseconds: int = 0
    file_system: str = ""
    round_trip_microseconds: int = 0
    """Until the volume has said that it does not have a file, which no cache knows."""
    chosen: str = ""
    """The chosen way to read this volume, and the reason, for people."""
    advice: str = ""
    """Recommended changes of the mount, for people."""


class _UnusableError(Exception):
    """The volume fails a test; the message says which, and what to do."""


def try_volume(root: Path, *, most_bytes: int, most_seconds: float, fs: FileSystem = LOCAL) -> PreflightReport:
    """Try the volume under a tier's directory, which is made if need be, and return its properties.

    Writing, and then reading, takes `most_seconds` at most: only what was moved by then counts.
    """
    directory = str(root / f"{_PREFIX}{new_token()}")
    fs = fs.rooted(str(root))
    try:
        _make(fs, root, directory)
        try:
            _remove_abandoned(fs, root)
            report, profile = _try(fs, directory, most_bytes=most_bytes, most_seconds=most_seconds)
            write_profile(fs, str(root), profile)
            return report
        finally:
            _remove(fs, directory)
    except _UnusableError as error:
        return PreflightReport(problem=str(error))
    except OSError as error:
        return PreflightReport(problem=f"{root}: {error.strerror or error}")


def _make(fs: FileSystem, root: Path, directory: str) -> None:
    try:
        make_directories(fs, directory)
    except OSError as error:
        if error.errno in {errno.EACCES, errno.EPERM}:
            user = f"user {os.geteuid()}, groups {sorted({os.getegid(), *os.getgroups()})}"
            raise _UnusableError(
                f"{user} may not write in {root}: set fsGroup or runAsUser in "
                "spec.engine.podTemplate.securityContext to the owner of the volume, or change its owner"
            ) from error
        if error.errno == errno.EROFS:
            raise _UnusableError(
                f"{root} is mounted read-only: use a volume that can be written, or disk.mode ReadOnly"
            ) from error
        raise


def _try(
    fs: FileSystem, directory: str, *, most_bytes: int, most_seconds: float
) -> tuple[PreflightReport, VolumeProfile]:
    room = fs.statvfs(directory)
    free, total = room.f_bavail * room.f_frsize, room.f_blocks * room.f_frsize
    if free < LEAST_FREE_BYTES:
        raise _UnusableError(
            f"only {free >> 20} MiB are free of {total >> 20} MiB: remove what else is on the volume, or let it grow"
        )
    _check_renames(fs, directory)
    if missing := _missing_property(fs, directory):
        raise _UnusableError(f"{missing}; {_INSTEAD}")
    mount = mount_of(directory)
    direct = DirectIo(fs, directory, direct=None)
    paths = [f"{directory}/{number}" for number in range(max(1, min(most_bytes, free // 4) // FILE_BYTES))]
    buffers = [memoryview(mmap.mmap(-1, FILE_BYTES)) for _ in range(THREADS)]
    for buffer in buffers:
        buffer[:] = os.urandom(1 << 20) * (FILE_BYTES >> 20)  # what compresses would flatter the volume

    def write(path: str, buffer: memoryview) -> int:
        with opened(fs, path, CREATE_FLAGS | direct.flag(buffer)) as fd:
            is_direct, end_first = bool(direct.flag(buffer)), mount.is_end_written_first
            write_block(fs, fd, (buffer[:4096], buffer[4096:]), is_direct=is_direct, end_first=end_first)
            fs.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        return FILE_BYTES

    def read(path: str, buffer: memoryview, flag: int | None = None) -> int:
        flag = direct.flag(buffer) if flag is None else flag
        with opened(fs, path, READ_FLAGS | flag) as fd:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            size = buffer.nbytes if flag else PIECE_BYTES
            return sum(fs.preadv(fd, [buffer[at : at + size]], at) for at in range(0, buffer.nbytes, size))

    written, write_rate = _measure(write, paths, buffers, most_seconds)
    files = paths[: written // FILE_BYTES]
    _, read_rate = _measure(read, files, buffers, most_seconds / 2)
    cached_rate = 0
    if direct.is_supported():
        _, cached_rate = _measure(functools.partial(read, flag=0), files, buffers, most_seconds / 2)
    is_direct = direct.is_supported() and read_rate * _CLEARLY >= cached_rate
    report = PreflightReport(
        direct_io=direct.is_supported(),
        total_bytes=total,
        free_bytes=free,
        write_bytes_per_second=write_rate,
        read_bytes_per_second=read_rate if is_direct or not cached_rate else cached_rate,
        stat_microseconds=round(timeit.timeit(lambda: fs.stat(paths[0]), number=STATS) / STATS * 1e6),
        file_system=mount.name,
        round_trip_microseconds=round(measure_round_trip(fs, directory) * 1e6),
        chosen=_chosen(is_direct=is_direct, direct_rate=read_rate, cached_rate=cached_rate),
        advice="; ".join(advice(mount)),
    )
    return report, VolumeProfile(
        direct_io=is_direct, read_bytes_per_second=report.read_bytes_per_second, write_bytes_per_second=write_rate
    )


def _chosen(*, is_direct: bool, direct_rate: int, cached_rate: int) -> str:
    if not cached_rate:
        return "reads go through the page cache: the volume refuses to bypass it"
    rates = f"{direct_rate >> 20} MiB/s past the page cache and {cached_rate >> 20} MiB/s through it"
    return f"reads go {'past' if is_direct else 'through'} the page cache: {rates}"


def _measure(
    move: Callable[[str, memoryview], int], paths: Sequence[str], buffers: Sequence[memoryview], most_seconds: float
) -> tuple[int, int]:
    """Move files on every thread until all are done or time is up; return bytes, and bytes a second."""
    start = time.monotonic()
    waiting = iter(paths)
    lock = threading.Lock()

    def run(buffer: memoryview) -> int:
        moved = 0
        while True:
            with lock:
                # In order, so that what was written is a head of the list.
                path = None if time.monotonic() - start > most_seconds and moved else next(waiting, None)
            if path is None:
                return moved
            moved += move(path, buffer)

    with ThreadPoolExecutor(max_workers=len(buffers)) as pool:
        moved = sum(pool.map(run, buffers))
    return moved, round(moved / max(1e-6, time.monotonic() - start))


def _check_renames(fs: FileSystem, directory: str) -> None:
    """Rename whole files over one that another thread reads: it must always be there, and whole."""
    target, done, torn = f"{directory}/renamed", threading.Event(), []

    def look() -> None:
        page = memoryview(mmap.mmap(-1, 4096))
        while not done.is_set():
            try:
                with opened(fs, target) as fd:
                    found = read_into(fs, fd, page)
            except OSError as error:
                if error.errno != errno.ESTALE:  # NFS says so of a file replaced meanwhile, and the store asks again
                    torn.append(f"the file was away for a moment: {error.strerror}")
                    return
                continue
            if found != len(page) or len(set(page)) != 1:
                torn.append("a half-written file was seen")
                return

    _write_page(fs, target, 0)
    reader = threading.Thread(target=look, name="preflight-reader")
    reader.start()
    try:
        for number in range(1, RENAMES):
            partial = f"{target}.{number}"
            _write_page(fs, partial, number)
            fs.rename(partial, target)
    finally:
        done.set()
        reader.join()
    if torn:
        raise _UnusableError(
            f"a rename is not atomic here ({torn[0]}): engines would read each other's half-written blocks; {_INSTEAD}"
        )


def _write_page(fs: FileSystem, path: str, content: int) -> None:
    with opened(fs, path, CREATE_FLAGS) as fd:
        fs.pwritev(fd, [memoryview(bytes([content]) * 4096)], 0)


def _missing_property(fs: FileSystem, directory: str) -> str:
    """Return the first property of POSIX that the store needs and the volume lacks, and what that would cost."""
    for check, refusal in _CHECKS:
        try:
            missing = check(fs, directory)
        except OSError as error:
            if not refusal or error.errno not in {*_REFUSED, errno.EEXIST}:
                raise
            missing = refusal.format(os.strerror(error.errno or 0))
        if missing:
            return missing
    return ""


def _create(fs: FileSystem, path: str) -> None:
    fs.close(fs.open(path, CREATE_FLAGS))


def _creates_once(fs: FileSystem, directory: str) -> str:
    _create(fs, f"{directory}/once")
    try:
        _create(fs, f"{directory}/once")
    except FileExistsError:
        return ""
    return "a file can be created twice (no O_EXCL): two engines would each take one directory for theirs"


def _lists_at_once(fs: FileSystem, directory: str) -> str:
    names = {f"listed{number}" for number in range(_NAMES)}
    for name in names:
        _create(fs, f"{directory}/{name}")
    if not names <= {entry.name for entry in fs.scandir(directory)}:
        return "a new file is not listed at once (eventual listings): the janitor would not count it"
    for name in names:
        fs.unlink(f"{directory}/{name}")
    if names & {entry.name for entry in fs.scandir(directory)}:
        return "a removed file stays listed (eventual listings): the janitor would count what is gone"
    return ""


def _appends(fs: FileSystem, directory: str) -> str:
    path = f"{directory}/appended"
    for number in range(3):
        with opened(fs, path, NEXT_WRITE_FLAGS if number else FIRST_WRITE_FLAGS) as fd:
            fs.pwritev(fd, [memoryview(bytes([number + 1]) * 1024)], 1024 * number)
    if read_file(fs, path, most_bytes=4096) != b"".join(bytes([number + 1]) * 1024 for number in range(3)):
        return "what is written to a file again is not there when it is opened: the janitor would miss records"
    return ""


def _replaces(fs: FileSystem, directory: str) -> str:
    for name in ("old", "new"):
        _create(fs, f"{directory}/{name}")
    fs.rename(f"{directory}/new", f"{directory}/old")
    return ""


def _tells_times(fs: FileSystem, directory: str) -> str:
    path = f"{directory}/touched"
    _create(fs, path)
    long_ago = fs.stat(path).st_mtime - _LONG_AGO_SECONDS
    os.utime(path, (long_ago, long_ago))
    fs.touch(path)
    return "" if fs.stat(path).st_mtime > long_ago + _LONG_AGO_SECONDS / 2 else _NO_TIMES


_NO_TIMES: Final = "the time of a file cannot be set: no engine could tell how long its store permit lasts"
_CHECKS: Final[tuple[tuple[Callable[[FileSystem, str], str], str], ...]] = (
    (_creates_once, ""),
    (_lists_at_once, ""),
    (_appends, "a file cannot be written to again ({}): engines would have no journals"),
    (_replaces, "a file cannot be renamed over another ({}): nothing could be published"),
    (_tells_times, _NO_TIMES),
)
"""Each with what it means where the volume refuses a call of it; empty where that is a failure of the volume."""


def _remove(fs: FileSystem, directory: str) -> None:
    with contextlib.suppress(OSError):
        for entry in fs.scandir(directory):
            # A file that cannot be removed keeps the directory, and no other file.
            with contextlib.suppress(OSError):
                fs.unlink(f"{directory}/{entry.name}")
        fs.rmdir(directory)


def _remove_abandoned(fs: FileSystem, root: Path) -> None:
    """Remove what earlier tries left that were killed; one that is at work is younger."""
    with contextlib.suppress(OSError):
        for entry in fs.scandir(str(root)):
            is_one = entry.name.startswith(_PREFIX) and entry.is_dir(follow_symlinks=False)
            # Another preflight may remove the same one.
            with contextlib.suppress(OSError):
                if is_one and fs.stat(f"{root}/{entry.name}").st_mtime < time.time() - _ABANDONED_SECONDS:
                    _remove(fs, f"{root}/{entry.name}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python3 -m kvtier_connector.pod_tools.preflight")
    parser.add_argument("--root", type=Path, required=True, help="directory of the tier on the volume")
    parser.add_argument("--bytes", type=int, default=256 << 20, help="write at most so much (256 MiB)")
    parser.add_argument("--seconds", type=float, default=15.0, help="write, and read, at most for so long (15)")
    parser.add_argument("--result", type=Path, help="also write the result to this file")
    options = parser.parse_args(arguments)
    report = try_volume(options.root, most_bytes=options.bytes, most_seconds=options.seconds)
    text = json.dumps(asdict(report), sort_keys=True)
    sys.stdout.write(text + "\n")
    if options.result is not None:
        options.result.write_text(text, encoding="utf-8")
    return 1 if report.problem else 0


if __name__ == "__main__":
    sys.exit(main())
