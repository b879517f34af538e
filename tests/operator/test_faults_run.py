# SPDX-License-Identifier: Apache-2.0
"""Operators under faults: calls that fail or are forbidden, watches that end, kills, and two of them at once.

Kinds are forbidden one after the other. While one is, everything is disturbed at random for a while; then that ends,
and all that does not need the kind must be as the specs ask for, and each tier that is not must name the kind. In the
end nothing is forbidden, and everything must be.
"""

from __future__ import annotations

import random
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.error import URLError

import pytest
from aiohttp import web
from e2e.bench.operator_scale import NAMESPACE, tier
from e2e.bench.processes import MeasuredProcess, until
from live import AGENT, TIERS, Client, operator_process
from test_http_client import ask

from kvtier_localcluster.apiserver import ApiError, ApiServerThread
from kvtier_localcluster.apiserver.requests import parse_path
from kvtier_localcluster.ports import free_port

FAULTS: Final = ((409, "Conflict"), (429, "TooManyRequests"), (500, "InternalError"), (503, "ServiceUnavailable"))
RATE: Final = 0.05
LABEL_TIER: Final = "kvtier.dev/tier"
CHILDREN: Final = (
    ("configmaps", "connector"),
    *((kind, "engine") for kind in ("serviceaccounts", "services", "poddisruptionbudgets.policy", "deployments.apps")),
    ("persistentvolumeclaims", "blocks"),
    ("deployments.apps", "janitor"),
)
NEEDED_BY: Final = {"services": frozenset({("deployments.apps", "janitor")})}
"""What waits for a kind that is forbidden, besides objects of that kind."""
Json = dict[str, Any]


@dataclass
class Trouble:
    """What goes wrong in a run, at random but repeatably."""

    api: ApiServerThread
    chance: random.Random = field(default_factory=lambda: random.Random(1))
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
            self.api.compact()
        self.api.drop_watches()


@dataclass
class Run:
    """Two operators, as in production: one that is killed is followed by the other, and comes back as the second."""

    api: ApiServerThread
    kubectl: Client
    kubeconfig: Path
    operators: ExitStack
    tiers: int
    kill_seconds: float
    chance: random.Random = field(default_factory=lambda: random.Random(1))
    wanted: dict[str, int] = field(default_factory=lambda: {"first": 1})
    """Replicas by tier."""
    killed: int = 0

    def __post_init__(self) -> None:
        self.trouble = Trouble(self.api, random.Random(self.chance.random()))
        self._running = [self._start() for _ in range(2)]

    def _start(self) -> MeasuredProcess:
        process = operator_process(self.kubeconfig, "--leader-elect", KVTIER_LEASE_SECONDS="8")
        return self.operators.enter_context(process)

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
            self.kubectl.apply_tier(tier(name, replicas=replicas))
        elif self.chance.random() < 0.25:
            self.kubectl.delete(TIERS, "kvcachetiers", name)
            del self.wanted[name]
            return
        else:
            self.scale(name, replicas)
        self.wanted[name] = replicas

    def scale(self, name: str, replicas: int) -> None:
        self.wanted[name] = replicas
        self.kubectl.merge(TIERS, "kvcachetiers", name, {"spec": {"replicas": replicas}})

    def revive(self) -> None:
        """Do what a kubelet does for an operator that lost its Lease."""
        self._running = [each if each.process.poll() is None else self._start() for each in self._running]

    def settled(self, *, seconds: float, without: str = "") -> list[str]:
        """Wait until nothing is wrong any more, and return what still is."""

        def is_well() -> bool:
            self.revive()
            return not self.wrong(without)

        with suppress(TimeoutError):
            until(is_well, seconds=seconds, pause=1)
        return self.wrong(without)

    def wrong(self, without: str) -> list[str]:
        """Return what is not as the specs ask for: tiers that are not final, children missing, left over or different.

        Without a kind, what needs it may be as it was, and a tier need not be final that names it.
        """
        found = [
            f"{body['metadata']['name']} is not final{f' and does not name {without}' if without else ''}"
            for body in self.kubectl.items(TIERS, "kvcachetiers")
            if not self.kubectl.is_ready(body["metadata"]["name"]) and not (without and names(body, without))
        ]
        for plural, suffix in CHILDREN:
            standing = {each["metadata"]["name"]: each for each in self.api.list(plural, NAMESPACE)}
            labels = {name: each["metadata"].get("labels") or {} for name, each in standing.items()}
            owners = {name: each.get(LABEL_TIER) for name, each in labels.items() if plural != "persistentvolumeclaims"}
            left_over = (name for name, owner in owners.items() if owner and owner not in self.wanted)
            found += [f"{plural} {name} is left over" for name in left_over]
            if plural.partition(".")[0] == without or (plural, suffix) in NEEDED_BY.get(without, ()):
                continue
            missing = sorted({f"{each}-{suffix}" for each in self.wanted} - set(standing))
            found += [f"{plural} {name} is missing" for name in missing]
            for name, replicas in self.wanted.items() if (plural, suffix) == ("deployments.apps", "engine") else ():
                has = standing.get(f"{name}-{suffix}", {}).get("spec", {}).get("replicas", replicas)
                found += [f"{name} has {has} replicas instead of {replicas}"] if has != replicas else []
        return found


