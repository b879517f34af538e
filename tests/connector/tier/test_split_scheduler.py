# SPDX-License-Identifier: Apache-2.0
"""Split hits with vLLM's scheduler and our connector: the head is computed while the tail is read, and they join."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from engine_fleet import Engines
from engine_parts import BLOCK_TOKENS, Shape, prompt_of
from engine_rig import SimulatedEngine
from rig import Rigs

from kvtier_connector.store.fs import FileSystem

SHAPE = Shape(is_splitting=True, most_tokens=64)
CHUNKS = 14


class PacedFs(FileSystem):
    """A volume that gives one block for each permit."""

    def __init__(self) -> None:
        self.permits = threading.Semaphore(0)
        self.is_paced = False

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if self.is_paced and sum(map(len, buffers)) > 4096:
            self.permits.acquire(timeout=30)
        return super().preadv(fd, buffers, offset)


@pytest.fixture
def fs() -> PacedFs:
    return PacedFs()


@pytest.fixture
def engines(tmp_path: Path) -> Engines:
    return Engines(Rigs(tmp_path))


def second_engine(engines: Engines, fs: PacedFs, prompt: Sequence[int]) -> SimulatedEngine:
    """Return an engine on a volume that another one has stored the prompt on, and that is paced from now on."""
    first = engines.make(SHAPE, fs=fs)
    first.ask("stores", prompt)
    first.run()
    assert engines.assert_volume_holds(first, prompt) == CHUNKS
    first.close()
    second = engines.make(SHAPE, fs=fs)
    second.wait_until_known(CHUNKS)
    fs.is_paced = True
    return second


def test_a_head_and_a_tail_meet_and_the_answer_is_the_computed_one(engines: Engines, fs: PacedFs) -> None:
    prompt = prompt_of(CHUNKS)
    second = second_engine(engines, fs, prompt)
    second.add("reads", prompt)
    while "reads" not in second.answers:
        fs.permits.release()
        second.step()
        threading.Event().wait(0.002)
    assert 0 < second.computed["reads"] < len(prompt)
    assert second.metric("vllm:kvtier_disk_split_joins") == 1
    second.close()


def test_a_volume_that_hangs_costs_nothing_but_its_chunks(engines: Engines, fs: PacedFs) -> None:
    prompt = prompt_of(CHUNKS)
    second = second_engine(engines, fs, prompt)
    second.add("computes", prompt)
    second.run(lambda: "computes" in second.answers, most_steps=4 * CHUNKS * BLOCK_TOKENS)
    assert second.computed["computes"] == len(prompt)
    for _ in range(2 * CHUNKS):
        fs.permits.release()
    second.close()
