# SPDX-License-Identifier: Apache-2.0
"""The clusters that the suite can be pointed at: the embedded one, one of a kubeconfig, one of bare binaries.

Each offers some of: `controllers` (those of kube-controller-manager), `node` (pods become Ready), `compaction` (its
history can be made to expire). What a target lacks, its tests skip with that reason.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import re
import subprocess
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import waiting
from plain_http import is_answered

from kvtier_localcluster.apiserver.discovery import version_info
from kvtier_localcluster.client import ApiClient
from kvtier_localcluster.cluster import ClusterSettings, ClusterThread
from kvtier_localcluster.informers import Informers
from kvtier_localcluster.loop_thread import LoopThread
from kvtier_localcluster.node import registration
from kvtier_localcluster.node.services import PodAddresses
from kvtier_localcluster.node.simulated import SimulatedNode
from kvtier_localcluster.ports import free_port


@dataclass(frozen=True, kw_only=True)
class Target:
    """A cluster under test."""

    name: str
    kubectl: tuple[str, ...]
    proxy: str
    """Where plain HTTP reaches its API."""
    minor: int
    offers: frozenset[str]
    compact: Callable[[], None] = lambda: None
    """Makes every resourceVersion so far expire, where that is offered."""


@contextlib.contextmanager
def proxied(kubectl: tuple[str, ...]) -> Iterator[str]:
    command = [*kubectl, "proxy", "--port=0", "--accept-paths=.*", "--reject-paths=^$"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            found = re.search(r"127\.0\.0\.1:\d+", process.stdout.readline())
            yield f"http://{found[0]}"
        finally:
            process.terminate()


@contextlib.contextmanager
def embedded(folder: Path, program: Path) -> Iterator[Target]:
    """The embedded cluster, with pods that only seem to run."""
    settings = ClusterSettings(data=folder / "cluster", simulate=True, allocatable={"pods": "500"})
    with ClusterThread(settings) as cluster:
        kubectl = (str(program), f"--kubeconfig={cluster.kubeconfig}", f"--cache-dir={folder}/cache")

        async def compact() -> None:
            cluster.cluster.server.compact()

        with proxied(kubectl) as proxy:
            yield Target(
                name="the embedded cluster",
                kubectl=kubectl,
                proxy=proxy,
                minor=int(version_info()["minor"]),
                offers=frozenset(("controllers", "node", "compaction")),
                compact=lambda: cluster.call(compact),
            )


@contextlib.contextmanager
def of_kubeconfig(kubeconfig: Path, folder: Path, program: Path) -> Iterator[Target]:
    kubectl = (str(program), f"--kubeconfig={kubeconfig}", f"--cache-dir={folder}/cache")
    with proxied(kubectl) as proxy:
        name = f"the cluster of {kubeconfig}"
        offers = frozenset(("controllers", "node"))
        yield Target(name=name, kubectl=kubectl, proxy=proxy, minor=_minor(proxy), offers=offers)


def _minor(proxy: str) -> int:
    with urllib.request.urlopen(f"{proxy}/version") as answer:
        return int(re.sub(r"\D", "", json.load(answer)["minor"]) or 0)  # a build without a version counts as the oldest


class _SimulatedNodeThread(LoopThread):
    """Lets pods seem to run on a node that is none."""

    def __init__(self, url: str) -> None:
        super().__init__("node", limit_seconds=60)
        self._client = ApiClient(url)
        self._informers = Informers(self._client)
        self._tasks: list[asyncio.Task[None]] = []

    async def _begin(self) -> None:
        await self._client.start()
        self._addresses = PodAddresses()
        node = SimulatedNode(self._client, self._informers, self._addresses)
        await registration.register(self._client, registration.SIMULATED)
        await self._informers.start()
        self._tasks = [asyncio.create_task(node.run())]

    async def _end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._informers.stop()
        await self._client.close()
        self._addresses.close()


@contextlib.contextmanager
def of_assets(assets: Path, folder: Path, program: Path) -> Iterator[Target]:
    """An API server from binaries; with those of controllers and scheduler, these as well, and a simulated node."""
    etcd, api, peers = free_port(), free_port(), free_port()
    with contextlib.ExitStack() as stack:

        def start(name: str, *arguments: str) -> None:
            log = stack.enter_context((folder / f"{name}.log").open("w"))
            process = subprocess.Popen([assets / name, *arguments], stdout=log, stderr=log)
            stack.callback(process.wait)
            stack.callback(process.terminate)

        start(
            "etcd",
            f"--data-dir={folder}/etcd",
            *[f"--{kind}-client-urls=http://127.0.0.1:{etcd}" for kind in ("listen", "advertise")],
            f"--listen-peer-urls=http://127.0.0.1:{peers}",
            "--unsafe-no-fsync",
        )
        kubeconfig = _credentials(folder, api)
        start("kube-apiserver", *_server_arguments(folder, api, etcd))
        kubectl = (str(program), f"--kubeconfig={kubeconfig}", f"--cache-dir={folder}/cache")
        proxy = stack.enter_context(proxied(kubectl))
        waiting.until(lambda: is_answered(f"{proxy}/readyz", seconds=5), seconds=120, pause_seconds=0.2)
        offers = {"compaction"}
        key = f"--service-account-private-key-file={folder}/key.pem"
        common = (f"--kubeconfig={kubeconfig}", "--leader-elect=false")
        if (assets / "kube-controller-manager").exists() and (assets / "kube-scheduler").exists():
            start(
                "kube-controller-manager",
                *common,
                key,
                "--concurrent-gc-syncs=5",
                "--use-service-account-credentials=false",
            )
            start("kube-scheduler", *common)
            stack.enter_context(_SimulatedNodeThread(proxy))
            offers |= {"controllers", "node"}
        yield Target(
            name=f"the server of {assets}",
            kubectl=kubectl,
            proxy=proxy,
            minor=_minor(proxy),
            offers=frozenset(offers),
            compact=lambda: _compact(f"http://127.0.0.1:{etcd}"),
        )


def _credentials(folder: Path, port: int) -> Path:
    (folder / "tokens.csv").write_text('secret,admin,admin,"system:masters"\n')
    subprocess.run(["openssl", "genrsa", "-out", str(folder / "key.pem"), "2048"], check=True, capture_output=True)
    kubeconfig = folder / "kubeconfig"
    cluster = {"server": f"https://127.0.0.1:{port}", "insecure-skip-tls-verify": True}
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "it", "cluster": cluster}],
        "users": [{"name": "it", "user": {"token": "secret"}}],
        "contexts": [{"name": "it", "context": {"cluster": "it", "user": "it"}}],
        "current-context": "it",
    }
    kubeconfig.write_text(json.dumps(document))
    return kubeconfig


def _server_arguments(folder: Path, port: int, etcd: int) -> list[str]:
    key = f"{folder}/key.pem"
    return [
        f"--etcd-servers=http://127.0.0.1:{etcd}",
        "--bind-address=127.0.0.1",
        "--advertise-address=127.0.0.1",
        f"--secure-port={port}",
        f"--cert-dir={folder}/certificates",
        f"--token-auth-file={folder}/tokens.csv",
        "--authorization-mode=RBAC",
        f"--service-account-key-file={key}",
        f"--service-account-signing-key-file={key}",
        "--service-account-issuer=https://kubernetes.default.svc",
        "--service-cluster-ip-range=10.0.0.0/24",
        "--disable-admission-plugins=ServiceAccount",
        "--allow-privileged=true",
    ]


def _compact(etcd: str) -> None:
    def ask(path: str, body: dict[str, object]) -> dict[str, dict[str, str]]:
        request = urllib.request.Request(f"{etcd}/v3/kv/{path}", data=json.dumps(body).encode(), method="POST")
        with urllib.request.urlopen(request, timeout=10) as answer:
            found: dict[str, dict[str, str]] = json.load(answer)
            return found

    revision = ask("range", {"key": base64.b64encode(b"\0").decode(), "limit": 1})["header"]["revision"]
    ask("compaction", {"revision": revision, "physical": True})
