# SPDX-License-Identifier: Apache-2.0
"""Operators under faults: calls that fail or are forbidden, watches that end, kills, and two of them at once.

`faults` forbids one kind after the other. While one is forbidden, everything is disturbed at random for a while; then
that ends, and all that does not need the kind must be as the specs ask for, and each tier that is not must name the
kind. In the end nothing is forbidden, and everything must be.
"""

from __future__ import annotations

import random
import time
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from aiohttp import web
from definition import tier_definition
from e2e.bench.operator_scale import NAMESPACE, tier
from e2e.bench.processes import MeasuredProcess, running, until
from live import AGENT, MERGE, Client, Controllers

from kvtier_localcluster.apiserver import ApiError, ApiServerThread
from kvtier_localcluster.apiserver.requests import parse_path

FAULTS: Final = ((409, "Conflict"), (429, "TooManyRequests"), (500, "InternalError"), (503, "ServiceUnavailable"))
RATE: Final = 0.05
LEASE_SECONDS: Final = "8"
LABEL_TIER: Final = "kvtier.dev/tier"
CHILDREN: Final = (
    ("configmaps", "connector"),
    ("serviceaccounts", "engine"),
    ("services", "engine"),
    ("poddisruptionbudgets.policy", "engine"),
    ("persistentvolumeclaims", "blocks"),
    ("deployments.apps", "engine"),
    ("deployments.apps", "janitor"),
)
NEEDED_BY: Final = {"services": frozenset({("deployments.apps", "janitor")})}
"""What waits for a kind that is forbidden, besides objects of that kind."""


@dataclass
class Trouble:
    """What goes wrong in a run, at random but repeatably."""

    cluster: BenchCluster
    chance: random.Random
    rate: float = 0.0
    forbidden: str = ""
    """Plural of the kind that no operator may read or write for now."""
    failed: int = 0
    """How many requests failed at random."""

    def fault(self, request: web.Request) -> ApiError | None:
        """Fail some of the requests of operators; the Lease as well."""
        target = parse_path(request.path)
        if target is None or request.headers.get("User-Agent") == AGENT:
            return None
        if target.plural == self.forbidden:
            return ApiError(403, "Forbidden", f"{self.forbidden} is forbidden: injected")
        if "watch" in request.query or self.chance.random() >= self.rate:
            return None
        self.failed += 1
        return ApiError(*self.chance.choice(FAULTS), "injected")

    def disturb_watches(self) -> None:
        """End all watches, and now and then expire what they would resume from."""
        if self.chance.random() < 0.5:
            self.cluster.api.compact()
        self.cluster.api.drop_watches()


def faults(folder: Path, *, tiers: int, seconds: float, kill_seconds: float, kinds: tuple[str, ...]) -> Json:
    """Disturb everything while one kind after the other is forbidden, and say what is not as the specs ask for.

    Args:
        folder: for logs.
        tiers: how many there are at most.
        seconds: how long everything is disturbed, over all kinds.
        kill_seconds: between two kills of an operator.
        kinds: plurals that are forbidden one after the other.
    """
    missed: list[str] = []
    naming: dict[str, int] = {}
    with BenchCluster() as cluster, ExitStack() as operators:
        run = _Run(cluster, folder, operators, tiers, kill_seconds)
        cluster.api.server.faults.append(run.trouble.fault)
        cluster.call("POST", TIERS, tier("first"))
        until(lambda: is_final(cluster.call("GET", f"{TIERS}/first")), seconds=120)
        for plural in kinds:
            run.trouble.forbidden, run.trouble.rate = plural, RATE
            run.disturb(seconds / len(kinds))
            run.trouble.rate = 0.0
            # However few edits there was time for, one tier wants something that its operator has not done yet.
            run.change("first")
            missed += [f"without {plural}: {each}" for each in run.settled(seconds=120, without=plural)]
            naming[plural] = sum(_names(body, plural) for body in cluster.tiers())
        run.trouble.forbidden = ""
        missed += run.settled(seconds=480)
    return {"wrong": missed, "killed": run.killed, "failed": run.trouble.failed, "tiers_that_name": naming}


