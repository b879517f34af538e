# SPDX-License-Identifier: Apache-2.0
"""Remove the shared-memory files that killed engines leave behind, and no others; explain where a new one does not fit.

vLLM keeps the pinned CPU tier in ``/dev/shm/vllm_offload_<engine>.mmap`` and removes the name on a clean exit only. In
a pod, /dev/shm outlives the container; the next engine then does not fit beside the dead one's file, and every restart
fails. Runs before an engine starts, in the init container and again in the engine's own process, because a restarted
container runs no init container.

The kernel knows whether a process holds a file. It leases a file for writing only if no other process, in any
container, has it open or mapped; a process that opens it meanwhile waits until it is removed. So engines of several
containers may share one /dev/shm. A file that may not be leased because it is another user's stays. Where leases are
not available, /proc shows which process holds a file, and then the directory must not be shared with processes that
/proc does not show. Files are listed before processes are. So a file made in between is never a candidate, and one
listed had a creator that held it open or is gone.

A process that /proc hides from us could hold only files that its user may open, and vLLM makes the files for their
owner alone. So a hidden process protects the files of its user. Our own user is the exception, since the system shows
us every ordinary process of ours. One that it hides, such as a key agent or a sandbox's first process, is no engine,
and would otherwise protect a dead engine's memory for ever.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import shutil
import signal
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from kvtier_connector.contract.errors import ConfigInvalid

PREFIX = "vllm_offload_"
SHM = Path("/dev/shm")  # noqa: S108 - vLLM puts the files here
PROC = Path("/proc")

_NO_ROOM = {errno.ENOSPC, errno.ENOMEM, errno.EFAULT}
"""Errors of a system without free pages; EFAULT is its answer to a mapping that is to be filled."""

logger = logging.getLogger(__name__)


class _Mapped(NamedTuple):
    """Identifies a file in a list of mappings, whose device need not be the one of `stat`."""

    name: str
    inode: int


class _Opened(NamedTuple):
    """Identifies a file by a descriptor: a file of another file system may have its name and number."""

    name: str
    inode: int
    device: int


class _Holders(NamedTuple):
    """Which files are in use, and whose files may be."""

    opened: frozenset[_Opened]
    mapped: frozenset[_Mapped]
    hidden_users: frozenset[int]

    def may_have(self, name: str, status: os.stat_result) -> bool:
        """Return whether a process may hold the file."""
        return (
            _Opened(name, status.st_ino, status.st_dev) in self.opened
            or _Mapped(name, status.st_ino) in self.mapped
            or status.st_uid in self.hidden_users
        )


@contextlib.contextmanager
def explaining_shortage(wanted_bytes: int, directory: str | Path = SHM) -> Iterator[None]:
    """Name the setting to change where a region of so many bytes does not fit; every other error passes.

    Raises:
        ConfigInvalid: the region does not fit.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        is_shortage = error.errno in _NO_ROOM if isinstance(error, OSError) else str(directory) in str(error)
        if not is_shortage:
            raise
        try:
            room = shutil.disk_usage(directory)
            have = f"{room.free >> 20} of {room.total >> 20} MiB are free"
        except OSError:
            have = "the free space is unknown"
        raise ConfigInvalid(
            f"{directory} is too small: the CPU tier needs {wanted_bytes >> 20} MiB there and {have} ({error}). Lower "
            "spec.cpu.size of the KVCacheTier. In a pod of your own, lower cpu_bytes_to_use or mount a larger "
            f"emptyDir of medium Memory at {directory}, within the container's memory limit"
        ) from error


def clear_stale_regions(directory: str | Path = SHM) -> list[str]:
    """Remove the regions in the directory that no process holds open or mapped; return their paths.

    Without leases and without a readable /proc nothing is removed. A file that cannot be removed is left, with a
    warning.
    """
    candidates = _candidates(Path(directory))
    if not candidates:
        return []
    removed = []
    untold = candidates
    if _gives_leases(directory):
        fates = [(path, status, _remove_leased(path, status)) for path, status in candidates]
        removed = [str(path) for path, _, is_removed in fates if is_removed]
        # /proc shows nothing of other containers, whose engines may be other users'.
        untold = []
        for path, status, is_removed in fates:
            if is_removed is None and status.st_uid == os.geteuid():
                untold.append((path, status))
            elif is_removed is None:
                logger.info("%s: kept, since another user's process may hold it", path)
    return sorted([*removed, *_clear_by_processes(directory, untold)])


