# SPDX-License-Identifier: Apache-2.0
"""A real vLLM engine on a mount that fails and hangs while requests run: every answer is the one without a cache."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from engine_host import EngineHost
from engine_process import DIGEST, run_script, write_config
from faulty_mounts import FaultyVolume

from kvtier_demo.model import make_model
from kvtier_operator.plan import chunks, engine_args
from kvtier_operator.plan.model_layout import EngineLayout, ModelLayout, make_model_layout

SCRIPT = Path(__file__).with_name("engine_faults_script.py")


def run_engine(host: EngineHost, directory: Path, volume: FaultyVolume) -> dict[str, Any]:
    make_model(directory / "model", layers=2)
    config = write_config(directory, volume.path, io_processes=8, load_deadline_seconds=1.5)
    kv = make_model_layout(
        json.loads((directory / "model/config.json").read_text()),
        EngineLayout(args=engine_args.read(["--dtype=float32"])),
    )
    assert isinstance(kv, ModelLayout)
    arguments = [str(each) for each in (directory, volume.control, config, chunks.bytes_of(128, kv))]
    return run_script(SCRIPT, *arguments, log=directory / "engine.log", host=host, timeout_seconds=600)


@pytest.mark.engine
@pytest.mark.timeout(1200)
def test_an_engine_answers_every_request_as_without_a_cache_whatever_the_volume_does(
    faulty_volume: FaultyVolume, tmp_path: Path, engine_host: EngineHost
) -> None:
    result = run_engine(engine_host, tmp_path, faulty_volume)
    answers, metrics = result["answers"], result["metrics"]
    expected = {answer["seed"]: answer["tokens"] for answer in answers if answer["when"] == "computed"}

    wrong = [answer for answer in answers if answer["tokens"] != expected[answer["seed"]]]
    assert wrong == []
    assert {answer["when"] for answer in answers} >= {"healthy", "eio on read", "hang on read", "enospc on write"}
    assert result["read"] == {"healthy": True, "recovered": True, "reset": True}, "the volume is well and is not read"
    assert [path.name for path in faulty_volume.path.iterdir()] == [DIGEST], "the engine took its weights for others"
    sys.stdout.write(f"{len(answers)} answers; {metrics}\n")
    assert metrics["vllm:kvtier_disk_read_blocks"] > 0
    assert metrics["vllm:kvtier_disk_misses:io"] > 0
    # Without a rate of prefill, a load waits until its deadline.
    assert metrics["vllm:kvtier_disk_misses:deadline"] > 0
    assert metrics["vllm:kvtier_disk_shed_stores:no_space"] > 0
