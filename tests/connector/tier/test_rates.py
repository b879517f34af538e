# SPDX-License-Identifier: Apache-2.0
"""Two measured rates decide whether a hit is loaded, split or computed."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import yaml
from engine_fleet import Engines, stored
from engine_parts import WINDOW_TOKENS, Shape, answer_of, prompt_of
from rig import TOKENS_PER_BLOCK, Rigs, keys
from store_faults import GatedFs
from vllm.v1.kv_offload.base import ReqContext
from waiting import Clock

from kvtier_connector.cascade.rates import (
    ATTENTION_TOKENS,
    JOIN_SECONDS,
    KNOWN_SECONDS,
    LEAST_PATIENCE_SECONDS,
    LOOK_SECONDS,
    STALLED_SECONDS,
    Rates,
    Way,
    count_pairs,
)
from kvtier_connector.cascade.split import Split, Splits

TABLES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())

PREFILL = 20_000.0
CHUNK_TOKENS = 128


@pytest.fixture(autouse=True)
def stalls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a volume count as one that hangs when the product says so: these tests set the clock."""
    monkeypatch.setattr("kvtier_connector.cascade.rates.STALLED_SECONDS", STALLED_SECONDS)
    monkeypatch.setattr("kvtier_connector.cascade.rates.LEAST_PATIENCE_SECONDS", LEAST_PATIENCE_SECONDS)


def read(rates: Rates, clock: Clock, tokens: int, *, seconds: float = 0.1) -> None:
    """Read so many tokens in so many seconds, with more still to come."""
    rates.note_landed(0, is_reading=True)
    clock.seconds += seconds
    rates.note_landed(tokens, reads=[(0.001, clock.seconds)], is_reading=True)
    rates.note_landed(0, is_reading=False)


def measured(clock: Clock, volume: float, *, prefill: float = PREFILL, **settings: Any) -> Rates:
    rates = Rates(now=clock, **settings)
    rates.prefill.observe(prefill, 1.0)
    read(rates, clock, round(volume / 10))
    assert rates.volume.value == pytest.approx(volume)
    return rates


@pytest.mark.parametrize(("volume", "work", "whole", "split"), TABLES["ways"].values(), ids=TABLES["ways"])
def test_a_hit_takes_the_faster_way(volume: float, work: dict[str, int], whole: str, split: str, clock: Clock) -> None:
    rates = measured(clock, volume)
    work = {"unread": work["tokens"], "copying": 0, **work}
    rates.copying.value = work.pop("copying")
    assert (rates.choose(**work), rates.choose(**work, may_split=True)) == (Way[whole], Way[split])


def test_a_step_under_way_delays_what_is_computed(clock: Clock) -> None:
    rates = measured(clock, 100_000)
    work = {"tokens": 1_000, "unread": 1_000, "queued": 10_000}
    assert rates.choose(**work) is Way.COMPUTE
    rates.note_step(8_000, 0)
    assert rates.choose(**work) is Way.LOAD
    clock.seconds += 8_000 / PREFILL
    assert rates.choose(**work) is Way.COMPUTE


def test_a_volume_is_tried_that_was_never_measured_won_or_lost_long_ago(clock: Clock) -> None:
    rates = Rates(now=clock)
    assert rates.choose(100, unread=100) is Way.LOAD
    assert rates.choose(100, unread=100, may_split=True) is Way.SPLIT
    rates = measured(clock, 100)
    assert rates.choose(32_000, unread=32_000) is Way.COMPUTE
    clock.seconds += KNOWN_SECONDS + 1
    assert rates.choose(32_000, unread=32_000) is Way.LOAD
    read(rates, clock, 10)
    assert rates.choose(32_000, unread=32_000) is Way.COMPUTE
    assert rates.choose(32_000, unread=32_000, may_split=True) is Way.COMPUTE
    clock.seconds += LOOK_SECONDS
    assert rates.choose(32_000, unread=32_000, may_split=True) is Way.SPLIT
    rates = measured(clock, 500_000)
    clock.seconds += 10 * KNOWN_SECONDS
    assert rates.choose(32_000, unread=32_000, may_split=True) is Way.LOAD


