# SPDX-License-Identifier: Apache-2.0
"""The end of an engine: what waits to be written is written while there is time, and then given up and named."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from rig import Rigs, key, keys, wait_until
from store_faults import GatedFs

from kvtier_connector.cascade import drain
from kvtier_connector.cascade.drain import Drain
from kvtier_connector.vllm_adapter import metrics

DRAINED = "vllm:kvtier_disk_drained_blocks"


def of_blocks(call: str, path: str) -> bool:
    return call == "pwritev" and ".kvb" in path


@pytest.fixture
def slow() -> GatedFs:
    """A volume on which no write of a block comes to an end until the gate opens."""
    return GatedFs(of_blocks)


def set_seconds(made: Drain, seconds: float) -> None:
    made.__dict__["_seconds"] = seconds


def test_what_waits_to_be_written_is_written_before_the_engine_ends(rigs: Rigs, slow: GatedFs) -> None:
    rig = rigs.make(fs=slow)
    set_seconds(rig.tier.drain, 60.0)
    context = rig.begin_offload(keys(12))
    rig.finish(context)
    wait_until(lambda: slow.waiting > 0, "the volume holds up writes")
    rig.tier.drain.begin()
    rig.end_step()
    assert rig.manager.has_pending_work(), "vLLM would end the engine with blocks in its hands"
    slow.open_gate()
    rig.settle()
    rig.close()
    assert (rig.tier.drain.written, rig.tier.drain.lost) == (12, 0)
    assert rig.metric(DRAINED, metrics.WRITTEN) == 12
    assert rigs.make().serve(keys(12)).hit_blocks == 12


def test_an_engine_gives_up_what_is_not_taken(rigs: Rigs, slow: GatedFs, caplog: pytest.LogCaptureFixture) -> None:
    rigs.write(keys(4, first=100))
    rig = rigs.make(fs=slow, min_reuse=1)
    rig.finish(rig.begin_offload(keys(12)))
    wait_until(lambda: slow.waiting > 0, "the volume holds up writes")
    set_seconds(rig.tier.drain, 0.05)
    rig.tier.drain.begin()
    rig.settle()
    # A second signal buys no time.
    rig.tier.drain.begin()
    rig.offload(keys(1, first=50), "late")
    assert rig.serve(keys(4, first=100)).hit_blocks == 4
    rig.close()
    slow.open_gate()
    assert (rig.tier.drain.written, rig.tier.drain.lost) == (0, 13)
    assert rig.metric(DRAINED, metrics.LOST) == 13
    assert rig.metric("vllm:kvtier_disk_shed_stores", metrics.SHUTDOWN) == 13
    assert "0 blocks written, 13 lost" in caplog.text


def test_what_was_not_written_before_is_offered_again_at_once(rigs: Rigs) -> None:
    fs = GatedFs(of_blocks)
    rig = rigs.make(fs=fs, chunks=64)
    set_seconds(rig.tier.drain, 60.0)
    # Half of the CPU tier waits: what comes then is not written.
    for number in range(4):
        rig.finish(rig.begin_offload(keys(12, first=12 * number), f"writer-{number}"))
    shed = rig.metric("vllm:kvtier_disk_shed_stores", metrics.QUEUE_FULL)
    assert shed > 0
    rig.tier.drain.begin()
    fs.open_gate()
    rig.settle()
    assert rig.tier.drain.lost == 0
    rig.close()
    assert rigs.make().serve(keys(48)).hit_blocks == 48


def test_most_of_the_time_that_vllm_leaves_is_for_writing_and_enough_for_the_end() -> None:
    assert drain.seconds_to_write(60) == 48
    assert drain.seconds_to_write(10) == 5
    assert drain.seconds_to_write(0) == 0


@pytest.fixture
def heard() -> Iterator[list[int]]:
    found: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: found.append(number))
    yield found
    signal.signal(signal.SIGTERM, before)


def in_a_thread(function: Callable[[], None]) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(function).result()


def test_each_signal_reaches_vllm_and_the_first_one_alone_begins_the_drain(heard: list[int]) -> None:
    of_vllm = signal.getsignal(signal.SIGTERM)
    made = Drain(0.1, metrics.Stats(), name="ns/tier")
    made.watch()
    os.kill(os.getpid(), signal.SIGTERM)
    assert made.is_begun
    wait_until(lambda: made.is_over, "the time is over")
    os.kill(os.getpid(), signal.SIGTERM)
    assert made.is_over
    assert heard == [signal.SIGTERM] * 2
    made.close()
    assert signal.getsignal(signal.SIGTERM) is of_vllm


@pytest.mark.parametrize("is_watching", [True, False])
@pytest.mark.usefixtures("heard")
def test_signals_stay_as_vllm_has_them_where_it_listens_to_none_or_later_otherwise(*, is_watching: bool) -> None:
    made = Drain(60, metrics.Stats(), name="ns/tier")
    if is_watching:
        made.watch()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if is_watching:
        made.close()
    else:
        made.watch()
        in_a_thread(made.watch)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def lost_since(stats: metrics.Stats) -> float:
    taken = stats.take().data["data"].get(DRAINED, {})
    return sum(value for labels, value in taken.items() if metrics.LOST in labels)


def test_what_was_lost_and_is_written_after_all_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    stats = metrics.Stats()
    made = Drain(0, stats, name="ns/tier")
    made.begin()
    made.note(key(1), is_written=False)
    made.note(key(2), is_written=False)
    made.tell()
    assert lost_since(stats) == 2
    made.note(key(1), is_written=True)
    made.tell()
    assert lost_since(stats) == 0
    for number in range(3, 8):
        made.note(key(number), is_written=False)
        made.tell()
    assert lost_since(stats) == 4
    made.close()
    made.close()
    told = [each for each in caplog.messages if "drained in" in each]
    assert len(told) == 2
    assert "0 blocks written, 2 lost" in told[0]
    assert "1 blocks written, 6 lost" in told[1]
