# SPDX-License-Identifier: Apache-2.0
"""Operators under faults: calls that fail or are forbidden, watches that end, kills, and two of them at once.

`faults` forbids one kind after the other. While one is forbidden, everything is disturbed at random for a while; then
that ends, and all that does not need the kind must be as the specs ask for, and each tier that is not must name the
kind. In the end nothing is forbidden, and everything must be. `forbidden` forbids one kind after the other from the
start of an operator on, and says what that kept from a tier besides.
"""

from __future__ import annotations

import random
import time
import urllib.error
import urllib.request
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from aiohttp import web
from e2e.bench.operator_scale import NAMESPACE, OperatorProcess, tier, until
from fault_cluster import TIERS, BenchCluster, Json, is_final, operator

from kvtier_localcluster.apiserver import ApiError
from kvtier_localcluster.apiserver.requests import parse_path
from kvtier_localcluster.ports import free_port

FAULTS: Final = ((409, "Conflict"), (429, "TooManyRequests"), (500, "InternalError"), (503, "ServiceUnavailable"))
RATE: Final = 0.05
LABEL_TIER: Final = "kvtier.dev/tier"
JANITOR: Final = frozenset({("deployments.apps", "janitor")})
ENGINE: Final = frozenset({("deployments.apps", "engine")})
CHILDREN: Final = (
    ("configmaps", "connector"),
    ("serviceaccounts", "engine"),
    ("services", "engine"),
    ("poddisruptionbudgets.policy", "engine"),
    ("persistentvolumeclaims", "blocks"),
    ("deployments.apps", "engine"),
    ("deployments.apps", "janitor"),
)
NEEDED_BY: Final = {
    "configmaps": JANITOR | ENGINE,
    "jobs": ENGINE,
    "persistentvolumeclaims": JANITOR | ENGINE,
    # How the trial of a claim ended, only its pod tells here: nobody reports it in the Job.
    "pods": ENGINE,
    "rolebindings": JANITOR,
    "roles": JANITOR,
    "serviceaccounts": JANITOR | ENGINE,
    "services": JANITOR,
}
"""What waits for a kind that is forbidden, besides objects of that kind."""

FORBIDDEN: Final = (
    "configmaps",
    "deployments",
    "events",
    "jobs",
    "persistentvolumeclaims",
    "poddisruptionbudgets",
    "pods",
    "rolebindings",
    "roles",
    "serviceaccounts",
    "services",
)
"""Kinds that an operator may lack a right to, one at a time."""

PLURALS: Final = (
    "configmaps",
    "deployments.apps",
    "persistentvolumeclaims",
    "poddisruptionbudgets.policy",
    "rolebindings.rbac.authorization.k8s.io",
    "roles.rbac.authorization.k8s.io",
    "serviceaccounts",
    "services",
)

NEVER_KEPT_BACK: Final = frozenset({"configmaps", "persistentvolumeclaims", "services"})
"""What a tier has whatever else is forbidden."""


@dataclass
class Trouble:
    """What goes wrong in a run, at random but repeatably."""

    cluster: BenchCluster
    chance: random.Random
    rate: float
    forbidden: str = ""
    """Plural of the kind that no operator may read or write for now."""
    injected: dict[str, int] = field(default_factory=dict)

    def fault(self, request: web.Request) -> ApiError | None:
        """Fail some of the requests of operators; the Lease as well."""
        target = parse_path(request.path)
        if target is not None and target.plural == self.forbidden:
            self._count(f"403 {self.forbidden}")
            return ApiError(403, "Forbidden", f"{self.forbidden} is forbidden: injected")
        if "watch" in request.query or self.chance.random() >= self.rate:
            return None
        code, reason = self.chance.choice(FAULTS)
        self._count(str(code))
        return ApiError(code, reason, "injected")

    def disturb_watches(self) -> None:
        """End all watches, and now and then expire what they would resume from."""
        if self.chance.random() < 0.5:
            self.cluster.api.compact()
            self._count("410 expired")
        self.cluster.api.drop_watches()
        self._count("watches dropped")

    def has_failed_requests(self) -> bool:
        """Tell whether any request has failed at random."""
        return any(str(code) in self.injected for code, _ in FAULTS)

    def _count(self, what: str) -> None:
        self.injected[what] = self.injected.get(what, 0) + 1


