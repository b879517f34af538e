# SPDX-License-Identifier: Apache-2.0
"""How the operator bears load and faults: ``python -m e2e.bench.operators --out DIRECTORY [--phases scale,faults]``.

scale: many tiers created in one go; until all have their final conditions; then left alone; then another operator takes
over, and looks at all of them again once, as each resync does. faults: calls that fail, watches that end or expire,
tiers that come, change and go, and an operator that is killed every few seconds; then all of that stops, and everything
must be as the specs ask for.
"""

from __future__ import annotations

import argparse
import random
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web
from e2e.bench import journal
from e2e.bench.journal import Journal
from e2e.bench.operator_cluster import (
    NAMESPACE,
    TIERS,
    BenchCluster,
    Json,
    OperatorProcess,
    is_final,
    operator,
    tier,
    until,
)

from kvtier_localcluster.apiserver import ApiError
from kvtier_operator.settings import Settings

FAULTS = ((409, "Conflict"), (429, "TooManyRequests"), (500, "InternalError"), (503, "ServiceUnavailable"))
PATIENT = {"KVTIER_LEASE_SECONDS": "60"}
"""No kubelet is here to start an operator again that lost its Lease to an API server in Python."""
RATE = 0.05
LABEL_TIER = "kvtier.dev/tier"
CHILDREN = (
    ("configmaps", "connector"),
    ("serviceaccounts", "engine"),
    ("services", "engine"),
    ("poddisruptionbudgets.policy", "engine"),
    ("deployments.apps", "engine"),
)


def scale(
    folder: Path, *, tiers: int, idle_seconds: float, resync_seconds: float = 180, limit_seconds: float = 1200
) -> Json:
    """Create tiers in one go and measure until all are final; then the operator at rest, and the start of the next."""
    with BenchCluster() as cluster:
        return {
            "kind": "scale",
            "tiers": tiers,
            **_create(cluster, folder, tiers=tiers, idle_seconds=idle_seconds, limit_seconds=limit_seconds),
            **_take_over(cluster, folder, tiers=tiers, resync_seconds=resync_seconds, limit_seconds=limit_seconds),
        }


def _create(cluster: BenchCluster, folder: Path, *, tiers: int, idle_seconds: float, limit_seconds: float) -> Json:
    with operator(cluster, folder, "--leader-elect", **PATIENT) as process:
        until(lambda: "watch kvcachetiers" in cluster.requests, seconds=60)
        began, cpu_before = time.monotonic(), process.cpu_seconds()
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda number: cluster.call("POST", TIERS, tier(f"t{number:04}")), range(tiers)))
        created = time.monotonic() - began
        peak = _Peak(process)
        until(_Finals(cluster, tiers), seconds=limit_seconds, pause=0.5)
        final, cpu = time.monotonic() - began, process.cpu_seconds() - cpu_before
        requests = dict(cluster.requests)
        _settle(cluster, quiet_seconds=min(10, idle_seconds))
        before, cpu_before, began = cluster.writes(), process.cpu_seconds(), time.monotonic()
        time.sleep(idle_seconds)
        idle, after = time.monotonic() - began, cluster.writes()
        written = {what: count - before.get(what, 0) for what, count in after.items() if count != before.get(what, 0)}
        renewals = sum(count for what, count in written.items() if what.endswith(" leases"))
        return {
            "created_seconds": round(created, 1),
            "final_seconds": round(final, 1),
            "operator_cpu_seconds": round(cpu, 1),
            "requests": sum(requests.values()),
            "requests_by_what": dict(sorted(requests.items())),
            "idle_seconds": round(idle, 1),
            "idle_writes_per_minute": round((sum(written.values()) - renewals) / idle * 60, 2),
            "idle_lease_renewals_per_minute": round(renewals / idle * 60, 2),
            "idle_writes": written,
            "idle_core_share": round((process.cpu_seconds() - cpu_before) / idle, 4),
            "rss_peak_mb": round(peak.stop() / 1e6, 1),
            "rss_mb": round(process.rss_bytes() / 1e6, 1),
        }


