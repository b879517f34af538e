# SPDX-License-Identifier: Apache-2.0
"""What asks a Redis whether it answers: a server that speaks as one does, and none at all."""

from __future__ import annotations

import json
import socket
import socketserver
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier_connector.pod_tools import redis_check


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
        size = int(self.rfile.readline()[1:])
        return self.rfile.read(size + 2)[:-2].decode()


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


def test_one_that_answers_is_usable(server: socketserver.ThreadingTCPServer) -> None:
    assert redis_check.why_not(url(server)) == ""


def test_the_password_is_given_and_its_lack_is_told(server: socketserver.ThreadingTCPServer) -> None:
    password = "grün"
    server.password = password  # type: ignore[attr-defined]  what the speaker asks for
    assert redis_check.why_not(url(server), password) == ""
    assert redis_check.why_not(url(server), patience=0) == "NOAUTH Authentication required."
    assert redis_check.why_not(url(server), "blau", patience=0) == "WRONGPASS invalid password"


def test_one_that_is_not_there_is_told_and_holds_up_nobody(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"redis://127.0.0.1:{taken.getsockname()[1]}"
    result = tmp_path / "result"
    assert redis_check.main([f"--url={address}", f"--result={result}", "--patience=0"]) == 0
    assert json.loads(result.read_text()) == {"problem": "Connection refused"}


def test_a_name_that_nobody_knows_is_told(tmp_path: Path) -> None:
    result = tmp_path / "result"
    assert redis_check.main(["--url=redis://nobody.invalid:6379", f"--result={result}", "--patience=0"]) == 0
    assert json.loads(result.read_text())["problem"]


@pytest.mark.parametrize("address", ["redis://redis:70000", "redis://redis..cache:6379", "redis://[redis:6379"])
def test_an_address_that_cannot_be_is_told_and_stops_no_pod(address: str, tmp_path: Path) -> None:
    result = tmp_path / "result"
    assert redis_check.main([f"--url={address}", f"--result={result}", "--patience=0"]) == 0
    assert json.loads(result.read_text())["problem"]
