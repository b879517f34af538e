# SPDX-License-Identifier: Apache-2.0
"""The startup probe of an engine, and the shared memory that it finds: files of dead engines go, those in use stay."""

from __future__ import annotations

import errno
import fcntl
import functools
import json
import os
import socket
import socketserver
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml

import kvtier_connector
from kvtier_connector.pod_tools import ready, redis_check
from kvtier_connector.pod_tools.ready import Phase, StartupReport
from kvtier_connector.pod_tools.shm import clear_stale_regions

PACKAGES = Path(kvtier_connector.__path__[0]).parent

SCRIPTS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())


class Engine:
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


def test_all_engines_of_the_pod_are_waited_for_and_one_without_its_volume_passes(probe: Probe, state: Path) -> None:
    first, second = begun(state), begun(state)
    first.say(Phase.ATTACHED)
    assert probe() == (1, "1 of 2 disk tiers wait for the volume: ns/tier: the volume has not answered yet")
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
    subprocess.run([sys.executable, "-c", SCRIPTS["SAYS_AND_DIES"], str(state), last], check=False, env=environment)
    (left,) = state.iterdir()
    assert probe() == (1, "no disk tier has begun to open its volume")
    # The next container counts its processes from 1 again: the same number, another birth.
    left.write_text(json.dumps({**json.loads(left.read_text()), "pid": 1}))
    assert probe() == (1, "no disk tier has begun to open its volume")
    begun(state).say(Phase.ATTACHED)
    assert probe() == (0, "ready")
    assert not left.exists()


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b"\xff", b'{"phase": "attached"}'])
def test_a_file_that_is_no_statement_counts_for_nothing_and_goes(probe: Probe, state: Path, content: bytes) -> None:
    state.mkdir()
    foreign = state / "engine.json"
    foreign.write_bytes(content)
    assert probe() == (1, "no disk tier has begun to open its volume")
    begun(state).say(Phase.ATTACHED)
    assert not foreign.exists()
    assert probe() == (0, "ready")


def test_an_engine_that_does_not_answer_is_held_back(probe: Probe, engine: Engine, state: Path) -> None:
    begun(state).say(Phase.ATTACHED)
    engine.status = 503
    assert probe() == (1, f"the engine answers 503 at 127.0.0.1:{engine.port}/health")
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


class Speaker(socketserver.StreamRequestHandler):
    """Speaks as much of Redis as is asked; wants a password if its server has one."""

    def handle(self) -> None:
        has_entered = not self.server.password  # type: ignore[attr-defined]  the fixture sets it
        while head := self.rfile.readline():
            words = [self._word() for _ in range(int(head[1:]))]
            if words[0] == "AUTH":
                has_entered = words[1] == self.server.password  # type: ignore[attr-defined]  the fixture sets it
                self.wfile.write(b"+OK\r\n" if has_entered else b"-WRONGPASS invalid password\r\n")
            else:
                self.wfile.write(b"+PONG\r\n" if has_entered else b"-NOAUTH Authentication required.\r\n")

    def _word(self) -> str:
        return self.rfile.read(int(self.rfile.readline()[1:]) + 2)[:-2].decode()


@pytest.fixture
def server() -> Iterator[socketserver.ThreadingTCPServer]:
    made = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Speaker)
    made.daemon_threads = True
    made.password = ""  # type: ignore[attr-defined]  what the speaker asks for
    threading.Thread(target=made.serve_forever, daemon=True).start()
    yield made
    made.shutdown()
    made.server_close()


def url(server: socketserver.ThreadingTCPServer) -> str:
    return f"redis://127.0.0.1:{server.server_address[1]}"


def test_the_password_is_given_and_its_lack_is_told(server: socketserver.ThreadingTCPServer) -> None:
    assert redis_check.why_not(url(server)) == ""
    password = "grün"
    server.password = password  # type: ignore[attr-defined]  what the speaker asks for
    assert redis_check.why_not(url(server), password) == ""
    assert redis_check.why_not(url(server), patience=0) == "NOAUTH Authentication required."
    assert redis_check.why_not(url(server), "blau", patience=0) == "WRONGPASS invalid password"


