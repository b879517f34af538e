# SPDX-License-Identifier: Apache-2.0
"""Aggregated ClusterRoles, such as view, edit and admin: they hold the rules of the roles that they select."""

from __future__ import annotations

from typing import ClassVar

from kvtier_localcluster.apiserver.store.selectors import labels_match
from kvtier_localcluster.client import ApiClient
from kvtier_localcluster.controllers.loop import Controller
from kvtier_localcluster.informers import Change, Informers
from kvtier_localcluster.kinds import CLUSTER_ROLE, Json, Key, Kind, is_deleting, key_of


class RoleController(Controller):
    """Fills in the rules of aggregated ClusterRoles."""

    kind: ClassVar[Kind] = CLUSTER_ROLE

    def __init__(self, client: ApiClient, informers: Informers) -> None:
        """Listen to ClusterRoles: each may be part of another."""
        super().__init__(client, informers)
        self.own.listen(self._notice)

    async def sync(self, key: Key) -> None:
        """Gather the rules of one role."""
        role = self.own.get(key)
        if role is None or is_deleting(role) or not role.get("aggregationRule"):
            return
        rules: list[Json] = []
        for part in sorted(self.own, key=key_of):
            if key_of(part) != key and _is_selected(role, part):
                rules += [rule for rule in part.get("rules") or [] if rule not in rules]
        if rules != (role.get("rules") or []):
            self.own.remember(await self.client.patch(CLUSTER_ROLE, role, {"rules": rules}))

    def _notice(self, change: Change) -> None:
        del change  # whichever role it was
        for role in self.own:
            if role.get("aggregationRule"):
                self.enqueue(key_of(role))


def _is_selected(role: Json, part: Json) -> bool:
    labels = part["metadata"].get("labels") or {}
    selectors = role["aggregationRule"].get("clusterRoleSelectors") or []
    return any(labels_match(selector, labels) for selector in selectors)
