# SPDX-License-Identifier: Apache-2.0
"""Runs several classes of the matrix at a time, on the GPUs of one machine, until its time is up.

Each class is a process of its own that sees the GPUs it was given; engines of tiny models share one GPU. What was found
is on the disk as soon as it is known, in one file, so that a machine that is taken away takes no result with it.
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
LOGS: Final = "matrix-logs.txt"
_LOG_LINES: Final = 60
"""Of an engine that did not do as promised."""
_POLL_SECONDS: Final = 0.2


@dataclass(frozen=True, kw_only=True)
class Lanes:
    """What a machine has."""

    gpus: Sequence[str]
    """Numbers of the GPUs; none on vLLM's CPU build."""
    jobs: int
    """Classes that run at a time."""
    seconds: float
    """After which what still runs is ended."""


def run(classes: Sequence[ModelClass], lanes: Lanes, *, work: Path, results: Path, about: Mapping[str, Any]) -> bool:
    """Run classes in their order; return whether each did as promised. Writes `ROWS` and `LOGS` into ``results``.

    Args:
        classes: what to run, the most wanted first.
        lanes: where.
        work: directory for models and volumes.
        results: directory for what was found.
        about: goes into every row.
    """
    results.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    waiting = _jobs(classes)
    running: dict[ForkProcess, tuple[list[ModelClass], str]] = {}
    rows: dict[str, dict[str, Any]] = {}
    while waiting or running:
        for child, (job, _) in list(running.items()):
            if not child.is_alive():
                child.join()
                del running[child]
                _take(job, work, results, rows, about)
        if time.monotonic() - began > lanes.seconds:
            break
        if waiting and len(running) < lanes.jobs:
            job = waiting.pop(0)
            needed = max(max(each.ranks) for each in job)
            if lanes.gpus and needed > len(lanes.gpus):
                _note(job, "not run", f"needs {needed} GPUs", work, only_missing=False)
                _take(job, work, results, rows, about)
                continue
            seen = _choose(job, lanes, [gpu for _, gpu in running.values()])
            child = multiprocessing.get_context("fork").Process(target=_prove, args=(job, work, seen))
            child.start()
            running[child] = (job, seen)
            continue
        time.sleep(_POLL_SECONDS)
    for child, (job, _) in running.items():
        # The engine's processes too: they are of its session.
        os.killpg(child.pid or 0, signal.SIGKILL)
        child.join()
        _note(job, "not run", "the time was up", work, only_missing=True)
        _take(job, work, results, rows, about)
    for job in waiting:
        _note(job, "not run", "the time was up", work, only_missing=False)
        _take(job, work, results, rows, about)
    print(_table(classes, rows, time.monotonic() - began), flush=True)
    return all(row["verdict"] in {"works", "refused"} for row in rows.values())


def _jobs(classes: Sequence[ModelClass]) -> list[list[ModelClass]]:
    """Return classes with those that read what they wrote behind them."""
    made: dict[str, list[ModelClass]] = {}
    for each in sorted(classes, key=lambda each: bool(each.of)):
        made.setdefault(each.of or each.name, []).append(each)
    order = list(dict.fromkeys(each.of or each.name for each in classes))
    return [made[name] for name in order]


def _choose(job: Sequence[ModelClass], lanes: Lanes, busy: Sequence[str]) -> str:
    """Return the GPUs that a job sees: as many as it has ranks, those with the least on them."""
    load = {gpu: sum(gpu in each.split(",") for each in busy) for gpu in lanes.gpus}
    ranks = max(max(each.ranks) for each in job)
    return ",".join(sorted(sorted(lanes.gpus, key=lambda gpu: load[gpu])[:ranks]))


def _prove(job: Sequence[ModelClass], work: Path, gpus: str) -> None:
    os.setsid()
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus
    for each in job:
        began = time.monotonic()
        try:
            row = proof.prove(each, work, device="cuda" if gpus else "cpu")
        except Exception as error:  # noqa: BLE001  whatever ended it is the result
            row = {"verdict": "failed", "by": "the script", "message": "".join(traceback.format_exception(error))}
        row["wall_seconds"] = round(time.monotonic() - began, 1)
        path = _row_file(work, each)
        path.with_suffix(".new").write_text(json.dumps(row))
        path.with_suffix(".new").rename(path)


def _row_file(work: Path, model: ModelClass) -> Path:
    rows = work / "rows"
    rows.mkdir(parents=True, exist_ok=True)
    return rows / f"{model.name}.json"


def _note(job: Sequence[ModelClass], verdict: str, message: str, work: Path, *, only_missing: bool) -> None:
    for each in job:
        path = _row_file(work, each)
        if not (only_missing and path.exists()):
            path.write_text(json.dumps({"verdict": verdict, "message": message}))


def _take(
    job: Sequence[ModelClass], work: Path, results: Path, rows: dict[str, dict[str, Any]], about: Mapping[str, Any]
) -> None:
    """Write down what came of a job, with the logs of what did not do as promised."""
    for each in job:
        path = _row_file(work, each)
        found = {"verdict": "failed", "by": "the script", "message": "its process ended"}
        row = {**(json.loads(path.read_text()) if path.exists() else found), **about}
        rows[each.name] = row
        print(f"{each.name:18} {row['verdict']} {row.get('message', '')[-200:]}", flush=True)
        if row["verdict"] not in {"works", "not run"}:
            with (results / LOGS).open("a") as file:
                for log in sorted((work / (each.of or each.name)).glob("*.log")):
                    tail = "\n".join(log.read_text(errors="replace").splitlines()[-_LOG_LINES:])
                    file.write(f"===== {each.name}: {log.name}\n{tail}\n")
    text = json.dumps(rows, indent=1, sort_keys=True)
    (results / f"{ROWS}.new").write_text(text + "\n")
    (results / f"{ROWS}.new").rename(results / ROWS)


def _table(classes: Sequence[ModelClass], rows: Mapping[str, Mapping[str, Any]], seconds: float) -> str:
    lines = [f"{'class':18} {'verdict':22} same of  diff     disk tokens in common   s"]
    for each in classes:
        row = rows[each.name]
        numbers = ""
        if "prompts" in row:
            numbers = (
                f"{row['same_tokens']:4} {row['prompts']:2}  {row['largest_difference']:<8g} "
                f"{row['external_tokens']:11.0f} {row['pair_tokens']:4} {row['later_tokens']:4} {row['pair_common']:4}"
            )
        said = "" if numbers else (str(row.get("message", "")).strip().splitlines() or [""])[-1]
        lines.append(
            f"{each.name:18} {row['verdict'][:22]:22} {numbers:42} {row.get('wall_seconds', 0):5.0f} {said[:90]}"
        )
    return "\n".join([*lines, f"{seconds:.0f} s"])
