# SPDX-License-Identifier: Apache-2.0
"""An API server that is nothing but a memory: what an operator lists, watches, applies and patches, as quick as can be.

It validates nothing and converts nothing, and all fields are one owner's: an apply is merged into what stands, and a
write that changes nothing is none. Objects are kept as the JSON that goes out, so that ten thousand tiers with all that
belongs to them take little time to list. One event loop in a thread; what is public may be used from any thread, but
for `write`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import yaml
from aiohttp import web

from kvtier_localcluster.apiserver.discovery import discovery_document
from kvtier_localcluster.apiserver.registry.patches import merge_patch
from kvtier_localcluster.apiserver.requests import RequestTarget, parse_path, verb_of
from kvtier_localcluster.apiserver.store.api_errors import ApiError
from kvtier_localcluster.apiserver.store.resources import Registry
from kvtier_localcluster.apiserver.store.selectors import label_tests
from kvtier_localcluster.loop_thread import LoopThread

Json = dict[str, Any]
_CRD: Final = Path(__file__).parents[2] / "crds" / "kvcachetier.yaml"
_LIMIT_SECONDS: Final = 600.0


@dataclass(slots=True)
class Stored:
    """One object as it goes out."""

    version: int
    labels: dict[str, str]
    text: bytes

    def body(self) -> Json:
        """Return it parsed."""
        found: Json = json.loads(self.text)
        return found


class MemoryApi(LoopThread):
    """The server and what it remembers."""

    def __init__(self) -> None:
        """Be empty; entering the context starts the server."""
        super().__init__("memory-api", limit_seconds=_LIMIT_SECONDS)
        self.requests: Counter[str] = Counter()
        """Requests since the start or the last `clear`, by verb and plural."""
        self.on_write: Callable[[str, Json], None] = lambda _plural, _body: None
        """Told of each object that an apply made or changed, on the server's thread."""
        self.url = ""
        self._registry = Registry()
        self._registry.sync_crd(yaml.safe_load(_CRD.read_text()), is_deleted=False)
        self._stored: dict[str, dict[tuple[str, str], Stored]] = defaultdict(dict)
        self._versions = itertools.count(1000)
        self._version = 1000
        self._watchers: dict[str, set[tuple[Callable[[Stored, tuple[str, str]], bool], asyncio.Queue[bytes]]]]
        self._watchers = defaultdict(set)
        self._runner: web.AppRunner

    async def _begin(self) -> None:
        app = web.Application(client_max_size=8 << 20)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0, backlog=1024).start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"

    async def _end(self) -> None:
        for _, lines in [watcher for watchers in self._watchers.values() for watcher in watchers]:
            lines.put_nowait(b"")
        await self._runner.cleanup()

    @property
    def plurals(self) -> list[str]:
        """Return the kinds that are served."""
        return [resource.plural for resource in self._registry]

    def put(self, plural: str, body: Json) -> None:
        """Create or replace an object, as another client than the operator."""
        self.fill([(plural, body)], is_told=True)

    def fill(self, objects: Iterable[tuple[str, Json]], *, is_told: bool = False) -> None:
        """Create objects, without events for watches unless asked."""

        async def act() -> None:
            for plural, body in objects:
                self.write(plural, body, is_told=is_told)

        self.call(act)

    def get(self, plural: str, namespace: str, name: str) -> Json | None:
        """Return an object."""
        found = self._stored[plural].get((namespace, name))
        return None if found is None else found.body()

    def all(self, plural: str) -> Iterator[Json]:
        """Return every object of a kind."""
        return (each.body() for each in tuple(self._stored[plural].values()))

    def clear(self) -> None:
        """Count anew."""
        self.requests.clear()

    def kubeconfig(self) -> Json:
        """Return how a client gets here."""
        return {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "memory", "cluster": {"server": self.url}}],
            "users": [{"name": "operator", "user": {"token": "t"}}],
            "contexts": [{"name": "memory", "context": {"cluster": "memory", "user": "operator"}}],
            "current-context": "memory",
        }

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        target = parse_path(request.path)
        if target is None or self._registry.get(target.group_version, target.plural) is None:
            document = discovery_document(self._registry, request.path)
            return _refusal(404, "NotFound") if document is None else _json(json.dumps(document).encode())
        verb = verb_of(request.method, target, request.query)
        shown = verb if verb in {"watch", "list"} else request.method
        self.requests[f"{shown} {target.plural}"] += 1
        if verb == "watch":
            return await self._watch(request, target)
        if verb == "list":
            return self._list(request, target)
        key = _key(target)
        stored = self._stored[target.plural].get(key)
        body = json.loads(await request.read() or b"{}")
        if verb == "create":
            metadata = body.setdefault("metadata", {})
            metadata.setdefault("name", f"{metadata.get('generateName', '')}{uuid4().hex[:8]}")
            metadata.setdefault("namespace", key[0])
            if (key[0], metadata["name"]) in self._stored[target.plural]:
                return _refusal(409, "AlreadyExists")
            return _json(self.write(target.plural, body).text, 201)
        if stored is None and "apply" not in request.content_type:
            return _refusal(404, "NotFound")
        if verb == "get" and stored is not None:
            return _json(stored.text)
        if verb == "delete":
            self._delete(target.plural, key)
            return _json(b'{"kind":"Status","apiVersion":"v1","status":"Success"}')
        return self._change(request, target, stored, body)

    def _change(self, request: web.Request, target: RequestTarget, stored: Stored | None, body: Json) -> web.Response:
        before = {} if stored is None else stored.body()
        wanted = (body.get("metadata") or {}).get("resourceVersion")
        if before and wanted not in {None, before["metadata"]["resourceVersion"]}:
            return _refusal(409, "Conflict")
        if target.subresource == "status":
            body = {"status": body.get("status")}
        is_apply = request.content_type.startswith("application/apply")
        if is_apply:
            fields = {"manager": request.query.get("fieldManager", ""), "operation": "Apply", "fieldsType": "FieldsV1"}
            body["metadata"]["managedFields"] = [{**fields, "fieldsV1": _fields(body)}]
        after = body if request.method == "PUT" else merge_patch(before, body)
        after.setdefault("metadata", {}).setdefault("namespace", target.namespace or "")
        after["metadata"] = {**after["metadata"], "name": target.name}
        if stored is not None and _without_version(after) == _without_version(before):
            return _json(stored.text)
        written = self.write(target.plural, after)
        if is_apply:
            self.on_write(target.plural, written.body())
        return _json(written.text)

    def write(self, plural: str, body: Json, *, is_told: bool = True) -> Stored:
        """Like `put`, on the server's thread."""
        resource = self._registry.named(plural)
        metadata = dict(body["metadata"])
        key = (metadata.get("namespace", ""), metadata["name"])
        before = self._stored[plural].get(key)
        self._version = next(self._versions)
        metadata["resourceVersion"] = str(self._version)
        metadata.setdefault("uid", str(uuid4()))
        metadata.setdefault("creationTimestamp", "2026-11-01T00:00:00Z")
        is_changed = before is not None and before.body().get("spec") != body.get("spec")
        metadata["generation"] = metadata.get("generation", 1) + is_changed
        whole = {**resource.view(body), "metadata": metadata}
        text = json.dumps(whole, separators=(",", ":")).encode()
        stored = self._stored[plural][key] = Stored(self._version, dict(metadata.get("labels") or {}), text)
        if is_told:
            self._tell(plural, "ADDED" if before is None else "MODIFIED", stored, key)
        return stored

    def _delete(self, plural: str, key: tuple[str, str]) -> None:
        gone = self._stored[plural].pop(key, None)
        if gone is not None:
            self._version = next(self._versions)
            self._tell(plural, "DELETED", gone, key)

    def _tell(self, plural: str, what: str, stored: Stored, key: tuple[str, str]) -> None:
        line = b'{"type":"%s","object":%s}\n' % (what.encode(), stored.text)
        for matches, lines in self._watchers[plural]:
            if matches(stored, key):
                lines.put_nowait(line)

    def _list(self, request: web.Request, target: RequestTarget) -> web.Response:
        matches = _matcher(request, target)
        resource = self._registry.named(target.plural)
        start, limit = int(request.query.get("continue", 0)), int(request.query.get("limit", 0)) or 1 << 30
        found = [each for key, each in self._stored[target.plural].items() if matches(each, key)]
        page = found[start : start + limit]
        more = str(start + limit) if start + limit < len(found) else ""
        head = {"apiVersion": resource.group_version, "kind": f"{resource.kind}List"}
        metadata = {"resourceVersion": str(self._version), **({"continue": more} if more else {})}
        text = json.dumps(head)[:-1].encode() + b',"metadata":' + json.dumps(metadata).encode()
        return _json(text + b',"items":[' + b",".join(each.text for each in page) + b"]}")

    async def _watch(self, request: web.Request, target: RequestTarget) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        lines: asyncio.Queue[bytes] = asyncio.Queue()
        matches = _matcher(request, target)
        since = int(request.query.get("resourceVersion") or 0)
        # Writes between the list and this watch; no test deletes so early.
        for key, each in self._stored[target.plural].items():
            if since and each.version > since and matches(each, key):
                lines.put_nowait(b'{"type":"MODIFIED","object":%s}\n' % each.text)
        watcher = (matches, lines)
        self._watchers[target.plural].add(watcher)
        try:
            with contextlib.suppress(TimeoutError, ConnectionError):
                async with asyncio.timeout(float(request.query.get("timeoutSeconds", 300))):
                    while line := await lines.get():
                        await response.write(line)
        finally:
            self._watchers[target.plural].discard(watcher)
        return response


