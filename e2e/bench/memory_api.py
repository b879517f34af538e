# SPDX-License-Identifier: Apache-2.0
"""An API server that is nothing but a memory: what an operator lists, watches, applies and patches, as quick as can be.

It validates nothing and converts nothing, and all fields are one owner's: an apply is merged into what stands, and a
write that changes nothing is none. Objects are kept as the JSON that goes out, so that ten thousand tiers with all that
belongs to them take little time to list. One event loop in a thread; what is public may be used from any thread, but
for `write`.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self
from uuid import uuid4

from aiohttp import web

Json = dict[str, Any]
KINDS: Final[dict[str, tuple[str, str, bool]]] = {
    "configmaps": ("v1", "ConfigMap", True),
    "events": ("v1", "Event", True),
    "namespaces": ("v1", "Namespace", False),
    "nodes": ("v1", "Node", False),
    "persistentvolumeclaims": ("v1", "PersistentVolumeClaim", True),
    "pods": ("v1", "Pod", True),
    "secrets": ("v1", "Secret", True),
    "services": ("v1", "Service", True),
    "serviceaccounts": ("v1", "ServiceAccount", True),
    "deployments": ("apps/v1", "Deployment", True),
    "jobs": ("batch/v1", "Job", True),
    "poddisruptionbudgets": ("policy/v1", "PodDisruptionBudget", True),
    "leases": ("coordination.k8s.io/v1", "Lease", True),
    "roles": ("rbac.authorization.k8s.io/v1", "Role", True),
    "rolebindings": ("rbac.authorization.k8s.io/v1", "RoleBinding", True),
    "kvcachetiers": ("kvtier.dev/v1alpha1", "KVCacheTier", True),
}
"""By plural: version, kind, and whether it is in namespaces."""
SHORTEST_PAGE: Final = 500


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


@dataclass(frozen=True, slots=True)
class Target:
    """The object or list that a path names."""

    plural: str
    namespace: str
    name: str
    sub: str


class MemoryApi:
    """The server and what it remembers."""

    def __init__(self) -> None:
        """Be empty; entering the context starts the server."""
        self.requests: Counter[str] = Counter()
        """Requests since the start or the last `clear`, by verb and plural."""
        self.on_write: Callable[[str, Json], None] = lambda _plural, _body: None
        """Told of each object that an apply made or changed, on the server's thread."""
        self._stored: dict[str, dict[tuple[str, str], Stored]] = defaultdict(dict)
        self._versions = itertools.count(1000)
        self._version = 1000
        self._watchers: dict[str, set[tuple[Callable[[Stored, tuple[str, str]], bool], asyncio.Queue[bytes]]]]
        self._watchers = defaultdict(set)
        self._loop: asyncio.AbstractEventLoop
        self._is_up, self._stop = threading.Event(), asyncio.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self.url = ""

    def __enter__(self) -> Self:
        """Start."""
        self._thread.start()
        self._is_up.wait()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop."""
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def put(self, plural: str, body: Json) -> None:
        """Create or replace an object, as another client than the operator."""
        self._act(lambda: self.write(plural, body))

    def fill(self, objects: Iterable[tuple[str, Json]]) -> None:
        """Create objects without events for watches."""

        def act() -> None:
            for plural, body in objects:
                self.write(plural, body, is_told=False)

        self._act(act)

    def _act(self, act: Callable[[], object]) -> None:
        done = threading.Event()

        def run() -> None:
            act()
            done.set()

        self._loop.call_soon_threadsafe(run)
        done.wait()

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

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        app = web.Application(client_max_size=8 << 20)
        app.router.add_route("*", "/{path:.*}", self._handle)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, backlog=1024)
        await site.start()
        host, port = runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        self._is_up.set()
        await self._stop.wait()
        await runner.cleanup()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        target = _target(request.path)
        if target is None:
            return _discovery(request.path)
        verb = "watch" if "watch" in request.query else "list" if _is_list(request, target) else request.method
        self.requests[f"{verb} {target.plural}"] += 1
        if verb == "watch":
            return await self._watch(request, target)
        if verb == "list":
            return self._list(request, target)
        key = (target.namespace, target.name)
        stored = self._stored[target.plural].get(key)
        body = json.loads(await request.read() or b"{}")
        if request.method == "POST":
            metadata = body.setdefault("metadata", {})
            metadata.setdefault("name", f"{metadata.get('generateName', '')}{uuid4().hex[:8]}")
            metadata.setdefault("namespace", target.namespace)
            if (target.namespace, metadata["name"]) in self._stored[target.plural]:
                return _status(409, "AlreadyExists")
            return _json(self.write(target.plural, body).text, 201)
        if stored is None and "apply" not in request.content_type:
            return _status(404, "NotFound")
        if request.method == "GET" and stored is not None:
            return _json(stored.text)
        if request.method == "DELETE":
            self._delete(target.plural, key)
            return _status(200, "Success")
        return self._change(request, target, stored, body)

    def _change(self, request: web.Request, target: Target, stored: Stored | None, body: Json) -> web.Response:
        before = {} if stored is None else stored.body()
        wanted = (body.get("metadata") or {}).get("resourceVersion")
        if before and wanted not in {None, before["metadata"]["resourceVersion"]}:
            return _status(409, "Conflict")
        if target.sub == "status":
            body = {"status": body.get("status")}
        is_apply = request.content_type.startswith("application/apply")
        if is_apply:
            fields = {"manager": request.query.get("fieldManager", ""), "operation": "Apply", "fieldsType": "FieldsV1"}
            body["metadata"]["managedFields"] = [{**fields, "fieldsV1": _fields(body)}]
        after = body if request.method == "PUT" else _merged(before, body)
        after.setdefault("metadata", {}).setdefault("namespace", target.namespace)
        after["metadata"] = {**after["metadata"], "name": target.name}
        if stored is not None and _without_version(after) == _without_version(before):
            return _json(stored.text)
        written = self.write(target.plural, after)
        if is_apply:
            self.on_write(target.plural, written.body())
        return _json(written.text)

    def write(self, plural: str, body: Json, *, is_told: bool = True) -> Stored:
        """Like `put`, on the server's thread."""
        api_version, kind, _ = KINDS[plural]
        metadata = dict(body["metadata"])
        key = (metadata.get("namespace", ""), metadata["name"])
        before = self._stored[plural].get(key)
        self._version = next(self._versions)
        metadata["resourceVersion"] = str(self._version)
        metadata.setdefault("uid", str(uuid4()))
        metadata.setdefault("creationTimestamp", "2026-11-01T00:00:00Z")
        is_changed = before is not None and before.body().get("spec") != body.get("spec")
        metadata["generation"] = metadata.get("generation", 1) + is_changed
        whole = {**body, "apiVersion": api_version, "kind": kind, "metadata": metadata}
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

    def _list(self, request: web.Request, target: Target) -> web.Response:
        matches = _matcher(request, target)
        api_version, kind, _ = KINDS[target.plural]
        start, limit = int(request.query.get("continue", 0)), int(request.query.get("limit", 0)) or 1 << 30
        found = [each for key, each in self._stored[target.plural].items() if matches(each, key)]
        page = found[start : start + limit]
        more = str(start + limit) if start + limit < len(found) else ""
        head = {"apiVersion": api_version, "kind": f"{kind}List"}
        metadata = {"resourceVersion": str(self._version), **({"continue": more} if more else {})}
        text = json.dumps(head)[:-1].encode() + b',"metadata":' + json.dumps(metadata).encode()
        return _json(text + b',"items":[' + b",".join(each.text for each in page) + b"]}")

    async def _watch(self, request: web.Request, target: Target) -> web.StreamResponse:
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
            async with asyncio.timeout(float(request.query.get("timeoutSeconds", 300))):
                while not self._stop.is_set():
                    await response.write(await lines.get())
        except (TimeoutError, ConnectionError):
            pass
        finally:
            self._watchers[target.plural].discard(watcher)
        return response


