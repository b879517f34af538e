# SPDX-License-Identifier: Apache-2.0
"""A tier whose engines another owner makes: what is applied for it, and what its conditions say of the pods."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from fake_cluster import FakeCluster
from tiers import CONFIG, DEPLOYMENT, JANITOR, NAMESPACE, NOON, RUNNING, made_by, merge, tier

from kvtier_operator import names
from kvtier_operator.api import parse
from kvtier_operator.gather import gather
from kvtier_operator.names import ObjectKey, TierName, TierRef
from kvtier_operator.observe.canary import Chunk
from kvtier_operator.observe.targets import make_observation_plan
from kvtier_operator.parts.external.attach import Target, attach
from kvtier_operator.parts.external.pods import PodClaims
from kvtier_operator.plan import make_unchecked_plan
from kvtier_operator.reconcile import Inputs, reconcile

SELECTOR = {"app": "vllm"}
CONTAINER = ("containers", ("name", "vllm"))
POD = {
    "containers": [
        {
            "name": "vllm",
            "image": "vllm/vllm-openai:v0.32.0",
            "args": ["--model=meta-llama/Llama-3.1-8B-Instruct", "--max-model-len=8192"],
            "resources": {"limits": {"nvidia.com/gpu": "1"}},
        },
        {"name": "istio-proxy", "image": "istio/proxyv2"},
    ]
}


def external(**spec: Any) -> dict[str, Any]:
    engine = {"external": {"selector": {"matchLabels": SELECTOR}}, "args": ["--max-model-len=8192"]}
    return merge(tier(replicas=None, engine=engine), {"spec": spec})


def attached(pod: dict[str, Any], body: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return a pod with what the tier puts into it."""
    body = external() if body is None else body
    plan = make_unchecked_plan(parse(body), names.tier_ref(body), connector_image="connector:test")
    target = Target(pod=pod, container=CONTAINER)
    return attach(plan, target).put_into(target)


class World:
    """A cluster with tiers, and an operator that goes on from reconcile to reconcile."""

    def __init__(self, *bodies: dict[str, Any]) -> None:
        self.cluster = FakeCluster(*(bodies or (external(),)))
        self.inputs = Inputs(connector_image="connector:test", clock=lambda: NOON)

    def add(self, name: str, spec: dict[str, Any], *, ready: bool = True, labels: dict[str, str] = SELECTOR) -> None:
        status = copy.deepcopy(RUNNING)
        status["conditions"][1]["status"] = str(ready)
        metadata = {
            "name": name,
            "namespace": NAMESPACE,
            "labels": {**labels, names.LABEL_TEMPLATE_HASH: "5d4f"},
            "ownerReferences": [made_by("vllm-5d4f")],
        }
        self.cluster.put({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec, "status": status})

    def condition(self, kind: str, name: str = "llama") -> tuple[str, str, str]:
        """Reconcile the tier twice, as its own writes wake it, and return a condition."""
        for _ in range(2):
            for claim in [key for key in self.cluster.existing() if key.kind == names.CLAIM_KIND]:
                self.cluster.edit(claim, {"status": {"phase": "Bound", "capacity": {"storage": "2Ti"}}})
            result = reconcile(self.cluster, TierName(namespace=NAMESPACE, name=name), self.inputs)
            assert result.failure is None
        body = self.cluster.look(ObjectKey(api_version=names.API_VERSION, kind=names.KIND, name=name))
        assert body is not None
        found = next(each for each in body["status"]["conditions"] if each["type"] == kind)
        return found["status"], found["reason"], found["message"]


def test_the_operator_makes_everything_but_the_engines_and_their_service() -> None:
    world = World()
    world.condition("Ready")
    kinds = {(key.kind, key.name) for key in world.cluster.existing()}
    assert {("PersistentVolumeClaim", "llama-blocks"), ("ConfigMap", "llama-connector")} < kinds
    assert JANITOR in world.cluster.existing()
    assert not kinds & {(kind, "llama-engine") for kind in ("Deployment", "Service", "PodDisruptionBudget")}