def _key(target: RequestTarget) -> tuple[str, str]:
    return target.namespace or "", target.name or ""


def _matcher(request: web.Request, target: RequestTarget) -> Callable[[Stored, tuple[str, str]], bool]:
    tests = label_tests(request.query.get("labelSelector", ""))
    is_empty = "fieldSelector" in request.query  # there are no Events here

    def matches(stored: Stored, key: tuple[str, str]) -> bool:
        if is_empty or (target.namespace and key[0] != target.namespace):
            return False
        return all(test(stored.labels) for test in tests)

    return matches


def _fields(body: Any) -> Json:
    """Return what was applied in the notation of managedFields; lists of things without names count as one."""
    if isinstance(body, dict):
        left_out = {"apiVersion", "kind", "name", "namespace", "uid"}
        return {f"f:{name}": _fields(value) for name, value in body.items() if name not in left_out}
    if isinstance(body, list) and body and all(isinstance(each, dict) and "name" in each for each in body):
        return {f"k:{json.dumps({'name': each['name']})}": {".": {}, **_fields(each)} for each in body}
    return {}


def _without_version(body: Json) -> Json:
    metadata = {name: value for name, value in body["metadata"].items() if name not in {"resourceVersion", "uid"}}
    return {**body, "metadata": metadata}


def _json(text: bytes, status: int = 200) -> web.Response:
    return web.Response(body=text, status=status, content_type="application/json")


def _refusal(code: int, reason: str) -> web.Response:
    return _json(json.dumps(ApiError(code, reason, reason).status()).encode(), code)
