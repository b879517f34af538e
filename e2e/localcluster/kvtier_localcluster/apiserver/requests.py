# SPDX-License-Identifier: Apache-2.0
"""Request targets in the terms of RBAC, and the audit log that tests read. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

_WATCHING: Final = ("true", "1")
_NAMESPACE_SUBRESOURCES: Final = ("status", "finalize")
_VERBS: Final = {"POST": "create", "PUT": "update", "PATCH": "patch"}


@dataclass(frozen=True, kw_only=True)
class RequestTarget:
    """The object, list or subresource that a path names."""

    group_version: str
    plural: str
    namespace: str | None = None
    name: str | None = None
    subresource: str | None = None

    @property
    def group(self) -> str:
        """Return the API group; empty for the core group."""
        return self.group_version.rpartition("/")[0]


def parse_path(path: str) -> RequestTarget | None:
    """Return what a path names, or None for a path that is not about resources."""
    match path.strip("/").split("/"):
        case ["api", version, *rest] if rest:
            group_version = version
        case ["apis", group, version, *rest] if rest:
            group_version = f"{group}/{version}"
        case _:
            return None
    namespace = None
    is_below_namespace = rest[0] == "namespaces" and len(rest) > 2  # noqa: PLR2004 (namespaces, its name, more)
    if is_below_namespace and not (len(rest) == 3 and rest[2] in _NAMESPACE_SUBRESOURCES):  # noqa: PLR2004 (namespaces, its name, subresource)
        namespace, rest = rest[1], rest[2:]
    if len(rest) > 3:  # noqa: PLR2004 (plural, name, subresource)
        return None
    plural, name, subresource = (*rest, "", "")[:3]
    return RequestTarget(
        group_version=group_version,
        plural=plural,
        namespace=namespace,
        name=name or None,
        subresource=subresource or None,
    )


@dataclass(frozen=True, kw_only=True)
class AuditEntry:
    """One request."""

    method: str
    path: str
    query: str
    user_agent: str
    verb: str
    """As RBAC names it: get, list, watch, create, update, patch, delete, deletecollection."""
    target: RequestTarget | None
    """None for discovery, health and the like."""

    def __str__(self) -> str:
        """Return the entry as one log line."""
        return f"{self.method} {self.path}{'?' if self.query else ''}{self.query} {self.user_agent}"


def verb_of(method: str, target: RequestTarget | None, query: Mapping[str, str]) -> str:
    """Return the RBAC verb of a request."""
    is_named = target is not None and target.name is not None
    if method == "GET":
        if query.get("watch") in _WATCHING:
            return "watch"
        return "get" if is_named or target is None else "list"
    if method == "DELETE":
        return "delete" if is_named else "deletecollection"
    return _VERBS.get(method, method.lower())
