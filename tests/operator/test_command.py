# SPDX-License-Identifier: Apache-2.0
"""The command line: what it prints, refuses, and how it ends; also with the packages of the operator's image alone."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from command import Command
from definition import tier_definition
from live import APPS, Client, body
from locked_image import blocked_modules, prelude
from tiers import merge, tier
from waiting import until

import kvtier_connector
import kvtier_operator
from kvtier_localcluster.apiserver import ApiServerThread
from kvtier_operator import __version__, handlers
from kvtier_operator.errors import SettingsInvalid
from kvtier_operator.settings import Settings, parse

ROOT = Path(__file__).parents[2]
TABLES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())


@pytest.mark.parametrize(("text", "message"), TABLES["unreadable"])
@pytest.mark.parametrize("verb", ["render", "plan", "validate"])
def test_unreadable_input_is_told_in_words(text: Any, message: str, verb: str, tmp_path: Path, kvtier: Command) -> None:
    file = tmp_path / "tier.yaml"
    file.write_text(text if isinstance(text, str) else yaml.safe_dump(merge(tier(), text)))
    assert message in kvtier(verb, str(file), code=1) + kvtier.err


@pytest.mark.parametrize("verb", ["render", "plan", "validate"])
def test_what_lies_beside_a_tier_in_its_file_is_passed_over(verb: str, kvtier: Command) -> None:
    sample = ROOT / "crds" / "samples" / "gated-model.yaml"
    assert {each["kind"] for each in yaml.safe_load_all(sample.read_text())} == {"PersistentVolumeClaim", "KVCacheTier"}
    assert "llama-gated" in kvtier(verb, str(sample))


def start(*args: str, kubeconfig: Path) -> subprocess.Popen[str]:
    env = {**os.environ, "KUBECONFIG": str(kubeconfig), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "kvtier_cli", *args]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_a_missing_crd_is_said_in_words(tmp_path: Path) -> None:
    with ApiServerThread() as api:
        process = start("run", "-n", "default", kubeconfig=api.write_kubeconfig(tmp_path / "kubeconfig"))
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert output.startswith("kvtier: the cluster does not know KVCacheTier resources: kubectl apply -f crds/")


@pytest.mark.parametrize("scope", [["-A"], ["-n", "default", "-n", "other"]], ids=["all namespaces", "two namespaces"])
def test_the_operator_works_until_it_is_told_to_stop(scope: list[str], tmp_path: Path) -> None:
    with ApiServerThread() as api:
        api.create(tier_definition())
        api.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "other"}})
        kubectl = Client(api.url)
        process = start("run", *scope, "--log-format=json", kubeconfig=api.write_kubeconfig(tmp_path / "kubeconfig"))
        try:
            kubectl.apply_tier(body())
            until(lambda: kubectl.get(APPS, "deployments", "llama-engine"))
            process.send_signal(signal.SIGTERM)
            output, _ = process.communicate(timeout=60)
        finally:
            process.kill()
        assert process.returncode == 0, output
        assert "Traceback" not in output
        assert "default/llama: wrote " in output
        assert "_on_child" not in output  # a line for every event of every pod would drown the rest


@pytest.mark.parametrize(("words", "said"), TABLES["misuse"])
def test_a_file_or_a_port_that_there_is_not_is_misuse(words: list[str], said: str, kvtier: Command) -> None:
    assert said in kvtier.fails(*words, code=2)
    assert kvtier("--version") == f"{__version__}\n"


def test_settings_come_from_the_environment() -> None:
    assert parse({}) == Settings()
    found = parse({"KVTIER_NAMESPACES": "a, b", "KVTIER_CONNECTOR_IMAGE": "c:1", "KVTIER_RESYNC_SECONDS": "5"})
    assert (found.namespaces, found.connector_image, found.resync_seconds) == (("a", "b"), "c:1", 5.0)


@pytest.mark.parametrize(("name", "value"), [("KVTIER_WORKERS", "0"), ("KVTIER_METRICS_PORT", "http")])
def test_a_setting_that_cannot_be_used_is_named(name: str, value: str) -> None:
    with pytest.raises(SettingsInvalid, match=f"^{name}='{value}' "):
        parse({name: value})


def test_a_port_in_use_is_named_with_its_setting_and_a_remedy() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        remedy = rf"cannot listen on port {port} \(Address already in use\): choose a free port"
        with pytest.raises(SettingsInvalid, match=f"^KVTIER_METRICS_PORT: {remedy}"):
            handlers.run(replace(Settings(), metrics_port=port), log_format="plain", is_verbose=False)
        endpoint = f"http://127.0.0.1:{port}/healthz"
        with pytest.raises(SettingsInvalid, match=f"^--liveness: {remedy}"):
            handlers.run(replace(Settings(), liveness_endpoint=endpoint), log_format="plain", is_verbose=False)


PATHS = tuple(Path(next(iter(package.__path__))).parent for package in (kvtier_operator, kvtier_connector))
SAMPLE = ROOT / "crds" / "samples" / "minimal.yaml"


def run(script: str, directory: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", prelude("operator", paths=PATHS) + script]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={"HOME": str(directory)})


def test_every_module_finds_what_it_imports(tmp_path: Path) -> None:
    blocked = blocked_modules("operator")
    assert {"vllm", "torch", "numpy"} <= blocked
    assert not {"kopf", "kubernetes", "yaml"} & blocked
    done = run(TABLES["every_module"], tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


# Which of the two is missed first depends on the order of the imports.
LACKS = "Error: check needs the package (blake3|numpy), which the operator's image does without: pip install kvtier\n"


@pytest.mark.parametrize(
    ("arguments", "code", "said", "complaint"),
    [
        (["render", str(SAMPLE)], 0, "kind: Deployment", ""),
        (["check", "/"], 1, "", LACKS),
        (["run"], 1, "", "kvtier: no cluster to talk to: (.|\n)*KUBECONFIG(.|\n)*"),
    ],
    ids=["render", "check", "run"],
)
def test_a_verb_does_what_it_can_or_names_what_is_missing(
    tmp_path: Path, arguments: list[str], code: int, said: str, complaint: str
) -> None:
    done = run(TABLES["command"].format(arguments=arguments), tmp_path)
    assert done.returncode == code
    assert said in done.stdout
    assert re.fullmatch(complaint, done.stderr)
