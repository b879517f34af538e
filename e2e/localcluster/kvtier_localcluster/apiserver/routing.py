# SPDX-License-Identifier: Apache-2.0
"""HTTP requests and answers: each request becomes one call of a writer, deleter, list or watch."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from aiohttp import web

from kvtier_localcluster.apiserver import discovery, reading, streams, tables
from kvtier_localcluster.apiserver.registry.deletion import DeleteOptions, Deleter
from kvtier_localcluster.apiserver.registry.patches import APPLY, MERGE, Patch
from kvtier_localcluster.apiserver.registry.writes import WriteOptions, Writer
from kvtier_localcluster.apiserver.requests import AuditEntry, RequestTarget, parse_path, verb_of
from kvtier_localcluster.apiserver.store import protobuf
from kvtier_localcluster.apiserver.store.api_errors import ApiError, bad_request, invalid, unknown_path
from kvtier_localcluster.apiserver.store.memory import Storage, Stored
from kvtier_localcluster.apiserver.store.objects import Json, ObjectKey, compact_json, field_at, object_key
from kvtier_localcluster.apiserver.store.resources import Registry, Resource, ScalePaths
from kvtier_localcluster.apiserver.store.selectors import Selection, selectable_fields

logger = logging.getLogger(__name__)

Fault = Callable[[web.Request], ApiError | None]
"""Looks at a request and returns the error to answer with, or None to let it pass."""

_AUDIT_LIMIT: Final = 100_000
_HEALTH: Final = ("/healthz", "/livez", "/readyz")
_WRITABLE_SUBRESOURCES: Final = (None, "status", "scale", "finalize")
_STATUS_SUCCESS: Final[Json] = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}


@dataclass(kw_only=True, eq=False)
class Api:
    """The parts of the server that requests use; tests add and remove faults at will."""

    storage: Storage
    registry: Registry
    writer: Writer
    deleter: Deleter
    bookmark_seconds: float
    pod_logs: reading.PodLogs | None = None
    pod_exec: streams.PodExec | None = None
    faults: list[Fault] = field(default_factory=list)
    audit: list[AuditEntry] = field(default_factory=list)
    """Every request so far, oldest first."""


async def handle(api: Api, request: web.Request) -> web.StreamResponse:
    """Answer one request; what goes wrong in here is logged and becomes a 500."""
    target = parse_path(request.path)
    verb = verb_of(request.method, target, request.query)
    agent = request.headers.get("User-Agent", "")
    seen = {"method": request.method, "path": request.path, "query": request.query_string}
    api.audit.append(AuditEntry(**seen, user_agent=agent, verb=verb, target=target))
    if len(api.audit) > _AUDIT_LIMIT:
        del api.audit[: _AUDIT_LIMIT // 2]
    warnings: list[str] = []
    injected = next((error for fault in list(api.faults) if (error := fault(request)) is not None), None)
    if injected is not None:
        return _json(injected.status(), injected.code, warnings)
    try:
        call = await _parse(api, request, target, warnings)
        answer = await (_answer_resource(call) if call else _answer_document(api, request))
    except ApiError as error:
        return _json(error.status(), error.code, warnings)
    except Exception as error:
        logger.exception("%s %s failed", request.method, request.path)
        return _json(ApiError(500, "InternalError", repr(error)).status(), 500, warnings)
    if isinstance(answer, web.StreamResponse):
        return answer
    body, code = answer
    return _json(body, code, warnings)


def _json(body: Any, code: int, warnings: list[str]) -> web.Response:
    response = web.Response(text=compact_json(body), status=code, content_type="application/json")
    for warning in warnings:
        response.headers.add("Warning", f"299 - {json.dumps(warning)}")
    return response


Answer = web.StreamResponse | tuple[Any, int]


@dataclass(frozen=True, kw_only=True)
class _Call:
    """A request about a resource that is served."""

    api: Api
    request: web.Request
    resource: Resource
    target: RequestTarget
    options: WriteOptions

    @property
    def namespace(self) -> str | None:
        return self.target.namespace if self.resource.is_namespaced else None

    @property
    def name(self) -> str:
        if self.target.name is None:
            raise ApiError(405, "MethodNotAllowed", f"{self.request.method} needs the name of an object")
        return self.target.name

    @property
    def key(self) -> ObjectKey:
        return self.namespace, self.name

    def selection(self, name: str | None) -> Selection:
        return Selection.parse(self.namespace, name, self.request.query, selectable_fields(self.resource))

    def found(self) -> Json:
        return self.api.writer.find(self.resource, self.namespace, self.name)

    def table(self, manifests: Iterable[Json], metadata: Json) -> Json | None:
        """Return objects as a Table where the client wants one."""
        if "as=Table" not in self.request.headers.get("Accept", ""):
            return None
        include = self.request.query.get("includeObject") or "Metadata"
        return tables.table(self.resource, map(self.resource.view, manifests), metadata, include_object=include)

    def show(self, stored: Stored) -> bytes:
        table = self.table([stored.manifest], {})
        return self.resource.json(stored.fields) if table is None else compact_json(table).encode()


async def _parse(api: Api, request: web.Request, target: RequestTarget | None, warnings: list[str]) -> _Call | None:
    if "Impersonate-User" in request.headers:
        raise ApiError(501, "NotImplemented", "impersonation is not emulated: every request may do everything")
    if target is None:
        return None
    resource = api.registry.get(target.group_version, target.plural)
    if resource is None:
        return None
    query = request.query
    agent = request.headers.get("User-Agent") or "unknown"
    options = WriteOptions(
        manager=query.get("fieldManager") or agent.split("/")[0],
        subresource="status" if target.subresource == "status" else None,
        is_dry_run=query.get("dryRun") == "All",
        is_forced=query.get("force") in ("true", "1"),
        field_validation=query.get("fieldValidation") or "Warn",
        warnings=warnings,
    )
    return _Call(api=api, request=request, resource=resource, target=target, options=options)


async def _read_body(request: web.Request) -> Any:
    raw = await request.read()
    if raw.startswith(protobuf.MAGIC):
        return protobuf.decode(raw)
    if not raw.strip():
        return {}
    try:
        return json.loads(raw)  # every client sends what it applies as JSON, which is YAML, too
    except ValueError as error:
        raise bad_request(f"the body of the request cannot be read: {error}") from error


async def _answer_document(api: Api, request: web.Request) -> Answer:
    """Answer everything that is not about a served resource."""
    path = request.path.rstrip("/") or "/"
    if path in _HEALTH:
        return web.Response(text="ok")
    if request.method == "POST" and path.endswith("/selfsubjectaccessreviews"):
        return {**await _read_body(request), "status": {"allowed": True}}, 201
    if request.method != "GET":
        raise unknown_path()
    if path == "/openapi/v2":
        return web.Response(body=discovery.LEGACY_DOCUMENT, headers={"Content-Type": discovery.LEGACY_MEDIA_TYPE})
    if path == "/openapi/v3":
        return discovery.openapi_index(api.registry), 200
    if path.startswith("/openapi/v3/"):
        document = discovery.openapi_document(api.registry, path.removeprefix("/openapi/v3/").partition("/")[2])
    else:
        document = discovery.discovery_document(api.registry, path)
    if document is None:
        raise unknown_path()
    return document, 200


async def _answer_resource(call: _Call) -> Answer:
    subresource = call.target.subresource
    if subresource == "status" and not call.resource.has_status:
        raise unknown_path()
    if subresource == "scale" and call.resource.scale is None:
        raise unknown_path()
    if call.request.method == "GET":
        return await _get(call)
    if subresource not in _WRITABLE_SUBRESOURCES:
        raise ApiError(404, "NotFound", f"the subresource {subresource} is not emulated")
    return await _write(call, await _read_body(call.request))


async def _write(call: _Call, body: Any) -> Answer:
    match call.request.method:
        case "DELETE":
            return await _delete(call, body)
        case "POST" if call.target.name is None:
            _check_object(body)
            created = call.api.writer.create(call.resource, body, namespace=call.namespace, options=call.options)
            return call.resource.view(created), 201
        case "PUT" | "PATCH" if call.target.subresource == "scale":
            return _write_scale(call, body)
        case "PUT":
            return _put(call, body)
        case "PATCH":
            return _patch(call, body)
    raise ApiError(405, "MethodNotAllowed", f"the server does not allow {call.request.method} here")


def _check_object(body: Any) -> None:
    if not isinstance(body, dict) or not isinstance(body.get("metadata") or {}, dict):
        raise bad_request("the body of the request must be an object with metadata")


async def _get(call: _Call) -> Answer:
    api, resource, query, target = call.api, call.resource, call.request.query, call.target
    if query.get("watch") in ("true", "1"):
        options = reading.WatchOptions.parse(query)
        selection = call.selection(target.name)
        watch = reading.Watch(
            storage=api.storage, resource=resource, selection=selection, options=options, show=call.show
        )
        return await reading.stream_watch(call.request, watch.frames(api.bookmark_seconds))
    if target.name is None:
        selected, metadata = reading.list_page(api.storage, resource, call.selection(None), query)
        if table := call.table((each.manifest for each in selected), metadata):
            return table, 200
        listed = {"kind": f"{resource.kind}List", "apiVersion": resource.group_version, "metadata": metadata}
        items = b",".join(resource.json(each.fields) for each in selected)
        body = b'%b,"items":[%b]}' % (compact_json(listed)[:-1].encode(), items)
        return web.Response(body=body, content_type="application/json", charset="utf-8")
    found = call.found()
    if target.subresource == "log" and resource.plural == "pods":
        text = await reading.read_log(found, query, api.pod_logs)
        return web.Response(body=text, content_type="text/plain")
    if target.subresource == "portforward" and resource.plural == "pods":
        return await streams.forward(call.request, found)
    if target.subresource == "exec" and resource.plural == "pods":
        return await streams.execute(call.request, found, api.pod_exec)
    if target.subresource == "scale":
        return _scale_view(resource, found), 200
    if target.subresource not in (None, "status"):
        raise ApiError(404, "NotFound", f"the subresource {target.subresource} is not emulated")
    version = {"resourceVersion": found["metadata"]["resourceVersion"]}
    return call.table([found], version) or resource.view(found), 200


def _put(call: _Call, body: Any) -> Answer:
    _check_object(body)
    current = call.found()
    if call.resource.is_custom and not (body.get("metadata") or {}).get("resourceVersion"):
        problem = "metadata.resourceVersion: Invalid value: 0: must be specified for an update"
        raise ApiError(422, "Invalid", f'{call.resource.kind} "{call.name}" is invalid: {problem}')
    replaced = call.api.writer.replace(call.resource, body, current=current, options=call.options)
    return call.resource.view(replaced), 200


def _patch(call: _Call, body: Any) -> Answer:
    media_type = call.request.content_type
    if media_type == APPLY and not call.request.query.get("fieldManager"):
        problem = "fieldManager: Required value: is required for apply patch"
        raise invalid("PatchOptions", "meta.k8s.io", "", [problem])
    patch = Patch(media_type=media_type, body=body)
    patched, is_created = call.api.writer.patch(call.resource, call.key, patch=patch, options=call.options)
    return call.resource.view(patched), 201 if is_created else 200


def _write_scale(call: _Call, body: Any) -> Answer:
    if not isinstance(body, dict):
        raise ApiError(415, "UnsupportedMediaType", "a scale takes objects and merge patches")
    patch = Patch(media_type=MERGE, body=_scale_patch(call.resource, body))
    scaled, _ = call.api.writer.patch(call.resource, call.key, patch=patch, options=call.options)
    return _scale_view(call.resource, scaled), 200


async def _delete(call: _Call, body: Any) -> Answer:
    options = DeleteOptions.parse(body, call.request.query)
    api = call.api
    if call.target.name is not None:
        return await api.deleter.delete(call.resource, call.key, options=options), 200
    selection = call.selection(None)
    for each in api.storage.select(call.resource.key, selection)[0]:
        await api.deleter.delete(call.resource, object_key(each.manifest), options=options)
    return _STATUS_SUCCESS, 200


_SCALE_METADATA = ("name", "namespace", "uid", "resourceVersion", "creationTimestamp")


def _scale_view(resource: Resource, manifest: Json) -> Json:
    """Return the replicas of an object as a `Scale`."""
    paths = resource.scale or ScalePaths()
    if paths.selector:
        selector = field_at(manifest, paths.selector) or ""
    else:
        labels = field_at(manifest, "spec.selector.matchLabels") or {}
        selector = ",".join(f"{key}={value}" for key, value in labels.items())
    metadata = manifest["metadata"]
    status: Json = {"replicas": field_at(manifest, paths.status) or 0}
    if isinstance(selector, str) and selector:
        status["selector"] = selector
    return {
        "kind": "Scale",
        "apiVersion": "autoscaling/v1",
        "metadata": {name: metadata[name] for name in _SCALE_METADATA if name in metadata},
        "spec": {"replicas": field_at(manifest, paths.spec) or 0},
        "status": status,
    }


def _scale_patch(resource: Resource, scale: Json) -> Json:
    """Return the merge patch of an object that makes it as a Scale wants it."""
    paths = resource.scale or ScalePaths()
    replicas = field_at(scale, "spec.replicas")
    if not isinstance(replicas, int) or replicas < 0:
        raise bad_request(f"spec.replicas must be a number of 0 or more, found {replicas!r}")
    patch: Json = {}
    here = patch
    *parents, last = paths.spec.strip(".").split(".")
    for name in parents:
        here = here.setdefault(name, {})
    here[last] = replicas
    version = field_at(scale, "metadata.resourceVersion")
    if version:
        patch["metadata"] = {"resourceVersion": version}
    return patch
