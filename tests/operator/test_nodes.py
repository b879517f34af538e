# SPDX-License-Identifier: Apache-2.0
"""Nodes are read for all tiers, and a share is taken of the right one; what a user adds to pods is merged in."""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from fake_cluster import FakeCluster, condition, run
from healthy_tier import NODE, SPEC, VIEW, check_problem, conditions, varied, with_pod
from hypothesis import given
from hypothesis import strategies as st
from live import Client
from tiers import DEPLOYMENT, NAMESPACE, TIER_KEY, engine_pod, made_by, plan_of, tier

from kvtier_localcluster.apiserver import ApiServerThread
from kvtier_operator import names
from kvtier_operator.api import parse
from kvtier_operator.api.reasons import Reason
from kvtier_operator.api.status_schema import Capacity
from kvtier_operator.errors import ClusterForbidden, ClusterUnavailable
from kvtier_operator.inventory import Inventory, from_objects
from kvtier_operator.parts import engine, pods
from kvtier_operator.parts.pods import lay_over
from kvtier_operator.plan import Decisions, Refusal, chunks, decide, decisions, engine_args, models, nodes
from kvtier_operator.plan.capacity import make_capacity
from kvtier_operator.plan.model_layout import EngineLayout, ModelLayout, make_model_layout
from kvtier_operator.snapshot import ContainerStatus, Engines, Nodes, Snapshot

TABLES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())

REF = names.tier_ref(tier())
GIB = 1 << 30


def node(name: str = "gpu-1", memory: str = "256Gi", *, gpus: int = 8, **more: Any) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": more.pop("labels", {})},
        "spec": more,
        "status": {
            "allocatable": {"memory": memory, "cpu": "64", "pods": "110", "nvidia.com/gpu": str(gpus)},
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }


def pod(name: str, memory: str, *, on: str = "gpu-1", gpus: int = 0, labels: dict[str, str] | None = None) -> Any:
    requests = {"memory": memory, **({"nvidia.com/gpu": str(gpus)} if gpus else {})}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": NAMESPACE, "labels": labels or {}},
        "spec": {"nodeName": on, "containers": [{"name": "main", "resources": {"requests": requests}}]},
        "status": {"phase": "Running"},
    }


def share(percent: str = "50%", **spec: Any) -> dict[str, Any]:
    return tier(cpu={"size": None, "fraction": percent}, **spec)


def seen(*objects: Any, kept: str = "") -> Snapshot:
    found = from_objects(objects) if objects else None
    return Snapshot(tier=REF, claim=None, engines=Engines(decisions=kept), pods=(), live={}, nodes=found)


def decided(body: dict[str, Any], *objects: Any, kept: str = "") -> Decisions | Refusal:
    return decide(parse(body), REF, seen(*objects, kept=kept))


OURS = pod("llama-engine-1", "200Gi", gpus=1, labels={**names.selector(REF), "pod-template-hash": "5f"})
OURS["metadata"]["ownerReferences"] = [made_by("llama-engine-5f")]
TAKEN = (node("gpu-2", "64Gi", gpus=1), pod("other", "32Gi", on="gpu-2", gpus=1))


@pytest.mark.parametrize(
    ("objects", "percent", "args", "gib"),
    [
        # The smallest matching node counts, after what runs there.
        ((node(), node("gpu-2", "128Gi"), node("c", "32Gi", gpus=0), pod("m", "8Gi", on="gpu-2")), "50%", [], 60),
        # The engines of the tier are not in their own way; a pod that only carries their labels is.
        ((node(), OURS), "50%", [], 128),
        ((node(), pod("copied", "200Gi", labels=names.selector(REF))), "50%", [], 28),
        # A node whose devices are taken does not count while others are free.
        ((node(), *TAKEN), "50%", [], 128),
        (TAKEN, "40%", [], 12.75),
        # Each engine core of a pod gets its part.
        ((node(),), "50%", ["--data-parallel-size", "4"], 32),
    ],
)
def test_a_share_is_of_the_node_on_which_an_engine_has_least_room(
    objects: tuple[Any, ...], percent: str, args: list[str], gib: float
) -> None:
    assert decided(share(percent, engine={"args": args}), *objects).cpu_bytes == gib * GIB


@pytest.mark.parametrize(("template", "spec", "matches"), TABLES["taints"])
def test_a_node_matches_as_for_the_scheduler(template: dict[str, Any], spec: dict[str, Any], matches: bool) -> None:
    parsed = parse(tier(engine={"podTemplate": template}))
    assert bool(nodes.matching(parsed, from_objects([node(**copy.deepcopy(spec))]))) is matches


