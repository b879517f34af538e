# SPDX-License-Identifier: Apache-2.0
"""The startup probe of an engine: what lets it pass, what holds it back, and what it says then."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import kvtier_connector
from kvtier_connector.pod_tools import ready
from kvtier_connector.pod_tools.ready import Phase, StartupReport

PACKAGES = Path(kvtier_connector.__path__[0]).parent

SAYS_AND_DIES = """
import os, sys
from kvtier_connector.pod_tools.ready import Phase, StartupReport
report = StartupReport(sys.argv[1], "ns/tier")
report.begin("the volume has not answered yet")
if sys.argv[2] == "attach":
    report.say(Phase.ATTACHED)
os._exit(9)
"""


class Engine:
    """Answers like the front end of an engine."""

    def __init__(self) -> None:
        self.status = 200
        engine = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(engine.status if self.path == "/health" else 404)
                self.end_headers()

            def log_message(self, *words: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine()
    yield engine
    engine.close()


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "kvtier"


class Probe:
    """Asks as the kubelet does, but in this process."""

    def __init__(self, engine: Engine, state: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self._engine, self._state, self._capsys = engine, state, capsys

    def __call__(self) -> tuple[int, str]:
        code = ready.main([f"--state={self._state}", "--host=127.0.0.1", f"--port={self._engine.port}"])
        return code, self._capsys.readouterr().out.strip()


@pytest.fixture
def probe(engine: Engine, state: Path, capsys: pytest.CaptureFixture[str]) -> Probe:
    return Probe(engine, state, capsys)


def begun(state: Path) -> StartupReport:
    report = StartupReport(str(state), "ns/tier")
    report.begin("the volume has not answered yet")
    return report


def test_an_engine_that_has_not_opened_its_tier_is_held_back(probe: Probe, state: Path) -> None:
    assert probe() == (1, "no disk tier has begun to open its volume")
    state.mkdir()
    assert probe() == (1, "no disk tier has begun to open its volume")


def test_an_engine_passes_once_it_has_its_volume(probe: Probe, state: Path) -> None:
    report = begun(state)
    code, words = probe()
    assert code == 1
    assert words == "1 of 1 disk tiers wait for the volume: ns/tier: the volume has not answered yet"
    report.say(Phase.ATTACHED)
    assert probe() == (0, "ready")


def test_all_engines_of_the_pod_are_waited_for_and_one_without_its_volume_passes(probe: Probe, state: Path) -> None:
    first, second = begun(state), begun(state)
    first.say(Phase.ATTACHED)
    code, words = probe()
    assert code == 1
    assert words.startswith("1 of 2 disk tiers wait")
    second.say(Phase.WITHOUT, "another model")
    assert probe() == (0, "ready")


def test_who_gives_up_waiting_takes_back_no_decision(probe: Probe, state: Path) -> None:
    attached, waiting = begun(state), begun(state)
    attached.say(Phase.ATTACHED)
    assert not attached.say(Phase.WITHOUT, "too late", only_after=Phase.OPENING)
    assert waiting.say(Phase.WITHOUT, "the volume hangs", only_after=Phase.OPENING)
    assert sorted(json.loads(path.read_text())["reason"] for path in state.iterdir()) == ["", "the volume hangs"]
    waiting.say(Phase.ATTACHED)
    assert {json.loads(path.read_text())["phase"] for path in state.iterdir()} == {"attached"}
    assert probe() == (0, "ready")


@pytest.mark.parametrize("last", ["attach", "begin"])
def test_what_the_container_before_left_counts_for_nothing(probe: Probe, state: Path, last: str) -> None:
    environment = {"PYTHONPATH": str(PACKAGES)}
    subprocess.run([sys.executable, "-c", SAYS_AND_DIES, str(state), last], check=False, env=environment)
    (left,) = state.iterdir()
    assert probe() == (1, "no disk tier has begun to open its volume")
    # The next container counts its processes from 1 again: the same number, another birth.
    said = json.loads(left.read_text())
    left.write_text(json.dumps({**said, "pid": 1}))
    assert probe() == (1, "no disk tier has begun to open its volume")
    begun(state).say(Phase.ATTACHED)
    assert probe() == (0, "ready")
    assert not left.exists()


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b"\xff", b'{"phase": "attached"}'])
def test_a_file_that_is_no_statement_counts_for_nothing_and_is_removed(
    probe: Probe, state: Path, content: bytes
) -> None:
    state.mkdir()
    foreign = state / "engine.json"
    foreign.write_bytes(content)
    assert probe() == (1, "no disk tier has begun to open its volume")
    begun(state).say(Phase.ATTACHED)
    assert not foreign.exists()
    assert probe() == (0, "ready")


def test_a_tier_that_was_closed_says_nothing_more(probe: Probe, state: Path) -> None:
    report = begun(state)
    report.say(Phase.ATTACHED)
    report.end()
    assert probe() == (1, "no disk tier has begun to open its volume")


def test_an_engine_that_does_not_answer_is_held_back(probe: Probe, engine: Engine, state: Path) -> None:
    begun(state).say(Phase.ATTACHED)
    engine.status = 503
    code, words = probe()
    assert code == 1
    assert words == f"the engine answers 503 at 127.0.0.1:{engine.port}/health"
    engine.close()
    code, words = probe()
    assert code == 1
    assert "does not answer" in words
    assert "Connection refused" in words


def test_the_command_runs_as_in_a_container_and_imports_no_other_module_of_ours(engine: Engine, state: Path) -> None:
    begun(state).say(Phase.ATTACHED)
    options = [f"--state={state}", "--host=0.0.0.0", f"--port={engine.port}"]
    script = (
        "import runpy, sys\n"
        "try:\n"
        "    runpy.run_module('kvtier_connector.pod_tools.ready', run_name='__main__')\n"
        "finally:\n"
        "    print(sorted(name for name in sys.modules if name.startswith(('kvtier', 'blake3', 'vllm', 'numpy'))))\n"
    )
    for command, printed in (
        (["-m", "kvtier_connector.pod_tools.ready"], "ready\n"),
        (["-c", script], "ready\n['kvtier_conn"),
    ):
        done = subprocess.run(
            [sys.executable, "-S", *command, *options],
            check=False,
            env={"PYTHONPATH": str(PACKAGES)},
            capture_output=True,
            text=True,
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith(printed)
    assert done.stdout.endswith("['kvtier_connector', 'kvtier_connector.pod_tools']\n")


def test_without_a_directory_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    report = StartupReport("", "ns/tier")
    report.begin("the volume has not answered yet")
    report.say(Phase.ATTACHED)
    report.end()
    assert list(tmp_path.iterdir()) == []
