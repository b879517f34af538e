# SPDX-License-Identifier: Apache-2.0
"""``make demo``: apply a KVCacheTier, wait until it is Ready, and prove that its two engines share one cache.

Exit status: 0 when every row of the table holds, 1 when one does not or something did not start, 130 on Ctrl-C.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import yaml

from kvtier_demo import report
from kvtier_demo.client import Engine
from kvtier_demo.model import make_model
from kvtier_demo.preflight import CannotStart, check_machine, sole_use
from kvtier_demo.progress import Progress
from kvtier_demo.scenario import Scenario, problems
from kvtier_demo.stack import Stack, place_model, running_stack, tail

ROOT = Path(__file__).resolve().parents[3]
API = "kvtier.dev/v1beta1"
TIER = "demo"
LABELS = f"kvtier.dev/tier={TIER}"
ENGINES = f"{LABELS},app.kubernetes.io/component=engine"
_READY_SECONDS = 600.0
_GONE_SECONDS = 180.0
_PROVEN_SECONDS = 240.0  # one canary prompt, and two more should the first not be stored in time
_RESTARTS = 2
_KILLED = 137
_EXPLAINING_LINES = 60  # vLLM's last words point to a cause some tracebacks above


def main() -> int:
    """Run the demo and return its exit status."""
    parser = argparse.ArgumentParser(prog="kvtier-demo", description=__doc__, add_help=True)
    parser.add_argument("--data", type=Path, default=Path(".kvtier/demo"), help="for the volume, logs and results")
    parser.add_argument("--replicas", type=int, choices=(1, 2), default=2, help="1 finds what an earlier run stored")
    options = parser.parse_args()
    data: Path = options.data.resolve()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    progress = Progress()
    try:
        with sole_use(data):
            check_machine()
            progress.say("making a tiny model with random weights")
            make_model(data / "model" / "tiny")
            with running_stack(ROOT, data, progress) as stack:
                return demonstrate(stack, progress, replicas=options.replicas)
    except KeyboardInterrupt:
        progress.say("interrupted; everything that was started has ended")
        return 130
    except CannotStart as refusal:
        progress.say(f"FAILED: {refusal}")
        return 1
    except (RuntimeError, TimeoutError, OSError) as error:
        progress.say(f"FAILED: {error}")
        explain(data)
        return 1


def demonstrate(stack: Stack, progress: Progress, *, replicas: int) -> int:
    """Apply the sample, ask the prompts, print the proof, and clean up."""
    kube = stack.kube
    progress.say(kube.apply(ROOT / "e2e/demo/models.yaml"))
    place_model(stack.data / "model" / "tiny", stack.claim_directory("models"))
    progress.say(kube.apply(_sample(stack.data, replicas)))
    progress.wait("KVCacheTier demo to be Ready", lambda: is_ready(stack, progress), seconds=_READY_SECONDS)
    if replicas > 1:
        progress.wait("the operator's canary prompt", lambda: is_proven(stack, progress), seconds=_PROVEN_SECONDS)
    tier: dict[str, Any] = kube.get(API, "KVCacheTier", TIER) or {}
    digest = tier["status"]["generation"]["current"]
    pods = sorted(
        (pod for pod in kube.list("v1", "Pod", labels=ENGINES) if pod.get("status", {}).get("podIP")),
        key=lambda pod: str(pod["metadata"]["name"]),
    )
    engines = [
        Engine(letter, f"http://{pod['status']['podIP']}:8000")
        for letter, pod in zip("AB"[:replicas], pods, strict=True)
    ]
    claim = next(c for c in kube.list("v1", "PersistentVolumeClaim", labels=LABELS))
    directory = stack.claim_directory(claim["metadata"]["name"])
    proof = stack.data / f"proved-{digest}.json"
    scenario = Scenario(
        first=engines[0],
        second=engines[1] if replicas > 1 else None,
        blocks=lambda: tuple(directory.rglob(f"{digest}/**/*.kvb")),
        proved=tuple(map(tuple, json.loads(proof.read_text()))) if proof.exists() else (),
        progress=progress,
    )
    rows = scenario.run()
    text = report.table(rows)
    (stack.data / "table.txt").write_text(text)
    print(f"\n{text}", flush=True)
    wrong = problems(rows)
    for problem in wrong:
        progress.say(f"NOT PROVED: {problem}")
    if not wrong:
        proof.write_text(json.dumps(rows[-1].token_ids))
        who = "replica A had computed" if replicas > 1 else "the engines of an earlier run had computed"
        progress.say(f"proved: replica {engines[-1].name} read from the volume what {who}, with the same tokens")
    clean_up(stack, progress)
    if not wrong:
        progress.say("next: make cluster starts an embedded Kubernetes for tiers of your own: crds/samples")
    return 1 if wrong else 0


def _sample(data: Path, replicas: int) -> Path:
    """Return the file with the tier: the sample, with so many engines."""
    tier = yaml.safe_load((ROOT / "e2e/demo/tier.yaml").read_text())
    tier["spec"]["replicas"] = replicas
    changed = data / "tier.yaml"
    changed.write_text(yaml.safe_dump(tier))
    return changed


def is_ready(stack: Stack, progress: Progress) -> bool:
    """Print the changes since the last call, and return whether the tier is Ready."""
    stack.check()
    tier = stack.kube.get(API, "KVCacheTier", TIER)
    if tier is None:
        return False
    for pod in stack.kube.list("v1", "Pod", labels=LABELS):
        _refuse_crash_loop(pod)
        progress.state(f"pod {pod['metadata']['name']}", _pod_state(pod))
    ready = _conditions(tier, stack.data).get("Ready", {})
    is_current = ready.get("observedGeneration") == tier["metadata"]["generation"]
    return _told(ready, "KVCacheTier demo", progress) and is_current


def is_proven(stack: Stack, progress: Progress) -> bool:
    """Print the result of the operator's canary prompt, and return whether the engines share the volume."""
    stack.check()
    conditions = _conditions(stack.kube.get(API, "KVCacheTier", TIER) or {}, stack.data)
    return _told(conditions.get("SharedCacheVerified"), "KVCacheTier demo, proven", progress)


