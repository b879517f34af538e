# SPDX-License-Identifier: Apache-2.0
"""The HTTP client of the node and the controllers for the API server.

One event loop; every call may raise ApiFailure.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from typing import Any, NamedTuple

import aiohttp

from kvtier_localcluster.errors import ApiFailure, failure_for
from kvtier_localcluster.kinds import Json, Key, Kind, key_of

_MERGE_PATCH = "application/merge-patch+json"
_WATCH_LINE_BYTES = 8 << 20  # a line is one object, and aiohttp refuses lines longer than twice its buffer
_ERROR_STATUS = 400


class WatchEvent(NamedTuple):
    """One line of a watch."""

    type: str
    object: Json


class ApiClient:
    """Reads and writes objects of the API server at one address."""

    def __init__(self, url: str) -> None:
        """Store the address; the connection pool is made by `start`."""
        self._url = url.rstrip("/")
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        """Open the connection pool in the running loop."""
        self._session = aiohttp.ClientSession(
            base_url=self._url,
            connector=aiohttp.TCPConnector(limit=0),  # every watch holds a connection
            headers={"User-Agent": "kvtier-localcluster"},
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=5),
            read_bufsize=_WATCH_LINE_BYTES,
        )

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    async def get(self, kind: Kind, key: Key) -> Json:
        """Return one object."""
        return await self._request("GET", kind.path(key))

    async def list(self, kind: Kind) -> tuple[list[Json], str]:
        """Return all objects of a kind and the resource version to watch from."""
        answer = await self._request("GET", kind.path())
        items = [{"apiVersion": kind.api_version, "kind": kind.name, **item} for item in answer["items"]]
        return items, str(answer["metadata"]["resourceVersion"])

    async def create(self, kind: Kind, manifest: Mapping[str, Any]) -> Json:
        """Create an object in the namespace that its metadata names."""
        key = manifest["metadata"].get("namespace", ""), ""
        body = {"apiVersion": kind.api_version, "kind": kind.name, **manifest}
        return await self._request("POST", kind.path(key), body=body)

    async def patch(self, kind: Kind, target: Mapping[str, Any], change: Json, *, subresource: str = "") -> Json:
        """Apply a merge patch to exactly this object, never to a later one of the same name."""
        metadata = {**change.get("metadata", {}), "uid": target["metadata"]["uid"]}
        path = kind.path(key_of(target), subresource)
        return await self._request("PATCH", path, body={**change, "metadata": metadata}, content_type=_MERGE_PATCH)

    async def delete(self, kind: Kind, target: Mapping[str, Any], *, grace_seconds: int | None = None) -> Json:
        """Delete exactly this object; pods end gracefully unless grace_seconds is 0."""
        body: Json = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": target["metadata"]["uid"]}}
        if grace_seconds is not None:
            body["gracePeriodSeconds"] = grace_seconds
        return await self._request("DELETE", kind.path(key_of(target)), body=body)

    async def watch(self, kind: Kind, version: str) -> AsyncIterator[WatchEvent]:
        """Yield the changes after a resource version until the server ends the watch."""
        query = {"watch": "true", "resourceVersion": version, "allowWatchBookmarks": "true"}
        try:
            async with self._pool.get(kind.path(), params=query) as answer:
                await _raise_for_status(answer)
                async for line in answer.content:
                    event = WatchEvent(**json.loads(line))
                    if event.type == "ERROR":
                        raise failure_for(event.object.get("code", 0), event.object.get("message", ""))
                    yield event
        except (aiohttp.ClientError, TimeoutError) as problem:
            raise ApiFailure(f"watching {kind.plural} at {self._url}: {problem!r}") from problem

    @property
    def _pool(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise ApiFailure("the client was not started")
        return self._session

    async def _request(
        self, method: str, path: str, *, body: Json | None = None, content_type: str = "application/json"
    ) -> Json:
        payload = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": content_type} if payload else {}
        try:
            async with self._pool.request(method, path, data=payload, headers=headers) as answer:
                await _raise_for_status(answer)
                result: Json = await answer.json(content_type=None)
        except (aiohttp.ClientError, TimeoutError) as problem:
            raise ApiFailure(f"{method} {self._url}{path}: {problem!r}") from problem
        return result


async def _raise_for_status(answer: aiohttp.ClientResponse) -> None:
    if answer.status < _ERROR_STATUS:
        return
    text = await answer.text()
    try:
        message = json.loads(text)["message"]
    except (ValueError, KeyError, TypeError):
        message = text[:500]
    raise failure_for(answer.status, f"{answer.method} {answer.url.path}: {message}")
