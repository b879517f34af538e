# SPDX-License-Identifier: Apache-2.0
"""``kvtier`` and ``kubectl kvtier`` on tiers by name: what a person types, and what they read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import ci_tools
import pytest
import yaml
from command import Command
from light_cluster import TIER, Tier
from pods import Bench
from waiting import until

TABLES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())

BLOCKS = 5
SECRET = "hunter2-is-secret"


@pytest.fixture(scope="module")
def typed(bench: Bench) -> Tier:
    env = [{"name": "MY_API_KEY", "value": SECRET}, {"name": "VLLM_LOGGING_LEVEL", "value": "INFO"}]
    tier = Tier(bench, "typed", engine={"env": env}, disk={"budget": {"maxBytes": "1Gi"}})
    tier.reaches("Ready", "True")
    for number in range(BLOCKS):
        # The first blocks wait for the janitor's permit.
        until(lambda number=number: "Stored" in tier.ask(f"store/{number}")["outcome"])
    return tier


@pytest.fixture(autouse=True)
def _kubeconfig(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(bench.cluster.kubeconfig))


@pytest.mark.timeout(600)
def test_a_name_and_the_directory_behind_it_give_the_same_answer(bench: Bench, typed: Tier, kvtier: Command) -> None:
    directory = bench.cluster.cluster.data.root / "pvc/default/typed-blocks"
    by_name, by_directory = (kvtier.json("check", target) for target in ("typed", str(directory)))
    assert by_name == by_directory
    assert (by_name["blocks"], by_name["problems"]) == (BLOCKS, [])
    assert kvtier.json("inspect", "typed")["blocks"] == BLOCKS


def test_nothing_goes_until_yes_and_engines_then_miss_it(typed: Tier, kvtier: Command) -> None:
    until(lambda: "Stored" in typed.ask("store/doomed")["outcome"])
    pinned = next(each for each in typed.ask("state")["root"].split("/")[::-1] if each)
    assert kvtier.json("purge", "typed", "--generation", pinned)["dryRun"] is True
    assert typed.ask("load/doomed")["is_hit"]
    assert kvtier.json("purge", "typed", "--generation", pinned, "--yes")["blocks"] == BLOCKS + 1
    assert not typed.ask("load/doomed")["is_hit"]
    # An engine learns what went when it looks at the volume again.
    for number in range(BLOCKS):
        until(lambda number=number: "Stored" in typed.ask(f"store/{number}")["outcome"])


def test_kubectl_runs_it_as_its_plugin_and_completes_it(bench: Bench, typed: Tier) -> None:
    kubectl = str(ci_tools.load("helm").binary("kubectl"))
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([kubectl, *words], env=environment, capture_output=True, text=True, check=False)

    done = run("kvtier", "inspect", "typed", "-n", "default")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{BLOCKS} blocks, ")
    assert run("kvtier", "prune").returncode == 2
    assert "Usage: kubectl kvtier" in run("kvtier", "--help").stdout
    assert "purge\tRemove blocks" in run("__complete", "kvtier", "pur").stdout


@pytest.mark.parametrize(("words", "code", "said"), TABLES["mistakes"])
def test_a_mistake_is_named_with_its_remedy_and_changes_nothing(
    typed: Tier, kvtier: Command, words: list[str], code: int, said: str
) -> None:
    before = typed.bench.get(TIER, typed.name)
    assert said in kvtier.fails(*words, code=code)
    after = typed.bench.get(TIER, typed.name)
    assert (after["spec"], after["metadata"].get("annotations")) == (
        before["spec"],
        before["metadata"].get("annotations"),
    )


def test_one_screen_says_how_a_tier_stands_and_what_to_do(typed: Tier, kvtier: Command) -> None:
    for word in ("Ready=True", "CONDITIONS", "VolumeBound", "ENGINES  1 of 1 ready", "SIZES AND USE", "HITS", "NEXT"):
        assert word in kvtier("status", "typed", "-v")
    # A busy machine may keep a pod from answering once, and it is then said which one.
    usage = until(lambda: (found := kvtier.json("status", "typed"))["silent"] == [] and found["usage"])
    assert usage["tier"] == "default/typed"
    assert "default/typed" in kvtier("status", "-A", code=None)


def test_a_tier_that_is_not_ready_is_an_exit_code_and_a_remedy_and_cannot_be_warmed(
    bench: Bench, kvtier: Command, tmp_path: Path
) -> None:
    Tier(bench, "unready", volume={"existingClaim": "nobodys"}).reaches("VolumeBound", "False")
    assert "VolumeBound: PersistentVolumeClaim/nobodys does not exist yet" in kvtier("status", "unready", code=1)
    prompts = str(write(tmp_path / "p.jsonl", PROMPTS[0]))
    assert "kvtier status unready" in kvtier.fails("warm", "unready", prompts, code=2)
    bench.delete(TIER, "unready")


def test_the_operator_is_told_to_pause_change_the_mode_and_restart(typed: Tier, kvtier: Command) -> None:
    assert kvtier.json("pause", "typed")["paused"] is True
    typed.reaches("Paused", "True")
    assert kvtier.json("pause", "typed", "--off")["paused"] is False
    typed.reaches("Paused", "False")
    assert kvtier.json("mode", "typed", "readonly")["mode"] == "ReadOnly"
    until(lambda: typed.ask("state")["mode"] == "ReadOnly")
    assert kvtier.json("mode", "typed", "ReadWrite")["mode"] == "ReadWrite"
    before = {pod["metadata"]["name"] for pod in typed.pods()}
    assert set(kvtier.json("restart", "typed")["engines"]) == before
    assert {pod["metadata"]["name"] for pod in typed.pods()} == before
    assert kvtier.json("restart", "typed", "--yes")["dryRun"] is False
    until(lambda: not before & {pod["metadata"]["name"] for pod in typed.pods()})
    typed.reaches("Ready", "True")


def test_a_report_holds_what_support_needs_and_nothing_secret(typed: Tier, tmp_path: Path, kvtier: Command) -> None:
    file = tmp_path / "report.tar.gz"
    assert kvtier.json("report", "typed", "--file", str(file))["unread"] == []
    assert file.stat().st_mode & 0o077 == 0
    with tarfile.open(file) as archive:
        parts = {each.name.removeprefix("kvtier-report/"): archive.extractfile(each) for each in archive}
        texts = {name: part.read().decode() for name, part in parts.items() if part is not None}
    files = {"tier.yaml", "status.txt", "pods.yaml"}
    assert texts.keys() >= {"doctor.json", *(f"default.typed/{name}" for name in files)}
    assert any(name.endswith("/engine.log") for name in texts)
    assert [name for name, text in texts.items() if SECRET in text] == []
    assert "value: INFO" in texts["default.typed/tier.yaml"]
    assert "is there already" in kvtier.fails("report", "typed", "--file", str(file), code=2)


def test_the_doctor_names_what_is_missing(kvtier: Command) -> None:
    found = {each["what"]: each for each in kvtier.json("doctor")}
    assert (found["cluster"]["state"], found["definition"]["state"]) == ("ok", "ok")
    assert "one outside the cluster has looked at" in found["operator"]["message"]
    missing = {each["what"]: each for each in kvtier.json("doctor", "-n", "kube-system", code=1)}
    assert (missing["operator"]["state"], "kvtier run" in missing["operator"]["remedy"]) == ("missing", True)


CHUNKS = 3
SECRET_WORDS = "the-words-of-a-prompt"
PROMPTS = [
    {"prompt": f"{number} {SECRET_WORDS} ".ljust(64 * CHUNKS, "x"), "max_tokens": 500, "stream": True}
    for number in range(6)
]


@pytest.fixture(scope="module")
def cold(bench: Bench) -> Tier:
    tier = Tier(bench, "cold", disk={"budget": {"maxBytes": "1Gi"}})
    tier.reaches("Available", "True")
    until(lambda: "Stored" in tier.ask("store/first")["outcome"])
    return tier


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


@pytest.mark.timeout(600)
def test_every_block_of_a_prompt_comes_to_the_volume(bench: Bench, cold: Tier, tmp_path: Path, kvtier: Command) -> None:
    file = write(tmp_path / "prompts.jsonl", *PROMPTS, {"messages": [{"role": "user", "content": "y" * 64}]})
    found = kvtier.json("warm", cold.name, str(file))
    assert (found["prompts"], found["answered"], found["failed"]) == (7, 7, 0)
    blocks = bench.cluster.cluster.data.root / "pvc/default/cold-blocks"
    until(lambda: len(list(blocks.rglob("*.kvb"))) > CHUNKS * len(PROMPTS))
    # What a pod has logged outlives it, and has none of what it was asked.
    logs = [path.read_text() for path in (bench.cluster.cluster.data.root / "logs/default").rglob("*.log")]
    assert logs
    assert not any(SECRET_WORDS in text for text in logs)
