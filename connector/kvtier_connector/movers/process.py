# SPDX-License-Identifier: Apache-2.0
"""The process of one mover, which ends with its engine.

Run as ``python -m kvtier_connector.movers.process <settings as JSON>``. It has one thread, so it can hang on a volume
without holding up anybody; whoever started it kills it then. What it does is less urgent than what its engine does.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvtier_connector.movers.board import Board
from kvtier_connector.movers.files import MappingFs
from kvtier_connector.movers.mover import Mover, MoversSettings, Permit
from kvtier_connector.movers.rows import MappedRows, Region
from kvtier_connector.store.fs import FileSystem

_PACKAGE = str(Path(__file__).parents[2])
_PR_SET_PDEATHSIG = 1
_TUNABLES = "glibc.cpu.x86_non_temporal_threshold=0x10000"
"""Copies into the CPU tier of 64 KiB and more bypass the processor's caches: it is the GPU that reads them next. That
saves reading each line before it is written, a third of the memory traffic. Other C libraries ignore it."""
UNWANTED = 3
"""How a mover ends that the engine has told to."""
_NICENESS = 5
"""The engine's threads get three times the processor time of a mover where both want it."""


@dataclass(frozen=True, kw_only=True)
class MoverSettings:
    """What a mover is told; numbers of descriptors are those it inherits."""

    mover: int
    """Its number on the board."""
    parent: int
    """Process number of the engine."""
    board: int
    regions: tuple[Region, ...]
    """The files of the CPU tier."""
    row_bytes: int
    pipes: tuple[int, ...]
    """Where tokens of each lane come from."""
    replies: int
    """Where answers go."""
    settings: MoversSettings

    def encode(self) -> str:
        """Return what `decode` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> MoverSettings:
        """Read what `encode` returned."""
        fields: dict[str, Any] = json.loads(text)
        fields["regions"] = tuple(Region(*region) for region in fields["regions"])
        fields["pipes"] = tuple(fields["pipes"])
        fields["settings"] = MoversSettings(**fields["settings"])
        return cls(**fields)


def start_process(
    module: str, settings: str, descriptors: Sequence[int] = (), *, stdout: int | None = None
) -> subprocess.Popen[bytes]:
    """Run a module of this package with its settings; raise OSError where the host has no room for it."""
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join([_PACKAGE, *(path for path in sys.path if path)])
    tunables = environment.get("GLIBC_TUNABLES", "")
    if _TUNABLES.partition("=")[0] not in tunables:
        environment["GLIBC_TUNABLES"] = f"{tunables}:{_TUNABLES}" if tunables else _TUNABLES
    return subprocess.Popen(
        [sys.executable, "-m", module, settings],
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        pass_fds=descriptors,
        env=environment,
    )


def die_with(parent: int) -> None:
    """Ask the system to kill this process when its parent ends, should the parent end without closing the pipes.

    What goes to all processes at once goes to the parent too, which ends this one when it has finished with it.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        # It ended before we asked.
        sys.exit(0)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def give_way() -> None:
    """Let the engine go first; a sandbox may forbid to say so."""
    with contextlib.suppress(OSError):
        os.nice(_NICENESS)
    with contextlib.suppress(OSError):
        # It never interrupts another thread when it wakes up.
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def main(settings: MoverSettings) -> None:
    """Run a mover."""
    die_with(settings.parent)
    give_way()
    # Directories are the group's, see FileSystem.mkdir: they have their mode at once, which saves two round trips each.
    os.umask(0o007)
    number, board = settings.mover, Board(settings.board)

    def permit() -> Permit:
        wanted, storing = board.head()
        return Permit(number < wanted, number < storing)

    store = settings.settings.open_volume(_file_system(settings.settings.file_system))
    # A purge from before this process is told from a later one, and a volume that hangs holds up no task.
    threading.Thread(target=store.learn_purges, name="kvtier-purges", daemon=True).start()
    Mover(
        number,
        board=board,
        rows=MappedRows(settings.regions, settings.row_bytes),
        row_bytes=settings.row_bytes,
        store=store,
        pipes=settings.pipes,
        replies=settings.replies,
        permit=permit,
    ).run()
    if number >= board.head().wanted:
        sys.exit(UNWANTED)


def _file_system(name: str) -> FileSystem:
    if not name:
        return MappingFs()
    module, _, attribute = name.partition(":")
    made: FileSystem = getattr(importlib.import_module(module), attribute)()
    return made


if __name__ == "__main__":
    main(MoverSettings.decode(sys.argv[1]))
