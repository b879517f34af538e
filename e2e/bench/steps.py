# SPDX-License-Identifier: Apache-2.0
"""Where an engine's steps spend their time: clocks around the scheduler's, the connector's and the worker's calls.

Everything is put around vLLM's and our classes from outside, in the process of the engine, when a measurement asks for
it; nothing of it is in the product. The clock runs for the outermost call of a name only, so a method that calls its
base class counts once; a call inside another one counts for both. For one worker, which lives in the engine's process.
"""

from __future__ import annotations

import functools
import importlib
import os
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_OFFLOADING = "vllm.distributed.kv_transfer.kv_connector.v1.offloading"
_STEPS = (
    ("vllm.v1.engine.core", "EngineCore", ("step", "step_with_batch_queue", "preprocess_add_request")),
    (
        "vllm.v1.core.kv_cache_manager",
        "KVCacheManager",
        ("get_computed_blocks", "get_computed_blocks_for_connector", "allocate_slots", "cache_blocks", "free"),
    ),
    ("vllm.v1.core.sched.scheduler", "Scheduler", ("schedule", "update_from_output", "add_request")),
    ("vllm.v1.worker.gpu_worker", "Worker", ("execute_model", "sample_tokens")),
    ("vllm.v1.kv_offload.cpu.gpu_worker", "SingleDirectionOffloadingHandler", ("transfer_async", "get_finished")),
    ("kvtier_connector.movers.engine", "Movers", ("submit", "collect")),
    ("kvtier_connector.tier.transfers", "Transfers", ("load", "hasten", "take_landed", "store")),
)
"""Calls of these classes alone."""
_WHOLE = (
    (f"{_OFFLOADING}.scheduler", "OffloadingConnectorScheduler"),
    ("kvtier_connector.tier.scheduler", "KVTierScheduler"),
    ("vllm.v1.kv_offload.tiering.manager", "TieringOffloadingManager"),
    ("kvtier_connector.tier.manager", "KVTierManager"),
    ("kvtier_connector.tier.tier", "SharedVolumeTier"),
)
"""Every method of these. What an engine does not have is left out."""
_LEAST_CPU_SECONDS = 0.01

Part = tuple[float, float]
"""Seconds and size of one thing that a call reports as done."""


class Clock:
    """Durations of calls by name. Any thread; each adds to numbers of its own."""

    def __init__(self, *, is_tracing: bool) -> None:
        """Begin; a clock that traces keeps when each call began and ended, too."""
        self._is_tracing = is_tracing
        self._threads = threading.local()
        self._of_all: list[dict[str, list[float]]] = []
        self.trace: list[tuple[str, float, float, list[Part]]] = []

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function with the clock around it."""

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            totals, running = self._mine()
            if name in running:
                return function(*args, **kwargs)
            running.add(name)
            result: Any = None
            began = time.perf_counter()
            try:
                result = function(*args, **kwargs)
                return result
            finally:
                ended = time.perf_counter()
                running.discard(name)
                _add(totals.setdefault(name, [0, 0.0, 0.0]), 1, ended - began, ended - began)
                if self._is_tracing:
                    self.trace.append((name, began, ended, _parts(result, kwargs)))

        return timed

    def totals(self) -> dict[str, dict[str, float]]:
        """Return calls, seconds and the longest call of each name."""
        summed: dict[str, list[float]] = {}
        for totals in list(self._of_all):
            for name, total in list(totals.items()):
                _add(summed.setdefault(name, [0, 0.0, 0.0]), *total)
        return {name: {"calls": c, "seconds": s, "longest": longest} for name, (c, s, longest) in summed.items()}

    def _mine(self) -> tuple[dict[str, list[float]], set[str]]:
        if not hasattr(self._threads, "totals"):
            self._threads.totals, self._threads.running = {}, set()
            self._of_all.append(self._threads.totals)
        return self._threads.totals, self._threads.running


class Clocked:
    """Classes whose methods have a clock around them, until `undo`."""

    def __init__(self, clock: Clock) -> None:
        """Begin with none."""
        self._clock = clock
        self._originals: list[tuple[type, str, Any]] = []

    def add(self, owner: type, names: tuple[str, ...] | None = None) -> None:
        """Put the clock around methods that a class has, or around all that it defines itself."""
        for name in names or [name for name in vars(owner) if not name.startswith("__")]:
            original = getattr(owner, name, None)
            own = vars(owner).get(name)
            if isinstance(original, types.FunctionType) and not isinstance(own, staticmethod):
                self._originals.append((owner, name, own))
                setattr(owner, name, self._clock.around(f"{owner.__name__}.{name}", original))

    def undo(self) -> None:
        """Leave the classes as they were."""
        for owner, name, original in reversed(self._originals):
            if original is None:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
        self._originals.clear()


class StepProfile:
    """Added to vLLM's worker by `models.equip_worker`: measures between two calls, and leaves no trace after."""

    def start_step_profile(self, is_tracing: bool) -> None:
        """Put the clocks around the calls."""
        clock = Clock(is_tracing=is_tracing)
        clocked = Clocked(clock)
        for owner, names in _owners():
            clocked.add(owner, names)
        vars(self)["bench_profile"] = (clock, clocked, time.perf_counter(), _cpu_seconds())

    def stop_step_profile(self) -> dict[str, Any]:
        """Take the clocks off, and return what they say."""
        clock, clocked, began, cpu_before = vars(self).pop("bench_profile")
        seconds = time.perf_counter() - began
        clocked.undo()
        cpu = {name: spent - cpu_before.get(name, 0.0) for name, spent in _cpu_seconds().items()}
        return {
            "began": began,
            "seconds": seconds,
            "calls": clock.totals(),
            "cpu_seconds": {name: spent for name, spent in sorted(cpu.items()) if spent >= _LEAST_CPU_SECONDS},
            "trace": clock.trace,
        }

    def process_id(self) -> int:
        """Return the engine's process."""
        return os.getpid()

    def describe_kv_cache(self) -> list[list[int]]:
        """Return shape and strides of the first layer's cache: how the blocks lie in the GPU's memory."""
        caches = getattr(getattr(self, "model_runner", None), "kv_caches", None)
        first: Any = caches[0] if caches else None
        return [list(first.shape), list(first.stride())] if hasattr(first, "stride") else []


