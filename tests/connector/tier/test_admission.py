# SPDX-License-Identifier: Apache-2.0
"""What is read from the volume, whichever way was measured to be quicker."""

from __future__ import annotations

from collections import Counter

import pytest
from clocks import Clock
from rig import Rigs, keys

from kvtier_connector.cascade.admission import COMPUTE_PROBE_EVERY, PROBE_EVERY, Admission, Pace, Verdict

CHUNK_TOKENS = 100


class Engine:
    """Requests against one admission, with a volume and an accelerator of known speed."""

    def __init__(self, *, is_cost_aware: bool = True, min_tokens: int = 0, is_prompt_only: bool = True) -> None:
        self.clock = Clock(1000.0)
        self.verdicts: Counter[Verdict] = Counter()
        self.admission = Admission(
            is_cost_aware=is_cost_aware,
            min_tokens=min_tokens,
            tokens_per_chunk=CHUNK_TOKENS,
            is_prompt_only=is_prompt_only,
            on_verdict=lambda verdict: self.verdicts.update([verdict]),
            clock=self.clock,
        )
        self.load_seconds = self.compute_seconds = 0.01
        self.idle_seconds = 0.0
        self.queued = 0
        """Blocks that were ordered and are not there yet."""
        self._jobs = 0

    def choose(self, chunks: int, request: str = "") -> Verdict:
        verdict = self.admission.decide(request, chunks, chunks, to_read=chunks, queued=self.queued)
        if not request:
            self.admission.end_request(request)
        return verdict

    def load(self, chunks: int) -> None:
        self._jobs += 1
        self.begin(self._jobs, chunks)
        self.clock.seconds += chunks * self.load_seconds
        self.end(self._jobs, chunks, landed=chunks)

    def begin(self, job: int, chunks: int) -> None:
        self.admission.begin_load(job, chunks, queued=self.queued)
        self.queued += chunks

    def end(self, job: int, chunks: int, *, landed: int) -> None:
        self.queued -= chunks
        self.admission.end_load(job, chunks, landed=landed)

    def compute(self, request: str, chunks: int) -> None:
        self.admission.begin_compute(request)
        self.admission.end_step()
        self.clock.seconds += chunks * self.compute_seconds
        self.admission.end_compute(request, [(number + 1) * CHUNK_TOKENS for number in range(chunks)])

    def serve(self, request: str, chunks: int) -> Verdict:
        self.clock.seconds += self.idle_seconds
        verdict = self.choose(chunks, request)
        if verdict.may_load:
            self.load(chunks)
        else:
            self.compute(request, chunks)
        return verdict


def test_before_anything_was_measured_every_hit_is_loaded() -> None:
    engine = Engine()
    assert engine.choose(1) is Verdict.LOAD
    assert engine.admission.break_even_tokens == 0


def test_a_hit_that_takes_longer_than_computing_is_computed() -> None:
    engine = Engine()
    engine.load_seconds = 0.03
    engine.compute("cold", 16)
    assert engine.serve("first", 16) is Verdict.LOAD
    assert [engine.serve(f"r{number}", 16) for number in range(5)] == [Verdict.COMPUTE] * 5
    assert engine.verdicts == {Verdict.LOAD: 1, Verdict.COMPUTE: 5}
    assert engine.admission.break_even_tokens == -1
    assert engine.admission.load_tokens_per_second == pytest.approx(CHUNK_TOKENS / 0.03)
    assert engine.admission.compute_tokens_per_second == pytest.approx(CHUNK_TOKENS / 0.01)


def test_a_hit_that_takes_less_than_computing_is_loaded() -> None:
    engine = Engine()
    engine.load_seconds = 0.001
    engine.compute("cold", 16)
    engine.load(16)
    assert engine.choose(16) is Verdict.LOAD