def faults(  # noqa: PLR0913  what a run is made of
    folder: Path,
    *,
    tiers: int,
    seconds: float,
    kill_seconds: float,
    kinds: tuple[str, ...] = FORBIDDEN,
    seed: int = 1,
    debounce_seconds: float = 120,
    lease_seconds: int = 20,
) -> Json:
    """Disturb everything while one kind after the other is forbidden, and say what is not as the specs ask for."""
    wanted, by_kind = {"first": 1}, dict[str, Json]()
    with BenchCluster() as cluster, ExitStack() as operators:
        run = _Run(cluster, folder, operators, wanted, tiers, kill_seconds, random.Random(seed), lease_seconds)
        cluster.faults.append(run.trouble.fault)
        cluster.call("POST", TIERS, tier("first"))
        until(lambda: _is_ready(cluster, "first"), seconds=120)
        began = time.monotonic()
        for plural in kinds:
            run.trouble.forbidden, run.trouble.rate = plural, RATE
            run.disturb(seconds / len(kinds))
            run.trouble.rate = 0.0
            # However few edits there was time for, one tier wants something that its operator has not done yet.
            run.change("first")
            settled = run.settled(seconds=debounce_seconds, without=plural)
            named = sum(_is_named(cluster, name, plural) for name in wanted)
            by_kind[plural] = {**settled, "tiers": len(wanted), "tiers_that_name_it": named}
        run.trouble.forbidden = ""
        settled = run.settled(seconds=4 * debounce_seconds)
        missed = [f"without {plural}: {each}" for plural, found in by_kind.items() for each in found["wrong"]]
        return {
            "kind": "faults",
            "tiers": len(wanted),
            "seconds": round(time.monotonic() - began, 1),
            "disturbed_seconds": seconds,
            "killed": run.killed,
            "injected": dict(sorted(run.trouble.injected.items())),
            "by_forbidden_kind": by_kind,
            "recovered_seconds": settled["settled_seconds"],
            "wrong": [*missed, *settled["wrong"]],
        }


@dataclass
class _Run:
    """Two operators, as in production: one that is killed is followed by the other, and comes back as the second."""

    cluster: BenchCluster
    folder: Path
    operators: ExitStack
    wanted: dict[str, int]
    tiers: int
    kill_seconds: float
    chance: random.Random
    lease_seconds: int
    killed: int = 0

    def __post_init__(self) -> None:
        self.trouble = Trouble(self.cluster, random.Random(self.chance.random()), 0.0)
        self._running = [self._start() for _ in range(2)]

    def _start(self) -> OperatorProcess:
        return self.operators.enter_context(
            operator(self.cluster, self.folder, "--leader-elect", KVTIER_LEASE_SECONDS=str(self.lease_seconds))
        )

    def disturb(self, seconds: float) -> None:
        """Disturb for so long, and on a busy machine until an operator was killed and a request has failed."""
        began, killed = time.monotonic(), self.killed
        end, next_kill = began + seconds, began + min(self.kill_seconds, seconds)

        def is_disturbed() -> bool:
            nonlocal next_kill
            _edit(self.cluster, self.wanted, self.chance, most=self.tiers)
            if self.chance.random() < 0.05:
                self.trouble.disturb_watches()
            if time.monotonic() >= next_kill:
                self._running[0].process.kill()
                self._running = [self._running[1], self._start()]
                self.killed, next_kill = self.killed + 1, next_kill + self.kill_seconds
            self.revive()
            return time.monotonic() >= end and self.killed > killed and self.trouble.has_failed_requests()

        until(is_disturbed, seconds=seconds + 300, pause=0.1)

    def change(self, name: str) -> None:
        """Ask for another number of engines."""
        self.wanted[name] = self.wanted[name] % 3 + 1
        self.cluster.call("PATCH", f"{TIERS}/{name}", {"spec": {"replicas": self.wanted[name]}})

    def revive(self) -> None:
        """Do what a kubelet does for an operator that lost its Lease."""
        self._running = [each if each.process.poll() is None else self._start() for each in self._running]

    def settled(self, *, seconds: float, without: str = "") -> Json:
        """Wait until nothing is wrong any more, and return how long that took and what is."""

        def is_well() -> bool:
            self.revive()
            return not wrong(self.cluster, self.wanted, without=without)

        began = time.monotonic()
        with suppress(TimeoutError):
            until(is_well, seconds=seconds, pause=1)
        took = round(time.monotonic() - began, 1)
        return {"settled_seconds": took, "wrong": wrong(self.cluster, self.wanted, without=without)}


def _edit(cluster: BenchCluster, wanted: dict[str, int], chance: random.Random, *, most: int) -> None:
    """Create, change or delete a tier, as a user would while all this goes on."""
    name = f"t{chance.randrange(most):03}"
    replicas = chance.randrange(1, 4)
    if name not in wanted:
        cluster.call("POST", TIERS, tier(name, replicas=replicas))
        wanted[name] = replicas
    elif chance.random() < 0.25:
        cluster.call("DELETE", f"{TIERS}/{name}")
        del wanted[name]
    else:
        cluster.call("PATCH", f"{TIERS}/{name}", {"spec": {"replicas": replicas}})
        wanted[name] = replicas


