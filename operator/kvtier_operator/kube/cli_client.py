# SPDX-License-Identifier: Apache-2.0
"""The cluster as a user with a kubeconfig sees it: tiers by name, and commands inside their pods.

For the command line alone. It has the rights of the user.
"""

from __future__ import annotations

import json
import re
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import urllib3
from kubernetes import client
from kubernetes.stream import stream

from kvtier_operator import names
from kvtier_operator.errors import ClusterUnavailable, KindMissing
from kvtier_operator.kube.client import KubernetesCluster, read_namespace, read_settings, user_kubeconfig
from kvtier_operator.names import Manifest

FIELD_MANAGER: Final = "kvtier"
_WAIT_SECONDS: Final = 1.0
_CONTAINERS: Final = frozenset({names.ENGINE_CONTAINER, names.JANITOR_CONTAINER})
_FETCH: Final = """\
import sys, urllib.request as u
sys.stdout.write(u.build_opener(u.ProxyHandler({})).open(sys.argv[1], timeout=10).read().decode())
"""
"""Run in the pod, whose proxy, if any, is for what lies outside of it."""


class CliClient:
    """The cluster, with the rights of one user."""

    def __init__(self, *, kubeconfig: str | None = None, context: str | None = None) -> None:
        """Read the kubeconfig; nothing is asked of the cluster yet.

        Raises:
            ClusterUnavailable: there is none.
        """
        kubeconfig = user_kubeconfig(kubeconfig)
        self._settings = read_settings(kubeconfig=kubeconfig, context=context)
        self._settings.retries = False
        self._api = client.ApiClient(self._settings)
        self.cluster = KubernetesCluster(self._api)
        self.namespace = read_namespace(kubeconfig=kubeconfig, context=context)
        """Namespace of the context, for verbs that name none."""

    def close(self) -> None:
        """Close the connections."""
        pools = self._api.rest_client.pool_manager.pools
        for key in pools.keys():  # noqa: SIM118  no dictionary: it cannot be iterated over
            pools[key].close()

    def ask(self, path: str, what: str) -> Manifest:
        """Return what the API server has at a path."""
        return self.cluster.request("GET", path, what=what)

    def tiers(self, namespace: str) -> list[Manifest]:
        """Return the tiers of a namespace, or of all."""
        return self.cluster.list(names.API_VERSION, names.KIND, namespace=namespace, selector="")

    def tier(self, namespace: str, name: str) -> Manifest:
        """Return a tier.

        Raises:
            KindMissing: there is none; names those there are.
        """
        try:
            return self.ask(_tier_path(namespace, name), f"read tier {namespace}/{name}")
        except KindMissing as error:
            there = ", ".join(each["metadata"]["name"] for each in self.tiers(namespace)) or "none"
            raise KindMissing(
                f"no tier {name} in namespace {namespace}: there is {there}; -n names another namespace"
            ) from error

    def change(self, namespace: str, name: str, patch: Mapping[str, Any]) -> Manifest:
        """Merge a patch into a tier and return it as it then stands."""
        return self.cluster.request(
            "PATCH",
            f"{_tier_path(namespace, name)}?fieldManager={FIELD_MANAGER}",
            body=patch,
            content_type="application/merge-patch+json",
            what=f"change tier {namespace}/{name}",
        )

    def pods(self, namespace: str, tier: str, component: str) -> list[Manifest]:
        """Return the pods of one component of a tier."""
        selector = f"{names.LABEL_TIER}={tier},{names.LABEL_COMPONENT}={component}"
        return self.cluster.list("v1", "Pod", namespace=namespace, selector=selector)

    def fetch(self, pod: Manifest, port: int, path: str, container: str = "") -> str:
        """Return what a pod serves over HTTP, by way of a command inside it: no port needs to be open to us."""
        address = pod["status"].get("podIP", "127.0.0.1")
        host = f"[{address}]" if ":" in address else address
        lines: list[str] = []
        code, complaint = self.execute(
            pod, container or _container(pod), ["python3", "-c", _FETCH, f"http://{host}:{port}{path}"], lines.append
        )
        if code:
            raise ClusterUnavailable(f"{pod['metadata']['name']}{path}: {complaint.strip()[-300:]}")
        return "\n".join(lines)

    def log(self, pod: Manifest, container: str, *, lines: int) -> str:
        """Return the last lines that a container logged.

        Raises:
            ClusterUnavailable: they cannot be read.
        """
        api = client.CoreV1Api(self._api)
        name, namespace = pod["metadata"]["name"], pod["metadata"]["namespace"]
        try:
            answer = api.read_namespaced_pod_log(
                name, namespace, container=container, tail_lines=lines, _preload_content=False
            )
        except (client.ApiException, urllib3.exceptions.HTTPError, OSError) as error:
            reason = getattr(error, "reason", None) or error
            raise ClusterUnavailable(f"cannot read the log of {namespace}/{name}: {reason}") from error
        # The package's types know nothing of an answer that is not decoded.
        raw: Any = answer
        text: str = raw.data.decode(errors="replace")
        return text

    def execute(
        self, pod: Manifest, container: str, command: Sequence[str], on_line: Callable[[str], None]
    ) -> tuple[int, str]:
        """Run a command in a pod, without a shell; return its exit code and what it wrote on standard error.

        Raises:
            ClusterUnavailable: it could not be run.
        """
        name, namespace = pod["metadata"]["name"], pod["metadata"]["namespace"]
        socket = self._connect(pod, container, command)
        complaint, rest = "", ""
        try:
            while socket.is_open():
                socket.update(timeout=_WAIT_SECONDS)
                *lines, rest = (rest + _read(socket.read_stdout, socket.peek_stdout)).split("\n")
                for line in lines:
                    on_line(line)
                complaint += _read(socket.read_stderr, socket.peek_stderr)
            if rest:
                on_line(rest)
            code: int | None = socket.returncode
        except (LookupError, TypeError, ValueError) as error:
            # The package reads the exit code out of a message that need not be there.
            raise ClusterUnavailable(
                f"a command in {namespace}/{name} ended without an exit code: {complaint.strip()[-300:] or error}"
            ) from error
        else:
            return -1 if code is None else code, complaint
        finally:
            socket.close()
            # Where the other side has gone first, the package leaves its socket open.
            socket.sock.shutdown()

    def _connect(self, pod: Manifest, container: str, command: Sequence[str]) -> Any:
        name, namespace = pod["metadata"]["name"], pod["metadata"]["namespace"]
        # The package puts a WebSocket in the place of the client's requests, so this client is for nothing else.
        api = client.CoreV1Api(client.ApiClient(self._settings))
        try:
            return stream(
                api.connect_get_namespaced_pod_exec,
                name,
                namespace,
                container=container,
                command=list(command),
                stdin=False,
                stdout=True,
                stderr=True,
                tty=False,
                _preload_content=False,
            )
        except (client.ApiException, OSError) as error:
            reason = _said(str(getattr(error, "reason", None) or error))
            raise ClusterUnavailable(f"cannot run a command in {namespace}/{name}: {reason}") from error


def _said(reason: str) -> str:
    """Return what the API server refused, of what the package says of it: status, headers and body in one line."""
    status, *rest = reason.split(" -+-+- ")
    said = re.search(r'"message":\s*("(?:[^"\\]|\\.)*")', rest[-1]) if rest else None
    return json.loads(said[1]) if said else status.removeprefix("Handshake status ")


def _container(pod: Manifest) -> str:
    """Return the container that is ours: a mesh may put its own before it."""
    every: list[str] = [each["name"] for each in pod["spec"]["containers"]]
    return next((name for name in every if name in _CONTAINERS), every[0])


def _read(read: Callable[..., str], peek: Callable[..., str]) -> str:
    return read(timeout=0) if peek(timeout=0) else ""


def _tier_path(namespace: str, name: str) -> str:
    return f"/apis/{names.API_VERSION}/namespaces/{namespace}/{names.PLURAL}/{urllib.parse.quote(name)}"