def test_engines_of_ours_go_when_a_tier_is_given_engines_of_another_owner() -> None:
    world = World(tier())
    world.condition("Ready")
    assert ("Deployment", "llama-engine") in {(key.kind, key.name) for key in world.cluster.existing()}
    key = ObjectKey(api_version=names.API_VERSION, kind=names.KIND, name="llama")
    world.cluster.edit(key, {"spec": external()["spec"] | {"replicas": None}})
    world.condition("Ready")
    assert ("Deployment", "llama-engine") not in {(key.kind, key.name) for key in world.cluster.existing()}


def test_a_deployment_that_is_left_since_no_tier_controls_it_is_not_counted() -> None:
    world = World(tier())
    world.condition("Ready")
    world.cluster.edit(DEPLOYMENT, {"metadata": {"ownerReferences": None}})
    world.cluster.edit(KEY, {"spec": external()["spec"] | {"replicas": None}})
    world.add("one", attached(POD))
    assert world.condition("Available")[2] == "1 of 1 attached engines serve"
    assert DEPLOYMENT in world.cluster.existing()


def test_a_selector_that_finds_nothing_says_so_with_the_command_that_shows_it() -> None:
    status, reason, message = World().condition("EnginesReady")
    assert (status, reason) == ("False", "NoPods")
    assert f"kubectl get pods -n {NAMESPACE} -l app=vllm" in message


def test_attached_pods_make_a_tier_ready_and_are_counted() -> None:
    world = World()
    for name in ("one", "two"):
        world.add(name, attached(POD))
    assert world.condition("EnginesReady")[:2] == ("True", "EnginesReady")
    assert world.condition("HashSeedConsistent")[:2] == ("True", "SeedsAgree")
    assert world.condition("Available")[2] == "2 of 2 attached engines serve"
    assert world.condition("SizingFits")[:2] == ("Unknown", "NotApplicable")
    body = world.cluster.look(ObjectKey(api_version=names.API_VERSION, kind=names.KIND, name="llama"))
    assert body is not None
    assert (body["status"]["replicas"], body["status"]["readyReplicas"]) == (2, 2)


def test_pods_that_are_not_attached_serve_no_tier() -> None:
    world = World()
    world.add("stranger", POD)
    assert world.condition("Available")[:2] == ("False", "Unavailable")
    world.add("engine", attached(POD))
    status, _, message = world.condition("Available")
    assert status == "True"
    assert message.startswith(
        "1 of 1 attached engines serve; 1 more of the selector's pods are no engines of this tier"
    )
    body = world.cluster.look(KEY)
    assert body is not None
    assert (body["status"]["replicas"], body["status"]["readyReplicas"]) == (1, 1)


def _without(pod: dict[str, Any], path: str) -> dict[str, Any]:
    changed = copy.deepcopy(pod)
    engine = changed["containers"][0]
    field, _, name = path.partition(":")
    place = changed if field in {"volumes", "initContainers"} else engine
    place[field] = [each for each in place[field] if name not in str(each)]
    return changed


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("initContainers:install-connector", "initContainers[install-connector]"),
        ("volumes:kvtier-blocks", "volumes[kvtier-blocks]"),
        ("volumeMounts:/etc/kvtier", "volumeMounts[/etc/kvtier]"),
        ("env:PYTHONHASHSEED", "env[PYTHONHASHSEED]"),
        ("env:PYTHONPATH", "env[PYTHONPATH]"),
        ("args:kv-transfer-config", "--kv-transfer-config"),
        ("args:scheduler-cls", "--scheduler-cls"),
    ],
)
def test_a_pod_that_lacks_something_is_named_with_its_container_and_the_command_that_mends_it(
    path: str, words: str
) -> None:
    world = World()
    world.add("good", attached(POD))
    world.add("poor", _without(attached(POD), path))
    status, reason, message = world.condition("EnginesReady")
    assert (status, reason) == ("False", "NotAttached")
    assert "container vllm of pod poor" in message
    assert words in message
    assert f"`kvtier attach llama -n {NAMESPACE} deployment/vllm`" in message
    assert world.condition("Ready")[:2] == ("False", "NotAttached")


