# SPDX-License-Identifier: Apache-2.0
"""Run a command with a network file system mounted, and take it down afterwards, however the command ends.

``python -m kvtier_netfs glusterfs-distribute -- ls {a} {b}``: ``{a}`` and ``{b}`` are the two mounts. With ``--list``
say which file systems this machine can have.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from kvtier_netfs import KINDS
from kvtier_netfs.volume import UnavailableError

_SKIPPED = 77
"""The exit status of automake for a test that cannot run here."""


def main() -> int:
    """Run it and return the exit status of the command."""
    parser = argparse.ArgumentParser(prog="python -m kvtier_netfs", description=__doc__)
    parser.add_argument("kind", nargs="?", choices=KINDS)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    parser.add_argument("--list", action="store_true", help="say what can be had here, and why not the rest")
    parser.add_argument("--options", default="", help="more options of the mounts")
    parser.add_argument("--disk-mib", type=int, help="size of each server's disk")
    given = parser.parse_args()
    if given.list or given.kind is None:
        for name, kind in KINDS.items():
            print(f"{name}: {kind.why_not() or 'can be had'}")
        return 0
    # SIGTERM ends the program in order.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with tempfile.TemporaryDirectory(prefix="kvtier-netfs-") as base:
        try:
            volume = KINDS[given.kind](Path(base) / "volume", options=given.options)
            volume.disk_mib = given.disk_mib or volume.disk_mib
            with volume:
                words = given.command[1:] if given.command[:1] == ["--"] else given.command
                words = [word.replace("{a}", str(volume.a)).replace("{b}", str(volume.b)) for word in words]
                return subprocess.run(words, check=False).returncode
        except UnavailableError as error:
            print(f"{given.kind}: {error}", file=sys.stderr)
            return _SKIPPED


if __name__ == "__main__":
    sys.exit(main())
