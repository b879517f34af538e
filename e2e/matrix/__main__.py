# SPDX-License-Identifier: Apache-2.0
"""``python -m e2e.matrix``: run classes of models in real engines and keep each class's row."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from e2e.matrix import page
from e2e.matrix.cases import CLASSES, ModelClass


def main() -> None:
    """Run the classes that were named, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("classes", nargs="*", help="names of classes; all if left out")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--split-hits", choices=("Off", "Auto"), default="Off", help="spec.disk.splitHits of the tiers")
    parser.add_argument("--data", type=Path, default=Path(".kvtier/matrix"), help="directory for models and volumes")
    parser.add_argument("--results", type=Path, default=page.RESULTS, help="directory that keeps the rows")
    parser.add_argument("--write", action="store_true", help="run nothing: write results/README.md from the rows")
    parser.add_argument("--jobs", type=int, default=1, help="classes at a time, spread over the machine's GPUs")
    parser.add_argument("--seconds", type=float, default=540.0, help="with --jobs, after which what runs is ended")
    options = parser.parse_args()
    if options.write:
        page.PAGE.write_text(page.text())
        return
    known = {each.name: each for each in CLASSES}
    if unknown := set(options.classes) - set(known):
        parser.error(f"no such class: {', '.join(sorted(unknown))}")
    chosen = [known[name] for name in options.classes or known]
    bad = _spread(chosen, options) if options.jobs > 1 else _run(chosen, options)
    if bad:
        sys.exit(f"not as promised: {', '.join(bad)}")


def _run(chosen: Sequence[ModelClass], options: argparse.Namespace) -> list[str]:
    """Run classes one by one in this process; return those that did not do as promised."""
    from e2e.matrix import engine, proof

    vllm = engine.prepare(device=options.device)
    bad = []
    for each in chosen:
        began = time.monotonic()
        try:
            row = proof.prove(each, options.data.resolve(), device=options.device, split_hits=options.split_hits)
        except Exception:  # noqa: BLE001  any failure is the result of the class
            row = {"verdict": "failed", "by": "the script", "message": traceback.format_exc()}
        row |= {"device": options.device, "split_hits": options.split_hits, "vllm": vllm}
        row |= {"wall_seconds": round(time.monotonic() - began, 1)}
        page.keep(each.name, row, options.results)
        print(f"{each.name:18} {row['verdict']} {row.get('message', '')[-200:]}", flush=True)
        bad += [] if row["verdict"] in {"works", "refused", "not run", each.cpu_verdict} else [each.name]
    return bad


def _spread(chosen: Sequence[ModelClass], options: argparse.Namespace) -> list[str]:
    """Run each class in a process of its own, several at a time; engines of tiny models share a GPU."""
    gpus: list[str] = []
    if options.device == "cuda":
        listed = subprocess.run(["nvidia-smi", "--list-gpus"], check=True, capture_output=True, text=True)
        gpus = [str(number) for number, _ in enumerate(listed.stdout.splitlines())]
    deadline = time.monotonic() + float(options.seconds)

    def run(number: int) -> bool:
        model = chosen[number]
        left, ranks = deadline - time.monotonic(), max(model.ranks)
        if left <= 0 or (gpus and ranks > len(gpus)):
            print(f"{model.name:18} not run: {f'needs {ranks} GPUs' if left > 0 else 'the time was up'}", flush=True)
            return left > 0
        env = dict(os.environ)
        if gpus:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[(number + rank) % len(gpus)] for rank in range(ranks))
        words = [model.name, "--device", options.device, "--data", options.data, "--results", options.results]
        words += ["--split-hits", options.split_hits]
        try:
            ended = subprocess.run([sys.executable, "-m", "e2e.matrix", *words], check=False, env=env, timeout=left)
        except subprocess.TimeoutExpired:
            return False
        return not ended.returncode

    with ThreadPoolExecutor(options.jobs) as pool:
        return [
            each.name for each, is_good in zip(chosen, pool.map(run, range(len(chosen))), strict=True) if not is_good
        ]


if __name__ == "__main__":
    main()
