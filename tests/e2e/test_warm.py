# SPDX-License-Identifier: Apache-2.0
"""A tier is filled before its users come: ``kvtier warm``, with a Job beside the engines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from light_cluster import SECONDS, TIER, Tier

from kvtier_cli.app import main
from kvtier_localcluster import kinds
from kvtier_localcluster.testing import Bench, until

CHUNKS = 3
SECRET_WORDS = "the-words-of-a-prompt"
PROMPTS = [
    {"prompt": f"{number} {SECRET_WORDS} ".ljust(64 * CHUNKS, "x"), "max_tokens": 500, "stream": True}
    for number in range(6)
]


@pytest.fixture(autouse=True)
def _kubeconfig(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(bench.cluster.kubeconfig))


@pytest.fixture(scope="module")
def cold(bench: Bench) -> Tier:
    tier = Tier(bench, "cold", disk={"budget": {"maxBytes": "1Gi"}})
    tier.reaches("Available", "True")
    return tier


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


def warm(capsys: pytest.CaptureFixture[str], tier: Tier, *words: str, code: int = 0) -> dict[str, Any]:
    assert main(["warm", tier.name, *words, "-o", "json"]) == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def leftovers(bench: Bench) -> list[str]:
    found = [*bench.list(kinds.JOB), *bench.list(kinds.SECRET)]
    return [each["metadata"]["name"] for each in found if "-warm-" in each["metadata"]["name"]]


@pytest.mark.timeout(300)
def test_every_block_of_every_prompt_comes_to_the_volume_and_nothing_is_left_behind(
    bench: Bench, cold: Tier, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = {"messages": [{"role": "user", "content": "y" * 64}]}
    file = write(tmp_path / "prompts.jsonl", *PROMPTS, chat, json.dumps("short"))
    found = warm(capsys, cold, "-f", str(file))
    assert (found["prompts"], found["warm"], found["short"], found["missing"]) == (8, 7, 1, 0)
    root = bench.cluster.cluster.data.root
    assert found["blocks"] == len(list((root / "pvc/default/cold-blocks").rglob("*.kvb"))) >= CHUNKS * len(PROMPTS)
    until(lambda: not leftovers(bench), SECONDS)
    # What a pod has logged outlives it, and says nothing of what it was asked.
    logs = [path.read_text() for path in (root / "logs/default").rglob("warm.log")]
    assert logs
    assert not any(SECRET_WORDS in text for text in logs)
    assert warm(capsys, cold, "-f", str(file))["blocks"] == found["blocks"]


def test_a_block_that_does_not_come_is_told_of_with_the_line_of_its_prompt(
    cold: Tier, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path / "prompts.jsonl", PROMPTS[0], {"prompt": "lost " * 40})
    found = warm(capsys, cold, "-f", str(file), "--patience", "1s", code=1)
    assert (found["warm"], found["missing"]) == (1, 3)
    assert found["problem"].startswith("line 2: 3 blocks did not come")


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["{"], "line 1: is no JSON"),
        ([{"prompt": "x"}, {"text": "x"}], 'line 2: must have one of "messages" and "prompt"'),
        ([], "holds no prompt"),
        (["5"], "line 1: must be an object"),
    ],
)
def test_what_is_no_list_of_prompts_is_refused_before_anything_is_made(  # noqa: PLR0913, PLR0917 - fixtures
    bench: Bench, cold: Tier, tmp_path: Path, capsys: pytest.CaptureFixture[str], lines: list[Any], said: str
) -> None:
    file = write(tmp_path / "prompts.jsonl", *lines)
    assert main(["warm", cold.name, "-f", str(file)]) == 2
    assert said in capsys.readouterr().err
    assert leftovers(bench) == []


def test_a_tier_without_engines_cannot_be_warmed(
    bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tier = Tier(bench, "engineless", volume={"existingClaim": "nobodys"})
    tier.reaches("VolumeBound", "False")
    assert main(["warm", "engineless", "-f", str(write(tmp_path / "p.jsonl", PROMPTS[0]))]) == 1
    assert "has no engines yet" in capsys.readouterr().err
    bench.delete(TIER, "engineless")


def make_prompts(bench: Bench, name: str, *lines: Any) -> dict[str, Any]:
    """Put prompts into a ConfigMap, and return what the spec says of them."""
    text = "".join(f"{json.dumps(line)}\n" for line in lines)
    bench.create(
        kinds.CONFIG_MAP,
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": {"prompts.jsonl": text}},
    )
    return {"prompts": {"configMap": {"name": name}}}


@pytest.mark.timeout(300)
def test_a_tier_is_ready_when_the_prompts_of_its_spec_are_warm(bench: Bench) -> None:
    wanted = make_prompts(bench, "good-prompts", *PROMPTS)
    tier = Tier(bench, "warmed", warm={**wanted, "required": True})
    tier.reaches("Warm", "True", "PromptsWarm")
    tier.reaches("Ready", "True")
    kept = tier.status()["warm"]
    assert (kept["prompts"], kept["warm"], kept["missing"]) == (len(PROMPTS), len(PROMPTS), 0)
    root = bench.cluster.cluster.data.root / "pvc/default/warmed-blocks"
    assert kept["blocks"] == len(list(root.rglob("*.kvb")))
    assert "problem" not in kept
    # Sent once: not again with each pass.
    job = bench.get(kinds.JOB, "warmed-warm")
    assert job is not None
    tier.patch(warm={"revision": "2"})

    def is_another() -> bool:
        found = bench.get(kinds.JOB, "warmed-warm")
        return found is not None and found["metadata"]["uid"] != job["metadata"]["uid"]

    until(is_another, SECONDS)
    tier.reaches("Warm", "True", "PromptsWarm")
    assert tier.status()["warm"]["key"] != kept["key"]
    tier.patch(warm=None)
    tier.reaches("Warm", "Unknown", "PromptsNone")
    until(lambda: bench.get(kinds.JOB, "warmed-warm") is None, SECONDS)
    bench.delete(TIER, "warmed")


@pytest.mark.timeout(300)
def test_prompts_that_are_none_hold_up_ready_only_where_they_are_required(bench: Bench) -> None:
    wanted = make_prompts(bench, "bad-prompts", {"text": SECRET_WORDS})
    tier = Tier(bench, "spoilt", warm=wanted)
    found = tier.reaches("Warm", "False", "PromptsFailed")
    assert 'line 1: must have one of "messages" and "prompt"' in found["message"]
    assert SECRET_WORDS not in json.dumps(tier.status())
    tier.reaches("Ready", "True")
    tier.patch(warm={"required": True})
    assert tier.reaches("Ready", "False")["reason"] in {"PromptsPending", "PromptsFailed"}
    bench.delete(TIER, "spoilt")
