# SPDX-License-Identifier: Apache-2.0
"""Stands for ``vllm.entrypoints.openai.api_server`` in tests of the volume: the real store behind a few HTTP requests.

``/store/NAME`` writes a block, ``/load/NAME`` reads it, ``/state`` tells how the engine sees the volume. Nothing else
of vLLM is done, so an engine starts in a second and needs neither a model nor memory. With STAND_IN_WAITS=1, it behaves
as if the volume did not answer until ``/attach`` is asked for.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from kvtier_connector.contract import engine as contract
from kvtier_connector.contract.errors import IdentityMismatch
from kvtier_connector.pod_tools.ready import Phase, StartupReport
from kvtier_connector.store import identity
from kvtier_connector.store.blockstore import BlockStore, Hit, Stored, StoreOutcome
from kvtier_connector.store.header import HEADER_BYTES
from kvtier_connector.store.journal import JournalWriter, Op
from kvtier_connector.store.layout import BlockKey
from kvtier_connector.store.permit import PERMIT_FILE, StorePermit

PAYLOAD_BYTES = 1 << 20
CHUNK_CHARACTERS = 64
LOST = "lost"
"""A prompt with this word in it is answered, and none of its blocks is stored."""


def payload_of(key: BlockKey) -> bytes:
    return key.hash * (PAYLOAD_BYTES // len(key.hash))


class Engine:
    """One engine on the volume. A lock lets one request in at a time."""

    def __init__(self, config: contract.ConnectorConfig) -> None:
        self.config = config
        self.lock = threading.Lock()
        self.refused = ""
        self.disk_tokens = self.prompt_tokens = 0
        self.report = StartupReport(config.state_dir, config.tier)
        self.report.begin("the volume has not answered yet")
        root = Path(config.root)
        self.blocks = BlockStore(root, keys_dir=config.keys_dir)
        self.journal = JournalWriter(root)
        self.permit = StorePermit(str(root.parent / PERMIT_FILE))
        facts = {"engine.stand_in": os.environ.get("STAND_IN", "")}
        try:
            identity.claim(Path(config.root), {**config.identity, **facts}, config.digest)
        except IdentityMismatch as error:
            self.refused = error.field
            self.report.say(Phase.WITHOUT, str(error))
        self.follow()
        if not self.refused and os.environ.get("STAND_IN_WAITS") != "1":
            self.report.say(Phase.ATTACHED)

    def follow(self) -> contract.LiveSettings:
        live = contract.decode_live(Path(self.config.live_file).read_text())
        self.permit.is_needed = live.needs_permit
        if self.blocks.keyring is not None:
            self.blocks.keyring.active_name = live.active_key
        return live

    def put(self, key: BlockKey) -> StoreOutcome:
        """Write a block if the janitor permits it, and note it for the janitor."""
        self.journal.flush()
        if (modified_ns := self.journal.ask_modified_ns()) is not None:
            self.permit.set_time(modified_ns)
        self.permit.refresh()
        count = HEADER_BYTES + PAYLOAD_BYTES
        if (refusal := self.permit.reserve(count)) is not None:
            return refusal
        outcome = self.blocks.put(key, memoryview(bytearray(payload_of(key))))
        self.permit.end(count, count if isinstance(outcome, Stored) else 0)
        if isinstance(outcome, Stored):
            self.journal.append(Op.STORED, key, PAYLOAD_BYTES)
            self.journal.flush()
        return outcome

    def active_key(self) -> str | None:
        """Return the name of the key that the next block is written with."""
        keyring = self.blocks.keyring
        key = None if keyring is None else keyring.active()
        return None if key is None else key.name

    def run(self, request: str, name: str) -> dict[str, Any]:
        with self.lock:
            live = self.follow()
            if request == "attach":
                self.report.say(Phase.ATTACHED)
            key = BlockKey(hashlib.sha256(name.encode()).digest(), 0)
            if request == "store":
                outcome = self.put(key) if live.mode == "ReadWrite" and not self.refused else "refused"
                return {"outcome": str(outcome)}
            if request == "load":
                into = memoryview(bytearray(PAYLOAD_BYTES))
                outcome = self.blocks.get(key, into) if live.mode != "Bypass" and not self.refused else "refused"
                return {"outcome": str(outcome), "is_hit": isinstance(outcome, Hit) and into == payload_of(key)}
            return {"mode": live.mode, "root": self.config.root, "pid": os.getpid(), "key": self.active_key()}

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        """Answer a prompt as the connector does, with a block for each of its chunks."""
        prompt = body["prompt"] if "prompt" in body else json.dumps(body["messages"])
        if isinstance(prompt, list):
            prompt = "".join(map(chr, prompt))
        self.prompt_tokens += len(prompt)
        into = memoryview(bytearray(PAYLOAD_BYTES))
        for end in range(CHUNK_CHARACTERS, len(prompt) + 1, CHUNK_CHARACTERS):
            key = BlockKey(hashlib.sha256(prompt[:end].encode()).digest(), 0)
            with self.lock:
                live = self.follow()
                if live.mode != "Bypass" and isinstance(self.blocks.get(key, into), Hit):
                    self.disk_tokens += CHUNK_CHARACTERS
                elif LOST not in prompt and live.mode == "ReadWrite":
                    self.put(key)
        return {"id": f"cmpl-{os.getpid()}", "choices": [{"text": "x"}], "usage": {"prompt_tokens": len(prompt)}}

    def metrics(self) -> str:
        lines = []
        if self.refused:
            lines.append(f'vllm:kvtier_disk_refused{{engine="0",field="{self.refused}"}} 1.0')
        sizes = {"chunk_bytes": PAYLOAD_BYTES, "token_bytes": PAYLOAD_BYTES // CHUNK_CHARACTERS}
        lines += [f'vllm:kvtier_{name}{{engine="0"}} {float(size)}' for name, size in sizes.items()]
        lines.append(f'vllm:kvtier_disk_active{{engine="0"}} {float(not self.refused)}')
        with self.lock:
            self.follow()
        is_missing = self.blocks.keyring is not None and self.active_key() is None
        lines.append(f'vllm:kvtier_disk_key_missing{{engine="0"}} {float(is_missing)}')
        lines.append(f'vllm:prompt_tokens_total{{engine="0"}} {self.prompt_tokens}')
        lines.append(f'vllm:prompt_tokens_cached_by_source_total{{engine="0",source="disk"}} {self.disk_tokens}')
        return "\n".join(lines) + "\n"


def handler(engine: Engine) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            request, _, name = self.path.strip("/").partition("/")
            if request == "health":
                body = "ok"
            elif request == "metrics":
                body = engine.metrics()
            elif request == "v1":
                body = json.dumps({"data": [{"id": "org/model"}]})
            else:
                body = json.dumps(engine.run(request, unquote(name)))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body.encode())

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            answer = engine.complete(body)
            self.send_response(200)
            self.end_headers()
            if not body.get("stream"):
                self.wfile.write(json.dumps(answer).encode())
                return
            tokens = list(hashlib.sha256(str(body["prompt"]).encode()).digest()[: body["max_tokens"]])
            answer["choices"] = [{"text": "x" * len(tokens), "token_ids": tokens}]
            self.wfile.write(f"data: {json.dumps(answer)}\n\ndata: [DONE]\n\n".encode())

    return Handler


class Other(BaseHTTPRequestHandler):
    """An engine with another connector, which serves."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"data": [{"id": "org/model"}]}).encode())


def main() -> None:
    """Read the flags that the operator gives to vLLM, and serve."""
    flags = dict(word.lstrip("-").partition("=")[::2] for word in sys.argv[1:])
    tiers = json.loads(flags["kv-transfer-config"]).get("kv_connector_extra_config", {}).get("secondary_tiers")
    if not tiers:
        ThreadingHTTPServer((flags["host"], int(flags["port"])), Other).serve_forever()
    config = contract.decode(Path(tiers[0]["config_file"]).read_text())
    ThreadingHTTPServer((flags["host"], int(flags["port"])), handler(Engine(config))).serve_forever()


if __name__ == "__main__":
    main()
