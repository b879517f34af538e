# SPDX-License-Identifier: Apache-2.0
"""Enforce Roles and ClusterRoles on some of the requests: append `Rbac(...).fault` to the faults of a server.

Bindings are not followed: a test says whose requests are meant, and gives the roles of that subject.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from kvtier_localcluster.apiserver.requests import RequestTarget, parse_path, verb_of
from kvtier_localcluster.apiserver.store.api_errors import ApiError
from kvtier_localcluster.apiserver.store.objects import Json


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
    exists: Callable[[RequestTarget], bool] = lambda _target: True
    """Whether an object stands: applying one that does not is a create, too."""
    used: set[Grant] = field(default_factory=set)
    denied: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
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

    def _judge(self, verb: str, target: RequestTarget, request: web.Request) -> ApiError | None:
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


def _allows(grant: Grant, verb: str, target: RequestTarget, query: Any) -> bool:
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


def _resource(target: RequestTarget) -> str:
    return f"{target.plural}/{target.subresource}" if target.subresource else target.plural
