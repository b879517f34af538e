# SPDX-License-Identifier: Apache-2.0
"""Load or recompute: whichever was measured to be quicker, and neither way is ever forgotten."""

from __future__ import annotations

from collections import Counter

import pytest
from clocks import Clock
from rig import Rigs, keys

from kvtier_connector.tier.gate import COMPUTE_PROBE_EVERY, PROBE_EVERY, Choice, Gate, Verdict
from kvtier_connector.tier.pace import Pace

CHUNK_TOKENS = 100


class Engine:
    """Requests against one gate, with a volume and an accelerator of known speed."""

    def __init__(self, *, is_cost_aware: bool = True, min_tokens: int = 0, is_prompt_only: bool = True) -> None:
        self.clock = Clock(1000.0)
        self.verdicts: Counter[Verdict] = Counter()
        self.gate = Gate(
            is_cost_aware=is_cost_aware,
            min_tokens=min_tokens,
            tokens_per_chunk=CHUNK_TOKENS,
            is_prompt_only=is_prompt_only,
            on_verdict=lambda verdict: self.verdicts.update([verdict]),
            clock=self.clock,
        )
        self.load_seconds = self.compute_seconds = 0.01
        self.idle_seconds = 0.0
        self._jobs = 0

    def choose(self, request: str, chunks: int) -> Choice:
        """Ask for a hit of so many chunks as vLLM does, step by step, until it is decided."""
        for _ in range(3):
            answers = {self.gate.ask(request, (number + 1) * CHUNK_TOKENS) for number in range(chunks)}
            assert len(answers) == 1, "vLLM must not be told to load half of a hit"
            if (answer := answers.pop()) is not Choice.WAIT:
                return answer
            self.gate.end_step(())
        raise AssertionError("not decided")

    def load(self, chunks: int) -> None:
        self._jobs += 1
        self.gate.begin_load(self._jobs, chunks)
        self.clock.seconds += chunks * self.load_seconds
        self.gate.end_load(self._jobs, chunks, landed=chunks)

    def compute(self, request: str, chunks: int) -> None:
        self.gate.begin_compute(request)
        self.gate.end_step(())
        self.clock.seconds += chunks * self.compute_seconds
        self.gate.end_compute(request, [(number + 1) * CHUNK_TOKENS for number in range(chunks)])

    def serve(self, request: str, chunks: int) -> Choice:
        self.clock.seconds += self.idle_seconds
        choice = self.choose(request, chunks)
        if choice is Choice.LOAD:
            self.load(chunks)
        else:
            self.compute(request, chunks)
        self.gate.forget(request)
        return choice


def test_before_anything_was_measured_every_hit_is_loaded_without_waiting_a_step() -> None:
    gate = Engine().gate
    assert gate.ask("r", CHUNK_TOKENS) is Choice.LOAD
    assert gate.break_even_tokens == 0


def test_a_hit_that_takes_longer_than_computing_is_computed() -> None:
    engine = Engine()
    engine.load_seconds = 0.03
    engine.compute("cold", 16)
    assert engine.serve("first", 16) is Choice.LOAD
    assert [engine.serve(f"r{number}", 16) for number in range(5)] == [Choice.SLOWER] * 5
    assert engine.verdicts == {Verdict.LOAD: 1, Verdict.COMPUTE: 5}
    assert engine.gate.break_even_tokens == -1
    assert engine.gate.load_tokens_per_second == pytest.approx(CHUNK_TOKENS / 0.03)
    assert engine.gate.compute_tokens_per_second == pytest.approx(CHUNK_TOKENS / 0.01)


def test_a_hit_that_takes_less_than_computing_is_loaded_and_costs_no_step_more() -> None:
    engine = Engine()
    engine.load_seconds = 0.001
    engine.compute("cold", 16)
    engine.load(16)
    assert engine.gate.ask("r", CHUNK_TOKENS) is Choice.LOAD


def test_the_length_decides_where_only_long_hits_pay() -> None:
    engine = Engine()
    engine.compute("cold", 64)
    engine.load_seconds = 0.05
    engine.load(2)
    engine.load_seconds = 0.001
    engine.load(64)

    assert engine.choose("short", 2) is Choice.SLOWER
    assert engine.choose("long", 64) is Choice.LOAD
    assert 2 * CHUNK_TOKENS < engine.gate.break_even_tokens <= 64 * CHUNK_TOKENS

    engine.load_seconds = 0.05
    for _ in range(5):
        engine.load(64)
    assert engine.gate.break_even_tokens == -1


