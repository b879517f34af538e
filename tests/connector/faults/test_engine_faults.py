# SPDX-License-Identifier: Apache-2.0
"""A real vLLM engine on a mount that fails and hangs while requests run: every answer is the one without a cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from faulty_mounts import FaultyVolume

from kvtier_connector import contract
from kvtier_demo.model import make_model

DIGEST = "00ff00ff00ff00ff"
CONNECTOR = Path(contract.__file__).parents[1]
SCRIPT = Path(__file__).with_name("engine_faults_script.py")


def run_engine(directory: Path, volume: FaultyVolume) -> dict[str, Any]:
    make_model(directory / "model")
    config_file = directory / contract.CONFIG_FILE
    config = contract.ConnectorConfig(
        tier="tests/engine",
        root=str(volume.path / DIGEST),
        digest=DIGEST,
        identity={"model_name": "small-llama"},
        max_bytes=1 << 30,
        io_threads=8,
        load_deadline_seconds=1.5,
        cost_aware=False,  # each hit is to meet the faults
    )
    config_file.write_text(contract.encode(config))
    finished = subprocess.run(
        [sys.executable, str(SCRIPT), str(directory), str(volume.control), str(config_file)],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [str(CONNECTOR), os.environ.get("PYTHONPATH")])),
            "PYTHONHASHSEED": "0",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "HF_HUB_OFFLINE": "1",
        },
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    results = [line for line in finished.stdout.splitlines() if line.startswith("RESULT ")]
    assert len(results) == 1, f"{finished.stdout[-6000:]}\n{finished.stderr[-6000:]}"
    parsed: dict[str, Any] = json.loads(results[0].removeprefix("RESULT "))
    return parsed


@pytest.mark.engine
@pytest.mark.timeout(1200)
def test_an_engine_answers_every_request_as_without_a_cache_whatever_the_volume_does(
    faulty_volume: FaultyVolume, tmp_path: Path
) -> None:
    result = run_engine(tmp_path, faulty_volume)
    answers, metrics = result["answers"], result["metrics"]
    expected = {answer["seed"]: answer["tokens"] for answer in answers if answer["when"] == "computed"}

    wrong = [answer for answer in answers if answer["tokens"] != expected[answer["seed"]]]
    assert wrong == []
    assert {answer["when"] for answer in answers} >= {"healthy", "eio on read", "hang on read", "enospc on write"}
    assert result["is_recovered"], "the volume is well again and is not read"
    sys.stdout.write(f"{len(answers)} answers; {metrics}\n")
    assert metrics["vllm:kvtier_disk_read_blocks"] > 0
    assert metrics["vllm:kvtier_disk_misses io"] > 0
    assert metrics["vllm:kvtier_disk_misses deadline"] > 0
    assert metrics["vllm:kvtier_disk_shed_stores no_space"] > 0