def test_the_length_decides_where_only_long_hits_pay() -> None:
    engine = Engine()
    engine.compute("cold", 64)
    engine.load_seconds = 0.05
    engine.load(2)
    engine.load_seconds = 0.001
    engine.load(64)

    assert engine.choose(2) is Verdict.COMPUTE
    assert engine.choose(64) is Verdict.LOAD
    assert 2 * CHUNK_TOKENS < engine.admission.break_even_tokens <= 64 * CHUNK_TOKENS

    engine.load_seconds = 0.05
    for _ in range(5):
        engine.load(64)
    assert engine.admission.break_even_tokens == -1


def test_a_difference_within_the_hysteresis_changes_nothing() -> None:
    engine = Engine()
    engine.compute("cold", 16)
    engine.load_seconds = 0.011
    assert {engine.serve(f"a{number}", 16) for number in range(20)} == {Verdict.LOAD}
    engine.load_seconds = 0.02
    for _ in range(10):
        engine.load(16)
    assert engine.choose(16) is Verdict.COMPUTE
    engine.load_seconds = 0.0095
    for _ in range(20):
        engine.load(16)
    assert engine.choose(16) is Verdict.COMPUTE
    engine.load_seconds = 0.005
    for _ in range(20):
        engine.load(16)
    assert engine.choose(16) is Verdict.LOAD


def test_a_volume_that_became_faster_is_noticed_by_one_request_in_many() -> None:
    engine = Engine()
    engine.idle_seconds = 5.0
    engine.load_seconds = 0.5
    engine.compute("cold", 16)
    engine.serve("first", 16)
    refused = [engine.serve(f"r{number}", 16) for number in range(PROBE_EVERY * 4)]
    assert refused.count(Verdict.LOAD_PROBE) == 4
    engine.load_seconds = 0.001
    after = [engine.serve(f"s{number}", 16) for number in range(PROBE_EVERY * 3)]

    assert after.index(Verdict.LOAD_PROBE) < PROBE_EVERY
    assert set(after[PROBE_EVERY * 2 :]) == {Verdict.LOAD}


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
        assert engine.serve(f"long {number}", 64) is Verdict.LOAD
        choices.append(engine.serve(f"short {number}", 2))
    assert choices.index(Verdict.LOAD_PROBE) < PROBE_EVERY


def test_a_load_that_came_in_part_before_its_deadline_says_how_slow_the_volume_is() -> None:
    engine = Engine()
    engine.begin(1, 16)
    engine.clock.seconds += 30
    engine.end(1, 16, landed=15)
    engine.begin(2, 15)
    assert engine.admission.load_tokens_per_second == pytest.approx(CHUNK_TOKENS * 15 / 30)


def test_probes_are_rare_in_time_too() -> None:
    engine = Engine()
    engine.load_seconds = 0.5
    engine.compute("cold", 16)
    engine.serve("first", 16)
    started = engine.clock.seconds
    choices = [engine.serve(f"r{number}", 16) for number in range(PROBE_EVERY * 10)]
    assert engine.clock.seconds - started < 60
    assert set(choices) == {Verdict.COMPUTE}


def test_where_nothing_is_ever_computed_one_request_in_very_many_measures_that() -> None:
    engine = Engine()
    choices = [engine.serve(f"r{number}", 16) for number in range(COMPUTE_PROBE_EVERY * 2)]
    assert choices.count(Verdict.COMPUTE_PROBE) == 1
    assert engine.verdicts[Verdict.COMPUTE_PROBE] == 1


def test_what_was_ordered_before_does_not_count_against_the_volume() -> None:
    # Eight requests return at once: the last one waits for seven, which computing would make it do as well.
    engine = Engine()
    engine.compute("cold", 64)
    for job in range(8):
        engine.begin(100 + job, 64)
    for job in range(8):
        engine.clock.seconds += 64 * 0.005
        engine.end(100 + job, 64, landed=64)
    assert engine.choose(64) is Verdict.LOAD


def test_a_load_that_failed_says_nothing_about_the_pace() -> None:
    engine = Engine()
    engine.begin(1, 16)
    engine.clock.seconds += 100
    engine.end(1, 16, landed=0)
    assert engine.admission.load_tokens_per_second == 0


