# SPDX-License-Identifier: Apache-2.0
"""``kvtier bench`` with the output of `vllm bench serve` and real engines; files of prompts for ``kvtier warm``."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from command import Command

from kvtier_cli import bench
from kvtier_cli import warm as prompts
from kvtier_cli.client import Where
from kvtier_demo.__main__ import ROOT, is_ready
from kvtier_demo.model import make_model
from kvtier_demo.progress import Progress
from kvtier_demo.stack import place_model, running_stack
from kvtier_operator import names

TABLES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())

PRINTED = (Path(__file__).parent / "data" / "vllm_bench_serve.txt").read_text().splitlines()
TOKENS = 4096


def make_pod(name: str) -> names.Manifest:
    args = ["--model=org/model", "--served-model-name=small", "--port=8000"]
    return {
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"containers": [{"name": "mesh", "args": []}, {"name": names.ENGINE_CONTAINER, "args": args}]},
        "status": {"podIP": "fd00::1", "conditions": [{"type": "Ready", "status": "True"}]},
    }


class Tier:
    """The client of a cluster with one tier, whose engines answer each prompt from the same source each time."""

    namespace = "default"

    def __init__(self, *, pods: int = 2, second: str = "disk", min_reuse: int = 1) -> None:
        self.engines = [make_pod(f"engine-{number}") for number in reversed(range(pods))]
        self.spec = {"disk": {"admission": {"minReuse": min_reuse}}}
        self.asked: list[tuple[str, list[str]]] = []
        self.counted: dict[str, dict[str, int]] = {}
        self.second = second
        self.printed = PRINTED

    def tier(self, _namespace: str, _name: str) -> names.Manifest:
        return {"spec": self.spec}

    def pods(self, *_: str) -> list[names.Manifest]:
        return self.engines

    def fetch(self, pod: names.Manifest, _port: int, _path: str) -> str:
        counts = self.counted.get(pod["metadata"]["name"], {})
        lines = [f"vllm:prompt_tokens_total {sum(counts.values())}", "vllm:kvtier_disk_queued_jobs 0"]
        found = {source: count for source, count in counts.items() if source}
        lines += [f'vllm:prompt_tokens_cached_by_source_total{{source="{each}"}} {found[each]}' for each in found]
        return "\n".join(lines)

    def execute(
        self, pod: names.Manifest, container: str, command: Sequence[str], on_line: Callable[[str], None]
    ) -> tuple[int, str]:
        assert container == names.ENGINE_CONTAINER
        name = pod["metadata"]["name"]
        source = "device" if any(asked == name for asked, _ in self.asked) else self.second if self.asked else ""
        self.asked.append((name, list(command[3:])))
        counts = self.counted.setdefault(name, {})
        counts[source] = counts.get(source, 0) + TOKENS
        for line in self.printed:
            on_line(line)
        return 0, "a traceback"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Tier]:
    def make(**about: Any) -> Tier:
        tier = Tier(**about)
        monkeypatch.setattr(Where, "client", tier)
        return tier

    monkeypatch.setattr(bench, "POLL_SECONDS", 0.0)
    return make


def test_one_engine_computes_another_loads_and_the_first_remembers(asked: Callable[..., Tier], kvtier: Command) -> None:
    tier = asked()
    found = kvtier.json("bench", "llama", "--tokens", "1024", "--requests", "4", "--concurrency", "2", "--seed", "7")
    assert [(each["engine"], each["hits"]) for each in found["passes"]] == [
        ("engine-0", {}),
        ("engine-1", {"disk": 1.0}),
        ("engine-0", {"GPU": 1.0}),
    ]
    words = tier.asked[0][1]
    model = "--model=org/model --served-model-name=small --tokenizer=org/model --base-url=http://[fd00::1]:8000"
    assert {*model.split(), "--random-input-len=1024", "--num-prompts=4", "--max-concurrency=2", "--seed=7"} <= set(
        words
    )
    assert {tuple(each) for _, each in tier.asked} == {tuple(words)}, "the same prompts in each pass"
    first = found["passes"][0]
    assert (first["requests"], first["failed"]) == (4, 0)
    assert first["ttftMs"] == {"mean": 156.3, "p50": 159.9, "p99": 230.3}
    assert (first["tpotMs"], first["promptTokensPerSecond"]) == (27.0, 5463.8)


def test_the_page_says_what_a_hit_is_worth_or_why_it_is_unknown(asked: Callable[..., Tier], kvtier: Command) -> None:
    asked()
    page = kvtier("bench", "llama")
    assert "another engine" in page
    assert "disk 100%" in page
    asked(second="")
    assert "found nothing on the volume: kvtier status llama" in kvtier("bench", "llama", code=1)
    asked(pods=1)
    said = kvtier.fails("bench", "llama")
    assert "llama has 1 ready engines" in said
    assert "Set spec.replicas to 2" in said
    asked().printed = ["loading"]
    said = kvtier.fails("bench", "llama")
    assert "`vllm bench serve` ended with 0 and printed no result: a traceback" in said


def test_prompts_are_new_in_each_run_and_asked_until_stored(asked: Callable[..., Tier], kvtier: Command) -> None:
    seeds = []
    for _ in range(2):
        tier = asked(min_reuse=3)
        seeds.append(kvtier.json("bench", "llama")["seed"])
    assert seeds[0] != seeds[1]
    assert [name for name, _ in tier.asked] == ["engine-0", "engine-0", "engine-0", "engine-1", "engine-0"]


@pytest.mark.engine
@pytest.mark.timeout(900)
def test_real_engines_find_on_the_volume_what_the_first_one_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kvtier: Command
) -> None:
    make_model(tmp_path / "model" / "tiny")
    progress = Progress()
    with running_stack(ROOT, tmp_path, progress) as stack:
        stack.kube.apply(ROOT / "e2e/demo/models.yaml")
        place_model(tmp_path / "model" / "tiny", stack.claim_directory("models"))
        tier = yaml.safe_load((ROOT / "e2e/demo/tier.yaml").read_text())
        tier["spec"]["proof"] = {"canary": {"enabled": False}}
        (tmp_path / "tier.yaml").write_text(yaml.safe_dump(tier))
        stack.kube.apply(tmp_path / "tier.yaml")
        progress.wait("the tier", lambda: is_ready(stack, progress), seconds=600)
        monkeypatch.setenv("KUBECONFIG", str(stack.kube.kubeconfig))
        computed, loaded, again = kvtier.json("bench", "demo", "--requests", "4", "--tokens", "512")["passes"]
    assert (computed["requests"], computed["failed"]) == (4, 0)
    # vLLM's benchmark tries one of the prompts before it begins.
    assert sum(computed["hits"].values()) < 0.3
    # The engine computes heads of hits while it reads their tails, and whole hits where that takes less time.
    assert loaded["hits"]["disk"] > 0
    assert again["hits"]["GPU"] > 0.5


SECRET = "words that stay secret"


@pytest.mark.parametrize(("line", "path", "kept"), TABLES["requests"])
def test_a_line_becomes_a_request_with_one_token_of_answer(
    line: object, path: str, kept: dict[str, object], tmp_path: Path
) -> None:
    # Empty lines count, and are left out.
    (tmp_path / "p.jsonl").write_text(f"\n{json.dumps(line)}")
    (found,) = prompts.read(tmp_path / "p.jsonl")
    assert (found.line, found.path, found.body) == (2, path, {**kept, "max_tokens": 1, "temperature": 0})


def test_a_packed_file_is_read_like_a_plain_one(tmp_path: Path) -> None:
    plain, packed = tmp_path / "p.jsonl", tmp_path / "p.jsonl.gz"
    plain.write_text('"a"\n"b"\n')
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert list(prompts.read(packed)) == list(prompts.read(plain))


PACKED = gzip.compress(b'"a"\n' * 9, mtime=0)


@pytest.mark.parametrize("data", [PACKED[:-9], PACKED[:10] + b"\xff" + PACKED[11:], PACKED[:-8] + bytes(8), b'"a"\n'])
def test_a_packed_file_that_is_damaged_says_so(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl.gz").write_bytes(data)
    said = "is damaged; copy it again" if data.startswith(PACKED[:2]) else "is not compressed with gzip; rename it"
    with pytest.raises(click.UsageError, match=f"p.jsonl.gz: {said}"):
        list(prompts.read(tmp_path / "p.jsonl.gz"))


@pytest.mark.parametrize(("line", "said"), [*TABLES["mistakes"], ("[" * 200_000, "line 1: is no JSON")])
def test_a_mistake_is_named_by_its_line_and_repeats_nothing(line: str, said: str) -> None:
    with pytest.raises(click.UsageError) as raised:
        prompts.parse(Path("p.jsonl"), 1, line)
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


def test_a_file_with_a_mistake_sends_nothing(serve: Callable[..., Server], tmp_path: Path, kvtier: Command) -> None:
    server = serve()
    assert "line 2" in kvtier.fails("warm", server.url, write(tmp_path / "p.jsonl", "one", 5), code=2)
    assert server.asked == []
    assert "holds no prompt" in kvtier.fails("warm", server.url, write(tmp_path / "p.jsonl"), code=2)
