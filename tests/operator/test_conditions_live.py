# SPDX-License-Identifier: Apache-2.0
"""What kubectl shows of a janitor that died, and of engines that an earlier operator made."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from chart import tools
from live import CORE, NAMESPACE, Client, Controllers, body, running
from waiting import until

from kvtier_localcluster.apiserver import ApiServerThread

SLOW = 120.0
Kubectl = Callable[..., str]


@pytest.fixture
def client(api: ApiServerThread) -> Iterator[Client]:
    found = Client(api.url)
    with Controllers(found, api):
        yield found


@pytest.fixture
def kubectl(api: ApiServerThread, tmp_path: Path) -> Kubectl:
    environment = {
        **os.environ,
        "KUBECONFIG": str(api.write_kubeconfig(tmp_path / "kubeconfig")),
        "HOME": str(tmp_path),
    }

    def run(*arguments: str) -> str:
        command = [str(tools.binary("kubectl")), f"--namespace={NAMESPACE}", *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout

    return run


def columns(text: str) -> dict[str, str]:
    head, row = text.splitlines()[:2]
    starts = [head.index(name) for name in head.split()]
    ends = [*starts[1:], None]
    return {name: row[start:end].strip() for name, start, end in zip(head.split(), starts, ends, strict=True)}


def ready_pods(client: Client) -> list[str]:
    def is_ready(pod: dict[str, Any]) -> bool:
        conditions = pod.get("status", {}).get("conditions", ())
        return any((each["type"], each["status"]) == ("Ready", "True") for each in conditions)

    return [pod["metadata"]["name"] for pod in client.items(CORE, "pods") if is_ready(pod)]


def test_a_janitor_in_a_crash_loop_shows_in_get_and_describe_and_as_an_event(client: Client, kubectl: Kubectl) -> None:
    with running():
        client.apply_tier(body())
        until(client.is_ready, seconds=SLOW)
        # Whoever runs the pods says once that one is ready, and that must not come later than what is said here.
        (pod,) = until(lambda: [name for name in ready_pods(client) if name.startswith("llama-janitor")], seconds=SLOW)
        ended = {"exitCode": 1, "reason": "Error", "message": "cannot open /var/lib/kvtier: Permission denied"}
        crashed = {
            "name": "janitor",
            "image": "j",
            "imageID": "",
            "ready": False,
            "started": False,
            "restartCount": 5,
            "state": {"waiting": {"reason": "CrashLoopBackOff"}},
            "lastState": {"terminated": ended},
        }
        unready = [{"type": "PodScheduled", "status": "True"}, {"type": "Ready", "status": "False"}]
        status = {"conditions": unready, "containerStatuses": [crashed]}
        client.merge(CORE, "pods", pod, {"status": status}, sub="/status")
        until(lambda: client.condition("JanitorHealthy").get("status") == "False", seconds=SLOW)
        shown = columns(kubectl("get", "kvt", "llama"))
        assert (shown["READY"], shown["AVAILABLE"], shown["REASON"]) == ("False", "True", "JanitorFailing")
        assert columns(kubectl("get", "kvt", "llama", "-o", "wide"))["JANITOR"] == "JanitorFailing"
        described = kubectl("describe", "kvt", "llama")
        assert "exit code 1: cannot open /var/lib/kvtier: Permission denied" in described
        until(lambda: "JanitorFailing" in kubectl("get", "events"), seconds=SLOW)


def connectors(client: Client) -> set[str]:
    engines = [pod for pod in client.items(CORE, "pods") if pod["metadata"]["name"].startswith("llama-engine")]
    return {pod["spec"]["initContainers"][0]["image"] for pod in engines}


def test_after_an_upgrade_of_the_operator_a_tier_says_that_its_engines_are_old_and_how_to_replace_them(
    client: Client, kubectl: Kubectl
) -> None:
    with running(connector_image="connector:1"):
        client.apply_tier(body())
        until(client.is_ready, seconds=SLOW)
        assert columns(kubectl("get", "kvt", "llama"))["UP-TO-DATE"] == "True"
    with running(connector_image="connector:2"):
        until(lambda: client.condition("UpToDate").get("status") == "False", seconds=SLOW)
        shown = columns(kubectl("get", "kvt", "llama"))
        assert (shown["READY"], shown["AVAILABLE"], shown["UP-TO-DATE"]) == ("True", "True", "False")
        assert connectors(client) == {"connector:1"}
        message = client.condition("UpToDate")["message"]
        assert "the image of install-connector from connector:1 to connector:2" in message
        command = message.split("`")[1].replace('"$(date +%s)"', "now")
        assert command.startswith("kubectl annotate kvt llama -n default --overwrite kvtier.dev/restart=")
        kubectl(*[word for word in command.split()[1:] if word not in {"-n", NAMESPACE}])
        until(lambda: connectors(client) == {"connector:2"}, seconds=SLOW)
        until(lambda: client.condition("UpToDate").get("status") == "True", seconds=SLOW)
