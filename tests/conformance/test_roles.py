# SPDX-License-Identifier: Apache-2.0
"""Role-based access: what bindings allow, what they do not, and roles that are made of others."""

from __future__ import annotations

import secrets

import pytest
from objects import GROUP, Http, Kubectl, Until, config_map, widget

RBAC = "/apis/rbac.authorization.k8s.io/v1"


@pytest.fixture
def user() -> str:
    return f"user-{secrets.token_hex(4)}"


def as_user(name: str, *groups: str) -> dict[str, str]:
    return {"Impersonate-User": name, **({"Impersonate-Group": groups[0]} if groups else {})}


def test_who_is_bound_to_nothing_may_do_nothing(http: Http, core: str, user: str, namespace: str) -> None:
    code, refused = http("GET", f"{core}/pods", headers=as_user(user))
    assert (code, refused["reason"]) == (403, "Forbidden")
    where = f'in API group "" in the namespace "{namespace}"'
    assert refused["message"] == f'pods is forbidden: User "{user}" cannot list resource "pods" {where}'
    code, refused = http("GET", "/api/v1/nodes/n", headers=as_user(user))
    assert refused["message"] == (
        f'nodes "n" is forbidden: User "{user}" cannot get resource "nodes" in API group "" at the cluster scope'
    )


@pytest.mark.parametrize(
    ("verb", "resource", "is_allowed"),
    [
        ("get", "configmaps", True),
        ("list", "configmaps", True),
        ("create", "configmaps", False),
        ("get", "secrets", False),
        ("patch", f"widgets.{GROUP}/status", True),
        ("patch", f"widgets.{GROUP}", False),
    ],
)
def test_a_role_allows_what_it_names(
    kubectl: Kubectl, user: str, widgets: str, verb: str, resource: str, is_allowed: bool
) -> None:
    kubectl("create", "role", "r", "--verb=get,list", "--resource=configmaps")
    kubectl("create", "role", "s", "--verb=patch", f"--resource=widgets.{GROUP}/status")
    for role in "rs":
        kubectl("create", "rolebinding", role, f"--role={role}", f"--user={user}")
    plural, _, subresource = resource.partition("/")
    asked = ["auth", "can-i", verb, plural, f"--as={user}", *([f"--subresource={subresource}"] if subresource else [])]
    assert kubectl.run(*asked).stdout.strip() == ("yes" if is_allowed else "no")


def test_a_role_may_be_for_one_name_only(http: Http, core: str, kubectl: Kubectl, user: str) -> None:
    for name in "ab":
        http("POST", f"{core}/configmaps", config_map(name))
    kubectl("create", "role", "r", "--verb=get", "--resource=configmaps", "--resource-name=a")
    kubectl("create", "rolebinding", "r", "--role=r", f"--user={user}")
    codes = [http("GET", f"{core}/configmaps/{name}", headers=as_user(user))[0] for name in "ab"]
    assert codes == [200, 403]


def test_a_group_and_a_service_account_can_be_bound(
    http: Http, core: str, kubectl: Kubectl, user: str, namespace: str
) -> None:
    kubectl("create", "role", "r", "--verb=list", "--resource=configmaps")
    kubectl("create", "rolebinding", "g", "--role=r", f"--group={user}-group")
    kubectl("create", "rolebinding", "s", "--role=r", f"--serviceaccount={namespace}:robot")
    robot = f"system:serviceaccount:{namespace}:robot"
    path = f"{core}/configmaps"
    assert http("GET", path, headers=as_user(user, f"{user}-group"))[0] == 200
    assert http("GET", path, headers=as_user(robot))[0] == 200
    assert http("GET", path, headers=as_user(f"system:serviceaccount:{namespace}:other"))[0] == 403


def test_a_cluster_role_can_be_bound_in_one_namespace(http: Http, core: str, kubectl: Kubectl, user: str) -> None:
    kubectl("create", "rolebinding", "v", "--clusterrole=view", f"--user={user}")
    assert http("GET", f"{core}/configmaps", headers=as_user(user))[0] == 200
    assert http("GET", f"{core}/secrets", headers=as_user(user))[0] == 403
    assert http("GET", "/api/v1/namespaces/default/configmaps", headers=as_user(user))[0] == 403
    assert http("POST", f"{core}/configmaps", config_map(), headers=as_user(user))[0] == 403


def test_a_review_answers_for_somebody_else(http: Http, kubectl: Kubectl, user: str, namespace: str) -> None:
    kubectl("create", "rolebinding", "e", "--clusterrole=edit", f"--user={user}")
    about = {"namespace": namespace, "verb": "create", "group": "apps", "resource": "deployments"}
    for group, is_allowed in (("apps", True), ("rbac.authorization.k8s.io", False)):
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SubjectAccessReview",
            "spec": {"user": user, "resourceAttributes": {**about, "group": group}},
        }
        code, answer = http("POST", "/apis/authorization.k8s.io/v1/subjectaccessreviews", review)
        assert code == 201
        assert answer["status"]["allowed"] is is_allowed


@pytest.mark.needs("controllers")
def test_roles_can_be_added_to_those_that_everybody_has(
    http: Http, widgets: str, kubectl: Kubectl, user: str, until: Until
) -> None:
    name = f"conformance-{secrets.token_hex(4)}"
    rules = [{"apiGroups": [GROUP], "resources": ["widgets"], "verbs": ["get", "list", "watch"]}]
    labels = {"rbac.authorization.k8s.io/aggregate-to-view": "true"}
    metadata = {"name": name, "labels": labels}
    kubectl("create", "rolebinding", "v", "--clusterrole=view", f"--user={user}")
    kubectl("create", "rolebinding", "a", "--clusterrole=admin", f"--user={user}-admin")
    assert http("GET", widgets, headers=as_user(user))[0] == 403
    try:
        assert http("POST", f"{RBAC}/clusterroles", {"metadata": metadata, "rules": rules})[0] == 201
        until(lambda: http("GET", widgets, headers=as_user(user))[0] == 200)
        until(lambda: http("GET", widgets, headers=as_user(f"{user}-admin"))[0] == 200)
        assert http("POST", widgets, widget(), headers=as_user(user))[0] == 403
    finally:
        http("DELETE", f"{RBAC}/clusterroles/{name}")
    until(lambda: http("GET", widgets, headers=as_user(user))[0] == 403)


@pytest.mark.since(28)
def test_kubectl_says_who_one_is(kubectl: Kubectl, user: str) -> None:
    assert kubectl("auth", "whoami", f"--as={user}", "-o", "jsonpath={.status.userInfo.username}") == user