def test_a_hit_that_is_shorter_than_the_least_is_computed() -> None:
    engine = Engine(is_cost_aware=False, min_tokens=350)
    assert engine.choose(3) is Verdict.SHORT
    assert engine.choose(4) is Verdict.LOAD
    assert engine.verdicts == {Verdict.SHORT: 1, Verdict.LOAD: 1}


def test_an_admission_that_is_not_cost_aware_loads_whatever_it_takes() -> None:
    engine = Engine(is_cost_aware=False)
    engine.load_seconds = 10.0
    engine.compute("cold", 16)
    assert {engine.serve(f"r{number}", 16) for number in range(COMPUTE_PROBE_EVERY * 2)} == {Verdict.LOAD}


def test_answers_are_not_taken_for_prompts() -> None:
    # With answers offloaded too, later blocks come at the pace of decoding.
    engine = Engine(is_prompt_only=False)
    engine.compute("r", 16)
    engine.clock.seconds += 1000
    engine.admission.end_compute("r", [17 * CHUNK_TOKENS])
    assert engine.admission.compute_tokens_per_second == pytest.approx(CHUNK_TOKENS / 0.01)


def test_a_prompt_computed_in_several_steps_is_timed_to_each_of_them() -> None:
    engine = Engine()
    engine.admission.begin_compute("r")
    engine.admission.end_step()
    for part in range(4):
        engine.clock.seconds += 1.0
        engine.admission.end_compute("r", [(part * 16 + number + 1) * CHUNK_TOKENS for number in range(16)])
    engine.load(64)
    assert engine.admission.compute_tokens_per_second == pytest.approx(64 * CHUNK_TOKENS / 4.0)


def test_blocks_that_arrive_in_the_step_that_schedules_their_request_were_not_computed() -> None:
    engine = Engine()
    engine.admission.begin_compute("r")
    engine.admission.end_compute("r", [CHUNK_TOKENS])
    assert engine.admission.compute_tokens_per_second == 0


def test_the_prompt_of_a_request_that_was_preempted_is_not_timed_and_that_of_one_that_ended_is() -> None:
    engine = Engine()
    engine.admission.begin_compute("preempted")
    engine.admission.interrupt("preempted")
    engine.admission.end_compute("preempted", [CHUNK_TOKENS])
    assert engine.admission.compute_tokens_per_second == 0
    engine.admission.begin_compute("ended")
    engine.admission.end_step()
    engine.clock.seconds += 1
    engine.admission.end_compute("ended", [CHUNK_TOKENS])
    assert engine.admission.compute_tokens_per_second == pytest.approx(CHUNK_TOKENS)


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
    assert rig.metric("vllm:kvtier_disk_misses", "min_tokens") == 3
    assert rig.serve(keys(10), "long").hit_blocks == 10
    assert rig.metric("vllm:kvtier_disk_verdicts", "short") == 1
    assert rig.metric("vllm:kvtier_disk_verdicts", "load") == 1
    assert rig.metric("vllm:kvtier_disk_load_tokens_per_second") > 0


def test_a_request_that_waits_for_probes_is_decided_when_they_have_answered(rigs: Rigs) -> None:
    rig = rigs.make(min_tokens=16 * 4)
    rigs.write(keys(6))
    assert rig.serve(keys(6)).hit_blocks in {0, 6}


def test_what_was_read_from_the_volume_is_not_taken_for_computed(rigs: Rigs) -> None:
    rigs.write(keys(4))
    rig = rigs.make(min_reuse=2)
    assert rig.serve(keys(4), "reader").hit_blocks == 4
    for request, wanted in (("reader", keys(4)), ("writer", keys(4, first=10))):
        assert rig.metric("vllm:kvtier_disk_compute_tokens_per_second") == 0
        rig.end_step(new=[request])
        rig.end_step()
        context = rig.begin_offload(wanted, request)
        rig.settle()
        rig.finish(context)
    assert rig.metric("vllm:kvtier_disk_compute_tokens_per_second") > 0
    assert rig.metric("vllm:kvtier_disk_load_tokens_per_second") > 0
