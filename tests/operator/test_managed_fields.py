# SPDX-License-Identifier: Apache-2.0
"""Fields of ours that others change are applied anew; fields that others add stay theirs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from live import APPS, CORE, TIERS, Client, Controllers, body, running
from tiers import merge
from waiting import until

from kvtier_localcluster.apiserver import ApiServerThread
from kvtier_operator import names
from kvtier_operator.apply import is_applied
from kvtier_operator.kube.client import connect

MANIFEST: dict[str, Any] = {
    "apiVersion": "apps/v1",
    "kind": "Deployment",
    "metadata": {"name": "d", "namespace": "default", "labels": {names.LABEL_TIER: "llama"}, "annotations": {"a": "b"}},
    "spec": {
        "replicas": 1,
        "selector": {"matchLabels": {"app": "d"}},
        "template": {
            "metadata": {"labels": {"app": "d"}},
            "spec": {
                "containers": [
                    {
                        "name": "engine",
                        "image": "i",
                        "args": ["--a", "--b"],
                        "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}],
                        "ports": [{"containerPort": 80, "protocol": "TCP"}],
                        "resources": {"requests": {"memory": "1024Mi"}},
                    }
                ],
                "tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}],
            },
        },
    },
}


ROLE: dict[str, Any] = {
    "apiVersion": names.RBAC,
    "kind": "Role",
    "metadata": {"name": "r", "namespace": "default", "labels": {names.LABEL_TIER: "llama"}},
    "rules": [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get"]}],
}
MORE_RULES = [*ROLE["rules"], {"apiGroups": [""], "resources": ["secrets"], "verbs": ["get"]}]


def changed(**containers: Any) -> dict[str, Any]:
    found = json.loads(json.dumps(MANIFEST))
    found["spec"]["template"]["spec"]["containers"][0] |= containers
    return dict(found)


@pytest.mark.parametrize(
    ("before", "wanted"),
    [
        (MANIFEST, merge(MANIFEST, {"spec": {"replicas": 2}})),
        (MANIFEST, merge(MANIFEST, {"metadata": {"annotations": None}})),
        (MANIFEST, merge(MANIFEST, {"metadata": {"annotations": {"c": "d"}}})),
        (MANIFEST, changed(args=["--b", "--a"])),
        (MANIFEST, changed(env=[{"name": "A", "value": "1"}])),
        (MANIFEST, changed(env=[{"name": "A", "value": "1"}, {"name": "B", "value": "3"}])),
        (MANIFEST, changed(resources={"requests": {"memory": "2Gi"}})),
        # Lists that are one value: a field less in an item, and an item less.
        (MANIFEST, merge(MANIFEST, {"spec": {"template": {"spec": {"tolerations": [{"key": "gpu"}]}}}})),
        ({**ROLE, "rules": MORE_RULES}, ROLE),
    ],
)
@pytest.mark.usefixtures("api")
def test_whatever_an_apply_would_change_is_applied(before: dict[str, Any], wanted: dict[str, Any]) -> None:
    live = connect().apply(before, over=None)
    assert is_applied(before, live)
    assert not is_applied(wanted, live)
    after = connect().apply(wanted, over=live["metadata"]["uid"])
    assert is_applied(wanted, after)
    assert after.get("rules") == wanted.get("rules")


@pytest.mark.usefixtures("api")
def test_what_others_add_is_no_reason_to_apply_again(api: ApiServerThread) -> None:
    connect().apply(MANIFEST, over=None)
    patch = {"metadata": {"annotations": {"theirs": "1"}}, "status": {"replicas": 3}}
    Client(api.url).merge("/apis/apps/v1", "deployments", "d", patch)
    live = connect().get(names.key_of(MANIFEST), "default")
    assert is_applied(MANIFEST, live)


POLICY, RBAC = "/apis/policy/v1", "/apis/rbac.authorization.k8s.io/v1"
STRATEGIC = "application/strategic-merge-patch+json"


def test_an_item_more_in_a_list_that_is_one_value_is_applied_over(api: ApiServerThread) -> None:
    connect().apply(ROLE, over=None)
    Client(api.url).merge(RBAC, "roles", "r", {"rules": MORE_RULES})
    live = connect().get(names.key_of(ROLE), "default")
    assert not is_applied(ROLE, live)
    assert connect().apply(ROLE, over=live["metadata"]["uid"])["rules"] == ROLE["rules"]


@pytest.mark.usefixtures("api")
def test_what_says_nothing_stands_where_the_api_server_leaves_it_out() -> None:
    wanted = changed(env=[{"name": "A", "value": ""}], stdin=False)
    live = connect().apply(wanted, over=None)
    container = live["spec"]["template"]["spec"]["containers"][0]
    container["env"][0].pop("value", None)
    container.pop("stdin", None)
    assert is_applied(wanted, live)
    assert not is_applied(changed(env=[{"name": "A", "value": "1"}], stdin=False), live)


@pytest.fixture
def kubectl(api: ApiServerThread) -> Iterator[Client]:
    client = Client(api.url)
    with Controllers(client, api), running(resync_seconds=3600):
        client.apply_tier(body())
        until(client.is_ready)
        yield client


DRIFT: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    (RBAC, "roles", "llama-janitor", {"rules": [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get"]}]}),
    (CORE, "configmaps", "llama-connector", {"data": {"connector.json": "{}"}}),
    (CORE, "services", "llama-engine", {"spec": {"selector": {"blue": "green"}}}),
    (POLICY, "poddisruptionbudgets", "llama-engine", {"spec": {"selector": {"matchLabels": {"a": "b"}}}}),
    (APPS, "deployments", "llama-engine", {"spec": {"replicas": 9}}),
)


def test_what_others_change_in_a_field_of_ours_is_applied_anew_at_once(kubectl: Client) -> None:
    def ours() -> list[dict[str, Any]]:
        found = [kubectl.get(group, plural, name) or {} for group, plural, name, _ in DRIFT]
        return [{field: each.get(field) for field in ("spec", "data", "rules")} for each in found]

    before = ours()
    for group, plural, name, patch in DRIFT:
        kubectl.merge(group, plural, name, patch)
    until(lambda: ours() == before)


def set_env(kubectl: Client, deployment: str) -> None:
    live = kubectl.get(APPS, "deployments", deployment) or {}
    container = live["spec"]["template"]["spec"]["containers"][0]
    more = {"name": container["name"], "env": [{"name": "EXTRA", "value": "1"}]}
    path = kubectl.path(APPS, "deployments", deployment) + "?fieldManager=kubectl-set"
    kubectl.call("PATCH", path, {"spec": {"template": {"spec": {"containers": [more]}}}}, STRATEGIC)


def has_extra(kubectl: Client, deployment: str) -> bool:
    return "EXTRA" in json.dumps(kubectl.get(APPS, "deployments", deployment))


def test_a_field_that_another_manager_adds_stays_theirs_and_is_not_fought_over(kubectl: Client) -> None:
    set_env(kubectl, "llama-engine")
    until(kubectl.is_ready)
    kubectl.merge(TIERS, "kvcachetiers", "llama", {"spec": {"replicas": 3}})
    until(
        lambda: kubectl.is_ready() and (kubectl.get(APPS, "deployments", "llama-engine") or {})["spec"]["replicas"] == 3
    )
    assert has_extra(kubectl, "llama-engine")