@pytest.mark.parametrize(("key", "operator", "values", "matches"), TABLES["affinity"])
def test_required_affinity_counts(key: str, operator: str, values: list[str] | None, matches: bool) -> None:
    expression = {"key": key, "operator": operator, **({} if values is None else {"values": values})}
    terms = {"nodeSelectorTerms": [{"matchExpressions": [expression]}]}
    required = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}
    parsed = parse(tier(engine={"podTemplate": {"affinity": required}}))
    assert bool(nodes.matching(parsed, from_objects([node(labels={"zone": "a", "generation": "10"})]))) is matches


@pytest.mark.parametrize(("spec", "gpus", "reason", "words"), TABLES["undecided"])
def test_what_cannot_be_decided_is_refused_with_the_remedy(
    spec: dict[str, Any], gpus: list[int], reason: str, words: str
) -> None:
    found = decided(tier(**spec), *(node(gpus=each) for each in gpus))
    assert found.reason is Reason(reason)
    assert words in found.message


def test_what_was_decided_stays_until_a_field_changes_that_it_was_decided_for() -> None:
    first = decided(share(), node())
    kept = first.encode()
    smaller = (node(), node("gpu-2", "64Gi"))
    assert decided(share(), *smaller, kept=kept) == first
    assert decided(share(), kept=kept) == first
    assert decided(share(replicas=5), *smaller, kept=kept) == first
    assert decided(share("40%"), *smaller, kept=kept).cpu_bytes == 25.5 * GIB


def test_a_longer_table_of_models_changes_no_running_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    before = decided(tier())
    assert isinstance(before, Decisions)
    monkeypatch.setattr(models, "known", lambda _: None)
    assert decided(tier(), kept=before.encode()) == before
    assert decided(tier()) != before


@pytest.mark.parametrize("text", TABLES["spoilt_notes"])
def test_a_note_that_somebody_spoilt_counts_as_none(text: str) -> None:
    assert decisions.read(text) == decisions.Kept(cpu={}, model={})


def kv(name: str, **layout: Any) -> ModelLayout:
    found = make_model_layout(models.known(name).config, EngineLayout(**layout))
    assert isinstance(found, ModelLayout)
    return found


@pytest.mark.parametrize(("name", "layout", "blocks"), TABLES["blocks_of_a_file"])
def test_a_file_is_given_so_many_blocks(name: str, layout: dict[str, Any], blocks: int | None) -> None:
    assert chunks.choose_chunking(kv(name, **layout), asked_tokens=None).blocks == blocks


@pytest.mark.parametrize("name", models.NAMES)
@pytest.mark.parametrize("tp", [1, 8])
@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
def test_files_of_known_models_have_4_to_16_mebibytes(name: str, tp: int, kv_dtype: str) -> None:
    found = kv(name, tensor_parallel=tp, args=engine_args.read([f"--kv-cache-dtype={kv_dtype}"]))
    tokens = chunks.tokens_of(chunks.choose_chunking(found, asked_tokens=None), found)
    assert tokens % found.block_tokens == 0
    if not found.has_states and tokens < chunks.MOST_AUTO_TOKENS and found.block_tokens * found.group_bytes <= 8 << 20:
        assert 4 << 20 <= chunks.bytes_of(tokens, found) <= 16 << 20


@given(size=st.integers(0, 1 << 50), asked=st.integers(1, 64), name=st.sampled_from(models.NAMES))
def test_a_tier_never_holds_more_tokens_than_its_bytes_allow(size: int, asked: int, name: str) -> None:
    found = kv(name)
    for on_disk in (False, True):
        held = chunks.held_tokens(size, found, chunk_tokens=16 * asked, on_disk=on_disk)
        assert held * found.token_bytes <= size
        assert held % (16 * asked) == 0


def capacity(body: dict[str, Any]) -> Capacity:
    found = decided(body)
    assert isinstance(found, Decisions), found
    return make_capacity(parse(body), found, seen())


