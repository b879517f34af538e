# SPDX-License-Identifier: Apache-2.0
"""The operator benchmark: ``python -m e2e.bench.operator_scale --out FILE [--tiers 1000,10000]``.

A real operator process works against an API server in memory. The operator makes one tier; copies of its objects stand
there before the measured operator starts, so a pass finds nothing to do. Measured: seconds until each tier was looked
at, memory, and requests at rest and in a pass.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml
from e2e.bench import report
from e2e.bench.memory_api import Json, MemoryApi

from kvtier_connector.contract import janitor
from kvtier_localcluster.ports import free_port
from kvtier_operator.plan.digest import digest, digest_text

ROOT: Final = Path(__file__).resolve().parents[2]
NAMESPACE: Final = "default"
FIRST: Final = "t00000"
NODE_BYTES: Final = 14_000
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TICKS = os.sysconf("SC_CLK_TCK")


def until(condition: Callable[[], object], *, seconds: float, pause: float = 0.2) -> float:
    """Wait until the condition holds and return the seconds that took.

    Raises:
        TimeoutError: it does not hold in time.
    """
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > seconds:
            raise TimeoutError(f"{getattr(condition, '__name__', condition)} does not hold after {seconds:.0f} s")
        time.sleep(pause)
    return time.monotonic() - began


def tier(name: str, **spec: Any) -> Json:
    """Return a small tier."""
    return {
        "apiVersion": "kvtier.dev/v1alpha1",
        "kind": "KVCacheTier",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {
            "model": {"name": "meta-llama/Llama-3.1-8B-Instruct"},
            "replicas": 1,
            "cpu": {"size": "8Gi"},
            "volume": {"claim": {"size": "100Gi"}},
            **spec,
        },
    }


@dataclass
class OperatorProcess:
    """One operator as `kvtier run` starts it, with its processor time and memory."""

    process: subprocess.Popen[bytes]
    log: Path

    def cpu_seconds(self) -> float:
        """Return the processor time that it used so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS

    def rss_bytes(self) -> int:
        """Return the memory that it holds now."""
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * _PAGE_BYTES


@contextmanager
def running(folder: Path, kubeconfig: Path, *arguments: str, **environment: str) -> Iterator[OperatorProcess]:
    """Run an operator in a folder, and end it gracefully unless it has ended."""
    log = folder / f"operator-{time.monotonic_ns()}.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "kvtier_cli", "run", *arguments],
            env={**os.environ, "KUBECONFIG": str(kubeconfig), **environment},
            cwd=folder,
            stdout=file,
            stderr=file,
        )
    try:
        yield OperatorProcess(process, log)
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def settle(api: MemoryApi) -> Callable[[str, Json], None]:
    """Return what does for children what a cluster does: binds claims, ends Jobs, reports Deployments with pods."""

    def act(plural: str, body: Json) -> None:
        name = body["metadata"]["name"]
        if plural == "persistentvolumeclaims":
            capacity = {"capacity": {"storage": body["spec"]["resources"]["requests"]["storage"]}}
            api.write(plural, {**body, "status": {"phase": "Bound", **capacity}})
        elif plural == "services":
            api.write(plural, {**body, "spec": {**body["spec"], "clusterIP": "127.0.0.1"}})
        elif plural == "jobs":
            container = {"name": "preflight", "image": "i", "imageID": "", "ready": False, "restartCount": 0}
            ended = {"terminated": {"exitCode": 0, "message": '{"problem": ""}'}}
            status = {"phase": "Succeeded", "containerStatuses": [{**container, "state": ended}]}
            api.write("pods", pod(body, f"{name}-0", status))
        elif plural == "deployments":
            count = body["spec"]["replicas"]
            for number in range(count):
                api.write("pods", pod(body, f"{name}-{number}", ready("127.0.0.1")))
            numbers = dict.fromkeys(("replicas", "updatedReplicas", "readyReplicas", "availableReplicas"), count)
            status = {"observedGeneration": body["metadata"]["generation"], **numbers}
            api.write(plural, {**body, "status": status})

    return act


def ready(address: str) -> Json:
    """Return the status of a pod that serves."""
    conditions = [
        {"type": kind, "status": "True", "lastTransitionTime": "2026-11-01T00:00:00Z"}
        for kind in ("PodScheduled", "Ready")
    ]
    return {"phase": "Running", "podIP": address, "conditions": conditions}