def _target(path: str) -> Target | None:
    parts = path.strip("/").split("/")
    rest = parts[2:] if parts[0] == "api" else parts[3:]
    namespace = ""
    if len(rest) > 2 and rest[0] == "namespaces":  # noqa: PLR2004  namespaces/NAME/PLURAL
        namespace, rest = rest[1], rest[2:]
    if not rest or rest[0] not in KINDS:
        return None
    padded = [*rest, "", ""]
    return Target(plural=padded[0], namespace=namespace, name=padded[1], sub=padded[2])


def _is_list(request: web.Request, target: Target) -> bool:
    return request.method == "GET" and not target.name


def _matcher(request: web.Request, target: Target) -> Callable[[Stored, tuple[str, str]], bool]:
    wanted = [each.partition("=") for each in request.query.get("labelSelector", "").split(",") if each]
    is_empty = "fieldSelector" in request.query  # there are no Events here

    def matches(stored: Stored, key: tuple[str, str]) -> bool:
        if is_empty or (target.namespace and key[0] != target.namespace):
            return False
        labels = stored.labels
        return all(labels.get(label) == value if has_value else label in labels for label, has_value, value in wanted)

    return matches


def _merged(before: Any, change: Any) -> Any:
    if not isinstance(before, dict) or not isinstance(change, dict):
        return change
    kept = {name: value for name, value in before.items() if name not in change}
    made = {name: _merged(before.get(name), value) for name, value in change.items() if value is not None}
    return {**kept, **made}


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


def _status(code: int, reason: str) -> web.Response:
    is_ok = code < 400  # noqa: PLR2004  where errors begin
    body = {"kind": "Status", "apiVersion": "v1", "status": "Success" if is_ok else "Failure"}
    return _json(json.dumps({**body, "code": code, "reason": reason, "message": reason}).encode(), code)


def _discovery(path: str) -> web.Response:
    """Answer what versions, groups and resources there are."""
    versions = sorted({api_version for api_version, _, _ in KINDS.values() if "/" in api_version})
    parts = path.strip("/")
    if parts == "version":
        return _json(b'{"major":"1","minor":"35","gitVersion":"v1.35.0"}')
    if parts == "api":
        return _json(b'{"kind":"APIVersions","versions":["v1"]}')
    if parts == "apis":
        groups = [_group(each) for each in versions]
        return _json(json.dumps({"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}).encode())
    wanted = parts.removeprefix("apis/").removeprefix("api/")
    resources = [
        {
            "name": plural,
            "singularName": kind.lower(),
            "namespaced": is_namespaced,
            "kind": kind,
            "verbs": ["create", "delete", "get", "list", "patch", "update", "watch"],
        }
        for plural, (api_version, kind, is_namespaced) in KINDS.items()
        if api_version == wanted
    ]
    if not resources:
        return _status(404, "NotFound")
    body = {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": wanted, "resources": resources}
    return _json(json.dumps(body).encode())


def _group(api_version: str) -> Json:
    group, _, version = api_version.partition("/")
    each = {"groupVersion": api_version, "version": version}
    return {"name": group, "versions": [each], "preferredVersion": each}
