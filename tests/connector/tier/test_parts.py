# SPDX-License-Identifier: Apache-2.0
"""The parts of the tier by themselves: the pool, the jobs, the lookups and the metrics."""

from __future__ import annotations

import queue
import threading

import pytest
from rig import wait_until
from vllm.v1.kv_offload.base import OffloadingCounterMetadata, OffloadingGaugeMetadata

from kvtier_connector.store.format import Fault
from kvtier_connector.store.index import Presence
from kvtier_connector.store.layout import BlockKey
from kvtier_connector.tier import metrics
from kvtier_connector.tier.jobs import Block, Job
from kvtier_connector.tier.lookups import Lookups, Verdict
from kvtier_connector.tier.slots import Slots
from kvtier_connector.tier.workers import Lane, Staging, Task, WorkerPool, default_limits


def make_pool(threads: int, *, stuck_seconds: float = 60.0) -> WorkerPool:
    limits = default_limits(threads, probe_seconds=stuck_seconds, transfer_seconds=stuck_seconds)
    pool = WorkerPool(threads, limits, staging_bytes=4096)
    pool.start()
    return pool


def noted(order: list[str], name: str) -> Task:
    return lambda _: order.append(name)


def test_probes_go_before_loads_and_loads_before_stores() -> None:
    pool = make_pool(1)
    started, go, order = threading.Event(), threading.Event(), list[str]()

    def block(_: Staging) -> None:
        started.set()
        go.wait(20)

    pool.submit(Lane.STORE, [block])
    assert started.wait(20)
    for lane in (Lane.STORE, Lane.LOAD, Lane.PROBE):
        pool.submit(lane, [noted(order, f"{lane.name} {number}") for number in range(2)])
    go.set()
    wait_until(lambda: len(order) == 6, "all tasks ran")

    assert order == ["PROBE 0", "PROBE 1", "LOAD 0", "LOAD 1", "STORE 0", "STORE 1"]
    assert pool.close(5)


def test_stores_that_hang_leave_threads_to_loads_and_probes() -> None:
    pool = make_pool(4)
    go, order = threading.Event(), list[str]()
    pool.submit(Lane.STORE, [lambda _: go.wait(20) and None] * 10)
    pool.submit(Lane.LOAD, [noted(order, "load")])
    pool.submit(Lane.PROBE, [noted(order, "probe")])
    wait_until(lambda: len(order) == 2, "the load and the probe ran")

    go.set()
    assert pool.close(5)


def test_a_task_that_fails_does_not_take_its_thread_with_it() -> None:
    pool = make_pool(1)
    order: list[str] = []

    def fail(_: Staging) -> None:
        raise RuntimeError("a defect")

    pool.submit(Lane.LOAD, [fail, noted(order, "after")])
    wait_until(lambda: order == ["after"], "the next task ran")
    assert pool.close(5)


def test_a_lane_is_stuck_when_every_thread_it_may_have_hangs_and_free_again_afterwards() -> None:
    pool = make_pool(4, stuck_seconds=0.0)
    go = threading.Event()
    pool.submit(Lane.STORE, [lambda _: go.wait(20) and None] * 2)
    wait_until(lambda: pool.is_stuck(Lane.STORE), "stores are stuck")

    assert not pool.is_stuck(Lane.LOAD)
    assert pool.count_stuck() == 2
    go.set()
    wait_until(lambda: not pool.is_stuck(Lane.STORE), "stores go on")
    assert pool.close(5)


def test_closing_does_not_wait_for_a_task_that_hangs() -> None:
    pool = make_pool(1)
    started, go = threading.Event(), threading.Event()

    def hang(_: Staging) -> None:
        started.set()
        go.wait(20)

    pool.submit(Lane.LOAD, [hang])
    assert started.wait(20)
    assert not pool.close(0.05)
    go.set()


