# SPDX-License-Identifier: Apache-2.0
"""A real vLLM engine on a mount that fails and hangs while requests run: every answer is the one without a cache."""

from __future__ import annotations

import json
import re
import signal
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from engine_host import EngineHost
from engine_process import DIGEST, run_script, write_config
from engine_server import CHUNK_TOKENS, PROMPT_TOKENS, START_SECONDS, Server
from faulty_mounts import FaultyVolume, mounted, why_no_fuse
from waiting import until

from kvtier_demo.model import make_model
from kvtier_operator.plan import chunks, engine_args
from kvtier_operator.plan.model_layout import EngineLayout, ModelLayout, make_model_layout

SCRIPT = Path(__file__).with_name("engine_faults_script.py")


def run_engine(host: EngineHost, directory: Path, volume: FaultyVolume) -> dict[str, Any]:
    make_model(directory / "model", layers=2)
    config = write_config(directory, volume.path, io_processes=8, load_deadline_seconds=1.5)
    kv = make_model_layout(
        json.loads((directory / "model/config.json").read_text()),
        EngineLayout(args=engine_args.read(["--dtype=float32"])),
    )
    assert isinstance(kv, ModelLayout)
    arguments = [str(each) for each in (directory, volume.control, config, chunks.bytes_of(128, kv))]
    return run_script(SCRIPT, *arguments, log=directory / "engine.log", host=host, timeout_seconds=1600)


@pytest.mark.engine
@pytest.mark.timeout(2400)
def test_answers_are_right_on_any_volume(faulty_volume: FaultyVolume, tmp_path: Path, engine_host: EngineHost) -> None:
    result = run_engine(engine_host, tmp_path, faulty_volume)
    answers, metrics = result["answers"], result["metrics"]
    expected = {answer["seed"]: answer["tokens"] for answer in answers if answer["when"] == "computed"}
    assert [answer for answer in answers if answer["tokens"] != expected[answer["seed"]]] == []
    assert {answer["when"] for answer in answers} >= {"healthy", "eio on read", "hang on read", "enospc on write"}
    assert result["read"] == {"healthy": True, "recovered": True, "reset": True}, "the volume is well and is not read"
    assert [path.name for path in faulty_volume.path.iterdir()] == [DIGEST], "the engine took its weights for others"
    sys.stdout.write(f"{len(answers)} answers; {metrics}\n")
    assert metrics["vllm:kvtier_disk_read_blocks"] > 0
    # Without a rate of prefill, a load waits until its deadline.
    met = {"disk_misses:io", "disk_misses:deadline", "disk_shed_stores:no_space"}
    assert {name for name in met if metrics.get(f"vllm:kvtier_{name}", 0) > 0} == met


CHUNKS = PROMPT_TOKENS // CHUNK_TOKENS
PATIENCE_SECONDS = 120.0


@dataclass(frozen=True)
class Ended:
    """What a server left that was told to end while its volume hung."""

    code: int
    written: int
    lost: int
    on_volume: int


@dataclass(frozen=True)
class Story:
    healed: Ended | None
    hung: Ended | None


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
        servers = [
            Server(engine_host, place, place / "volume", heals=heals)
            for place, heals in zip(places, (True, False), strict=False)
        ]
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
