# SPDX-License-Identifier: Apache-2.0
"""Each connector as it is rendered: read by vLLM's own parser and classes, and by those of the programs behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvtier_operator import names
from kvtier_operator.api import parse
from kvtier_operator.parts import render
from kvtier_operator.plan import make_unchecked_plan

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).parent / "golden"
READER = Path(__file__).with_name("vllm_reads.py")
RELEASES = ("0.32.0", "0.33.0")

BOTH = {"role": "kv_both", "policy": "recompute"}
CHILD = {"role": "kv_both", "policy": "fail"}
CASES: dict[str, dict[str, Any]] = {
    "minimal": {"class": "KVTierConnector", "spec": "KVTierSpec", "tiers": {"SharedVolumeTier": []}, **BOTH},
    "vllm-offloading": {"class": "OffloadingConnector", "spec": "CPUOffloadingSpec", "tiers": {}, **BOTH},
    "vllm-tiering": {"class": "OffloadingConnector", "spec": "TieringOffloadingSpec", "tiers": {"fs": []}, **BOTH},
    "simple-cpu": {"class": "SimpleCPUOffloadConnector", "hybrid_kv": True, "keeps_hybrid_kv": True, **BOTH},
    "simple-cpu-disk": {"class": "SimpleCPUOffloadConnector", "hybrid_kv": True, "keeps_hybrid_kv": True, **BOTH},
    "lmcache": {"class": "LMCacheConnectorV1", "hybrid_kv": False, **BOTH},
    "lmcache-trial": {"class": "LMCacheConnectorV1", **BOTH},
    "flexkv": {"class": "FlexKVConnectorV1", **BOTH},
    "mooncake": {"class": "MooncakeStoreConnector", **BOTH},
}
CHILDREN = {
    "hybrid-lmcache": [
        {"class": "OffloadingConnector", "spec": "CPUOffloadingSpec", **CHILD},
        {"class": "LMCacheConnectorV1", **CHILD},
    ],
    "hybrid-nixl": [
        {"class": "NixlPullConnector", **CHILD, "role": "kv_consumer"},
        {"class": "KVTierConnector", "spec": "KVTierSpec", "tiers": {"SharedVolumeTier": []}, **CHILD},
    ],
}


def objects(case: str) -> list[dict[str, Any]]:
    body = yaml.safe_load((GOLDEN / case / "tier.yaml").read_text())
    return list(render(make_unchecked_plan(parse(body), names.tier_ref(body), connector_image="connector:test")))


def engine(case: str) -> dict[str, Any]:
    deployment = next(
        each for each in objects(case) if each["kind"] == "Deployment" and each["metadata"]["name"].endswith("-engine")
    )
    pod = deployment["spec"]["template"]["spec"]
    return dict(next(each for each in pod["containers"] if each["name"] == names.ENGINE_CONTAINER))


def environment(case: str) -> dict[str, Any]:
    return {each["name"]: each.get("value", each.get("valueFrom")) for each in engine(case)["env"]}


@pytest.fixture(scope="module", params=RELEASES)
def vllm_reads(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Return what a release of vLLM makes of each rendered command line, by the name of the case."""
    release = subprocess.run(
        [sys.executable, ROOT / ".ci/vllm_release.py", request.param], check=True, capture_output=True, text=True
    ).stdout.strip()
    ours = f"{ROOT / 'connector'}:{ROOT / 'operator'}"
    asked = {case: engine(case)["args"] for case in (*CASES, *CHILDREN, "lmcache-processes")}
    done = subprocess.run(
        [sys.executable, READER],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{release}:{ours}" if release else ours, "VLLM_LOGGING_LEVEL": "ERROR"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answers = json.loads(done.stdout.splitlines()[-1])
    assert answers.keys() == asked.keys()
    return dict(answers)


def test_vllm_reads_each_command_line_as_it_was_meant(vllm_reads: dict[str, Any]) -> None:
    for case, expected in CASES.items():
        answer = vllm_reads[case]
        assert {key: answer.get(key) for key in expected} == expected, case


def test_vllm_finds_the_children_of_a_hybrid(vllm_reads: dict[str, Any]) -> None:
    for case, expected in CHILDREN.items():
        answer = vllm_reads[case]
        assert (answer["class"], answer["policy"]) == ("MultiConnector", "recompute")
        found = [{key: child.get(key) for key in one} for child, one in zip(answer["children"], expected, strict=True)]
        assert found == expected, case


def test_vllm_knows_the_connector_of_lmcaches_cache_server(vllm_reads: dict[str, Any]) -> None:
    answer = vllm_reads["lmcache-processes"]
    assert answer["class"] in {"LMCacheMPConnector", "LMCacheMPConnectorUpstream", "needs lmcache"}
    assert answer["document"]["kv_connector_extra_config"]["lmcache.mp.autostart"] is True


def test_nothing_of_the_document_is_lost_on_the_way(vllm_reads: dict[str, Any]) -> None:
    for case, answer in vllm_reads.items():
        (word,) = (word for word in engine(case)["args"] if word.startswith("--kv-transfer-config="))
        written = json.loads(word.partition("=")[2])
        found = answer["document"]
        assert found["kv_connector"] == written["kv_connector"]
        assert found["kv_connector_extra_config"] == written.get("kv_connector_extra_config", {})
