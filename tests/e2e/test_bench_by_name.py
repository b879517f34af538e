# SPDX-License-Identifier: Apache-2.0
"""``kvtier bench`` on tiers by name: their engines in pods, reached through the API server, also after a restart."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import ci_tools
import pytest
from light_cluster import TIER, Tier
from pods import Bench, fetch

from kvtier_cli.app import main

LIGHT = {"accelerator": {"resource": "none"}, "memory": "64Mi", "cpu": "10m"}
RESTART = (
    'pods="-l kvtier.dev/tier=$KVTIER_BENCH_TARGET,app.kubernetes.io/component=engine"; '
    "kubectl delete pod $pods && kubectl wait pod $pods --for=condition=Ready --timeout=60s"
)


@pytest.fixture(autouse=True)
def _kubectl(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(bench.cluster.kubeconfig))
    kubectl = Path(str(ci_tools.load("helm").binary("kubectl")))
    monkeypatch.setenv("PATH", f"{kubectl.parent}:{os.environ['PATH']}")


def prompt_tokens(tier: Tier) -> list[int]:
    """Return how many tokens of prompts each engine has been sent."""
    pods = sorted(tier.pods(), key=lambda pod: str(pod["metadata"]["name"]))
    pages = [fetch(f"http://{pod['status']['podIP']}:8000/metrics") or "" for pod in pods]
    return [int(line.split()[1]) for page in pages for line in page.splitlines() if "prompt_tokens_total" in line]


@pytest.mark.timeout(300)
def test_tiers_are_compared_by_name_and_found_again_after_a_restart(
    bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    proof: dict[str, Any] = {"canary": {"enabled": False}}  # its prompts would be counted, too
    asked = Tier(bench, "asked", engine=LIGHT, replicas=2, proof=proof)
    beside = Tier(bench, "beside", engine=LIGHT, proof=proof, routing={"type": "ClientIP"})
    for tier in (asked, beside):
        tier.reaches("Ready", "True")
    words = ["asked", "beside", "-n", "default", "--tokens", "128", "--requests", "3", "--out", str(tmp_path / "out")]
    assert main(["bench", *words, "--between", RESTART, "-o", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    told = {(each["target"], each["pass"]): each for each in found["passes"]}
    assert {place: (each["requests"], each["failed"]) for place, each in told.items()} == dict.fromkeys(
        [(name, which) for name in ("asked", "beside") for which in ("single first", "single again")], (3, 0)
    )
    # Other processes than those that had computed them, so everything comes from the volume.
    assert [told["asked", which]["hits"] for which in ("single first", "single again")] == [{}, {"disk": 1.0}]
    assert told["beside", "single again"]["hits"] == {"disk": 1.0}
    assert found["answers"] == {"compared": 3, "same": 3, "different": []}
    # The Service of the one spreads connections, that of the other keeps a client where it is.
    assert prompt_tokens(asked) == [128, 256]  # the fourth prompt is the second engine's
    assert prompt_tokens(beside) == [384]
    table = (tmp_path / "out" / "bench.txt").read_text()
    assert "asked" in table
    assert "beside" in table
    assert json.loads((tmp_path / "out" / "bench.json").read_text()) == found
    assert (tmp_path / "out" / "bench.png").read_bytes().startswith(b"\x89PNG")
    for tier in (asked, beside):
        bench.delete(TIER, tier.name)


def test_a_tier_that_cannot_be_asked_is_named_with_what_to_do(
    bench: Bench, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["bench", "typo"]) == 2
    assert "no tier typo in namespace default" in capsys.readouterr().err
    Tier(bench, "resting", engine=LIGHT, replicas=0)
    assert main(["bench", "resting"]) == 2
    assert "none of its engines serves: kubectl kvtier status resting -n default" in capsys.readouterr().err
    bench.delete(TIER, "resting")
