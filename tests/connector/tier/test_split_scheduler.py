# SPDX-License-Identifier: Apache-2.0
"""Split hits with vLLM's scheduler and our connector: the head is computed while the tail is read, and they join."""

from __future__ import annotations

import itertools
import logging
import math
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from engine_fleet import Engines
from engine_parts import BLOCK_TOKENS, IMAGE_TOKENS, FixedRate, Shape, answer_of, prompt_of
from engine_rig import SimulatedEngine
from rig import keys, wait_until
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.sched.request_queue import SchedulingPolicy, create_request_queue
from vllm.v1.engine import EngineCoreEventType
from vllm.v1.kv_offload.base import ReqContext
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.metrics.stats import IterationStats
from vllm.v1.request import Request
from waiting import Clock

from kvtier_connector.cascade.fetch import NO_ROW, Load
from kvtier_connector.cascade.rates import STALLED_SECONDS, Rates
from kvtier_connector.cascade.split import Split, Splits
from kvtier_connector.store.fs import FileSystem

TABLES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
SHAPE = Shape(is_splitting=True, most_tokens=64)
CHUNKS = 14
PROMPT, OTHER = prompt_of(CHUNKS), prompt_of(CHUNKS, seed=1)


class PacedFs(FileSystem):
    """A volume that gives one block for each `give`, in the order in which they are asked for."""

    def __init__(self) -> None:
        self.is_paced = False
        self._count, self._numbers, self._changed = 0, itertools.count(1), threading.Condition()

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if self.is_paced and sum(map(len, buffers)) > 4096:
            with self._changed:
                number = next(self._numbers)
                self._changed.wait_for(lambda: self._count >= number, 120)
        return super().preadv(fd, buffers, offset)

    def give(self, count: int = 1) -> None:
        with self._changed:
            self._count += count
            self._changed.notify_all()

    def give_all(self) -> None:
        self.is_paced = False
        self.give(1000)


@pytest.fixture
def fs() -> Iterator[PacedFs]:
    made = PacedFs()
    yield made
    made.give_all()


def run_paced(engine: SimulatedEngine, fs: PacedFs, *names: str) -> None:
    """Step until requests are answered, see `run_paced_until`."""
    run_paced_until(engine, fs, lambda: engine.answers.keys() >= set(names))


def run_paced_until(engine: SimulatedEngine, fs: PacedFs, until: Callable[[], bool]) -> None:
    """Step until a condition holds, with one block of the volume for each step."""
    while not until():
        engine.step()
        give_one(engine, fs)


def give_one(engine: SimulatedEngine, fs: PacedFs) -> None:
    if engine.tier.transfers.loading:
        landed = engine.take_landed()
        fs.give()
        wait_until(lambda: engine.take_landed() > landed, "a block has been read")


def begin(engine: SimulatedEngine, name: str, prompt: Sequence[int], **params: Any) -> None:
    """Have a request arrive, and step until something of it is computed."""
    engine.add(name, prompt, **params)
    engine.run(lambda: engine.computed[name] > 0)


def finish(engine: SimulatedEngine, fs: PacedFs) -> None:
    """Have everything read, and step until nothing is left."""
    fs.give_all()
    engine.run()
    engine.assert_nothing_is_left()


def second_engine(
    engines: Engines, fs: PacedFs, prompt: Sequence[int], shape: Shape = SHAPE, *others: Sequence[int]
) -> SimulatedEngine:
    """Return an engine on a volume that another one has stored prompts on, and that is paced from now on."""
    # No store of it is shed, however slowly it is written.
    first = engines.make(replace(shape, cpu_chunks=4 * SHAPE.cpu_chunks), fs=fs)
    for number, each in enumerate((prompt, *others)):
        first.ask(f"stores {number}", each)
    first.run()
    assert engines.assert_volume_holds(first, prompt) == CHUNKS
    first.close()
    # Where heads and tails meet depends on blocks and steps, and not on how fast this machine is or workers are.
    second = engines.make(shape, fs=fs, io_processes=1)
    second.wait_until_attached()
    wait_until(lambda: second.take_landed() == 0 and second.tier.attachment.lookups.is_ready, "lookups are answered")
    fs.is_paced = True
    second.tier.rates.volume.observe = lambda *_: None  # type: ignore[method-assign]  # of this engine only
    return second


@pytest.fixture
def second(engines: Engines, fs: PacedFs) -> SimulatedEngine:
    return second_engine(engines, fs, PROMPT)


def test_a_head_and_a_tail_meet_and_the_answer_is_the_computed_one(
    engines: Engines, fs: PacedFs, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "vllm.kvtier.request")
    second = second_engine(engines, fs, PROMPT)
    second.add("reads", PROMPT)
    run_paced(second, fs, "reads")
    assert 0 < second.computed["reads"] < len(PROMPT)
    assert second.metric("vllm:kvtier_disk_split_joins") == 1
    lookup, end = [text for text in caplog.messages if " request=reads " in text]
    assert f" volume={CHUNKS * BLOCK_TOKENS} way=split " in lookup
    joined = re.search(r" loaded=(\d+) computed=(\d+) joined=(\d+)@", end)
    head = second.computed["reads"] - (len(PROMPT) - CHUNKS * BLOCK_TOKENS)
    assert joined.groups() == (str(CHUNKS * BLOCK_TOKENS - head), str(second.computed["reads"]), str(head))


