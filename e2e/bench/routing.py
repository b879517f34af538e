# SPDX-License-Identifier: Apache-2.0
"""Requests with and without a router: two real engines of vLLM's CPU build in the embedded cluster, one volume.

Conversations go to the engines once through their Service, which spreads connections, and once through vLLM's own
router; then one engine is killed while requests come. It fails if the router keeps conversations no better together
than the Service, or if a request fails that was not being answered when the engine died.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import threading
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from kvtier_cli.bench import client, results, workloads
from kvtier_cli.bench.client import Endpoint, Sample
from kvtier_cli.bench.endpoints import Target
from kvtier_cli.bench.results import Pass
from kvtier_demo.model import make_model
from kvtier_demo.preflight import check_machine
from kvtier_demo.progress import Progress
from kvtier_demo.stack import Stack, place_model, running_stack

ROOT = Path(__file__).resolve().parents[2]
API = "kvtier.dev/v1alpha1"
SIZES = workloads.Sizes(turns=4, first_tokens=1024, turn_tokens=128, turn_output=4)
CONVERSATIONS = 6
CLIENTS = 6
SETTLING_SECONDS = 10.0
AFTER_SECONDS = 30.0
"""How long requests go on after an engine was killed."""


def tier() -> dict[str, Any]:
    """Return the demo's tier with a router, and a first tier that holds less than the conversations."""
    body: dict[str, Any] = yaml.safe_load((ROOT / "e2e/demo/tier.yaml").read_text())
    body["spec"]["routing"] = {"type": "Router", "router": {"replicas": 1}}
    body["spec"]["engine"]["args"].append("--num-gpu-blocks-override=40")
    body["spec"]["proof"] = {"canary": {"enabled": False}}
    return body


class Bed:
    """A tier that serves."""

    def __init__(self, stack: Stack, progress: Progress) -> None:
        """Store what runs."""
        self.stack, self.progress = stack, progress

    def pods(self) -> list[dict[str, Any]]:
        """Return the engines that are ready."""
        labels = "kvtier.dev/tier=demo,app.kubernetes.io/component=engine"
        return [pod for pod in self.stack.kube.list("v1", "Pod", labels=labels) if _is_ready(pod)]

    def address(self, service: str) -> str:
        """Return where a Service listens."""
        found = self.stack.kube.get("v1", "Service", service) or {}
        return f"http://{found['spec']['clusterIP']}:8000"

    def condition(self, kind: str) -> str:
        """Return the status of a condition."""
        self.stack.check()
        found = (self.stack.kube.get(API, "KVCacheTier", "demo") or {}).get("status", {}).get("conditions", ())
        told: dict[str, Any] = next((each for each in found if each["type"] == kind), {})
        self.progress.state(kind, f"{told.get('status')} {told.get('reason')}")
        return str(told.get("status", ""))

    def metrics(self) -> Sequence[str]:
        """Return what the engines count."""
        return [_fetch(f"http://{pod['status']['podIP']}:8000/metrics") for pod in self.pods()]

    def target(self, name: str, service: str, seed: int) -> Target:
        """Return one of the two ways to the engines, with prompts of its own."""
        endpoint = Endpoint(url=self.address(service), model="tiny", seed=seed)
        return Target(name=name, endpoint=endpoint, read_metrics=self.metrics)


def play(target: Target) -> Pass:
    """Play the conversations."""
    requests = workloads.conversations(SIZES, CONVERSATIONS)
    found = Pass(target=target.name, name=target.name, wanted=len(requests), before=target.counts())
    found.seconds = asyncio.run(client.play(target.endpoint, requests, at_a_time=2, samples=found.samples))
    found.after = target.counts()
    return found