@pytest.mark.parametrize("gives", [True, False])
def test_a_volume_that_stops_hangs_until_it_gives_or_its_reads_are_given_up(clock: Clock, *, gives: bool) -> None:
    rates = measured(clock, 500_000)
    rates.note_landed(0, is_reading=True)
    clock.seconds += STALLED_SECONDS
    assert not rates.is_hanging
    rates.note_landed(0, is_reading=True)
    assert rates.is_hanging
    assert rates.choose(100, unread=100, may_split=True) is Way.COMPUTE
    if gives:
        rates.note_landed(4000, reads=[(STALLED_SECONDS, clock.seconds)], is_reading=True)
    else:
        rates.note_landed(0, is_reading=False)
        assert rates.choose(100, unread=100) is Way.LOAD
    assert not rates.is_hanging


def test_one_chunk_at_a_time_lowers_the_rate_only_if_its_read_was_slow(clock: Clock) -> None:
    rates = measured(clock, 500_000)
    for seconds, is_slower in ((0.001, False), (0.4, True)):
        before, ended = rates.volume.value, clock.seconds + seconds
        rates.note_ordered()
        # A long step passes before the engine notices.
        clock.seconds += 0.45
        rates.note_landed(16, reads=[(seconds, ended)], is_reading=False)
        assert (rates.volume.value < before) is is_slower


@pytest.mark.parametrize(("calls", "known", "within"), TABLES["steps"].values(), ids=TABLES["steps"])
def test_steps_that_end_measure_prefill(calls: list[Any], known: dict[str, float], within: float, clock: Clock) -> None:
    rates, begin = Rates(now=clock, most_step_tokens=8192), clock.seconds
    for seconds, tokens, in_flight in calls:
        clock.seconds = begin + seconds
        rates.note_step(tokens, in_flight)
    found = {"prefill": rates.prefill.value, "least": rates.least_seconds, "busy": rates.busy_seconds}
    assert {name: found[name] for name in known} == pytest.approx(known, rel=within)


def test_steps_at_the_end_of_long_prompts_say_how_long_those_at_the_beginning_take(clock: Clock) -> None:
    rates, begins, attention_tokens = Rates(now=clock), range(0, 65_536, 2048), 20_000
    seconds_of = {begin: 2048 * (1 + (2 * begin + 2048) / attention_tokens) / PREFILL for begin in begins}
    # Two steps are in flight.
    for before, begin in itertools.pairwise((-1, *[*begins] * 8)):
        rates.note_step(2048, 0 if before < 0 else 2048, count_pairs(begin, 2048))
        clock.seconds += seconds_of.get(before, 0.0)
    rates.note_step(1, 0)
    learnt = {begin: rates.prefill.seconds(2048, begin) for begin in begins}
    assert learnt == pytest.approx(seconds_of, rel=0.1)
    assert rates.prefill.seconds(65_536) == pytest.approx(sum(learnt.values()))
    head = rates.prefill.head(2048, 32_768, 10_000)
    assert rates.prefill.seconds(head, 2048) == pytest.approx((32_768 - head) / 10_000, rel=1e-3), "both take as long"
    read(rates, clock, 1_500)
    assert (rates.choose(2048, unread=2048), rates.choose(32_768, unread=32_768)) == (Way.COMPUTE, Way.LOAD)
    assert rates.choose(2048, unread=2048, begin=65_536) is Way.LOAD


def test_short_prompts_say_nothing_about_attention(clock: Clock) -> None:
    rates = Rates(now=clock)
    for seconds in (5.0, *[0.1] * 30):
        rates.note_step(2048, 0, count_pairs(0, 2048))
        clock.seconds += seconds
    short = 0.1 / (2048 + 2048**2 / ATTENTION_TOKENS)
    assert rates.prefill.seconds(32_768) == pytest.approx(short * (32_768 + 32_768**2 / ATTENTION_TOKENS), rel=0.1)


def test_an_engine_counts_how_far_behind_its_prompts_are_computed(engines: Engines) -> None:
    engine, told = engines.make(Shape()), []
    engine.tier.rates.note_step = lambda *work: told.append(work[2])
    engine.add("computed", prompt_of(8))
    engine.run(lambda: "computed" in engine.answers)
    assert sum(told) == count_pairs(0, len(prompt_of(8)))


