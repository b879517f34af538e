# SPDX-License-Identifier: Apache-2.0
"""Verbs on tiers by name: whom they reach from inside a pod, what they say of a paused tier, and what hinders them."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tarfile
from asyncio.subprocess import PIPE
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from command import Command
from definition import tier_definition
from kubernetes import client
from typing_extensions import override

from kvtier_cli import doctor, status, volume
from kvtier_connector.contract.engine import encode_live
from kvtier_connector.contract.janitor import VLLM_FS_LAYOUT, JanitorConfig, encode
from kvtier_connector.store.blockstore import BlockStore
from kvtier_connector.store.identity import claim
from kvtier_connector.store.layout import BlockKey
from kvtier_localcluster.apiserver import ApiServerThread
from kvtier_localcluster.apiserver.streams import ERRORS, OUTPUT, Send
from kvtier_operator import __version__, names
from kvtier_operator.errors import ClusterUnavailable
from kvtier_operator.kube import cli_client as person_module
from kvtier_operator.kube import client as kubeconfig_module
from kvtier_operator.kube.cli_client import CliClient
from kvtier_operator.kube.client import KubernetesCluster

ROOT = Path(__file__).parents[2]
VERBS = [["check"], ["inspect"], ["purge", "--all"], ["gc"]]


@pytest.fixture(scope="module")
def api() -> Iterator[ApiServerThread]:
    with ApiServerThread() as server:
        server.create(tier_definition())
        yield server


@pytest.fixture(autouse=True)
def file(api: ApiServerThread, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    written: Path = api.write_kubeconfig(tmp_path / "kubeconfig")
    monkeypatch.setenv("KUBECONFIG", str(written))
    return written


@pytest.fixture
def in_a_pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have this process find what the kubelet gives each pod; nobody listens at the address."""
    for name, content in (("token", "t"), ("ca.crt", "c"), ("namespace", "tools\n")):
        (tmp_path / name).write_text(content)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "9")
    package = "kubernetes.config.incluster_config"
    monkeypatch.setattr(f"{package}.SERVICE_TOKEN_FILENAME", str(tmp_path / "token"))
    monkeypatch.setattr(f"{package}.SERVICE_CERT_FILENAME", str(tmp_path / "ca.crt"))
    monkeypatch.setattr(kubeconfig_module, "NAMESPACE_FILE", tmp_path / "namespace")


def make_tier(api: ApiServerThread, name: str, **spec: Any) -> None:
    body = yaml.safe_load((ROOT / "crds" / "samples" / "minimal.yaml").read_text())
    body["metadata"] = {"name": name, "namespace": "default"}
    body["spec"] |= spec
    api.create(body)


