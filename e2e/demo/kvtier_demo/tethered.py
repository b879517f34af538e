# SPDX-License-Identifier: Apache-2.0
"""Runs a module as `python -m` does, and has it ended in order (SIGTERM) when the process that started it is gone.

    python -m kvtier_demo.tethered PARENT MODULE [ARGUMENT ...]

The kernel sends the signal, so this holds for a parent that was killed and could end nothing itself.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Ask the kernel for the signal, then become the module."""
    parent, module, *arguments = sys.argv[1:]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != int(parent):
        sys.exit(128 + signal.SIGTERM)  # it died before the kernel knew that we want to hear of it
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