def _owners() -> Iterator[tuple[type, tuple[str, ...] | None]]:
    for module, name, methods in _STEPS:
        if (owner := _find(module, name)) is not None:
            yield owner, methods
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    if not has_kv_transfer_group():
        return
    connector = get_kv_transfer_group()
    found: list[type | None] = [type(connector), type(getattr(connector, "connector_worker", None))]
    found += [_find(module, name) for module, name in _WHOLE]
    for owner in dict.fromkeys(found):
        if owner is not None and owner is not type(None):
            yield from ((parent, None) for parent in owner.__mro__ if _is_measured(parent))


def _is_measured(owner: type) -> bool:
    """Tell the classes that do the work from the interfaces they implement."""
    return owner.__module__.startswith("kvtier_connector") or any(
        part in owner.__module__ for part in ("offloading", "kv_offload.tiering", "simple_kv_offload", "simple_cpu")
    )


def _find(module: str, name: str) -> type | None:
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None
    return found if isinstance(found, type) else None


def _add(total: list[float], calls: float, seconds: float, longest: float) -> None:
    total[0] += calls
    total[1] += seconds
    total[2] = max(total[2], longest)


def _parts(result: Any, arguments: dict[str, Any]) -> list[Part]:
    """Return what a call reports as done: the transfers or chunks that it returns, or the one that it is told of."""
    if isinstance(result, list):
        return [
            (float(seconds), float(getattr(item, "transfer_size", None) or 1))
            for item in result
            if (seconds := getattr(item, "transfer_time", None) or getattr(item, "seconds", None)) is not None
        ]
    return [(float(arguments["seconds"]), 1.0)] if "seconds" in arguments else []


def _cpu_seconds() -> dict[str, float]:
    """Return the processor time of this process's threads, main and others, and of the processes beside it."""
    tick = os.sysconf("SC_CLK_TCK")
    seconds = {"engine's main thread": 0.0, "engine's other threads": 0.0, "other processes": 0.0}
    own = os.getpid()
    for path in Path(f"/proc/{own}/task").glob("*/stat"):
        seconds["engine's main thread" if int(path.parent.name) == own else "engine's other threads"] += _spent(
            path, tick
        )[0]
    for path in Path("/proc").glob("[0-9]*/stat"):
        spent, group = _spent(path, tick)
        if int(path.parent.name) != own and group == os.getpgid(0):
            seconds["other processes"] += spent
    return seconds


def _spent(path: Path, tick: int) -> tuple[float, int]:
    """Return a task's processor time and its process group."""
    try:
        fields = path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return 0.0, -1
    return (int(fields[11]) + int(fields[12])) / tick, int(fields[2])