def kill_under_load(bed: Bed) -> dict[str, Any]:
    """Kill one engine while requests come through the router, and count those that fail."""
    url, victim = bed.address("demo-router"), bed.pods()[0]["status"]["podIP"]
    samples: list[tuple[float, Sample]] = []
    is_over = threading.Event()

    def go_on(number: int) -> None:
        repetition = 0
        while not is_over.is_set():
            parts = [(number * 100_000 + repetition, 16)]
            requests = [{"label": "load", "parts": parts, "output_tokens": 4}]
            found: list[Sample] = []
            sent = time.monotonic()
            asyncio.run(client.play(Endpoint(url=url, model="tiny", seed=9), requests, at_a_time=1, samples=found))
            samples.append((sent, found[0]))
            repetition += 1

    threads = [threading.Thread(target=go_on, args=(number,)) for number in range(CLIENTS)]
    for thread in threads:
        thread.start()
    time.sleep(SETTLING_SECONDS)
    died = time.monotonic()
    for pid in processes_at(victim):
        os.kill(pid, signal.SIGKILL)
    time.sleep(AFTER_SECONDS)
    is_over.set()
    for thread in threads:
        thread.join()
    failed = [(sent, sample) for sent, sample in samples if sample.error]
    return {
        "answered": sum(not sample.error for _, sample in samples),
        "answeredAfter": sum(not sample.error for sent, sample in samples if sent > died),
        "failedInFlight": sum(sent <= died for sent, _ in failed),
        "failedAfter": [sample.error for sent, sample in failed if sent > died],
    }


def processes_at(address: str) -> list[int]:
    """Return the servers that listen at an address of the embedded cluster."""
    wanted, found = f"--host={address}".encode(), []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if wanted in words and b"vllm.entrypoints.openai.api_server" in words:
                found.append(int(entry.name))
    return found


def problems(found: dict[str, Any]) -> list[str]:
    """Return what is not as promised."""
    near = {each["target"]: sum(each["hits"].get(name, 0.0) for name in ("GPU", "CPU")) for each in found["passes"]}
    wrong = []
    if near["Router"] <= near["None"]:
        wrong.append(f"the router brought no more requests to their engine: {near}")
    if any(each["failed"] for each in found["passes"]):
        wrong.append("requests failed before any engine was killed")
    if found["killed"]["failedAfter"]:
        wrong.append(f"requests failed after the engine had died: {found['killed']['failedAfter']}")
    if not found["killed"]["answeredAfter"]:
        wrong.append("nothing was answered after the engine had died")
    return wrong


def _is_ready(pod: dict[str, Any]) -> bool:
    conditions = pod.get("status", {}).get("conditions", ())
    return any((each["type"], each["status"]) == ("Ready", "True") for each in conditions)


def _fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        text: str = answer.read().decode()
        return text


def main() -> int:
    """Run all of it; 1 if something is not as promised."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path(".kvtier/routing"), help="volume, logs and results")
    data: Path = parser.parse_args().data.resolve()
    progress = Progress()
    check_machine()
    make_model(data / "model" / "tiny")
    with running_stack(ROOT, data, progress) as stack:
        bed = Bed(stack, progress)
        stack.kube.apply(ROOT / "e2e/demo/models.yaml")
        place_model(data / "model" / "tiny", stack.claim_directory("models"))
        manifest = data / "tier.yaml"
        manifest.write_text(yaml.safe_dump(tier()))
        stack.kube.apply(manifest)
        progress.wait("the router", lambda: bed.condition("RoutingReady") == "True", seconds=420)
        progress.wait("both engines", lambda: len(bed.pods()) == 2, seconds=420)  # noqa: PLR2004  replicas
        time.sleep(SETTLING_SECONDS)
        passes = [
            play(bed.target("None", "demo-engine", seed=int(time.time()))),
            play(bed.target("Router", "demo-router", seed=int(time.time()) + 1)),
        ]
        found = results.document(passes, workload="turns")
        found["killed"] = kill_under_load(bed)
        stack.kube.delete(API, "KVCacheTier", "demo")
    (data / "routing.json").write_text(json.dumps(found, indent=2) + "\n")
    print(results.page(found))
    print(json.dumps(found["killed"], indent=2))
    wrong = problems(found)
    for each in wrong:
        print(f"NOT PROVED: {each}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