def test_a_config_of_its_own_goes_before_the_table_and_weights_without_room_are_remarked_upon() -> None:
    config = {"num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 64}
    assert capacity(tier(model={"config": config})).kv_bytes_per_token == 2 * 2 * 2 * 64 * 2
    assert capacity(tier(engine={"accelerator": {"memory": "8Gi"}})).notes == (
        "the weights leave no room for KV on the accelerators: use more of them or larger ones",
    )


def test_a_share_is_decided_once_and_written_to_the_deployment() -> None:
    cluster = FakeCluster(share(), node())
    inventory = Inventory(cluster, is_allowed=True, clock=iter(range(0, 100_000, 1000)).__next__)
    run(cluster, inventory=inventory)
    body = cluster.look(TIER_KEY)
    assert (body["status"]["sizing"]["cpuBytes"], body["status"]["sizing"]["nodeBytes"]) == (128 * GIB, 256 * GIB)
    before = cluster.look(DEPLOYMENT)
    cluster.put(pod("newcomer", "100Gi"))
    cluster.put(node("gpu-2", "96Gi"))
    assert run(cluster, inventory=inventory).written == ()
    assert ("list", "Pod") in cluster.calls  # the engines' own
    assert cluster.look(DEPLOYMENT) == before


def test_pods_of_others_are_read_only_for_a_share_and_nodes_not_by_an_operator_of_namespaces() -> None:
    def listings(body: dict[str, Any]) -> int:
        cluster = FakeCluster(body, node())
        run(cluster, inventory=Inventory(cluster, is_allowed=True, clock=lambda: 0.0))
        # Before and after writing, the pods of the tier are read.
        return cluster.calls.count(("list", "Pod")) - 2

    assert (listings(tier()), listings(share())) == (0, 1)
    cluster = FakeCluster(share(), node())
    run(cluster, inventory=Inventory(cluster, is_allowed=False, clock=lambda: 0.0))
    assert ("list", "Node") not in cluster.calls
    ready = condition(cluster, "Ready")
    assert (ready["status"], ready["reason"]) == ("False", "NodesUnknown")


def test_nodes_are_read_once_a_minute_a_refusal_lasts_and_an_outage_keeps_what_was_seen() -> None:
    cluster, now = FakeCluster(node()), [0.0]
    inventory = Inventory(cluster, is_allowed=True, clock=lambda: now[0])
    seen = inventory.look(with_pods=False)
    assert seen is not None
    for now[0] in (30, 59.9):
        assert inventory.look(with_pods=False) == seen
    assert cluster.calls == [("list", "Node")]
    cluster.broken["Node"], now[0] = ({"list"}, ClusterUnavailable("500")), 60.0
    assert inventory.look(with_pods=False) == seen
    assert cluster.calls == [("list", "Node")] * 2
    cluster.broken["Node"], now[0] = ({"list"}, ClusterForbidden("403")), 120.0
    assert inventory.look(with_pods=False) is None
    cluster.broken, now[0] = {}, 240.0
    assert inventory.look(with_pods=False) is None
    now[0] = 800.0
    assert inventory.look(with_pods=False) == seen


def test_a_pod_counts_as_the_scheduler_counts_it() -> None:
    body = pod("batch", "2Gi")
    body["spec"]["initContainers"] = [
        {"name": "sidecar", "restartPolicy": "Always", "resources": {"requests": {"memory": "1Gi"}}},
        {"name": "fetch", "resources": {"requests": {"memory": "9Gi"}}},
    ]
    body["spec"]["overhead"] = {"memory": "1Gi"}
    finished, unscheduled = pod("done", "99Gi"), pod("waiting", "99Gi")
    finished["status"]["phase"] = "Succeeded"
    unscheduled["spec"].pop("nodeName")
    others = {"kind": "ConfigMap", "metadata": {"name": "x"}}
    found = from_objects([{"kind": "List", "items": [body, finished, unscheduled, others]}])
    assert [each.memory_bytes // GIB for each in found.usage] == [11]
    assert found.nodes == ()


SIDECAR = {"name": "auth", "image": "envoy:1", "resources": {"requests": {"cpu": "500m", "memory": "1Gi"}}}


def pod_of(**template: Any) -> dict[str, Any]:
    return engine_pod(plan_of(tier(engine={"podTemplate": template})))


def container(pod: dict[str, Any], name: str = "engine") -> dict[str, Any]:
    return next(each for each in pod["containers"] if each["name"] == name)


CLAIMS = [{"name": "nic", "resourceClaimName": "nic"}]
ADDED: dict[str, Any] = TABLES["added"]


def test_a_container_is_merged_as_the_api_server_merges_two_who_apply_it(api: ApiServerThread) -> None:
    ours = TABLES["ours"]

    def applied(container: dict[str, Any], manager: str) -> dict[str, Any]:
        volumes = [{"name": name, "emptyDir": {}} for name in ("one", "two")]
        pod = {"containers": [container], "volumes": volumes, "resourceClaims": CLAIMS}
        template = {"metadata": {"labels": {"app": "x"}}, "spec": pod}
        body = {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": "d", "namespace": "default"},
            "spec": {"selector": {"matchLabels": {"app": "x"}}, "template": template},
        }
        path = f"/apis/apps/v1/namespaces/default/deployments/d?force=true&fieldManager={manager}"
        found = Client(api.url).call("PATCH", path, body, "application/apply-patch+yaml")
        return dict(found["spec"]["template"]["spec"]["containers"][0])

    applied(ours, "operator")
    by_server = applied({"name": "engine", **ADDED}, "user")
    by_us = lay_over(ours, ADDED)
    assert {field: by_server[field] for field in by_us} == by_us


def test_pods_on_the_nodes_network_resolve_services_and_a_node_must_have_room_for_the_sidecar() -> None:
    pod = pod_of(hostNetwork=True)
    assert (pod["hostNetwork"], pod["dnsPolicy"]) == (True, "ClusterFirstWithHostNet")
    assert pod_of(hostNetwork=True, dnsPolicy="Default")["dnsPolicy"] == "Default"
    pod = pod_of(containers=[{"name": "driver", "image": "d", "securityContext": {"privileged": True}}])
    assert container(pod, "driver")["securityContext"] == {"privileged": True}
    room = replace(NODE, memory_bytes=VIEW.stage.sizing.memory_bytes + (1 << 29))
    for found, is_enough in ((SPEC, True), (parse(tier(engine={"podTemplate": {"containers": [SIDECAR]}})), False)):
        snapshot = replace(VIEW.stage.snapshot, nodes=Nodes(nodes=(room,)), pods=(), engines=Engines())
        fits = conditions(varied(VIEW, spec=found, snapshot=snapshot))["SizingFits"]
        assert (fits["status"] != "False") is is_enough
    assert "spec.engine.podTemplate.containers" in fits["message"]
    view = with_pod(containers=(ContainerStatus(name="fetch", image="f", exit_code=0, exit_reason="Completed"),))
    assert conditions(view)["EnginesReady"]["reason"] == "EnginesStarting"


@pytest.mark.parametrize(("template", "objection"), TABLES["unrestricted"])
def test_what_leaves_the_restricted_standard_is_said_by_its_field(template: dict[str, Any], objection: str) -> None:
    said = pods.warning(parse(tier(engine={"podTemplate": template})).engine.pod_template)
    assert objection in said
    assert "pod-security.kubernetes.io/enforce" in said


def test_nodes_must_have_every_counted_resource_and_room_for_the_sidecars() -> None:
    def limited(name: str, resource: str, amount: str, **more: str) -> dict[str, Any]:
        return {"name": name, "resources": {"limits": {resource: amount}}, **more}

    template = {
        "containers": [limited("engine", "rdma/hca", "2"), SIDECAR],
        "initContainers": [
            limited("once", "memory", "9Gi", image="i"),
            limited("log", "memory", "1Gi", image="i", restartPolicy="Always"),
        ],
    }
    asked = parse(tier(engine={"podTemplate": template}))
    assert nodes.sidecar_requests(asked) == (2 << 30, 500)
    assert not nodes.matching(asked, Nodes(nodes=(NODE,)))
    assert nodes.matching(asked, Nodes(nodes=(replace(NODE, devices={"nvidia.com/gpu": 8, "rdma/hca": 2}),)))
    assert "2 rdma/hca" in nodes.wanted_text(asked)
    assert nodes.share_inputs(asked) != nodes.share_inputs(SPEC)


@pytest.mark.parametrize(("changes", "reason", "words"), TABLES["trouble_of_a_sidecar"])
def test_trouble_of_a_sidecar_names_the_sidecar_and_its_field(changes: dict[str, Any], reason: str, words: str) -> None:
    sidecar = ContainerStatus(name="auth", image="envoy", **changes)
    view = with_pod(containers=(ContainerStatus(name="engine", image="v"), sidecar))
    check_problem(view, "EnginesReady", Reason(reason), words)


@pytest.mark.parametrize(("probe", "tries"), TABLES["starts"])
def test_a_start_has_its_time_whatever_the_period_of_the_probe_is(probe: dict[str, int], tries: int) -> None:
    assert plan_of(tier()).sizing.startup_seconds == 362
    found = container(pod_of(containers=[{"name": "engine", "startupProbe": probe}]))["startupProbe"]
    assert found["failureThreshold"] == tries


@pytest.mark.parametrize(
    ("template", "grace", "shutdown"), [({}, 90, 60), ({"terminationGracePeriodSeconds": 180}, 180, 150)]
)
def test_what_an_engine_takes_to_end_fits_into_its_pods(template: dict[str, Any], grace: int, shutdown: int) -> None:
    pod = pod_of(**template)
    (waits,) = (int(each) for each in re.findall(r"sleep\((\d+)\)", str(container(pod)["lifecycle"]["preStop"])))
    assert pod["terminationGracePeriodSeconds"] == grace
    assert f"--shutdown-timeout={shutdown}" in container(pod)["args"]
    assert waits + shutdown + engine.TEARDOWN_SECONDS <= grace