def test_a_difference_within_the_hysteresis_changes_nothing() -> None:
    engine = Engine()
    engine.compute("cold", 16)
    engine.load_seconds = 0.011
    assert {engine.serve(f"a{number}", 16) for number in range(20)} == {Choice.LOAD}
    engine.load_seconds = 0.02
    for _ in range(10):
        engine.load(16)
    assert engine.choose("slow", 16) is Choice.SLOWER
    engine.load_seconds = 0.0095
    for _ in range(20):
        engine.load(16)
    assert engine.choose("nearly", 16) is Choice.SLOWER
    engine.load_seconds = 0.005
    for _ in range(20):
        engine.load(16)
    assert engine.choose("fast", 16) is Choice.LOAD


def test_a_volume_that_became_faster_is_noticed_by_one_request_in_many() -> None:
    engine = Engine()
    engine.idle_seconds = 5.0
    engine.load_seconds = 0.5
    engine.compute("cold", 16)
    engine.serve("first", 16)
    refused = [engine.serve(f"r{number}", 16) for number in range(PROBE_EVERY * 4)]
    assert refused.count(Choice.LOAD) == 4
    engine.load_seconds = 0.001
    after = [engine.serve(f"s{number}", 16) for number in range(PROBE_EVERY * 3)]

    assert after.index(Choice.LOAD) < PROBE_EVERY
    assert set(after[PROBE_EVERY * 2 :]) == {Choice.LOAD}


def test_long_hits_that_are_loaded_do_not_keep_short_ones_from_being_tried_again() -> None:
    engine = Engine()
    engine.idle_seconds = 5.0
    engine.compute("cold", 64)
    engine.load_seconds = 0.05
    engine.load(2)
    engine.load_seconds = 0.001
    engine.load(64)
    choices = []
    for number in range(PROBE_EVERY * 3):
        assert engine.serve(f"long {number}", 64) is Choice.LOAD
        choices.append(engine.serve(f"short {number}", 2))
    assert choices.index(Choice.LOAD) < PROBE_EVERY


def test_a_load_that_came_in_part_before_its_deadline_says_how_slow_the_volume_is() -> None:
    engine = Engine()
    engine.gate.begin_load(1, 16)
    engine.clock.seconds += 30
    engine.gate.end_load(1, 16, landed=15)
    engine.gate.begin_load(2, 15)
    assert engine.gate.load_tokens_per_second == pytest.approx(CHUNK_TOKENS * 15 / 30)


def test_probes_are_rare_in_time_too() -> None:
    engine = Engine()
    engine.load_seconds = 0.5
    engine.compute("cold", 16)
    engine.serve("first", 16)
    started = engine.clock.seconds
    choices = [engine.serve(f"r{number}", 16) for number in range(PROBE_EVERY * 10)]
    assert engine.clock.seconds - started < 60
    assert set(choices) == {Choice.SLOWER}


def test_where_nothing_is_ever_computed_one_request_in_very_many_measures_that() -> None:
    engine = Engine()
    choices = [engine.serve(f"r{number}", 16) for number in range(COMPUTE_PROBE_EVERY * 2)]
    assert choices.count(Choice.SLOWER) == 1
    assert engine.verdicts[Verdict.COMPUTE_PROBE] == 1


def test_what_was_ordered_before_does_not_count_against_the_volume() -> None:
    # Eight requests return at once: the last one waits for seven, which computing would make it do as well.
    engine = Engine()
    engine.compute("cold", 64)
    for job in range(8):
        engine.gate.begin_load(100 + job, 64)
    for job in range(8):
        engine.clock.seconds += 64 * 0.005
        engine.gate.end_load(100 + job, 64, landed=64)
    assert engine.choose("next", 64) is Choice.LOAD


def test_a_load_that_failed_says_nothing_about_the_pace() -> None:
    engine = Engine()
    engine.gate.begin_load(1, 16)
    engine.clock.seconds += 100
    engine.gate.end_load(1, 16, landed=0)
    assert engine.gate.load_tokens_per_second == 0


