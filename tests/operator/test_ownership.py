# SPDX-License-Identifier: Apache-2.0
"""Whatever others change or add in what the operator made is applied anew, taken back, or told."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from live import APPS, CORE, NAMESPACE, TIERS, Client, Controllers, running
from tiers import tier
from waiting import until

from kvtier_localcluster.apiserver import ApiServerThread
from kvtier_operator import names
from kvtier_operator.kube.client import KubernetesCluster, connect
from kvtier_operator.kube.ownership import added_by_others, stands

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
                ]
            },
        },
    },
}


def changed(**containers: Any) -> dict[str, Any]:
    found = json.loads(json.dumps(MANIFEST))
    found["spec"]["template"]["spec"]["containers"][0] |= containers
    return dict(found)


@pytest.mark.parametrize(
    "wanted",
    [
        {**MANIFEST, "spec": {**MANIFEST["spec"], "replicas": 2}},
        {
            **MANIFEST,
            "metadata": {name: value for name, value in MANIFEST["metadata"].items() if name != "annotations"},
        },
        {**MANIFEST, "metadata": {**MANIFEST["metadata"], "annotations": {"a": "b", "c": "d"}}},
        changed(args=["--b", "--a"]),
        changed(env=[{"name": "A", "value": "1"}]),
        changed(env=[{"name": "A", "value": "1"}, {"name": "B", "value": "3"}]),
        changed(resources={"requests": {"memory": "2Gi"}}),
    ],
    ids=["a value", "an annotation less", "an annotation more", "an order", "an entry less", "an entry", "an amount"],
)
@pytest.mark.usefixtures("api")
def test_whatever_an_apply_would_change_is_applied(wanted: dict[str, Any]) -> None:
    live = connect().apply(MANIFEST, over=None)
    assert stands(MANIFEST, live)
    assert not stands(wanted, live)
    assert stands(wanted, connect().apply(wanted, over=live["metadata"]["uid"]))


@pytest.mark.usefixtures("api")
def test_what_others_add_is_no_reason_to_apply_again(api: ApiServerThread) -> None:
    connect().apply(MANIFEST, over=None)
    patch = {"metadata": {"annotations": {"theirs": "1"}}, "status": {"replicas": 3}}
    Client(api.url).merge("/apis/apps/v1", "deployments", "d", patch)
    live = connect().get(names.key_of(MANIFEST), "default")
    assert live is not None
    assert stands(MANIFEST, live)


ROLE: dict[str, Any] = {
    "apiVersion": names.RBAC,
    "kind": "Role",
    "metadata": {"name": "r", "namespace": "default", "labels": {names.LABEL_TIER: "llama"}},
    "rules": [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get"]}],
}
POLICY, RBAC = "/apis/policy/v1", "/apis/rbac.authorization.k8s.io/v1"
STRATEGIC = "application/strategic-merge-patch+json"


def test_an_item_more_in_a_list_that_is_one_value_is_applied_over(api: ApiServerThread) -> None:
    connect().apply(ROLE, over=None)
    rules = [*ROLE["rules"], {"apiGroups": [""], "resources": ["secrets"], "verbs": ["*"]}]
    Client(api.url).merge(RBAC, "roles", "r", {"rules": rules})
    live = connect().get(names.key_of(ROLE), "default")
    assert live is not None
    assert not stands(ROLE, live)
    assert connect().apply(ROLE, over=live["metadata"]["uid"])["rules"] == ROLE["rules"]


def test_an_item_less_in_a_list_that_is_one_value_is_applied(api: ApiServerThread) -> None:
    more = {**ROLE, "rules": [*ROLE["rules"], {"apiGroups": [""], "resources": ["secrets"], "verbs": ["get"]}]}
    live = connect().apply(more, over=None)
    assert stands(more, live)
    assert not stands(ROLE, live)
    assert connect().apply(ROLE, over=live["metadata"]["uid"])["rules"] == ROLE["rules"]


@pytest.mark.usefixtures("api")
def test_what_says_nothing_stands_where_the_api_server_leaves_it_out() -> None:
    wanted = changed(env=[{"name": "A", "value": ""}], stdin=False)
    live = connect().apply(wanted, over=None)
    container = live["spec"]["template"]["spec"]["containers"][0]
    container["env"][0].pop("value", None)
    container.pop("stdin", None)
    assert stands(wanted, live)
    assert not stands(changed(env=[{"name": "A", "value": "1"}], stdin=False), live)


def test_what_others_have_added_is_found_by_field_and_name_and_can_be_removed(api: ApiServerThread) -> None:
    made = connect().apply(MANIFEST, over=None)
    assert added_by_others(made) == ()
    env = [{"name": "A", "value": "1"}, {"name": "X", "value": "1"}, {"name": "Y", "value": "2"}]
    container = {"name": "engine", "env": env, "resources": {"limits": {"nvidia.com/gpu": "1"}}}
    template = {"metadata": {"annotations": {"a/b~c": "d"}}, "spec": {"containers": [container]}}
    kubectl = Client(api.url)
    path = kubectl.path(APPS, "deployments", "d")
    patch = {"spec": {"paused": True, "template": template}}
    kubectl.call("PATCH", f"{path}?fieldManager=kubectl-set", patch, STRATEGIC)
    restarted = {"spec": {"template": {"metadata": {"annotations": {"kubectl.kubernetes.io/restartedAt": "now"}}}}}
    kubectl.call("PATCH", f"{path}?fieldManager=argocd-server", restarted, STRATEGIC)
    kubectl.merge(APPS, "deployments", "d", {"status": {"replicas": 3}}, sub="/status")
    live = connect().get(names.key_of(MANIFEST), "default")
    assert live is not None
    found = added_by_others(live)
    assert [str(each) for each in found] == [
        "spec.paused (kubectl-set)",
        "spec.template.metadata.annotations.a/b~c (kubectl-set)",
        "spec.template.spec.containers[engine].env[X] (kubectl-set)",
        "spec.template.spec.containers[engine].env[Y] (kubectl-set)",
        "spec.template.spec.containers[engine].resources.limits.nvidia.com/gpu (kubectl-set)",
        "spec.template.spec.containers[engine].resources.requests.nvidia.com/gpu (kubectl-set)",
    ]
    after = connect().remove_fields(live, [each.pointer for each in found])
    assert after["spec"]["template"]["spec"]["containers"][0]["env"] == env_of(MANIFEST)
    assert (added_by_others(after), stands(MANIFEST, after), after["spec"].get("paused")) == ((), True, None)


def env_of(deployment: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = deployment["spec"]["template"]["spec"]["containers"][0]["env"]
    return found


@pytest.fixture
def kubectl(api: ApiServerThread) -> Iterator[Client]:
    client = Client(api.url)
    with Controllers(client, api), running(resync_seconds=3600):
        body = tier()
        body["metadata"]["namespace"] = NAMESPACE
        client.apply_tier(body)
        until(client.is_ready)
        yield client


@pytest.mark.parametrize(
    ("group", "plural", "name", "patch"),
    [
        pytest.param(
            RBAC,
            "roles",
            "llama-janitor",
            {"rules": [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get"]}]},
            id="role",
        ),
        pytest.param(CORE, "configmaps", "llama-connector", {"data": {"more.json": "{}"}}, id="an entry"),
        pytest.param(CORE, "services", "llama-engine", {"spec": {"selector": {"blue": "green"}}}, id="a selector"),
        pytest.param(APPS, "deployments", "llama-engine", {"spec": {"paused": True}}, id="a rollout is paused"),
        pytest.param(
            POLICY,
            "poddisruptionbudgets",
            "llama-engine",
            {"spec": {"selector": {"matchLabels": {"a": "b"}}}},
            id="a budget",
        ),
    ],
)
def test_what_is_added_beside_the_pods_is_taken_back_at_once(
    kubectl: Client, group: str, plural: str, name: str, patch: dict[str, Any]
) -> None:
    def ours() -> dict[str, Any]:
        found = kubectl.get(group, plural, name) or {}
        return {field: found.get(field) for field in ("spec", "data", "rules")}

    before = ours()
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


def test_an_env_that_somebody_sets_on_the_engines_is_told_until_the_next_restart_takes_it_back(kubectl: Client) -> None:
    set_env(kubectl, "llama-engine")
    until(lambda: kubectl.condition("UpToDate").get("reason") == "PodsChanged")
    message = kubectl.condition("UpToDate")["message"]
    assert "Deployment/llama-engine: spec.template.spec.containers[engine].env[EXTRA] (kubectl-set)" in message
    assert "kubectl annotate kvt llama -n default --overwrite kvtier.dev/restart=" in message
    until(lambda: "PodsChanged" in {each["reason"] for each in kubectl.items(CORE, "events")})
    until(lambda: kubectl.is_ready() and has_extra(kubectl, "llama-engine"))
    kubectl.merge(TIERS, "kvcachetiers", "llama", {"spec": {"replicas": 3}})
    until(lambda: kubectl.is_ready() and has_extra(kubectl, "llama-engine"))
    annotation = {"metadata": {"annotations": {names.ANNOTATION_RESTART: "now"}}}
    kubectl.merge(TIERS, "kvcachetiers", "llama", annotation)
    until(lambda: not has_extra(kubectl, "llama-engine"))
    until(lambda: kubectl.condition("UpToDate").get("status") == "True")


def test_it_is_taken_back_with_the_restart_also_where_a_controller_writes_first(
    kubectl: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_env(kubectl, "llama-engine")
    until(lambda: kubectl.condition("UpToDate").get("reason") == "PodsChanged")
    remove, late = KubernetesCluster.remove_fields, list[str]()

    def remove_late(self: KubernetesCluster, live: names.Manifest, pointers: Iterable[str]) -> names.Manifest:
        if not late:
            late.append(live["metadata"]["name"])
            kubectl.merge(APPS, "deployments", late[0], {"metadata": {"annotations": {"theirs": "1"}}})
        return remove(self, live, pointers)

    monkeypatch.setattr(KubernetesCluster, "remove_fields", remove_late)
    annotation = {"metadata": {"annotations": {names.ANNOTATION_RESTART: "now"}}}
    kubectl.merge(TIERS, "kvcachetiers", "llama", annotation)
    until(lambda: not has_extra(kubectl, "llama-engine"))
    assert late == ["llama-engine"]


def test_an_env_that_somebody_sets_on_the_janitor_is_taken_back_at_once(kubectl: Client) -> None:
    set_env(kubectl, "llama-janitor")
    until(lambda: not has_extra(kubectl, "llama-janitor"))