def test_a_volume_that_hangs_in_the_middle_costs_nothing_but_its_chunks(
    fs: PacedFs, second: SimulatedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier_connector.cascade.rates.STALLED_SECONDS", STALLED_SECONDS)
    second.add("computes", PROMPT)
    second.wait_for_lookup()
    fs.give(2)
    second.run(lambda: "computes" in second.answers, most_steps=4 * CHUNKS * BLOCK_TOKENS)
    assert second.answers["computes"] == answer_of(PROMPT, 1)
    assert second.computed["computes"] >= len(PROMPT) - 2 * BLOCK_TOKENS


def test_a_hit_of_a_volume_that_hung_is_computed_in_steps_as_long_as_any(second: SimulatedEngine) -> None:
    rates = second.tier.rates
    rates.prefill.value, rates.volume.value, rates.has_hung = 1000.0, 0.0, True
    begin(second, "computes", PROMPT)
    assert second.computed["computes"] == SHAPE.most_tokens
    second.run(lambda: "computes" in second.answers)
    assert second.answers["computes"] == answer_of(PROMPT, 1)


@pytest.mark.parametrize(("chunks", "is_hanging"), TABLES["ends"].values(), ids=TABLES["ends"])
def test_a_prompt_that_was_split_is_in_the_cpu_tier_afterwards(
    engines: Engines, fs: PacedFs, monkeypatch: pytest.MonkeyPatch, chunks: int, *, is_hanging: bool
) -> None:
    for name in ("FIRST_WINDOW_CHUNKS", "LEAST_WINDOW_CHUNKS"):
        # Otherwise all of a hit so short is ordered at once, and lands.
        monkeypatch.setattr(f"kvtier_connector.cascade.split.{name}", 2)
    monkeypatch.setattr("kvtier_connector.cascade.rates.STALLED_SECONDS", STALLED_SECONDS)
    prompt = prompt_of(chunks, seed=1)
    second = second_engine(engines, fs, prompt_of(CHUNKS), SHAPE, prompt)
    if chunks > CHUNKS:
        second.manager.splits.head_tokens = second.manager.splits.least_head_tokens = SHAPE.most_tokens
    second.add("splits", prompt)
    if not is_hanging:
        run_paced(second, fs, "splits")
    second.run(lambda: "splits" in second.answers)
    finish(second, fs)
    wait_until(lambda: second.take_landed() >= 0 and not second.tier.transfers.loading, "reads have ended")
    assert second.computed["splits"] > chunks * BLOCK_TOKENS // 2
    second.scheduler.reset_prefix_cache()
    assert (second.ask("again", prompt) < BLOCK_TOKENS) is (chunks == CHUNKS)
    second.run()
    second.assert_nothing_is_left()


def with_one_chunk_heads(engine: SimulatedEngine) -> SimulatedEngine:
    engine.manager.splits.head_tokens = engine.manager.splits.least_head_tokens = BLOCK_TOKENS
    return engine


def test_a_tail_may_exceed_the_cpu_tier(engines: Engines, fs: PacedFs, caplog: pytest.LogCaptureFixture) -> None:
    second = with_one_chunk_heads(second_engine(engines, fs, PROMPT, replace(SHAPE, cpu_chunks=10)))
    second.add("reads", PROMPT, answer=5)
    while "reads" not in second.answers:
        second.step()
        for _ in range(8):
            give_one(second, fs)
    assert second.computed["reads"] < len(PROMPT) - 5 * BLOCK_TOKENS
    assert "cannot store" not in caplog.text
    second.run()
    second.assert_nothing_is_left()


@pytest.mark.parametrize("is_over", ["aborted", "reset", "reset with the connector"])
def test_no_block_is_computed_in_while_a_tail_is_copied_to_it(engines: Engines, fs: PacedFs, is_over: str) -> None:
    second = with_one_chunk_heads(second_engine(engines, fs, PROMPT, replace(SHAPE, gpu_blocks=CHUNKS + 3), OTHER))
    second.copies.lag = math.inf
    second.add("ends", PROMPT, answer=BLOCK_TOKENS)
    run_paced_until(second, fs, lambda: second.copies.waiting > 0 or "ends" in second.answers)
    fs.give_all()
    if is_over == "aborted":
        second.abort("ends")
    else:
        second.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector="connector" in is_over)
    begin(second, "computes", OTHER, kvtier_load=False)
    second.copies.lag = 0
    second.run()
    assert second.answers["computes"] == answer_of(OTHER, 1)
    assert is_over == "aborted" or second.answers["ends"] == answer_of(PROMPT, BLOCK_TOKENS)
    second.assert_nothing_is_left()


def test_a_load_that_begins_when_a_tail_is_given_back_lacks_what_could_not_be_read(
    engines: Engines, fs: PacedFs
) -> None:
    second = with_one_chunk_heads(second_engine(engines, fs, PROMPT))
    second.add("splits", PROMPT)
    run_paced_until(second, fs, lambda: second.scheduler._splits.count_blocks() > 1)
    engines.file_of(second, PROMPT, 5).write_bytes(b"")
    second.scheduler.reset_prefix_cache(reset_running_requests=True)
    finish(second, fs)
    assert second.answers["splits"] == answer_of(PROMPT, 1)