def test_a_pod_of_another_model_is_named_although_it_has_everything() -> None:
    other = attached(POD)
    other["containers"][0]["args"][0] = "--model=org/other"
    world = World()
    world.add("other", other)
    status, reason, message = world.condition("EnginesReady")
    assert (status, reason) == ("False", "NotAttached")
    assert "--model: is org/other" in message
    assert "spec.model.name of the tier is meta-llama/Llama-3.1-8B-Instruct" in message


def test_pods_whose_engine_cannot_be_told_need_the_name_of_its_container() -> None:
    pod = {"containers": [{"name": "a", "image": "example.org/a"}, {"name": "b", "image": "example.org/b"}]}
    world = World()
    world.add("two", pod)
    assert "spec.engine.external.container" in world.condition("EnginesReady")[2]


def test_an_edit_of_the_tier_tells_which_pods_have_the_configuration_of_before() -> None:
    world = World(external(disk={"admission": {"minTokens": 512}}))
    world.add("early", attached(POD))
    assert world.condition("EnginesReady")[0] == "True"
    status, reason, message = world.condition("UpToDate")
    assert (status, reason) == ("False", "AttachedOutdated")
    assert "pod early" in message
    assert "deployment/vllm" in message


def test_an_edit_that_begins_a_generation_needs_the_pods_attached_again() -> None:
    world = World(external(hash={"seed": "7"}))
    world.add("early", attached(POD))
    assert "PYTHONHASHSEED: is 0, and spec.hash.seed of the tier is 7" in world.condition("EnginesReady")[2]


def test_two_tiers_that_claim_one_pod_are_both_refused() -> None:
    other = external()
    other["metadata"]["name"] = "other"
    world = World(external(), other)
    world.add("one", attached(POD))
    world.condition("Ready")
    for name, rival in (("other", "llama"), ("llama", "other")):
        status, reason, message = world.condition("Ready", name)
        assert (status, reason) == ("False", "PodsClaimedTwice")
        assert f"one (by tier {rival})" in message
    key = ObjectKey(api_version=names.API_VERSION, kind=names.KIND, name="other")
    world.cluster.edit(key, {"spec": {"engine": {"external": {"selector": {"matchLabels": {"app": "elsewhere"}}}}}})
    assert world.condition("EnginesReady", "other")[1] == "NoPods"
    assert world.condition("EnginesReady")[:2] == ("True", "EnginesReady")


def test_what_was_decided_once_stands_in_the_config_map() -> None:
    world = World()
    world.condition("Ready")
    config = world.cluster.look(CONFIG)
    assert config is not None
    assert names.ANNOTATION_DECISIONS in config["metadata"]["annotations"]


KEY = ObjectKey(api_version=names.API_VERSION, kind=names.KIND, name="llama")


def _config(world: World) -> dict[str, Any]:
    found = world.cluster.look(CONFIG)
    assert found is not None
    return dict(found)


@pytest.mark.parametrize("refused", [{"engine": {"memory": "12 gigs"}}, {"disk": {"blockTokens": 24}}])
def test_a_refused_spec_still_takes_attached_engines_off_the_volume(refused: dict[str, Any]) -> None:
    world = World()
    world.condition("Ready")
    before = _config(world)
    world.cluster.edit(KEY, {"spec": merge(refused, {"disk": {"mode": "Bypass"}})})
    assert world.condition("Ready")[0] == "False"
    after = _config(world)
    assert json.loads(after["data"]["live.json"])["mode"] == "Bypass"
    assert after["data"]["connector.json"] == before["data"]["connector.json"]
    assert after["metadata"]["annotations"] == before["metadata"]["annotations"]


