# SPDX-License-Identifier: Apache-2.0
"""Our scheduler stores and flushes the same, whether or not complete requests are left out of its walks."""

from __future__ import annotations

import random
from typing import Any

import pytest
from engine_fleet import Engines
from engine_parts import WINDOW_TOKENS, Shape, prompt_of

STEPS = 400
WINDOWS = {"full attention": (None,), "full attention and a sliding window": (None, WINDOW_TOKENS)}


def serve(engines: Engines, windows: tuple[int | None, ...], seed: int, *, is_plain: bool) -> tuple[list[Any], int]:
    """Serve requests that come, preempt each other, are aborted and reset; return what was ordered in each step."""
    shape = Shape(gpu_blocks=40, most_running=6, most_tokens=64, windows=windows)
    # Nothing is written: how quickly the I/O workers are would decide which rows are free.
    engine = engines.make(shape, live_file=str(engines.rigs.live_file("Bypass")))
    if is_plain:
        engine.side._complete = None
    dice = random.Random(seed)
    ordered, most_complete = [], 0
    for number in range(STEPS):
        engine.copies.lag = dice.randrange(10)
        if dice.random() < 0.2:
            params = {"max_offload_tokens": 40} if dice.random() < 0.3 else {}
            prompt = prompt_of(dice.randrange(9), seed=number)
            engine.add(f"r{number}", prompt, answer=dice.randrange(1, 60), **params)
        if (alive := sorted(engine.scheduler.requests)) and dice.random() < 0.03:
            engine.abort(dice.choice(alive))
        if number % 97 == 96:
            engine.connector.reset_cache()
        orders: Any = engine.step().kv_connector_metadata
        jobs = [
            (job.req_id, list(job.src_spec.block_ids), list(job.dst_spec.block_ids))
            for job in orders.store_jobs.values()
        ]
        ordered.append((jobs, set(orders.jobs_to_flush)))
        most_complete = max(most_complete, len(engine.side._complete or ()))
    engine.run()
    assert engine.preemptions
    assert not engine.side._complete
    return ordered, most_complete


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("windows", WINDOWS)
def test_leaving_complete_requests_out_changes_no_store_and_no_flush(engines: Engines, windows: str, seed: int) -> None:
    ordered, most_complete = serve(engines, WINDOWS[windows], seed, is_plain=False)
    assert ordered == serve(engines, WINDOWS[windows], seed, is_plain=True)[0]
    assert sum(len(jobs) for jobs, _ in ordered) > 20
    assert sum(len(flushed) for _, flushed in ordered) > 0
    assert most_complete > 1