def test_a_request_that_is_gone_has_computed_nothing(clock: Clock) -> None:
    rates = measured(clock, 10_000)
    rates.note_step(8_000, 0)
    rates.note_gone(8_000)
    clock.seconds += 0.001
    rates.note_step(1, 0)
    assert rates.prefill.value == PREFILL
    assert rates.busy_seconds == pytest.approx(1 / PREFILL)


@pytest.mark.parametrize(("tokens", "seconds", "is_believed"), TABLES["drops"].values(), ids=TABLES["drops"])
def test_a_volume_that_became_slow_is_believed(tokens: int, seconds: float, is_believed: bool, clock: Clock) -> None:
    rates = measured(clock, 10_000)
    read(rates, clock, tokens, seconds=seconds)
    assert (rates.volume.value == pytest.approx(tokens / seconds)) is is_believed


@pytest.mark.parametrize(("first", "later"), TABLES["ends"].values(), ids=TABLES["ends"])
def test_a_volume_is_measured_by_when_its_reads_ended(first: list[float], later: list[float], clock: Clock) -> None:
    rates, ordered = Rates(now=clock), clock.seconds
    rates.note_ordered()
    clock.seconds += 0.4
    for ends in (first, later):
        # Each read began when all were ordered.
        reads = [(end, ordered + end) for end in ends]
        rates.note_landed(512 * len(ends), reads=reads, is_reading=ends is first and bool(later))
        clock.seconds += 0.001
    assert rates.volume.value == pytest.approx(512 / 0.05)


def test_chunks_that_were_read_together_make_no_volume_fast_whose_last_one_comes_a_moment_later(clock: Clock) -> None:
    rates, ordered = Rates(now=clock), clock.seconds
    rates.note_ordered()
    for ends in ([0.1, 0.1, 0.1], [0.101]):
        clock.seconds = ordered + ends[-1]
        rates.note_landed(512 * len(ends), reads=[(end, ordered + end) for end in ends], is_reading=len(ends) > 1)
    assert rates.volume.value == pytest.approx(4 * 512 / 0.101)


def test_what_comes_after_a_hang_is_no_rate_and_the_next_hit_measures_the_volume(clock: Clock) -> None:
    rates = measured(clock, 10_000)
    rates.note_ordered()
    clock.seconds += 10.0
    rates.note_landed(0, is_reading=True)
    for is_reading in (True, False):
        clock.seconds += 0.01
        rates.note_landed(512, reads=[(10.0, clock.seconds)], is_reading=is_reading)
        assert not rates.volume.value
        assert rates.has_hung
    read(rates, clock, 1_000)
    assert rates.volume.value == pytest.approx(10_000)
    assert not rates.has_hung


def test_reads_beside_others_hardly_change_the_latency_and_a_quick_one_does(clock: Clock) -> None:
    rates = measured(clock, 10_000)
    latencies = []
    for seconds in (0.002, 0.2, 0.0005):
        rates.note_landed(16, reads=[(seconds, clock.seconds)], is_reading=True)
        latencies.append(rates.latency_seconds)
    assert latencies == pytest.approx([0.001, 0.001, 0.0005], rel=0.01)


@pytest.mark.parametrize(
    ("landed", "seconds", "is_reading", "is_stalled"), TABLES["stalls"].values(), ids=TABLES["stalls"]
)
def test_a_volume_is_stalled_that_gives_nothing_for_a_part_of_the_time_that_computing_takes(
    landed: int, seconds: float, is_reading: bool, is_stalled: bool, clock: Clock
) -> None:
    rates = measured(clock, 10_000)
    rates.note_landed(0, is_reading=is_reading)
    clock.seconds += seconds
    rates.note_landed(landed, is_reading=is_reading)
    assert rates.is_stalled(1.0) is is_stalled