@pytest.mark.parametrize(
    ("refused", "is_followed"),
    [
        ({"engine": {"memory": "12 gigs"}}, True),
        ({"disk": {"blockTokens": 24}}, True),
        ({"disk": {"budget": {"ttl": "soon"}}}, False),
    ],
)
def test_a_refused_spec_still_bounds_the_volume_unless_the_bounds_are_refused(
    refused: dict[str, Any], *, is_followed: bool
) -> None:
    def settings() -> dict[str, Any]:
        config = world.cluster.look(ObjectKey(api_version="v1", kind="ConfigMap", name="llama-janitor"))
        assert config is not None
        return dict(json.loads(config["data"]["janitor.json"]))

    world = World()
    world.condition("Ready")
    before = settings()
    world.cluster.edit(KEY, {"spec": merge(refused, {"disk": {"mode": "ReadWrite", "budget": {"maxBytes": "1Gi"}}})})
    assert world.condition("Ready")[0] == "False"
    assert settings() == {**before, **({"max_bytes": 1 << 30} if is_followed else {})}


def test_a_mode_that_is_refused_itself_leaves_the_mode_as_it_was() -> None:
    world = World(external(disk={"mode": "Bypass"}))
    world.condition("Ready")
    world.cluster.edit(KEY, {"spec": {"disk": {"mode": "bypass"}}})
    world.condition("Ready")
    assert json.loads(_config(world)["data"]["live.json"])["mode"] == "Bypass"


def test_the_janitor_of_a_volume_of_one_node_goes_beside_attached_engines() -> None:
    world = World(external(volume={"claim": {"accessModes": ["ReadWriteOnce"]}}))
    world.condition("Ready")
    janitor = world.cluster.look(JANITOR)
    assert janitor is not None
    (term,) = janitor["spec"]["template"]["spec"]["affinity"]["podAffinity"].popitem()[1]
    assert term["labelSelector"]["matchLabels"] == SELECTOR


def test_pods_of_the_operator_are_no_engines_whatever_the_selector_is() -> None:
    label = {names.LABEL_TIER: "llama"}
    world = World(external(engine={"external": {"selector": {"matchLabels": {"app": None, **label}}}}))
    world.add("one", attached(POD), labels=label)
    world.add(
        "janitor", {"containers": [{"name": "janitor"}]}, labels={**label, names.LABEL_MANAGED_BY: names.FIELD_MANAGER}
    )
    assert world.condition("EnginesReady")[:2] == ("True", "EnginesReady")


def test_a_deleted_claim_is_let_go_once_the_attached_engines_have_stopped() -> None:
    world = World()
    world.add("one", attached(POD))
    world.condition("Ready")
    (claim,) = [key for key in world.cluster.existing() if key.kind == names.CLAIM_KIND]
    world.cluster.edit(claim, {"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}})
    assert "engines of another owner are stopped there" in world.condition("VolumeBound")[2]
    assert JANITOR in world.cluster.existing()
    (pod,) = [key for key in world.cluster.existing() if key.kind == "Pod"]
    world.cluster.remove(pod)
    assert "are stopped for that" in world.condition("VolumeBound")[2]
    janitor = world.cluster.look(JANITOR)
    assert janitor is None or janitor["spec"]["replicas"] == 0


def test_attached_engines_share_the_group_of_the_janitor() -> None:
    body = external(engine={"podTemplate": {"securityContext": {"fsGroup": 2000}}})
    assert attached(POD, body)["securityContext"]["fsGroup"] == 2000


def test_only_attached_pods_that_no_other_tier_claims_are_sent_the_key_of_the_api() -> None:
    body = external()
    world = World(body)
    for name, spec in (("engine", attached(copy.deepcopy(POD))), ("stranger", copy.deepcopy(POD))):
        world.add(name, spec)
        key = ObjectKey(api_version="v1", kind="Pod", name=name)
        world.cluster.edit(key, {"status": {**RUNNING, "podIP": "10.0.0.1"}})

    def asked(claims: PodClaims) -> list[str]:
        found = gather(world.cluster, body, now=NOON, claims=claims)
        assert {pod.name for pod in found.pods} == {"engine", "stranger"}
        return [each.pod for each in make_observation_plan(parse(body), found, generation="g", chunk=Chunk()).targets]

    claims = PodClaims()
    assert asked(claims) == ["engine"]
    other = TierRef(namespace=NAMESPACE, name="other", uid="other")
    pod = world.cluster.look(ObjectKey(api_version="v1", kind="Pod", name="engine")) or {}
    claims.note(other, [pod["metadata"]["uid"]])
    assert asked(claims) == []
