# SPDX-License-Identifier: Apache-2.0
"""The interface to a cluster: implemented by the client, by the memory in front of it, and by fakes of tests."""

from __future__ import annotations

import builtins
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from kvtier_operator.names import Manifest, ObjectKey, TierRef


class Cluster(Protocol):
    """The calls of a reconcile to a cluster; every method may raise `ClusterError`."""

    def get(self, key: ObjectKey, namespace: str) -> Manifest | None:
        """Return the object, or None where there is none."""

    def refresh(self, key: ObjectKey, namespace: str) -> Manifest | None:
        """Return the object as it stands at this moment, whatever is remembered of it."""

    def list(self, api_version: str, kind: str, *, namespace: str, selector: str) -> list[Manifest]:
        """Return the objects that carry the labels of the selector."""

    def tiers_on(self, claim: str, namespace: str) -> builtins.list[Manifest]:
        """Return the tiers that keep their blocks on a claim."""

    def pages(self, api_version: str, kind: str, *, namespace: str) -> Iterator[builtins.list[Manifest]]:
        """Return all objects of a kind, some at a time; the empty namespace is all of them."""

    def apply(self, manifest: Manifest, *, over: str | None) -> Manifest:
        """Create or update an object by server-side apply and return it as it then stands.

        Args:
            manifest: every field we own, and no other.
            over: uid of the object of ours that is to be updated, whose conflicting fields we take; None creates, and
                takes no field from another manager.
        """

    def try_apply(self, manifest: Manifest, *, over: str | None) -> None:
        """Have the API server judge an apply without storing anything; see `apply`.

        Raises:
            ClusterRejected: the object is invalid, or an admission policy refuses it.
        """

    def delete(self, key: ObjectKey, namespace: str, *, uid: str) -> None:
        """Delete that incarnation of the object; no error where it is gone already."""

    def patch_status(self, tier: TierRef, changes: Mapping[str, Any], *, resource_version: str) -> Manifest | None:
        """Merge changes into the status of that incarnation of a tier, in that version; None removes a field.

        Returns:
            The tier as it then is; None where it is gone.

        Raises:
            ClusterConflict: it changed since: the changes were worked out for a status that is not there any more.
        """

    def post_event(self, event: Manifest) -> None:
        """Create an Event."""

    def events(self, namespace: str, *, uid: str) -> builtins.list[Manifest]:
        """Return the Events about one object."""