def _gives_leases(directory: str | Path) -> bool:
    """Return whether an unused file in the directory can be leased."""
    try:
        with tempfile.NamedTemporaryFile(dir=directory, prefix=".kvtier-lease-") as file:
            return _lease(file.fileno())
    except OSError:
        return False


def _lease(descriptor: int) -> bool:
    """Lease a file for writing until the descriptor is closed; False if anybody else holds it.

    Raises:
        OSError: it cannot be told.
    """
    # The kernel signals us when another process opens it. The default signal would end this process.
    fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except BlockingIOError:
        return False
    return True


def _remove_leased(path: Path, seen: os.stat_result) -> bool | None:
    """Remove a region that no process holds; return whether it was removed, None where that is unknown."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError:
        return None
    try:
        if not os.path.samestat(seen, os.fstat(descriptor)):
            return False
        if _lease(descriptor):
            return _remove(path, seen)
    except OSError:
        return None
    finally:
        os.close(descriptor)
    logger.info("%s: kept, a process holds it", path)
    return False


def _clear_by_processes(directory: str | Path, candidates: list[tuple[Path, os.stat_result]]) -> list[str]:
    """Remove the regions that no process in /proc holds; return their paths."""
    if not candidates:
        return []
    try:
        holders = _holders()
    except OSError as error:
        logger.warning("%s: stale regions are kept: %s cannot be read: %s", directory, PROC, error)
        return []
    removed = []
    for path, status in candidates:
        if holders.may_have(path.name, status):
            logger.info("%s: kept, a process may hold it", path)
        elif _remove(path, status):
            removed.append(str(path))
    return removed


def _candidates(directory: Path) -> list[tuple[Path, os.stat_result]]:
    """List the regions; a directory that is not there has none."""
    found = []
    for path in sorted(directory.glob(PREFIX + "*")):
        try:
            status = path.lstat()
        except FileNotFoundError:
            continue
        if stat.S_ISREG(status.st_mode):
            found.append((path, status))
    return found


def _remove(path: Path, seen: os.stat_result) -> bool:
    try:
        if not os.path.samestat(seen, path.lstat()):
            return False
        path.unlink()
    except FileNotFoundError:
        return False
    except OSError as error:
        logger.warning("%s: a stale region stays: %s", path, error)
        return False
    return True


def _holders() -> _Holders:
    opened: set[_Opened] = set()
    mapped: set[_Mapped] = set()
    hidden_users: set[int] = set()
    for process in PROC.iterdir():
        if not process.name.isdigit():
            continue
        try:
            opened.update(_open_files(process))
            mapped.update(_mapped_files(process))
        except PermissionError:
            hidden_users.update(_user(process) - {os.geteuid()})
        except (FileNotFoundError, ProcessLookupError):
            # It ended while we looked: it holds nothing any more.
            continue
    return _Holders(frozenset(opened), frozenset(mapped), frozenset(hidden_users))


def _open_files(process: Path) -> Iterator[_Opened]:
    for descriptor in (process / "fd").iterdir():
        try:
            # The link is read before it is followed: a descriptor on a dead network mount must not block us.
            name = _region_name(os.readlink(descriptor))  # noqa: PTH115 - one of thousands
            if name is not None:
                status = descriptor.stat()
                yield _Opened(name, status.st_ino, status.st_dev)
        except FileNotFoundError:
            continue


def _mapped_files(process: Path) -> Iterator[_Mapped]:
    """A mapping outlives the descriptor it was made from."""
    for line in (process / "maps").read_text(errors="replace").splitlines():
        # address, permissions, offset, device, inode, path
        columns = line.split(maxsplit=5)
        name = _region_name(columns[-1])
        if name is not None and columns[4].isdigit():
            yield _Mapped(name, int(columns[4]))


def _region_name(path: str) -> str | None:
    """Return the region's own name, which is the same in every mount namespace, unlike its directory."""
    name = path.rpartition("/")[2].removesuffix(" (deleted)")
    return name if name.startswith(PREFIX) else None


def _user(process: Path) -> set[int]:
    try:
        return {process.stat().st_uid}
    except FileNotFoundError:
        return set()
