# SPDX-License-Identifier: Apache-2.0
"""``python -m e2e.matrix``: run classes of models in real engines and keep each class's row."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

from e2e.matrix import page
from e2e.matrix.classes import CLASSES

_GOOD = frozenset({"works", "refused", "not run"})


def main() -> None:
    """Run the classes that were named, or all."""
    began = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("classes", nargs="*", help="names of classes; all if left out")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--data", type=Path, default=Path(".kvtier/matrix"), help="directory for models and volumes")
    parser.add_argument("--results", type=Path, default=page.RESULTS, help="directory that keeps the rows")
    parser.add_argument("--write", action="store_true", help="run nothing: write docs/models.md from the rows")
    parser.add_argument("--jobs", type=int, default=0, help="classes at a time, into one file; 0 for one by one")
    parser.add_argument("--seconds", type=float, default=330.0, help="with --jobs, after which what runs is ended")
    parser.add_argument("--take", type=Path, help="run nothing: keep and judge the rows of a file that --jobs wrote")
    options = parser.parse_args()
    if options.write:
        page.write()
        return
    if options.take:
        from e2e.matrix.proof import verdict

        drafting = {each.name for each in CLASSES if each.is_drafting}
        for name, row in (rows := json.loads(options.take.read_text())).items():
            if "prompts" in row:
                row["verdict"] = verdict(row, is_drafting=name in drafting)
        page.keep(rows)
        return
    unknown = set(options.classes) - {each.name for each in CLASSES}
    if unknown:
        parser.error(f"no such class: {', '.join(sorted(unknown))}")
    # Before torch is imported: one thread, because these models are smaller than what it costs to share them.
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        VLLM_LOGGING_LEVEL="WARNING",
        OMP_NUM_THREADS="1",
        HF_HUB_OFFLINE="1",
    )
    if options.device == "cuda":
        # NVLink multicast is not everywhere; and both engines of a class are to choose the same kernels.
        os.environ.update(NCCL_NVLS_ENABLE="0", VLLM_ALLREDUCE_USE_SYMM_MEM="0", TRITON_CACHE_AUTOTUNING="1")
    import torch
    import vllm
    from e2e.matrix import lanes, one_engine, proof

    one_engine.import_engine(device=options.device)

    known = {each.name: each for each in CLASSES}
    chosen = [known[name] for name in options.classes or known]
    about = {"device": options.device, "vllm": vllm.__version__}
    if options.jobs:
        gpus = [str(number) for number in range(torch.cuda.device_count())] if options.device == "cuda" else []
        # To import an engine takes its part of the time.
        left = options.seconds - (time.monotonic() - began)
        there = lanes.Lanes(gpus=gpus, jobs=options.jobs, seconds=left)
        sys.exit(0 if lanes.run(chosen, there, work=options.data, results=options.results, about=about) else 1)
    bad = []
    for each in chosen:
        row = proof.prove(each, options.data, device=options.device)
        row.update(about)
        page.keep({each.name: row}, options.results)
        print(f"{each.name:12} {row}", flush=True)
        bad += [] if row["verdict"] in {*_GOOD, each.cpu_verdict} else [each.name]
    if bad:
        sys.exit(f"not as promised: {', '.join(bad)}")


if __name__ == "__main__":
    main()
