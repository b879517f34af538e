# SPDX-License-Identifier: Apache-2.0
"""How fast the memory is that every hit crosses: what processes copy that do nothing else, past and through the caches.

``python -m e2e.bench.memory --processes 16``. Each process copies between two regions of its own, in pieces as the
movers do; the C library is told by ``GLIBC_TUNABLES`` from which size on a copy passes the caches.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import multiprocessing
import os
import subprocess
import sys
import time
from multiprocessing.synchronize import Barrier

_MIB = 1 << 20
_REGION_BYTES = 128 * _MIB
_PIECE_BYTES = _MIB // 2
_ROUNDS = 8
_WAYS = {"past the caches": "0x10000", "through the caches": "0x40000000"}


def main() -> None:
    """Measure both ways, each in processes that begin with its setting."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--way", choices=list(_WAYS), help=argparse.SUPPRESS)
    parser.add_argument(
        "--fill", type=int, metavar="GIB", help="touch so much memory, all at once, and do nothing else"
    )
    options = parser.parse_args()
    if options.fill:
        print(f"touched {options.fill} GiB in {_fill(options.fill, options.processes):.1f} s", flush=True)
        return
    if options.way:
        print(f"{options.way}: {options.processes} processes copy {_measure(options.processes):.1f} GB/s", flush=True)
        return
    for way, threshold in _WAYS.items():
        environment = {**os.environ, "GLIBC_TUNABLES": f"glibc.cpu.x86_non_temporal_threshold={threshold}"}
        command = [sys.executable, "-m", "e2e.bench.memory", "--processes", str(options.processes), "--way", way]
        subprocess.run(command, env=environment, check=True)


def _fill(gibibytes: int, processes: int) -> float:
    """Touch memory until all processes hold their parts, and give it back; return the seconds that took."""
    gate = multiprocessing.Barrier(processes)
    share = (gibibytes << 30) // processes
    fillers = [multiprocessing.Process(target=_hold, args=(gate, share)) for _ in range(processes)]
    began = time.perf_counter()
    for filler in fillers:
        filler.start()
    for filler in fillers:
        filler.join()
    return time.perf_counter() - began


def _hold(gate: Barrier, size: int) -> None:
    region = mmap.mmap(-1, size)
    ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(region)), 1, size)
    gate.wait()


def _measure(processes: int) -> float:
    """Return the GB that all processes copy in a second, from the slowest one's time."""
    gate = multiprocessing.Barrier(processes)
    seconds: multiprocessing.SimpleQueue[float] = multiprocessing.SimpleQueue()
    copiers = [multiprocessing.Process(target=_copy, args=(gate, seconds)) for _ in range(processes)]
    for copier in copiers:
        copier.start()
    for copier in copiers:
        copier.join()
    slowest = max(seconds.get() for _ in copiers)
    return processes * _ROUNDS * _REGION_BYTES / slowest / 1e9


def _copy(gate: Barrier, seconds: multiprocessing.SimpleQueue[float]) -> None:
    source, target = mmap.mmap(-1, _REGION_BYTES), mmap.mmap(-1, _REGION_BYTES)
    first, second = (ctypes.addressof(ctypes.c_char.from_buffer(each)) for each in (source, target))
    # The first touch of a page costs more than copying it.
    ctypes.memset(first, 1, _REGION_BYTES)
    ctypes.memset(second, 2, _REGION_BYTES)
    gate.wait()
    began = time.perf_counter()
    for _ in range(_ROUNDS):
        for offset in range(0, _REGION_BYTES, _PIECE_BYTES):
            ctypes.memmove(second + offset, first + offset, _PIECE_BYTES)
    seconds.put(time.perf_counter() - began)


if __name__ == "__main__":
    main()
