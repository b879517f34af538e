# SPDX-License-Identifier: Apache-2.0
"""Who may do what: Roles and ClusterRoles as their bindings give them to users, asked of the present state.

There is no authentication: who does not impersonate anybody (`kubectl --as`) is kubernetes-admin, who may do all.

Enforce Roles and ClusterRoles on some of the requests: append `Rbac(...).fault` to the faults of a server. Pure.

Bindings are not followed: whoever sets this up says whose requests are meant, and gives that subject's roles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from aiohttp import web
from multidict import CIMultiDictProxy

from kvtier_localcluster.apiserver.requests import Target, parse_path, verb_of
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
        """Return a user in the groups named and in those that everybody of its kind is in."""
        if name.startswith(_SERVICE_ACCOUNT):
            namespace = name.removeprefix(_SERVICE_ACCOUNT).partition(":")[0]
            groups = (*groups, "system:serviceaccounts", f"system:serviceaccounts:{namespace}")
        return cls(name, (*groups, "system:authenticated"))

    @classmethod
    def of(cls, headers: CIMultiDictProxy[str]) -> User:
        """Return whom a request speaks for."""
        name = headers.get("Impersonate-User")
        return cls() if name is None else cls.named(name, tuple(headers.getall("Impersonate-Group", ())))


@dataclass(frozen=True, kw_only=True)
class Access:
    """One thing that somebody wants to do; a field that is empty stands for none."""

    verb: str
    group: str = ""
    resource: str = ""
    """The plural, with its subresource: ``deployments/status``."""
    namespace: str = ""
    name: str = ""
    path: str = ""
    """Of a request that is not about resources."""

    @classmethod
    def to(cls, verb: str, target: Target) -> Access:
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
        case "SelfSubjectRulesReview":
            is_master = _MASTERS in user.groups
            everything = {"verbs": ["*"], "apiGroups": ["*"], "resources": ["*"]}
            rules = [everything] if is_master else list(authorizer.rules(user, spec.get("namespace") or ""))
            status = {
                "incomplete": False,
                "nonResourceRules": [],
                "resourceRules": [r for r in rules if "resources" in r],
            }
            return {**review, "status": status}
        case "SubjectAccessReview" | "LocalSubjectAccessReview":
            user = User.named(spec.get("user") or "", tuple(spec.get("groups") or ()))
    return {**review, "status": {"allowed": authorizer.allows(user, Access.asked(spec))}}


@dataclass(frozen=True, order=True)
class Grant:
    """One thing that a role allows."""

    verb: str
    group: str
    resource: str
    """The plural, with its subresource: ``deployments/status``."""
    namespace: str = ""
    """Empty for every namespace."""
    name: str = ""
    """Empty for every name."""

    def __str__(self) -> str:
        """Return it as people say it."""
        where = f" in {self.namespace}" if self.namespace else ""
        return f"{self.verb} {self.resource}{'.' if self.group else ''}{self.group}{where} {self.name}".rstrip()


def aggregated(role: Json, among: Iterable[Json]) -> Json:
    """Return a ClusterRole with the rules that its aggregationRule gathers, as the controller manager writes them."""
    selectors = [each.get("matchLabels") or {} for each in role["aggregationRule"]["clusterRoleSelectors"]]
    chosen = [
        other
        for other in among
        if other["kind"] == "ClusterRole"
        and any(selector.items() <= (other["metadata"].get("labels") or {}).items() for selector in selectors)
    ]
    return {**role, "rules": [rule for other in chosen for rule in other.get("rules") or []]}


def grants_of(roles: Iterable[Json]) -> set[Grant]:
    """Return everything that the Roles and ClusterRoles among the manifests allow."""
    found: set[Grant] = set()
    for role in roles:
        if role["kind"] not in {"Role", "ClusterRole"}:
            continue
        namespace = role["metadata"]["namespace"] if role["kind"] == "Role" else ""
        for rule in role.get("rules") or []:
            found |= {
                Grant(verb, group, resource, namespace, name)
                for verb in rule["verbs"]
                for group in rule.get("apiGroups", [""])
                for resource in rule.get("resources", [])
                for name in rule.get("resourceNames") or [""]
            }
    return found


@dataclass
class Rbac:
    """Denies what the roles do not allow, and remembers what was used of them."""

    roles: list[Json]
    is_subject: Callable[[web.Request], bool]
    exists: Callable[[Target], bool] = lambda _target: True
    """Whether an object stands: applying one that does not is a create, too."""
    used: set[Grant] = field(default_factory=set)
    denied: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Read the roles once."""
        self.grants = grants_of(self.roles)

    def fault(self, request: web.Request) -> ApiError | None:
        """Answer a request that is not allowed with 403, as the API server does."""
        target = parse_path(request.path)
        if target is None or not self.is_subject(request):
            return None
        verbs = [verb_of(request.method, target, request.query)]
        if "apply-patch" in request.headers.get("Content-Type", "") and not self.exists(target):
            verbs.append("create")
        return next(filter(None, (self._judge(verb, target, request) for verb in verbs)), None)

    def _judge(self, verb: str, target: Target, request: web.Request) -> ApiError | None:
        allowing = {grant for grant in self.grants if _allows(grant, verb, target, request.query)}
        if allowing:
            self.used |= allowing
            return None
        resource = _resource(target)
        where = f'in the namespace "{target.namespace}"' if target.namespace else "at the cluster scope"
        message = (
            f'{resource}.{target.group} "{target.name or ""}" is forbidden: User "subject" cannot {verb} resource '
            f'"{resource}" in API group "{target.group}" {where}'
        )
        self.denied.append(message)
        return ApiError(403, "Forbidden", message)


def _allows(grant: Grant, verb: str, target: Target, query: Any) -> bool:
    is_named = (
        not grant.name or grant.name == target.name or query.get("fieldSelector") == f"metadata.name={grant.name}"
    )
    return (
        grant.verb in {verb, "*"}
        and grant.group in {target.group, "*"}
        and grant.resource in {_resource(target), "*"}
        and grant.namespace in {"", target.namespace}
        and is_named
    )


def _resource(target: Target) -> str:
    return f"{target.plural}/{target.subresource}" if target.subresource else target.plural
