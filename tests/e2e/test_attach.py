# SPDX-License-Identifier: Apache-2.0
"""Engines of another owner: attached by the command, they share the blocks of a tier with engines of kvtier."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml
from light_cluster import Tier
from pods import Bench, fetch
from waiting import until

from kvtier_demo import client, model, stack
from kvtier_demo.progress import Progress
from kvtier_localcluster import kinds

ROOT = Path(__file__).resolve().parents[2]
PROMPT = "The whole of this prompt was computed by an engine of another owner, and read by one of ours. " * 4


def foreign(bench: Bench, name: str) -> dict[str, Any]:
    """Create a Deployment as its owner would, before anything is attached: no pod of it could start."""
    engine = {
        "name": "server",
        "image": "vllm/vllm-openai:v0.32.0",
        "command": ["python3", "-m", "vllm.entrypoints.openai.api_server"],
        "args": ["--model=org/model", "--host=0.0.0.0", "--port=8000", "--revision=main"],
        "ports": [{"containerPort": 8000}],
        # A container has a /tmp of its own; here, where containers are processes, only a volume is.
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
    }
    pod = {"containers": [engine], "volumes": [{"name": "tmp", "emptyDir": {}}], "terminationGracePeriodSeconds": 2}
    labels = {"app": name}
    template = {"metadata": {"labels": labels}, "spec": pod}
    body = {"replicas": 0, "selector": {"matchLabels": labels}, "template": template}
    return bench.create(kinds.DEPLOYMENT, {"metadata": {"name": name}, "spec": body})


def run_command(bench: Bench, *words: str) -> str:
    """Return what the command prints."""
    environment = {**os.environ, "KUBECONFIG": str(bench.cluster.kubeconfig)}
    command = [sys.executable, "-m", "kvtier_cli", *words, "-n", "default"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def attach(bench: Bench, *words: str) -> dict[str, Any]:
    """Return the object that the command prints."""
    found: dict[str, Any] = yaml.safe_load(run_command(bench, "attach", *words))
    return found


def run(bench: Bench, name: str, document: dict[str, Any]) -> None:
    """Apply what was printed, and ask for one pod."""
    bench.patch(kinds.DEPLOYMENT, name, {"spec": {**document["spec"], "replicas": 1}})


def address(bench: Bench, name: str) -> str:
    """Return where the pod of a foreign Deployment answers, when it does."""

    def found() -> str | None:
        pods = [pod for pod in bench.list(kinds.POD) if pod["metadata"].get("labels", {}).get("app") == name]
        addresses = (pod["status"].get("podIP") for pod in pods if "deletionTimestamp" not in pod["metadata"])
        return next((each for each in addresses if each and fetch(f"http://{each}:8000/health")), None)

    return str(until(found))


def complete(host: str) -> list[int]:
    """Return the tokens that answer the prompt."""
    body = json.dumps({"prompt": PROMPT, "max_tokens": 8, "stream": True}).encode()
    with urllib.request.urlopen(f"http://{host}:8000/v1/completions", data=body, timeout=60) as answer:
        first = answer.read().decode().split("\n\n")[0].removeprefix("data: ")
    tokens: list[int] = json.loads(first)["choices"][0]["token_ids"]
    return tokens


def read_from_disk(host: str) -> float:
    """Return the tokens that an engine has read from the volume."""
    page = str(fetch(f"http://{host}:8000/metrics")).splitlines()
    return sum(float(line.split()[-1]) for line in page if 'source="disk"' in line)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_engine_of_ours_reads_what_an_attached_one_computed(bench: Bench) -> None:
    ours = Tier(bench, "both")
    ours.reaches("Ready", "True")
    foreign(bench, "guest")
    run(bench, "guest", attach(bench, "both", "deployment/guest"))
    guest = address(bench, "guest")
    answer = complete(guest)
    # The first blocks wait for the janitor's permit.
    until(lambda: complete(guest) and read_from_disk(guest) > 0)
    (pod,) = ours.pods()
    mine = pod["status"]["podIP"]
    assert read_from_disk(mine) == 0
    assert complete(mine) == answer
    assert read_from_disk(mine) >= len(PROMPT) // 64 * 64
    theirs = next(pod for pod in bench.list(kinds.POD) if pod["metadata"].get("labels", {}).get("app") == "guest")
    for name in (pod["metadata"]["name"], theirs["metadata"]["name"]):
        seen = json.loads(run_command(bench, "status", "--engine", name, "-o", "json"))
        assert (seen["tier"], seen["volume"]["isUsed"]) == ("both", True)
        assert seen["generation"] == ours.status()["generation"]["current"]
        assert seen["hits"]["promptTokens"] >= len(PROMPT)
    assert ours.reaches("Ready", "True")["reason"] == "Ready"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_tier_without_engines_of_its_own_is_ready_once_those_of_another_owner_are_attached(bench: Bench) -> None:
    engine = {"accelerator": {"resource": "none"}, "memory": "64Mi", "cpu": "10m"}
    external = {"external": {"selector": {"matchLabels": {"app": "alone"}}}}
    tier = Tier(bench, "alone", engine={**engine, **external}, disk={"budget": {"maxBytes": "1Gi"}})
    tier.reaches("EnginesReady", "False", "NoPods")
    before = foreign(bench, "alone")
    poor = json.loads(json.dumps(attach(bench, "alone", "deployment/alone")))
    engine_container = poor["spec"]["template"]["spec"]["containers"][0]
    engine_container["env"] = [each for each in engine_container["env"] if each["name"] != "PYTHONHASHSEED"]
    run(bench, "alone", poor)
    message = tier.reaches("EnginesReady", "False", "NotAttached")["message"]
    assert "container server of pod alone-" in message
    assert "env[PYTHONHASHSEED]" in message
    assert "`kvtier attach alone -n default deployment/alone`" in message

    run(bench, "alone", attach(bench, "alone", "deployment/alone"))
    tier.reaches("Ready", "True")
    host = address(bench, "alone")
    until(lambda: complete(host) and read_from_disk(host) > 0)
    until(lambda: tier.disk().get("usedBytes"))
    # The table of known models has no such model: its engine says how large its KV is.
    until(lambda: tier.status()["sizing"].get("kvFormula", "").startswith("reported by the engine alone-"))
    shown = run_command(bench, "status", "alone", "-o", "json")
    assert [each["ready"] for each in json.loads(shown)["engines"]] == [True]

    rival = Tier(bench, "rival", engine={**engine, **external}, disk={"budget": {"maxBytes": "1Gi"}})
    for each, other in ((rival, "alone"), (tier, "rival")):
        assert f"(by tier {other})" in each.reaches("Ready", "False", "PodsClaimedTwice")["message"]
    rival.patch(engine={"external": {"selector": {"matchLabels": {"app": "nowhere"}}}})
    tier.reaches("Ready", "True")

    bench.patch(kinds.DEPLOYMENT, "alone", {"spec": {"replicas": 0}})
    removed = attach(bench, "alone", "deployment/alone", "--remove")
    assert removed["spec"]["template"]["spec"] == before["spec"]["template"]["spec"]
    tier.reaches("EnginesReady", "False", "NoPods")


@pytest.mark.engine
@pytest.mark.timeout(900)
def test_a_real_engine_of_ours_reads_what_an_attached_one_computed(tmp_path: Path) -> None:
    spec = yaml.safe_load((ROOT / "e2e" / "demo" / "tier.yaml").read_text())
    spec["spec"]["replicas"] = 1
    # A probe needs two engines of the tier; the attached one is no engine that the operator asks.
    spec["spec"]["proof"] = {"preflight": "Never", "canary": {"enabled": False}}
    claim, guest = yaml.safe_load_all(Path(__file__).with_name("guest.yaml").read_text())
    engine = guest["spec"]["template"]["spec"]["containers"][0]
    engine["args"] += spec["spec"]["engine"]["args"]
    engine["env"] = spec["spec"]["engine"]["env"]
    files = {name: tmp_path / f"{name}.yaml" for name in ("claim", "tier", "guest", "attached")}
    for name, document in (("claim", claim), ("tier", spec), ("guest", guest)):
        files[name].write_text(yaml.safe_dump(document))
    model.make_model(tmp_path / "model" / "tiny")
    with stack.running_stack(ROOT, tmp_path, Progress()) as running:
        running.kube.apply(files["claim"])
        stack.place_model(tmp_path / "model" / "tiny", running.claim_directory("models"))
        running.kube.apply(files["tier"])
        until(lambda: running.kube.get("v1", "ConfigMap", "demo-connector"))
        command = [sys.executable, "-m", "kvtier_cli", "attach", "demo", "-f", str(files["guest"]), "-n", "default"]
        environment = {**os.environ, "KUBECONFIG": str(tmp_path / "kubeconfig")}
        printed = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
        assert printed.returncode == 0, printed.stderr
        files["attached"].write_text(printed.stdout)
        running.kube.apply(files["attached"])

        def serving(labels: str) -> client.Engine | None:
            running.check()
            for pod in running.kube.list("v1", "Pod", labels=labels):
                host = pod.get("status", {}).get("podIP")
                if host and fetch(f"http://{host}:8000/health") is not None:
                    return client.Engine(pod["metadata"]["name"], f"http://{host}:8000")
            return None

        selectors = ("app=guest", "kvtier.dev/tier=demo,app.kubernetes.io/component=engine")
        theirs, ours = (until(lambda each=each: serving(each), seconds=600) for each in selectors)

        def stored() -> int:
            return len(list(tmp_path.rglob("*.kvb")))

        for seed in range(1, 17):
            prompt, before = model.make_prompt(3000, seed=seed), stored()
            computed = theirs.ask("tiny", prompt)
            # Nothing is stored before the janitor permits it, and blocks reach the volume after the answer. An engine
            # that knows how long computing takes may compute instead, so it is asked for nothing that is not there.
            with contextlib.suppress(AssertionError):
                until(lambda before=before: stored() > before, seconds=20)
                if (read := ours.ask("tiny", prompt)).disk_bytes:
                    break
        sys.stdout.write(f"computed by {theirs.name}: {computed}\nread by {ours.name}: {read}\n")
        assert computed.cached_tokens == 0
        assert read.sources["disk"] > 0
        assert read.token_ids == computed.token_ids