def test_each_thread_has_a_page_aligned_buffer_of_its_own() -> None:
    pool = make_pool(2)
    addresses: queue.SimpleQueue[int] = queue.SimpleQueue()
    both = threading.Barrier(2)

    def report(staging: Staging) -> None:
        both.wait(20)
        addresses.put(staging.array.ctypes.data)

    pool.submit(Lane.LOAD, [report])
    pool.submit(Lane.PROBE, [report])
    found = {addresses.get(timeout=20) for _ in range(2)}

    assert len(found) == 2
    assert all(address % 4096 == 0 for address in found)
    assert pool.close(5)


def make_job(blocks: int) -> tuple[Job, list[Job]]:
    completed: list[Job] = []
    job = Job(
        1,
        is_load=True,
        request="r",
        blocks=[Block(bytes([number]), number, BlockKey(bytes([number] * 3), 0)) for number in range(blocks)],
        deadline=0.0,
        on_complete=completed.append,
    )
    return job, completed


def test_a_job_is_complete_once_when_its_last_block_is_settled() -> None:
    job, completed = make_job(2)
    job.settle(0, Fault.IO, seconds=1)
    assert completed == []
    job.settle(1, Fault.IO, seconds=2)
    job.settle(1, Fault.MAGIC, seconds=4)

    assert completed == [job]
    assert job.outcomes == [Fault.IO, Fault.IO]
    assert job.busy_seconds == 3


def test_an_abandoned_block_can_neither_be_claimed_nor_settled() -> None:
    job, completed = make_job(2)
    job.settle(0, Fault.IO, seconds=0)
    assert job.abandon("deadline") == 0
    assert completed == [job]
    assert not job.claim(1)
    job.settle(1, Fault.IO, seconds=0)

    assert (job.outcomes, job.cause) == ([Fault.IO, None], "deadline")
    assert job.abandon("again") == 0
    assert completed == [job]


def test_a_block_whose_slot_is_being_copied_is_waited_for() -> None:
    job, completed = make_job(1)
    assert job.claim(0)
    assert job.abandon("deadline") == 1
    assert completed == []
    job.settle(0, Fault.IO, seconds=0)

    assert completed == [job]


K, L = BlockKey(b"kkk", 0), BlockKey(b"lll", 0)


class Volume:
    """Answers lookups from a set, when it is told to."""

    def __init__(self, *present: BlockKey) -> None:
        self.present = set(present)
        self.now = 0.0
        self.asked: list[BlockKey] = []
        self.pool = make_pool(2)
        self.index: dict[BlockKey, Presence] = {}
        self.lookups = Lookups(self._state, self._contains, self.pool, deadline_seconds=5, clock=lambda: self.now)
        self.gate = threading.Event()
        self.gate.set()

    def _state(self, key: BlockKey) -> Presence:
        return self.index.get(key, Presence.UNKNOWN)

    def _contains(self, key: BlockKey) -> bool:
        self.asked.append(key)
        self.gate.wait(20)
        if key in self.present:
            self.index[key] = Presence.PRESENT
        return key in self.present

    def ask(self, key: BlockKey, request: str) -> Verdict:
        verdict = Verdict.WAITING

        def is_answered() -> bool:
            nonlocal verdict
            self.lookups.collect()
            verdict = self.lookups.ask(key, request)
            self.lookups.send()
            return verdict is not Verdict.WAITING

        wait_until(is_answered, "the lookup is answered")
        return verdict


def test_a_block_that_the_index_has_is_there_at_once_and_without_a_probe() -> None:
    volume = Volume()
    volume.index = {K: Presence.PRESENT, L: Presence.ABSENT}
    assert volume.lookups.ask(K, "a") is Verdict.THERE
    assert volume.lookups.ask(L, "a") is Verdict.ABSENT
    volume.lookups.send()
    assert volume.asked == []


def test_a_block_that_a_probe_found_is_known_to_every_request() -> None:
    volume = Volume(K)
    assert volume.ask(K, "a") is Verdict.THERE
    assert volume.lookups.ask(K, "b") is Verdict.THERE
    assert volume.asked == [K]


