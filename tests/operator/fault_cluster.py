# SPDX-License-Identifier: Apache-2.0
"""A cluster for faults around the operator: the embedded API server, controllers and operators."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from definition import tier_definition
from e2e.bench.operator_scale import NAMESPACE
from e2e.bench.processes import MeasuredProcess, running
from live import MERGE, Client, Controllers

from kvtier_localcluster.apiserver import ApiServerThread

TIERS = f"/apis/kvtier.dev/v1beta1/namespaces/{NAMESPACE}/kvcachetiers"
Json = dict[str, Any]


class BenchCluster:
    """The API server and its controllers."""

    def __init__(self) -> None:
        """Make a cluster; entering the context starts it."""
        self.api = ApiServerThread()
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        """Start, with the CRD."""
        self._stack.enter_context(self.api)
        self.api.create(tier_definition())
        self._client = Client(self.api.url)
        self._stack.enter_context(Controllers(self._client, self.api))
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
    return operator_process(
        cluster.api.write_kubeconfig(folder / "kubeconfig"), "-n", NAMESPACE, *arguments, **environment
    )


def operator_process(kubeconfig: Path, *arguments: str, **environment: str) -> AbstractContextManager[MeasuredProcess]:
    """Run an operator of this checkout, with its log beside its kubeconfig."""
    log = kubeconfig.with_name(f"operator-{time.monotonic_ns()}.log")
    return running(log, "kvtier_cli", "run", *arguments, KUBECONFIG=str(kubeconfig), **environment)