def _told(condition: dict[str, Any] | None, subject: str, progress: Progress) -> bool:
    """Print a condition, and return whether it holds."""
    if not condition:
        return False
    text = f"{condition['type']}={condition['status']} {condition['reason']}: {condition['message']}"
    progress.state(subject, text)
    return bool(condition["status"] == "True")


def _conditions(tier: dict[str, Any], data: Path) -> dict[str, Any]:
    """Return the conditions by type; raise CannotStart where the volume holds blocks of another checkout's engines."""
    conditions = {item["type"]: item for item in tier.get("status", {}).get("conditions", [])}
    healthy = conditions.get("DiskHealthy", {})
    if healthy.get("reason") == "Stranger":
        remedy = f"the demo of another checkout wrote {data}: remove it, or choose another directory (make demo DATA=…)"
        raise CannotStart(f"{healthy['message']}. Here, {remedy}")
    return conditions


def _containers(pod: dict[str, Any]) -> list[dict[str, Any]]:
    status = pod.get("status", {})
    return [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]


def _refuse_crash_loop(pod: dict[str, Any]) -> None:
    for container in _containers(pod):
        if container.get("restartCount", 0) >= _RESTARTS:
            code = ((container.get("lastState") or {}).get("terminated") or {}).get("exitCode", "unknown")
            hint = " (killed: did the machine run out of memory?)" if code == _KILLED else ""
            where = f"container {container['name']} of {pod['metadata']['name']}"
            raise RuntimeError(f"{where} ended again and again, last with exit code {code}{hint}")


def _pod_state(pod: dict[str, Any]) -> str:
    parts = []
    for container in _containers(pod):
        state: dict[str, Any] = container.get("state") or {"waiting": {}}
        name = next(iter(state))
        reason = (state[name] or {}).get("reason") or name
        ready = ", ready" if container.get("ready") and name == "running" else ""
        parts.append(f"{container['name']} {reason}{ready}")
    return "; ".join(parts) or str(pod.get("status", {}).get("phase", ""))


def clean_up(stack: Stack, progress: Progress) -> None:
    """Delete the resource as a user would; the claim stays, as its deletionPolicy says."""
    stack.kube.delete(API, "KVCacheTier", TIER)
    progress.wait("the pods to end", lambda: not stack.kube.list("v1", "Pod", labels=LABELS), seconds=_GONE_SECONDS)
    kept = [item["metadata"]["name"] for item in stack.kube.list("v1", "PersistentVolumeClaim", labels=LABELS)]
    progress.say(f"deleted the KVCacheTier; its pods are gone, its claim stays: {', '.join(kept)}")


def explain(data: Path) -> None:
    """Print the ends of the logs that say why."""
    candidates = [data / "logs" / "operator.log", *sorted((data / "cluster" / "logs").rglob("*.log"))]
    for log in candidates:
        if text := tail(log, _EXPLAINING_LINES):
            print(f"--- {log}\n{text}", flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Exception:  # noqa: BLE001 - the last edge: say what broke, and fail
        traceback.print_exc()
        sys.exit(1)
