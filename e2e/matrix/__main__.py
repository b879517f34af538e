# SPDX-License-Identifier: Apache-2.0
"""``python -m e2e.matrix``: run classes of models in real engines and keep each class's row."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from e2e.matrix import page
from e2e.matrix.classes import CLASSES

_GOOD = frozenset({"works", "refused", "not run"})


def main() -> None:
    """Run the classes that were named, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("classes", nargs="*", help="names of classes; all if left out")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--data", type=Path, default=Path(".kvtier/matrix"), help="directory for models and volumes")
    parser.add_argument("--results", type=Path, default=page.RESULTS, help="directory that keeps the rows")
    parser.add_argument("--write", action="store_true", help="run nothing: write docs/models.md from the rows")
    options = parser.parse_args()
    if options.write:
        page.write()
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
    import vllm
    from e2e.matrix import one_engine, proof

    one_engine.import_engine(device=options.device)

    options.results.mkdir(parents=True, exist_ok=True)
    bad = []
    for each in CLASSES:
        if options.classes and each.name not in options.classes:
            continue
        row = proof.prove(each, options.data, device=options.device)
        row.update(device=options.device, vllm=vllm.__version__)
        (options.results / f"{each.name}.json").write_text(json.dumps(row, indent=1, sort_keys=True) + "\n")
        print(f"{each.name:12} {row}", flush=True)
        bad += [] if row["verdict"] in _GOOD else [each.name]
    if bad:
        sys.exit(f"not as promised: {', '.join(bad)}")


if __name__ == "__main__":
    main()
