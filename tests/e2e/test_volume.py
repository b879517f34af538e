# SPDX-License-Identifier: Apache-2.0
"""A tier over its life, and its volume: real operator, real janitor, real store; only vLLM is stood in for."""

from __future__ import annotations

import base64
import subprocess
from collections.abc import Iterator
from typing import Any

import ci_tools
import pytest
from light_cluster import TIER, Tier
from pods import Bench
from waiting import until

from kvtier_localcluster import kinds
from kvtier_localcluster.kinds import Kind

LEASE = Kind("coordination.k8s.io/v1", "Lease", "leases")


def secret(**keys: int) -> dict[str, Any]:
    data = {name: base64.b64encode(bytes([byte]) * 32).decode() for name, byte in keys.items()}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "kv-keys"}, "data": data}


@pytest.fixture(scope="module")
def tiers(bench: Bench) -> dict[str, Tier]:
    """Return tiers with blocks in them, all made at once: each waits for its janitor's next look."""
    small = {"maxBytes": "16Mi", "highWatermark": "70%", "lowWatermark": "40%", "minFree": "0%"}
    made = {
        "llama": Tier(bench, "llama", disk={"budget": {"maxBytes": "1Gi"}}),
        "handed-on": Tier(bench, "handed-on"),
        "small": Tier(bench, "small", disk={"budget": small}),
        "private": Tier(bench, "private", disk={"encryption": {"secretName": "kv-keys", "activeKey": "first"}}),
    }
    for name, blocks in (("llama", 2), ("handed-on", 1), ("small", 13)):
        made[name].reaches("Ready", "True")
        for number in range(blocks):
            # The first blocks wait for the janitor's permit.
            until(lambda name=name, number=number: "Stored" in made[name].ask(f"store/{number}")["outcome"])
    return made


@pytest.mark.timeout(600)
def test_an_earlier_generation_stays_and_a_stranger_is_named(tiers: dict[str, Tier]) -> None:
    tier = tiers["handed-on"]
    old = tier.status()["generation"]["current"]
    tier.patch(hash={"seed": "7"})
    tier.reaches("Ready", "True")
    current = tier.status()["generation"]["current"]
    until(lambda: tier.ask("state")["root"].endswith(current))
    assert not tier.ask("load/0")["is_hit"]
    until(lambda: "Stored" in tier.ask("store/1")["outcome"])
    until(lambda: [each["blocks"] for each in tier.status().get("generations", ())] == [1, 1])
    found = [(each["digest"], each["role"]) for each in tier.status()["generations"]]
    assert found == [(current, "Current"), (old, "Previous")]

    # Only the engine knows that it is another one: it serves without the volume, and the status names the field.
    tier.patch(engine={"env": [{"name": "STAND_IN", "value": "another"}]})
    assert "another engine.stand_in" in tier.reaches("DiskHealthy", "False", "Stranger")["message"]
    # The one before serves until that one does.
    until(lambda: tier.ask("store/2")["outcome"] == "refused")


@pytest.mark.timeout(600)
def test_an_engine_gets_no_requests_before_it_can_serve_with_its_volume(bench: Bench) -> None:
    tier = Tier(bench, "patient", engine={"env": [{"name": "STAND_IN_WAITS", "value": "1"}]})
    assert tier.ask("state")["mode"] == "ReadWrite"
    pod = tier.pods()[0]["metadata"]["name"]
    words = "Startup probe failed: 1 of 1 disk tiers wait for the volume: default/patient: the volume has not answered"
    until(lambda: any(words in message for _, message in bench.events(pod)))
    status = tier.pods()[0]["status"]["containerStatuses"][0]
    assert (status["started"], status["ready"], status["restartCount"]) == (False, False, 0)

    tier.ask("attach")
    tier.reaches("Ready", "True")
    assert tier.pods()[0]["metadata"]["name"] == pod
    bench.delete(TIER, "patient")


@pytest.mark.timeout(600)
def test_a_volume_is_measured_and_switched_while_engines_run(bench: Bench, tiers: dict[str, Tier]) -> None:
    tier = tiers["llama"]
    process = tier.ask("state")["pid"]
    until(lambda: tier.disk().get("usedBytes", 0) >= 2 << 20)
    assert (tier.disk()["capacityBytes"], tier.disk()["blocks"]) == (1 << 30, 2)
    tier.reaches("DiskWithinBudget", "True", "WithinBudget")
    tier.reaches("DiskHealthy", "True", "Healthy")
    (generation,) = tier.status()["generations"]
    assert (generation["digest"], generation["role"]) == (tier.status()["generation"]["current"], "Current")
    assert bench.get(LEASE, "llama-janitor")["spec"]["holderIdentity"]

    tier.patch(disk={"mode": "ReadOnly"})
    until(lambda: tier.ask("state")["mode"] == "ReadOnly")
    assert tier.ask("store/new")["outcome"] == "refused"
    assert tier.ask("load/0")["is_hit"]
    tier.patch(disk={"mode": "ReadWrite", "budget": {"maxBytes": "2Gi"}})
    until(lambda: tier.disk().get("capacityBytes") == 2 << 30)
    until(lambda: tier.ask("state")["mode"] == "ReadWrite")
    assert tier.ask("state")["pid"] == process

    bench.delete(TIER, "llama")
    until(lambda: not [pod for part in ("engine", "janitor") for pod in tier.pods(part)])
    until(lambda: bench.get(LEASE, "llama-janitor") is None)


