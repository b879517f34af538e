# SPDX-License-Identifier: Apache-2.0
"""Nothing of the prompts of ``kvtier warm`` stays in the cluster, however it ends; and no lost look ends it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from definition import tier_definition
from waiting import until

from kvtier_cli.app import main
from kvtier_cli.exits import INTERRUPTED
from kvtier_localcluster.apiserver import ApiError, ApiServerThread
from kvtier_operator import names
from kvtier_operator.api import parse
from kvtier_operator.kube.person import Person
from kvtier_operator.names import Manifest
from kvtier_operator.parts import render
from kvtier_operator.plan import make_unchecked_plan

SAMPLE = Path(__file__).parents[2] / "crds" / "samples" / "minimal.yaml"
DONE = {"prompts": 1, "warm": 1, "short": 0, "blocks": 3, "bytes": 300, "missing": 0, "failed": 0, "problem": ""}


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServerThread]:
    """Run an API server with a tier's objects, and nobody who carries Jobs out."""
    body = {**yaml.safe_load(SAMPLE.read_text()), "metadata": {"name": "llama", "namespace": "default"}}
    with ApiServerThread() as server:
        server.create(tier_definition())
        ref = names.tier_ref(server.create(body))
        for each in render(make_unchecked_plan(parse(body), ref, connector_image="connector:7")):
            server.create(each)
        monkeypatch.setenv("KUBECONFIG", str(server.write_kubeconfig(tmp_path / "kubeconfig")))
        yield server


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    (tmp_path / "prompts.jsonl").write_text(json.dumps("words of a person"))
    return ["warm", "llama", "-n", "default", "-f", str(tmp_path / "prompts.jsonl"), "-o", "json"]


def ours(api: ApiServerThread, resource: str) -> list[Manifest]:
    return [each for each in api.list(resource, "default") if each["metadata"]["name"].startswith("llama-warm-")]


def begun(api: ApiServerThread) -> tuple[Manifest, Manifest]:
    """Wait for a run to have begun, and return its Job and its Secret."""
    (secret,) = until(lambda: ours(api, "secrets"), "the Secret is there")
    (job,) = ours(api, "jobs")
    return job, secret


class Run(threading.Thread):
    """The command, beside the test."""

    code = -1

    def __init__(self, words: list[str]) -> None:
        super().__init__(daemon=True)
        self._words = words

    def run(self) -> None:
        self.code = main(self._words)


def test_the_secret_is_the_jobs_alone_and_the_job_ends_by_itself(
    api: ApiServerThread, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(words)
    run.start()
    job, secret = begun(api)
    assert [(each["kind"], each["uid"]) for each in secret["metadata"]["ownerReferences"]] == [
        ("Job", job["metadata"]["uid"])
    ]
    assert job["spec"]["ttlSecondsAfterFinished"] > 0
    # Somebody deletes the Job: there is nothing left to delete for the command, nor for anybody.
    path = f"/apis/batch/v1/namespaces/default/jobs/{job['metadata']['name']}"
    Person().cluster.request("DELETE", path, what="delete it")
    run.join(120)
    assert run.code == 1
    said = capsys.readouterr().err
    assert "was deleted before it had ended" in said
    assert "remove it" not in said
    assert ours(api, "secrets") == ours(api, "jobs") == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_command_that_is_told_to_end_cleans_up(api: ApiServerThread, words: list[str], number: int) -> None:
    command = subprocess.Popen(
        [sys.executable, "-m", "kvtier_cli", *words],
        stdout=subprocess.DEVNULL,
        # Whoever runs the tests in the background may have all below ignore it.
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),  # noqa: PLW1509 - it makes one system call
    )
    try:
        begun(api)
        command.send_signal(number)
        assert command.wait(120) == INTERRUPTED
    finally:
        command.kill()
        command.wait()
    assert ours(api, "secrets") == ours(api, "jobs") == []


def test_an_api_server_that_is_away_for_a_while_does_not_end_it(
    api: ApiServerThread, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    refused: list[str] = []

    def away(request: Any) -> ApiError | None:
        if request.method != "GET" or "/jobs/" not in request.path or len(refused) > 2:
            return None
        refused.append(request.path)
        return ApiError(503, "ServiceUnavailable", "injected")

    async def read(*_: object) -> bytes:
        return json.dumps({"status": 0, "document": DONE}).encode()

    api.server.pod_logs = read
    api.server.faults.append(away)
    run = Run(words)
    run.start()
    job, _ = begun(api)
    until(lambda: len(refused) > 2, "the looks were refused")
    name, owner = job["metadata"]["name"], {"apiVersion": "batch/v1", "kind": "Job", "uid": job["metadata"]["uid"]}
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": f"{name}-x",
            "namespace": "default",
            "labels": {"job-name": name},
            "ownerReferences": [{**owner, "name": name}],
        },
        "spec": {"containers": [{"name": "warm", "image": "connector:7"}]},
    }
    api.create(pod)
    began = {"name": "warm", "ready": False, "restartCount": 0, "image": "connector:7", "imageID": ""}
    patch(f"/api/v1/namespaces/default/pods/{name}-x", {"containerStatuses": [began]})
    ended = {"type": "Complete", "status": "True"}
    patch(f"/apis/batch/v1/namespaces/default/jobs/{name}", {"conditions": [ended]})
    run.join(120)
    assert run.code == 0
    assert json.loads(capsys.readouterr().out) == DONE
    assert ours(api, "secrets") == ours(api, "jobs") == []


def test_what_cannot_be_removed_is_named(
    api: ApiServerThread, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    def forbid(request: Any) -> ApiError | None:
        is_meant = request.method == "DELETE" and "/secrets/" in request.path
        return ApiError(403, "Forbidden", "secrets is forbidden") if is_meant else None

    api.server.faults.append(forbid)
    run = Run(words)
    run.start()
    job, secret = begun(api)
    path = f"/apis/batch/v1/namespaces/default/jobs/{job['metadata']['name']}"
    Person().cluster.request("DELETE", path, what="delete it")
    run.join(120)
    assert run.code == 1
    assert f"kubectl delete -n default secrets {secret['metadata']['name']}" in capsys.readouterr().err


def patch(path: str, status: dict[str, Any]) -> None:
    kind = "application/merge-patch+json"
    Person().cluster.request("PATCH", f"{path}/status", body={"status": status}, content_type=kind, what="report")