def test_a_block_that_is_absent_is_so_for_the_request_that_asked() -> None:
    volume = Volume()
    assert volume.ask(K, "a") is Verdict.ABSENT
    volume.present.add(K)
    assert volume.ask(K, "a") is Verdict.ABSENT
    assert volume.ask(K, "b") is Verdict.THERE


def test_requests_that_ask_for_one_block_together_cause_one_probe() -> None:
    volume = Volume(K)
    for request in "abc":
        assert volume.lookups.ask(K, request) is Verdict.WAITING
    for request in "abc":
        assert volume.ask(K, request) is Verdict.THERE
    assert volume.asked == [K]


def test_a_block_that_could_not_be_loaded_is_not_loaded_again_for_the_same_request() -> None:
    volume = Volume(K)
    volume.ask(K, "a")
    volume.lookups.add_failed([K], "a")

    assert volume.ask(K, "b") is Verdict.THERE
    assert volume.ask(K, "a") is Verdict.FAILED


def test_an_answer_after_the_deadline_changes_nothing_for_the_request_that_waited() -> None:
    volume = Volume(K)
    volume.gate.clear()
    volume.lookups.ask(K, "a")
    volume.lookups.send()
    wait_until(lambda: volume.asked == [K], "the probe is under way")
    volume.now += 6
    assert volume.ask(K, "a") is Verdict.LATE
    volume.gate.set()
    assert volume.pool.close(5)
    volume.lookups.collect()

    assert volume.lookups.ask(K, "a") is Verdict.LATE
    assert volume.lookups.ask(K, "b") is Verdict.THERE


def test_a_request_that_ends_before_its_answer_leaves_nothing_behind() -> None:
    volume = Volume()
    volume.lookups.ask(K, "a")
    volume.lookups.forget("a")
    volume.lookups.send()
    assert volume.asked == []
    volume.gate.clear()
    volume.lookups.ask(K, "b")
    volume.lookups.send()
    volume.lookups.forget("b")
    volume.gate.set()

    assert volume.ask(K, "c") is Verdict.ABSENT
    # Asked anew, so the answer to the request that ended was not kept for it.
    assert volume.lookups.ask(K, "b") is Verdict.WAITING


def test_every_declared_metric_is_declared_as_vllm_wants_it() -> None:
    declared = metrics.definitions()
    assert len(declared) == len(metrics.METRICS)
    for metric in metrics.METRICS:
        kind = OffloadingGaugeMetadata if metric.is_gauge else OffloadingCounterMetadata
        assert isinstance(declared[metric.name], kind)
        assert declared[metric.name].labelnames == metric.labels
        assert metric.name.startswith("vllm:"), "vLLM unregisters only such names when an engine is built anew"


def test_an_undeclared_metric_cannot_be_observed() -> None:
    with pytest.raises(ValueError, match="declare it in METRICS"):
        metrics.Stats().count(metrics.Metric("vllm:kvtier_new", "New."))
    with pytest.raises(ValueError, match="with the labels"):
        metrics.Stats().count(metrics.MISSES)


def test_statistics_are_taken_once() -> None:
    stats = metrics.Stats()
    stats.count(metrics.MISSES, cause="absent")
    stats.count(metrics.MISSES, 2, cause="absent")
    stats.set(metrics.ACTIVE, 1)

    assert stats.take().reduce() == {f"{metrics.MISSES.name}:('absent',)": 3, metrics.ACTIVE.name: 1}
    assert stats.take().is_empty()


def test_rows_are_copied_in_and_out_by_their_number() -> None:
    table = bytearray(range(16)) * 4
    slots = Slots(memoryview(table).cast("B", shape=[4, 16]))
    buffer = Staging(16).array
    slots.copy_out(2, buffer)
    assert bytes(buffer) == bytes(range(16))
    buffer[:] = 7
    slots.copy_in(1, buffer)
    slots.release()

    assert bytes(table[16:32]) == bytes([7]) * 16
    assert bytes(table[:16]) == bytes(range(16))
