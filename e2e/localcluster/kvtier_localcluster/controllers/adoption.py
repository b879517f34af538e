# SPDX-License-Identifier: Apache-2.0
"""Adoption: a controller takes in what matches its selector and has no controller, and lets go what matches no more."""

from __future__ import annotations

from kvtier_localcluster.apiserver.selectors import labels_match
from kvtier_localcluster.client import ApiClient
from kvtier_localcluster.errors import Conflict, NotFound
from kvtier_localcluster.informers import Informer
from kvtier_localcluster.kinds import Json, Kind, controlled_by, controller_uid, is_deleting, key_of, uid_of


def selects(owner: Json, child: Json) -> bool:
    """Tell whether an object is one that its owner's selector asks for."""
    is_near = key_of(owner)[0] == key_of(child)[0]
    return is_near and labels_match(owner["spec"].get("selector"), child["metadata"].get("labels") or {})


async def claim(client: ApiClient, owner_kind: Kind, owner: Json, children: Informer) -> None:
    """Adopt and release until the owner references agree with the owner's selector."""
    for child in children:
        is_ours = controller_uid(child) == uid_of(owner)
        is_orphan = controller_uid(child) is None and not is_deleting(child)
        references = child["metadata"].get("ownerReferences") or []
        if is_orphan and selects(owner, child):
            wanted = [*references, controlled_by(owner_kind, owner)]
        elif is_ours and not selects(owner, child):
            wanted = [reference for reference in references if reference["uid"] != uid_of(owner)]
        else:
            continue
        try:
            children.remember(await client.patch(children.kind, child, {"metadata": {"ownerReferences": wanted}}))
        except (NotFound, Conflict):
            continue  # it has gone meanwhile, or another of its name has come: the watch will tell
