# SPDX-License-Identifier: Apache-2.0
"""``kvtier bench`` against endpoints that stream: what it sends, what it counts, what it refuses, what it keeps."""

from __future__ import annotations

import contextlib
import hashlib
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import click
import pytest
from waiting import until

from kvtier_cli.app import main
from kvtier_cli.bench import endpoints, trace
from kvtier_cli.bench.client import Endpoint, Sample, prompt_of
from kvtier_cli.bench.results import Pass, compare, distribution, shares
from kvtier_cli.client import Where

BLOCK = 16


class Engine:
    """An endpoint with a prefix cache of blocks, whose answers follow from the prompt alone."""

    def __init__(self) -> None:
        self.blocks: set[tuple[int, ...]] = set()
        self.asked: list[dict[str, Any]] = []
        self.sessions: list[str] = []
        self.counts = {"prompt": 0, "device": 0}
        self.lock = threading.Lock()
        self.salt = ""
        self.pause = 0.0
        self.has_metrics = True
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler(self))
        self.server.daemon_threads = True
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    def cached(self, prompt: list[int]) -> int:
        """Count the tokens whose blocks are there, and put the others there."""
        prefixes = [tuple(prompt[:end]) for end in range(BLOCK, len(prompt) + 1, BLOCK)]
        with self.lock:
            hits = next((number for number, each in enumerate(prefixes) if each not in self.blocks), len(prefixes))
            self.blocks.update(prefixes)
            self.counts["prompt"] += len(prompt)
            self.counts["device"] += hits * BLOCK
        return hits * BLOCK

    def answer(self, body: dict[str, Any]) -> list[int]:
        seed = hashlib.sha256(f"{self.salt}{body['prompt']}".encode()).digest()
        return [100 + seed[place % 32] for place in range(body["max_tokens"])]

    def metrics(self) -> str:
        return (
            f'vllm:prompt_tokens_total{{engine="0"}} {self.counts["prompt"]}.0\n'
            f'vllm:prompt_tokens_cached_by_source_total{{engine="0",source="device"}} {self.counts["device"]}.0\n'
        )


def handler(engine: Engine) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/v1/models":
                self.send(json.dumps({"data": [{"id": "tiny", "max_model_len": 4096}]}))
            elif self.path == "/forget":
                engine.has_metrics = False
                self.send("")
            elif self.path == "/metrics" and engine.has_metrics:
                self.send(engine.metrics())
            else:
                self.send_error(404)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            engine.asked.append(body)
            engine.sessions.append(self.headers["X-Session-ID"])
            cached, tokens = engine.cached(body["prompt"]), engine.answer(body)
            time.sleep(engine.pause)
            self.send_response(200)
            self.end_headers()
            for token in tokens:
                self.event({"choices": [{"text": f"{token} ", "token_ids": [token]}]})
            details = {"cached_tokens": cached}
            self.event({"choices": [], "usage": {"completion_tokens": len(tokens), "prompt_tokens_details": details}})
            self.wfile.write(b"data: [DONE]\n\n")

        def event(self, document: dict[str, Any]) -> None:
            self.wfile.write(f"data: {json.dumps(document)}\n\n".encode())

        def send(self, text: str) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    return Handler


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine()
    yield engine
    engine.close()


@pytest.fixture
def other() -> Iterator[Engine]:
    engine = Engine()
    yield engine
    engine.close()


def bench(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> dict[str, Any]:
    assert main(["bench", *words, "-o", "json"]) == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["bench", *words]) == 2
    return capsys.readouterr().err


