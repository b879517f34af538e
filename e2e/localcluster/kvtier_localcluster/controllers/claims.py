# SPDX-License-Identifier: Apache-2.0
"""PersistentVolumeClaims: one directory each, which outlives the cluster and is removed with the claim.

A claim that is deleted while a pod uses it waits for that pod.
"""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import ClassVar

from kvtier_localcluster.apiserver.registry.writes import CLAIM_FINALIZER
from kvtier_localcluster.client import ApiClient
from kvtier_localcluster.controllers.loop import Controller
from kvtier_localcluster.datadir import DataDirectory
from kvtier_localcluster.informers import Change, Informers
from kvtier_localcluster.kinds import PERSISTENT_VOLUME_CLAIM, POD, Json, Key, Kind, is_deleting, key_of, uid_of
from kvtier_localcluster.recorder import Happening


class ClaimController(Controller):
    """Binds claims at once.

    A claim that wants one certain volume (volumeName, selector) is never bound, as there are no such volumes.
    """

    kind: ClassVar[Kind] = PERSISTENT_VOLUME_CLAIM

    def __init__(self, client: ApiClient, informers: Informers, data: DataDirectory) -> None:
        """Listen to claims, and to the pods that use them."""
        super().__init__(client, informers)
        self._data = data
        self._removals: set[asyncio.Task[None]] = set()
        self.own.listen(self._notice_deletion)
        self._pods = informers[POD]
        self._pods.listen(self._notice_pod)

    async def sync(self, key: Key) -> None:
        """Make the directory and bind."""
        claim = self.own.get(key)
        if claim is None:
            return
        if is_deleting(claim):
            await self._release(claim)
            return
        if claim["spec"].get("volumeName") or claim["spec"].get("selector"):
            message = "no persistent volumes available for this claim: the local cluster only makes new ones"
            self.recorder.record(claim, Happening(reason="FailedBinding", message=message))
            await self.write_status(claim, {**(claim.get("status") or {}), "phase": "Pending"})
            return
        directory = self._data.claim(key)
        if (claim.get("status") or {}).get("phase") != "Bound":
            await asyncio.to_thread(directory.mkdir, parents=True, exist_ok=True)
            message = f"Successfully provisioned volume {directory}"
            self.recorder.record(claim, Happening(reason="ProvisioningSucceeded", message=message))
        await self.write_status(claim, _bound_status(claim))

    async def _release(self, claim: Json) -> None:
        """Let a claim go that no scheduled pod names, finished pods included, as in a real cluster."""
        finalizers = claim["metadata"].get("finalizers") or []
        is_used = any(pod["spec"].get("nodeName") and key_of(claim) in _claims_of(pod) for pod in self._pods)
        if CLAIM_FINALIZER in finalizers and not is_used:
            left = [each for each in finalizers if each != CLAIM_FINALIZER]
            await self.client.patch(PERSISTENT_VOLUME_CLAIM, claim, {"metadata": {"finalizers": left}})

    def _notice_pod(self, change: Change) -> None:
        for key in _claims_of(change.object) if change.is_gone else ():
            self.enqueue(key)

    def _notice_deletion(self, change: Change) -> None:
        # LOST is no deletion that anybody asked for: the directory is the user's data, so in doubt it stays.
        if change.type == "DELETED":
            directory = self._data.claim(key_of(change.object))
            grave = self._data.discarded_claim(uid_of(change.object))
            task = asyncio.get_running_loop().create_task(asyncio.to_thread(_remove, directory, grave))
            self._removals.add(task)
            task.add_done_callback(self._removals.discard)


def _claims_of(pod: Json) -> set[Key]:
    sources = [volume.get("persistentVolumeClaim") for volume in pod["spec"].get("volumes") or []]
    return {(key_of(pod)[0], source["claimName"]) for source in sources if source}


def _bound_status(claim: Json) -> Json:
    requests = (claim["spec"].get("resources") or {}).get("requests") or {}
    return {
        "phase": "Bound",
        "accessModes": claim["spec"].get("accessModes") or ["ReadWriteOnce"],
        "capacity": {"storage": requests.get("storage", "1Gi")},
    }


def _remove(directory: Path, grave: Path) -> None:
    """Move the directory out of the way first: a new claim of the same name starts empty at once."""
    if directory.exists():
        grave.parent.mkdir(parents=True, exist_ok=True)
        directory.rename(grave)
        shutil.rmtree(grave, ignore_errors=True)