def _take_over(cluster: BenchCluster, folder: Path, *, tiers: int, resync_seconds: float, limit_seconds: float) -> Json:
    """Start an operator where everything stands, and measure until it has looked at every tier, and once more."""
    port = _free_port()
    settings = {"KVTIER_RESYNC_SECONDS": str(resync_seconds), "KVTIER_METRICS_PORT": str(port)}
    begin = _Counts(cluster)
    with operator(cluster, folder, **settings) as process:
        peak = _Peak(process)
        seconds = until(lambda: _passes(port) >= tiers, seconds=limit_seconds)
        _settle(cluster, quiet_seconds=min(10, resync_seconds / 4))
        started, cpu, passes = _Counts(cluster), process.cpu_seconds(), _passes(port)
        until(lambda: _passes(port) >= passes + tiers, seconds=limit_seconds)
        resync = process.cpu_seconds() - cpu
        return {
            "restart_seconds": round(seconds, 1),
            "restart_cpu_seconds": round(cpu, 1),
            "restart_requests": started.requests - begin.requests,
            "restart_status_writes": started.status_writes - begin.status_writes,
            "restart_rss_peak_mb": round(peak.stop() / 1e6, 1),
            "resync_cpu_seconds": round(resync, 1),
            "resync_requests": _Counts(cluster).requests - started.requests,
            "resync_writes": _Counts(cluster).writes - started.writes,
            "resync_core_share": round(resync / Settings().resync_seconds, 4),
        }


class _Counts:
    """What operators had asked a cluster for at one moment; the Lease does not count."""

    def __init__(self, cluster: BenchCluster) -> None:
        asked, written = dict(cluster.requests), cluster.writes()
        self.requests = sum(count for what, count in asked.items() if not what.endswith(" leases"))
        self.writes = sum(count for what, count in written.items() if not what.endswith(" leases"))
        self.status_writes = written.get("PATCH kvcachetiers", 0)


def _passes(port: int) -> float:
    """Return how many passes over tiers an operator has made."""
    with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("kvtier_operator_reconcile_total{"))
    return 0.0


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _settle(cluster: BenchCluster, *, quiet_seconds: float, limit_seconds: float = 300) -> None:
    """Wait until nothing but the Lease has been written for a while."""
    seen, since, end = None, time.monotonic(), time.monotonic() + limit_seconds
    while time.monotonic() < end:
        now = {what: count for what, count in cluster.writes().items() if not what.endswith(" leases")}
        if now != seen:
            seen, since = now, time.monotonic()
        elif time.monotonic() - since > quiet_seconds:
            return
        time.sleep(0.5)


class _Finals:
    """Tells whether all tiers are final; who asks for all of them again and again keeps the server from its work."""

    def __init__(self, cluster: BenchCluster, tiers: int) -> None:
        self._cluster, self._tiers, self._next = cluster, tiers, 0

    def __call__(self) -> bool:
        while self._next < self._tiers:
            if not is_final(self._cluster.call("GET", f"{TIERS}/t{self._next:04}")):
                return False
            self._next += 1
        self._next = 0  # none may have fallen back meanwhile
        return sum(map(is_final, self._cluster.tiers())) == self._tiers


class _Peak:
    """Looks at the memory of a process until told to stop."""

    def __init__(self, process: OperatorProcess) -> None:
        self._process, self._most, self._stop = process, 0, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(0.5):
            self._most = max(self._most, self._process.rss_bytes())

    def stop(self) -> int:
        self._stop.set()
        self._thread.join()
        return self._most


@dataclass
class Trouble:
    """What goes wrong in a run, at random but repeatably."""

    cluster: BenchCluster
    chance: random.Random
    rate: float
    injected: dict[str, int] = field(default_factory=dict)

    def fault(self, request: web.Request) -> ApiError | None:
        """Fail some of the requests of operators; the Lease as well."""
        if "watch" in request.query or self.chance.random() >= self.rate:
            return None
        code, reason = self.chance.choice(FAULTS)
        self._count(str(code))
        return ApiError(code, reason, "injected")

    def disturb_watches(self) -> None:
        """End all watches, and now and then expire what they would resume from."""
        if self.chance.random() < 0.5:  # noqa: PLR2004  every other time
            self.cluster.api.compact()
            self._count("410 expired")
        self.cluster.api.drop_watches()
        self._count("watches dropped")

    def _count(self, what: str) -> None:
        self.injected[what] = self.injected.get(what, 0) + 1


def faults(folder: Path, *, tiers: int, seconds: float, kill_seconds: float, seed: int = 1) -> Json:
    """Disturb everything for a while, then say what is not as the specs ask for."""
    chance, wanted, killed = random.Random(seed), dict[str, int](), 0
    with BenchCluster() as cluster, ExitStack() as operators:
        trouble = Trouble(cluster, random.Random(seed + 1), RATE)
        cluster.faults.append(trouble.fault)
        # Two at a time, as in production: one that is killed is followed by the other, and comes back as the second.
        running = [_start(operators, cluster, folder) for _ in range(2)]
        end, next_kill = time.monotonic() + seconds, time.monotonic() + kill_seconds
        while time.monotonic() < end:
            _edit(cluster, wanted, chance, most=tiers)
            if chance.random() < 0.05:  # noqa: PLR2004  one in twenty rounds
                trouble.disturb_watches()
            if time.monotonic() >= next_kill:
                running[0].process.kill()
                running = [running[1], _start(operators, cluster, folder)]
                killed, next_kill = killed + 1, next_kill + kill_seconds
            time.sleep(0.1)
        cluster.faults.clear()
        began = time.monotonic()
        with suppress(TimeoutError):
            until(lambda: not wrong(cluster, wanted), seconds=180, pause=1)
        return {
            "kind": "faults",
            "tiers": len(wanted),
            "seconds": seconds,
            "killed": killed,
            "injected": dict(sorted(trouble.injected.items())),
            "recovered_seconds": round(time.monotonic() - began, 1),
            "wrong": wrong(cluster, wanted),
        }


