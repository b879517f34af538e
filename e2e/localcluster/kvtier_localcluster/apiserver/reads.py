# SPDX-License-Identifier: Apache-2.0
"""Lists, in pages where the client asks for them, and the logs of pods."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from typing import Protocol

from kvtier_localcluster.apiserver.api_errors import ApiError, bad_request
from kvtier_localcluster.apiserver.objects import Json, compact_json, object_key
from kvtier_localcluster.apiserver.resources import Resource
from kvtier_localcluster.apiserver.selectors import Selection
from kvtier_localcluster.apiserver.storage import Storage


class PodLogs(Protocol):
    """Reads the logs of containers."""

    async def __call__(
        self, namespace: str, pod: str, container: str, *, tail: int | None, is_previous: bool
    ) -> bytes | None:
        """Return a log, or its last `tail` lines; None where the container has not been restarted."""


def list_page(
    storage: Storage, resource: Resource, selection: Selection, query: Mapping[str, str]
) -> tuple[list[Json], Json]:
    """Return the objects of a list, or one page of them, and the metadata of the list.

    A later page shows the state of its own time, not that of the first page.

    Raises:
        ApiError: the continue token is damaged (400) or older than the last compaction (410), or the list is to be of
            a version that is yet to come (504).
    """
    asked = query.get("resourceVersion") or "0"
    if asked.isdecimal() and int(asked) > storage.version:
        message = f"Too large resource version: {asked}, current: {storage.version}"
        cause = {"reason": "ResourceVersionTooLarge", "message": "Too large resource version"}
        raise ApiError(504, "Timeout", message, causes=[cause], retryAfterSeconds=1)
    start, version = _parse_token(query.get("continue"))
    if version is not None:
        storage.check_version(version)
    selected = storage.matching(resource.key, selection.matches, label=selection.label)
    if start is not None:
        selected = [each for each in selected if _order(each) > start]
    limit = int(query.get("limit") or 0)
    metadata: Json = {"resourceVersion": str(version or storage.version)}
    if limit and len(selected) > limit:
        metadata["remainingItemCount"] = len(selected) - limit
        selected = selected[:limit]
        metadata["continue"] = _token(_order(selected[-1]), version or storage.version)
    return [resource.view(each) for each in selected], metadata


def _order(manifest: Json) -> list[str]:
    namespace, name = object_key(manifest)
    return [namespace or "", name]


def _token(after: list[str], version: int) -> str:
    return base64.urlsafe_b64encode(compact_json([after, version]).encode()).decode()


def _parse_token(token: str | None) -> tuple[list[str] | None, int | None]:
    if not token:
        return None, None
    try:
        after, version = json.loads(base64.urlsafe_b64decode(token))
        return list(after), int(version)
    except (ValueError, TypeError, binascii.Error) as error:
        raise bad_request("continue key is not valid") from error


async def read_log(pod: Json, query: Mapping[str, str], source: PodLogs | None) -> bytes:
    """Return the log of a container of a pod; `follow` is answered with what there is now.

    Raises:
        ApiError: the container is not named and there are several, is not one of the pod's, or no earlier one is kept.
    """
    name = pod["metadata"]["name"]
    containers = [c["name"] for c in pod["spec"].get("containers") or []]
    init_containers = [c["name"] for c in pod["spec"].get("initContainers") or []]
    container = query.get("container")
    if not container:
        if len(containers) > 1:
            raise bad_request(f"a container name must be specified for pod {name}, choose one of: {containers}")
        container = containers[0]
    if container not in containers + init_containers:
        raise bad_request(f"container {container} is not valid for pod {name}")
    is_previous = query.get("previous") in ("true", "1")
    tail = int(query["tailLines"]) if query.get("tailLines") else None
    log: bytes | None = None if is_previous else b""
    if source is not None:
        log = await source(pod["metadata"]["namespace"], name, container, tail=tail, is_previous=is_previous)
    if log is None:
        raise bad_request(f'previous terminated container "{container}" in pod "{name}" not found')
    return log
