# SPDX-License-Identifier: Apache-2.0
"""A cluster for faults around the operator: the embedded API server, controllers and operators."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from aiohttp import web
from definition import tier_definition
from e2e.bench.operator_scale import NAMESPACE, running
from e2e.bench.processes import MeasuredProcess
from live import AGENT, MERGE, Client, Controllers

from kvtier_localcluster.apiserver import ApiError, ApiServerThread
from kvtier_localcluster.apiserver.requests import parse_path

TIERS = f"/apis/kvtier.dev/v1alpha1/namespaces/{NAMESPACE}/kvcachetiers"
Json = dict[str, Any]


class BenchCluster:
    """The API server and its controllers; who asked for what is counted as it comes in."""

    def __init__(self) -> None:
        """Make a cluster; entering the context starts it."""
        self.api = ApiServerThread()
        self.requests: dict[str, int] = {}
        """Requests of operators, by verb and plural; leases apart from the rest."""
        self.faults: list[Callable[[web.Request], ApiError | None]] = []
        """Asked for operators' requests alone."""
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        """Start, with the CRD."""
        self._stack.enter_context(self.api)
        self.api.create(tier_definition())
        self._client = Client(self.api.url)
        self._stack.enter_context(Controllers(self._client, self.api))
        self.api.server.faults.append(self._look)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop."""
        self._stack.close()

    def call(self, method: str, path: str, body: Json | None = None) -> Json:
        """Send a request as somebody who is no operator."""
        return self._client.call(method, path, body, MERGE if method == "PATCH" else "application/json")

    def tiers(self) -> list[Json]:
        """Return all tiers."""
        found: list[Json] = self.call("GET", TIERS)["items"]
        return found

    def _look(self, request: web.Request) -> ApiError | None:
        target = parse_path(request.path)
        if target is None or request.headers.get("User-Agent") == AGENT:
            return None
        what = f"{'watch' if 'watch' in request.query else request.method} {target.plural}"
        self.requests[what] = self.requests.get(what, 0) + 1
        return next(filter(None, (fault(request) for fault in list(self.faults))), None)

    def writes(self) -> dict[str, int]:
        """Return the writes of operators so far, by what; the Lease is named like any other."""
        return {what: count for what, count in self.requests.items() if what.split()[0] not in {"GET", "watch"}}


def is_final(body: Json) -> bool:
    """Tell whether a tier is ready in its present generation."""
    conditions = {each["type"]: each for each in (body.get("status") or {}).get("conditions", ())}
    ready = conditions.get("Ready", {})
    return bool(ready.get("status") == "True" and ready.get("observedGeneration") == body["metadata"]["generation"])


def operator(
    cluster: BenchCluster, folder: Path, *arguments: str, **environment: str
) -> AbstractContextManager[MeasuredProcess]:
    """Run an operator of this checkout for the namespace of the benchmark."""
    folder.mkdir(parents=True, exist_ok=True)
    kubeconfig = cluster.api.write_kubeconfig(folder / "kubeconfig")
    return running(folder, kubeconfig, "-n", NAMESPACE, *arguments, **environment)