def wrong(cluster: BenchCluster, wanted: dict[str, int], *, without: str = "") -> list[str]:
    """Return what is not as the specs ask for: tiers that are not final, children missing, left over or different.

    Without a kind, what needs it may be as it was, and a tier need not be final that names it.
    """
    found = [
        f"{name} is not final{f' and does not name {without}' if without else ''}"
        for name, body in ((body["metadata"]["name"], body) for body in cluster.tiers())
        if not is_final(body) and not (without and _names(body, without))
    ]
    excused = NEEDED_BY.get(without, frozenset())
    for plural, suffix in CHILDREN:
        standing = {each["metadata"]["name"]: each for each in cluster.api.list(plural, NAMESPACE)}
        labels = {name: each["metadata"].get("labels") or {} for name, each in standing.items()}
        owners = {name: each.get(LABEL_TIER) for name, each in labels.items() if plural != "persistentvolumeclaims"}
        found += [f"{plural} {name} is left over" for name, owner in owners.items() if owner and owner not in wanted]
        if plural.partition(".")[0] == without or (plural, suffix) in excused:
            continue
        found += [
            f"{plural} {name} is missing" for name in sorted({f"{each}-{suffix}" for each in wanted} - set(standing))
        ]
        for name, replicas in wanted.items() if (plural, suffix) in ENGINE else ():
            has = standing.get(f"{name}-{suffix}", {}).get("spec", {}).get("replicas", replicas)
            found += [f"{name} has {has} replicas instead of {replicas}"] if has != replicas else []
    return found


def forbidden(folder: Path, *, kinds: tuple[str, ...] = FORBIDDEN, seconds: float = 30) -> Json:
    """Forbid one kind after the other to an operator that starts, and say what became of a new tier."""
    found: dict[str, Json] = {}
    with BenchCluster() as cluster:
        trouble = Trouble(cluster, random.Random(1), 0.0)
        cluster.faults.append(trouble.fault)
        for plural in kinds:
            trouble.forbidden = plural
            found[plural] = _without(cluster, trouble, folder, name=f"f-{plural}", seconds=seconds)
        return {"kind": "forbidden", "seconds": seconds, "by_kind": found, "wrong": _misses(found)}


def _without(cluster: BenchCluster, trouble: Trouble, folder: Path, *, name: str, seconds: float) -> Json:
    port = free_port()
    with operator(cluster, folder, f"--liveness=http://127.0.0.1:{port}") as process:
        with suppress(TimeoutError):
            until(lambda: _status(port, "/healthz") == 200, seconds=120)
        cluster.call("POST", TIERS, tier(name))

        def is_done() -> bool:
            is_told = _is_named(cluster, name, trouble.forbidden) or _is_ready(cluster, name)
            return is_told and {trouble.forbidden, *_made(cluster, name)} >= NEVER_KEPT_BACK

        with suppress(TimeoutError):
            until(is_done, seconds=seconds)
        before = {
            "is_alive": process.process.poll() is None,
            "healthz": _status(port, "/healthz"),
            "readyz": _status(port, "/readyz"),
            "is_named": _is_named(cluster, name, trouble.forbidden),
            "is_ready": _is_ready(cluster, name),
            "made": _made(cluster, name),
        }
        trouble.forbidden = ""
        began = time.monotonic()
        with suppress(TimeoutError):
            until(lambda: _is_ready(cluster, name), seconds=400)
        after = {"recovered_seconds": round(time.monotonic() - began, 1), "recovers": _is_ready(cluster, name)}
        cluster.call("DELETE", f"{TIERS}/{name}")
        return {**before, **after}


def _misses(found: dict[str, Json]) -> list[str]:
    """Return what a kind kept from a tier that does not need it."""
    wrong_ = [
        f"without {plural}: {what} is {each[what]}"
        for plural, each in found.items()
        for what, wanted in (("is_alive", True), ("healthz", 200), ("readyz", 200), ("recovers", True))
        if each[what] != wanted
    ]
    for plural, each in found.items():
        if not each["is_named"] and not each["is_ready"]:
            wrong_.append(f"without {plural}: no condition names it")
        missing = NEVER_KEPT_BACK - {plural} - each["made"].keys()
        wrong_ += [f"without {plural}: no {what}" for what in sorted(missing)]
    return wrong_


def _is_ready(cluster: BenchCluster, name: str) -> bool:
    return is_final(cluster.call("GET", f"{TIERS}/{name}"))


def _is_named(cluster: BenchCluster, name: str, plural: str) -> bool:
    return _names(cluster.call("GET", f"{TIERS}/{name}"), plural)


def _names(body: Json, plural: str) -> bool:
    conditions = (body.get("status") or {}).get("conditions", ())
    return any(f"{plural} is forbidden" in each["message"] for each in conditions if each["status"] != "True")


def _made(cluster: BenchCluster, name: str) -> dict[str, list[str]]:
    made: dict[str, list[str]] = {}
    for plural in (*PLURALS, "leases.coordination.k8s.io"):
        standing = [each["metadata"] for each in cluster.api.list(plural, NAMESPACE)]
        ours = sorted(each["name"] for each in standing if (each.get("labels") or {}).get(LABEL_TIER) == name)
        if ours:
            made[plural.partition(".")[0]] = ours
    return made


def _status(port: int, path: str) -> int:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code
    except OSError:
        return 0
