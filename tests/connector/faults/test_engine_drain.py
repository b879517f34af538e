# SPDX-License-Identifier: Apache-2.0
"""A real vLLM server that is told to end while a slow volume still has blocks to take: SIGTERM, as Kubernetes does."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_process import _PATHS, write_config
from faulty_mounts import FaultyVolume
from waiting import until

from kvtier_demo.model import make_model

SHUTDOWN_SECONDS = 40
START_SECONDS = 300.0
CHUNK_TOKENS = 128
PROMPT_TOKENS = 4 * CHUNK_TOKENS + 8


class Server:
    def __init__(self, directory: Path, volume: Path) -> None:
        make_model(directory / "model")
        config = write_config(directory, volume, io_threads=2, load_deadline_seconds=60.0, cost_aware=False)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.log = directory / "engine.log"
        transfer = {
            "kv_connector": "KVTierConnector",
            "kv_connector_module_path": "kvtier_connector.tier.connector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "spec_name": "KVTierSpec",
                "spec_module_path": "kvtier_connector.tier.spec",
                "cpu_bytes_to_use": 64 << 20,
                "block_size": CHUNK_TOKENS,
                "secondary_tiers": [
                    {
                        "type": "SharedVolumeTier",
                        "module_path": "kvtier_connector.tier.tier",
                        "config_file": str(config),
                    }
                ],
            },
        }
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", f"--model={directory / 'model'}"),
                    *("--host=127.0.0.1", f"--port={self.port}", "--skip-tokenizer-init", "--enforce-eager"),
                    *("--dtype=float32", "--max-model-len=1024", "--seed=0", "--enable-prefix-caching"),
                    *(f"--shutdown-timeout={SHUTDOWN_SECONDS}", f"--kv-transfer-config={json.dumps(transfer)}"),
                ],
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(filter(None, [*_PATHS, os.environ.get("PYTHONPATH")])),
                    "PYTHONHASHSEED": "0",
                    "VLLM_CPU_KVCACHE_SPACE": "1",
                    "HF_HUB_OFFLINE": "1",
                },
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=30) as answer:
            text: str = answer.read().decode()
        return text

    def is_ready(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()[-6000:]
        try:
            return self.get("/health") == ""
        except (OSError, urllib.error.URLError):
            return False

    def ask(self) -> None:
        prompt = [(7 * place * place + 13 * place) % 1900 + 100 for place in range(PROMPT_TOKENS)]
        body = {"model": str(self.log.parent / "model"), "prompt": prompt, "max_tokens": 1, "detokenize": False}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            assert answer.status == 200

    def metric(self, name: str) -> float:
        values = re.findall(rf"^{name}(?:\{{.*\}})? (\S+)$", self.get("/metrics"), re.MULTILINE)
        return sum(float(each) for each in values)

    def drained(self) -> tuple[int, int]:
        """Return how many blocks the engine's log says that were written and lost."""
        found = re.findall(r"drained in [\d.]+ s: (\d+) blocks written, (\d+) lost", self.log.read_text())
        assert found, self.log.read_text()[-6000:]
        written, lost = found[-1]
        return int(written), int(lost)


@pytest.fixture
def server(faulty_volume: FaultyVolume, tmp_path: Path) -> Iterator[Server]:
    made = Server(tmp_path, faulty_volume.path)
    try:
        until(made.is_ready, "the engine answers", seconds=START_SECONDS)
        yield made
    finally:
        if made.process.poll() is None:
            os.killpg(made.process.pid, signal.SIGKILL)
        made.process.wait()


def blocks(volume: FaultyVolume) -> int:
    return len(list((volume.path.parent / "source").rglob("*.kvb")))


def begin_to_write(server: Server) -> None:
    server.ask()
    until(lambda: server.metric("vllm:kvtier_disk_queued_store_bytes") > 0, "blocks wait to be written", seconds=60.0)


@pytest.mark.engine
@pytest.mark.timeout(600)
def test_an_engine_that_is_told_to_end_writes_what_waits(faulty_volume: FaultyVolume, server: Server) -> None:
    with faulty_volume.hanging("write"):
        begin_to_write(server)
        server.process.send_signal(signal.SIGTERM)
        until(lambda: "wait to be written" in server.log.read_text(), "the engine drains", seconds=30.0)
        assert server.process.poll() is None
    assert server.process.wait(SHUTDOWN_SECONDS) == 0
    written, lost = server.drained()
    assert (written, lost) == (PROMPT_TOKENS // CHUNK_TOKENS, 0)
    assert blocks(faulty_volume) == written


@pytest.mark.engine
@pytest.mark.timeout(600)
def test_an_engine_ends_in_time_whatever_the_volume_does_and_says_what_is_lost(
    faulty_volume: FaultyVolume, server: Server
) -> None:
    with faulty_volume.hanging("write"):
        begin_to_write(server)
        server.process.send_signal(signal.SIGTERM)
        # vLLM kills the engine that has not ended by then, and it would say nothing.
        server.process.wait(SHUTDOWN_SECONDS + 30)
        assert server.drained() == (0, PROMPT_TOKENS // CHUNK_TOKENS)
        assert "SIGKILL" not in server.log.read_text()
