# SPDX-License-Identifier: Apache-2.0
"""The operator benchmark: ``python -m e2e.bench.operator_scale --out FILE [--tiers 1000,10000]``.

A real operator makes one tier in a simulated cluster. Copies of its objects stand in the embedded API server before the
measured operator starts, so a pass finds nothing to do. Measured: seconds until each tier was looked at, memory, and
requests at rest and in a pass.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import yaml
from e2e.bench import report
from e2e.bench.processes import MeasuredProcess, running, until
from kubernetes import client

from kvtier_connector.contract import janitor
from kvtier_localcluster.apiserver import ApiServerThread
from kvtier_localcluster.apiserver.store.memory import EventType
from kvtier_localcluster.cluster import ClusterSettings, ClusterThread
from kvtier_localcluster.ports import free_port
from kvtier_operator.kube.cache import Cache
from kvtier_operator.kube.client import KubernetesCluster, read_settings
from kvtier_operator.kube.idle import IdleTiers
from kvtier_operator.names import TierName
from kvtier_operator.plan.digest import digest, digest_text
from kvtier_operator.settings import Settings

ROOT: Final = Path(__file__).resolve().parents[2]
NAMESPACE: Final = "default"
FIRST: Final = "t00000"
NODE_BYTES: Final = 14_000
QUIET_SECONDS: Final = 10.0
CRD: Final = ROOT / "crds" / "kvcachetier.yaml"
KINDS: Final = (
    "kvcachetiers",
    "configmaps",
    "deployments.apps",
    "leases.coordination.k8s.io",
    "persistentvolumeclaims",
    "poddisruptionbudgets.policy",
    "pods",
    "rolebindings.rbac.authorization.k8s.io",
    "roles.rbac.authorization.k8s.io",
    "serviceaccounts",
    "services",
)
"""Kinds of objects that belong to a tier and that an operator lists."""
Json = dict[str, Any]


def tier(name: str, **spec: Any) -> Json:
    """Return a small tier."""
    return {
        "apiVersion": "kvtier.dev/v1beta1",
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


def node(number: int) -> Json:
    """Return a node of the size that nodes with some images have."""
    body: Json = {
        "metadata": {
            "name": f"node-{number:05}",
            "uid": f"node-{number}",
            "labels": {"kubernetes.io/hostname": f"node-{number:05}"},
        },
        "spec": {},
        "status": {
            "allocatable": {"cpu": "96", "memory": "1000Gi", "nvidia.com/gpu": "8", "pods": "110"},
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }
    image = {"names": [f"registry.example.com/team/image@sha256:{'0' * 64}"], "sizeBytes": 1 << 30}
    body["status"]["images"] = [image] * ((NODE_BYTES - len(json.dumps(body))) // len(json.dumps(image)))
    return body


def load(api: ApiServerThread, kind: str, bodies: Iterable[Json], *, event: EventType = EventType.ADDED) -> None:
    """Store objects exactly as they are: the state that another server had."""

    async def act() -> None:
        for body in bodies:
            api.server.storage.commit(event, api.server.registry.named(kind).key, body)

    api.call(act)


def populate(api: ApiServerThread, made: dict[str, list[Json]], *, tiers: int, pods: int) -> None:
    """Put copies of the first tier's objects there; the first ones have pods, and strangers fill up."""
    text = json.dumps(made)
    uids = set(re.findall(r'"uid": "([^"]+)"', text))
    digests = _digests(made)
    for number in range(1, tiers):
        copy = text.replace(FIRST, f"t{number:05}")
        for uid in uids:
            copy = copy.replace(uid, f"{uid[:-5]}{number:05}")
        # Digests of names and uids, as an operator would have written them.
        for old, new in zip(digests, _digests(json.loads(copy)), strict=True):
            copy = copy.replace(old, new)
        for resource, bodies in json.loads(copy).items():
            if resource != "pods" or number * len(bodies) < pods:
                load(api, resource, bodies)
    stranger, count = made["pods"][0], min(tiers * len(made["pods"]), pods)
    metadata = ({"name": f"stranger-{n}", "namespace": NAMESPACE, "uid": f"stranger-{n}"} for n in range(count, pods))
    load(api, "pods", [{**stranger, "metadata": each} for each in metadata])