@pytest.mark.timeout(600)
def test_a_key_is_awaited_and_changed_while_engines_run(bench: Bench, tiers: dict[str, Tier]) -> None:
    tier = tiers["private"]
    tier.reaches("EnginesReady", "False")
    assert not until(lambda: next((pod["status"].get("containerStatuses") for pod in tier.pods()), None))[0]["ready"]
    bench.create(kinds.SECRET, secret(first=1))
    tier.reaches("Ready", "True")
    process = tier.ask("state")["pid"]
    until(lambda: "Stored" in tier.ask("store/a")["outcome"])

    bench.patch(kinds.SECRET, "kv-keys", {"data": secret(second=2)["data"]})
    tier.patch(disk={"encryption": {"activeKey": "second"}})
    until(lambda: tier.ask("state")["key"] == "second")
    until(lambda: "Stored" in tier.ask("store/b")["outcome"])
    assert tier.ask("load/a")["is_hit"]
    bench.patch(kinds.SECRET, "kv-keys", {"data": {"first": None}})
    until(lambda: not tier.ask("load/a")["is_hit"])
    assert tier.ask("load/b")["is_hit"]

    tier.patch(disk={"encryption": {"activeKey": "third"}})
    assert "no entry third" in tier.reaches("DiskHealthy", "False", "KeyMissing")["message"]
    tier.patch(disk={"encryption": {"activeKey": "second"}})
    tier.reaches("DiskHealthy", "True")
    assert tier.ask("state")["pid"] == process


@pytest.mark.timeout(600)
def test_a_budget_is_kept_and_what_goes_is_a_miss(tiers: dict[str, Tier]) -> None:
    tier = tiers["small"]
    until(lambda: 0 < tier.disk().get("usedBytes", 0) < 8 << 20)
    tier.reaches("DiskWithinBudget", "True")
    assert not tier.ask("load/0")["is_hit"]
    assert tier.ask("load/12")["is_hit"]
    # The janitor permits stores again once it has counted what it removed.
    until(lambda: "Stored" in tier.ask("store/0")["outcome"])


@pytest.mark.timeout(600)
def test_replicas_of_one_node_share_a_volume_that_one_node_can_mount(bench: Bench) -> None:
    volume = {"claim": {"size": "10Gi", "accessModes": ["ReadWriteOnce"]}, "deletionPolicy": "Delete"}
    tier = Tier(bench, "one-node", replicas=2, volume=volume)
    tier.reaches("Ready", "True")
    until(lambda: "Stored" in tier.ask("store/a", engine=0)["outcome"])
    assert tier.ask("load/a", engine=1)["is_hit"]
    engines = [tier.ask("state", engine=number)["pid"] for number in (0, 1)]
    assert engines[0] != engines[1]
    (node,) = {pod["spec"]["nodeName"] for component in ("engine", "janitor") for pod in tier.pods(component)}
    terms = [pod["spec"]["affinity"]["podAffinity"] for pod in (*tier.pods(), *tier.pods("janitor"))]
    assert node
    assert len(terms) == 3


KUBECTL = ci_tools.load("helm").binary("kubectl")


@pytest.fixture(scope="module")
def scaled(bench: Bench) -> Iterator[Tier]:
    tier = Tier(bench, "scaled")
    tier.reaches("Available", "True")
    yield tier
    tier.patch(replicas=0)


def scale(tier: Tier, replicas: int) -> None:
    """Scale as an autoscaler does: through the subresource."""
    config = f"--kubeconfig={tier.bench.cluster.kubeconfig}"
    command = [KUBECTL, config, "scale", f"kvt/{tier.name}", f"--replicas={replicas}"]
    subprocess.run(command, check=True, capture_output=True)


@pytest.mark.timeout(600)
def test_a_tier_that_comes_back_from_none_finds_its_blocks(bench: Bench, scaled: Tier) -> None:
    until(lambda: "Stored" in scaled.ask("store/prompt")["outcome"])
    scale(scaled, 0)
    assert scaled.reaches("Available", "False", "ScaledToZero")["message"] == "spec.replicas is 0: no engine serves"
    until(lambda: scaled.pods() == [])
    until(lambda: (scaled.status()["replicas"], scaled.status()["readyReplicas"]) == (0, 0))
    # Nothing is wrong with it, so nothing may wake anybody.
    assert scaled.condition("Stalled")["status"] == "False"
    assert scaled.condition("JanitorHealthy")["status"] != "False"
    assert bench.get(kinds.PERSISTENT_VOLUME_CLAIM, "scaled-blocks") is not None
    scale(scaled, 1)
    scaled.reaches("Available", "True", "Serving")
    assert scaled.ask("load/prompt")["is_hit"] is True
    until(lambda: scaled.status()["readyReplicas"] == 1)


@pytest.mark.timeout(600)
def test_engines_without_their_redis_serve_and_are_told_of(bench: Bench) -> None:
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "redis"}, "stringData": {"password": "secret"}}
    bench.create(kinds.SECRET, secret)
    redis: dict[str, Any] = {"url": "redis://127.0.0.1:1", "passwordSecretRef": {"name": "redis"}}
    tier = Tier(
        bench,
        "unshared",
        replicas=1,
        engine={"accelerator": {"resource": "nvidia.com/gpu"}},
        connector={"type": "LMCache", "lmcache": {"redis": redis}},
        volume=None,
    )
    tier.reaches("Available", "True")
    told = tier.reaches("SharedCacheVerified", "Unknown", "StoreUnreachable")
    (pod,) = tier.pods()
    for part in (pod["metadata"]["name"], "Connection refused", "spec.connector.lmcache.redis", "kvtier.dev/restart"):
        assert part in told["message"]
    assert "secret" not in told["message"].replace("Secret", "")
    assert tier.ask("v1/models") == {"data": [{"id": "org/model"}]}
    tier.reaches("Ready", "True")
    tier.patch(replicas=0)
