# SPDX-License-Identifier: Apache-2.0
"""Runs a script that holds a real vLLM engine in a process of its own, and returns what it prints.

Only a new process proves that nothing but the volume carried blocks over, and a hung engine ends with its process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from kvtier_connector import contract

DIGEST = "00ff00ff00ff00ff"
RESULT = "RESULT "
"""How the one line begins that a script prints for the test."""

_PATHS = (str(Path(contract.__file__).parents[1]), str(Path(__file__).parent))
"""Of the connector, and of what the scripts share."""


def write_config(directory: Path, volume: Path, **settings: Any) -> Path:
    """Write the connector's document for a generation on this volume; return its path."""
    config = contract.ConnectorConfig(
        tier="tests/engine",
        root=str(volume / DIGEST),
        digest=DIGEST,
        identity={"model_name": "small-llama"},
        max_bytes=1 << 30,
        **settings,
    )
    path = directory / contract.CONFIG_FILE
    path.write_text(contract.encode(config))
    return path


def run_script(script: Path, *arguments: str, timeout_seconds: float) -> dict[str, Any]:
    """Run the script to its end and return its result; what it printed is shown where there is none."""
    finished = subprocess.run(
        [sys.executable, str(script), *arguments],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [*_PATHS, os.environ.get("PYTHONPATH")])),
            "PYTHONHASHSEED": "0",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            # One process to start instead of two; the demo runs engines as vLLM serves them.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            # Threads that wait for each other are slow where something else takes a processor.
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        },
        capture_output=True,
        text=True,
        timeout=timeout_seconds,
        check=False,
    )
    results = [line for line in finished.stdout.splitlines() if line.startswith(RESULT)]
    assert len(results) == 1, f"{finished.stdout[-6000:]}\n{finished.stderr[-6000:]}"
    parsed: dict[str, Any] = json.loads(results[0].removeprefix(RESULT))
    return parsed
