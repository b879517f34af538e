# SPDX-License-Identifier: Apache-2.0
"""What an operator takes for very many tiers: ``python -m e2e.bench.operator_scale --out FILE [--tiers 1000,10000]``.

A real operator process against an API server that is nothing but a memory. One tier is made by the operator itself;
copies of all that belongs to it stand there before the operator that is measured starts, so that a pass finds nothing
to do. Then: how long it takes until each tier was looked at, its memory, what it asks the API server for at rest and
in a pass, and how long a pod that becomes ready waits for its question while others are not reachable.
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

import yaml
from e2e.bench import journal
from e2e.bench.memory_api import KINDS, Json, MemoryApi
from e2e.bench.operator_cluster import OperatorProcess, running, tier, until

from kvtier_connector import contract_janitor
from kvtier_localcluster.ports import free_port
from kvtier_operator.plan.digest import digest, digest_text

ROOT: Final = Path(__file__).resolve().parents[2]
NAMESPACE: Final = "default"
FIRST: Final = "t00000"
ENGINE_PORT: Final = 8000
NODE_BYTES: Final = 14_000
TRUE: Final = "True"


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
        {"type": kind, "status": TRUE, "lastTransitionTime": "2026-11-01T00:00:00Z"}
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
            "conditions": [{"type": "Ready", "status": TRUE}],
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
        # What an operator would have noted of names and uids.
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
    return digest({field: told[field] for field in ("version", *contract_janitor.FIXED_FIELDS)})


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
    found: dict[str, list[Json]] = {"kvcachetiers": [], **{plural: [] for plural in KINDS}}
    for plural in found.keys() - {"events", "nodes", "namespaces"}:
        found[plural] = [body for body in api.all(plural) if body["metadata"]["name"].startswith(FIRST)]
    # A Job that tried the volume has been deleted by now, and its pod with it.
    found["pods"] = [each for each in found["pods"] if "-preflight" not in each["metadata"]["name"]]
    return found


def _is_settled(api: MemoryApi) -> bool:
    before = sum(api.requests.values())
    time.sleep(4)
    deployments = list(api.all("deployments"))
    return len(deployments) == 2 and _busy(api, before)  # noqa: PLR2004  engine and janitor


def _busy(api: MemoryApi, before: int) -> bool:
    renewals = sum(count for what, count in api.requests.items() if what.endswith(" leases"))
    return sum(api.requests.values()) - before <= renewals


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


def delay(folder: Path, code: Path, *, unreachable: int) -> Json:
    """Measure how long a pod that becomes ready waits for its question, beside others that cannot be reached."""
    asked = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.set()
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    tiers = unreachable + 1
    with MemoryApi() as api, ExitStack() as stack:
        made = make_first(api, folder, code)
        populate(api, made, tiers=tiers, pods=0)
        healthy = ThreadingHTTPServer(("127.0.0.2", ENGINE_PORT), Handler, bind_and_activate=False)
        healthy.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        healthy.server_bind()
        healthy.server_activate()
        stack.callback(healthy.server_close)
        stack.callback(healthy.shutdown)
        threading.Thread(target=healthy.serve_forever, daemon=True).start()
        stack.enter_context(_drops_everything())
        engine = next(each for each in made["pods"] if each["metadata"]["name"].endswith("-engine-0"))
        _, port = stack.enter_context(operator(api, folder, code))
        until(lambda: passes(port) >= tiers, seconds=600)
        _quiet(api)
        done = passes(port)
        for number in range(1, tiers):
            api.put("pods", _copy(engine, number, f"127.{1 + number // 250}.0.{number % 250 + 1}"))
        until(lambda: passes(port) >= done + unreachable, seconds=600)  # they are asked, or wait for it, by now
        began = time.monotonic()
        api.put("pods", _copy(engine, 0, "127.0.0.2"))
        is_asked = asked.wait(600)
        return {
            "kind": "delay",
            "unreachable": unreachable,
            "asked_after_seconds": round(time.monotonic() - began, 2) if is_asked else None,
        }


def _copy(engine: Json, number: int, address: str) -> Json:
    text = json.dumps(engine).replace(FIRST, f"t{number:05}")
    for old in uids_in(engine):
        text = text.replace(old, f"{old[:-5]}{number:05}")
    body: Json = json.loads(text)
    body["metadata"]["name"] += "-new"
    body["metadata"].pop("uid")
    return {**body, "status": ready(address)}


@contextmanager
def _drops_everything() -> Iterator[None]:
    """Take no connection at the engines' port of any loopback address, and refuse none."""
    with socket.socket() as listener, ExitStack() as stack:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(("0.0.0.0", ENGINE_PORT))
        listener.listen(0)
        for _ in range(4):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)  # noqa: FBT003  the library's signature
            filler.connect_ex(("127.9.9.9", ENGINE_PORT))
        yield


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
    parser.add_argument("--unreachable", default="0,60,600", help="one run for each number of pods")
    options = parser.parse_args(arguments)
    out = journal.Journal(options.out)
    out.write(journal.describe_run(**{name: str(value) for name, value in vars(options).items()}))
    folder, code = options.out.parent / "logs", options.code.resolve()
    runs: list[Callable[[], Json]] = [
        lambda count=int(each): measure(  # type: ignore[misc]  # the field is read-only for others
            folder,
            code,
            tiers=count,
            pods=options.pods,
            nodes=options.nodes,
            rest=options.rest,
            resync=options.resync,
        )
        for each in options.tiers.split(",")
        if each
    ]
    runs += [
        lambda count=int(each): delay(folder, code, unreachable=count)  # type: ignore[misc]  # the field is read-only for others
        for each in options.unreachable.split(",")
        if each
    ]
    for run in runs:
        record: dict[str, Any] = run()
        out.write(record, str({name: value for name, value in record.items() if not name.endswith("by_what")}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
