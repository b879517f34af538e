# SPDX-License-Identifier: Apache-2.0
"""What tests do around the API: faults, the audit log, webhooks, pod logs, Protobuf bodies, discovery."""

from __future__ import annotations

import base64
import http.server
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from aiohttp import web

from kvtier_localcluster.apiserver import ApiError, ApiServerThread, protobuf

Http = Callable[..., tuple[int, Any]]
Make = Callable[..., dict[str, Any]]
PODS = "/api/v1/namespaces/default/pods"
CONFIG_MAPS = "/api/v1/namespaces/default/configmaps"
CONFIG_MAP = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c"}}


def test_a_fault_answers_in_the_servers_place_until_it_is_removed(api: ApiServerThread, http: Http) -> None:
    def fault(request: web.Request) -> ApiError | None:
        return ApiError(503, "ServiceUnavailable", "injected") if request.method == "POST" else None

    api.server.faults.append(fault)
    code, status = http("POST", CONFIG_MAPS, CONFIG_MAP)
    assert (code, status["reason"], status["message"]) == (503, "ServiceUnavailable", "injected")
    assert http("GET", CONFIG_MAPS)[0] == 200
    api.server.faults.remove(fault)
    assert http("POST", CONFIG_MAPS, CONFIG_MAP)[0] == 201


def test_the_audit_log_speaks_in_terms_of_rbac(api: ApiServerThread, http: Http) -> None:
    http("GET", "/apis/apps/v1/namespaces/default/deployments/web/scale")
    http("GET", PODS, labelSelector="a=b")
    http("DELETE", PODS)
    http("PATCH", "/api/v1/namespaces/default/status", {}, media_type="application/merge-patch+json")
    http("GET", "/version")
    scale, listing, clearing, namespace, version = api.server.audit[-5:]
    assert scale.target is not None
    assert (scale.verb, scale.target.group, scale.target.plural) == ("get", "apps", "deployments")
    assert (scale.target.namespace, scale.target.name, scale.target.subresource) == ("default", "web", "scale")
    assert (listing.verb, listing.query, listing.user_agent) == ("list", "labelSelector=a%3Db", "tester/1")
    assert clearing.verb == "deletecollection"
    assert namespace.target is not None
    assert (namespace.target.plural, namespace.target.name) == ("namespaces", "default")
    assert version.target is None


@pytest.fixture
def webhook() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A webhook that labels objects and denies those named "bad": its URL, and the reviews it got."""
    reviews: list[dict[str, Any]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            review = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            reviews.append(review)
            patch = [{"op": "add", "path": "/metadata/labels", "value": {"seen": "yes"}}]
            response = {
                "uid": review["request"]["uid"],
                "allowed": review["request"]["name"] != "bad",
                "status": {"message": "bad name"},
                "warnings": ["look out"],
            }
            path, _, query = self.path.partition("?")
            review["query"] = query
            if path == "/mutate":
                response["patch"] = base64.b64encode(json.dumps(patch).encode()).decode()
            body = json.dumps({"response": response}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Stay quiet."""

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", reviews
        server.shutdown()
        thread.join()


def _configuration(kind: str, url: str, **webhook: Any) -> dict[str, Any]:
    rule = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["configmaps"]}
    described = {
        "name": "hook.demo.dev",
        "admissionReviewVersions": ["v1"],
        "sideEffects": "None",
        "clientConfig": {"url": url},
        "rules": [rule],
        **webhook,
    }
    return {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": f"{kind}WebhookConfiguration",
        "metadata": {"name": "hook"},
        "webhooks": [described],
    }


def test_webhooks_change_and_deny(api: ApiServerThread, http: Http, webhook: tuple[str, list[dict[str, Any]]]) -> None:
    url, reviews = webhook
    api.create(_configuration("Mutating", f"{url}/mutate"))
    api.create(_configuration("Validating", f"{url}/validate"))
    _, made = http("POST", CONFIG_MAPS, CONFIG_MAP)
    assert made["metadata"]["labels"] == {"seen": "yes"}
    assert reviews[1]["request"]["object"]["metadata"]["labels"] == {"seen": "yes"}
    assert "subResource" not in reviews[0]["request"]
    assert {review["query"] for review in reviews} == {"timeout=10s"}
    code, status = http("POST", CONFIG_MAPS, {**CONFIG_MAP, "metadata": {"name": "bad"}})
    assert code == 403
    assert status["message"] == 'admission webhook "hook.demo.dev" denied the request: bad name'


