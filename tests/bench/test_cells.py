# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import pytest
import yaml
from e2e.bench import cells, report, workloads
from e2e.bench.cells import GPU_HEAVY, TINY_HEAVY, TINY_STAGES, HeavyCell, figures, hit_share, windows
from e2e.bench.engines import joined_ids
from e2e.bench.throttle import Bucket
from e2e.bench.traffic import Settings, Traffic
from e2e.bench.workloads import GPU_SIZES, TINY_SIZES, Sizes
from e2e.engines.process import EngineEnded
from e2e.matrix import rendering

from kvtier_connector.store.blockstore import BlockStore
from kvtier_connector.store.journal import JournalWriter, Op
from kvtier_connector.store.layout import BlockKey, block_path

TABLES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())

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


@pytest.mark.parametrize(("played", "tokens"), TABLES["longest_prompts"])
def test_the_context_is_as_long_as_the_longest_prompt_of_the_cells(played: list[str], tokens: int) -> None:
    assert cells.model_length(played, GPU_SIZES, GPU_HEAVY) == tokens


def test_given_sizes_are_those_of_either_kind() -> None:
    given = {"single_tokens": [2048, 120000], "agents": 4}
    sizes, heavy = cells.sized(GPU_SIZES, given), cells.sized(GPU_HEAVY, given)
    assert cells.model_length(["single"], sizes, heavy) == 120832
    assert len(cells.agents(heavy, step=0)) == 4
    assert sizes.sharers == GPU_SIZES.sharers


def request(at: float, cached: int, **changes: object) -> report.Record:
    return {"tokens": 100, "cached": cached, "at": at, "first": 0.1, "output": [1, 2, 3], **changes}


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


def test_sharers_have_the_prepared_prefix_in_common_and_no_two_workloads_a_first_part() -> None:
    kinds = [*everything(GPU_SIZES), workloads.warm_up(GPU_SIZES)]
    firsts = [{request["parts"][0] for request in requests} for requests in kinds]
    assert all(not one & other for one, other in itertools.combinations(firsts, 2))
    prefix = prompt(workloads.shared_prefix(TINY_SIZES)[0])[:-1]
    prompts = [prompt(request) for request in workloads.sharers(TINY_SIZES)]
    assert all(tokens[: len(prefix)] == prefix for tokens in prompts)
    assert len({tuple(tokens[len(prefix) : -1]) for tokens in prompts}) == TINY_SIZES.sharers


def test_blocks_that_prompts_share_are_counted_once_and_hits_by_windows_of_first_tokens() -> None:
    requests = workloads.conversations(GPU_SIZES, GPU_SIZES.conversations)
    assert workloads.block_count(requests, 64) == 40 * (8192 + 3 * 512) // 64
    assert workloads.block_count([*requests, *requests], 64) == workloads.block_count(requests, 64)
    found = [request(0.1, 0), request(1.9, 50), request(4.1, 100), request(4.2, 100, tokens=300)]
    assert windows(found, hit_share) == [0.25, 0.0, 0.5]
    assert hit_share(found[:2]) == 0.25


BLOCK_TOKENS = 128
BLOCK_BYTES = 512


