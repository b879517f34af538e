# SPDX-License-Identifier: Apache-2.0
"""A real vLLM server that is told to end while a slow volume still has blocks to take: SIGTERM, as Kubernetes does."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_server import CHUNK_TOKENS, PROMPT_TOKENS, SHUTDOWN_SECONDS, START_SECONDS, Server
from faulty_mounts import FaultyVolume
from waiting import until


def drained(server: Server) -> tuple[int, int]:
    """Return how many blocks the engine's log says that were written and lost."""
    found = re.findall(r"drained in [\d.]+ s: (\d+) blocks written, (\d+) lost", server.log.read_text())
    assert found, server.log.read_text()[-6000:]
    written, lost = found[-1]
    return int(written), int(lost)


@pytest.fixture
def server(faulty_volume: FaultyVolume, tmp_path: Path) -> Iterator[Server]:
    made = Server(tmp_path, faulty_volume.path)
    try:
        until(made.is_ready, "the engine answers", seconds=START_SECONDS)
        yield made
    finally:
        made.kill()


def blocks(volume: FaultyVolume) -> int:
    return len(list((volume.path.parent / "source").rglob("*.kvb")))


def begin_to_write(server: Server) -> None:
    server.ask()
    until(lambda: server.metric("vllm:kvtier_disk_queued_store_bytes") > 0, "blocks wait to be written", seconds=60.0)


@pytest.mark.engine
@pytest.mark.timeout(600)
def test_an_engine_that_is_told_to_end_writes_what_waits(faulty_volume: FaultyVolume, server: Server) -> None:
    with faulty_volume.hanging("write"):
        begin_to_write(server)
        server.process.send_signal(signal.SIGTERM)
        until(lambda: "wait to be written" in server.log.read_text(), "the engine drains", seconds=30.0)
        assert server.process.poll() is None
    assert server.process.wait(SHUTDOWN_SECONDS) == 0
    written, lost = drained(server)
    assert (written, lost) == (PROMPT_TOKENS // CHUNK_TOKENS, 0)
    assert blocks(faulty_volume) == written


@pytest.mark.engine
@pytest.mark.timeout(600)
def test_an_engine_ends_in_time_whatever_the_volume_does_and_says_what_is_lost(
    faulty_volume: FaultyVolume, server: Server
) -> None:
    with faulty_volume.hanging("write"):
        begin_to_write(server)
        server.process.send_signal(signal.SIGTERM)
        # vLLM kills the engine that has not ended by then, and it would say nothing.
        until(lambda: "drained in" in server.log.read_text(), "the engine ends", seconds=SHUTDOWN_SECONDS)
        assert drained(server) == (0, PROMPT_TOKENS // CHUNK_TOKENS)
    # Nobody ends a process, the engine's or a mover's, of which a thread waits for a call that does not return.
    server.process.wait(SHUTDOWN_SECONDS)
