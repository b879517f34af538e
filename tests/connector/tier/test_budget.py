# SPDX-License-Identifier: Apache-2.0
"""How much of the CPU tier a waiting request may fill from disk, and that a request is always decided."""

from __future__ import annotations

import itertools

import pytest
from rig import Rigs, key, keys

from kvtier_connector.tier.budget import PromotionBudget


def admitted(budget: PromotionBudget, request: str, count: int, first: int = 0) -> int:
    return len(list(itertools.takewhile(lambda k: budget.admit(k, request), keys(count, first))))


def test_one_request_may_fill_four_fifths_of_the_tier() -> None:
    assert admitted(PromotionBudget(100), "r", 200) == 80


def test_requests_that_wait_together_share_alike() -> None:
    budget = PromotionBudget(100)
    for request in "abcd":
        budget.join(request)
    assert [admitted(budget, request, 100) for request in "abcd"] == [20, 20, 20, 20]


def test_all_requests_together_never_hold_more_than_the_limit() -> None:
    budget = PromotionBudget(100)
    taken = [admitted(budget, request, 100, first=100 * number) for number, request in enumerate("abc")]
    assert sum(taken) <= 80


def test_a_block_is_fetched_once_for_a_waiting_request() -> None:
    budget = PromotionBudget(100)
    assert budget.admit(key(1), "r")
    budget.charge([key(1)], "r")
    assert not budget.admit(key(1), "r")


def test_an_offer_that_was_not_taken_up_may_be_made_again() -> None:
    budget = PromotionBudget(100)
    assert admitted(budget, "r", 100) == 80
    budget.end_step()
    assert admitted(budget, "r", 100) == 80


def test_a_request_that_is_scheduled_gives_its_room_back() -> None:
    budget = PromotionBudget(100)
    budget.charge(keys(80), "a")
    assert admitted(budget, "b", 10) == 0
    budget.release("a")
    assert admitted(budget, "b", 100) == 80


def test_a_request_that_is_scheduled_gives_no_room_while_an_older_one_waits() -> None:
    # Its blocks are still in the tier, younger than those of the one that waits, which would be evicted first.
    budget = PromotionBudget(100)
    budget.charge(keys(40), "older")
    budget.charge(keys(40, first=100), "younger")
    budget.release("younger")

    assert admitted(budget, "older", 100, first=40) == 0
    assert admitted(budget, "another", 100, first=200) == 0
    budget.release("older")
    assert admitted(budget, "another", 100, first=200) == 80


def test_the_smallest_tier_takes_one_block() -> None:
    assert admitted(PromotionBudget(1), "r", 5) == 1


@pytest.mark.parametrize("blocks", [8, 9, 10, 11, 13, 20, 40])
def test_a_prefix_longer_than_the_cpu_tier_is_decided_in_a_bounded_number_of_steps(rigs: Rigs, blocks: int) -> None:
    rigs.write(keys(blocks))
    rig = rigs.make(chunks=10)
    served = rig.serve(keys(blocks), max_steps=5000)

    assert served.hit_blocks == min(blocks, 8)
    assert rig.metric("vllm:kvtier_disk_read_blocks") == served.hit_blocks


def test_two_requests_longer_than_the_cpu_tier_are_both_decided(rigs: Rigs) -> None:
    rigs.write(keys(30))
    rigs.write(keys(30, first=100))
    rig = rigs.make(chunks=10)
    waiting = {"a": keys(30), "b": keys(30, first=100)}
    contexts = {request: rig.request(request) for request in waiting}
    hits: dict[str, int] = {}
    for _ in range(5000):
        for request in [request for request in waiting if request not in hits]:
            found = rig.find_prefix(waiting[request], contexts[request])
            if found is not None:
                rig.load(waiting[request][:found], contexts[request])
                hits[request] = found
        rig.end_step(new=list(hits))
        if len(hits) == 2:
            break

    # Each gets its half; whoever comes second may use the room that the first one leaves.
    assert min(hits.values()) == 4
    assert max(hits.values()) <= 8
    assert rig.metric("vllm:kvtier_disk_read_blocks") == sum(hits.values())
    for context in contexts.values():
        rig.finish(context)


def test_the_head_of_a_prefix_that_is_in_the_cpu_tier_does_not_keep_its_request_waiting(rigs: Rigs) -> None:
    rigs.write(keys(30))
    rig = rigs.make(chunks=10)
    rig.offload(keys(6), "head")
    assert rig.serve(keys(30), max_steps=5000).hit_blocks <= 10