def test_a_hit_that_is_shorter_than_the_least_is_computed() -> None:
    engine = Engine(is_cost_aware=False, min_tokens=350)
    assert engine.choose("three", 3) is Choice.SHORT
    assert engine.choose("four", 4) is Choice.LOAD
    assert engine.verdicts == {Verdict.SHORT: 1, Verdict.LOAD: 1}


def test_a_gate_that_is_off_loads_whatever_it_takes() -> None:
    engine = Engine(is_cost_aware=False)
    engine.load_seconds = 10.0
    engine.compute("cold", 16)
    assert {engine.serve(f"r{number}", 16) for number in range(COMPUTE_PROBE_EVERY * 2)} == {Choice.LOAD}


def test_a_hit_is_counted_anew_while_some_of_it_is_not_known() -> None:
    engine = Engine(is_cost_aware=False, min_tokens=300)
    assert engine.gate.ask("r", CHUNK_TOKENS) is Choice.WAIT
    engine.gate.end_step({"r"})
    assert engine.choose("r", 4) is Choice.LOAD


def test_answers_are_not_taken_for_prompts() -> None:
    # With answers offloaded too, later blocks come at the pace of decoding.
    engine = Engine(is_prompt_only=False)
    engine.compute("r", 16)
    engine.clock.seconds += 1000
    engine.gate.end_compute("r", [17 * CHUNK_TOKENS])
    assert engine.gate.compute_tokens_per_second == pytest.approx(CHUNK_TOKENS / 0.01)


def test_a_prompt_computed_in_several_steps_is_timed_to_each_of_them() -> None:
    engine = Engine()
    engine.gate.begin_compute("r")
    engine.gate.end_step(())
    for part in range(4):
        engine.clock.seconds += 1.0
        engine.gate.end_compute("r", [(part * 16 + number + 1) * CHUNK_TOKENS for number in range(16)])
    engine.load(64)
    assert engine.gate.compute_tokens_per_second == pytest.approx(64 * CHUNK_TOKENS / 4.0)


def test_blocks_that_arrive_in_the_step_that_schedules_their_request_were_not_computed() -> None:
    engine = Engine()
    engine.gate.begin_compute("r")
    engine.gate.end_compute("r", [CHUNK_TOKENS])
    assert engine.gate.compute_tokens_per_second == 0


def test_the_prompt_of_a_request_that_ended_or_was_preempted() -> None:
    engine = Engine()
    engine.gate.begin_compute("preempted")
    engine.gate.interrupt("preempted")
    engine.gate.end_compute("preempted", [CHUNK_TOKENS])
    assert engine.gate.compute_tokens_per_second == 0
    engine.gate.begin_compute("ended")
    engine.gate.end_step(())
    engine.gate.forget("ended")
    engine.clock.seconds += 1
    engine.gate.end_compute("ended", [CHUNK_TOKENS])
    assert engine.gate.compute_tokens_per_second == pytest.approx(CHUNK_TOKENS)


def test_old_measurements_give_way_and_new_ones_are_averaged() -> None:
    pace = Pace()
    assert pace.seconds(8) is None
    pace.observe(8, 8.0, 0.0)
    pace.observe(8, 16.0, 1.0)
    assert pace.seconds(8) == pytest.approx(8 * 1.3)
    pace.observe(8, 16.0, 10_000.0)
    assert pace.seconds(8) == pytest.approx(16.0)
    assert pace.seconds(1000) == pytest.approx(2000.0)


def test_an_engine_computes_short_hits_and_loads_long_ones_with_every_byte_right(rigs: Rigs) -> None:
    rigs.write(keys(10))
    rig = rigs.make(min_tokens=16 * 4)
    assert rig.serve(keys(3), "short").hit_blocks == 0
    assert rig.metric("vllm:kvtier_disk_misses", "min_tokens") == 1
    assert rig.serve(keys(10), "long").hit_blocks == 10
    assert rig.metric("vllm:kvtier_disk_verdicts", "short") == 1
    assert rig.metric("vllm:kvtier_disk_verdicts", "load") == 1
    assert rig.metric("vllm:kvtier_disk_load_tokens_per_second") > 0


def test_a_request_that_waits_for_probes_is_decided_when_they_have_answered(rigs: Rigs) -> None:
    rig = rigs.make(min_tokens=16 * 4)
    rigs.write(keys(6))
    assert rig.serve(keys(6)).hit_blocks in {0, 6}
