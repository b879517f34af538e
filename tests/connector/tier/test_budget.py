# SPDX-License-Identifier: Apache-2.0
"""How much of the CPU tier a waiting request may fill from disk, and that a request is always decided."""

from __future__ import annotations

import itertools
import os
import threading

import pytest
from clocks import Clock
from rig import Rig, Rigs, key, keys
from slow_fs import GatedFs
from vllm.v1.kv_offload.base import OffloadKey

from kvtier_connector.tier.budget import Admission, PromotionBudget


def admitted(budget: PromotionBudget, request: str, count: int, first: int = 0) -> int:
    """Ask for a prefix as vLLM does, to its end unless a block must be computed; return how many may be fetched."""
    answers = itertools.takewhile(
        lambda answer: answer is not Admission.COMPUTE, (budget.admit(k, request) for k in keys(count, first))
    )
    return sum(answer is Admission.FETCH for answer in answers)


def fetched(budget: PromotionBudget, request: str, count: int, first: int = 0) -> int:
    taken = admitted(budget, request, count, first)
    budget.charge(keys(taken, first), request)
    budget.end_step()
    return taken


def test_one_request_may_fill_four_fifths_of_the_tier_and_computes_the_rest() -> None:
    budget = PromotionBudget(100)
    assert admitted(budget, "r", 200) == 80
    assert budget.admit(key(80), "r") is Admission.COMPUTE
    assert budget.waiting == 0


def test_a_request_for_which_there_is_no_room_waits_and_is_then_served_whole() -> None:
    budget = PromotionBudget(100)
    assert fetched(budget, "a", 50) == 50
    assert fetched(budget, "b", 50, first=100) == 30
    assert budget.admit(key(130), "b") is Admission.WAIT
    budget.end_step()
    budget.release("a")

    assert fetched(budget, "b", 20, first=130) == 20
    assert budget.waiting == 0


def test_nobody_overtakes_a_request_that_waits_for_room() -> None:
    budget = PromotionBudget(100)
    fetched(budget, "a", 80)
    assert budget.admit(key(100), "b") is Admission.WAIT
    assert budget.admit(key(200), "c") is Admission.WAIT
    budget.end_step()
    budget.release("a")

    assert budget.admit(key(200), "c") is Admission.WAIT
    assert budget.admit(key(100), "b") is Admission.FETCH


def test_waiting_for_room_is_bounded() -> None:
    clock = Clock()
    budget = PromotionBudget(100, wait_seconds=10, clock=clock)
    fetched(budget, "a", 80)
    assert budget.admit(key(100), "b") is Admission.WAIT
    clock.seconds = 11
    budget.end_step()

    assert budget.waiting == 0
    assert budget.admit(key(100), "b") is Admission.COMPUTE


def test_all_requests_together_never_hold_more_than_the_limit() -> None:
    budget = PromotionBudget(100)
    taken = [admitted(budget, request, 70, first=100 * number) for number, request in enumerate("abc")]
    assert taken == [70, 10, 0]


def test_a_block_is_fetched_once_for_a_waiting_request() -> None:
    budget = PromotionBudget(100)
    assert budget.admit(key(1), "r") is Admission.FETCH
    budget.charge([key(1)], "r")
    assert budget.admit(key(1), "r") is Admission.COMPUTE


def test_an_offer_that_was_not_taken_up_may_be_made_again() -> None:
    budget = PromotionBudget(100)
    assert admitted(budget, "r", 80) == 80
    budget.end_step()
    assert admitted(budget, "r", 80) == 80


def test_a_request_that_is_scheduled_gives_no_room_while_an_older_one_waits() -> None:
    # Its blocks are still in the tier, younger than those of the one that waits, which would be evicted first.
    budget = PromotionBudget(100)
    budget.charge(keys(40), "older")
    budget.charge(keys(40, first=100), "younger")
    budget.release("younger")

    assert admitted(budget, "another", 80, first=200) == 0
    budget.release("older")
    budget.end_step()
    assert admitted(budget, "another", 80, first=200) == 80


def test_a_preempted_request_that_goes_on_keeps_no_room_until_it_ends() -> None:
    budget = PromotionBudget(100)
    budget.preempt("a")
    assert fetched(budget, "a", 80) == 80
    # Scheduled again, of which nobody tells.
    assert fetched(budget, "b", 80, first=100) == 80
    assert budget.admit(key(0), "a") is Admission.COMPUTE
    budget.release("b")
    assert admitted(budget, "c", 100, first=200) == 80
    assert budget.waiting == 0