def names(body: Json, plural: str) -> bool:
    conditions = (body.get("status") or {}).get("conditions", ())
    return any(f"{plural} is forbidden" in each["message"] for each in conditions if each["status"] != "True")


@pytest.mark.timeout(1500)
@pytest.mark.usefixtures("controllers")
def test_after_faults_and_kills_everything_is_as_asked(api: ApiServerThread, kubectl: Client, tmp_path: Path) -> None:
    kinds, naming = ("poddisruptionbudgets", "services"), dict[str, int]()
    with ExitStack() as operators:
        run = Run(api, kubectl, tmp_path / "kubeconfig", operators, tiers=6, kill_seconds=7)
        api.server.faults.append(run.trouble.fault)
        kubectl.apply_tier(tier("first"))
        until(lambda: kubectl.is_ready("first"), seconds=120)
        for plural in kinds:
            run.trouble.forbidden, run.trouble.rate = plural, RATE
            run.disturb(9)
            run.trouble.rate = 0.0
            # However few edits there was time for, one tier wants something that its operator has not done yet.
            run.scale("first", run.wanted["first"] % 3 + 1)
            assert run.settled(seconds=240, without=plural) == [], f"without {plural}"
            naming[plural] = sum(names(body, plural) for body in kubectl.items(TIERS, "kvcachetiers"))
        run.trouble.forbidden = ""
        assert run.settled(seconds=480) == []
    assert naming["services"] > 0
    assert run.killed > 0
    assert run.trouble.failed > 0


@pytest.mark.timeout(400)
@pytest.mark.usefixtures("controllers")
@pytest.mark.parametrize(
    ("plural", "code", "made"),
    [
        ("kvcachetiers", 503, set()),
        ("poddisruptionbudgets", 200, {"new-engine", "new-janitor"}),
        ("roles", 200, {"new-engine"}),
    ],
)
def test_an_operator_without_a_right_is_alive_does_what_it_can_and_goes_on_once_it_has_it(  # noqa: PLR0913, PLR0917  cases
    plural: str, code: int, made: set[str], api: ApiServerThread, kubectl: Client, tmp_path: Path
) -> None:
    trouble = Trouble(api, forbidden=plural)
    api.server.faults.append(trouble.fault)
    kubectl.apply_tier(tier("new"))
    port = free_port()

    def deployments() -> set[str]:
        return {each["metadata"]["name"] for each in api.list("deployments.apps", NAMESPACE)}

    def is_named() -> bool:
        with suppress(URLError):  # it does not listen yet
            found, said = ask(port, "/readyz")
            told = f"{plural} is forbidden" in f"{said} {kubectl.items(TIERS, 'kvcachetiers')}"
            return found == code and told and deployments() >= made
        return False

    with operator_process(tmp_path / "kubeconfig", f"--liveness=http://127.0.0.1:{port}") as process:
        until(is_named, seconds=120)
        assert ask(port, "/healthz")[0] == 200
        assert process.process.poll() is None
        assert bool(deployments()) is bool(made)
        trouble.forbidden = ""
        until(lambda: kubectl.is_ready("new"), seconds=200)
        until(lambda: ask(port, "/readyz")[0] == 200, seconds=60)
