# SPDX-License-Identifier: Apache-2.0
"""Real vLLM servers: what is written when they are told to end, as Kubernetes does.

Two servers serve all the claims, since each takes a while to start: they do it at once. Both are told to end while
their volume hangs; that of one of them gets well again.
"""

from __future__ import annotations

import re
import signal
from contextlib import ExitStack
from dataclasses import dataclass

import pytest
from engine_host import EngineHost
from engine_server import CHUNK_TOKENS, PROMPT_TOKENS, START_SECONDS, Server
from faulty_mounts import FaultyVolume, mounted, why_no_fuse
from waiting import until

CHUNKS = PROMPT_TOKENS // CHUNK_TOKENS
PATIENCE_SECONDS = 120.0


@dataclass(frozen=True)
class Ended:
    """What a server left that was told to end while its volume hung."""

    code: int
    written: int
    lost: int
    """Blocks, as its log has it."""
    on_volume: int


@dataclass(frozen=True)
class Story:
    """What came of two servers."""

    healed: Ended | None
    hung: Ended | None
    """None where no volume can be made to hang."""


def end(server: Server, volume: FaultyVolume, *, heals: bool) -> Ended:
    """Tell the server to end while blocks wait to be written, and the volume hangs until then, or until after."""
    source = volume.path.parent / "source"
    before = len(list(source.rglob("*.kvb")))

    def told() -> list[tuple[str, str]]:
        return re.findall(r"drained in [\d.]+ s: (\d+) blocks written, (\d+) lost", server.log.read_text())

    with volume.hanging("write"):
        server.ask(777)
        until(lambda: server.metric("vllm:kvtier_disk_queued_store_bytes") > 0, "blocks wait", seconds=PATIENCE_SECONDS)
        server.process.send_signal(signal.SIGTERM)
        until(lambda: "wait to be written" in server.log.read_text(), "it drains", seconds=PATIENCE_SECONDS)
        # A second signal neither shortens the drain nor loses blocks.
        server.process.send_signal(signal.SIGTERM)
        if heals:
            assert server.process.poll() is None
        else:
            # vLLM kills the engine that has not ended in time, and it would say nothing.
            until(told, lambda: server.log.read_text()[-6000:], seconds=PATIENCE_SECONDS)
    # A process with a thread in a system call that does not return cannot end, be it the engine's or an I/O worker's.
    code = server.process.wait(PATIENCE_SECONDS)
    until(told, lambda: server.log.read_text()[-6000:])
    written, lost = (int(each) for each in told()[-1])
    return Ended(code, written, lost, len(list(source.rglob("*.kvb"))) - before)


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory, engine_host: EngineHost) -> Story:
    with ExitStack() as stack:
        places = [tmp_path_factory.mktemp("server") for _ in range(1 if why_no_fuse() else 2)]
        volumes = [] if why_no_fuse() else [stack.enter_context(mounted(place)) for place in places]
        for place in places:
            (place / "volume").mkdir(exist_ok=True)
        servers = [Server(engine_host, place, place / "volume") for place in places]
        for server in servers:
            stack.callback(server.process.kill)
        for server in servers:
            until(server.is_ready, "the engine answers", seconds=START_SECONDS)

        ended = [
            end(server, volume, heals=heals)
            for server, volume, heals in zip(servers, volumes, (True, False), strict=False)
        ]
        return Story(*(ended or (None, None)))


@pytest.mark.engine
@pytest.mark.timeout(900)
def test_an_engine_that_is_told_to_end_writes_what_waits(story: Story) -> None:
    if story.healed is None:
        pytest.skip(why_no_fuse())
    assert story.healed == Ended(code=0, written=CHUNKS, lost=0, on_volume=CHUNKS)


@pytest.mark.engine
@pytest.mark.timeout(900)
def test_an_engine_ends_in_time_whatever_the_volume_does_and_says_what_is_lost(story: Story) -> None:
    if story.hung is None:
        pytest.skip(why_no_fuse())
    assert (story.hung.written, story.hung.lost) == (0, CHUNKS)
