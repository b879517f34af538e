# SPDX-License-Identifier: Apache-2.0
"""Removes the shared-memory files of dead engines, and no others; explains where a new one does not fit.

vLLM keeps the pinned CPU tier in ``/dev/shm/vllm_offload_<engine>.mmap`` and removes the name on a clean exit only. In
a pod, /dev/shm outlives the container; the next engine then does not fit beside the dead one's file, and every restart
fails. Runs before an engine starts, in the init container and again in the engine's own process, because a restarted
container runs no init container.

The kernel knows whether a process holds a file. It leases a file for writing only if no other process, in any
container, has it open or mapped; a process that opens it meanwhile waits until it is removed. A file that cannot be
leased stays: another user owns it, or the system has no leases.
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
from collections.abc import Iterator
from pathlib import Path

from kvtier_connector.contract.errors import ConfigInvalid

PREFIX = "vllm_offload_"
SHM = Path("/dev/shm")  # noqa: S108 - vLLM puts the files here

_NO_ROOM = {errno.ENOSPC, errno.ENOMEM, errno.EFAULT}
"""Errors of a system without free pages; EFAULT is its answer to a mapping that is to be filled."""

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def explaining_shortage(wanted_bytes: int, directory: str | Path = SHM) -> Iterator[None]:
    """Name the setting to change where a region of so many bytes does not fit; every other error passes.

    Raises:
        ConfigInvalid: the region does not fit.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        if not (error.errno in _NO_ROOM if isinstance(error, OSError) else str(directory) in str(error)):
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

    A region that cannot be leased or removed stays, with a message in the log.
    """
    return [str(path) for path in sorted(Path(directory).glob(PREFIX + "*")) if _remove_unused(path)]


def _remove_unused(path: Path) -> bool:
    """Remove a region that no process holds; return whether it was removed."""
    descriptor = -1
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return False
        # The kernel signals us when another process opens it. The default signal would end this process.
        fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        # Another file may have the name by now.
        if not os.path.samestat(os.fstat(descriptor), path.lstat()):
            return False
        path.unlink()
    except FileNotFoundError:
        return False
    except BlockingIOError:
        logger.info("%s: kept, a process holds it", path)
        return False
    except OSError as error:
        logger.warning("%s: kept, since it cannot be opened, leased or removed: %s", path, error)
        return False
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    return True