def test_a_prompt_asked_again_is_a_hit_and_answered_the_same(
    engine: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    found = bench(capsys, engine.url, "--tokens", "64", "--output-tokens", "4", "--requests", "2")
    first, again = found["passes"]
    assert (first["pass"], again["pass"]) == ("single first", "single again")
    assert (first["requests"], first["failed"]) == (2, 0)
    assert (first["hits"], again["hits"]) == ({}, {"GPU": 1.0})
    assert found["answers"] == {"compared": 2, "same": 2, "different": []}
    assert found["isComplete"] is True
    assert again["ttft"]["p50"] > 0
    assert again["tpot"]["mean"] >= 0
    asked = engine.asked[0]
    assert (len(asked["prompt"]), asked["max_tokens"], asked["temperature"], asked["stream"]) == (64, 4, 0, True)
    assert asked["ignore_eos"] is True


def test_two_targets_get_the_same_prompts_and_different_answers_are_named(
    engine: Engine, other: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    other.salt = "wrong"
    words = ("-w", "never", "--tokens", "32", "--requests", "3", "--output-tokens", "2")
    found = bench(capsys, f"ours={engine.url}", f"theirs={other.url}", *words, code=1)
    prompts = [sorted(each["prompt"] for each in one.asked) for one in (engine, other)]
    assert prompts[0] == prompts[1]
    assert (found["answers"]["compared"], found["answers"]["same"]) == (3, 0)
    assert found["answers"]["different"][0]["answers"] == [["ours, never"], ["theirs, never"]]


def test_conversations_continue_themselves_and_stay_in_their_session(
    engine: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("-w", "turns", "--tokens", "64", "--turns", "3", "--requests", "2", "--output-tokens", "2")
    (only,) = bench(capsys, engine.url, *words)["passes"]
    assert only["requests"] == 6
    assert list(only["byLabel"]) == ["turn 0", "turn 1", "turn 2"]
    # Of 64, 576 and 1088 tokens, all but the newest turn was asked before.
    assert only["hits"]["GPU"] == pytest.approx((64 + 576) / (64 + 576 + 1088), abs=0.01)
    by_session = {session: engine.sessions.count(session) for session in engine.sessions}
    assert sorted(by_session.values()) == [3, 3]


def test_a_shared_prefix_is_asked_once_before(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("-w", "shared", "--tokens", "256", "--requests", "4", "--output-tokens", "1")
    prefix, shared = bench(capsys, engine.url, *words)["passes"]
    assert (prefix["requests"], shared["requests"]) == (1, 4)
    assert shared["hits"]["GPU"] == pytest.approx(256 / 384, abs=0.01)


def test_a_trace_of_mooncakes_is_played_with_its_shared_blocks(
    engine: Engine, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "trace.jsonl"
    entries = [
        {"timestamp": 0, "input_length": 1024, "output_length": 500, "hash_ids": [0, 1]},
        {"timestamp": 200, "input_length": 1100, "output_length": 1, "hash_ids": [0, 1, 2]},
    ]
    file.write_text("".join(f"{json.dumps(each)}\n" for each in entries))
    (only,) = bench(capsys, engine.url, "-w", str(file), "--output-tokens", "3")["passes"]
    assert [(len(each["prompt"]), each["max_tokens"]) for each in engine.asked] == [(1024, 3), (1100, 1)]
    assert only["seconds"] >= 0.2
    assert only["hits"]["GPU"] == pytest.approx(1024 / 2124, abs=0.01)


def test_what_was_measured_lies_in_the_directory(
    engine: Engine, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    bench(capsys, engine.url, "--tokens", "32", "--output-tokens", "2", "--out", str(tmp_path / "out"))
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "bench.json",
        "bench.png",
        "bench.txt",
        "requests.jsonl",
    ]
    assert (tmp_path / "out/bench.png").read_bytes().startswith(b"\x89PNG")
    assert (
        "answers: 3 of 3 prompts asked more than once got the same tokens" in (tmp_path / "out/bench.txt").read_text()
    )
    requests = [json.loads(line) for line in (tmp_path / "out/requests.jsonl").read_text().splitlines()]
    assert len(requests) == 6
    assert "text" not in requests[0]


def test_a_command_runs_between_the_passes(engine: Engine, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    told = tmp_path / "told"
    bench(capsys, engine.url, "--tokens", "32", "--between", f'echo "$KVTIER_BENCH_URL" >> {told}', "--passes", "3")
    assert told.read_text().split() == [engine.url, engine.url]


def test_a_pass_that_cannot_begin_is_told_and_costs_no_other(
    engine: Engine, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    once = f"test -e {tmp_path}/once || ! touch {tmp_path}/once"
    words = ["--tokens", "32", "--requests", "3", "--passes", "3", "--out", str(tmp_path / "out"), "-o", "json"]
    assert main(["bench", f"a={engine.url}", f"b={engine.url}", *words, "--between", once]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [(each["target"], each["pass"], each["requests"]) for each in found["passes"]] == [
        ("a", "single first", 3),
        ("a", "single again", 0),
        ("a", "single 3", 3),
        ("b", "single first", 3),
        ("b", "single again", 3),
        ("b", "single 3", 3),
    ]
    why = "--between: the command ended with 1"
    assert [each["problem"] for each in found["passes"]] == ["", why, "", "", "", ""]
    assert json.loads((tmp_path / "out/bench.json").read_text()) == found
    table = (tmp_path / "out/bench.txt").read_text()
    assert f"a, single again: {why}" in table
    assert "0, not sent" in table
    assert "interrupted" not in table


def test_a_tier_whose_engines_are_not_back_in_time_keeps_what_was_measured(
    engine: Engine, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached: list[str] = []

    @contextlib.contextmanager
    def forwarded(tier: str, _where: Where) -> Iterator[tuple[list[str], list[dict[str, Any]]]]:
        reached.append(tier)
        if len(reached) == 2:
            raise click.UsageError(f"{tier}: none of its engines serves")
        yield [engine.url], []

    monkeypatch.setattr(endpoints, "_forwarded", forwarded)
    words = ["--tokens", "32", "--passes", "3", "--no-metrics", "--between", "true", "--out", str(tmp_path / "out")]
    found = bench(capsys, "llama", *words, code=1)
    assert [(each["requests"], each["problem"]) for each in found["passes"]] == [
        (3, ""),
        (0, "llama: none of its engines serves"),
        (3, ""),
    ]
    assert json.loads((tmp_path / "out/bench.json").read_text()) == found


def test_an_engine_that_counts_nothing_any_more_keeps_what_was_measured(
    engine: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    ask = "import os, urllib.request as u; u.urlopen(os.environ['KVTIER_BENCH_URL'] + '/forget').read()"
    found = bench(capsys, engine.url, "--tokens", "32", "--between", f'{sys.executable} -c "{ask}"', code=1)
    first, again = found["passes"]
    assert (first["requests"], first["problem"]) == (3, "")
    assert again["requests"] == 0
    assert "404" in again["problem"]


def test_what_cannot_be_asked_is_refused_with_the_option_to_change(
    engine: Engine, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert "127.0.0.1:9/v1/models does not answer" in refused(capsys, "http://127.0.0.1:9")
    assert "serves no model 'large': set --model to tiny" in refused(capsys, engine.url, "--model", "large")
    assert "takes 4096 tokens" in refused(capsys, engine.url, "--tokens", "5000")
    assert "lower --tokens" in refused(capsys, engine.url, "--tokens", "5000")
    assert "must be single, turns, shared, never, or a file" in refused(capsys, engine.url, "-w", "nonsense")
    assert "must be NAME=URL" in refused(capsys, engine.url, "--metrics", "nowhere")
    engine.has_metrics = False
    said = refused(capsys, engine.url)
    assert "--metrics" in said
    assert "--no-metrics" in said
    file = tmp_path / "trace.jsonl"
    file.write_text('{"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [1]}\n{"timestamp": 1\n')
    assert "trace.jsonl: line 2: is no JSON" in refused(capsys, engine.url, "-w", str(file), "--no-metrics")
    assert engine.asked == []


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("[1]", "must be an object"),
        ('{"timestamp": "x", "input_length": 5, "output_length": 1, "hash_ids": [1]}', "timestamp must be a number"),
        ('{"timestamp": 0, "input_length": 0, "output_length": 1, "hash_ids": [1]}', "input_length must be a number"),
        ('{"timestamp": 0, "input_length": 513, "output_length": 1, "hash_ids": [1]}', "513 tokens need 2 hash_ids"),
        ('{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": "1"}', "hash_ids must be a list"),
    ],
)
def test_a_broken_line_of_a_trace_is_named(line: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(f"\n{line}\n")
    with pytest.raises(trace.TraceInvalid, match=f"line 2: {words}"):
        trace.read(file, limit=None, speed=1.0, most_output=None)


def test_without_metrics_nobody_says_where_hits_came_from(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    engine.has_metrics = False
    found = bench(capsys, engine.url, "--tokens", "32", "--no-metrics", "--plain")
    assert [each["hits"] for each in found["passes"]] == [None, None]
    assert "ignore_eos" not in engine.asked[0]


def test_who_interrupts_it_keeps_what_there_is(engine: Engine, tmp_path: Path) -> None:
    engine.pause = 0.2
    words = ["bench", engine.url, "--tokens", "32", "--requests", "500", "--out", str(tmp_path / "out")]
    process = subprocess.Popen(
        [sys.executable, "-m", "kvtier_cli", *words],
        stdout=subprocess.PIPE,
        text=True,
        # A shell that runs the tests in the background has all below it ignore the signal.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509 - it makes one system call
    )
    until(lambda: len(engine.asked) > 3)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted: these are the answers that there were" in said
    found = json.loads((tmp_path / "out/bench.json").read_text())
    assert found["isComplete"] is False
    assert 0 < found["passes"][0]["requests"] < 500


def test_equal_parts_give_equal_tokens_and_another_seed_others() -> None:
    request = {"parts": [(1, 8), (2, 8)]}
    tokens = prompt_of(request, vocabulary=500, seed=0)
    assert tokens == prompt_of(request, vocabulary=500, seed=0)
    assert tokens[:8] == prompt_of({"parts": [(1, 8), (3, 8)]}, vocabulary=500, seed=0)[:8]
    assert tokens != prompt_of(request, vocabulary=500, seed=1)
    assert all(100 <= token < 500 for token in tokens)


def test_a_percentile_is_a_value_that_was_measured() -> None:
    assert distribution([]) is None
    assert distribution([3.0]) == {"mean": 3.0, "p50": 3.0, "p99": 3.0}
    values = [float(number) for number in range(1, 201)]
    assert distribution(values) == {"mean": 100.5, "p50": 100.0, "p99": 198.0}


def test_shares_are_of_what_was_asked_meanwhile() -> None:
    before = {"promptTokens": 1000, "bySource": {"device": 500}}
    after = {"promptTokens": 2000, "bySource": {"device": 750, "disk": 500}}
    assert shares(before, after) == {"GPU": 0.25, "disk": 0.5}
    assert shares({}, {}) is None


def test_only_answers_that_came_are_compared() -> None:
    one = Pass(target="a", name="single first", samples=[Sample(number=0, label="x", prompt_tokens=1, tokens=[1])])
    failed = Sample(number=0, label="x", prompt_tokens=1, error="HTTP 500")
    other = Pass(target="b", name="single first", samples=[failed])
    assert compare([one, other]) == {"compared": 0, "same": 0, "different": []}


def test_a_key_goes_along_and_nowhere_else() -> None:
    assert Endpoint(url="u", model="m", key="secret").headers == {"Authorization": "Bearer secret"}
    assert Endpoint(url="u", model="m").headers == {}
