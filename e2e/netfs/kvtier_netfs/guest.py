# SPDX-License-Identifier: Apache-2.0
"""Run a command under a Linux kernel of its own, as one process: for file systems that the machine's kernel lacks.

``python -m kvtier_netfs.guest -- COMMAND``: User Mode Linux of Debian has the clients of NFS and CephFS and the quotas
of xfs. The command finds the files of this machine, its own ``/dev/shm`` and ``TMPDIR`` in memory, one processor, and
loopback as its only network; it is root there. Its exit status is returned.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

_PROGRAM = "linux.uml"
_MODULES = Path("/usr/lib/uml/modules")
_LOADED = ("loop", "fuse", "overlay", "nfsv3", "nfsv4", "ceph", "sch_netem")
_NEEDED = {_PROGRAM: "user-mode-linux", "modprobe": "kmod", "gcc": "gcc", "setpriv": "util-linux"}
_TETHERED = ("setpriv", "--pdeathsig", "KILL", "unshare", "--pid", "--mount-proc", "--kill-child", "--fork")
"""Each process of the guest is one of this machine and may outlive its kernel. In a namespace of their own all of them
end with it, and it ends with this program, however that ends."""
_STATES = Path(__file__).with_name("guest_states.c")
_SKIPPED = 77
_MEMORY_DIRECTORY = "/dev/shm"  # noqa: S108 - where the kernel makes the unnamed file that is its memory

_FIRST_PROGRAM = """#!/bin/bash
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t tmpfs run /run
mkdir -p /dev/shm /dev/pts /run/tmp /run/lock
mount -t tmpfs shm /dev/shm
mount -t devpts devpts /dev/pts
ln -s /proc/self/fd /dev/fd
ip link set lo up
for module in {modules}; do modprobe -d {base} $module || echo "there is no module $module"; done
{environment}
export TMPDIR=/run/tmp
cd {directory}
setsid {command} < /dev/null
echo $? > {status}
sync
echo o > /proc/sysrq-trigger
sleep 60
"""


def why_not() -> str:
    """Say what is missing here; empty if nothing is."""
    missing = sorted({package for command, package in _NEEDED.items() if shutil.which(command) is None})
    return f"install {', '.join(missing)}" if missing else ""


def run_in_guest(command: list[str], *, memory_mib: int, base: Path) -> int:
    """Run a command under a kernel of its own, with `base` as an empty directory for what that needs.

    Returns:
        The exit status of the command; 1 where the kernel ended before it.
    """
    (base / "lib/modules").mkdir(parents=True)
    for version in _MODULES.iterdir():
        (base / "lib/modules" / version.name).symlink_to(version)
    states, first, status = base / "states.so", base / "first", base / "status"
    subprocess.run(["gcc", "-O2", "-shared", "-fPIC", "-o", str(states), str(_STATES)], check=True)
    kept = {name: os.environ[name] for name in ("HOME", "PATH", "PYTHONPATH", "LANG") if name in os.environ}
    first.write_text(
        _FIRST_PROGRAM.format(
            modules=" ".join(_LOADED),
            base=shlex.quote(str(base)),
            environment="\n".join(f"export {name}={shlex.quote(value)}" for name, value in kept.items()),
            directory=shlex.quote(str(Path.cwd())),
            command=shlex.join(command),
            status=shlex.quote(str(status)),
        )
    )
    first.chmod(0o755)
    kernel = [
        *_TETHERED,
        *(() if os.geteuid() == 0 else ("--map-root-user",)),
        "--",
        _PROGRAM,
        f"mem={memory_mib}M",
        "rootfstype=hostfs",
        "root=/dev/root",
        "rw",
        f"init={first}",
        "con=null",
        "con0=null,fd:1",
        "quiet",
    ]
    environment = {**os.environ, "LD_PRELOAD": str(states), "TMPDIR": _MEMORY_DIRECTORY}
    subprocess.run(kernel, stdin=subprocess.DEVNULL, env=environment, check=False)
    return int(status.read_text(encoding="ascii")) if status.exists() else 1


def main() -> int:
    """Run it and return the exit status of the command."""
    parser = argparse.ArgumentParser(prog="python -m kvtier_netfs.guest", description=__doc__)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    parser.add_argument("--memory-mib", type=int, default=6144, help="of the guest, and of the files of its tmpfs")
    given = parser.parse_args()
    if reason := why_not():
        print(reason, file=sys.stderr)
        return _SKIPPED
    words = given.command[1:] if given.command[:1] == ["--"] else given.command
    # SIGTERM ends the program in order.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with tempfile.TemporaryDirectory(prefix="kvtier-guest-") as base:
        return run_in_guest(words, memory_mib=given.memory_mib, base=Path(base))


if __name__ == "__main__":
    sys.exit(main())
