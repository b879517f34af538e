# SPDX-License-Identifier: Apache-2.0
"""Runs several classes of the matrix at a time, on the GPUs of one machine, until a deadline.

Each class runs in a process of its own that sees the GPUs it was given; engines of tiny models share a GPU. Each row is
written as soon as it is known, so a machine that is taken away takes no result with it.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any, Final

from e2e.matrix import proof
from e2e.matrix.classes import ModelClass

ROWS: Final = "matrix.json"
_POLL_SECONDS: Final = 0.2


@dataclass(frozen=True, kw_only=True)
class Lanes:
    """The machine, and the time."""

    gpus: Sequence[str]
    """Numbers of the GPUs; none for vLLM's CPU build."""
    jobs: int
    """Classes that run at a time."""
    seconds: float
    """Classes that still run after this time are ended."""


def run(classes: Sequence[ModelClass], lanes: Lanes, *, work: Path, results: Path, about: Mapping[str, Any]) -> bool:
    """Run classes in their order; return whether all did as promised. Writes `ROWS` into ``results``.

    Args:
        classes: the most important first.
        lanes: GPUs, processes and time.
        work: directory for models and volumes.
        results: directory for the rows.
        about: fields of every row.
    """
    results.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + lanes.seconds
    waiting = _jobs(classes)
    running: dict[ForkProcess, tuple[list[ModelClass], str]] = {}
    rows: dict[str, dict[str, Any]] = {}

    def take(job: Sequence[ModelClass], missing: str) -> None:
        for each in job:
            path = _row_file(work, each)
            found = json.loads(path.read_text()) if path.exists() else {"verdict": "not run", "message": missing}
            rows[each.name] = {**found, **about}
            print(f"{each.name:18} {found['verdict']} {found.get('message', '')[-200:]}", flush=True)
        (results / ROWS).write_text(json.dumps(rows, indent=1, sort_keys=True) + "\n")

    while (waiting or running) and time.monotonic() < deadline:
        for child, (job, _) in list(running.items()):
            if not child.is_alive():
                child.join()
                del running[child]
                take(job, "its process ended")
        if waiting and len(running) < lanes.jobs:
            job = waiting.pop(0)
            needed = max(max(each.ranks) for each in job)
            if lanes.gpus and needed > len(lanes.gpus):
                take(job, f"needs {needed} GPUs")
                continue
            busy = [gpus for _, gpus in running.values()]
            gpus = ",".join(sorted(sorted(lanes.gpus, key=lambda gpu: sum(gpu in each for each in busy))[:needed]))
            child = multiprocessing.get_context("fork").Process(target=_prove, args=(job, work, gpus))
            child.start()
            running[child] = (job, gpus)
        time.sleep(_POLL_SECONDS)
    for child in running:
        # The engine's processes, too: they belong to its session.
        os.killpg(child.pid or 0, signal.SIGKILL)
        child.join()
    for job in [*(job for job, _ in running.values()), *waiting]:
        take(job, "the time was up")
    return all(row["verdict"] in {"works", "refused"} for row in rows.values())


def _jobs(classes: Sequence[ModelClass]) -> list[list[ModelClass]]:
    """Return classes, each followed by those that read its volume."""
    made: dict[str, list[ModelClass]] = {each.of or each.name: [] for each in classes}
    for each in sorted(classes, key=lambda each: bool(each.of)):
        made[each.of or each.name].append(each)
    return list(made.values())


def _prove(job: Sequence[ModelClass], work: Path, gpus: str) -> None:
    os.setsid()
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus
    for each in job:
        began = time.monotonic()
        try:
            row = proof.prove(each, work, device="cuda" if gpus else "cpu")
        except Exception as error:  # noqa: BLE001  any failure is the result of the class
            row = {"verdict": "failed", "by": "the script", "message": "".join(traceback.format_exception(error))}
        row["wall_seconds"] = round(time.monotonic() - began, 1)
        path = _row_file(work, each)
        path.with_suffix(".new").write_text(json.dumps(row))
        path.with_suffix(".new").rename(path)


def _row_file(work: Path, model: ModelClass) -> Path:
    rows = work / "rows"
    rows.mkdir(parents=True, exist_ok=True)
    return rows / f"{model.name}.json"
