# SPDX-License-Identifier: Apache-2.0
"""Runs a script that holds a real vLLM engine in a process of its own, and returns what it prints."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from engine_host import EngineHost, environment

from kvtier_connector.contract import engine

DIGEST = "00ff00ff00ff00ff"
RESULT = "RESULT "
"""How the one line begins that a script prints for the test."""


def write_config(directory: Path, volume: Path, **settings: Any) -> Path:
    """Write the connector's document for a generation on this volume; return its path."""
    config = engine.ConnectorConfig(
        tier="tests/engine",
        root=str(volume / DIGEST),
        digest=DIGEST,
        identity={"model_name": "small-llama"},
        **settings,
    )
    path = directory / engine.CONFIG_FILE
    path.write_text(engine.encode(config))
    return path


def transfer_config(
    config_file: Path,
    *,
    tier: str = "SharedVolumeTier",
    module: str = "kvtier_connector.vllm_adapter.secondary_tier",
    **offloading: Any,
) -> dict[str, Any]:
    """Return what vLLM is given to find the connector and its tier."""
    return {
        "kv_connector": "KVTierConnector",
        "kv_connector_module_path": "kvtier_connector.vllm_adapter.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "KVTierSpec",
            "spec_module_path": "kvtier_connector.vllm_adapter.spec",
            "secondary_tiers": [{"type": tier, "module_path": module, "config_file": str(config_file)}],
            **offloading,
        },
    }


def run_script(
    script: Path, *arguments: str, log: Path, host: EngineHost | None, timeout_seconds: float
) -> dict[str, Any]:
    """Run the script to its end and return its result; what it printed is shown where there is none."""
    if host is None:
        with log.open("wb") as out:
            command = [sys.executable, str(script), *arguments]
            subprocess.run(command, env=environment(), stdout=out, stderr=out, timeout=timeout_seconds, check=False)
    else:
        process = host.start(log, str(script), *arguments)
        try:
            process.wait(timeout_seconds)
        finally:
            process.kill()
    printed = log.read_text()
    results = [line for line in printed.splitlines() if line.startswith(RESULT)]
    assert len(results) == 1, printed[-6000:]
    parsed: dict[str, Any] = json.loads(results[0].removeprefix(RESULT))
    return parsed