def test_a_request_preempted_in_the_step_that_copies_gives_back_its_blocks(engines: Engines, fs: PacedFs) -> None:
    others = {f"answers {seed}": prompt_of(0, seed=seed) for seed in (1, 2, 3)}
    second = with_one_chunk_heads(second_engine(engines, fs, PROMPT, replace(SHAPE, gpu_blocks=CHUNKS + 5)))
    for name, each in others.items():
        last = second.add(name, each, answer=40)
    second.run(lambda: last.num_computed_tokens == 13)
    second.add("splits", PROMPT)
    second.wait_for_lookup()
    second.run(lambda: second.computed["splits"] > 0)
    # With the next step all of them need another block.
    second.run(lambda: last.num_computed_tokens % BLOCK_TOKENS == 0)
    for _ in range(CHUNKS - second.computed["splits"] // BLOCK_TOKENS - 1):
        give_one(second, fs)
    assert second.step().preempted_req_ids
    finish(second, fs)
    assert all(second.answers[name] == answer_of(each, 40) for name, each in others.items())
    assert second.answers["splits"] == answer_of(PROMPT, 1)


def test_a_tail_is_copied_to_no_block_that_a_store_still_reads(engines: Engines, fs: PacedFs) -> None:
    prompt, other = prompt_of(CHUNKS), prompt_of(6, seed=1)
    second = with_one_chunk_heads(second_engine(engines, fs, prompt, replace(SHAPE, gpu_blocks=CHUNKS + 3)))
    begin(second, "splits", prompt)
    second.add("stores", other, kvtier_load=False)
    second.step()
    for _ in range(CHUNKS - 3):
        give_one(second, fs)
    second.run(lambda: "stores" in second.answers)
    second.step()
    finish(second, fs)
    assert second.answers["splits"] == answer_of(prompt, 1)
    assert engines.assert_volume_holds(second, other) == 6


def add_urgent(engine: SimulatedEngine, prompt: Sequence[int], *, kvtier_load: bool = False) -> None:
    """Have a request arrive that goes before all others."""
    scheduler = engine.scheduler
    waiting, scheduler.policy = list(scheduler.waiting), SchedulingPolicy.PRIORITY
    scheduler.waiting, scheduler.kv_holding_waiting = map(create_request_queue, [scheduler.policy] * 2)
    for each in waiting:
        scheduler.waiting.add_request(each)
    scheduler.waiting.remove_request(urgent := engine.add("urgent", prompt, kvtier_load=kvtier_load))
    urgent.priority = -1
    scheduler.waiting.add_request(urgent)


def test_a_request_that_joins_and_cannot_run_keeps_no_block(engines: Engines, fs: PacedFs) -> None:
    second = with_one_chunk_heads(second_engine(engines, fs, PROMPT, replace(SHAPE, gpu_blocks=CHUNKS + 7)))
    begin(second, "splits", PROMPT)
    add_urgent(second, prompt_of(CHUNKS + 5, seed=1))
    run_paced_until(second, fs, lambda: second.metric("vllm:kvtier_disk_split_joins") == 1)
    finish(second, fs)


def test_another_request_finds_the_tail_in_the_step_of_the_join(engines: Engines, fs: PacedFs) -> None:
    second = with_one_chunk_heads(second_engine(engines, fs, PROMPT, replace(SHAPE, most_running=1)))
    begin(second, "splits", PROMPT)
    second.copies.lag = math.inf
    other = [*PROMPT, *prompt_of(1, seed=4)]
    add_urgent(second, other)
    run_paced_until(second, fs, lambda: second.computed["urgent"] > 0)
    assert second.metric("vllm:kvtier_disk_split_joins") == 1
    assert second.computed["urgent"] < len(PROMPT)
    second.copies.lag = 0
    finish(second, fs)
    assert second.answers == {"urgent": answer_of(other, 1), "splits": answer_of(PROMPT, 1)}


@pytest.mark.parametrize("most_wait", [1.0, -1e9], ids=["copied in this step", "copied before"])
def test_a_request_that_joins_is_computed_anew_where_the_weights_were_replaced(
    fs: PacedFs, second: SimulatedEngine, monkeypatch: pytest.MonkeyPatch, most_wait: float
) -> None:
    with_one_chunk_heads(second)
    second.side.most_wait_seconds, second.side.copying.value = most_wait, 1e18
    second.add("answers", prompt_of(0), answer=100)
    join = second.scheduler._join

    def replace_and_join(*args: Any) -> None:
        second.fill_weights(7)
        join(*args)

    monkeypatch.setattr(second.scheduler, "_join", replace_and_join)
    second.add("joins", PROMPT)
    run_paced_until(second, fs, lambda: second.metric("vllm:kvtier_disk_split_joins") == 1)
    finish(second, fs)
    assert second.computed["joins"] > len(PROMPT)


def test_chunks_of_a_tail_that_left_the_cpu_tier_are_ordered_anew(engines: Engines) -> None:
    engine = engines.make(SHAPE)
    split = Split(ReqContext(req_id="splits"), keys(CHUNKS), 0, BLOCK_TOKENS, 0, ordered=5, ready=3, handed=1)
    assert (engine.manager.take_tail(split), split.ordered, split.ready, split.handed) == ((set(), []), 1, 1, 1)


def test_others_compute_while_the_end_of_a_tail_is_copied_and_none_takes_the_seat(
    engines: Engines, fs: PacedFs
) -> None:
    second = with_one_chunk_heads(second_engine(engines, fs, PROMPT, replace(SHAPE, most_running=2)))
    second.side.most_wait_seconds, second.side.copying.value = -1e9, 1e18
    second.copies.lag = 3
    second.add("answers", prompt_of(0), answer=100)
    second.add("reads", PROMPT)
    second.wait_for_lookup()
    second.add("waits for a seat", prompt_of(1, seed=2))
    steps = []
    while "reads" not in second.answers:
        output = second.step()
        steps.append("reads" in output.num_scheduled_tokens)
        assert "answers" in output.num_scheduled_tokens
        give_one(second, fs)
    assert steps[-3:] == [False, False, True]
    assert second.answers.keys() == {"reads"}
    fs.give_all()
    assert second.metric("vllm:kvtier_disk_split_joins") == 1
    second.run()
    second.assert_nothing_is_left()


def test_a_request_joins_at_once_where_all_others_wait_for_it(engines: Engines, fs: PacedFs) -> None:
    second = with_one_chunk_heads(second_engine(engines, fs, PROMPT, SHAPE))
    second.side.most_wait_seconds, second.side.copying.value = -1e9, 1e18
    second.copies.lag = 3
    other = [*PROMPT, *prompt_of(1, seed=4)]
    second.add("reads", PROMPT)
    run_paced_until(second, fs, lambda: second.computed["reads"] > 0)
    second.add("shares", other)
    second.wait_for_lookup()
    second.step()
    fs.give_all()
    wait_until(lambda: second.take_landed() >= 0 and not second.tier.transfers.loading, "all is read")
    while "shares" not in second.answers:
        assert second.step().total_num_scheduled_tokens, "each step computes"
    assert second.metric("vllm:kvtier_disk_split_joins") == 1
    second.run()
    assert second.answers == {"reads": answer_of(PROMPT, 1), "shares": answer_of(other, 1)}
    second.assert_nothing_is_left()


@pytest.mark.parametrize(
    ("prefill", "storing", "chunks"), [(1e-3, 1.0, 1e3), (1e9, 1500.0, 3.0), (1e9, 1e-3, 1.0), (1e9, 0.0, math.inf)]
)
def test_a_step_begins_stores_that_are_copied_while_it_computes(
    engines: Engines, prefill: float, storing: float, chunks: float
) -> None:
    engine = engines.make(SHAPE)
    engine.add("stores", prompt_of(2), answer=8)
    while not engine.step().num_scheduled_tokens:
        engine.wait_for_lookup()
    engine.tier.rates.prefill, engine.side._storing = FixedRate(prefill), FixedRate(storing * engine.side._worker_bytes)
    assert engine.step().kv_connector_metadata.store_chunks == pytest.approx(chunks)


@pytest.mark.parametrize("flushed", [False, True])
@pytest.mark.parametrize("windows", [(None,), (None, 2 * BLOCK_TOKENS)])
def test_stores_that_take_longer_than_a_step_are_copied_in_parts(
    engines: Engines, windows: tuple[int | None, ...], *, flushed: bool
) -> None:
    engine = engines.make(replace(SHAPE, windows=windows, is_splitting=False, blocks_per_chunk=2))
    engine.side._storing = FixedRate(1.0)
    submit, sizes = engine.copies.submit_store, list[int]()
    engine.copies.submit_store = lambda *order: sizes.append(len(order[2].block_ids)) or submit(*order)  # type: ignore[method-assign]  # it calls the real one
    engine.add("stores", prompt_of(8), answer=12)
    engine.run(lambda: bool(sizes))
    if flushed:
        engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    engine.run()
    # Parts of one request alone, and only while there is time.
    assert (max(sizes) == 1) is (len(windows) == 1 and not flushed)
    assert engine.metric("vllm:kvtier_disk_written_blocks") >= len(sizes) // 2
    engine.assert_nothing_is_left()


@pytest.mark.parametrize("is_held", [True, False])
@pytest.mark.parametrize("windows", [(None,), (None, 2 * BLOCK_TOKENS)])
def test_no_zeroed_block_is_stored(engines: Engines, windows: tuple[int | None, ...], *, is_held: bool) -> None:
    engine = engines.make(Shape(windows=windows, gpu_blocks=40 * len(windows), cpu_chunks=256, is_zeroing=True))
    engine.tier.rates.prefill, engine.side._storing = FixedRate(1e12), FixedRate(float(is_held))
    engine.add("answers on", prompt_of(2, seed=3), answer=40)
    engine.run(lambda: engine.computed.get("answers on", 0) > 0)
    engine.add("first", prompt_of(16, seed=1), answer=3 if is_held else 1)
    if is_held:
        engine.run(lambda: "first" in engine.answers)
        engine.step()
    engine.add("second", prompt_of(34, seed=2), answer=1)
    engine.run()
    for seed, chunks in ((1, 16), (2, 34)):
        engines.assert_volume_holds(engine, prompt_of(chunks, seed=seed))


@pytest.mark.parametrize("is_splitting", [True, False])
def test_users_see_reads_as_cached_and_no_preemption(engines: Engines, fs: PacedFs, *, is_splitting: bool) -> None:
    second = second_engine(engines, fs, PROMPT, replace(SHAPE, log_stats=True, is_splitting=is_splitting))
    second.add("reads", PROMPT)
    run_paced(second, fs, "reads")
    cached = len(PROMPT) - second.computed["reads"]
    assert 0 < cached < len(PROMPT)
    seen, sources = IterationStats(), Counter[CacheHitSource]()
    outputs = [each for told in second.told for each in told.outputs]
    for each in outputs:
        if each.prefill_stats is not None:
            seen.prompt_token_stats.update_from_output(each.prefill_stats)
        for event in each.events or ():
            seen.num_preempted_reqs += event.type is EngineCoreEventType.PREEMPTED
    for told in second.told:
        if told.scheduler_stats and (stats := told.scheduler_stats.connector_prefix_cache_stats):
            sources.update(stats.hits_by_source)
    assert any(each.events for each in outputs)
    assert seen.num_preempted_reqs == 0
    assert (seen.prompt_token_stats.external_kv_transfer, seen.prompt_token_stats.local_cache_hit) == (cached, 0)
    assert sources == {CacheHitSource.DISK: cached}


def test_requests_that_share_a_prefix_share_one_split(fs: PacedFs, second: SimulatedEngine) -> None:
    second.add("splits", PROMPT)
    second.step()
    others = {"shares all": PROMPT, "shares one chunk": [*PROMPT[:BLOCK_TOKENS], *prompt_of(3, seed=1)]}
    for name, each in others.items():
        second.add(name, each)
    run_paced(second, fs, "splits", *others)
    assert all(second.answers[name] == answer_of(each, 1) for name, each in others.items())
    assert second.computed["shares all"] < len(PROMPT) - second.computed["splits"] + BLOCK_TOKENS


@pytest.mark.parametrize("has_waited", [False, True])
@pytest.mark.parametrize(("others", "chunks"), [((), 1), ((PROMPT, PROMPT), CHUNKS // 2), ((PROMPT, OTHER), 1)])
def test_steps_of_a_head_are_long_where_all_others_wait_for_it(
    engines: Engines, fs: PacedFs, others: Sequence[Sequence[int]], chunks: int, *, has_waited: bool
) -> None:
    second = with_one_chunk_heads(second_engine(engines, fs, PROMPT, replace(SHAPE, most_tokens=2 * len(PROMPT))))
    second.tier.rates.prefill, second.tier.rates.volume = FixedRate(1e6), FixedRate(1.0)
    for number, prompt in enumerate((PROMPT, *others)):
        second.add(f"{number}", prompt)
    if has_waited:
        # For the answers, in a step before.
        second.side._waits = {f"{number}": lambda: True for number in range(1 + len(others))}
    wait_until(lambda: second.take_landed() == 0 and not second.tier.lookups.is_open, "all is looked up")
    second.step()
    assert second.computed["0"] == chunks * BLOCK_TOKENS


def test_a_request_whose_wait_is_over_is_not_held_up_by_long_steps(
    engines: Engines, fs: PacedFs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "CHUNKS", 100)
    prompt = prompt_of(100)
    other = [*prompt[: 12 * BLOCK_TOKENS], *prompt_of(3, seed=9)]
    shape = replace(SHAPE, most_tokens=8 * BLOCK_TOKENS, cpu_chunks=256, gpu_blocks=512)
    second = second_engine(engines, fs, prompt, shape)
    second.tier.rates.prefill, second.tier.rates.volume = FixedRate(1000.0), FixedRate(50.0)
    second.add("splits", prompt)
    second.wait_for_lookup()
    second.step()
    second.add("shares", other)
    second.wait_for_lookup()
    second.run(lambda: "shares" in second.answers)
    assert second.computed["splits"] < len(prompt) // 2
    assert second.answers["shares"] == answer_of(other, 1)


def test_the_gpu_is_not_searched_for_a_request_that_waits_for_another(
    fs: PacedFs, second: SimulatedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    searched: Counter[str] = Counter()
    search = second.scheduler.kv_cache_manager.get_computed_blocks

    def count(request: Request, *limit: Any) -> Any:
        searched[request.request_id] += 1
        return search(request, *limit)

    monkeypatch.setattr(second.scheduler.kv_cache_manager, "get_computed_blocks", count)
    second.add("splits", PROMPT)
    second.add("shares", PROMPT)
    run_paced(second, fs, "splits", "shares")
    assert second.answers["shares"] == answer_of(PROMPT, 1)
    assert searched["shares"] <= 3, "once it waits for a lookup, once for the split, and once for nothing"


def test_a_request_waits_for_the_chunks_of_a_split_that_it_shares_and_for_no_others() -> None:
    splits, shared = Splits(Rates(now=Clock()), lambda _: None), keys(CHUNKS)
    split = Split(ReqContext(req_id="splits"), shared, 0, BLOCK_TOKENS, 0)
    splits.begin("splits", split)
    other = ReqContext(req_id="waits")
    assert splits.wait_for(keys(1, first=50), other) is None
    assert splits.wait_for(shared, split.context) is None
    waits = [splits.wait_for(each, other) for each in ([*shared[2:4], *keys(3, first=50)], shared)]
    for computed, are_there in ((3, [False, False]), (4, [True, False]), (CHUNKS, [True, True])):
        split.computed = computed * BLOCK_TOKENS
        assert [is_there is not None and is_there() for is_there in waits] == are_there
    # A prompt that ends within the head asks for its last chunk although the GPU has it.
    assert splits.wait_for(shared[-1:], other) is None
    split.computed = 0
    splits.end("splits")
    assert all(is_there is not None and is_there() for is_there in waits)


def test_chunks_are_ordered_ahead_for_two_steps_however_long_they_are() -> None:
    rates = Rates(now=(clock := Clock(1000.0)))
    rates.volume.observe(1000 * BLOCK_TOKENS, 1.0)
    splits = Splits(rates, lambda _: None)
    split = Split(ReqContext(req_id="splits"), keys(CHUNKS), 0, BLOCK_TOKENS, 0)
    splits.begin("splits", split)
    windows = []
    for seconds in (0.05, 0.5):
        rates.note_step(2048, 0)
        clock.seconds += seconds
        rates.note_step(0, 0)
        windows.append([splits.window_chunks(split, ordered) for ordered in (0, 140, 2000)])
    # Of all hits together: those that come later are read later.
    assert windows == [[150, 10, 0], [1000, 860, 0]]


@pytest.mark.timeout(120)
def test_long_prompts_that_do_not_fit_together_are_served_one_after_the_other(engines: Engines, fs: PacedFs) -> None:
    shape = replace(SHAPE, gpu_blocks=CHUNKS * 2, cpu_chunks=CHUNKS)
    prompts = {str(seed): prompt_of(CHUNKS, seed=seed) for seed in range(6)}
    first = engines.make(shape, fs=fs)
    for name, prompt in prompts.items():
        first.ask(name, prompt)
    first.run()
    first.close()
    second = engines.make(shape, fs=fs)
    second.wait_until_attached()
    for name, prompt in prompts.items():
        second.add(name, prompt)
    second.run()
    assert all(second.answers[name] == answer_of(prompt, 1) for name, prompt in prompts.items())
    assert second.preemptions == second.metric("vllm:kvtier_disk_split_joins")
    second.assert_nothing_is_left()


def test_a_prompt_that_is_computed_begins_beside_a_head_only_if_both_fit(engines: Engines, fs: PacedFs) -> None:
    second = second_engine(engines, fs, PROMPT, replace(SHAPE, gpu_blocks=CHUNKS * 2))
    with_one_chunk_heads(second).add("splits", PROMPT)
    second.run(lambda: second.computed["splits"] > 0)
    second.add("computes", OTHER, kvtier_load=False)
    second.add("is behind it", OTHER[:40], kvtier_load=False)
    run_paced(second, fs, "splits")
    assert not second.computed["is behind it"]
    second.run()
    assert second.answers["computes"] == answer_of(OTHER, 1)
    assert second.preemptions == second.metric("vllm:kvtier_disk_split_joins") == 1


def test_a_prompt_that_waits_for_room_keeps_no_place_of_an_image(engines: Engines, fs: PacedFs) -> None:
    second = second_engine(engines, fs, PROMPT, replace(SHAPE, gpu_blocks=CHUNKS * 2))
    with_one_chunk_heads(second).scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=IMAGE_TOKENS + 10)
    second.add("has the image", prompt_of(2, seed=7), image=("A", 8), kvtier_load=False, kvtier_store=False)
    second.run()
    begin(second, "splits", PROMPT)
    second.add("waits", prompt_of(CHUNKS, seed=8), image=("A", 4), kvtier_load=False)
    second.step()
    assert not second.scheduler.encoder_cache_manager.cached["A"]
    fs.give_all()
    second.run(most_steps=500)


def test_a_session_that_goes_on_waits_for_nobody_behind_it(engines: Engines, fs: PacedFs) -> None:
    second = second_engine(engines, fs, PROMPT, replace(SHAPE, gpu_blocks=CHUNKS * 2), OTHER)
    second.add("session", prompt_of(2, seed=7), resumable=True, kvtier_load=False)
    second.run(lambda: "session" in second.answers)
    second.copies.lag, second.side.is_splitting = 4, False
    second.manager.give_up_late = lambda _: None  # type: ignore[method-assign]  # however busy the machine is
    second.add("loads", [*OTHER[: 4 * BLOCK_TOKENS], *prompt_of(9, seed=5)])
    fs.give(4)
    second.run(lambda: second.is_loading("loads"))
    second.side.is_splitting = True
    second.add("splits", PROMPT)
    second.run(lambda: len(second.scheduler._splits) == 1)
    second.add("session", prompt_of(12, seed=6), resumable=True, kvtier_load=False)
    second.run(lambda: second.computed["session"] == len(prompt_of(2)) + len(prompt_of(12)), most_steps=500)
    second.abort("session")
    fs.give_all()
    second.run(most_steps=500)


def test_a_join_does_not_ask_the_volume_again(engines: Engines, fs: PacedFs, monkeypatch: pytest.MonkeyPatch) -> None:
    second = with_one_chunk_heads(second_engine(engines, fs, PROMPT))
    begin(second, "reads", [*PROMPT[: CHUNKS * BLOCK_TOKENS], *prompt_of(3, seed=9)])
    monkeypatch.setattr("kvtier_connector.cascade.lookup.STALE_SECONDS", -1.0)
    run_paced_until(second, fs, lambda: second.metric("vllm:kvtier_disk_split_joins") == 1)
    assert not second.side._waits
    finish(second, fs)


@pytest.mark.parametrize("others", [0, 1])
def test_an_urgent_prompt_waits_for_no_head_that_waits_for_room(engines: Engines, fs: PacedFs, others: int) -> None:
    second = with_one_chunk_heads(second_engine(engines, fs, PROMPT, replace(SHAPE, gpu_blocks=CHUNKS + 8)))
    begin(second, "fills the GPU", prompt_of(9, seed=3), answer=100, kvtier_load=False)
    second.add("waits", PROMPT)
    second.run(lambda: len(second.scheduler._splits) == 1)
    fs.give_all()
    for _ in range(others):
        # It has no room either, and vLLM asks none behind it.
        second.add("is large", prompt_of(CHUNKS - 1, seed=6), kvtier_load=False).priority = -0.5
    add_urgent(second, [*PROMPT[:BLOCK_TOKENS], *prompt_of(1, seed=5)], kvtier_load=True)
    second.run(lambda: "urgent" in second.answers)
    assert second.answers.keys() == {"urgent"}
    second.run()


def test_a_session_that_waits_for_its_client_holds_up_nobody(engines: Engines, fs: PacedFs) -> None:
    second = with_one_chunk_heads(second_engine(engines, fs, PROMPT))
    second.tier.rates.prefill, second.tier.rates.volume = FixedRate(1e6), FixedRate(1.0)
    begin(second, "session", PROMPT, resumable=True)
    second.add("shares", [*PROMPT, *prompt_of(1, seed=4)])
    second.run(lambda: "session" in second.answers)
    fs.give_all()
    second.run(lambda: "shares" in second.answers, most_steps=3000)


@pytest.mark.parametrize("is_async", [False, True])
def test_what_a_request_that_joined_could_not_load_is_computed(
    engines: Engines, fs: PacedFs, *, is_async: bool
) -> None:
    longer, shape = prompt_of(CHUNKS + 6), replace(SHAPE, is_async=is_async)
    second = with_one_chunk_heads(second_engine(engines, fs, PROMPT, shape, longer))
    late = [engines.file_of(second, longer, number) for number in range(CHUNKS, CHUNKS + 6)]
    for path in late:
        path.rename(path.with_suffix(".away"))
    begin(second, "reads", longer)
    # Another pod stores what comes behind the hit, and a request of this one finds it.
    for path in late:
        path.with_suffix(".away").rename(path)
    late[2].write_bytes(b"")
    second.add("shares", longer)
    second.wait_for_lookup()
    run_paced_until(second, fs, lambda: second.metric("vllm:kvtier_disk_split_joins") == 1)
    finish(second, fs)
    assert second.answers == dict.fromkeys(("reads", "shares"), answer_of(longer, 1))


def test_a_head_that_another_request_has_computed_counts_nothing(engines: Engines, fs: PacedFs) -> None:
    second = second_engine(engines, fs, PROMPT, replace(SHAPE, gpu_blocks=CHUNKS + 6))
    second.scheduler.scheduler_config.long_prefill_token_threshold = 2 * BLOCK_TOKENS
    longer = prompt_of(CHUNKS + 2)
    second.add("computes", longer, answer=8, kvtier_load=False)
    second.step()
    second.add("waits", longer)
    second.wait_for_lookup()
    second.run(lambda: "waits" in second.answers)
    assert second.metric("vllm:kvtier_disk_split_tokens", "computed") == 0
    finish(second, fs)


def test_a_head_that_others_wait_for_goes_on_however_long_a_chunk_is(engines: Engines, fs: PacedFs) -> None:
    prompt = prompt_of(4 * CHUNKS)
    second = second_engine(engines, fs, prompt, replace(SHAPE, blocks_per_chunk=4, gpu_blocks=256))
    second.tier.rates.prefill, second.tier.rates.volume = FixedRate(1e6), FixedRate(1.0)
    begin(second, "reads", prompt)
    second.add("shares", [*prompt, *prompt_of(1, seed=4)])
    second.run(lambda: "reads" in second.answers, most_steps=2000)
    finish(second, fs)


def test_an_urgent_prompt_begins_beside_heads_that_it_goes_before(engines: Engines, fs: PacedFs) -> None:
    second = with_one_chunk_heads(second_engine(engines, fs, PROMPT, replace(SHAPE, gpu_blocks=CHUNKS * 2)))
    begin(second, "splits", PROMPT)
    add_urgent(second, OTHER)
    second.step()
    assert second.computed["urgent"] > 0
    finish(second, fs)


def test_a_damaged_block_in_the_tail_is_computed(engines: Engines, fs: PacedFs, second: SimulatedEngine) -> None:
    fs.is_paced = False
    path = engines.file_of(second, PROMPT, CHUNKS - 3)
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    second.add("computes the rest", PROMPT)
    while path.exists() and not second.tier.transfers.loading:
        second.step()
    wait_until(lambda: not path.exists(), "the damage is noticed before the head is computed to there")
    second.run()
    second.assert_nothing_is_left()
    assert second.answers["computes the rest"] == answer_of(PROMPT, 1)
    assert engines.assert_volume_holds(second, PROMPT) == CHUNKS


def test_a_head_that_waited_for_room_counts_what_the_gpu_has_when_it_begins(engines: Engines, fs: PacedFs) -> None:
    second = second_engine(engines, fs, PROMPT, replace(SHAPE, gpu_blocks=CHUNKS + 3), OTHER)
    fs.is_paced = False
    second.ask("has the beginning", PROMPT[: 4 * BLOCK_TOKENS + 1])
    fs.is_paced = True
    second.add("fills the GPU", OTHER)
    second.step()
    second.add("waits", PROMPT)
    second.run(lambda: "fills the GPU" in second.answers)
    before = second.metric("vllm:kvtier_disk_split_tokens", "computed")
    second.run(lambda: second.computed["waits"] > 0)
    second.abort("waits")
    counted = second.metric("vllm:kvtier_disk_split_tokens", "computed") - before
    assert 0 <= counted <= second.computed["waits"]
    finish(second, fs)


def test_chunks_that_were_read_ahead_stay_for_no_request_that_does_not_load(
    fs: PacedFs, second: SimulatedEngine
) -> None:
    second.add("computes", PROMPT, kvtier_load=False)
    second.add("shares", PROMPT, answer=200)
    second.wait_for_lookup()
    second.step()
    second.step()
    assert second.tier.has_pending_work()
    assert second.tier.tokens_under_way > 0
    second.run(lambda: "computes" in second.answers)
    fs.give_all()
    tier = second.manager.primary_tier
    wait_until(lambda: bool(second.step()) and tier.room == SHAPE.cpu_chunks, "no row is kept")
    assert second.computed["shares"] < BLOCK_TOKENS
    assert "shares" not in second.answers
    second.run()


def test_without_chunked_prefill_hits_are_loaded_and_prompts_computed_whole(engines: Engines, fs: PacedFs) -> None:
    second = second_engine(engines, fs, PROMPT, replace(SHAPE, is_chunking=False, most_tokens=1 << 15))
    second.add("loads", PROMPT)
    run_paced(second, fs, "loads")
    assert second.computed["loads"] == len(PROMPT) - CHUNKS * BLOCK_TOKENS
    assert second.metric("vllm:kvtier_disk_split_joins") == 0


def test_a_head_without_room_is_not_overtaken(engines: Engines, fs: PacedFs) -> None:
    second = second_engine(engines, fs, OTHER, replace(SHAPE, gpu_blocks=CHUNKS + 3), PROMPT)
    second.add("is computed", OTHER)
    second.wait_for_lookup()
    second.step()
    second.add("waits for room", PROMPT)
    second.wait_for_lookup()
    second.step()
    assert second.computed["is computed"] > second.computed["waits for room"] == 0
    second.add("is short", prompt_of(0, seed=2))
    second.run(lambda: "is short" in second.answers)
    assert second.computed["waits for room"] > 0
    finish(second, fs)


def ready_to_load(
    engines: Engines, most_wait: float, *, more: int = 5, is_async: bool = False
) -> tuple[SimulatedEngine, list[int]]:
    """Return an engine whose CPU tier has a prompt, and which waits so long for copies that take no time."""
    prompt = prompt_of(CHUNKS, more=more)
    engine = engines.make(replace(SHAPE, prompt_only=False, is_async=is_async))
    engine.ask("stores", prompt)
    engine.run()
    engine.scheduler.reset_prefix_cache()
    engine.side.most_wait_seconds, engine.side.copying.value = most_wait, 1e18
    return engine, prompt


@pytest.mark.parametrize(("most_wait", "copying", "steps"), TABLES["admissions"].values(), ids=TABLES["admissions"])
def test_a_request_computes_before_its_load_is_reported(
    engines: Engines, most_wait: float, copying: float, steps: int
) -> None:
    engine, prompt = ready_to_load(engines, most_wait)
    engine.side.copying.value = copying
    engine.copies.lag = math.inf
    # It stores a chunk of its own while nothing of its load is reported.
    engine.add("reads", prompt, answer=BLOCK_TOKENS)
    for _ in range(steps or 10):
        assert not engine.computed["reads"]
        engine.step()
    assert bool(engine.computed["reads"]) is bool(steps)
    engine.copies.lag = 2
    engine.run()
    assert engine.answers["reads"] == answer_of(prompt, BLOCK_TOKENS)
    assert engine.computed["reads"] < BLOCK_TOKENS * 2
    engine.assert_nothing_is_left()


@pytest.mark.parametrize("most_wait", [1.0, -1.0], ids=["at once", "a step later"])
def test_a_hit_of_the_whole_prompt_computes_its_last_token(engines: Engines, most_wait: float) -> None:
    engine, prompt = ready_to_load(engines, most_wait, more=0)
    engine.ask("reads", prompt)
    engine.run()
    engine.assert_nothing_is_left()


@pytest.mark.parametrize("steps", range(4))
@pytest.mark.parametrize("most_wait", [1.0, -1.0], ids=["at once", "a step later"])
def test_a_request_may_end_at_any_moment_of_its_load(engines: Engines, most_wait: float, steps: int) -> None:
    engine, prompt = ready_to_load(engines, most_wait)
    engine.copies.lag = math.inf
    engine.add("reads", prompt, answer=BLOCK_TOKENS)
    for _ in range(steps):
        engine.step()
    engine.abort("reads")
    engine.step()
    engine.copies.lag = 2
    engine.run()
    engine.assert_nothing_is_left()


def test_a_request_may_end_between_two_pieces(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, prompt = ready_to_load(engines, -1.0, is_async=True)
    hand_over = engine.side._hand_over

    def hand_over_half(name: str, load: Load) -> None:
        rows, load.rows[CHUNKS // 2 :] = load.rows[:], [NO_ROW] * (CHUNKS - CHUNKS // 2)
        hand_over(name, load)
        load.rows[:] = rows
        monkeypatch.setattr(engine.side, "_hand_over", hand_over)

    monkeypatch.setattr(engine.side, "_hand_over", hand_over_half)
    engine.add("reads", prompt)
    engine.step()
    engine.abort("reads")
    engine.run()
    engine.assert_nothing_is_left()


def test_a_request_that_is_taken_back_waits_for_its_load(engines: Engines) -> None:
    engine, prompt = ready_to_load(engines, 1.0, is_async=True)
    engine.add("reads", prompt, answer=BLOCK_TOKENS)
    engine.step()
    # A step in flight keeps the blocks.
    with pytest.raises(RuntimeError, match="Failed to reset KV cache"):
        engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.run()
    assert engine.answers["reads"] == answer_of(prompt, BLOCK_TOKENS)
    engine.assert_nothing_is_left()
