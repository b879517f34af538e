# SPDX-License-Identifier: Apache-2.0
"""Words of the command line that all verbs share: help, options before the verb, completion, colours, progress."""

from __future__ import annotations

import io
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import yaml
from click.shell_completion import ShellComplete
from command import Command
from definition import tier_definition

from kvtier_cli import app as app_module
from kvtier_cli import output
from kvtier_cli.app import VERBS, app, complete
from kvtier_localcluster.apiserver import ApiServerThread

TABLES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def api() -> Iterator[ApiServerThread]:
    body = yaml.safe_load((ROOT / "crds" / "samples" / "minimal.yaml").read_text())
    with ApiServerThread() as server:
        server.create(tier_definition())
        server.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "ai"}})
        for namespace, name in (("default", "llama"), ("default", "qwen"), ("ai", "llava")):
            server.create({**body, "metadata": {"name": name, "namespace": namespace}})
        yield server


@pytest.fixture
def kubeconfig(api: ApiServerThread, tmp_path: Path) -> Path:
    written: Path = api.write_kubeconfig(tmp_path / "kubeconfig")
    return written


def commands() -> Iterator[tuple[str, click.Command]]:
    for verb in VERBS:
        command = app.get_command(click.Context(app), verb)
        assert command is not None
        yield verb, command
        if isinstance(command, click.Group):
            yield from ((f"{verb} {name}", each) for name, each in command.commands.items())


@pytest.mark.parametrize(("verb", "command"), list(commands()), ids=lambda each: each if isinstance(each, str) else "")
def test_each_help_has_two_examples_that_the_command_understands(verb: str, command: click.Command) -> None:
    examples = re.findall(r"^  (kvtier .*)$", command.epilog or "", re.MULTILINE)
    assert len(examples) == 2
    for line in examples:
        words = shlex.split(line.partition(" | ")[0])[1:]
        assert words[: len(verb.split())] == verb.split()
        if not isinstance(command, click.Group):
            command.make_parser(click.Context(command)).parse_args(words[len(verb.split()) :])


def test_options_of_the_cluster_stand_before_the_verb_or_behind_it(kubeconfig: Path, kvtier: Command) -> None:
    before = ["--kubeconfig", str(kubeconfig), "-n", "ai"]
    assert kvtier(*before, "mode", "llava") == kvtier("mode", "llava", *before) == "llava: ReadWrite\n"
    assert kvtier(*before, "mode", "qwen", "-n", "default") == "qwen: ReadWrite\n"


def completed(words: list[str], begun: str) -> list[str]:
    return [each.value for each in ShellComplete(app, {}, "kvtier", "_").get_completions(words, begun)]


@pytest.mark.parametrize("verb", ["status", "pause", "mode", "restart", "warm", "bench", "report"])
def test_names_of_tiers_are_completed(verb: str, kubeconfig: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
    assert completed([verb], "") == ["llama", "qwen"]
    assert completed([verb], "ll") == ["llama"]
    assert completed([verb, "-n", "ai"], "") == ["llava"]
    assert completed(["-n", "ai", verb], "") == ["llava"]


def test_a_target_is_completed_by_names_and_directories(
    kubeconfig: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
    complete(["check", "ll"])
    assert capsys.readouterr().out == "llama\n:0\n"


def test_completion_without_a_cluster_offers_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "missing"))
    assert completed(["status"], "") == []


def write_kubeconfig(path: Path, server: str) -> Path:
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": server}}],
        "users": [{"name": "u", "user": {}}],
        "contexts": [{"name": name, "context": {"cluster": "c", "user": "u"}} for name in ("prod", "dev")],
        "current-context": "dev",
    }
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.mark.parametrize(("words", "said"), TABLES["unreachable"], ids=["context", "file", "refused", "name"])
def test_a_cluster_that_cannot_be_reached_is_said_in_words(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kvtier: Command
) -> None:
    server = "http://no-such-host.invalid" if words == ["--server-name"] else "http://127.0.0.1:9"
    monkeypatch.setenv("KUBECONFIG", str(write_kubeconfig(tmp_path / "config", server)))
    error = kvtier.fails("status", *(word for word in words if word != "--server-name"))
    assert said in error
    assert "HTTPConnection" not in error


class Terminal(io.StringIO):
    """A stream that is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("value", "is_colored"), [(None, True), ("", True), ("1", False)])
def test_no_color_is_honoured(
    value: str | None, is_colored: bool, kubeconfig: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
    if value is None:
        monkeypatch.delenv("NO_COLOR", raising=False)
    else:
        monkeypatch.setenv("NO_COLOR", value)
    shown = Terminal()
    monkeypatch.setattr(sys, "stdout", shown)
    app_module.main(["status"])
    assert ("\x1b[33mUnknown" in shown.getvalue()) is is_colored


def test_progress_is_shown_on_a_terminal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for shown, expected in ((Terminal(), " 50%  3 blocks, 2 KiB"), (io.StringIO(), None)):
        monkeypatch.setattr(sys, "stderr", shown)
        with output.progress() as tell:
            tell(0.5, 3, 2048)
        assert expected in shown.getvalue() if expected else not shown.getvalue()
