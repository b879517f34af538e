# SPDX-License-Identifier: Apache-2.0
"""Real vLLM servers: which blocks a prompt has, and what is written when they are told to end, as Kubernetes does.

Two servers serve all the claims, since each takes a while to start: they do it at once. Both are told to end while
their volume hangs; that of one of them gets well again.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest
from engine_host import PATHS, EngineHost
from engine_server import CHUNK_TOKENS, PROMPT_TOKENS, START_SECONDS, Server, make_tokens
from faulty_mounts import FaultyVolume, mounted, why_no_fuse
from waiting import until

PROMPTS = 5
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

    warm: dict[str, Any]
    files: int
    size: int
    again: dict[str, Any]
    refused: dict[str, Any]
    healed: Ended | None
    hung: Ended | None
    """None where no volume can be made to hang."""


def send_prompts(server: Server, lines: list[dict[str, Any]], *words: str, code: int = 0) -> dict[str, Any]:
    """Warm the server up as its Job does; return the answer."""
    file = server.log.with_name("prompts.jsonl")
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    command = [sys.executable, "-m", "kvtier_connector.janitor.warming", f"--prompts={file}"]
    done = subprocess.run(
        [*command, f"--config={server.config}", f"--url=http://127.0.0.1:{server.port}", *words],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(PATHS)},
        check=False,
        timeout=300,
    )
    assert done.returncode == code, (done.stdout, done.stderr)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])["document"]
    return found


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
        if heals:
            until(lambda: "wait to be written" in server.log.read_text(), "it drains", seconds=PATIENCE_SECONDS)
            assert server.process.poll() is None
        else:
            # vLLM kills the engine that has not ended in time, and it would say nothing.
            until(told, lambda: server.log.read_text()[-6000:], seconds=PATIENCE_SECONDS)
    # Nobody ends a process, the engine's or a mover's, of which a thread waits for a call that does not return.
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

        asked = [{"prompt": make_tokens(seed), "max_tokens": 300, "stream": True} for seed in range(PROMPTS)]
        asked.append({"prompt": make_tokens(99, CHUNK_TOKENS - 1)})
        warm = send_prompts(servers[0], asked)
        files = list((places[0] / "volume").rglob("*.kvb"))
        size = sum(path.stat().st_size for path in files)
        files[0].unlink()
        again = send_prompts(servers[0], asked, "--patience=1", code=1)
        refused = send_prompts(servers[0], [{"prompt": [5] * 5000}], code=1)
        ended = [
            end(server, volume, heals=heals)
            for server, volume, heals in zip(servers, volumes, (True, False), strict=False)
        ]
        return Story(warm, len(files), size, again, refused, *(ended or (None, None)))


@pytest.mark.engine
@pytest.mark.timeout(900)
def test_a_prompt_set_is_warm_when_each_of_its_blocks_is_on_the_volume(story: Story) -> None:
    found = story.warm
    assert (found["prompts"], found["warm"], found["short"]) == (PROMPTS + 1, PROMPTS, 1)
    assert found["blocks"] == PROMPTS * CHUNKS == story.files
    assert found["bytes"] == story.size

    # Nobody's word is taken for it: a block that has gone is missed, for as long as the engine believes in it.
    assert (story.again["warm"], story.again["missing"]) == (PROMPTS - 1, 1)

    # What an engine refuses is told of by its line, and by nothing that it says.
    assert story.refused["failed"] == 1
    assert story.refused["problem"].startswith("line 1: the engine answers /v1/completions with 400")


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
