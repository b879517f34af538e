# SPDX-License-Identifier: Apache-2.0
"""Run the demo under a real Prometheus and keep its samples: ``python -m kvtier_monitoring.record FILE``.

More prompts follow those of the demo, under a budget that is lowered meanwhile. So every panel of the dashboards has
data: hits of each kind, evictions, blocks that are not written.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from kvtier_demo.__main__ import API, TIER, is_proven, is_ready
from kvtier_demo.client import Engine
from kvtier_demo.model import make_model, make_prompt
from kvtier_demo.preflight import check_machine, sole_use
from kvtier_demo.progress import Progress
from kvtier_demo.scenario import MODEL, PROMPT_WORDS
from kvtier_demo.stack import Stack, place_model, running_stack
from kvtier_monitoring.prometheus import Prometheus, Span, export, running
from kvtier_monitoring.scraping import scrape_config, targets

ROOT = Path(__file__).resolve().parents[3]
_OPERATOR_PORT = 9491
_INTERVAL = "5s"
_PROMPTS = 16
_SMALL_BUDGET = "48Mi"
_ENGINES = f"kvtier.dev/tier={TIER},app.kubernetes.io/component=engine"


def monitors() -> list[dict[str, Any]]:
    """Return the PodMonitors of the chart."""
    options = ["--set=metrics.tiers.podMonitor.enabled=true", "--set=crds.install=false"]
    command = [sys.executable, str(ROOT / ".ci/helm.py"), "template", "kvtier", str(ROOT / "charts/kvtier"), *options]
    rendered = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return [found for found in yaml.safe_load_all(rendered) if found and found["kind"] == "PodMonitor"]


@contextlib.contextmanager
def watched(stack: Stack, folder: Path) -> Iterator[Prometheus]:
    """Scrape the pods of the cluster, as they come and go, and the operator beside it."""
    pods = folder / "pods.json"
    folder.mkdir(parents=True, exist_ok=True)
    pods.write_text("[]")
    is_over = threading.Event()

    def follow() -> None:
        while not is_over.wait(2):
            with contextlib.suppress(Exception):  # between two looks, the cluster may be busy or gone
                found = json.dumps(targets(stack.kube.list("v1", "Pod", labels=f"kvtier.dev/tier={TIER}")))
                (folder / "pods.new").write_text(found)
                (folder / "pods.new").replace(pods)

    operator = {
        "job_name": "operator",
        "honor_labels": True,
        "static_configs": [{"targets": [f"127.0.0.1:{_OPERATOR_PORT}"], "labels": {"pod": "kvtier-operator"}}],
    }
    config = {
        "global": {"scrape_interval": _INTERVAL, "scrape_timeout": "4s"},
        "scrape_configs": [operator, *(scrape_config(each, str(pods)) for each in monitors())],
    }
    follower = threading.Thread(target=follow, daemon=True)
    follower.start()
    try:
        with running(folder, config) as prometheus:
            yield prometheus
    finally:
        is_over.set()
        follower.join()


def drive(stack: Stack, progress: Progress) -> None:
    """Ask prompts of both replicas, again and again, and change what may be changed while engines run."""

    def engines() -> list[Engine]:
        pods = stack.kube.list("v1", "Pod", labels=_ENGINES)
        found = sorted(str(pod["status"]["podIP"]) for pod in pods if pod.get("status", {}).get("podIP"))
        return [Engine(letter, f"http://{address}:8000") for letter, address in zip("AB", found, strict=True)]

    def patch(**disk: Any) -> None:
        tier = {"apiVersion": API, "kind": "KVCacheTier", "metadata": {"name": TIER, "namespace": "default"}}
        document = yaml.safe_load((ROOT / "e2e/demo/tier.yaml").read_text())
        spec = {**document["spec"], "disk": {**document["spec"]["disk"], **disk}}
        changed = stack.data / "changed.yaml"
        changed.write_text(yaml.safe_dump({**tier, "spec": spec}))
        progress.say(stack.kube.apply(changed))

    first, second = engines()
    prompts = [make_prompt(PROMPT_WORDS, seed=1000 + number) for number in range(_PROMPTS)]
    for number, prompt in enumerate(prompts):
        progress.say(f"prompt {number + 1} of {_PROMPTS}: computed, kept, and read by the other replica")
        first.ask(MODEL, prompt)
        first.ask(MODEL, prompt)
        first.forget_first_tier()
        first.ask(MODEL, prompt)
        stack.check()
        time.sleep(3)  # what A stores is stored in the background
        second.ask(MODEL, prompt)
    patch(budget={"maxBytes": _SMALL_BUDGET})
    for number in range(2 * _PROMPTS):
        progress.say(f"with a budget of {_SMALL_BUDGET}: {number + 1} of {2 * _PROMPTS}")
        if number == _PROMPTS:
            patch(budget={"maxBytes": _SMALL_BUDGET}, mode="ReadOnly")
        (first, second)[number % 2].ask(MODEL, prompts[number % _PROMPTS])
        (first, second)[number % 2].ask(MODEL, make_prompt(PROMPT_WORDS // 3, seed=2000 + number))
        for engine in (first, second):
            engine.forget_first_tier()
        time.sleep(1)
    time.sleep(15)  # the last of it is scraped


def main() -> int:
    """Run, record, and say what was recorded."""
    parser = argparse.ArgumentParser(prog="kvtier_monitoring.record", description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--data", type=Path, default=ROOT / ".kvtier" / "recording")
    chosen = parser.parse_args()
    data: Path = chosen.data.resolve()
    shutil.rmtree(data, ignore_errors=True)
    os.environ["KVTIER_METRICS_PORT"] = str(_OPERATOR_PORT)
    os.environ["KVTIER_PROBE_SECONDS"] = "5"
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    progress = Progress()
    with sole_use(data):
        check_machine()
        make_model(data / "model" / "tiny")
        with running_stack(ROOT, data, progress) as stack:
            progress.say(stack.kube.apply(ROOT / "e2e/demo/models.yaml"))
            place_model(data / "model" / "tiny", stack.claim_directory("models"))
            progress.say(stack.kube.apply(ROOT / "e2e/demo/tier.yaml"))
            with watched(stack, data / "prometheus") as prometheus:
                progress.wait("the tier to be Ready", lambda: is_ready(stack, progress), seconds=420)
                start = time.time()
                try:
                    progress.wait("the canary prompt", lambda: is_proven(stack, progress), seconds=240)
                    drive(stack, progress)
                finally:
                    count = export(prometheus, Span(start, time.time()), chosen.file)
                    progress.say(f"{chosen.file}: {count} samples, {chosen.file.stat().st_size >> 10} KiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
