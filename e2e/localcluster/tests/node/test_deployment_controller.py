# SPDX-License-Identifier: Apache-2.0
"""The Deployment controller on its own, against an API server in which nobody else works."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from kvtier_localcluster.apiserver import ApiServerThread
from kvtier_localcluster.client import ApiClient
from kvtier_localcluster.controllers.deployments import DeploymentController
from kvtier_localcluster.informers import Informers
from kvtier_localcluster.kinds import DEPLOYMENT, REPLICA_SET, Json, Kind, key_of

WEB: Json = {
    "metadata": {"name": "web", "namespace": "default"},
    "spec": {
        "replicas": 1,
        "selector": {"matchLabels": {"app": "web"}},
        "template": {
            "metadata": {"labels": {"app": "web"}},
            "spec": {"containers": [{"name": "main", "image": "example.org/web:1"}]},
        },
    },
}


class EditedMeanwhile(ApiClient):
    """A client that scales the Deployment to two while a ReplicaSet is made for it, and hears of that at once."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.informers = Informers(self)

    async def create(self, kind: Kind, manifest: Mapping[str, Any]) -> Json:
        created = await super().create(kind, manifest)
        if kind == REPLICA_SET:
            (deployment,) = self.informers[DEPLOYMENT]
            self.informers[DEPLOYMENT].remember(await self.patch(DEPLOYMENT, deployment, {"spec": {"replicas": 2}}))
        return created


async def sync_twice(url: str) -> list[Json]:
    """Sync the Deployment, edited meanwhile, and once more; return it as it stood after each."""
    client = EditedMeanwhile(url)
    await client.start()
    try:
        controller = DeploymentController(client, client.informers)
        made = await client.create(DEPLOYMENT, WEB)
        client.informers[DEPLOYMENT].remember(made)
        found = []
        for _ in range(2):
            await controller.sync(key_of(made))
            found.append(await client.get(DEPLOYMENT, key_of(made)))
        return found
    finally:
        await client.close()


def test_a_status_tells_the_generation_that_was_synced_though_a_later_one_is_known() -> None:
    with ApiServerThread() as api:
        edited, caught_up = asyncio.run(sync_twice(api.url))
    assert (edited["metadata"]["generation"], edited["spec"]["replicas"]) == (2, 2)
    assert edited["status"]["observedGeneration"] == 1
    assert caught_up["status"]["observedGeneration"] == 2