def pod(of: Json, name: str, status: Json) -> Json:
    """Return a pod of a Deployment or of a Job."""
    metadata, template = of["metadata"], of["spec"]["template"]
    is_job = of["kind"] == "Job"
    owner = {
        "apiVersion": "batch/v1" if is_job else "apps/v1",
        "kind": "Job" if is_job else "ReplicaSet",
        "name": metadata["name"] if is_job else f"{metadata['name']}-5f6d",
        "uid": metadata["uid"],
        "controller": True,
    }
    labels = {**template["metadata"]["labels"], **({} if is_job else {"pod-template-hash": "5f6d"})}
    made = {**template["metadata"], "name": name, "namespace": NAMESPACE, "labels": labels, "ownerReferences": [owner]}
    return {"metadata": made, "spec": {**template["spec"], "nodeName": "node-00000"}, "status": status}


def node(number: int) -> Json:
    """Return a node of the size that nodes with some images have."""
    body: Json = {
        "metadata": {"name": f"node-{number:05}", "labels": {"kubernetes.io/hostname": f"node-{number:05}"}},
        "spec": {},
        "status": {
            "allocatable": {"cpu": "96", "memory": "1000Gi", "nvidia.com/gpu": "8", "pods": "110"},
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }
    image = {"names": [f"registry.example.com/team/image@sha256:{'0' * 64}"], "sizeBytes": 1 << 30}
    body["status"]["images"] = [image] * ((NODE_BYTES - len(json.dumps(body))) // len(json.dumps(image)))
    return body


def populate(api: MemoryApi, made: dict[str, list[Json]], *, tiers: int, pods: int) -> None:
    """Put copies of the first tier's objects there; the first ones have pods, and strangers fill up."""
    text = json.dumps(made)
    uids = {uid for bodies in made.values() for body in bodies for uid in uids_in(body)}
    digests = _digests(made)
    for number in range(1, tiers):
        copy = text.replace(FIRST, f"t{number:05}")
        for uid in uids:
            copy = copy.replace(uid, f"{uid[:-5]}{number:05}")
        # Digests of names and uids, as an operator would have written them.
        for old, new in zip(digests, _digests(json.loads(copy)), strict=True):
            copy = copy.replace(old, new)
        kept = {
            plural: each for plural, each in json.loads(copy).items() if plural != "pods" or number * len(each) < pods
        }
        api.fill((plural, body) for plural, bodies in kept.items() for body in bodies)
    stranger, count = made["pods"][0], sum(1 for _ in api.all("pods"))
    names = ({"name": f"stranger-{number}", "namespace": NAMESPACE} for number in range(count, pods))
    api.fill(("pods", {**stranger, "metadata": metadata}) for metadata in names)


def _digests(made: dict[str, list[Json]]) -> list[str]:
    """Return the digests that objects of a tier carry: of the settings of its pods, and of its claim."""
    (claim,) = (each["metadata"] for each in made["persistentvolumeclaims"])
    tried = {"claim": claim["name"], "uid": claim["uid"], "path": "", "securityContext": {}}
    return [*map(_settings, made["configmaps"]), digest(tried)]


def _settings(config: Json) -> str:
    """Return the digest that pods carry of what they were made with."""
    data = config["data"]
    if "connector.json" in data:
        return digest_text(data["connector.json"])
    told = json.loads(data["janitor.json"])
    return digest({field: told[field] for field in ("version", *janitor.FIXED_FIELDS) if field in told})


def uids_in(body: Json) -> set[str]:
    """Return the uids of an object and of its owners."""
    metadata = body["metadata"]
    return {metadata["uid"], *(each["uid"] for each in metadata.get("ownerReferences", ()))}


@contextmanager
def operator(api: MemoryApi, folder: Path, code: Path, **settings: str) -> Iterator[tuple[OperatorProcess, int]]:
    """Run an operator of some checkout for all namespaces, and return the port of its metrics."""
    folder.mkdir(parents=True, exist_ok=True)
    config, port = folder / "kubeconfig", free_port()
    config.write_text(yaml.safe_dump(api.kubeconfig()))
    path = f"{code / 'operator'}:{code / 'connector'}"
    with running(folder, config, "-A", PYTHONPATH=path, KVTIER_METRICS_PORT=str(port), **settings) as process:
        yield process, port


def passes(port: int) -> float:
    """Return how many passes over tiers an operator has made."""
    with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("kvtier_operator_reconcile_total{"))
    return 0.0


def make_first(api: MemoryApi, folder: Path, code: Path) -> dict[str, list[Json]]:
    """Let an operator make a tier, and return all that belongs to it then, by plural, the tier first."""
    api.on_write = settle(api)
    api.put("nodes", node(0))
    api.put("kvcachetiers", tier(FIRST))
    with operator(api, folder, code) as (_, port):
        until(lambda: passes(port) > 0 and _is_settled(api), seconds=120)
    found: dict[str, list[Json]] = {"kvcachetiers": [], **{plural: [] for plural in api.plurals}}
    for plural in found.keys() - {"events", "nodes", "namespaces"}:
        found[plural] = [body for body in api.all(plural) if body["metadata"]["name"].startswith(FIRST)]
    # A Job that tried the volume has been deleted by now, and its pod with it.
    found["pods"] = [each for each in found["pods"] if "-preflight" not in each["metadata"]["name"]]
    return found


def _is_settled(api: MemoryApi) -> bool:
    before = sum(api.requests.values())
    time.sleep(4)
    renewals = sum(count for what, count in api.requests.items() if what.endswith(" leases"))
    is_quiet = sum(api.requests.values()) - before <= renewals
    return is_quiet and len(list(api.all("deployments"))) == 2  # noqa: PLR2004  engine and janitor


def measure(  # noqa: PLR0913  what a run is made of
    folder: Path, code: Path, *, tiers: int, pods: int, nodes: int, rest: float, resync: float
) -> Json:
    """Start an operator where that many tiers stand, and let it rest."""
    with MemoryApi() as api:
        api.fill(("nodes", node(number)) for number in range(nodes))
        populate(api, make_first(api, folder, code), tiers=tiers, pods=pods)
        api.clear()
        began, peak = time.monotonic(), 0
        with operator(api, folder, code, KVTIER_RESYNC_SECONDS=str(resync)) as (process, port):

            def has_seen_all() -> bool:
                nonlocal peak
                peak = max(peak, process.rss_bytes())
                return passes(port) >= tiers

            until(has_seen_all, seconds=1800, pause=0.5)
            started, cpu = time.monotonic() - began, process.cpu_seconds()
            start_requests = dict(api.requests)
            _quiet(api)
            api.clear()
            done, cpu_before, began = passes(port), process.cpu_seconds(), time.monotonic()
            end = time.monotonic() + rest
            while time.monotonic() < end:
                peak = max(peak, process.rss_bytes())
                time.sleep(0.5)
            seconds, looked = time.monotonic() - began, passes(port) - done
            asked = {what: count for what, count in api.requests.items() if not what.endswith(" leases")}
            return {
                "kind": "memory-api",
                "tiers": tiers,
                "pods": sum(1 for _ in api.all("pods")),
                "nodes": nodes,
                "start_seconds": round(started, 1),
                "start_cpu_seconds": round(cpu, 1),
                "start_requests": sum(start_requests.values()),
                "start_requests_by_what": dict(sorted(start_requests.items())),
                "rss_peak_mb": round(peak / 1e6, 1),
                "rss_mb": round(process.rss_bytes() / 1e6, 1),
                "rest_seconds": round(seconds, 1),
                "rest_passes": looked,
                "rest_lists": sum(count for what, count in asked.items() if what.startswith("list")),
                "rest_requests": {what: count for what, count in asked.items() if not what.startswith("watch")},
                "requests_a_pass": round(sum(asked.values()) / looked, 2) if looked else None,
                "rest_core_share": round((process.cpu_seconds() - cpu_before) / seconds, 4),
            }


def _quiet(api: MemoryApi, *, seconds: float = 10.0, limit: float = 300.0) -> None:
    """Wait until nothing has been written for a while."""
    end, since, seen = time.monotonic() + limit, time.monotonic(), -1
    while time.monotonic() < end and time.monotonic() - since < seconds:
        writes = sum(
            count
            for what, count in api.requests.items()
            if what.split()[0] not in {"GET", "list", "watch"} and not what.endswith(" leases")
        )
        if writes != seen:
            since, seen = time.monotonic(), writes
        time.sleep(0.5)


def main(arguments: list[str] | None = None) -> int:
    """Measure and write one line each."""
    parser = argparse.ArgumentParser(prog="operator_scale", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="JSON lines")
    parser.add_argument("--code", type=Path, default=ROOT, help="checkout of the operator that is measured")
    parser.add_argument("--tiers", default="1000,10000", help="one run for each number")
    parser.add_argument("--pods", type=int, default=5000)
    parser.add_argument("--nodes", type=int, default=5000)
    parser.add_argument("--rest", type=float, default=60, help="seconds of rest")
    parser.add_argument("--resync", type=float, default=600, help="seconds after which a tier is looked at anyway")
    options = parser.parse_args(arguments)
    out = report.Journal(options.out)
    out.write(report.describe_run(**{name: str(value) for name, value in vars(options).items()}))
    folder, code = options.out.parent / "logs", options.code.resolve()
    for tiers in map(int, options.tiers.split(",")):
        sizes = {"tiers": tiers, "pods": options.pods, "nodes": options.nodes}
        record = measure(folder, code, **sizes, rest=options.rest, resync=options.resync)
        out.write(record, str({name: value for name, value in record.items() if not name.endswith("by_what")}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
