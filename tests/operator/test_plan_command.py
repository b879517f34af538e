# SPDX-License-Identifier: Apache-2.0
"""``kvtier plan``, as a person reads it: the pages of plans/, and what an edit costs.

A folder of plans/ is a case, planned for the nodes of plans/nodes.yaml. ``pytest --update-golden`` rewrites
expected.txt; the diff of that file is what a reviewer judges.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from command import Command
from live import body
from tiers import NOON, tier

from kvtier_localcluster.apiserver import ApiServerThread
from kvtier_operator.kube.client import connect
from kvtier_operator.names import TierName
from kvtier_operator.reconcile import Inputs, reconcile

ROOT = Path(__file__).parents[2]
PLANS = Path(__file__).parent / "plans"
NODES = PLANS / "nodes.yaml"
CASES = sorted(folder.name for folder in PLANS.iterdir() if folder.is_dir())


@pytest.mark.parametrize("case", CASES)
def test_a_plan_reads_as_it_was_reviewed(case: str, request: pytest.FixtureRequest, kvtier: Command) -> None:
    code, expected = 1 if case == "too-large" else 0, PLANS / case / "expected.txt"
    text = kvtier("plan", str(PLANS / case / "tier.yaml"), "--nodes", str(NODES), code=code)
    assert all(len(line) <= 132 for line in text.splitlines())
    if request.config.getoption("--update-golden"):
        expected.write_text(text)
    assert text == expected.read_text()


def test_the_example_in_the_documentation_is_what_is_printed(request: pytest.FixtureRequest) -> None:
    printed = (PLANS / "llama-8b-share" / "expected.txt").read_text().splitlines()
    example = "\n".join(f"    {line}".rstrip() for line in printed)
    page = ROOT / "docs" / "sizing.md"
    before, marker, rest = page.read_text().partition("compared by a test -->\n")
    _, end, after = rest.partition("\n\nRead it from the top.")
    wanted = before + marker + example + end + after
    if request.config.getoption("--update-golden"):
        page.write_text(wanted)
    assert page.read_text() == wanted


def write(path: Path, *bodies: dict[str, Any]) -> str:
    path.write_text(yaml.safe_dump_all(bodies))
    return str(path)


def test_the_numbers_for_programs_are_those_of_the_status(tmp_path: Path, kvtier: Command) -> None:
    (found,) = kvtier.json("plan", write(tmp_path / "tier.yaml", tier()))
    assert (found["tier"], found["sizing"]["cpuTokens"], found["sizing"]["memoryBytes"]) == (
        "serving/llama",
        524288,
        331 << 28,
    )
    assert "nodes" not in found


def test_a_config_beside_it_tells_what_the_name_does_not(tmp_path: Path, kvtier: Command) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 64}))
    file = write(tmp_path / "tier.yaml", tier(model={"name": "/models/mine"}))
    assert "4 layers x 2 x 64 x 4 KV heads x 2 B" in kvtier("plan", file, "--config", str(config))


def test_several_tiers_make_several_pages(tmp_path: Path, kvtier: Command) -> None:
    second = tier()
    second["metadata"]["name"] = "other"
    listed = {"apiVersion": "v1", "kind": "List", "items": [tier(), second]}
    text = kvtier("plan", write(tmp_path / "tiers.yaml", listed))
    assert text.startswith("serving/llama: ")
    assert "\n\nserving/other: " in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("TIER --config text.json", "text.json: is not JSON: "),
        ("TIER --config numbers.json", "is not a model's config.json: that is one JSON object"),
        ("TIER --nodes TIER", "holds no nodes: kubectl get nodes,pods -A -o yaml prints"),
        ("image.png", "is not text in UTF-8"),
        ("TIER --nodes node.yaml", "holds a node or a pod that cannot be read (KeyError('name'))"),
        ("TIER TIER", "takes one FILE; to compare two, add --diff"),
        ("--diff TIER TIER TIER", "takes OLD and NEW, or one FILE"),
        ("share.yaml", "spec.cpu.fraction: is a share of nodes that are not known"),
    ],
)
def test_what_cannot_be_planned_is_said_in_words(
    words: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kvtier: Command
) -> None:
    monkeypatch.chdir(tmp_path)
    write(Path("tier.yaml"), tier())
    write(Path("share.yaml"), tier(cpu={"size": None, "fraction": "60%"}))
    Path("text.json").write_text("{")
    Path("numbers.json").write_text("[1]")
    Path("node.yaml").write_text("{apiVersion: v1, kind: Node, metadata: {}}")
    Path("image.png").write_bytes(b"\x89PNG\xff")
    code = 2 if "takes" in message else 1
    assert message in kvtier.fails("plan", *words.replace("TIER", "tier.yaml").split(), code=code)


def test_an_edit_is_told_field_by_field_and_in_sum(tmp_path: Path, kvtier: Command) -> None:
    old = tier(disk={"budget": {"maxBytes": "1Ti"}})
    old["status"] = {"generation": {"current": "x"}, "tiers": [{"name": "disk", "usedBytes": 5 << 40}]}
    new = tier(model={"revision": "abc"}, replicas=3)
    text = kvtier("plan", "--diff", write(tmp_path / "old.yaml", old), write(tmp_path / "new.yaml", new))
    assert "spec.model.revision        main    abc    empty cache, restart\n" in text
    assert "spec.replicas              2       3      no restart\n" in text
    assert "(5 TiB on the volume) cannot be read" in " ".join(text.split())
    assert "replaces 2 engine pods, one after another: spec.model.revision" in text


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        ({}, "serving/llama: nothing changes"),
        ({"replicas": 5}, "only adds 3 engine pods"),
        ({"replicas": 1}, "only removes 1 engine pod"),
        ({"paused": True}, "restarts no engine"),
    ],
)
def test_an_edit_that_costs_nothing_says_so(edit: dict[str, Any], words: str, tmp_path: Path, kvtier: Command) -> None:
    files = [write(tmp_path / "old.yaml", tier()), write(tmp_path / "new.yaml", tier(**edit))]
    assert words in kvtier("plan", "--diff", *files)


def test_an_edit_is_told_to_programs_in_the_words_of_the_api(tmp_path: Path, kvtier: Command) -> None:
    edited = tier(model={"name": "org/other", "config": {"num_hidden_layers": 4}})
    files = [write(tmp_path / "a", tier()), write(tmp_path / "b", edited)]
    (found,) = kvtier.json("plan", "--diff", *files)
    assert found["generation"] != found["newGeneration"]
    assert {"restartedPods", "replicas", "warmBytes", "warnings"} <= found.keys()
    changes = {each["field"]: each for each in found["changes"]}
    assert changes["spec.model.name"]["isNewGeneration"] is True
    assert changes["spec.model.config"]["after"] == {"num_hidden_layers": 4}


def test_tiers_that_come_and_go_are_named(tmp_path: Path, kvtier: Command) -> None:
    other = tier()
    other["metadata"]["name"] = "other"
    assert kvtier.json("plan", "--diff", write(tmp_path / "a", tier()), write(tmp_path / "b", other)) == [
        {"tier": "serving/llama", "only": "before"},
        {"tier": "serving/other", "only": "after"},
    ]


def test_a_file_is_compared_with_what_stands_in_the_cluster(
    tmp_path: Path, kvtier: Command, api: ApiServerThread
) -> None:
    api.create(body())
    reconcile(connect(), TierName(namespace="default", name="llama"), Inputs(connector_image="c:1", clock=lambda: NOON))
    text = kvtier("plan", "--diff", write(tmp_path / "new.yaml", body(cpu={"size": "32Gi"})))
    assert "spec.cpu.size" in text
    assert "keeps the cache: generation " in text
    assert "replaces 2 engine pods, one after another: spec.cpu.size changed" in text


@pytest.mark.parametrize("command", [["render"], ["plan"], ["plan", "-o", "json"]])
def test_the_same_bytes_whatever_the_hash_seed_of_python(command: list[str]) -> None:
    def output(seed: str) -> bytes:
        env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        full = str(ROOT / "crds" / "samples" / "full.yaml")
        return subprocess.run(
            [sys.executable, "-m", "kvtier_cli", *command, full], env=env, capture_output=True, check=True
        ).stdout

    assert output("1") == output("2")
