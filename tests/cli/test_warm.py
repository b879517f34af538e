# SPDX-License-Identifier: Apache-2.0
"""``kvtier warm``: the forms of a file of prompts, mistakes that repeat none of its text, and the requests."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import click
import pytest
from command import Command

from kvtier_cli import warm as prompts

SECRET = "words that nobody may see"


CHAT = {"messages": [{"role": "user", "content": "x"}]}
TENANT = {"prompt": "x", "kv_transfer_params": {"kvtier_tenant": "acme"}}


@pytest.mark.parametrize(
    ("line", "path", "kept"),
    [
        (CHAT, prompts.CHAT, CHAT),
        ({"prompt": "x", "cache_salt": "s"}, prompts.TEXT, {"prompt": "x", "cache_salt": "s"}),
        ({"prompt": [1, 2, 3]}, prompts.TEXT, {"prompt": [1, 2, 3]}),
        ("a text", prompts.TEXT, {"prompt": "a text"}),
        ({"custom_id": "7", "url": "/v1/completions", "body": {"prompt": "x"}}, prompts.TEXT, {"prompt": "x"}),
        # What concerns the answer is left out, and the tenant stays.
        ({**TENANT, "max_tokens": 500, "stream": True, "n": 4}, prompts.TEXT, TENANT),
    ],
)
def test_a_line_becomes_a_request_with_one_token_of_answer(line: object, path: str, kept: dict[str, object]) -> None:
    # Empty lines count, and are left out.
    (found,) = prompts.parse(["\n", json.dumps(line)])
    asks = {"max_tokens": 1, "temperature": 0}
    assert (found.line, found.path, found.body) == (2, path, {**kept, **asks})


def test_a_packed_file_is_read_like_a_plain_one(tmp_path: Path) -> None:
    plain, packed = tmp_path / "p.jsonl", tmp_path / "p.jsonl.gz"
    plain.write_text('"a"\n"b"\n')
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert list(prompts.read(packed)) == list(prompts.read(plain))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (f'{{"prompt": "{SECRET}"', "line 1: is no JSON at column"),
        (json.dumps({"text": SECRET}), 'must have one of "messages" and "prompt"'),
        (json.dumps({"prompt": SECRET, "messages": []}), 'must have one of "messages" and "prompt"'),
        (json.dumps([SECRET]), "must be an object"),
        (json.dumps({"messages": SECRET}), "messages must be a list"),
        (json.dumps({"messages": []}), "one message or more"),
        (json.dumps({"prompt": {SECRET: 1}}), "prompt must be a text or a list of tokens"),
        (json.dumps({"prompt": 5}), "prompt must be a text or a list of tokens"),
        ('""', "and not empty"),
        ("[" * 200_000, "line 1: is no JSON"),
    ],
)
def test_a_mistake_is_named_by_its_line_and_repeats_nothing(line: str, said: str) -> None:
    with pytest.raises(click.UsageError) as raised:
        list(prompts.parse([line]))
    assert said in raised.value.message
    assert SECRET not in raised.value.message


class Server:
    """An OpenAI endpoint that answers as `statuses` say, then with 200; it notes each request and its connection."""

    def __init__(self, *statuses: int) -> None:
        self.asked: list[tuple[str, dict[str, Any], int, str]] = []
        left, noted = list(statuses), self.asked

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self.answer(200, {"data": [{"id": "tiny"}]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                noted.append((self.path, body, self.client_address[1], self.headers.get("Authorization", "")))
                self.answer(left.pop(0) if left else 200, {"usage": {"prompt_tokens": 7}, "detail": body})

            def answer(self, status: int, document: dict[str, Any]) -> None:
                data = json.dumps(document).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Server]]:
    monkeypatch.setattr(prompts, "RETRY_SECONDS", 0.01)
    made: list[Server] = []

    def make(*statuses: int) -> Server:
        made.append(Server(*statuses))
        return made[-1]

    yield make
    for each in made:
        each.server.shutdown()
        each.server.server_close()


def write(path: Path, *lines: object) -> str:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return str(path)


def test_each_prompt_is_sent_with_the_served_model_and_the_key(
    serve: Callable[..., Server], tmp_path: Path, kvtier: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "sesame")
    server = serve()
    file = write(
        tmp_path / "p.jsonl", "one", {"body": {"messages": [{"role": "user", "content": "two"}], "model": "b"}}
    )
    assert kvtier("warm", f"{server.url}/v1", file) == "2 of 2 prompts, 14 tokens\n"
    assert {(path, body["model"]) for path, body, _, _ in server.asked} == {(prompts.TEXT, "tiny"), (prompts.CHAT, "b")}
    assert {key for *_, key in server.asked} == {"Bearer sesame"}


def test_a_prompt_is_repeated_over_one_connection_so_that_one_engine_counts_it(
    serve: Callable[..., Server], tmp_path: Path, kvtier: Command
) -> None:
    server = serve()
    kvtier("warm", server.url, write(tmp_path / "p.jsonl", "one", "two"), "--times", "3")
    assert len(server.asked) == 6
    assert len({port for _, _, port, _ in server.asked}) == 2


def test_a_busy_engine_is_asked_again(serve: Callable[..., Server], tmp_path: Path, kvtier: Command) -> None:
    server = serve(503, 429)
    kvtier("warm", server.url, write(tmp_path / "p.jsonl", "one"))
    assert len(server.asked) == 3


@pytest.mark.parametrize(("status", "said"), [(400, "line 1: /v1/completions answers 400"), (401, "--key-variable")])
def test_a_refused_prompt_is_told_by_its_line_and_the_others_are_sent(
    serve: Callable[..., Server], tmp_path: Path, kvtier: Command, status: int, said: str
) -> None:
    server = serve(status)
    told = kvtier("warm", server.url, write(tmp_path / "p.jsonl", SECRET, "two"), "--concurrency", "1", code=1)
    assert "1 of 2 prompts" in told
    assert said in told
    assert SECRET not in told + kvtier.err
    assert len(server.asked) == 2


def test_nothing_is_sent_of_a_file_with_a_mistake(
    serve: Callable[..., Server], tmp_path: Path, kvtier: Command
) -> None:
    server = serve()
    assert "line 2" in kvtier.fails("warm", server.url, write(tmp_path / "p.jsonl", "one", 5), code=2)
    assert server.asked == []
    assert "holds no prompt" in kvtier.fails("warm", server.url, write(tmp_path / "p.jsonl"), code=2)
