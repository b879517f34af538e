# SPDX-License-Identifier: Apache-2.0
"""Measures the seconds from an engine's start to its first token, with empty and with shared compile caches.

``--device cpu`` is vLLM's CPU build with a tiny model; on a GPU, name a model with ``--model`` and more flags of the
engine after ``--``.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from e2e.bench import models

from kvtier_connector.install import CACHES

PORT = 8123
VARIABLES = ("VLLM_CACHE_ROOT", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
_START_SECONDS = 900.0


def command(model: str, more: list[str]) -> list[str]:
    """Return the engine's command line."""
    words = [f"--model={model}", f"--port={PORT}", "--host=127.0.0.1", "--skip-tokenizer-init", "--max-model-len=2048"]
    return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *words, *more]


def start(words: list[str], caches: Path) -> dict[str, Any]:
    """Start an engine with these caches, ask it for one token, and end it."""
    caches.mkdir(parents=True, exist_ok=True)
    variables = {variable: str(caches / name) for variable, name in zip(VARIABLES, CACHES, strict=True)}
    began = time.monotonic()
    process = subprocess.Popen(
        words, env={**os.environ, **variables}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        while not _answers("/health"):
            if process.poll() is not None or time.monotonic() - began > _START_SECONDS:
                sys.exit(f"the engine ended with {process.returncode}, or took more than {_START_SECONDS:.0f} s")
            time.sleep(0.1)
        serving = time.monotonic() - began
        model = words[3].removeprefix("--model=")
        prompt = [100 + place % 900 for place in range(512)]
        _answers("/v1/completions", {"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0})
        return {"serving": round(serving, 1), "firstToken": round(time.monotonic() - began, 1)}
    finally:
        process.terminate()
        process.wait(60)


def _answers(path: str, body: dict[str, Any] | None = None) -> bool:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{PORT}{path}", data=data, headers={"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=600 if body else 1):
            return True
    except (urllib.error.URLError, OSError):
        if body:
            raise
        return False


def main() -> None:
    """Measure, and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--model", help="name or directory (default: a tiny one, made here)")
    parser.add_argument("--work", type=Path, help="for the model and the caches (default: in /tmp)")
    parser.add_argument("--runs", type=int, default=1, help="starts of each kind")
    parser.add_argument("engine", nargs="*", help="more of the engine's flags, after --")
    options = parser.parse_args()
    work = options.work or Path(tempfile.mkdtemp(prefix="kvtier-cold-start-"))
    model = options.model
    more = list(options.engine)
    if options.device == "cpu":
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        more = ["--dtype=bfloat16", "--gpu-memory-utilization=0.15", *more]
    if model is None:
        model = str(work / "model")
        models.write_model(Path(model), models.TINY)
    words = command(model, more)
    # The first start fills the shared caches and brings Python's files and the model into memory.
    shared = work / "shared"
    found: dict[str, Any] = {"first": start(words, shared), "empty": [], "shared": []}
    for number in range(options.runs):
        found["empty"].append(start(words, work / f"empty-{number}"))
        shutil.rmtree(work / f"empty-{number}")
        found["shared"].append(start(words, shared))
        print(json.dumps(found), flush=True)
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