def note_idle(api: ApiServerThread, kubeconfig: Path) -> None:
    """Note in each status that nothing is left to do, as an operator of this checkout would have after some minutes."""
    cluster = KubernetesCluster(client.ApiClient(read_settings(kubeconfig=str(kubeconfig))))
    cache = Cache(cluster, lambda _kind, _tiers: None, namespaces=(NAMESPACE,))
    cache.start()
    try:
        cache.wait(lambda: False)
        idle, bodies = IdleTiers(cache, Settings()), []
        for body in api.list(KINDS[0], NAMESPACE):
            mark = idle.read(TierName(namespace=NAMESPACE, name=body["metadata"]["name"]))
            status = {**body["status"], "idleDigest": "" if mark is None else mark.digest}
            bodies.append({**body, "status": status})
    finally:
        cache.close()
    load(api, KINDS[0], bodies, event=EventType.MODIFIED)


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


@contextmanager
def operator(kubeconfig: Path, code: Path, **settings: str) -> Iterator[tuple[MeasuredProcess, int]]:
    """Run an operator of some checkout for all namespaces, and return the port of its metrics."""
    port, log = free_port(), kubeconfig.with_name(f"operator-{time.monotonic_ns()}.log")
    settings |= {"PYTHONPATH": f"{code / 'operator'}:{code / 'connector'}", "KVTIER_METRICS_PORT": str(port)}
    with running(log, "kvtier_cli", "run", "-A", KUBECONFIG=str(kubeconfig), **settings) as process:
        yield process, port


def passes(port: int) -> float:
    """Return how many passes over tiers an operator has made."""
    with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("kvtier_operator_reconcile_total{"))
    return 0.0


def make_first(folder: Path, code: Path) -> dict[str, list[Json]]:
    """Let an operator make a tier in a simulated cluster, and return all that belongs to it then, by kind."""
    with tempfile.TemporaryDirectory(prefix="kvtier-scale-") as data:
        devices = {"nvidia.com/gpu": "8"}
        first = folder / "first"
        settings = ClusterSettings(data=Path(data), kubeconfig=first, simulate=True, allocatable=devices)
        with ClusterThread(settings) as thread:
            server = thread.cluster.server

            def read(kind: str) -> list[Json]:
                async def act() -> list[Json]:
                    return server.list(kind, NAMESPACE)

                return [each for each in thread.call(act) if each["metadata"]["name"].startswith(FIRST)]

            def is_made() -> bool:
                tiers = read("kvcachetiers")
                conditions = tiers[0].get("status", {}).get("conditions", ()) if tiers else ()
                return any((each["type"], each["status"]) == ("Ready", "True") for each in conditions)

            for manifest in (yaml.safe_load(CRD.read_text()), tier(FIRST)):
                thread.call(partial(server.create, manifest))
            with operator(first, code):
                until(is_made, seconds=120)
                time.sleep(QUIET_SECONDS)
            made = {kind: read(kind) for kind in KINDS}
    # The Job that tried the volume goes in an hour, and its pod with it.
    made["pods"] = [each for each in made["pods"] if "-preflight" not in each["metadata"]["name"]]
    return made