def split_hit(rates: Rates, tokens: int) -> tuple[Splits, Split]:
    """Return a hit whose last chunk has come, and no more so far."""
    split = Split(ReqContext(req_id="split"), range(tokens // CHUNK_TOKENS), 0, CHUNK_TOKENS, 0)  # type: ignore[arg-type]  # keys
    splits = Splits(rates, lambda _: None)
    splits.begin("split", split)
    split.ordered, split.ready = 16, 1
    return splits, split


@pytest.mark.parametrize(("volume", "ordered", "first"), TABLES["meetings"].values(), ids=TABLES["meetings"])
def test_no_more_is_ordered_than_the_volume_may_give_until_both_meet(
    volume: float, ordered: int, first: int, clock: Clock
) -> None:
    splits, split = split_hit(measured(clock, volume, prefill=8_000), 32 * CHUNK_TOKENS)
    split.ordered = split.ready = 0
    # Of 32 chunks a volume of half the rate gives 11, and half as many are a margin.
    assert splits.expect_meeting(split, ordered) // CHUNK_TOKENS == first


def test_a_head_waits_at_the_meeting_for_a_few_chunks_and_leaves_a_tail_that_is_computed_sooner(clock: Clock) -> None:
    splits, split = split_hit(measured(clock, 2 * PREFILL), 8_192)
    split.computed = split.ready_from - 256
    for in_flight, seconds, tokens in ((0, 0.0, 0), (64, 0.04, 0), (0, 0.001, 256)):
        clock.seconds += seconds
        assert splits.next_tokens(split, in_flight=in_flight) == tokens, "no longer than computing that takes"
    splits, split = split_hit(measured(clock, PREFILL / 10), 8_192)
    split.computed = split.ready_from - 256
    for least, in_flight, seconds, tokens in TABLES["shortest"]:
        splits.rates.least_seconds, clock.seconds = least, clock.seconds + seconds
        assert splits.next_tokens(split, in_flight=in_flight) == tokens, "a step would not have them earlier"
    splits.begin("reads, too", split_hit(splits.rates, 8_192)[1])
    splits.rates.least_seconds, split.moved_at = 0.13, clock.seconds
    assert splits.next_tokens(split) == 256
    for share in (2, 0.5):
        split.computed = split.end - int(share * JOIN_SECONDS * PREFILL)
        assert splits.is_worth_joining(split) is (share > 1)


def test_an_engine_computes_short_hits_and_loads_long_ones_with_every_byte_right(rigs: Rigs) -> None:
    rigs.write(keys(10))
    rig = rigs.make(min_tokens=TOKENS_PER_BLOCK * 4)
    assert rig.serve(keys(3), "short").hit_blocks == 0
    assert rig.metric("vllm:kvtier_disk_misses", "min_tokens") == 3
    assert rig.serve(keys(10), "long").hit_blocks == 10
    assert rig.metric("vllm:kvtier_disk_verdicts", "short") == 1
    assert rig.metric("vllm:kvtier_disk_verdicts", "load") == 1
    assert rig.metric("vllm:kvtier_disk_load_tokens_per_second") > 0


@pytest.mark.parametrize(("seconds", "rates", "is_windowed"), TABLES["hangs"].values(), ids=TABLES["hangs"])
def test_a_load_is_given_up_once_the_volume_hangs(
    seconds: float, rates: tuple[float, float], engines: Engines, clock: Clock, *, is_windowed: bool
) -> None:
    windows = (None, WINDOW_TOKENS) if is_windowed else (None,)
    prompt, shape = prompt_of(8), Shape(windows=windows)
    fourth = engines.file_of(stored(engines, prompt, shape), prompt, 3).name
    fs = GatedFs(lambda call, path: call == "preadv" and fourth in path)
    engine = engines.make(shape, fs=fs, load_deadline_seconds=3600.0)
    engine.wait_until_attached()
    engine.tier.rates.now = clock
    engine.tier.rates.prefill.value, engine.tier.rates.volume.value = rates
    engine.add("computes the rest", prompt)
    # The whole hit is on its way when the volume begins to hang.
    engine.run(lambda: engine.tier.transfers.loading == 1)
    assert not engine.answers
    clock.seconds += seconds
    engine.run(lambda: "computes the rest" in engine.answers)
    assert engine.answers["computes the rest"] == answer_of(prompt, 1)
    # vLLM computes all of a prompt, if any part of a load of several groups is missing.
    assert engine.computed["computes the rest"] == len(prompt) - (3 * TOKENS_PER_BLOCK if len(windows) == 1 else 0)
    fs.open_gate()