@pytest.mark.parametrize("address", ["", "redis://redis:70000", "redis://redis..cache:6379", "redis://[redis:6379"])
def test_one_that_is_not_there_or_cannot_be_is_told_and_stops_no_pod(address: str, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        unused = f"redis://127.0.0.1:{taken.getsockname()[1]}"
    result = tmp_path / "result"
    assert redis_check.main([f"--url={address or unused}", f"--result={result}", "--patience=0"]) == 0
    problem = json.loads(result.read_text())["problem"]
    assert problem == "Connection refused" if not address else problem


USER, OTHER_USER = 12345, 12346


@contextmanager
def holding(path: Path, how: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", SCRIPTS["HOLDER"], how, str(path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "holding\n"
        yield process
    finally:
        process.communicate()


def region(directory: Path, name: str = "dead") -> Path:
    path = directory / f"vllm_offload_{name}.mmap"
    path.write_bytes(bytes(4096))
    path.chmod(0o600)
    return path


def test_a_region_that_nobody_holds_is_removed_and_other_files_stay(directory: Path) -> None:
    paths = [region(directory, "one"), region(directory, "two")]
    for name in ("nccl-abc", "my_vllm_offload_x.mmap"):
        (directory / name).write_bytes(b"")
    (directory / "vllm_offload_directory").mkdir()
    (directory / "vllm_offload_link").symlink_to("nccl-abc")
    assert clear_stale_regions(directory) == [str(path) for path in paths]
    assert clear_stale_regions(str(directory)) == []
    assert len(list(directory.iterdir())) == 4


def test_a_region_of_an_engine_that_was_killed_is_removed(directory: Path) -> None:
    path = directory / "vllm_offload_killed.mmap"
    with holding(path, "open and mapped") as process:
        process.kill()
        process.wait()
        assert clear_stale_regions(directory) == [str(path)]


def test_a_new_file_under_the_name_of_one_that_is_held_is_removed(directory: Path) -> None:
    path = region(directory)
    with holding(path, "open"):
        path.unlink()
        (directory / "takes the next inode number").write_bytes(b"")
        region(directory)
        assert clear_stale_regions(directory) == [str(path)]


def clear_in_another_container(directory: Path) -> list[str]:
    """Clear in a container that shares the memory and none of the processes."""
    container = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    command = [*container, sys.executable, "-c", SCRIPTS["CLEARING"], str(directory), str(PACKAGES)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()


@pytest.mark.parametrize("how", ["open", "mapped", "open and mapped"])
@pytest.mark.parametrize(
    "clear",
    [
        clear_stale_regions,
        pytest.param(
            clear_in_another_container,
            marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a container here"),
        ),
    ],
)
def test_a_region_that_a_process_holds_stays_until_the_process_ends(
    directory: Path, how: str, clear: Callable[[Path], list[str]]
) -> None:
    dead, held = region(directory), directory / "vllm_offload_alive.mmap"
    with holding(held, how):
        assert clear(directory) == [str(dead)]
        assert held.exists()
    assert clear(directory) == [str(held)]


def test_who_opens_a_region_while_it_is_removed_ends_nobody() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as made:
        path = region(Path(made))
        command = [sys.executable, "-c", SCRIPTS["OPENS_MEANWHILE"], made, str(PACKAGES)]
        completed = subprocess.run(command, check=True, capture_output=True, text=True)
    assert completed.stdout.split() == [str(path)]


def test_without_leases_every_region_stays_and_the_log_says_why(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EINVAL, "Invalid argument")

    path = region(directory)
    monkeypatch.setattr(fcntl, "fcntl", refuse)
    assert clear_stale_regions(directory) == []
    assert path.exists()
    assert "cannot be opened, leased or removed" in caplog.text


@functools.cache
def anyones_python() -> str:
    """Return a Python that other users can run and that can read this package."""
    looking = "import sys; sys.path.insert(0, sys.argv[1]); import kvtier_connector.pod_tools.shm"
    for python in (sys.executable, "/usr/bin/python3"):
        command = [python, "-c", looking, str(PACKAGES)]
        try:
            subprocess.run(command, user=USER, check=True, stderr=subprocess.DEVNULL)
        except (OSError, subprocess.CalledProcessError):
            continue
        return python
    pytest.skip("other users have no Python here")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be several users")
@pytest.mark.parametrize("mode", [0o600, 0o666])
def test_without_privileges_an_own_region_goes_and_another_users_stays(mode: int) -> None:
    """A process that may not look into others' still removes its own regions, and spares what others may hold."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as made:
        Path(made).chmod(0o777)
        own, others = region(Path(made), "own"), region(Path(made), "others")
        os.chown(own, USER, USER)
        os.chown(others, OTHER_USER, OTHER_USER)
        others.chmod(mode)
        command = [anyones_python(), "-c", SCRIPTS["CLEARING"], made, str(PACKAGES)]
        done = subprocess.run(command, user=USER, check=True, capture_output=True, text=True)
        assert done.stdout.split() == [str(own)]
        assert others.exists()
