# SPDX-License-Identifier: Apache-2.0
"""Our connector under vLLM's own scheduler: what reaches the volume, and when."""

from __future__ import annotations

import errno
import functools
import math
import threading
from collections.abc import Sequence

import pytest
from engine_fleet import Engines
from engine_parts import BLOCK_TOKENS, Shape, prompt_of
from engine_rig import SimulatedEngine
from prompts import LATER, PROMPT, finish, restart
from store_faults import FailingFs

from kvtier_connector.store.fs import FileSystem
from kvtier_connector.store.health import Breaker, BreakerLimits


def test_answers_are_stored_too_where_that_is_asked_for(engines: Engines) -> None:
    shape = Shape(prompt_only=False)
    writer = engines.make(shape)
    prompt = prompt_of(4)
    writer.ask("w", prompt, answer=100)
    finish(writer)
    turn = [*prompt, *writer.answers["w"], *prompt_of(1, seed=3)]
    reader = restart(engines, shape)
    stored = (len(prompt) + 99) // BLOCK_TOKENS * BLOCK_TOKENS
    assert reader.ask("r", turn) == len(turn) - stored
    finish(reader)


@pytest.fixture
def quick_recovery(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let what is tried again after a while be tried again at once."""
    limits = BreakerLimits(first_backoff_seconds=0.05, longest_backoff_seconds=0.1)
    monkeypatch.setattr(
        "kvtier_connector.vllm_adapter.secondary_tier.Breaker", functools.partial(Breaker, limits=limits)
    )
    monkeypatch.setattr("kvtier_connector.cascade.transfers.RETRY_SECONDS", 0.02)
    monkeypatch.setattr("kvtier_connector.cascade.transfers.LONGEST_RETRY_SECONDS", 0.05)


@pytest.mark.usefixtures("quick_recovery")
@pytest.mark.parametrize(("error", "cause"), [(errno.ENOSPC, "no_space"), (errno.EIO, "io")])
def test_what_could_not_be_stored_is_offered_again_and_reaches_the_volume(
    engines: Engines, error: int, cause: str
) -> None:
    fs = FailingFs(OSError(error, "no"), lambda call, _: call == "pwritev")
    fs.is_failing = False
    engine = engines.make(fs=fs)
    fs.is_failing = True
    engine.ask("r", PROMPT)
    engine.run()
    assert engines.count() == 0
    assert engine.metric("vllm:kvtier_disk_shed_stores", cause) >= 1
    assert engine.metric("vllm:kvtier_disk_store_breaker") > 0
    fs.is_failing = False
    engine.run(lambda: engines.count() == 20)
    engine.run()
    assert engines.assert_volume_holds(engine, PROMPT) == 20


@pytest.mark.usefixtures("quick_recovery")
def test_what_was_computed_before_the_janitor_permits_stores_reaches_the_volume_afterwards(
    engines: Engines, writer: SimulatedEngine
) -> None:
    rigs = engines.rigs
    engine = engines.make(live_file=str(rigs.live_file(needs_permit=True)), refresh_seconds=0.05)
    engine.add("r", LATER)
    engine.run(lambda: "r" in engine.answers)
    engine.run(lambda: engine.metric("vllm:kvtier_disk_shed_stores", "no_permit") == 8)
    rigs.permit(1 << 30)
    engine.run(lambda: engines.count() == 28)
    assert engines.assert_volume_holds(engine, LATER) == 8


def test_a_load_in_line_is_not_late_while_the_volume_answers(engines: Engines) -> None:
    class Slow(FileSystem):
        """Takes a while for each read, and is sound."""

        def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            threading.Event().wait(0.01)
            return super().preadv(fd, buffers, offset)

    shape = Shape(cpu_chunks=200)
    prompt = prompt_of(150)
    writer = engines.make(shape)
    writer.ask("w", prompt)
    writer.run()
    # Longer than the deadline as a whole.
    reader = restart(engines, shape, Slow(), load_deadline_seconds=0.6, io_processes=1)
    assert reader.ask("r", prompt) == len(prompt) - 150 * BLOCK_TOKENS
    finish(reader)
    assert reader.metric("vllm:kvtier_disk_misses", "deadline") == 0
    assert reader.metric("vllm:kvtier_disk_load_breaker") == 0


def test_after_a_reset_no_row_is_filled_while_a_store_of_before_may_still_write_it(
    engines: Engines, writer: SimulatedEngine
) -> None:
    writer.ask("later", LATER)
    writer.run()
    reader = restart(engines, Shape(cpu_chunks=14))
    reader.copies.lag = math.inf
    reader.ask("r", prompt_of(10, seed=5))
    for _ in range(3):
        reader.step()
    assert reader.copies.waiting == 1
    reader.connector.reset_cache()
    reader.add("next", LATER)
    for _ in range(20):
        reader.manager.poll()
    assert len(reader.manager.fetches) == 0
    assert reader.metric("vllm:kvtier_disk_read_blocks") == 0
    # vLLM has the worker end this store with the next step.
    reader.copies.lag = 0
    # Whether it is loaded then or computed meanwhile, each step checks the bytes.
    finish(reader)
