# SPDX-License-Identifier: Apache-2.0
"""The YAML that the command prints and reads is to kubectl what it is to the command."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import ci_tools
import yaml
from command import Command

from kvtier_cli import output
from kvtier_cli.plan import read_documents

TABLES = yaml.load(Path(__file__).with_suffix(".yaml").read_text(), Loader=yaml.BaseLoader)
KUBECTL = ci_tools.load("helm").binary("kubectl")
HEAD = {"apiVersion": "example.org/v1", "kind": "Words", "metadata": {"name": "words"}}


def read_by_kubectl(file: Path) -> Any:
    command = [KUBECTL, "label", "--local", "-f", file, "a=b", "-o", "json"]
    return json.loads(subprocess.run(command, capture_output=True, check=True).stdout)["spec"]


def test_kubectl_reads_the_texts_that_the_command_writes(tmp_path: Path) -> None:
    spec = {"list": TABLES["texts"], "keys": {each: each for each in TABLES["texts"]}, "others": [1, 1e300, True, None]}
    (tmp_path / "words.yaml").write_text(output.as_yaml([{**HEAD, "spec": spec}]))
    assert read_by_kubectl(tmp_path / "words.yaml") == spec


def test_the_command_reads_words_without_quotes_as_kubectl_does(tmp_path: Path) -> None:
    file = tmp_path / "words.yaml"
    file.write_text(yaml.safe_dump(HEAD) + "spec:\n" + "".join(f"- {each}\n" for each in TABLES["words"]))
    (document,) = read_documents(str(file))
    assert [*map(repr, document["spec"])] == [*map(repr, read_by_kubectl(file))]


def test_a_number_where_the_definition_has_a_text_is_no_valid_tier(kvtier: Command, tmp_path: Path) -> None:
    file = tmp_path / "tier.yaml"
    body = output.as_yaml([{**HEAD, "apiVersion": "kvtier.dev/v1beta1", "kind": "KVCacheTier", "spec": {}}])
    file.write_text(body.replace("spec: {}", "spec: {model: {name: a/b}, cpu: {size: 1e9}}"))
    assert "spec.cpu.size" in kvtier("validate", file, code=1)
