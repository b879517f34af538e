# SPDX-License-Identifier: Apache-2.0
"""The chart's ValidatingAdmissionPolicy: the operator's account writes and deletes objects of tiers, and no others."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from cel_expr_python import cel
from chart import NAMESPACE, ROOT, render
from test_golden import CASES, rendered

from kvtier_operator import names

TIER = names.TierRef(namespace="serving", name="llama", uid="u1")
API = "--api-versions=admissionregistration.k8s.io/v1/ValidatingAdmissionPolicy"
ACCOUNT = f"system:serviceaccount:{NAMESPACE}:kvtier-operator"


def policy() -> dict[str, Any]:
    (found,) = (each for each in render(None, API) if each["kind"] == "ValidatingAdmissionPolicy")
    return dict(found["spec"])


SPEC = policy()


def holds(expression: str, **data: Any) -> bool:
    kind = cel.Type
    environment = cel.NewEnv(variables=dict.fromkeys(("object", "oldObject", "request"), kind.DYN))
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


def test_the_manifest_for_people_without_helm_has_the_same_policy() -> None:
    documents = yaml.safe_load_all((ROOT / "docs" / "operator.yaml").read_text())
    found = {each["kind"]: each["spec"] for each in documents if each["kind"].startswith("ValidatingAdmissionPolicy")}
    assert found["ValidatingAdmissionPolicy"] == SPEC
    assert found["ValidatingAdmissionPolicyBinding"]["validationActions"] == ["Deny"]


@pytest.mark.parametrize("case", CASES)
def test_every_object_of_a_tier_may_be_made_changed_and_deleted(case: str) -> None:
    for manifest in rendered(case):
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


def test_an_object_of_a_tier_whose_labels_somebody_removed_is_repaired() -> None:
    assert allows(service("llama-engine", **OURS), service("llama-engine", is_owned=True))


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


def test_the_policy_covers_every_kind_that_the_operator_may_write() -> None:
    rules = next(each for each in render() if each["kind"] == "ClusterRole")["rules"]
    written = {
        resource
        for rule in rules
        for resource in rule["resources"]
        if {"create", "patch", "delete"} & set(rule["verbs"]) and "/" not in resource and resource != "events"
    }
    covered = {resource for rule in SPEC["matchConstraints"]["resourceRules"] for resource in rule["resources"]}
    assert written == covered


@pytest.mark.parametrize(
    ("values", "options"),
    [({"rbac": {"admissionPolicy": False}}, (API,)), ({"scope": "Namespaced"}, (API,)), ({}, ())],
    ids=["switched off", "nothing is cluster-wide", "the cluster has no such kind"],
)
def test_it_is_left_out(values: dict[str, Any], options: tuple[str, ...]) -> None:
    assert not [each for each in render(values, *options) if each["kind"].startswith("ValidatingAdmissionPolicy")]