def test_a_preempted_request_waits_its_turn_like_any_other_and_is_forgotten_when_it_ends() -> None:
    budget = PromotionBudget(100)
    fetched(budget, "b", 80)
    budget.preempt("a")
    assert budget.admit(key(100), "a") is Admission.WAIT
    budget.end_step()
    budget.release("a")
    budget.release("b")
    assert fetched(budget, "a", 80, first=100) == 80
    assert budget.admit(key(0), "b") is Admission.WAIT


def test_the_smallest_tier_takes_one_block() -> None:
    assert admitted(PromotionBudget(1), "r", 5) == 1


@pytest.mark.parametrize("blocks", [8, 9, 10, 11, 13, 20, 40])
def test_a_prefix_longer_than_the_cpu_tier_is_decided_in_a_bounded_number_of_steps(rigs: Rigs, blocks: int) -> None:
    rigs.write(keys(blocks))
    rig = rigs.make(chunks=10)
    served = rig.serve(keys(blocks), max_steps=5000)

    assert served.hit_blocks == min(blocks, 8)
    assert rig.metric("vllm:kvtier_disk_read_blocks") == served.hit_blocks


def run_together(rig: Rig, wanted: dict[str, list[OffloadKey]], *, steps: int) -> dict[str, int]:
    """Serve requests that arrive at once, in turn and in a bounded number of steps; compare every byte."""
    contexts = {request: rig.request(request) for request in wanted}
    hits: dict[str, int] = {}
    for _ in range(steps):
        decided = []
        for request in [request for request in wanted if request not in hits]:
            found = rig.find_prefix(wanted[request], contexts[request])
            if found is not None:
                rig.load(wanted[request][:found], contexts[request])
                hits[request] = found
                decided.append(request)
        rig.end_step(new=decided)
        if len(hits) == len(wanted):
            break
        threading.Event().wait(0.001)
    for context in contexts.values():
        rig.finish(context)
    return hits


def test_two_requests_longer_than_the_cpu_tier_are_both_decided(rigs: Rigs) -> None:
    rigs.write(keys(30))
    rigs.write(keys(30, first=100))
    rig = rigs.make(chunks=10)

    assert run_together(rig, {"a": keys(30), "b": keys(30, first=100)}, steps=5000) == {"a": 8, "b": 8}
    assert rig.metric("vllm:kvtier_disk_read_blocks") == 16
    assert rig.metric("vllm:kvtier_disk_refused_promotions") == 2


def test_eight_requests_that_together_want_thrice_the_cpu_tier_are_all_served_whole(rigs: Rigs) -> None:
    wanted = {f"user {number}": keys(16, first=100 * number) for number in range(8)}
    for prefix in wanted.values():
        rigs.write(prefix)
    rig = rigs.make(chunks=60)

    assert run_together(rig, wanted, steps=5000) == dict.fromkeys(wanted, 16)
    assert rig.metric("vllm:kvtier_disk_read_blocks") == 8 * 16
    assert rig.metric("vllm:kvtier_disk_refused_promotions") == 0


def test_requests_do_not_wait_for_each_other_while_the_volume_is_not_walked_and_answers_slowly(rigs: Rigs) -> None:
    class Slow(GatedFs):
        """Answers whether it has a block after a while, and lists nothing."""

        def scandir(self, path: str) -> list[os.DirEntry[str]]:
            if path.endswith("/blocks"):
                self._pass("scandir", path)
            return super().scandir(path)

        def stat(self, path: str) -> os.stat_result:
            threading.Event().wait(0.002 * (len(self.calls) % 5))
            return super().stat(path)

    wanted = {f"user {number}": keys(16, first=100 * number) for number in range(8)}
    for prefix in wanted.values():
        rigs.write(prefix)
    fs = Slow(lambda call, _: call == "scandir")
    rig = rigs.make(chunks=30, fs=fs)

    assert run_together(rig, wanted, steps=8000) == dict.fromkeys(wanted, 16)
    assert rig.metric("vllm:kvtier_disk_refused_promotions") == 0
    fs.open_gate()


def test_the_head_of_a_prefix_that_is_in_the_cpu_tier_does_not_keep_its_request_waiting(rigs: Rigs) -> None:
    rigs.write(keys(30))
    rig = rigs.make(chunks=10)
    rig.offload(keys(6), "head")
    assert rig.serve(keys(30), max_steps=5000).hit_blocks <= 10
