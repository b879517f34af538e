# SPDX-License-Identifier: Apache-2.0
"""What is loaded and what is computed where the volume or the engine has a queue."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Sequence

import pytest
from rig import Rigs, keys, note_positions, wait_until
from test_admission import Engine
from vllm.v1.kv_offload.base import OffloadKey, ReqContext

from kvtier_connector.cascade.admission import PROBE_EVERY, Verdict
from kvtier_connector.store.fs import FileSystem


def crowd(engine: Engine, arrivals: int, every_seconds: float, chunks: int = 16) -> list[float]:
    """Have requests with hits arrive one after the other; return how long each waits for its first token."""
    clock = engine.clock
    start = loaded_by = computed_by = clock()
    waits = []
    landing: list[tuple[float, int]] = []
    starting: list[tuple[float, str]] = []

    def until(moment: float) -> None:
        while landing and landing[0][0] <= moment:
            clock.seconds, job = landing.pop(0)
            engine.end(job, chunks, landed=chunks)
        while starting and starting[0][0] <= moment:
            clock.seconds, name = starting.pop(0)
            engine.admission.begin_compute(name)
        clock.seconds = moment

    for number in range(arrivals):
        until(start + number * every_seconds)
        if engine.choose(chunks, str(number)).may_load:
            engine.begin(number, chunks)
            done = loaded_by = max(loaded_by, clock()) + chunks * engine.load_seconds
            landing.append((done, number))
        else:
            starting.append((max(computed_by, clock()), str(number)))
            done = computed_by = max(computed_by, clock()) + chunks * engine.compute_seconds
        waits.append(done - clock())
    until(max(loaded_by, computed_by))
    return waits


def seen(engine: Engine, *sizes: int) -> Engine:
    """Let an engine know the pace of the volume and its own."""
    for number, chunks in enumerate(sizes):
        engine.compute(f"cold {number}", chunks)
        engine.load(chunks)
    return engine


@pytest.mark.parametrize(("load_seconds", "compute_seconds"), [(0.01, 0.013), (0.013, 0.01)])
def test_where_requests_ask_for_more_than_the_volume_gives_the_engine_does_the_rest(
    load_seconds: float, compute_seconds: float
) -> None:
    engine = Engine()
    engine.load_seconds, engine.compute_seconds = load_seconds, compute_seconds
    # Each way alone would be busy half as long again as requests take to come.
    waits = crowd(seen(engine, 16, 32, 64, 128, 256), arrivals=100, every_seconds=16 * 0.008)
    alone = 16 * max(load_seconds, compute_seconds)
    assert max(waits) < 3 * alone
    assert min(engine.verdicts[Verdict.LOAD], engine.verdicts[Verdict.COMPUTE]) > 15


def test_one_after_the_other_all_go_the_quicker_way() -> None:
    engine = Engine()
    engine.load_seconds, engine.compute_seconds = 0.01, 0.013
    crowd(seen(engine, 16, 32), arrivals=20, every_seconds=1.0)
    assert engine.verdicts == {Verdict.LOAD: 20}


def test_what_others_have_ordered_is_waited_for() -> None:
    engine = Engine()
    engine.load_seconds = 0.03
    seen(engine, 16)
    assert engine.choose(16) is Verdict.COMPUTE
    engine.begin(100, 16)
    assert engine.admission.decide("waits", 16, 16, to_read=0, queued=16) is Verdict.LOAD


def test_a_queue_longer_than_any_before_is_judged_by_the_longest_that_was_measured() -> None:
    engine = seen(Engine(), 16)
    engine.begin(100, 512)
    assert engine.choose(16) is Verdict.COMPUTE
    engine.clock.seconds += 5.12
    engine.end(100, 512, landed=512)
    engine.begin(101, 8)
    engine.load_seconds = 0.001
    engine.clock.seconds += 0.008
    engine.end(101, 8, landed=8)
    assert engine.choose(8) is Verdict.LOAD


def test_hits_that_an_engine_computes_at_once_are_no_queue() -> None:
    engine = Engine()
    engine.load_seconds, engine.compute_seconds = 2.0 / 4, 0.092 / 4
    seen(engine, 4)
    for number in range(400):
        verdict = engine.choose(4, f"hit {number}")
        engine.admission.begin_compute(f"hit {number}")
        engine.admission.end_step()
        assert not verdict.may_load
        engine.clock.seconds += 1 / 40


def test_a_request_that_ends_before_it_is_scheduled_leaves_no_queue() -> None:
    engine = Engine()
    engine.load_seconds = 0.03
    seen(engine, 16)
    for number in range(100):
        assert engine.choose(16, str(number)) is Verdict.COMPUTE or number > 2
        engine.admission.end_request(str(number))
    assert engine.choose(16, "last") is Verdict.COMPUTE


def test_a_queue_that_was_slow_once_is_tried_again_by_one_request_in_many() -> None:
    engine = Engine()
    engine.load_seconds, engine.compute_seconds = 0.005, 0.02
    seen(engine, 16)
    engine.begin(1, 16)
    engine.begin(2, 16)
    engine.clock.seconds += 16 * engine.load_seconds
    engine.end(1, 16, landed=16)
    engine.clock.seconds += 3.0
    engine.end(2, 16, landed=16)

    def second_of_a_pair() -> Verdict:
        engine.clock.seconds += 30.0
        engine.begin(1, 16)
        verdict = engine.choose(16)
        if verdict.may_load:
            engine.begin(2, 16)
        for job in (1, 2) if verdict.may_load else (1,):
            engine.clock.seconds += 16 * engine.load_seconds
            engine.end(job, 16, landed=16)
        return verdict

    verdicts = [second_of_a_pair() for _ in range(2 * PROBE_EVERY)]
    assert verdicts[: PROBE_EVERY - 1] == [Verdict.COMPUTE] * (PROBE_EVERY - 1)
    assert verdicts[PROBE_EVERY - 1] is Verdict.LOAD_PROBE
    assert set(verdicts[PROBE_EVERY:]) == {Verdict.LOAD}


def test_only_a_queue_is_said_to_be_in_the_way() -> None:
    engine = seen(Engine(), 16, 64)
    admission = engine.admission
    assert admission.is_queue_in_the_way(16, to_read=16, queued=64)
    assert not admission.is_queue_in_the_way(16, to_read=16, queued=0)
    assert not admission.is_queue_in_the_way(16, to_read=0, queued=64)
    engine.load_seconds = 0.03
    for _ in range(20):
        engine.load(16)
    assert engine.choose(16) is Verdict.COMPUTE
    assert not admission.is_queue_in_the_way(16, to_read=16, queued=64)


def test_an_admission_that_is_not_cost_aware_loads_behind_a_queue_of_any_length() -> None:
    engine = seen(Engine(is_cost_aware=False), 16, 512)
    engine.begin(100, 512)
    assert engine.choose(16) is Verdict.LOAD


class Gated(FileSystem):
    """A volume that gives no block while its gate is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        assert self.gate.wait(60)
        return super().preadv(fd, buffers, offset)


