# SPDX-License-Identifier: Apache-2.0
"""Seconds from a process to its first token, with and without what another one has compiled.

Starts the engine as a pod does, torch.compile on, with empty compile caches; then writes a cache as the Job does; then
starts it again with the cache restored, as an init container does. ``--device cpu`` is vLLM's CPU build with a tiny
model; on a GPU, name a model with ``--model`` and what else the engine takes after ``--``.
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

from kvtier_connector import compile_cache

PORT = 8123
_START_SECONDS = 900.0


def command(model: str, more: list[str]) -> list[str]:
    """Return the engine's command line."""
    words = [f"--model={model}", f"--port={PORT}", "--host=127.0.0.1", "--skip-tokenizer-init", "--max-model-len=2048"]
    return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *words, *more]


def start(words: list[str], caches: Path) -> dict[str, Any]:
    """Start an engine with these caches, ask it for one token, and end it."""
    caches.mkdir(parents=True, exist_ok=True)
    variables = {name: str(caches / each) for name, each in compile_cache.DIRECTORIES.items()}
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
    url = f"http://127.0.0.1:{PORT}/health"
    # First, so that the files of Python and the model are in memory for both of those that are compared.
    found: dict[str, Any] = {
        "job": compile_cache.write(work / "caches", work / "job", url, words, seconds=_START_SECONDS)
    }
    found["empty"], found["restored"] = [], []
    for number in range(options.runs):
        found["empty"].append(start(words, work / f"empty-{number}"))
        print(json.dumps(found), flush=True)
        shutil.rmtree(work / f"empty-{number}")
    for number in range(options.runs):
        target = work / f"restored-{number}"
        target.mkdir()
        began = time.monotonic()
        said = compile_cache.restore(work / "caches", str(found["job"]["digest"]), target)
        copying = time.monotonic() - began
        found["restored"].append({"copying": round(copying, 2), "said": said, **start(words, target)})
        print(json.dumps(found["restored"][-1]), flush=True)
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
