# SPDX-License-Identifier: Apache-2.0
"""Whatever happens in whatever order, requests get the answers that they get without a cache, and nothing stays taken.

Requests that share beginnings and salts come, go and are aborted; the volume fails, fills, hangs and is damaged; caches
are reset, engines restarted, and copies lag behind. A `SimulatedEngine` compares in each step what it builds upon.
"""

from __future__ import annotations

import errno
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from engine_parts import WINDOW_TOKENS, Shape, answer_of, prompt_of
from engine_rig import SimulatedEngine
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule
from random_engine import EngineMachine, run

from kvtier_connector.store.fs import FileSystem

EXAMPLES = 8
OPERATIONS = 40
FAMILIES = 3
LONGEST = 14

SHAPES = {
    "plenty": Shape(),
    "small CPU tier": Shape(cpu_chunks=5),
    "small GPU": Shape(gpu_blocks=40, cpu_chunks=30),
    "everything small": Shape(gpu_blocks=36, cpu_chunks=4, most_running=3, most_tokens=64),
    "long chunks": Shape(blocks_per_chunk=3, cpu_chunks=10),
    "answers too": Shape(prompt_only=False, cpu_chunks=20),
    "split": Shape(is_splitting=True, most_tokens=128),
    "split with a small GPU": Shape(is_splitting=True, gpu_blocks=40, cpu_chunks=30, most_tokens=64),
    "split with everything small": Shape(
        is_splitting=True, gpu_blocks=36, cpu_chunks=6, most_running=3, most_tokens=64
    ),
    "split with long chunks": Shape(is_splitting=True, blocks_per_chunk=3, cpu_chunks=10, most_tokens=128),
    "sliding window": Shape(windows=(None, WINDOW_TOKENS), gpu_blocks=120, cpu_chunks=24),
}


class MoodyFs(FileSystem):
    """A volume whose blocks can be read and written, or cannot, or hang."""

    def __init__(self) -> None:
        self.read_error: int | None = None
        self.write_error: int | None = None
        self.flowing = threading.Event()
        self.flowing.set()

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self.flowing.wait(60)
        if self.read_error is not None:
            raise OSError(self.read_error, "moody")
        return super().preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self.flowing.wait(60)
        if self.write_error is not None:
            raise OSError(self.write_error, "moody")
        return super().pwritev(fd, buffers, offset)

    def heal(self) -> None:
        self.read_error = self.write_error = None
        self.flowing.set()


class Machine(EngineMachine):
    def __init__(self) -> None:
        super().__init__()
        self.fs = MoodyFs()
        self.asked: dict[str, tuple[list[int], str | None, int]] = {}
        self.damaged: dict[Path, bytes] = {}

    @initialize(
        shape=st.sampled_from(sorted(SHAPES)),
        min_reuse=st.sampled_from([1, 1, 2]),
        most_wait=st.sampled_from([-1.0, 1.0]),
    )
    def begin(self, shape: str, min_reuse: int, most_wait: float) -> None:
        self.shape, self.min_reuse, self.most_wait = SHAPES[shape], min_reuse, most_wait
        self.made = [self.start()]

    def start(self) -> SimulatedEngine:
        engine = self.engines.make(
            self.shape, fs=self.fs, min_reuse=self.min_reuse, load_deadline_seconds=0.3, refresh_seconds=0.05
        )
        engine.connector.connector_scheduler.most_wait_seconds = self.most_wait
        return engine

    @rule(
        family=st.integers(0, FAMILIES - 1),
        chunks=st.integers(0, LONGEST),
        more=st.integers(1, 15),
        salt=st.sampled_from([None, None, "salt"]),
        answer=st.integers(1, 40),
    )
    def arrive(self, family: int, chunks: int, more: int, salt: str | None, answer: int) -> None:
        self.count += 1
        name, prompt = f"r{self.count}", prompt_of(chunks, seed=family, more=more)
        self.asked[name] = prompt, salt, answer
        self.engine.add(name, prompt, salt=salt, answer=answer)

    @rule()
    def wait_for_movers(self) -> None:
        for _ in range(10):
            self.engine.step()
            threading.Event().wait(0.001)

    def forget(self, name: str) -> None:
        del self.asked[name]

    @rule(reading=st.sampled_from([None, None, errno.EIO]), writing=st.sampled_from([None, None, errno.ENOSPC]))
    def change_mood(self, reading: int | None, writing: int | None) -> None:
        self.fs.read_error, self.fs.write_error = reading, writing

    @rule()
    def hang(self) -> None:
        self.fs.flowing.clear()

    @rule()
    def heal(self) -> None:
        self.fs.heal()

    @rule(choice=st.integers(0, 1000), is_flipped=st.booleans())
    def damage(self, choice: int, is_flipped: bool) -> None:
        files = sorted((self.engines.rigs.root / "blocks").rglob("*.kvb"))
        if files:
            path = files[choice % len(files)]
            if is_flipped:
                self.damaged[path] = path.read_bytes()[:-1] + b"?"
                path.write_bytes(self.damaged[path])
            else:
                path.unlink()

    @rule(whole=st.booleans())
    def remove_all(self, whole: bool) -> None:
        root = self.engines.rigs.root
        shutil.rmtree(root if whole else root / "blocks", ignore_errors=True)

    @rule()
    def reset_connector(self) -> None:
        self.engine.connector.reset_cache()

    @rule(connector=st.booleans())
    def reset_all(self, connector: bool) -> None:
        if self.may_reset():
            self.engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=connector)

    @rule()
    def restart(self) -> None:
        self.fs.heal()
        self.check_answers()
        self.engine.close()
        self.asked.clear()
        self.made = [self.start()]

    def check_answers(self) -> None:
        for name, answer in self.engine.answers.items():
            if name in self.asked:
                prompt, salt, length = self.asked[name]
                assert answer == answer_of(prompt, length, salt), f"{name} is answered otherwise than without a cache"

    def teardown(self) -> None:
        try:
            self.fs.heal()
            self.engine.run()
            assert self.asked.keys() <= self.engine.answers.keys(), "a request was not answered"
            self.check_answers()
            self.engine.assert_nothing_is_left()
            for path, content in self.damaged.items():
                if path.exists() and path.read_bytes() == content:
                    # Nobody has asked for it since.
                    path.unlink()
            for family in range(FAMILIES):
                for salt in (None, "salt"):
                    self.engines.assert_volume_holds(self.engine, prompt_of(LONGEST, seed=family), salt=salt)
        finally:
            self.fs.heal()
            self.close()


@pytest.mark.timeout(300)
def test_any_order_of_events_leaves_right_answers_and_nothing_taken() -> None:
    run(Machine, examples=EXAMPLES, operations=OPERATIONS)
