# SPDX-License-Identifier: Apache-2.0
"""``kvtier bench`` with pods that print what `vllm bench serve` of vLLM 0.32 printed, and with two real engines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from command import Command

from kvtier_cli import bench
from kvtier_cli.client import Where
from kvtier_demo.__main__ import ROOT, is_ready
from kvtier_demo.model import make_model
from kvtier_demo.progress import Progress
from kvtier_demo.stack import place_model, running_stack
from kvtier_operator import names

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


def test_one_engine_computes_another_loads_and_the_first_answers_from_memory(
    asked: Callable[..., Tier], kvtier: Command
) -> None:
    tier = asked()
    found = kvtier.json("bench", "llama", "--tokens", "1024", "--requests", "4", "--concurrency", "2", "--seed", "7")
    assert [(each["engine"], each["hits"]) for each in found["passes"]] == [
        ("engine-0", {}),
        ("engine-1", {"disk": 1.0}),
        ("engine-0", {"GPU": 1.0}),
    ]
    words = tier.asked[0][1]
    assert {
        "--base-url=http://[fd00::1]:8000",
        "--model=org/model",
        "--served-model-name=small",
        "--tokenizer=org/model",
        "--random-input-len=1024",
        "--num-prompts=4",
        "--max-concurrency=2",
        "--seed=7",
    } <= set(words)
    assert {tuple(each) for _, each in tier.asked} == {tuple(words)}, "the same prompts in each pass"
    first = found["passes"][0]
    assert (first["requests"], first["failed"]) == (4, 0)
    assert first["ttftMs"] == {"mean": 156.3, "p50": 159.9, "p99": 230.3}
    assert (first["tpotMs"], first["promptTokensPerSecond"]) == (27.0, 5463.8)


def test_the_page_says_what_a_hit_is_worth(asked: Callable[..., Tier], kvtier: Command) -> None:
    asked()
    page = kvtier("bench", "llama")
    assert "another engine" in page
    assert "disk 100%" in page
    asked(second="")
    assert "found nothing on the volume: kvtier status llama" in kvtier("bench", "llama", code=1)


def test_prompts_are_new_in_each_run_and_asked_until_admission_stores_them(
    asked: Callable[..., Tier], kvtier: Command
) -> None:
    seeds = []
    for _ in range(2):
        tier = asked(min_reuse=3)
        seeds.append(kvtier.json("bench", "llama")["seed"])
    assert seeds[0] != seeds[1]
    assert [name for name, _ in tier.asked] == ["engine-0", "engine-0", "engine-0", "engine-1", "engine-0"]


def test_a_benchmark_that_cannot_be_is_told_with_the_reason(asked: Callable[..., Tier], kvtier: Command) -> None:
    asked(pods=1)
    said = kvtier.fails("bench", "llama")
    assert "llama has 1 ready engines" in said
    assert "Set spec.replicas to 2" in said
    asked().printed = ["loading"]
    said = kvtier.fails("bench", "llama")
    assert "`vllm bench serve` ended with 0 and printed no result: a traceback" in said


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
