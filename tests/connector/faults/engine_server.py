# SPDX-License-Identifier: Apache-2.0
"""A real vLLM server with the disk tier, in a process of its own, asked over HTTP."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from pathlib import Path

from engine_host import EngineHost
from engine_process import transfer_config, write_config

from kvtier_demo.model import make_model
from kvtier_localcluster.ports import free_port

SHUTDOWN_SECONDS = 20
"""Of an engine whose volume does not come back: the test waits for as long."""
HEALING_SECONDS = 100
START_SECONDS = 300.0
CHUNK_TOKENS = 128
PROMPT_TOKENS = 4 * CHUNK_TOKENS + 8


class Server:
    def __init__(self, host: EngineHost, directory: Path, volume: Path, *, heals: bool) -> None:
        make_model(directory / "model", layers=2)
        self.config = write_config(directory, volume, io_processes=2, load_deadline_seconds=60.0)
        self.port = free_port()
        self.log = directory / "engine.log"
        transfer = transfer_config(self.config, cpu_bytes_to_use=64 << 20, block_size=CHUNK_TOKENS)
        self.process = host.start(
            self.log,
            "vllm.entrypoints.openai.api_server",
            *(f"--model={directory / 'model'}", "--host=127.0.0.1", f"--port={self.port}", "--skip-tokenizer-init"),
            *("--enforce-eager", "--dtype=float32", "--max-model-len=1024", "--seed=0", "--enable-prefix-caching"),
            f"--shutdown-timeout={HEALING_SECONDS if heals else SHUTDOWN_SECONDS}",
            f"--kv-transfer-config={json.dumps(transfer)}",
        )

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=60) as answer:
            text: str = answer.read().decode()
        return text

    def is_ready(self) -> bool:
        assert self.process.poll() is None, self.process.last_words()
        try:
            return self.get("/health") == ""
        except (OSError, urllib.error.URLError):
            return False

    def ask(self, seed: int = 0) -> None:
        prompt = [(7 * place * place + 13 * place + 101 * seed) % 1900 + 100 for place in range(PROMPT_TOKENS)]
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
