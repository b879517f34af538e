# SPDX-License-Identifier: Apache-2.0
"""Servers beside the engines: how requests come to them, and the Redis and the Mooncake master of a connector."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from fake_cluster import FakeCluster, condition, edited, reconciled, run, serving
from healthy_tier import READY_POD, REF, UNREADY_POD, VIEW, changed, check_verdict, conditions, varied
from test_reconcile import of_somebody
from tiers import CLAIM, DEPLOYMENT, JANITOR, JANITOR_CONFIG, LEASE, NAMESPACE, TIER_KEY, made_by, merge, rendered, tier
from vllm_router.launch_router import parse_router_args

from kvtier_operator import names
from kvtier_operator.api import parse
from kvtier_operator.conditions import Progress
from kvtier_operator.errors import ClusterError, ClusterForbidden, ClusterUnavailable, KindMissing, SpecInvalid
from kvtier_operator.names import Manifest, ObjectKey
from kvtier_operator.parts.connectors import stores
from kvtier_operator.plan import TierPlan
from kvtier_operator.snapshot import ContainerStatus, Engines, Pod

TABLES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())

POOL = ObjectKey(api_version=names.INFERENCE_POOL, kind=names.POOL_KIND, name="llama-engine")
ENGINE_SERVICE = ObjectKey(api_version="v1", kind="Service", name=names.engine(REF))
ROUTER = {"type": "Router"}
WITH_POOL = {"inferencePool": {"endpointPicker": {"name": "epp"}}}


def made(kind: str, name: str, **routing: Any) -> Manifest:
    return rendered(tier(routing=routing))[kind, name]


def test_the_service_keeps_clients_with_one_engine_where_it_is_told_to() -> None:
    assert made("Service", "llama-engine")["spec"]["sessionAffinity"] == "None"
    sticky = made("Service", "llama-engine", type="ClientIP", clientIP={"timeoutSeconds": 60})["spec"]
    assert sticky["sessionAffinity"] == "ClientIP"
    assert sticky["sessionAffinityConfig"] == {"clientIP": {"timeoutSeconds": 60}}


@pytest.mark.parametrize("policy", ["consistent_hash", "cache_aware", "power_of_two", "round_robin", "random"])
def test_vllms_router_takes_the_rendered_command_line_for_what_it_is_meant(policy: str) -> None:
    asked = {"policy": policy, "args": ["--cache-threshold", "0.5"]}
    router = made("Deployment", "llama-router", type="Router", router=asked)["spec"]["template"]
    found = parse_router_args(router["spec"]["containers"][0]["args"])
    assert (found.policy, found.port, found.prometheus_port) == (policy, 8000, 29000)
    assert found.service_discovery
    assert (found.service_discovery_namespace, found.service_discovery_port) == ("serving", 8000)
    assert (found.cache_threshold, found.worker_urls) == (0.5, [])
    engine = made("Deployment", "llama-engine", **ROUTER)["spec"]["template"]
    assert found.selector.items() <= engine["metadata"]["labels"].items()
    assert not found.selector.items() <= router["metadata"]["labels"].items()


def test_a_router_runs_as_the_pod_template_says() -> None:
    template = {"securityContext": {"runAsUser": 4711, "runAsGroup": 12}}
    found = {
        name: each["spec"]["template"]["spec"]["securityContext"]
        for (kind, name), each in rendered(tier(routing=ROUTER, engine={"podTemplate": template})).items()
        if kind == "Deployment"
    }
    assert {context["runAsUser"] for context in found.values()} == {4711}
    of_volume = {"fsGroup", "fsGroupChangePolicy"}
    # The router mounts nothing.
    assert {name for name in found if of_volume <= found[name].keys()} == {"llama-engine", "llama-janitor"}
    assert len(found) == 3


@pytest.mark.parametrize(("routing", "field", "words"), TABLES["refused"])
def test_what_cannot_be_routed_is_refused_by_name(routing: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(SpecInvalid, match=words) as refused:
        parse(tier(routing=routing))
    assert field in str(refused.value)


def router_pod(**container: Any) -> Pod:
    broken = ContainerStatus(name="router", image="r:1", **container)
    return replace(READY_POD, name="llama-router-0", is_ready=not container, containers=(broken,))


def routed(*pods: Pod, **snapshot: Any) -> Progress:
    return varied(changed(routers=pods, **snapshot), spec=parse(tier(routing=ROUTER)))


@pytest.mark.parametrize(
    ("view", "verdict", "reason", "words"),
    [
        (VIEW, "True", "RoutedByService", "Service/llama-engine spreads connections"),
        (varied(VIEW, spec=parse(tier(routing={"type": "ClientIP"}))), "True", "RoutedByClient", "address"),
        (routed(router_pod()), "True", "RouterReady", "1 of 2 routers serve behind Service/llama-router"),
        (routed(), "False", "RouterStarting", "kubectl logs deployment/llama-router"),
        (routed(engines=Engines(generation=1)), "Unknown", "NoRoute", "no engine to send requests to"),
        *((routed(*(router_pod(**each) for each in pods)), "False", *told) for pods, *told in TABLES["broken"]),
    ],
)
def test_routing_is_judged(view: Progress, verdict: str, reason: str, words: str) -> None:
    found = check_verdict(view, "RoutingReady", verdict, reason, words)
    assert verdict != "False" or found["Ready"]["reason"] == reason


def routed_by(cluster: FakeCluster) -> Manifest:
    run(cluster)
    return dict((cluster.look(TIER_KEY) or {})["status"])


def test_an_inference_pool_is_made_on_request_and_goes_with_it() -> None:
    cluster = FakeCluster(tier(routing=WITH_POOL))
    assert routed_by(cluster)["routing"] == {
        "service": "llama-engine.serving.svc:8000",
        "inferencePool": "llama-engine",
    }
    made = cluster.look(POOL)
    run(cluster)
    assert (cluster.look(POOL) or {})["metadata"]["resourceVersion"] == made["metadata"]["resourceVersion"]
    cluster.edit(TIER_KEY, {"spec": {"routing": {"inferencePool": None}}})
    assert "inferencePool" not in routed_by(cluster)["routing"]
    assert cluster.look(POOL) is None


@pytest.mark.parametrize(
    ("why", "reason", "seconds"),
    [
        (ClusterUnavailable("cannot apply InferencePool/llama-engine: 503"), "PoolFailed", 1),
        (ClusterForbidden("cannot apply InferencePool/llama-engine: 403"), "PoolFailed", 60),
        (KindMissing("cannot apply InferencePool/llama-engine: 404"), "PoolKindMissing", 5),
    ],
)
def test_an_inference_pool_that_cannot_be_made_is_tried_again(why: ClusterError, reason: str, seconds: float) -> None:
    cluster = FakeCluster(tier(routing=WITH_POOL))
    cluster.broken[names.POOL_KIND] = ({"apply"}, why)
    outcome = run(cluster)
    assert (outcome.failure, outcome.poll_after) == (None, seconds)
    routing = condition(cluster, "RoutingReady")
    assert (routing["status"], routing["reason"]) == ("False", reason)
    assert "is tried again soon" in routing["message"]
    assert ("install the definitions of Gateway API's inference" in routing["message"]) == (reason == "PoolKindMissing")
    assert {names.deployment_key(names.engine(REF)), ENGINE_SERVICE} <= cluster.existing()
    cluster.broken.clear()
    outcome = run(cluster)
    assert (outcome.failure, outcome.poll_after) == (None, None)
    assert cluster.look(POOL) is not None


def test_an_inference_pool_of_somebody_else_is_left_and_errors_of_ours_are_told_once() -> None:
    cluster, told = FakeCluster(tier(routing=WITH_POOL)), []
    for why in ("cannot apply: read tcp 10.0.0.1:40001: connection reset", "cannot apply: 504"):
        cluster.broken[names.POOL_KIND] = ({"apply"}, ClusterUnavailable(why))
        told.append(routed_by(cluster))
    assert told[0] == told[1]  # each change of the status would wake the tier at once
    cluster = FakeCluster(tier(routing=WITH_POOL), of_somebody(POOL))
    run(cluster)
    found = condition(cluster, "RoutingReady")
    assert found["reason"] == "PoolFailed"
    assert "delete or rename it" in found["message"]
    assert found["message"].endswith("; or remove spec.routing.inferencePool")
    assert "spec" not in (cluster.look(POOL) or {})


REDIS = ObjectKey(api_version="apps/v1", kind="Deployment", name="llama-redis")
WITH_REDIS: dict[str, Any] = {"type": "LMCache", "lmcache": {"redis": {"trial": {"memory": "1Gi"}}}}
WITH_MASTER: dict[str, Any] = {"type": "Mooncake", "mooncake": {"config": {"protocol": "tcp"}, "master": {}}}


def pod_template(cluster: FakeCluster) -> Manifest:
    return dict(cluster.look(REDIS)["spec"]["template"])


def test_a_redis_that_runs_is_repaired_and_left_alone_by_another_release_until_the_spec_asks_for_another_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of_this_release = stores.servers

    def servers(plan: TierPlan) -> tuple[Manifest, ...]:
        made = of_this_release(plan)
        for each in made:
            if each["kind"] == "Deployment":
                each["spec"]["template"]["spec"]["containers"][0]["args"].append("--new")
        return made

    cluster = reconciled(connector=WITH_REDIS)
    before = pod_template(cluster)
    cluster.edit(REDIS, {"spec": {"template": {"spec": {"containers": [{"name": "redis", "image": "theirs"}]}}}})
    run(cluster)
    assert pod_template(cluster)["spec"]["containers"][0]["image"] == before["spec"]["containers"][0]["image"]
    before = pod_template(cluster)
    monkeypatch.setattr(stores, "servers", servers)
    edited(cluster, replicas=3)
    assert pod_template(cluster) == before
    edited(cluster, connector={"type": "LMCache", "lmcache": {"redis": {"trial": {"memory": "2Gi"}}}})
    (container,) = pod_template(cluster)["spec"]["containers"]
    assert "--new" in container["args"]
    assert str(2 << 30) in container["args"]


@pytest.mark.parametrize(("connector", "name"), [(WITH_REDIS, "llama-redis"), (WITH_MASTER, "llama-mooncake")])
def test_the_server_of_a_connector_is_judged(connector: dict[str, Any], name: str) -> None:
    spec = parse(tier(connector=connector))

    def judged(*pods: Any) -> tuple[str, str, str, str]:
        found = conditions(varied(changed(stores=pods), spec=spec))
        store = found["StoreReady"]
        return store["status"], store["reason"], store["message"], found["Ready"]["reason"]

    assert judged(READY_POD)[:2] == ("True", "StoreReady")
    status, reason, message, ready = judged()
    assert (status, reason, ready) == ("False", "StoreStarting", "StoreStarting")
    assert f"kubectl describe deployment/{name}" in message
    pulls = ContainerStatus(name="redis", image="redis:no", waiting_reason="ImagePullBackOff")
    assert judged(replace(UNREADY_POD, containers=(pulls,)))[1] == "StoreImagePullFailed"
    assert judged(replace(UNREADY_POD, is_scheduled=False))[1] == "StoreNotScheduled"


def test_pods_of_the_server_are_read() -> None:
    cluster = reconciled(connector=WITH_REDIS)
    unscheduled = {"type": "PodScheduled", "status": "False", "message": "no room"}
    pod = merge(pod_template(cluster), {"metadata": {"name": "llama-redis-x", "namespace": NAMESPACE}})
    pod["metadata"]["labels"]["pod-template-hash"] = "abc"
    pod["metadata"]["ownerReferences"] = [made_by("llama-redis-abc")]
    cluster.put({"apiVersion": "v1", "kind": "Pod", **pod, "status": {"conditions": [unscheduled]}})
    run(cluster)
    told = condition(cluster, "StoreReady")
    assert (told["reason"], "no room" in told["message"]) == ("StoreNotScheduled", True)


def generation(cluster: FakeCluster) -> str:
    return str(cluster.look(TIER_KEY)["status"]["generation"]["current"])


def test_a_tier_with_another_connector_keeps_its_claim_and_loses_its_janitor() -> None:
    cluster = reconciled()
    before = generation(cluster)
    assert JANITOR in cluster.existing()
    edited(cluster, connector={"type": "SimpleCPU"})
    assert CLAIM in cluster.existing()
    assert not {JANITOR, LEASE} & cluster.existing()
    assert generation(cluster) != before
    volume = condition(cluster, "VolumeBound")
    assert (volume["status"], volume["reason"]) == ("Unknown", "NotApplicable")
    assert "spec.volume is kept and not mounted" in volume["message"]
    assert [each["name"] for each in cluster.look(TIER_KEY)["status"]["tiers"]] == ["cpu"]
    edited(cluster, connector={"type": "Bundled"})
    assert JANITOR in cluster.existing()
    assert generation(cluster) == before


COUNTED = {"usedBytes": 1 << 30, "blocks": 9}


def test_what_the_status_says_of_generations_follows_the_connector_and_who_counts_them() -> None:
    cluster = reconciled()
    bundled = generation(cluster)
    cluster.edit(TIER_KEY, {"status": {"generations": [{"digest": bundled, "role": "Current", **COUNTED}]}})
    run(cluster)
    assert cluster.look(TIER_KEY)["status"]["generation"]["root"].endswith(bundled)

    edited(cluster, connector={"type": "VLLMTiering"})
    told = cluster.look(TIER_KEY)["status"]
    assert told["generations"] == [{"digest": bundled, "role": "Previous", **COUNTED}]
    assert told["generation"]["root"].endswith(generation(cluster))

    edited(cluster, janitor={"enabled": False})
    assert "generations" not in cluster.look(TIER_KEY)["status"]
    edited(cluster, janitor={"enabled": True}, connector={"type": "SimpleCPU"})
    told = cluster.look(TIER_KEY)["status"]
    assert "generations" not in told
    assert set(told["generation"]) == {"current"}  # its blocks are in no directory of the volume


def test_a_tier_without_a_volume_becomes_ready_and_vllms_own_files_get_a_janitor() -> None:
    cluster = reconciled(connector={"type": "VLLMOffloading"}, volume=None)
    assert CLAIM not in cluster.existing()
    serving(cluster)
    run(cluster)
    ready = condition(cluster, "Ready")
    assert (ready["status"], ready["reason"]) == ("True", "Ready")
    assert condition(cluster, "SharedCacheVerified")["reason"] == "NotApplicable"
    cluster = FakeCluster(tier(connector={"type": "LMCache", "lmcache": {"redis": {"trial": {}}}}, volume=None))
    outcome = run(cluster)
    assert outcome.written.index(REDIS) < outcome.written.index(DEPLOYMENT)
    edited(cluster, connector={"type": "VLLMOffloading", "lmcache": None})
    assert REDIS not in cluster.existing()
    # No pod mounts a volume then, so a claim that is not there is not missed.
    cluster = reconciled(connector={"type": "SimpleCPU"}, volume={"existingClaim": "kv", "claim": None})
    assert DEPLOYMENT in cluster.existing()
    cluster = reconciled(connector={"type": "VLLMTiering"})
    assert JANITOR in cluster.existing()
    assert '"layout": "vllm-fs"' in cluster.look(JANITOR_CONFIG)["data"]["janitor.json"]
    assert condition(cluster, "JanitorHealthy")["reason"] != "NotApplicable"
