# SPDX-License-Identifier: Apache-2.0
"""The admission webhook, asked by a real API server over TLS."""

from __future__ import annotations

import base64
import datetime as dt
import ipaddress
import json
import socket
import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from chart import render
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from live import CORE, NAMESPACE, TIERS, Client
from tiers import tier

from kvtier_localcluster.apiserver import ApiError, ApiServerThread
from kvtier_operator.admission import LAST_APPLIED, WORKERS, Admission
from kvtier_operator.errors import SettingsInvalid
from kvtier_operator.inventory import Inventory
from kvtier_operator.kube.client import connect
from kvtier_operator.kube.webhook import Verdict, WebhookServer
from kvtier_operator.names import ObjectKey

NODE = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "small"}}
ROOM = {"cpu": "8", "memory": "16Gi", "nvidia.com/gpu": "8", "pods": "110"}
LARGE = {**ROOM, "cpu": "64", "memory": "1Ti"}


@dataclass
class Authority:
    """A certificate authority that signs for localhost."""

    folder: Path

    def __post_init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "ca")])
        self._ca = self._sign(self._name, self._key.public_key(), is_ca=True)

    def _sign(self, subject: x509.Name, key: Any, *, is_ca: bool) -> x509.Certificate:
        now = dt.datetime.now(dt.UTC)
        alternative = x509.SubjectAlternativeName(
            [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        )
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(days=1))
            .not_valid_after(now + dt.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
            .add_extension(alternative, critical=False)
            .sign(self._key, hashes.SHA256())
        )

    def pem(self) -> bytes:
        return self._ca.public_bytes(serialization.Encoding.PEM)

    def issue(self) -> tuple[Path, Path]:
        """Write a new certificate and its key over the old ones."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "webhook")])
        certificate = self._sign(subject, key.public_key(), is_ca=False)
        paths = self.folder / "tls.crt", self.folder / "tls.key"
        paths[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        paths[1].write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return paths


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def webhook(api: ApiServerThread, authority: Authority) -> Iterator[WebhookServer]:
    """The webhook as the operator serves it, registered as the chart does, at an address instead of a Service."""
    api.create({**NODE, "metadata": {"name": "large"}, "status": {"allocatable": LARGE, "capacity": LARGE}})
    cluster = connect(may_write=lambda _namespace: False)
    inventory = Inventory(cluster, is_allowed=True, clock=lambda: 0.0)
    admission = Admission(cluster, inventory=inventory, connector_image="connector:1")
    certificate, key = authority.issue()
    server = WebhookServer(admission.judge, port=0, certificate=certificate, key=key, host="127.0.0.1")
    server.start()
    register(api, server.port, authority)
    yield server
    server.close()


def register(
    api: ApiServerThread, port: int, authority: Authority, policy: str = "Ignore", timeout_seconds: int = 30
) -> None:
    bundle = base64.b64encode(authority.pem()).decode()
    values = {"enabled": True, "secretName": "s", "caBundle": bundle, "failurePolicy": policy}
    values["timeoutSeconds"] = timeout_seconds
    manifests = render({"webhook": values})
    found = next(each for each in manifests if each["kind"] == "ValidatingWebhookConfiguration")
    found["webhooks"][0]["clientConfig"] = {"url": f"https://localhost:{port}/validate", "caBundle": bundle}
    api.create(found)


def body(name: str = "llama", **spec: Any) -> dict[str, Any]:
    manifest = tier(**spec)
    manifest["metadata"] |= {"namespace": NAMESPACE, "name": name}
    return manifest


def send(api: ApiServerThread, method: str, path: str, document: Any) -> tuple[dict[str, Any], list[str]]:
    """Send a write and return the answer, and the warnings that kubectl would print."""
    kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
    request = urllib.request.Request(
        api.url + path, method=method, data=json.dumps(document).encode(), headers={"Content-Type": kind}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response), response.headers.get_all("Warning") or []


def create(api: ApiServerThread, document: dict[str, Any]) -> list[str]:
    return send(api, "POST", f"{TIERS}/namespaces/{NAMESPACE}/kvcachetiers", document)[1]


def edit(api: ApiServerThread, spec: dict[str, Any]) -> list[str]:
    return send(api, "PATCH", f"{TIERS}/namespaces/{NAMESPACE}/kvcachetiers/llama", {"spec": spec})[1]


def claim(name: str, owner: dict[str, Any] | None = None) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": name, "namespace": NAMESPACE, **({"ownerReferences": [owner]} if owner else {})},
        "spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Ti"}}},
    }


@pytest.mark.usefixtures("webhook")
def test_a_tier_that_nothing_speaks_against_is_admitted_without_a_word(api: ApiServerThread) -> None:
    assert create(api, body()) == []
    assert edit(api, {"replicas": 3}) == []


@pytest.mark.usefixtures("webhook")
def test_an_edit_says_what_it_discards_and_restarts(api: ApiServerThread) -> None:
    create(api, body())
    told = edit(api, {"hash": {"seed": "9"}})
    assert len(told) == 2
    assert "starts an empty cache" in told[0]
    assert "spec.hash.seed" in told[0]
    assert "replaces 2 engine pods" in told[1]
    assert edit(api, {"hash": {"seed": "9"}}) == []


@pytest.mark.usefixtures("webhook")
def test_a_field_that_the_api_server_took_out_is_told_of_with_what_was_meant(api: ApiServerThread) -> None:
    written = body(modelName="x", nodeSelector={"a": "b"})
    applied = body()
    applied["metadata"]["annotations"] = {LAST_APPLIED: json.dumps(written)}
    told = create(api, applied)
    assert ["spec.modelName" in told[0], "did you mean spec.model.name?" in told[0]] == [True, True]
    assert "did you mean spec.engine.podTemplate.nodeSelector?" in told[1]


@pytest.mark.usefixtures("webhook")
def test_a_tier_that_no_node_can_hold_is_warned_of(api: ApiServerThread) -> None:
    api.create({**NODE, "status": {"allocatable": ROOM, "capacity": ROOM}})
    Client(api.url).call("DELETE", "/api/v1/nodes/large")
    (told,) = create(api, body())
    assert "the largest of 1 matching nodes, small, has 16 GiB" in told


@pytest.mark.usefixtures("webhook")
def test_a_neighbour_on_the_same_claim_is_warned_of_where_the_budgets_do_not_fit_together(api: ApiServerThread) -> None:
    api.create(claim("shared"))
    volume = {"claim": None, "existingClaim": "shared"}
    assert create(api, body("one", volume=volume, disk={"budget": {"maxBytes": "1Ti"}})) == []
    (told,) = create(api, body("two", volume=volume, disk={"budget": {"maxBytes": "1Ti"}}))
    assert "claim shared is shared with one (1Ti), and their budgets are 2Ti together, of 1Ti" in told
    assert create(api, body("three", volume={"claim": {"size": "1Ti"}})) == []


@pytest.mark.usefixtures("webhook")
def test_a_claim_that_goes_with_another_tier_is_refused(api: ApiServerThread) -> None:
    owner = {
        "apiVersion": "kvtier.dev/v1alpha1",
        "kind": "KVCacheTier",
        "name": "other",
        "uid": "u",
        "controller": True,
    }
    api.create(body("other"))
    uid = (Client(api.url).get(TIERS, "kvcachetiers", "other") or {})["metadata"]["uid"]
    api.create(claim("other-blocks", {**owner, "uid": uid}))
    with pytest.raises(urllib.error.HTTPError) as refused:
        create(api, body(volume={"claim": None, "existingClaim": "other-blocks"}))
    with refused.value as answer:
        message = json.load(answer)["message"]
    assert answer.code == 422
    assert "spec.volume.existingClaim: other-blocks is deleted together with the tier other" in message


@pytest.mark.usefixtures("webhook")
def test_a_claim_that_other_pods_mount_is_warned_of(api: ApiServerThread) -> None:
    api.create(claim("models"))
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "trainer", "namespace": NAMESPACE},
        "spec": {
            "containers": [{"name": "c", "image": "i"}],
            "volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": "models"}}],
        },
    }
    Client(api.url).call("POST", f"{CORE}/namespaces/{NAMESPACE}/pods", pod)
    (told,) = create(api, body(volume={"claim": None, "existingClaim": "models"}))
    assert "mounted by pod trainer" in told


@pytest.mark.parametrize(("policy", "is_admitted"), [("Ignore", True), ("Fail", False)])
def test_while_no_operator_answers_the_policy_decides(
    api: ApiServerThread, authority: Authority, policy: str, is_admitted: bool
) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        register(api, unused.getsockname()[1], authority, policy)
        if is_admitted:
            assert create(api, body()) == []
        else:
            with pytest.raises(urllib.error.HTTPError) as refused:
                create(api, body())
            refused.value.close()


def served_certificate(port: int) -> str:
    return ssl.get_server_certificate(("127.0.0.1", port))


def test_a_rotated_certificate_is_taken_up_and_a_half_written_one_is_not(
    webhook: WebhookServer, authority: Authority
) -> None:
    before = served_certificate(webhook.port)
    certificate, key = authority.issue()
    after = certificate.read_text()
    good = key.read_text()
    key.write_text("no key")
    assert served_certificate(webhook.port) == before
    assert "cannot use" in (webhook.problem() or "")
    key.write_text(good)
    assert served_certificate(webhook.port).split() == after.split()
    assert webhook.problem() is None


def test_without_a_usable_certificate_it_does_not_start(tmp_path: Path) -> None:
    with pytest.raises(SettingsInvalid, match="--webhook-cert and --webhook-key: cannot use"):
        WebhookServer(lambda _new, _old: Verdict(), port=0, certificate=tmp_path / "no", key=tmp_path / "no")


@pytest.mark.parametrize("nonsense", [b"", b"{", b"[]", b'{"request": 1}', b'{"request": {"uid": "1"}}', b"\xff"])
def test_nonsense_is_answered_and_ends_nothing(webhook: WebhookServer, authority: Authority, nonsense: bytes) -> None:
    trust = ssl.create_default_context(cadata=authority.pem().decode())
    for path in ("/validate", "/elsewhere"):
        request = urllib.request.Request(f"https://localhost:{webhook.port}{path}", data=nonsense)
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request, timeout=60, context=trust)
        refused.value.close()
        assert refused.value.code == 400


def test_a_bug_of_ours_admits_the_write_with_a_warning(authority: Authority, api: ApiServerThread) -> None:
    def judge(_new: dict[str, Any], _old: dict[str, Any] | None, _seconds: float) -> Verdict:
        raise ZeroDivisionError

    certificate, key = authority.issue()
    server = WebhookServer(judge, port=0, certificate=certificate, key=key)
    server.start()
    register(api, server.port, authority, "Fail")
    (told,) = create(api, body())
    assert "could not check this write" in told
    server.close()


def test_a_cluster_that_cannot_be_read_refuses_nothing(api: ApiServerThread, webhook: WebhookServer) -> None:
    api.server.faults.append(
        lambda request: ApiError(500, "InternalError", "no") if "Python-urllib" not in str(request.headers) else None
    )
    (told,) = create(api, body(volume={"claim": None, "existingClaim": "x"}))
    assert "not everything could be checked" in told


class Stuck:
    """A cluster whose answers do not come before they are let through."""

    def __init__(self, *, is_stuck: Callable[[str], bool]) -> None:
        self._cluster = connect(may_write=lambda _namespace: False)
        self._is_stuck = is_stuck
        self.let_through = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cluster, name)

    def get(self, key: ObjectKey, namespace: str) -> Any:
        self._wait(key.kind)
        return self._cluster.get(key, namespace)

    def list(self, api_version: str, kind: str, *, namespace: str, selector: str) -> Any:
        self._wait(kind)
        return self._cluster.list(api_version, kind, namespace=namespace, selector=selector)

    def _wait(self, kind: str) -> None:
        if self._is_stuck(kind):
            self.let_through.wait()


@contextmanager
def serving(api: ApiServerThread, authority: Authority, cluster: Stuck) -> Iterator[None]:
    """Serve the webhook without which nothing can be written, and which has eight seconds."""
    certificate, key = authority.issue()
    admission = Admission(
        cluster, inventory=Inventory(cluster, is_allowed=True, clock=lambda: 0.0), connector_image="connector:1"
    )
    server = WebhookServer(admission.judge, port=0, certificate=certificate, key=key, host="127.0.0.1")
    server.start()
    register(api, server.port, authority, "Fail", 8)
    try:
        yield
    finally:
        cluster.let_through.set()
        server.close()
        admission.close()


def test_a_cluster_that_does_not_answer_in_time_admits_the_write_and_says_what_is_missing(
    api: ApiServerThread, authority: Authority
) -> None:
    with serving(api, authority, Stuck(is_stuck=lambda _kind: True)), ThreadPoolExecutor(2 * WORKERS) as people:
        heard = list(people.map(lambda number: create(api, body(f"t{number}")), range(2 * WORKERS)))
    assert len(heard) == 2 * WORKERS
    for (told,) in heard:
        assert "not everything could be checked" in told
        assert "within 4 s" in told


def test_what_was_found_in_time_is_told_although_the_rest_was_not(api: ApiServerThread, authority: Authority) -> None:
    create(api, body("first"))
    volume = {"claim": None, "existingClaim": "shared"}
    create(api, body("second", volume=volume))
    with serving(api, authority, Stuck(is_stuck=lambda kind: kind == "Node")):
        told = create(api, body("third", volume=volume))
    assert len(told) == 2
    assert "second" in told[0]
    assert "not everything could be checked" in told[1]


def test_a_refusal_stands_although_nothing_else_could_be_read(api: ApiServerThread, authority: Authority) -> None:
    create(api, body("another"))
    uid = (Client(api.url).get(TIERS, "kvcachetiers", "another") or {})["metadata"]["uid"]
    owner = {"apiVersion": "kvtier.dev/v1alpha1", "kind": "KVCacheTier", "name": "another", "uid": uid}
    api.create(claim("theirs", owner))
    with (
        serving(api, authority, Stuck(is_stuck=lambda kind: kind == "KVCacheTier")),
        pytest.raises(urllib.error.HTTPError) as refused,
    ):
        create(api, body(volume={"claim": None, "existingClaim": "theirs"}))
    refused.value.close()
    assert refused.value.code == 422