@dataclass
class _Run:
    """Two operators, as in production: one that is killed is followed by the other, and comes back as the second."""

    cluster: BenchCluster
    folder: Path
    operators: ExitStack
    tiers: int
    kill_seconds: float
    chance: random.Random = field(default_factory=lambda: random.Random(1))
    wanted: dict[str, int] = field(default_factory=lambda: {"first": 1})
    """Replicas by tier."""
    killed: int = 0

    def __post_init__(self) -> None:
        self.trouble = Trouble(self.cluster, random.Random(self.chance.random()))
        self._running = [self._start() for _ in range(2)]

    def _start(self) -> MeasuredProcess:
        return self.operators.enter_context(
            operator(self.cluster, self.folder, "--leader-elect", KVTIER_LEASE_SECONDS=LEASE_SECONDS)
        )

    def disturb(self, seconds: float) -> None:
        """Disturb for so long, and on a busy machine until an operator was killed and a request has failed."""
        began, killed = time.monotonic(), self.killed
        end, next_kill = began + seconds, began + min(self.kill_seconds, seconds)

        def is_disturbed() -> bool:
            nonlocal next_kill
            self.edit()
            if self.chance.random() < 0.05:
                self.trouble.disturb_watches()
            if time.monotonic() >= next_kill:
                self._running[0].process.kill()
                self._running = [self._running[1], self._start()]
                self.killed, next_kill = self.killed + 1, next_kill + self.kill_seconds
            self.revive()
            return time.monotonic() >= end and self.killed > killed and self.trouble.failed > 0

        until(is_disturbed, seconds=seconds + 300, pause=0.1)

    def edit(self) -> None:
        """Create, change or delete a tier, as a user would while all this goes on."""
        name = f"t{self.chance.randrange(self.tiers):03}"
        replicas = self.chance.randrange(1, 4)
        if name not in self.wanted:
            self.cluster.call("POST", TIERS, tier(name, replicas=replicas))
        elif self.chance.random() < 0.25:
            self.cluster.call("DELETE", f"{TIERS}/{name}")
            del self.wanted[name]
            return
        else:
            self.cluster.call("PATCH", f"{TIERS}/{name}", {"spec": {"replicas": replicas}})
        self.wanted[name] = replicas

    def change(self, name: str) -> None:
        """Ask for another number of engines."""
        self.wanted[name] = self.wanted[name] % 3 + 1
        self.cluster.call("PATCH", f"{TIERS}/{name}", {"spec": {"replicas": self.wanted[name]}})

    def revive(self) -> None:
        """Do what a kubelet does for an operator that lost its Lease."""
        self._running = [each if each.process.poll() is None else self._start() for each in self._running]

    def settled(self, *, seconds: float, without: str = "") -> list[str]:
        """Wait until nothing is wrong any more, and return what still is."""

        def is_well() -> bool:
            self.revive()
            return not wrong(self.cluster, self.wanted, without=without)

        with suppress(TimeoutError):
            until(is_well, seconds=seconds, pause=1)
        return wrong(self.cluster, self.wanted, without=without)


def wrong(cluster: BenchCluster, wanted: dict[str, int], *, without: str = "") -> list[str]:
    """Return what is not as the specs ask for: tiers that are not final, children missing, left over or different.

    Without a kind, what needs it may be as it was, and a tier need not be final that names it.
    """
    found = [
        f"{body['metadata']['name']} is not final{f' and does not name {without}' if without else ''}"
        for body in cluster.tiers()
        if not is_final(body) and not (without and _names(body, without))
    ]
    for plural, suffix in CHILDREN:
        standing = {each["metadata"]["name"]: each for each in cluster.api.list(plural, NAMESPACE)}
        labels = {name: each["metadata"].get("labels") or {} for name, each in standing.items()}
        owners = {name: each.get(LABEL_TIER) for name, each in labels.items() if plural != "persistentvolumeclaims"}
        found += [f"{plural} {name} is left over" for name, owner in owners.items() if owner and owner not in wanted]
        if plural.partition(".")[0] == without or (plural, suffix) in NEEDED_BY.get(without, ()):
            continue
        found += [
            f"{plural} {name} is missing" for name in sorted({f"{each}-{suffix}" for each in wanted} - set(standing))
        ]
        for name, replicas in wanted.items() if (plural, suffix) == ("deployments.apps", "engine") else ():
            has = standing.get(f"{name}-{suffix}", {}).get("spec", {}).get("replicas", replicas)
            found += [f"{name} has {has} replicas instead of {replicas}"] if has != replicas else []
    return found


def _names(body: Json, plural: str) -> bool:
    conditions = (body.get("status") or {}).get("conditions", ())
    return any(f"{plural} is forbidden" in each["message"] for each in conditions if each["status"] != "True")


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
        """Send a request as a user other than the operator."""
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
