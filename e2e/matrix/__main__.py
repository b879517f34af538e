# SPDX-License-Identifier: Apache-2.0
"""``python -m e2e.matrix``: run classes of models in real engines and keep each class's row."""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Sequence
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
    options = parser.parse_args()
    if options.write:
        page.PAGE.write_text(page.text())
        return
    known = {each.name: each for each in CLASSES}
    if unknown := set(options.classes) - set(known):
        parser.error(f"no such class: {', '.join(sorted(unknown))}")
    chosen = [known[name] for name in options.classes or known]
    if bad := _run(chosen, options):
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


if __name__ == "__main__":
    main()
