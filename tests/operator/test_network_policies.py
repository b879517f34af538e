# SPDX-License-Identifier: Apache-2.0
"""Network policies let through what a component needs; the admission policy guards the objects of tiers."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import test_golden
import yaml
from cel_expr_python import cel
from chart import NAMESPACE, ROOT, render
from test_golden import CASES
from tiers import rendered, tier

from kvtier_operator import names

Labels = Mapping[str, str]
MONITORING = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
INTERNET, API_SERVER = "203.0.113.7", "198.51.100.1"
HYBRID = {"type": "Hybrid", "hybrid": {"nixl": {}}}
TRIAL = {"type": "LMCache", "lmcache": {"redis": {"trial": {}}}}


class Network:
    """Pods with their labels, and what the policies let them do."""

    def __init__(self, *manifests: dict[str, Any]) -> None:
        self.policies = [each for each in manifests if each["kind"] == "NetworkPolicy"]
        self.pods: dict[str, tuple[str, Labels]] = {
            "stranger": ("elsewhere", {}),
            "client": ("serving", {"app": "chat"}),
            "prometheus": ("monitoring", {}),
        }
        for each in manifests:
            if each["kind"] in {"Deployment", "Job"}:
                template = each["spec"]["template"]
                self.pods[each["metadata"]["name"]] = (each["metadata"]["namespace"], template["metadata"]["labels"])

    def of(self, pod: str) -> list[dict[str, Any]]:
        namespace, labels = self.pods[pod]
        return [
            each["spec"]
            for each in self.policies
            if each["metadata"]["namespace"] == namespace and _matches(each["spec"]["podSelector"], labels)
        ]

    def lets(self, source: str, target: str, port: int) -> bool:
        """Tell whether both ends let a pod connect to a pod or an address."""
        leaves = self._is_allowed(source, target, port, "egress", "to")
        return leaves and (target not in self.pods or self._is_allowed(target, source, port, "ingress", "from"))

    def _is_allowed(self, pod: str, other: str, port: int, direction: str, side: str) -> bool:
        policies = self.of(pod)
        rules = [rule for each in policies for rule in each.get(direction, ())]
        home = self.pods[pod][0]
        return not policies or any(
            ("ports" not in rule or any(_covers(each, port) for each in rule["ports"]))
            and (side not in rule or any(self._is_peer(peer, other, home) for peer in rule[side]))
            for rule in rules
        )

    def _is_peer(self, peer: dict[str, Any], other: str, home: str) -> bool:
        if other not in self.pods:
            block = peer.get("ipBlock", {}).get("cidr")
            return block is not None and ipaddress.ip_address(other) in ipaddress.ip_network(block)
        namespace, labels = self.pods[other]
        if "namespaceSelector" in peer:
            of_namespace = {"kubernetes.io/metadata.name": namespace}
            return _matches(peer["namespaceSelector"], of_namespace) and _matches(peer.get("podSelector", {}), labels)
        return "podSelector" in peer and namespace == home and _matches(peer["podSelector"], labels)


def _matches(selector: dict[str, Any], labels: Labels) -> bool:
    return bool(selector.get("matchLabels", {}).items() <= labels.items())


def _covers(rule: dict[str, Any], port: int) -> bool:
    return rule["protocol"] == "TCP" and bool(rule["port"] <= port <= rule.get("endPort", rule["port"]))


def network(
    *, policy: Mapping[str, Any] | None = None, values: Mapping[str, Any] | None = None, **spec: Any
) -> Network:
    operator = render({"networkPolicy": {"enabled": True, "scrapers": [MONITORING], **(values or {})}})
    return Network(*rendered(tier(**spec, networkPolicy=dict(policy or {}))).values(), *operator)


OPERATOR = "kvtier-operator"
TABLES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
ROUTED = {"routing": {"type": "Router"}, "kvEvents": {}, "proof": {"preflight": "Always"}}


@pytest.mark.parametrize(("source", "target", "port", "is_let"), TABLES["traffic"])
def test_only_the_traffic_that_a_part_needs_is_let_through(
    source: str, target: str, port: int, *, is_let: bool
) -> None:
    found = network(policy={"scrapers": [MONITORING]}, **ROUTED)
    found.pods["llama-preflight"] = ("serving", names.selector(names.tier_ref(tier()), names.COMPONENT_PREFLIGHT))
    assert found.lets(source, {"API server": API_SERVER, "internet": INTERNET}.get(target, target), port) is is_let


@pytest.mark.parametrize(("policy", "source", "target", "is_let"), TABLES["policies"])
def test_a_tier_says_who_else_may_be_reached(policy: dict[str, Any], source: str, target: str, *, is_let: bool) -> None:
    assert network(policy=policy).lets(source, target, 8000 if target == "llama-engine" else 443) is is_let


def test_the_api_servers_ports_are_the_named_ones_and_engines_reach_their_redis_and_each_other() -> None:
    ports = {"apiServerPorts": [7443]}
    found = network(policy=ports, values=ports)
    lets = {port: {found.lets(pod, API_SERVER, port) for pod in (OPERATOR, "llama-janitor")} for port in (443, 7443)}
    assert lets == {443: {False}, 7443: {True}}
    found = network(connector=TRIAL)
    assert found.lets("llama-engine", "llama-redis", 10_001)
    assert not found.lets("client", "llama-redis", 10_001)
    assert not found.lets("llama-redis", INTERNET, 443)
    found = network(connector=HYBRID)
    found.pods["decode"] = ("serving", {**found.pods["llama-engine"][1], names.LABEL_TIER: "decode"})
    assert found.lets("decode", "llama-engine", 5600)
    assert found.lets("llama-engine", "decode", 5600)
    assert not network().lets("client", "llama-engine", 5600)
    assert not [each for each in (*rendered(tier()).values(), *render()) if each["kind"] == "NetworkPolicy"]


@pytest.mark.parametrize("connector", [None, HYBRID, TRIAL], ids=["bundled", "nixl", "redis"])
def test_each_pod_of_a_tier_is_selected_by_one_policy(connector: dict[str, Any] | None) -> None:
    found = network(**ROUTED if connector is None else {"connector": connector})
    ours = [pod for pod, (home, labels) in found.pods.items() if names.LABEL_TIER in labels or home == NAMESPACE]
    assert len(ours) >= 3
    assert {pod: len(found.of(pod)) for pod in ours} == dict.fromkeys(ours, 1)


TIER = names.TierRef(namespace="serving", name="llama", uid="u1")
API = "--api-versions=admissionregistration.k8s.io/v1/ValidatingAdmissionPolicy"
ACCOUNT = f"system:serviceaccount:{NAMESPACE}:kvtier-operator"


def policy() -> dict[str, Any]:
    (found,) = (each for each in render(None, API) if each["kind"] == "ValidatingAdmissionPolicy")
    return dict(found["spec"])


SPEC = policy()


def holds(expression: str, **data: Any) -> bool:
    environment = cel.NewEnv(variables=dict.fromkeys(("object", "oldObject", "request"), cel.Type.DYN))
    return bool(environment.compile(expression).eval(data=data).value())


def allows(new: dict[str, Any] | None, old: dict[str, Any] | None) -> bool:
    operation = "DELETE" if new is None else "CREATE" if old is None else "UPDATE"
    data = {"object": new or {}, "oldObject": old or {}, "request": {"operation": operation}}
    return all(holds(each["expression"], **data) for each in SPEC["validations"])


def service(name: str, *, is_owned: bool = False, **labels: str) -> dict[str, Any]:
    metadata: dict[str, Any] = {"name": name, "namespace": TIER.namespace, "labels": labels}
    if is_owned:
        metadata["ownerReferences"] = [names.owner_reference(TIER)]
    return {"apiVersion": "v1", "kind": "Service", "metadata": metadata}


OURS = names.labels(TIER, names.COMPONENT_ENGINE)


def test_the_admission_policy_is_that_of_people_without_helm_and_covers_all_that_is_written() -> None:
    documents = yaml.safe_load_all((ROOT / "docs" / "operator.yaml").read_text())
    found = {each["kind"]: each["spec"] for each in documents if each["kind"].startswith("ValidatingAdmissionPolicy")}
    assert found["ValidatingAdmissionPolicy"] == SPEC
    assert found["ValidatingAdmissionPolicyBinding"]["validationActions"] == ["Deny"]
    assert allows(service("llama-engine", **OURS), service("llama-engine", is_owned=True))
    written = {
        resource
        for rule in next(each for each in render() if each["kind"] == "ClusterRole")["rules"]
        for resource in rule["resources"]
        if {"create", "patch", "delete"} & set(rule["verbs"]) and "/" not in resource and resource != "events"
    }
    covered = {resource for rule in SPEC["matchConstraints"]["resourceRules"] for resource in rule["resources"]}
    assert written == covered


@pytest.mark.parametrize("case", CASES)
def test_every_object_of_a_tier_may_be_made_changed_and_deleted(case: str) -> None:
    for manifest in test_golden.rendered(case):
        assert allows(manifest, None)
        assert allows(manifest, manifest)
        assert allows(None, manifest)


@pytest.mark.parametrize(
    ("new", "old"),
    [
        pytest.param(None, service("llama-lb", **OURS), id="a copy of the labels by kubectl expose"),
        pytest.param(None, service("kube-dns"), id="an object without labels"),
        pytest.param(service("llama-engine", **OURS), service("llama-engine"), id="a foreign object under our name"),
        pytest.param(service("kube-dns", **OURS), None, id="an object of another name"),
        pytest.param(
            service("llama-engine", **{**OURS, names.LABEL_MANAGED_BY: "Helm"}), None, id="labels of another manager"
        ),
    ],
)
def test_an_object_that_is_not_of_a_tier_is_neither_written_nor_deleted(
    new: dict[str, Any] | None, old: dict[str, Any] | None
) -> None:
    assert not allows(new, old)


def test_only_the_operators_account_is_bound_and_not_for_its_own_lease() -> None:
    def matches(user: str, resource: str = "services", name: str = "x", namespace: str = "serving") -> bool:
        request = {
            "userInfo": {"username": user},
            "resource": {"resource": resource},
            "name": name,
            "namespace": namespace,
        }
        return all(holds(each["expression"], request=request) for each in SPEC["matchConditions"])

    assert matches(ACCOUNT)
    assert not matches("system:serviceaccount:kube-system:deployment-controller")
    assert not matches(ACCOUNT, "leases", "kvtier-operator", NAMESPACE)
    assert matches(ACCOUNT, "leases", "llama-janitor")


@pytest.mark.parametrize(
    ("values", "options"),
    [({"rbac": {"admissionPolicy": False}}, (API,)), ({"scope": "Namespaced"}, (API,)), ({}, ())],
    ids=["switched off", "nothing is cluster-wide", "the cluster has no such kind"],
)
def test_it_is_left_out(values: dict[str, Any], options: tuple[str, ...]) -> None:
    assert not [each for each in render(values, *options) if each["kind"].startswith("ValidatingAdmissionPolicy")]
