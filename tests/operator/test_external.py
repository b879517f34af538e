# SPDX-License-Identifier: Apache-2.0
"""A tier whose engines another owner makes: what is applied for it, and what its conditions say of the pods."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from fake_cluster import FakeCluster, condition, status
from tiers import CONFIG, DEPLOYMENT, JANITOR, NOON, RUNNING, TIER, TIER_KEY, engine_pod, made_by, merge, plan_of, tier

from kvtier_operator import names
from kvtier_operator.api import parse
from kvtier_operator.gather import gather
from kvtier_operator.names import ObjectKey, TierRef
from kvtier_operator.observe.canary import Chunk
from kvtier_operator.observe.targets import make_observation_plan
from kvtier_operator.parts.external.attach import Target, attach
from kvtier_operator.parts.external.pods import PodClaims
from kvtier_operator.reconcile import Inputs, reconcile

TABLES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())

LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
SELECTOR = {"app": "vllm"}
CONTAINER = ("containers", ("name", "vllm"))
POD: dict[str, Any] = TABLES["pod"]


def external(**spec: Any) -> dict[str, Any]:
    engine = {"external": {"selector": {"matchLabels": SELECTOR}}, "args": ["--max-model-len=8192"]}
    return merge(tier(replicas=None, engine=engine), {"spec": spec})


def attached(pod: dict[str, Any], body: dict[str, Any] | None = None) -> dict[str, Any]:
    target = Target(pod=pod, container=CONTAINER)
    return attach(plan_of(external() if body is None else body), target).put_into(target)


class World:
    """A cluster with tiers, and an operator that goes on from reconcile to reconcile."""

    def __init__(self, *bodies: dict[str, Any]) -> None:
        self.cluster = FakeCluster(*(bodies or (external(),)))
        self.inputs = Inputs(connector_image="connector:test", clock=lambda: NOON)

    def add(self, name: str, spec: dict[str, Any], *, labels: dict[str, str] = SELECTOR) -> None:
        metadata = {
            "name": name,
            "namespace": TIER.namespace,
            "labels": {**labels, names.LABEL_TEMPLATE_HASH: "5d4f"},
            "ownerReferences": [made_by("vllm-5d4f")],
        }
        self.cluster.put({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec, "status": RUNNING})

    def condition(self, kind: str) -> tuple[str, str, str]:
        """Reconcile the tier twice, as its own writes wake it, and return a condition."""
        for _ in range(2):
            for claim in [key for key in self.cluster.existing() if key.kind == names.CLAIM_KIND]:
                self.cluster.edit(claim, {"status": {"phase": "Bound", "capacity": {"storage": "2Ti"}}})
            assert reconcile(self.cluster, TIER, self.inputs).failure is None
        found = condition(self.cluster, kind)
        return found["status"], found["reason"], found["message"]

    def edited(self, **spec: Any) -> tuple[str, str, str]:
        """Edit the tier, and return whether it is Ready."""
        self.cluster.edit(TIER_KEY, {"spec": spec})
        return self.condition("Ready")

    def replicas(self) -> tuple[int, int]:
        return status(self.cluster)["replicas"], status(self.cluster)["readyReplicas"]


def test_the_operator_makes_everything_but_the_engines_and_their_service_and_notes_what_it_decided() -> None:
    world = World()
    world.condition("Ready")
    kinds = {(key.kind, key.name) for key in world.cluster.existing()}
    assert {("PersistentVolumeClaim", "llama-blocks"), ("ConfigMap", "llama-connector")} < kinds
    assert JANITOR in world.cluster.existing()
    assert not kinds & {(kind, "llama-engine") for kind in ("Deployment", "Service", "PodDisruptionBudget")}
    assert names.ANNOTATION_DECISIONS in world.cluster.look(CONFIG)["metadata"]["annotations"]


OWNERS_FLAGS = {"--revision", "--host", "--port", "--served-model-name", "--tensor-parallel-size", "--shutdown-timeout"}
OWNERS_VARIABLES = {"HF_HOME", "HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "USER", "VLLM_CACHE_ROOT"}
OWNERS_VARIABLES |= {"XDG_CACHE_HOME"}


def test_an_attached_engine_gets_all_that_makes_an_engine_of_ours_one_but_what_its_owner_decides() -> None:
    ours = engine_pod(plan_of(tier(engine={"args": ["--max-model-len=8192"]})))["containers"][0]
    theirs = attached(POD)["containers"][0]
    assert {word.partition("=")[0] for word in ours["args"] if word not in theirs["args"]} == OWNERS_FLAGS
    assert {each["name"] for each in ours["env"] if each not in theirs["env"]} == OWNERS_VARIABLES
    mounted, needed = ({each["mountPath"] for each in engine["volumeMounts"]} for engine in (theirs, ours))
    assert needed - mounted == {"/tmp"}


@pytest.mark.parametrize("is_ours", [True, False])
def test_engines_of_ours_go_when_a_tier_gets_others_and_what_is_left_is_not_counted(*, is_ours: bool) -> None:
    world = World(tier())
    world.condition("Ready")
    assert DEPLOYMENT in world.cluster.existing()
    if not is_ours:
        world.cluster.edit(DEPLOYMENT, {"metadata": {"ownerReferences": None}})
    world.add("one", attached(POD))
    world.edited(**external()["spec"], replicas=None)
    assert world.condition("Available")[2] == "1 of 1 attached engines serve"
    assert (DEPLOYMENT in world.cluster.existing()) is not is_ours


def test_attached_pods_make_a_tier_ready_and_are_counted_and_others_serve_none() -> None:
    world = World()
    world.add("stranger", POD)
    assert world.condition("Available")[:2] == ("False", "Unavailable")
    # An owner may put more in front of the connector later.
    for name, path in (("one", '"/opt/kvtier"'), ("two", '"/plugins:/opt/kvtier"')):
        world.add(name, other(attached(POD), '"value": "/opt/kvtier"', f'"value": {path}'))
    others = "1 more of the selector's pods are no engines of this tier"
    assert world.condition("Available")[2].startswith(f"2 of 2 attached engines serve; {others}")
    assert world.replicas() == (2, 2)
    world.cluster.remove(ObjectKey(api_version="v1", kind="Pod", name="stranger"))
    assert world.condition("EnginesReady")[:2] == ("True", "EnginesReady")
    assert world.condition("HashSeedConsistent")[:2] == ("True", "SeedsAgree")
    assert world.condition("Available") == ("True", "Serving", "2 of 2 attached engines serve")
    assert world.condition("UpToDate")[0] == "True"
    assert world.condition("SizingFits")[:2] == ("Unknown", "NotApplicable")


def without(path: str) -> dict[str, Any]:
    """Return an attached pod that lacks something."""
    pod = attached(POD)
    field, _, name = path.partition(":")
    place = pod if field in {"volumes", "initContainers"} else pod["containers"][0]
    place[field] = [each for each in place[field] if name not in str(each)]
    return pod


def other(pod: dict[str, Any], old: str, new: str) -> dict[str, Any]:
    """Return a pod with another word in place of one."""
    return dict(json.loads(json.dumps(pod).replace(old, new)))


UNTOLD = {"containers": [{"name": name, "image": f"example.org/{name}"} for name in "ab"]}


@pytest.mark.parametrize(
    ("body", "pod", "words"),
    [
        *((external(), without(part), words) for part, words in TABLES["parts"].items()),
        (external(), other(attached(POD), "KVTierConnector", "Another"), "it lacks --kv-transfer-config;"),
        (
            external(),
            other(attached(POD), plan_of(external()).generation.digest, "0"),
            "it lacks --kv-transfer-config;",
        ),
        (external(), other(attached(POD), LLAMA, "org/other"), "--model: is org/other"),
        (external(), other(attached(POD), LLAMA, "org/other"), f"spec.model.name of the tier is {LLAMA}"),
        (external(), UNTOLD, "spec.engine.external.container"),
        # An edit that begins a generation needs the pods attached again.
        (external(hash={"seed": "7"}), attached(POD), "PYTHONHASHSEED: is 0, and spec.hash.seed of the tier is 7"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_pod_that_is_not_attached_as_it_must_be_is_named_with_the_command_that_mends_it(
    body: dict[str, Any], pod: dict[str, Any], words: str
) -> None:
    world = World(body)
    world.add("poor", pod)
    found, reason, message = world.condition("EnginesReady")
    assert (found, reason) == ("False", "NotAttached")
    assert words in message
    if pod is not UNTOLD:
        assert "container vllm of pod poor" in message
        assert f"`kvtier attach llama -n {TIER.namespace} deployment/vllm`" in message
    assert world.condition("Ready")[:2] == ("False", "NotAttached")


def test_a_refused_mode_leaves_the_mode() -> None:
    world = World(external(disk={"mode": "Bypass"}))
    world.condition("Ready")
    world.edited(disk={"mode": "bypass"})
    assert json.loads(world.cluster.look(CONFIG)["data"]["live.json"])["mode"] == "Bypass"


@pytest.mark.parametrize("case", TABLES["edits"], ids=lambda case: case["id"])
def test_an_edit_leaves_engines_ready_that_serve_and_tells_what_of_them_is_outdated(case: dict[str, Any]) -> None:
    pod = merge(POD, {"containers": [merge(POD["containers"][0], {"resources": case.get("resources", {})})]})
    world = World(body := external(**case.get("before", {})))
    world.add("early", other(attached(pod, body), *case.get("release", ("", ""))))
    assert world.edited(**case.get("spec", {}))[:2] == ("True", "Ready")
    found, reason, message = world.condition("UpToDate")
    assert (found, reason) == ("False", "AttachedOutdated")
    for words in ("pod early", f"({case['differs']})", f"`kvtier attach llama -n {TIER.namespace} deployment/vllm`"):
        assert words in message


@pytest.mark.parametrize(("refused", "is_followed"), TABLES["refused"])
def test_a_refused_spec_takes_attached_engines_off_the_volume_and_bounds_it_unless_the_bounds_are_refused(
    refused: dict[str, Any], *, is_followed: bool
) -> None:
    def settings() -> dict[str, Any]:
        config = world.cluster.look(ObjectKey(api_version="v1", kind="ConfigMap", name="llama-janitor"))
        return dict(json.loads(config["data"]["janitor.json"]))

    world = World()
    world.condition("Ready")
    before, bounds = world.cluster.look(CONFIG), settings()
    assert world.edited(**merge(refused, {"disk": {"mode": "Bypass", "budget": {"maxBytes": "1Gi"}}}))[0] == "False"
    after = world.cluster.look(CONFIG)
    assert json.loads(after["data"]["live.json"])["mode"] == "Bypass"
    assert after["data"]["connector.json"] == before["data"]["connector.json"]
    assert after["metadata"]["annotations"] == before["metadata"]["annotations"]
    assert settings() == {**bounds, **({"max_bytes": 1 << 30} if is_followed else {})}


def test_the_janitor_of_attached_engines_goes_beside_them_and_shares_their_group() -> None:
    world = World(external(volume={"claim": {"accessModes": ["ReadWriteOnce"]}}))
    world.condition("Ready")
    (term,) = world.cluster.look(JANITOR)["spec"]["template"]["spec"]["affinity"]["podAffinity"].popitem()[1]
    assert term["labelSelector"]["matchLabels"] == SELECTOR
    body = external(engine={"podTemplate": {"securityContext": {"fsGroup": 2000}}})
    assert attached(POD, body)["securityContext"]["fsGroup"] == 2000


def test_pods_of_the_operator_are_no_engines_whatever_the_selector_is() -> None:
    label = {names.LABEL_TIER: "llama"}
    world = World(external(engine={"external": {"selector": {"matchLabels": {"app": None, **label}}}}))
    world.add("one", attached(POD), labels=label)
    ours = {**label, names.LABEL_MANAGED_BY: names.FIELD_MANAGER}
    world.add("janitor", {"containers": [{"name": "janitor"}]}, labels=ours)
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
    other = TierRef(namespace=TIER.namespace, name="other", uid="other")
    pod = world.cluster.look(ObjectKey(api_version="v1", kind="Pod", name="engine")) or {}
    claims.note(other, [pod["metadata"]["uid"]])
    assert asked(claims) == []