def test_a_request_before_which_there_is_a_queue_is_decided_when_its_turn_comes(rigs: Rigs) -> None:
    rigs.write(keys(8 * 6))
    volume = Gated()
    rig = rigs.make(chunks=200, fs=volume)
    admission = rig.tier.admission
    # Three of these prompts are read in less time than one is computed in.
    for blocks in (8, 16, 32, 64):
        admission._loading.observe(blocks, blocks * 0.01, time.monotonic())
        admission._computing.observe(blocks, blocks * 0.03, time.monotonic())
    prompts = [(rig.request(f"r{number}"), keys(8, first=8 * number)) for number in range(6)]

    def is_known(context: ReqContext, wanted: Sequence[OffloadKey]) -> bool:
        rig.end_step()
        return rig.manager.match_prefix(wanted, context).unknown is None

    for context, wanted in prompts:
        note_positions(context, wanted)
        wait_until(functools.partial(is_known, context, wanted), "it is known")
    volume.gate.clear()
    for context, wanted in prompts:
        rig.manager.read_ahead(wanted, context)
    verdicts = [rig.manager.request(context).verdict for context, _ in prompts]
    assert verdicts == [Verdict.LOAD] * 3 + [None] * 3

    *_, (waits, wanted), (comes, others) = prompts
    assert rig.find_prefix(others, comes) == 0
    assert rig.manager.request(comes).verdict is Verdict.COMPUTE
    volume.gate.set()
    wait_until(lambda: rig.end_step() or not rig.tier.transfers.loading, "the queue is gone")
    assert rig.find_prefix(wanted, waits) == 8
    assert rig.manager.request(waits).verdict is Verdict.LOAD
    for context, _ in prompts:
        rig.finish(context)
    rig.settle()
