# SPDX-License-Identifier: Apache-2.0
"""A tier is filled before its users come: ``kvtier warm`` through the tier's Service."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command import Command
from light_cluster import TIER, Tier
from pods import Bench
from waiting import until

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


@pytest.mark.timeout(300)
def test_every_block_of_every_prompt_comes_to_the_volume(
    bench: Bench, cold: Tier, tmp_path: Path, kvtier: Command
) -> None:
    chat = {"messages": [{"role": "user", "content": "y" * 64}]}
    file = write(tmp_path / "prompts.jsonl", *PROMPTS, chat)
    found = kvtier.json("warm", cold.name, str(file))
    assert (found["prompts"], found["answered"], found["failed"]) == (7, 7, 0)
    blocks = bench.cluster.cluster.data.root / "pvc/default/cold-blocks"
    until(lambda: len(list(blocks.rglob("*.kvb"))) >= CHUNKS * len(PROMPTS))
    # What a pod has logged outlives it, and has none of what it was asked.
    logs = [path.read_text() for path in (bench.cluster.cluster.data.root / "logs/default").rglob("*.log")]
    assert logs
    assert not any(SECRET_WORDS in text for text in logs)


def test_a_tier_without_engines_cannot_be_warmed(bench: Bench, tmp_path: Path, kvtier: Command) -> None:
    tier = Tier(bench, "engineless", volume={"existingClaim": "nobodys"})
    tier.reaches("VolumeBound", "False")
    assert "kvtier status engineless" in kvtier.fails(
        "warm", "engineless", str(write(tmp_path / "p.jsonl", PROMPTS[0])), code=2
    )
    bench.delete(TIER, "engineless")