@pytest.mark.usefixtures("in_a_pod")
def test_in_a_pod_the_variable_or_a_file_in_its_usual_place_names_the_cluster(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert CliClient().tiers("elsewhere") == []
    (tmp_path / ".kube").mkdir()
    file.rename(tmp_path / ".kube" / "config")
    monkeypatch.delenv("KUBECONFIG")
    monkeypatch.setenv("HOME", str(tmp_path))
    person = CliClient()
    assert person.tiers("elsewhere") == []
    assert person.namespace == "default"


@pytest.mark.usefixtures("in_a_pod")
def test_in_a_pod_without_the_variable_the_namespace_is_the_pods(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBECONFIG")
    monkeypatch.setenv("HOME", "/nonexistent")
    for method in ("_load_config", "_set_config"):
        monkeypatch.setattr(f"kubernetes.config.incluster_config.InClusterConfigLoader.{method}", lambda *_: None)
    assert CliClient().namespace == "tools"


class InThePod(CliClient):
    """Runs here what would run in the pod, and remembers in which container."""

    container = ""

    @override
    def execute(
        self, pod: names.Manifest, container: str, command: Sequence[str], on_line: Callable[[str], None]
    ) -> tuple[int, str]:
        self.container = container
        done = subprocess.run([sys.executable, *command[1:]], check=False, capture_output=True, text=True)
        for line in done.stdout.splitlines():
            on_line(line)
        return done.returncode, done.stderr


def make_pod(*containers: str) -> names.Manifest:
    return {
        "metadata": {"name": "p", "namespace": "default"},
        "spec": {"containers": [{"name": each} for each in containers]},
        "status": {"podIP": "127.0.0.1"},
    }


@pytest.mark.parametrize("ours", [names.ENGINE_CONTAINER, names.JANITOR_CONTAINER])
def test_a_pod_is_asked_in_our_container_and_not_by_way_of_a_proxy(
    ours: str, api: ApiServerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    person = InThePod()
    assert "gitVersion" in person.fetch(make_pod("istio-proxy", ours), int(api.url.rpartition(":")[2]), "/version")
    assert person.container == ours


class Ended:
    """The package's socket of a command whose end has no exit code in it."""

    sock = SimpleNamespace(shutdown=lambda: None)

    def is_open(self) -> bool:
        return False

    def close(self) -> None: ...

    @property
    def returncode(self) -> int:
        raise IndexError


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (
            '{"kind":"Status","message":"pods \\"p\\" is forbidden: may not create pods/exec","code":403}',
            '"p" is forbidden: may',
        ),
        ("None", "403 Forbidden$"),
    ],
)
def test_a_command_that_is_refused_is_told_by_what_the_server_says_and_no_header(
    body: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        reason = f"Handshake status 403 Forbidden -+-+- {{'date': 'today'}} -+-+- {body}"
        raise client.ApiException(status=0, reason=reason)

    monkeypatch.setattr(person_module, "stream", refuse)
    with pytest.raises(ClusterUnavailable, match=says) as refused:
        CliClient().execute(make_pod("engine"), "engine", ["true"], print)
    assert "today" not in str(refused.value)


def test_a_command_that_ends_without_an_exit_code_is_said_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(person_module, "stream", lambda *_, **__: Ended())
    with pytest.raises(ClusterUnavailable, match="without an exit code"):
        CliClient().execute(make_pod("engine"), "engine", ["true"], print)


def test_verbs_on_a_paused_tier_say_what_they_wait_for(api: ApiServerThread, kvtier: Command) -> None:
    make_tier(api, "asleep")
    make_live_settings(api, "asleep", "Bypass")
    kvtier.json("pause", "asleep")
    assert "no tier llamma in namespace default: there is" in kvtier.fails("pause", "llamma")
    assert kvtier.json("mode", "asleep", "Bypass", code=1)["waits"] == "kvtier pause asleep --off"
    assert kvtier.json("restart", "asleep", "--yes", code=1)["waits"] == "kvtier pause asleep --off"
    assert "paused: no engine follows until kvtier pause asleep --off" in kvtier("mode", "asleep", "ReadOnly", code=1)
    kvtier.json("pause", "asleep", "--off")
    assert kvtier.json("mode", "asleep", "Bypass")["waits"] == ""
    assert kvtier.json("restart", "asleep", "--yes")["waits"] == ""
    make_tier(api, "held", paused=True)
    assert kvtier.json("restart", "held", "--yes", code=1)["waits"] == "spec.paused is false"
    make_tier(api, "theirs", replicas=None, engine={"external": {"selector": {"matchLabels": {"app": "vllm"}}}})
    kvtier("restart", "theirs", "--yes", code=2)
    assert "restart the object that makes them" in kvtier.err


def make_live_settings(api: ApiServerThread, tier: str, mode: str) -> None:
    """Write the file that engines follow, as the operator does."""
    metadata = {"name": f"{tier}-connector", "namespace": "default"}
    data = {"live.json": encode_live(mode)}
    api.create({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data})


def test_a_mode_is_affirmed_only_once_the_operator_has_passed_it_on(
    api: ApiServerThread, kvtier: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status, "FOLLOW_SECONDS", 0.0)
    make_tier(api, "stuck")
    told = kvtier.json("mode", "stuck", "Bypass", code=1)
    assert told["waits"].startswith("the operator has not made ConfigMap/stuck-connector; the tier has no status")
    make_live_settings(api, "stuck", "ReadWrite")
    told = kvtier.json("mode", "stuck", "Bypass", code=1)
    assert told["waits"].startswith("the operator has not changed ConfigMap/stuck-connector")
    assert kvtier.json("mode", "stuck", "ReadWrite")["waits"] == ""


class WithoutPods(KubernetesCluster):
    """The cluster of a person who may not list pods."""

    @override
    def list(self, api_version: str, kind: str, **scope: Any) -> list[names.Manifest]:
        if kind == "Pod":
            raise ClusterUnavailable("pods is forbidden")
        return super().list(api_version, kind, **scope)


def test_a_report_is_made_where_pods_cannot_be_listed(
    api: ApiServerThread, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kvtier: Command
) -> None:
    make_tier(api, "shy")
    monkeypatch.setattr(person_module, "KubernetesCluster", WithoutPods)
    file = tmp_path / "report.tar.gz"
    found = kvtier.json("report", "shy", "--file", str(file), code=1)
    assert "default.shy: metrics and logs of its pods: pods is forbidden" in found["unread"]
    with tarfile.open(file) as archive:
        assert "kvtier-report/default.shy/tier.yaml" in archive.getnames()


@pytest.mark.parametrize(
    ("image", "labelled", "state"),
    [
        ("ghcr.io/kvtier/operator@sha256:ab", __version__, "ok"),
        ("ghcr.io/kvtier/operator@sha256:ab", "9.9.9", "warning"),
        (f"mirror:5000/operator:{__version__}", "9.9.9", "ok"),
        ("mirror:5000/operator", "9.9.9", "warning"),
        ("ghcr.io/kvtier/operator:9.9.9@sha256:ab", __version__, "warning"),
    ],
)
def test_the_doctor_knows_the_release_of_an_operator_whose_image_is_named_by_its_digest(  # noqa: PLR0913, PLR0917 - cases
    image: str, labelled: str, state: str, api: ApiServerThread, monkeypatch: pytest.MonkeyPatch, kvtier: Command
) -> None:
    operator = {
        "metadata": {"name": "o", "namespace": "kvtier-system", "labels": {"app.kubernetes.io/version": labelled}},
        "spec": {"template": {"spec": {"containers": [{"image": image}]}}},
        "status": {"readyReplicas": 1},
    }

    class WithAnOperator(KubernetesCluster):
        @override
        def list(self, api_version: str, kind: str, **scope: Any) -> list[names.Manifest]:
            return [operator] if kind == "Deployment" else super().list(api_version, kind, **scope)

    monkeypatch.setattr(person_module, "KubernetesCluster", WithAnOperator)
    assert [each["state"] for each in kvtier.json("doctor") if each["what"] == "operator"] == [state]


def test_what_the_doctor_finds_is_redacted_in_a_report(
    api: ApiServerThread, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kvtier: Command
) -> None:
    make_tier(api, "examined")
    proxied = "no answer from https://user:hunter2@proxy.example.org:3128"
    finding = doctor.Finding(what="storage", state="unknown", message=proxied, remedy="Authorization: Bearer hunter2")
    monkeypatch.setattr(doctor, "examine", lambda _where: [finding])
    file = tmp_path / "report.tar.gz"
    kvtier.json("report", "examined", "--no-logs", "--file", str(file))
    with tarfile.open(file) as archive:
        text = archive.extractfile("kvtier-report/doctor.json").read().decode()
    assert "hunter2" not in text
    assert json.loads(text)[0]["what"] == "storage"


NIXL = {"type": "Hybrid", "hybrid": {"nixl": {"blocksOf": "first"}}}


@pytest.mark.parametrize(
    ("connector", "verbs", "words"),
    [
        ({"type": "SimpleCPU"}, VERBS, "spec.connector.type SimpleCPU keeps nothing on a shared volume"),
        (NIXL, VERBS, "are those of tier first"),
        ({"type": "VLLMTiering"}, [["gc"]], "has files of vLLM's own on the volume, which gc cannot read"),
    ],
)
def test_a_tier_without_blocks_of_kvtiers_is_told_so_and_nothing_is_looked_for(
    api: ApiServerThread, connector: dict[str, Any], verbs: list[list[str]], words: str, kvtier: Command
) -> None:
    name = f"with-{connector['type']}".lower()
    make_tier(api, name, connector=connector)
    for verb in verbs:
        assert words in kvtier.fails(verb[0], name, *verb[1:])


class Changed:
    """A tier with VLLMTiering, its janitor's document, and what is on its volume."""

    def __init__(self, api: ApiServerThread, name: str, directory: Path) -> None:
        self.name, self.dir, self.config = name, directory / f"default.{name}", directory / "janitor.json"
        about = self.dir / "0123456789abcdef" / "Llama_0123456789ab"
        self.vllms = about.with_name(f"{about.name}_r0") / "abc" / "de_g0" / f"{'0' * 59}deabc.bin"
        for file in (about / "config.json", self.vllms):
            file.parent.mkdir(parents=True)
            file.write_text("{}")
        config = JanitorConfig(
            tier=f"default/{name}", tier_dir=str(self.dir), current="0123456789abcdef", layout=VLLM_FS_LAYOUT
        )
        self.config.write_text(encode(config))
        make_tier(api, name, connector={"type": "VLLMTiering"})
        labels = {names.LABEL_TIER: name, names.LABEL_COMPONENT: names.COMPONENT_JANITOR}
        pod = make_pod(names.JANITOR_CONTAINER)
        pod["spec"]["containers"][0]["image"] = "janitor:test"
        pod["metadata"] |= {"name": f"{name}-janitor", "labels": labels}
        api.create({"apiVersion": "v1", "kind": "Pod", **pod})
        CliClient().cluster.request(
            "PATCH",
            f"/api/v1/namespaces/default/pods/{name}-janitor/status",
            body={"status": {"phase": "Running"}},
            content_type="application/merge-patch+json",
            what="start the janitor",
        )


async def run_here(_namespace: str, _pod: str, _container: str, command: list[str], send: Send, _input: object) -> int:
    process = await asyncio.create_subprocess_exec(sys.executable, *command[1:], stdout=PIPE, stderr=PIPE)
    said, complaint = await process.communicate()
    await send(OUTPUT, said)
    await send(ERRORS, complaint)
    return process.returncode or 0


@pytest.fixture
def _in_its_pod(api: ApiServerThread, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let commands run in the pod of a janitor, whose document is in the test's directory."""
    monkeypatch.setattr(volume, "CONFIG", str(tmp_path / "janitor.json"))
    monkeypatch.setattr(api.server, "pod_exec", run_here)


@pytest.mark.usefixtures("_in_its_pod")
def test_what_kvtiers_connector_has_left_is_inspected_checked_and_purged_by_name(
    api: ApiServerThread, tmp_path: Path, kvtier: Command
) -> None:
    tier = Changed(api, "changed", tmp_path)
    root = tier.dir / "aa"
    claim(root, {"model": "test"}, "aa")
    store = BlockStore(root, direct=False)
    for number, tenant in enumerate(("alice", "alice", "bob")):
        store.put(BlockKey(bytes([number] * 32), 0, tenant), memoryview(bytes(4096)))
    found = kvtier.json("inspect", "changed")
    assert (found["blocks"], [each["path"] for each in found["generations"]]) == (3, ["aa"])
    assert kvtier.json("check", "changed")["blocks"] == 3
    assert kvtier.json("purge", "changed", "--tenant", "alice", "--yes")["blocks"] == 2
    assert len(list(root.rglob("*.kvb"))) == 1
    assert kvtier.json("purge", "changed", "--all", "--yes")["blocks"] == 1
    assert tier.vllms.exists()


@pytest.mark.usefixtures("_in_its_pod")
@pytest.mark.parametrize("verb", [["inspect"], ["check"], ["purge", "--tenant", "alice"]])
def test_where_vllms_files_are_alone_it_is_said_whose_they_are(
    api: ApiServerThread, verb: list[str], tmp_path: Path, kvtier: Command
) -> None:
    tier = Changed(api, f"alone-{verb[0]}", tmp_path)
    assert "the volume has no blocks of kvtier's own connector" in kvtier.fails(verb[0], tier.name, *verb[1:])
    assert tier.vllms.exists()