def _start(operators: ExitStack, cluster: BenchCluster, folder: Path) -> OperatorProcess:
    return operators.enter_context(operator(cluster, folder, "--leader-elect", KVTIER_LEASE_SECONDS="6"))


def _edit(cluster: BenchCluster, wanted: dict[str, int], chance: random.Random, *, most: int) -> None:
    """Create, change or delete a tier, as a user would while all this goes on."""
    name = f"t{chance.randrange(most):03}"
    replicas = chance.randrange(1, 4)
    if name not in wanted:
        cluster.call("POST", TIERS, tier(name, replicas=replicas))
        wanted[name] = replicas
    elif chance.random() < 0.25:  # noqa: PLR2004  one in four edits
        cluster.call("DELETE", f"{TIERS}/{name}")
        del wanted[name]
    else:
        cluster.call("PATCH", f"{TIERS}/{name}", {"spec": {"replicas": replicas}})
        wanted[name] = replicas


def wrong(cluster: BenchCluster, wanted: dict[str, int]) -> list[str]:
    """Return what is not as the specs ask for: tiers that are not final, children missing, left over or different."""
    found = [f"{body['metadata']['name']} is not final" for body in cluster.tiers() if not is_final(body)]
    for plural, suffix in CHILDREN:
        standing = {each["metadata"]["name"]: each for each in cluster.api.list(plural, NAMESPACE)}
        ours = {f"{name}-{suffix}" for name in wanted}
        found += [f"{plural} {name} is missing" for name in sorted(ours - standing.keys())]
        owners = {name: (each["metadata"].get("labels") or {}).get(LABEL_TIER) for name, each in standing.items()}
        found += [f"{plural} {name} is left over" for name, owner in owners.items() if owner and owner not in wanted]
    for each in cluster.api.list("deployments.apps", NAMESPACE):
        name, is_engine, _ = each["metadata"]["name"].rpartition("-engine")
        if is_engine and name in wanted and each["spec"]["replicas"] != wanted[name]:
            found.append(f"{name} has {each['spec']['replicas']} replicas instead of {wanted[name]}")
    return found


def _judge(record: Json) -> list[str]:
    """Return what misses its target."""
    if record["kind"] == "faults":
        return [str(each) for each in record["wrong"]]
    limits = {
        "final_seconds": 120,
        "idle_writes_per_minute": 1,
        "idle_core_share": 0.05,
        "resync_core_share": 0.05,
        "rss_peak_mb": 250,
        "restart_rss_peak_mb": 250,
    }
    return [f"{name} is {record[name]}, not below {most}" for name, most in limits.items() if record[name] >= most]


def main(arguments: list[str] | None = None) -> int:
    """Run the phases and return 1 if one misses its target."""
    parser = argparse.ArgumentParser(prog="operators", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="where operator.jsonl and the logs go")
    parser.add_argument("--phases", default="scale,faults")
    parser.add_argument("--tiers", type=int, default=1000)
    parser.add_argument("--idle", type=float, default=720, help="seconds of rest: longer than the resync of 600")
    parser.add_argument("--resync", type=float, default=180, help="seconds between two looks of the second operator")
    parser.add_argument("--seconds", type=float, default=300, help="seconds of faults")
    options = parser.parse_args(arguments)
    out = Journal(options.out / "operator.jsonl")
    out.write(journal.describe_run(tiers=options.tiers, idle=options.idle, seconds=options.seconds))
    missed: list[str] = []
    for phase in options.phases.split(","):
        run: Any = {
            "scale": lambda: scale(
                options.out / "logs", tiers=options.tiers, idle_seconds=options.idle, resync_seconds=options.resync
            ),
            "faults": lambda: faults(options.out / "logs", tiers=40, seconds=options.seconds, kill_seconds=20),
        }[phase]
        try:
            record = run()
        except (TimeoutError, urllib.error.URLError) as error:
            missed.append(f"{phase}: {error}")
            continue
        out.write(record, str({name: value for name, value in record.items() if not isinstance(value, dict)}))
        missed += _judge(record)
    for each in missed:
        out.say(f"MISSED: {each}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
