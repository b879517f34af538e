# SPDX-License-Identifier: Apache-2.0
"""How requests come to the engines: what is rendered, what vLLM's router takes, what is said of faults."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from fake_cluster import FakeCluster, condition, run
from healthy_tier import NOON, READY_POD, REF, VIEW, changed, check_verdict, varied
from test_reconcile import of_somebody
from tiers import TIER_KEY, rendered, tier
from vllm_router.launch_router import parse_router_args

from kvtier_operator import names, status
from kvtier_operator.api import parse
from kvtier_operator.conditions import Progress
from kvtier_operator.errors import ClusterError, ClusterForbidden, ClusterUnavailable, KindMissing, SpecInvalid
from kvtier_operator.names import Manifest, ObjectKey
from kvtier_operator.snapshot import ContainerStatus, Engines, Pod

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


@pytest.mark.parametrize(
    ("routing", "field", "words"),
    [
        ({"router": {}}, "spec.routing.router", "no request would go through: set spec.routing.type to Router"),
        ({"type": "Router", "clientIP": {}}, "spec.routing.clientIP", "set spec.routing.type to ClientIP"),
        ({"type": "Router", "router": {"args": ["--policy=random"]}}, "args", "set spec.routing.router.policy"),
        ({"type": "Router", "router": {"args": ["--worker-url", "http://x"]}}, "args", "by their labels"),
        ({"type": "Sticky"}, "spec.routing.type", "Router"),
        ({"type": "Router", "router": {"image": ""}}, "spec.routing.router.image", "at least 1 character"),
        ({"inferencePool": {}}, "spec.routing.inferencePool.endpointPicker", "required"),
    ],
)
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
        (
            routed(router_pod(), router_pod(waiting_reason="ImagePullBackOff", waiting_message="not found")),
            "False",
            "RouterImagePullFailed",
            "ImagePullBackOff: not found): correct spec.routing.router.image",
        ),
        (
            routed(router_pod(waiting_reason="CrashLoopBackOff", exit_code=2, exit_message="invalid choice: 'x'")),
            "False",
            "RouterFailing",
            "exit code 2: invalid choice: 'x'; `kubectl logs llama-router-0 --previous`",
        ),
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
def test_an_inference_pool_that_cannot_be_made_is_tried_again_soon(
    why: ClusterError, reason: str, seconds: float
) -> None:
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


def test_an_error_of_the_pool_that_says_something_else_each_time_is_told_once() -> None:
    cluster, told = FakeCluster(tier(routing=WITH_POOL)), []
    for why in ("cannot apply: read tcp 10.0.0.1:40001: connection reset", "cannot apply: 504"):
        cluster.broken[names.POOL_KIND] = ({"apply"}, ClusterUnavailable(why))
        told.append(routed_by(cluster))
    assert told[0] == told[1]  # each change of the status would wake the tier at once


def test_an_inference_pool_of_somebody_else_is_left_as_it_is() -> None:
    cluster = FakeCluster(tier(routing=WITH_POOL), of_somebody(POOL))
    run(cluster)
    found = condition(cluster, "RoutingReady")
    assert found["reason"] == "PoolFailed"
    assert "delete or rename it" in found["message"]
    assert found["message"].endswith("; or remove spec.routing.inferencePool")
    assert "spec" not in (cluster.look(POOL) or {})


def test_where_requests_go_is_in_the_status() -> None:
    found = status.report(routed(router_pod()), {}, now=NOON)
    assert found["routing"] == {"service": "llama-router.serving.svc:8000"}