class FakeEngine:
    """Answers at once, stores a file for each block where its settings name a directory, and fails when told to."""

    def __init__(self, settings: Mapping[str, Any], fails_at: int) -> None:
        self.facts = {"seconds": 1.0, "gpu_bytes": settings["engine"].get("kv_cache_memory_bytes", 0)}
        self.start_seconds = 1.0
        self.arguments = settings["engine"]
        self.asked: list[list[Mapping[str, Any]]] = []
        self.calls: list[str] = []
        self.is_closed = False
        self._fails_at = fails_at
        transfer = settings["transfer"]
        tiers = transfer["kv_connector_extra_config"].get("secondary_tiers", []) if transfer else []
        self._store = next((Path(tier["root_dir"]) for tier in tiers if "root_dir" in tier), None)

    def run(self, requests: Sequence[Mapping[str, Any]], *_: Any, **__: Any) -> dict[str, Any]:
        if len(self.asked) == self._fails_at:
            raise EngineEnded("no answer")
        self.asked.append(list(requests))
        for request in requests if self._store else []:
            prefix = ""
            for seed, tokens in request["parts"]:
                prefix += f"-{seed}"
                for number in range(tokens // BLOCK_TOKENS):
                    assert self._store is not None
                    path = self._store / f"b{prefix}-{number}"
                    if not path.exists():
                        path.write_bytes(bytes(BLOCK_BYTES))
        one = {"tokens": 129, "cached": 128, "at": 0.1, "first": 0.1, "seconds": 0.2, "output": [1, 2]}
        return {
            "seconds": 1.0,
            "began": 0.0,
            "counts": {"preemptions": 0, "scheduled_tokens": 0},
            "requests": [{**request, **one} for request in requests],
        }

    def forget(self, *, cpu_tier: bool = False) -> None:
        self.calls.append("forget all" if cpu_tier else "forget")

    def kill(self) -> None:
        self.calls.append("kill")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.is_closed = True


class Rig:
    def __init__(self, directory: Path, *, fails_at: int = -1, fails_to_start: str = "", **changes: Any) -> None:
        self.engines: list[FakeEngine] = []
        self.volume = directory / "volume"
        self.log = report.Journal(directory / "traffic.jsonl")
        settings: dict[str, Any] = {
            "work": directory,
            "volume": self.volume,
            "sizes": TINY_SIZES,
            "heavy": TINY_HEAVY,
            "stages": TINY_STAGES,
            "engine": {"enforce_eager": True},
            "is_cpu_build": False,
            "block_tokens": BLOCK_TOKENS,
            "block_bytes": BLOCK_BYTES,
            "vocabulary": 32000,
        }

        def start(name: str, given: Mapping[str, Any], *_: Any) -> Any:
            if fails_to_start and fails_to_start in name:
                raise EngineEnded("it does not start")
            self.engines.append(FakeEngine(given, fails_at))
            return self.engines[-1]

        self.traffic = Traffic(Settings(**{**settings, **changes}), self.log, start)

    def records(self, kind: str) -> list[report.Record]:
        return [record for record in report.read(self.log.path) if record["kind"] == kind]

    def stored(self) -> int:
        return sum(1 for path in self.volume.rglob("b-*"))


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


@pytest.mark.parametrize(("backend", "stage", "given", "cells"), TABLES["stages"])
def test_a_stage_plays_its_cells_in_order_and_ends_its_engine(
    rig: Rig, backend: str, stage: str, given: list[str], cells: list[str]
) -> None:
    rig.traffic.play([(backend, stage, given)])
    records = rig.records("cell")
    assert [(each["cell"], each["backend"], each["stage"]) for each in records] == [(c, backend, stage) for c in cells]
    assert all(engine.is_closed for engine in rig.engines)


def test_a_stage_that_fails_is_a_record_and_the_next_one_is_played(tmp_path: Path) -> None:
    rig = Rig(tmp_path, fails_at=2)
    rig.traffic.play([("none", "all-in-gpu", [])])
    rig.traffic.play([("none", "all-in-gpu", ["E"])])
    assert [record["error"] for record in rig.records("failed")] == ["no answer", "no answer"]
    assert [engine.is_closed for engine in rig.engines] == [True, True]


def test_a_cell_without_an_answer_is_a_failure(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = {"seconds": 1.0, "began": 0.0, "counts": {}, "requests": []}
    monkeypatch.setattr(FakeEngine, "run", lambda *_, **__: nothing)
    rig.traffic.play([("none", "killed", [])])
    assert [record["error"] for record in rig.records("failed")] == ["killed before: no request was answered"]


def test_no_engine_is_started_when_the_time_is_up(tmp_path: Path) -> None:
    rig = Rig(tmp_path, deadline=time.monotonic() - 1)
    rig.traffic.play([("none", "all-in-gpu", [])])
    assert not rig.engines
    assert len(rig.records("skipped")) == 1


def test_a_restart_finds_what_was_prepared_and_nothing_else(rig: Rig) -> None:
    rig.traffic.play([("fs", "traffic", [])])
    prepared = rig.stored()
    prompts = [
        *([TINY_SIZES.arrival_tokens] * TINY_SIZES.arrivals),
        TINY_SIZES.shared_tokens,
        *TINY_SIZES.single_tokens,
        *TINY_SIZES.single_tokens,  # of the warm-up
    ]
    assert prepared == sum(prompts) // BLOCK_TOKENS
    rig.traffic.play([("fs", "restart", ["D"])])
    assert rig.stored() >= prepared
    assert not rig.records("missing")


def test_a_new_run_of_a_backend_begins_with_an_empty_volume(rig: Rig) -> None:
    rig.traffic.play([("fs", "traffic", ["prepare"])])
    rig.traffic.play([("fs", "traffic", ["A"])])
    assert rig.stored() == 0


def test_blocks_that_a_backend_did_not_store_are_counted(tmp_path: Path) -> None:
    rig = Rig(tmp_path, block_bytes=BLOCK_BYTES + 1)
    rig.traffic.play([("fs", "traffic", ["prepare"])])
    missing, again = rig.records("missing")  # what the volume left out is asked for once more
    assert again == missing
    assert missing["found"] == 0
    assert missing["expected"] > 0


@pytest.mark.parametrize(("stage", "size"), [("traffic", (2304 + 16) * 4), ("restart", 0)])
def test_the_gpu_holds_what_the_stage_says(rig: Rig, stage: str, size: int) -> None:
    rig.traffic.play([("none", stage, ["C"])])
    assert rig.records("engine")[0]["gpu_bytes"] == size


def test_engines_of_a_group_start_together_and_play_in_turns(rig: Rig) -> None:
    rig.traffic.play([("none", "traffic", ["C"]), ("fs", "traffic", ["C"]), ("none", "traffic", ["E"])])
    played = [(record["backend"], record["cell"]) for record in rig.records("cell")]
    assert played[:4] == [("none", "C first"), ("none", "C"), ("fs", "C first"), ("fs", "C")]
    assert {backend for backend, _ in played[4:]} == {"none"}
    assert [engine.is_closed for engine in rig.engines] == [True, True]


def test_every_replica_of_a_stage_is_warm_and_has_requests_of_its_own(rig: Rig) -> None:
    rig.traffic.play([("none", "router", [])])
    assert len(rig.engines) == TINY_STAGES["router"].engines
    for engine in rig.engines:
        warm, *_, at_random, by_prefix = engine.asked
        assert {each["label"] for each in warm} == {"warm-up"}
        assert {each["label"] for each in at_random + by_prefix} == {"grouped"}
    requests = rig.records("cell")[1]["requests"]
    assert len(requests) == TINY_HEAVY.groups * TINY_HEAVY.group_requests
    # A prefix always meets the same engine.
    assert len({(tuple(each["parts"][0]), each["engine"]) for each in requests}) == TINY_HEAVY.groups


def test_an_engine_that_does_not_start_leaves_the_others_of_its_group(tmp_path: Path) -> None:
    rig = Rig(tmp_path, fails_to_start="fs")
    rig.traffic.play([("fs", "traffic", ["C"]), ("none", "traffic", ["C"])])
    assert [record["backend"] for record in rig.records("failed")] == ["fs"]
    assert {record["backend"] for record in rig.records("cell")} == {"none"}


@pytest.mark.parametrize(("backend", "disk"), [("kvtier", {}), ("kvtier-whole", {"splitHits": "Off"})])
def test_an_engine_has_the_scheduler_that_its_tier_has(rig: Rig, backend: str, disk: dict[str, str]) -> None:
    model = {"name": "meta-llama/Llama-3.1-8B-Instruct"}
    tier = {"model": model, "cpu": {"size": "1Gi"}, "volume": {"existingClaim": "blocks"}, "disk": disk}
    container, _ = rendering.engine_of(rendering.body_of("bench", tier))
    rig.traffic.play([(backend, "restart", ["D"])])
    given = rig.engines[0].arguments.get("scheduler_cls")
    flags = [word for word in container["args"] if word.startswith("--scheduler-cls")]
    assert flags == ([f"--scheduler-cls={given}"] if given else [])


def test_rounds_play_other_prompts_each_time(tmp_path: Path) -> None:
    rig = Rig(tmp_path, rounds=2)
    rig.traffic.play([("none", "all-in-gpu", [])])
    seeds = [{request["parts"][0][0] for request in record["requests"]} for record in rig.records("cell")]
    assert len(seeds) == 6
    assert not seeds[0] & seeds[1]
    assert seeds[2] == seeds[3]
    assert not seeds[3] & seeds[4]


def test_prompts_arrive_again_with_gpu_and_cpu_tier_emptied_in_between(rig: Rig) -> None:
    rig.traffic.play([("fs", "restart", ["D"])])
    assert rig.engines[0].calls[1:] == ["forget all"] * 3


def test_those_who_share_a_prefix_come_again_with_parts_that_nobody_has_seen(rig: Rig) -> None:
    rig.traffic.play([("none", "restart", ["E"])])
    parts = [request["parts"] for record in rig.records("cell") for request in record["requests"]]
    assert len({str(prefix) for prefix, _ in parts}) == 1
    assert len({str(own) for _, own in parts}) == len(parts) == 6 * TINY_SIZES.sharers
    assert rig.engines[0].calls.count("forget all") == 0