@pytest.mark.parametrize(("policy", "code"), [("Fail", 500), ("Ignore", 201)])
def test_a_webhook_that_does_not_answer_fails_or_is_ignored(
    api: ApiServerThread, http: Http, policy: str, code: int
) -> None:
    api.create(_configuration("Validating", "http://127.0.0.1:1/", failurePolicy=policy))
    assert http("POST", CONFIG_MAPS, CONFIG_MAP)[0] == code


def test_pod_logs_come_from_the_runner(api: ApiServerThread, http: Http, pod: Make) -> None:
    asked = []

    async def read(namespace: str, pod: str, container: str, *, tail: int | None, is_previous: bool) -> bytes | None:
        asked.append((namespace, pod, container, tail))
        return None if is_previous else b"line\n"

    http("POST", PODS, pod())
    assert http("GET", f"{PODS}/p/log") == (200, "")
    api.server.pod_logs = read
    assert http("GET", f"{PODS}/p/log", tailLines="3", follow="true") == (200, "line\n")
    assert asked == [("default", "p", "main", 3)]
    code, status = http("GET", f"{PODS}/p/log", previous="true")
    assert (code, status["message"]) == (400, 'previous terminated container "main" in pod "p" not found')
    assert http("GET", f"{PODS}/p/log", container="gone")[0] == 400


def test_logs_of_a_pod_with_several_containers_need_a_name(http: Http, pod: Make) -> None:
    http("POST", PODS, pod(containers=[{"name": "a", "image": "x"}, {"name": "b", "image": "x"}]))
    code, status = http("GET", f"{PODS}/p/log")
    assert code == 400
    assert "a container name must be specified" in status["message"]


def _field(number: int, content: bytes) -> bytes:
    return bytes([number << 3 | 2, len(content)]) + content


def test_a_protobuf_body_is_decoded() -> None:
    type_meta = _field(1, b"v1") + _field(2, b"ConfigMap")
    label = _field(1, b"k") + _field(2, b"v")
    metadata = _field(1, b"name") + _field(11, label)
    manifest = _field(1, metadata) + _field(2, _field(1, b"a") + _field(2, b"b"))
    decoded = protobuf.decode(protobuf.MAGIC + _field(1, type_meta) + _field(2, manifest))
    assert decoded == {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "name", "labels": {"k": "v"}},
        "data": {"a": "b"},
    }


def test_a_protobuf_body_of_another_kind_is_refused_by_name() -> None:
    type_meta = _field(1, b"v1") + _field(2, b"Node")
    with pytest.raises(ApiError, match="Node") as refused:
        protobuf.decode(protobuf.MAGIC + _field(1, type_meta))
    assert refused.value.code == 415


@pytest.mark.parametrize("body", [b"not json", b'{"metadata": "text"}', b"[]"])
def test_a_body_that_is_no_object_is_refused(http: Http, body: bytes) -> None:
    assert http("POST", CONFIG_MAPS, body)[0] == 400


def test_unknown_paths_are_not_found(http: Http) -> None:
    for path in ("/apis/nothing.dev/v1", "/api/v1/things", "/apis/apps/v1/namespaces/default/deployments/a/exec"):
        assert http("GET", path)[0] == 404


def test_a_review_of_access_is_always_granted(http: Http) -> None:
    review = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview", "spec": {}}
    code, answer = http("POST", "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", review)
    assert (code, answer["status"]) == (201, {"allowed": True})


def test_both_forms_of_discovery_show_a_new_kind(http: Http, engines: str) -> None:
    del engines
    _, listed = http("GET", "/apis/demo.dev/v1")
    assert [entry["name"] for entry in listed["resources"]] == ["engines", "engines/status", "engines/scale"]
    accept = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList,application/json"
    _, everything = http("GET", "/apis", accept=accept)
    [group] = [item for item in everything["items"] if item["metadata"]["name"] == "demo.dev"]
    [resource] = group["versions"][0]["resources"]
    assert resource["shortNames"] == ["eng"]
    assert [below["subresource"] for below in resource["subresources"]] == ["status", "scale"]


def test_the_openapi_document_of_a_kind_describes_its_fields(http: Http, engines: str) -> None:
    del engines
    _, index = http("GET", "/openapi/v3")
    assert "apis/demo.dev/v1" in index["paths"]
    _, document = http("GET", "/openapi/v3/apis/demo.dev/v1")
    schema = document["components"]["schemas"]["dev.demo.v1.Engine"]
    assert schema["properties"]["spec"]["properties"]["model"]["description"] == "Name of the model."
    assert schema["x-kubernetes-group-version-kind"] == [{"group": "demo.dev", "version": "v1", "kind": "Engine"}]
    references = [text for text in json.dumps(document).split('"') if text.startswith("#/components/schemas/")]
    assert {text.rsplit("/", 1)[1] for text in references} <= document["components"]["schemas"].keys()