def measure(  # noqa: PLR0913  what a run is made of
    folder: Path, code: Path, *, tiers: int, pods: int, nodes: int, rest: float, resync: float, is_idle: bool
) -> Json:
    """Start an operator where that many tiers stand, and let it rest."""
    folder.mkdir(parents=True, exist_ok=True)
    made = make_first(folder, code)
    with ApiServerThread() as api:
        api.create(yaml.safe_load(CRD.read_text()))
        load(api, "nodes", [node(number) for number in range(nodes)])
        kubeconfig = api.write_kubeconfig(folder / "kubeconfig")
        for kind, bodies in made.items():
            load(api, kind, bodies)
        with operator(kubeconfig, code) as (_, port):
            # Addresses answer otherwise here, and the status says so.
            until(lambda: passes(port) > 0, seconds=120)
            _quiet(api)
        populate(api, {kind: api.list(kind, NAMESPACE) for kind in KINDS}, tiers=tiers, pods=pods)
        if is_idle:
            note_idle(api, kubeconfig)
        api.server.audit.clear()
        began = time.monotonic()
        with operator(kubeconfig, code, KVTIER_RESYNC_SECONDS=str(resync)) as (process, port):
            until(lambda: passes(port) >= tiers, seconds=1800, pause=0.5)
            started, cpu = time.monotonic() - began, process.cpu_seconds()
            start_requests = requests(api)
            _quiet(api)
            api.server.audit.clear()
            done, cpu_before, began = passes(port), process.cpu_seconds(), time.monotonic()
            time.sleep(rest)
            seconds, looked = time.monotonic() - began, passes(port) - done
            asked = {what: count for what, count in requests(api).items() if not what.endswith(" leases")}
            return {
                "kind": "operator",
                "tiers": tiers,
                "pods": len(api.list("pods")),
                "nodes": nodes,
                "unchanged": is_idle,
                "start_seconds": round(started, 1),
                "start_cpu_seconds": round(cpu, 1),
                "start_requests": sum(start_requests.values()),
                "start_requests_by_what": dict(sorted(start_requests.items())),
                "rss_peak_mb": round(process.memory_bytes("VmHWM") / 1e6, 1),
                "rss_mb": round(process.memory_bytes() / 1e6, 1),
                "rest_seconds": round(seconds, 1),
                "rest_passes": looked,
                "rest_requests": {what: count for what, count in asked.items() if not what.startswith("watch")},
                "requests_a_pass": round(sum(asked.values()) / looked, 2) if looked else None,
                "rest_core_share": round((process.cpu_seconds() - cpu_before) / seconds, 4),
            }


def requests(api: ApiServerThread) -> Counter[str]:
    """Count the requests since the audit was cleared, by verb and plural."""
    return Counter(f"{each.verb} {each.target.plural}" for each in tuple(api.server.audit) if each.target)


def _quiet(api: ApiServerThread) -> None:
    """Wait until nothing but the Lease has been written for a while."""
    seen: list[int] = []

    def is_quiet() -> bool:
        calls = [what.split() for what in requests(api).elements()]
        seen.append(sum(verb not in {"get", "list", "watch"} and plural != "leases" for verb, plural in calls))
        return seen[-2:] == [seen[-1]] * 2

    until(is_quiet, seconds=300.0, pause=QUIET_SECONDS)


def main() -> None:
    """Measure and write one line each."""
    parser = argparse.ArgumentParser(prog="operator_scale", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="JSON lines")
    parser.add_argument("--code", type=Path, default=ROOT, help="checkout of the operator that is measured")
    parser.add_argument("--tiers", default="1000,10000", help="one run for each number")
    parser.add_argument("--pods", type=int, default=5000)
    parser.add_argument("--nodes", type=int, default=5000)
    parser.add_argument("--rest", type=float, default=60, help="seconds of rest")
    parser.add_argument("--resync", type=float, default=600, help="seconds after which a tier is looked at anyway")
    parser.add_argument("--new-release", action="store_true", help="no tier is known to stand as it was left")
    options = parser.parse_args()
    out = report.Journal(options.out)
    out.write(report.describe_run(**{name: str(value) for name, value in vars(options).items()}))
    folder, code = options.out.parent.resolve() / "logs", options.code.resolve()
    for tiers in map(int, options.tiers.split(",")):
        sizes = {"tiers": tiers, "pods": options.pods, "nodes": options.nodes}
        times = {"rest": options.rest, "resync": options.resync}
        record = measure(folder, code, **sizes, **times, is_idle=not options.new_release)
        out.write(record, str({name: value for name, value in record.items() if not name.endswith("by_what")}))


if __name__ == "__main__":
    main()
