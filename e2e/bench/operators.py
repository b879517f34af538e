# SPDX-License-Identifier: Apache-2.0
"""How the operator bears load and faults: ``python -m e2e.bench.operators --out DIRECTORY [--phases NAMES]``.

scale: many tiers created in one go; until all have their final conditions; then left alone; then another operator takes
over, and looks at all of them again once, as each resync does. faults: calls that fail or are forbidden, watches that
end or expire, tiers that come, change and go, an operator that is killed every few seconds, and one of somebody else's
beside them; then all of that stops, and everything must be as the specs ask for. forbidden: one kind after the other.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from e2e.bench import journal
from e2e.bench.journal import Journal
from e2e.bench.operator_cluster import (
    TIERS,
    BenchCluster,
    Json,
    OperatorProcess,
    is_final,
    operator,
    tier,
    until,
)
from e2e.bench.operator_faults import FORBIDDEN, faults, forbidden

from kvtier_localcluster.ports import free_port
from kvtier_operator.settings import Settings

PATIENT = {"KVTIER_LEASE_SECONDS": "60"}
"""No kubelet is here to start an operator again that lost its Lease to an API server in Python."""


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
    port = free_port()
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


def _judge(record: Json) -> list[str]:
    """Return what misses its target."""
    if record["kind"] in {"faults", "forbidden"}:
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
    parser.add_argument("--phases", default="scale,faults,forbidden")
    parser.add_argument("--tiers", type=int, default=1000)
    parser.add_argument("--idle", type=float, default=720, help="seconds of rest: longer than the resync of 600")
    parser.add_argument("--resync", type=float, default=180, help="seconds between two looks of the second operator")
    parser.add_argument("--seconds", type=float, default=300, help="seconds of faults")
    parser.add_argument("--kinds", default=",".join(FORBIDDEN), help="which are forbidden in turn")
    options = parser.parse_args(arguments)
    kinds = tuple(options.kinds.split(","))
    out = Journal(options.out / "operator.jsonl")
    out.write(
        journal.describe_run(tiers=options.tiers, idle=options.idle, seconds=options.seconds, kinds=options.kinds)
    )
    missed: list[str] = []
    for phase in options.phases.split(","):
        run: Any = {
            "scale": lambda: scale(
                options.out / "logs", tiers=options.tiers, idle_seconds=options.idle, resync_seconds=options.resync
            ),
            "forbidden": lambda: forbidden(options.out / "logs", kinds=kinds),
            "faults": lambda: faults(
                options.out / "logs", tiers=12, seconds=options.seconds, kill_seconds=10, kinds=kinds
            ),
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
