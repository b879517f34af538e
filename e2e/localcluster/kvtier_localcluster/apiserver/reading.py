# SPDX-License-Identifier: Apache-2.0
"""Lists with pages, watches, and the logs of pods.

A watch sends the present state or the history, then each commit, and bookmarks. Objects that move into or out of a
selector appear as ADDED and DELETED, as on a real server.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Final

from aiohttp import web

from kvtier_localcluster.apiserver.store.api_errors import ApiError, bad_request
from kvtier_localcluster.apiserver.store.memory import Event, EventType, Storage, Stored, Subscription
from kvtier_localcluster.apiserver.store.objects import Json, ObjectKey, compact_json, object_key
from kvtier_localcluster.apiserver.store.resources import Resource
from kvtier_localcluster.apiserver.store.selectors import Selection

PodLogs = Callable[[str, str, str, int | None, bool], Awaitable[bytes | None]]
"""Reads the log of a container: namespace, pod, container, how many last lines, and whether it is the previous one's.

None stands for a container that has not been restarted.
"""


def list_page(
    storage: Storage, resource: Resource, selection: Selection, query: Mapping[str, str]
) -> tuple[list[Stored], Json]:
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
    after, version = _parse_token(query.get("continue"), resource)
    if version is not None:
        storage.check_version(version)
    version = version or storage.version
    most = int(query.get("limit") or 0) or None
    selected, left = storage.select(resource.key, selection, after=after, most=most)
    metadata: Json = {"resourceVersion": str(version)}
    if left:
        token = compact_json([object_key(selected[-1].manifest), version])
        metadata["continue"] = base64.urlsafe_b64encode(token.encode()).decode()
        if not selection.labels and not selection.fields:  # or else it is unknown, as on a real server
            metadata["remainingItemCount"] = left
    return selected, metadata


def _parse_token(token: str | None, resource: Resource) -> tuple[ObjectKey | None, int | None]:
    if not token:
        return None, None
    try:
        (namespace, name), version = json.loads(base64.urlsafe_b64decode(token))
        return (str(namespace) if resource.is_namespaced else None, str(name)), int(version)
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
        log = await source(pod["metadata"]["namespace"], name, container, tail, is_previous)
    if log is None:
        raise bad_request(f'previous terminated container "{container}" in pod "{name}" not found')
    return log


_DEFAULT_TIMEOUT_SECONDS: Final = 1800.0
_INITIAL_EVENTS_END: Final = {"k8s.io/initial-events-end": "true"}

Frame = tuple[str, bytes]
"""Type (ADDED, MODIFIED, DELETED, BOOKMARK, ERROR) and object, as JSON, of one watch event."""


@dataclass(frozen=True, kw_only=True)
class WatchOptions:
    """The options of a watch request."""

    version: int | None
    """Where to resume; None starts with the present state."""
    wants_end_of_initial_state: bool
    wants_bookmarks: bool
    timeout_seconds: float

    @classmethod
    def parse(cls, query: Mapping[str, str]) -> WatchOptions:
        """Read the query of a watch request."""
        version = query.get("resourceVersion") or "0"
        if not version.isdecimal():
            raise bad_request(f"Invalid value for resourceVersion: {version!r}")
        is_initial = query.get("sendInitialEvents") == "true"
        return cls(
            version=None if version == "0" or is_initial else int(version),
            wants_end_of_initial_state=is_initial,
            wants_bookmarks=query.get("allowWatchBookmarks") in ("true", "1"),
            timeout_seconds=float(query.get("timeoutSeconds") or _DEFAULT_TIMEOUT_SECONDS),
        )


def visible_change(selection: Selection, event: Event) -> str | None:
    """Return how an event looks through a selector, or None where it cannot be seen."""
    was_selected = selection.matches(event.old)
    if event.type is not EventType.DELETED and selection.matches(event.manifest):
        return "MODIFIED" if was_selected else "ADDED"
    return "DELETED" if was_selected else None


@dataclass(frozen=True, kw_only=True)
class Watch:
    """One watch of one client; nothing happens before `frames` is iterated."""

    storage: Storage
    resource: Resource
    selection: Selection
    options: WatchOptions
    show: Callable[[Stored], bytes]
    """Writes an object as JSON."""

    async def frames(self, bookmark_seconds: float) -> AsyncIterator[Frame]:
        """Yield the events of the watch until its time is over or the server drops it."""
        subscription = self.storage.subscribe(self.resource.key)
        try:
            try:
                frames = self._opening()
            except ApiError as error:
                yield "ERROR", compact_json(error.status()).encode()
                return
            for frame in frames:
                yield frame
            async for frame in self._live(subscription, bookmark_seconds):
                yield frame
        finally:
            self.storage.unsubscribe(self.resource.key, subscription)

    def _opening(self) -> list[Frame]:
        """Return the present state, or the events since the version asked for."""
        if self.options.version is not None:
            events = self.storage.since(self.resource.key, self.options.version)
            return [frame for event in events if (frame := self._frame(event)) is not None]
        selected, _ = self.storage.select(self.resource.key, self.selection)
        frames = [("ADDED", self.show(each)) for each in selected]
        if self.options.wants_end_of_initial_state and self.options.wants_bookmarks:
            frames.append(self._bookmark(_INITIAL_EVENTS_END))
        return frames

    async def _live(self, subscription: Subscription, bookmark_seconds: float) -> AsyncIterator[Frame]:
        clock = asyncio.get_running_loop().time
        end = clock() + self.options.timeout_seconds
        next_bookmark = clock() + bookmark_seconds
        while clock() < end:
            wait_seconds = min(end, next_bookmark) - clock() if self.options.wants_bookmarks else end - clock()
            try:
                event = await asyncio.wait_for(subscription.get(), max(0.0, wait_seconds))
            except TimeoutError:
                if self.options.wants_bookmarks and subscription.empty():
                    yield self._bookmark(None)
                next_bookmark = clock() + bookmark_seconds
                continue
            if event is None:
                return
            frame = self._frame(event)
            if frame is not None:
                yield frame

    def _frame(self, event: Event) -> Frame | None:
        change = visible_change(self.selection, event)
        return None if change is None else (change, self.show(event))

    def _bookmark(self, annotations: Json | None) -> Frame:
        metadata: Json = {"resourceVersion": str(self.storage.version), "creationTimestamp": None}
        if annotations:
            metadata["annotations"] = annotations
        resource = self.resource
        bookmark = {"kind": resource.kind, "apiVersion": resource.group_version, "metadata": metadata}
        if resource.kind == "Pod" and not resource.is_custom:  # typed clients refuse a pod without containers
            bookmark["spec"] = {"containers": None}
        return "BOOKMARK", compact_json(bookmark).encode()


async def stream_watch(request: web.Request, frames: AsyncIterator[Frame]) -> web.StreamResponse:
    """Send frames as lines of JSON until they end or the client goes."""
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    await response.prepare(request)
    try:
        async for kind, shown in frames:
            await response.write(b'{"type":"%b","object":%b}\n' % (kind.encode(), shown))
    except ConnectionError:
        return response  # the client has gone
    return response
