# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import itertools

import pytest
from e2e.bench import cells, workloads
from e2e.bench.cells import GPU_HEAVY, TINY_HEAVY
from e2e.bench.engines import joined_ids
from e2e.bench.workloads import GPU_SIZES, TINY_SIZES, Sizes

VOCABULARY = 32000


def everything(sizes: Sizes) -> list[list[workloads.Request]]:
    heavy = GPU_HEAVY if sizes is GPU_SIZES else TINY_HEAVY
    return [
        workloads.conversations(sizes, sizes.conversations),
        workloads.short_prompts(sizes),
        workloads.arrivals(sizes),
        workloads.shared_prefix(sizes) + workloads.sharers(sizes),
        workloads.singles(sizes),
        workloads.users(sizes),
        *(workloads.never(sizes, number) for number in range(2)),
        cells.steps(heavy),
        cells.long_prompts(heavy),
        cells.bursts(heavy),
        cells.preempted(heavy),
        cells.steady(heavy),
    ]


def prompt(request: workloads.Request) -> list[int]:
    return joined_ids([tuple(part) for part in request["parts"]], VOCABULARY)


def test_a_turn_follows_the_same_conversations_turn_before_and_repeats_all_of_its_prompt() -> None:
    requests = workloads.conversations(TINY_SIZES, TINY_SIZES.conversations)
    followed = [(request, requests[request["after"]]) for request in requests if "after" in request]
    assert len(followed) == TINY_SIZES.conversations * (TINY_SIZES.turns - 1)
    # Every conversation has had its turn before any has its next.
    assert [request["label"] for request in requests] == sorted(request["label"] for request in requests)
    for request, earlier in followed:
        shared = prompt(earlier)[:-1]
        assert prompt(request)[: len(shared)] == shared
        assert len(prompt(request)) - len(prompt(earlier)) == TINY_SIZES.turn_tokens


@pytest.mark.parametrize(("sizes", "block_tokens"), [(GPU_SIZES, 64), (TINY_SIZES, 128)])
def test_every_part_is_whole_blocks_and_one_token_is_left_to_compute(sizes: Sizes, block_tokens: int) -> None:
    for request in itertools.chain(*everything(sizes)):
        assert all(tokens % block_tokens == 0 for _, tokens in request["parts"])
        assert len(prompt(request)) % block_tokens == 1


def test_no_two_workloads_share_a_first_part() -> None:
    kinds = [*everything(GPU_SIZES), workloads.warm_up(GPU_SIZES)]
    firsts = [{request["parts"][0] for request in requests} for requests in kinds]
    assert all(not one & other for one, other in itertools.combinations(firsts, 2))


def test_sharers_have_the_prepared_prefix_in_common_and_nothing_after_it() -> None:
    prefix = prompt(workloads.shared_prefix(TINY_SIZES)[0])[:-1]
    prompts = [prompt(request) for request in workloads.sharers(TINY_SIZES)]
    assert all(tokens[: len(prefix)] == prefix for tokens in prompts)
    assert len({tuple(tokens[len(prefix) : -1]) for tokens in prompts}) == TINY_SIZES.sharers


def test_blocks_that_prompts_share_are_counted_once() -> None:
    requests = workloads.conversations(GPU_SIZES, GPU_SIZES.conversations)
    assert workloads.block_count(requests, 64) == 40 * (8192 + 3 * 512) // 64
    assert workloads.block_count([*requests, *requests], 64) == workloads.block_count(requests, 64)
