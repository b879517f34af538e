# SPDX-License-Identifier: Apache-2.0
"""What counts as warm: blocks of the generation asked for, which lie on the volume; whichever replica answers."""

from __future__ import annotations

import itertools
import json
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tier_dir import Clock, Engine, key

from kvtier_connector import contract
from kvtier_connector.contract import NAMES, ConnectorConfig
from kvtier_connector.janitor import warming
from kvtier_connector.store.layout import block_path

DIGEST, OTHER = "aaaa", "bbbb"


class Replicas:
    """Engines behind one address: each new connection goes to the next, and each counts offers for itself."""

    def __init__(self, engine: Engine, *, replicas: int = 1, min_reuse: int = 1, api_key: str = "") -> None:
        self.asked: list[int] = []
        self._engine, self._min_reuse, self._api_key = engine, min_reuse, api_key
        self._offers: list[Counter[int]] = [Counter() for _ in range(replicas)]
        self._next, self._lock = itertools.count(), threading.Lock()
        made = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            replica = -1

            def setup(self) -> None:
                super().setup()
                self.replica = next(made._next) % replicas

            def do_GET(self) -> None:
                self._answer(200, {"data": [{"id": "m"}]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if made._api_key and self.headers.get("Authorization") != f"Bearer {made._api_key}":
                    self._answer(401, {})
                    return
                self._answer(200, made.ask(self.replica, [int(word) for word in body["prompt"].split()]))

            def _answer(self, code: int, document: dict[str, Any]) -> None:
                text = json.dumps(document).encode()
                self.send_response(code)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    def ask(self, replica: int, numbers: list[int]) -> dict[str, Any]:
        """Offer the blocks of these numbers, and write those that were offered often enough."""
        with self._lock:
            self.asked.append(replica)
            for number in numbers:
                self._offers[replica][number] += 1
                if self._offers[replica][number] == self._min_reuse:
                    self._engine.put(number)
        paths = [block_path(key(number)) for number in numbers]
        return {"kv_transfer_params": {NAMES: {"directory": str(self._engine.root), "blocks": paths}}}


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Any]:
    """Start replicas whose blocks are of a generation, and return them with the words that ask them."""
    started: list[Replicas] = []

    def start(digest: str = DIGEST, **given: Any) -> tuple[Replicas, list[str]]:
        tier_dir = tmp_path / "ns.llama"
        found = Replicas(Engine(tier_dir, digest, Clock()), **given)
        threading.Thread(target=found.server.serve_forever, daemon=True).start()
        started.append(found)
        config = ConnectorConfig(
            tier="ns/llama",
            root=str(tier_dir / DIGEST),
            digest=DIGEST,
            identity={},
            max_bytes=0,
            min_reuse=given.get("min_reuse", 1),
        )
        (tmp_path / "connector.json").write_text(contract.encode(config))
        (tmp_path / "prompts.jsonl").write_text(json.dumps("1 2 3"))
        words = [f"--{name}={tmp_path / file}" for name, file in FILES.items()]
        return found, [*words, f"--url=http://127.0.0.1:{found.server.server_port}", "--patience=1"]

    yield start
    for each in started:
        each.server.shutdown()
        each.server.server_close()


FILES = {"config": "connector.json", "prompts": "prompts.jsonl", "result": "result.json"}


def run(words: list[str], tmp_path: Path, code: int) -> dict[str, Any]:
    assert warming.main(words) == code
    found: dict[str, Any] = json.loads((tmp_path / "result.json").read_text())
    return found


def test_blocks_of_an_engine_that_is_still_of_another_generation_do_not_count(serve: Any, tmp_path: Path) -> None:
    _, words = serve(OTHER)
    found = run(words, tmp_path, 1)
    assert (found["warm"], found["blocks"], found["failed"]) == (0, 0, 1)
    assert f"the engine keeps blocks of generation {OTHER}, and {DIGEST} is to be warm" in found["problem"]


def test_the_generation_asked_for_counts_whatever_the_document_has_become(serve: Any, tmp_path: Path) -> None:
    _, words = serve(OTHER)
    assert run([*words, f"--generation={OTHER}"], tmp_path, 0)["blocks"] == 3
    _, words = serve(DIGEST)
    assert run([*words, f"--generation={OTHER}"], tmp_path, 1)["failed"] == 1


@pytest.mark.parametrize(
    ("why", "said"), [("tenant", "names no tenant"), ("no_store", "kvtier_store"), ("x", "off the")]
)
def test_a_prompt_that_is_kept_off_the_volume_is_not_warm_and_not_short(
    serve: Any, tmp_path: Path, why: str, said: str
) -> None:
    engines, words = serve()
    root = str(tmp_path / "ns.llama" / DIGEST)
    named = {"directory": root, "blocks": [], "refused": why}
    engines.ask = lambda *_: {"kv_transfer_params": {NAMES: named}}
    found = run(words, tmp_path, 1)
    assert (found["failed"], found["short"], found["warm"]) == (1, 0, 0)
    assert said in found["problem"]


def test_few_prompts_are_read_ahead_of_those_that_are_sent(serve: Any, tmp_path: Path) -> None:
    engines, words = serve()
    count, ahead, read, sent = 40, [0], [0], [0]
    ask, take = engines.ask, warming.prompts.read

    def answer(replica: int, numbers: list[int]) -> dict[str, Any]:
        sent[0] += 1
        found: dict[str, Any] = ask(replica, numbers)
        return found

    def noting(file: Path) -> Iterator[Any]:
        # The first look at all of them is forgotten.
        read[0] = ahead[0] = 0
        for prompt in take(file):
            read[0] += 1
            ahead[0] = max(ahead[0], read[0] - sent[0])
            yield prompt

    engines.ask = answer
    (tmp_path / "prompts.jsonl").write_text("".join(f'"{number}"\n' for number in range(count)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(warming.prompts, "read", noting)
        assert run([*words, "--concurrency=2"], tmp_path, 0)["warm"] == count
    assert sent[0] == count
    assert ahead[0] <= 3


def test_a_line_that_is_no_prompt_is_told_of_before_anything_is_sent(serve: Any, tmp_path: Path) -> None:
    engines, words = serve()
    (tmp_path / "prompts.jsonl").write_text('"1"\n"2"\nno prompt\n')
    assert "line 3" in run(words, tmp_path, 2)["problem"]
    assert engines.asked == []


def test_a_prompt_is_offered_often_enough_to_one_replica(serve: Any, tmp_path: Path) -> None:
    replicas, words = serve(replicas=3, min_reuse=2)
    found = run(words, tmp_path, 0)
    assert (found["warm"], found["blocks"], found["missing"]) == (1, 3, 0)
    assert len(replicas.asked) == 2
    assert len(set(replicas.asked)) == 1


def test_a_key_that_is_not_known_is_asked_for_with_its_place(
    serve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, words = serve(api_key="sesame")
    found = run(words, tmp_path, 1)
    assert "with 401 Unauthorized: it asks for a key" in found["problem"]
    assert "VLLM_API_KEY in spec.engine.env" in found["problem"]
    monkeypatch.setenv(warming.KEY_VARIABLE, "sesame")
    assert run(words, tmp_path, 0)["warm"] == 1
