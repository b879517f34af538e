# SPDX-License-Identifier: Apache-2.0
"""Checks before the demo starts: the machine can run two engines, and no other demo uses the data.

Refusals name the remedy, and no log could say more.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import shutil
from collections.abc import Iterator
from pathlib import Path

_GIB = 1 << 30
_TOTAL_GIB = 9  # what the two pods request
_FREE_GIB = 7
_SHARED_GIB = 1.25  # two CPU tiers, and what the engines' processes share besides
_CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where vLLM puts them


class CannotStart(RuntimeError):
    """The machine or the data directory is not fit for the demo: the user must act."""


def check_machine() -> None:
    """Refuse early what would fail late."""
    try:
        ctypes.CDLL("libnuma.so.1")
    except OSError as missing:
        remedy = "install it (Debian, Ubuntu: apt-get install libnuma1)"
        raise CannotStart(f"vLLM's CPU build needs libnuma.so.1: {remedy}") from missing
    sizes = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    memory = {name.removesuffix(":"): int(kib) / 2**20 for name, kib, *_ in sizes}
    with contextlib.suppress(OSError, ValueError):  # no limit, or one that is written otherwise
        memory["MemTotal"] = min(memory["MemTotal"], int(_CONTAINER_LIMIT.read_text()) / _GIB)
    for name, needed in (("MemTotal", _TOTAL_GIB), ("MemAvailable", _FREE_GIB)):
        if memory[name] < needed:
            raise CannotStart(f"two vLLM engines need {needed} GiB of {name}, this machine has {memory[name]:.1f}")
    shared = shutil.disk_usage(_SHARED_MEMORY).free / _GIB if _SHARED_MEMORY.is_dir() else 0.0
    if shared < _SHARED_GIB:
        remedy = "mount -o remount,size=2g /dev/shm; in a container, start it with --shm-size=2g"
        raise CannotStart(f"two CPU tiers need {_SHARED_GIB} GiB in /dev/shm, {shared:.2f} are free: {remedy}")


@contextlib.contextmanager
def sole_use(data: Path) -> Iterator[None]:
    """Hold the directory: a second demo on it would take away the first one's kubeconfig and logs."""
    data.mkdir(parents=True, exist_ok=True)
    with (data / "demo.lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as held:
            remedy = "wait for it, or choose another directory (make demo DATA=…)"
            raise CannotStart(f"another demo runs on {data}: {remedy}") from held
        yield
