# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from e2e.bench import cells, report, workloads
from e2e.bench.cells import GPU_HEAVY, TINY_HEAVY, HeavyCell, figures, hit_share, windows
from e2e.bench.engines import joined_ids
from e2e.bench.throttle import Bucket
from e2e.bench.workloads import GPU_SIZES, TINY_SIZES, Sizes

from kvtier_connector.store.blockstore import BlockStore
from kvtier_connector.store.journal import JournalWriter, Op
from kvtier_connector.store.layout import BlockKey, block_path

ROOT = Path(__file__).resolve().parents[2]


def test_an_agent_asks_for_its_history_again_and_has_computed_nearly_all_of_it_before() -> None:
    steps = cells.steps(GPU_HEAVY)
    earlier = [*cells.agents(GPU_HEAVY, step=0), *steps]
    reused = []
    for number, request in enumerate(steps):
        before = earlier[number]
        assert request["parts"][:-1] == before["parts"]
        assert request.get("after", number) == (number if number < GPU_HEAVY.agents else number - GPU_HEAVY.agents)
        assert request["gap"] > 0
        assert GPU_HEAVY.agent_output <= request["output_tokens"] <= 2 * GPU_HEAVY.agent_output
        reused.append(sum(tokens for _, tokens in before["parts"]) / sum(tokens for _, tokens in request["parts"]))
    assert min(reused) >= 0.95


@pytest.mark.parametrize(
    ("played", "tokens"),
    [
        (["A"], 0),
        (["long"], 120832),
        (["prepare-single", "D"], 33792),
        (["preemption"], 3072),
        (["prepare-long"], 120832),
    ],
)
def test_the_context_is_as_long_as_the_longest_prompt_of_the_cells(played: list[str], tokens: int) -> None:
    assert cells.model_length(played, GPU_SIZES, GPU_HEAVY) == tokens


def test_given_sizes_are_those_of_either_kind() -> None:
    given = {"single_tokens": [2048, 120000], "agents": 4}
    sizes, heavy = cells.sized(GPU_SIZES, given), cells.sized(GPU_HEAVY, given)
    assert cells.model_length(["single"], sizes, heavy) == 120832
    assert len(cells.agents(heavy, step=0)) == 4
    assert sizes.users == GPU_SIZES.users


def request(at: float, cached: int, **changes: object) -> report.Record:
    return {"tokens": 100, "cached": cached, "at": at, "first": 0.1, "output": [1, 2, 3], **changes}


def test_hits_are_told_by_windows_of_the_first_tokens() -> None:
    found = [request(0.1, 0), request(1.9, 50), request(4.1, 100), request(4.2, 100, tokens=300)]
    assert windows(found, hit_share) == [0.25, 0.0, 0.5]
    assert hit_share(found[:2]) == 0.25


@pytest.mark.parametrize(("scheduled", "recomputed"), [(204, 0.0), (260, 56.0)])
def test_what_the_steps_computed_more_than_once_is_recomputed(scheduled: int, recomputed: float) -> None:
    # Of two prompts 200 tokens are not found, and of each answer two tokens are computed from the ones before.
    counts = {"preemptions": 1, "scheduled_tokens": scheduled}
    record = {"seconds": 2.0, "counts": counts, "requests": [request(0.1, 0), request(0.2, 0)]}
    found = dict(zip(cells.HEADERS[1:], figures(record), strict=False))
    assert found["recomputed tokens"] == recomputed
    assert (found["input tokens/s"], found["output tokens/s"], found["preemptions"]) == (100.0, 3.0, 1)


def test_blocks_that_were_acknowledged_and_are_absent_or_damaged_are_lost(tmp_path: Path) -> None:
    root = tmp_path / "0123456789abcdef"
    store, journal = BlockStore(root), JournalWriter(root)
    keys = [BlockKey(bytes([number] * 32), 0) for number in range(4)]
    for key in keys:
        store.put(key, memoryview(bytearray(8192)))
        journal.append(Op.STORED, key, 8192)
    journal.flush()
    (root / block_path(keys[0])).unlink()
    damaged = root / block_path(keys[1])
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    (root / "tier.json").write_text("{}")
    found = cells.count_blocks(tmp_path)
    assert found["acknowledged_blocks"] == 4
    assert found["lost_blocks"] == 2


def test_readers_of_one_bucket_share_its_rate(tmp_path: Path) -> None:
    buckets = [Bucket(tmp_path / "busy") for _ in range(2)]
    buckets[0].rate = 1e6
    began = time.monotonic()
    for bucket in buckets * 2:
        bucket.take(50_000)
    assert time.monotonic() - began >= 0.19


SMALL_STEPS = {"long_prefill_token_threshold": 32}
"""Requests whose blocks are taken bit by bit are let in while there is no room for all of them, and are preempted."""
SIZES = {"agent_tokens": 512, "long_tokens": 1024, "long_rounds": 1, "burst_tokens": 512}
SIZES |= {"preempted_output": 128, "killed_tokens": 256, "killed_per_second": 0.5}
"""A busy machine answers some of the killed conversations before the kill, too."""


def offer_patience(directory: Path) -> None:
    """Have the engines of processes with this path read what the volume has: vLLM calls its plugins in each."""
    described = directory / "patience-1.dist-info"
    described.mkdir(parents=True)
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: patience\nVersion: 1\n")
    (described / "entry_points.txt").write_text("[vllm.general_plugins]\npatience = patience:be_patient\n")


@pytest.mark.engine
@pytest.mark.timeout(1200)
def test_every_heavy_cell_is_played_by_real_engines(tmp_path: Path) -> None:
    offer_patience(tmp_path / "plugin")
    runs = [
        "kvtier:preemption:agents:returning:preemption:killed",
        "kvtier:long:prepare-long:prepare-bursts512:long:bursts512",
    ]
    command = [sys.executable, "-m", "e2e.bench.traffic", "--device", "cpu", "--out", str(tmp_path)]
    options = ["--throttle", "4", "--engine", json.dumps(SMALL_STEPS), "--sizes", json.dumps(SIZES)]
    code = (ROOT, ROOT / "connector", ROOT / "operator", ROOT / "tests/connector/tier", tmp_path / "plugin")
    paths = os.pathsep.join(map(str, code))
    subprocess.run(
        [*command, "--work", str(tmp_path / "work"), *options, *runs],
        env={**os.environ, "PYTHONPATH": paths},
        check=True,
    )
    records = report.read(tmp_path / "traffic.jsonl")
    assert not [record for record in records if record["kind"] in {"failed", "skipped", "missing"}]
    found = report.group((record["cell"], record) for record in records if record["kind"] == "cell")
    assert set(found) == {cell for cell in cells.TITLES if not cell.startswith(HeavyCell.ROUTER)}
    share = {cell: hit_share(each[0]["requests"]) for cell, each in found.items()}
    assert found["preemption"][0]["counts"]["preemptions"] > 0
    assert share["bursts512"] > 0.9
    # A hit may be split, and compute its head.
    assert min(share["long"], share["bursts512 first"]) > 0
    (killed,) = found["killed"]
    assert killed["lost_blocks"] == 0
    assert len(killed["requests"]) + len(found["killed before"][0]["requests"]) == (
        TINY_HEAVY.killed_turns * TINY_HEAVY.killed_conversations
    )


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
