# SPDX-License-Identifier: Apache-2.0
"""The parent of one container's processes: starts the main one, and kills the others when that one ends.

It runs as `python -I -S launcher.py` and uses the standard library only. Its standard input holds an order (`encode`),
then the input of the main process, if there is any. It is the subreaper of all that the container starts, so no daemon
escapes. The kernel signals it when the node dies. It exits as the main process did (128 + signal after a signal).

- SIGTERM: pass on to the main process
- SIGUSR1: kill everything now; the kernel sends it, too, when the node is gone
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

END_NOW = signal.SIGUSR1
_CANNOT_START = 127
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LENGTH_DIGITS = 8
_HANDLED = (signal.SIGCHLD, signal.SIGTERM, END_NOW)

_libc = ctypes.CDLL(None)


def main() -> int:
    """Run the container that standard input describes; return its exit status."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)
    order = json.loads(_read(int(_read(_LENGTH_DIGITS))))
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    _libc.prctl(_PR_SET_PDEATHSIG, END_NOW, 0, 0, 0)
    if os.getppid() != order["parent"]:
        return _CANNOT_START  # the node died before the kernel knew that we want to hear of it
    main_pid = os.fork()
    if main_pid == 0:
        _become_container(order)
    status = _wait(main_pid)
    end_descendants()
    return os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)


def encode(order: dict[str, Any]) -> bytes:
    """Return an order as the launcher reads it: its length in decimal digits, and JSON."""
    text = json.dumps(order).encode()
    return b"%0*d" % (_LENGTH_DIGITS, len(text)) + text


def _read(count: int) -> bytes:
    """Read so many bytes, and none of those that follow: they are the input of the main process."""
    content = b""
    while len(content) < count:
        piece = os.read(0, count - len(content))
        if not piece:
            sys.exit(_CANNOT_START)  # the node has died
        content += piece
    return content


def descendants(root: int) -> set[int]:
    """Return the living processes below one."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it ended while we looked
                # the name in parentheses may hold anything, so what follows the last one is read
                fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
                if fields[0] != "Z":
                    children.setdefault(int(fields[1]), []).append(int(entry.name))
    found: set[int] = set()
    queue = [root]
    while queue:
        for child in children.get(queue.pop(), []):
            found.add(child)
            queue.append(child)
    return found


def end_descendants() -> None:
    """Kill until nothing is left: what loses its parent becomes our child, so none is missed."""
    while True:
        for pid in descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
        except ChildProcessError:
            return
        time.sleep(0.005)


def _wait(main_pid: int) -> int:
    while True:
        received = signal.sigwait(_HANDLED)
        if received == signal.SIGTERM:
            with contextlib.suppress(ProcessLookupError):
                os.kill(main_pid, signal.SIGTERM)
        elif received == END_NOW:
            os.kill(main_pid, signal.SIGKILL)
            return os.waitpid(main_pid, 0)[1]
        else:
            while (reaped := os.waitpid(-1, os.WNOHANG)) != (0, 0):
                if reaped[0] == main_pid:
                    return reaped[1]


def _become_container(order: dict[str, Any]) -> None:
    try:
        os.setsid()
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED)
        if not order["input"]:
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.chdir(order["directory"])
        os.execve(order["program"], order["command"], order["environment"])  # noqa: S606 - a program, no shell
    except OSError as problem:
        sys.stderr.write(f"kvtier-localcluster: cannot start {order['program']}: {problem}\n")
        sys.stderr.flush()
        os._exit(_CANNOT_START)


if __name__ == "__main__":
    sys.exit(main())
