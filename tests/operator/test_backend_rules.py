# SPDX-License-Identifier: Apache-2.0
"""Every field that a connector does not honour is refused by name, by the API server and by the operator alike."""

from __future__ import annotations

from typing import Any

import pytest
from admission import Admission, both_refuse, both_take, tier

from kvtier_operator.api import connector_spec

NATIVE = ("Bundled", "VLLMOffloading", "VLLMTiering")
ALL = (*NATIVE, "SimpleCPU", "LMCache")
VALUES: dict[str, Any] = {
    "disk.mode": "ReadOnly",
    "disk.encryption": {"secretName": "k", "activeKey": "a"},
    "disk.tenants.from": "CacheSalt",
    "disk.admission.minReuse": 2,
    "disk.admission.minTokens": 512,
    "disk.splitHits": "Off",
    "disk.budget.maxBytes": "1Ti",
    "disk.budget.minBytes": "1Gi",
    "disk.budget.ttl": "24h",
    "disk.blockTokens": 64,
    "disk.canonicalLayout": True,
    "disk.compression": "Auto",
    "generations.acrossReleases": "Verified",
    "cpu.evictionPolicy": "arc",
}


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("path", connector_spec.LIMITED)
def test_a_field_is_honoured_or_refused_by_name(path: str, kind: str, server: Admission) -> None:
    body = tier({"spec.connector": {"type": kind}, f"spec.{path}": VALUES[path]})
    if path in next(row for row in connector_spec.KINDS if row.type == kind).honours:
        both_take(server, body)
        return
    at, message = both_refuse(server, body)
    assert at == f"spec.{path}"
    assert "is not honoured by this spec.connector.type" in message
    assert "Bundled" in message


def test_behind_nixl_kvtiers_own_connector_honours_what_it_always_does(server: Admission) -> None:
    for path, value in VALUES.items():
        body = tier({"spec.connector": {"type": "Hybrid", "hybrid": {"nixl": {}}}, f"spec.{path}": value})
        both_take(server, body)


ON_DISK = {"localDisk": {"size": "100Gi"}}


@pytest.mark.parametrize(
    ("connector", "at"),
    [
        ({"type": "LMCache", "lmcache": ON_DISK}, "spec.connector.lmcache.localDisk"),
        ({"type": "Hybrid", "hybrid": {"lmcache": ON_DISK}}, "spec.connector.hybrid.lmcache.localDisk"),
    ],
)
@pytest.mark.parametrize(
    ("args", "is_taken"),
    [
        ([], True),
        (["--data-parallel-size=1"], True),
        (["--data-parallel-size=8", "--data-parallel-size-local=1"], True),
        (["-dp", "8", "-dpl=1"], True),
        (["--data-parallel-rpc-port=4000", "--dtype=bfloat16"], True),
        (["--data-parallel-size=11"], False),
        (["--data-parallel-size", "2"], False),
        (["--data_parallel_size=2"], False),
        (["-dp=2"], False),
        (["--data-parallel-size=8", "--data-parallel-size-local=2"], False),
    ],
    ids=str,
)
def test_engine_cores_of_one_pod_do_not_write_into_one_directory(
    connector: dict[str, Any], at: str, args: list[str], is_taken: bool, server: Admission
) -> None:
    body = tier({"spec.connector": connector, "spec.engine.args": args})
    if is_taken:
        both_take(server, body)
        return
    found, message = both_refuse(server, body)
    assert (found, "raise spec.replicas instead" in message) == (at, True)


def test_a_volume_cannot_be_taken_away_and_may_be_added(server: Admission) -> None:
    with_volume = tier({"spec.connector": {"type": "SimpleCPU"}})
    without = tier({"spec.connector": {"type": "SimpleCPU"}, "spec.volume": "~remove"})
    assert server.refusals(without) == []
    ((at, message),) = server.refusals(without, with_volume)
    assert at == "spec.volume"
    assert message.startswith("cannot be removed: the claim holds blocks")
    assert server.refusals(with_volume, without) == []


@pytest.mark.parametrize(
    ("image", "mode", "is_taken"),
    [
        ("registry.example/lmcache/vllm-openai:v0.5.3", "MultiProcess", False),
        ("registry.example/lmcache/vllm-openai:v0.5.5-cu13", "MultiProcess", False),
        ("registry.example/lmcache/vllm-openai:0.4.1", "MultiProcess", False),
        ("registry.example/lmcache/vllm-openai:v0.5.0@sha256:" + "0" * 64, "MultiProcess", False),
        ("lmcache/vllm-openai:v0.5.6", "MultiProcess", True),
        ("lmcache/vllm-openai:v0.5.60", "MultiProcess", True),
        ("lmcache/vllm-openai:v0.50.1", "MultiProcess", True),
        ("lmcache/vllm-openai:latest", "MultiProcess", True),
        ("example/vllm-openai:v0.5.3", "MultiProcess", True),
        ("lmcache/vllm-openai:v0.5.3", "InProcess", True),
    ],
)
def test_an_image_whose_lmcache_cannot_start_its_cache_server_is_refused(
    image: str, mode: str, is_taken: bool, server: Admission
) -> None:
    body = tier({"spec.connector": {"type": "LMCache", "lmcache": {"mode": mode}}, "spec.engine.image": image})
    if is_taken:
        both_take(server, body)
        return
    at, message = both_refuse(server, body)
    assert (at, "LMCache 0.5.6" in message) == ("spec.engine.image", True)
