# SPDX-License-Identifier: Apache-2.0
"""Role-based access control: the rules that bindings give to a user in the present state.

There is no authentication. A request without impersonation (`kubectl --as`) comes from kubernetes-admin, which may do
everything.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from multidict import CIMultiDictProxy

from kvtier_localcluster.apiserver.requests import RequestTarget
from kvtier_localcluster.apiserver.store.api_errors import ApiError, qualified
from kvtier_localcluster.apiserver.store.memory import Storage
from kvtier_localcluster.apiserver.store.objects import Json

_GROUP: Final = "rbac.authorization.k8s.io"
_MASTERS: Final = "system:masters"
_SERVICE_ACCOUNT: Final = "system:serviceaccount:"
_FOR_EVERYBODY: Final = ("/api", "/apis", "/openapi", "/version", "/healthz", "/livez", "/readyz")


@dataclass(frozen=True)
class User:
    """A user and the groups it is in."""

    name: str = "kubernetes-admin"
    groups: tuple[str, ...] = (_MASTERS, "system:authenticated")

    @classmethod
    def named(cls, name: str, groups: tuple[str, ...]) -> User:
        """Return a user in the groups named and in those of all users of its kind."""
        if name.startswith(_SERVICE_ACCOUNT):
            namespace = name.removeprefix(_SERVICE_ACCOUNT).partition(":")[0]
            groups = (*groups, "system:serviceaccounts", f"system:serviceaccounts:{namespace}")
        return cls(name, (*groups, "system:authenticated"))

    @classmethod
    def of(cls, headers: CIMultiDictProxy[str]) -> User:
        """Return the user of a request."""
        name = headers.get("Impersonate-User")
        return cls() if name is None else cls.named(name, tuple(headers.getall("Impersonate-Group", ())))


@dataclass(frozen=True, kw_only=True)
class Access:
    """One action on the API; an empty field stands for none."""

    verb: str
    group: str = ""
    resource: str = ""
    """The plural, with its subresource: ``deployments/status``."""
    namespace: str = ""
    name: str = ""
    path: str = ""
    """Of a request that is not about resources."""

    @classmethod
    def to(cls, verb: str, target: RequestTarget) -> Access:
        """Return the access that a request needs."""
        resource = f"{target.plural}/{target.subresource}" if target.subresource else target.plural
        namespace, name = target.namespace or "", target.name or ""
        return cls(verb=verb, group=target.group, resource=resource, namespace=namespace, name=name)

    @classmethod
    def asked(cls, spec: Json) -> Access:
        """Return the access that a review asks about."""
        if "nonResourceAttributes" in spec:
            return cls(verb=spec["nonResourceAttributes"].get("verb", ""), path=spec["nonResourceAttributes"]["path"])
        about: Mapping[str, str] = spec.get("resourceAttributes") or {}
        resource = "/".join(filter(None, (about.get("resource"), about.get("subresource"))))
        rest = {field: about.get(field, "") for field in ("verb", "group", "namespace", "name")}
        return cls(resource=resource, **rest)

    def is_covered_by(self, rule: Json) -> bool:
        """Tell whether a rule of a role allows this."""
        if not {self.verb, "*"} & set(rule.get("verbs") or []):
            return False
        if self.path:
            urls = rule.get("nonResourceURLs") or []
            return any(self.path == url or (url.endswith("*") and self.path.startswith(url[:-1])) for url in urls)
        plural, _, subresource = self.resource.partition("/")
        resources = {self.resource, "*", f"*/{subresource}"} if subresource else {plural, "*"}
        names = rule.get("resourceNames")
        return (
            bool({self.group, "*"} & set(rule.get("apiGroups") or []))
            and bool(resources & set(rule.get("resources") or []))
            and (not names or self.name in names)
        )


class Authorizer:
    """Answers from the bindings and roles in storage."""

    def __init__(self, storage: Storage) -> None:
        """Read from one storage."""
        self._storage = storage

    def allows(self, user: User, access: Access) -> bool:
        """Tell whether a user may do something."""
        if _MASTERS in user.groups or (access.path.startswith(_FOR_EVERYBODY) and access.verb == "get"):
            return True
        return any(access.is_covered_by(rule) for rule in self.rules(user, access.namespace))

    def check(self, user: User, access: Access) -> None:
        """Raise ApiError (403) where a user may not do something."""
        if self.allows(user, access):
            return
        plural = access.resource.partition("/")[0]
        what = qualified(plural, access.group) + (f' "{access.name}"' if access.name else "")
        where = f'in the namespace "{access.namespace}"' if access.namespace else "at the cluster scope"
        message = (
            f'{what} is forbidden: User "{user.name}" cannot {access.verb} resource "{access.resource}" in API group '
            f'"{access.group}" {where}'
        )
        raise ApiError(403, "Forbidden", message, name=access.name, group=access.group, kind=plural)

    def rules(self, user: User, namespace: str) -> Iterator[Json]:
        """Yield every rule that holds for a user in a namespace, or cluster-wide if that is empty."""
        bindings = [(each, "") for each in self._storage.all((_GROUP, "clusterrolebindings"))]
        if namespace:
            stored = self._storage.all((_GROUP, "rolebindings"))
            bindings += [(each, namespace) for each in stored if each["metadata"]["namespace"] == namespace]
        for binding, where in bindings:
            if any(_is_subject(user, subject, where) for subject in binding.get("subjects") or []):
                yield from self._role(binding["roleRef"], where).get("rules") or []

    def _role(self, reference: Json, namespace: str) -> Json:
        if reference["kind"] == "Role":
            return self._storage.get((_GROUP, "roles"), (namespace, reference["name"])) or {}
        return self._storage.get((_GROUP, "clusterroles"), (None, reference["name"])) or {}


def _is_subject(user: User, subject: Json, namespace: str) -> bool:
    match subject["kind"]:
        case "User":
            return bool(subject["name"] == user.name)
        case "Group":
            return subject["name"] in user.groups
    return user.name == f"{_SERVICE_ACCOUNT}{subject.get('namespace') or namespace}:{subject['name']}"


def answer_review(authorizer: Authorizer, user: User, review: Json) -> Json:
    """Return an access review with its status."""
    spec = review.get("spec") or {}
    match review.get("kind"):
        case "SelfSubjectReview":
            return {**review, "status": {"userInfo": {"username": user.name, "groups": list(user.groups)}}}
        case "SubjectAccessReview" | "LocalSubjectAccessReview":
            user = User.named(spec.get("user") or "", tuple(spec.get("groups") or ()))
    return {**review, "status": {"allowed": authorizer.allows(user, Access.asked(spec))}}
