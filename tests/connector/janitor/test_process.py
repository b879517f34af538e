# SPDX-License-Identifier: Apache-2.0
"""The janitor as the image runs it: with the packages of its lock and no others, until it is told to stop."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import yaml
import zmq
from e2e.bench.stress import FULL_SHARE, stress
from locked_image import blocked_modules, prelude
from plain_http import PlainHttp
from tier_dir import BLOCK_BYTES, Engine, Rig
from waiting import until

import kvtier_connector
from kvtier_connector.contract.janitor import encode
from kvtier_connector.contract.usage import decode
from kvtier_localcluster.ports import free_port

CONNECTOR = Path(kvtier_connector.__file__).parents[1]
DEADLINE_SECONDS = 120.0

RUN = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())["RUN"]


def stored_events(port: int) -> int:
    """Return how many blocks a subscriber who comes now is told of, when it was told of all."""
    subscriber = zmq.Context.instance().socket(zmq.SUB)
    subscriber.setsockopt_string(zmq.SUBSCRIBE, "kv@llama-volume")
    subscriber.connect(f"tcp://127.0.0.1:{port}")
    events: list[dict[str, str]] = []
    while subscriber.poll(DEADLINE_SECONDS * 1000):
        events += msgspec.msgpack.decode(subscriber.recv_multipart()[2])[1]
        if events[-1]["type"] == "BlockStored":
            break
    subscriber.close(0)
    return sum(event["type"] == "BlockStored" for event in events)


def test_it_runs_with_the_packages_of_its_lock_and_ends_when_told(rig: Rig, engine: Engine, tmp_path: Path) -> None:
    engine.put_chain(*range(10))
    config_file, log = tmp_path / "janitor.json", tmp_path / "log"
    port = free_port()
    config_file.write_text(encode(replace(rig.config, events_port=port, events_topic="kv@llama-volume@m")))
    blocked = blocked_modules("janitor")
    assert {"vllm", "torch", "kopf"} <= blocked
    assert not {"numpy", "kubernetes"} & blocked
    script = prelude("janitor", paths=[CONNECTOR], absent=("kvtier_connector.vllm_adapter",)) + RUN.format(
        config=str(config_file)
    )
    with log.open("w") as sink:
        process = subprocess.Popen(
            [sys.executable, "-c", script], stdout=sink, stderr=sink, env={"HOME": str(tmp_path)}
        )
    try:
        until(lambda: "serving on port" in log.read_text() or process.poll() is not None, log.read_text)
        found = re.search(r"serving on port (\d+)", log.read_text())
        assert found is not None, log.read_text()
        server = PlainHttp(f"http://127.0.0.1:{found[1]}", seconds=DEADLINE_SECONDS)
        used = 10 * BLOCK_BYTES
        until(lambda: decode(json.dumps(server.send("GET", "/usage")[1])).used_bytes == used, log.read_text)
        assert stored_events(port) == 10
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_SECONDS) == 0, log.read_text()
    assert (rig.dir / "janitor.catalog").exists()
    assert engine.check() == []


def test_settings_that_cannot_be_used_end_it_with_a_message(tmp_path: Path) -> None:
    config_file = tmp_path / "janitor.json"
    config_file.write_text('{"version": 1}')
    done = subprocess.run(
        [sys.executable, "-m", "kvtier_connector.janitor", "--config", str(config_file)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, "janitor.json" in done.stderr) == (1, True)


sys.path.insert(0, str(Path(__file__).resolve().parents[3]))


@pytest.mark.timeout(900)
def test_under_random_kills_no_byte_is_wrong_and_the_budget_holds() -> None:
    run = stress("local", seconds=9, seed=7)
    assert run.problems == []
    assert run.engine_kills > 0
    assert run.janitor_kills > 0
    assert run.loads > 0
    assert run.most_bytes >= FULL_SHARE * run.max_bytes
