# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import pytest
from e2e.bench import report
from e2e.bench.cells import TINY_HEAVY, TINY_STAGES
from e2e.bench.traffic import Settings, Traffic
from e2e.bench.workloads import TINY_SIZES
from e2e.engines.process import EngineEnded
from e2e.matrix import rendering

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
        counts = {"preemptions": 0, "scheduled_tokens": 0}
        return {
            "seconds": 1.0,
            "began": 0.0,
            "counts": counts,
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


@pytest.mark.parametrize(
    ("backend", "stage", "given", "cells"),
    [
        ("none", "all-in-gpu", [], ["A", "C first", "C"]),
        ("none", "restart", ["E"], ["E", "E in GPU"] * 3),
        ("none", "restart", ["single"], ["single first", "single in GPU"] * 2),
        ("fs", "restart", ["single"], ["single first", "single again", "single in GPU"] * 2),
        ("fs", "restart", ["users"], ["users"] * 3),
        ("none", "agents", [], ["agents first", "agents"]),
        ("none", "long", [], ["long"] * 2),
        ("none", "bursts", [], ["bursts512 first", "bursts512"]),
        ("none", "preemption", [], ["preemption"]),
        ("none", "killed", [], ["killed before", "killed"]),
        ("fs", "agents", ["agents", "returning"], ["agents first", "agents", "returning"]),
        ("none", "router", [], ["router random", "router prefix"]),
        ("cpu", "traffic", ["prepare"], []),  # it has no volume for which anything could be prepared
    ],
)
def test_a_stage_plays_its_cells_in_order_and_ends_its_engine(
    tmp_path: Path, backend: str, stage: str, given: list[str], cells: list[str]
) -> None:
    rig = Rig(tmp_path)
    rig.traffic.play(backend, stage, given)
    records = rig.records("cell")
    assert [(each["cell"], each["backend"], each["stage"]) for each in records] == [(c, backend, stage) for c in cells]
    assert all(engine.is_closed for engine in rig.engines)


def test_a_stage_that_fails_is_a_record_and_the_next_one_is_played(tmp_path: Path) -> None:
    rig = Rig(tmp_path, fails_at=2)
    rig.traffic.play("none", "all-in-gpu", [])
    rig.traffic.play("none", "all-in-gpu", ["E"])
    assert [record["error"] for record in rig.records("failed")] == ["no answer", "no answer"]
    assert [engine.is_closed for engine in rig.engines] == [True, True]


def test_a_cell_without_an_answer_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = {"seconds": 1.0, "began": 0.0, "counts": {}, "requests": []}
    monkeypatch.setattr(FakeEngine, "run", lambda *_, **__: nothing)
    rig = Rig(tmp_path)
    rig.traffic.play("none", "killed", [])
    assert [record["error"] for record in rig.records("failed")] == ["killed before: no request was answered"]


def test_no_engine_is_started_when_the_time_is_up(tmp_path: Path) -> None:
    rig = Rig(tmp_path, deadline=time.monotonic() - 1)
    rig.traffic.play("none", "all-in-gpu", [])
    assert not rig.engines
    assert len(rig.records("skipped")) == 1


def test_a_restart_finds_what_was_prepared_and_nothing_else(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.traffic.play("fs", "traffic", [])
    prepared = rig.stored()
    prompts = [
        *([TINY_SIZES.arrival_tokens] * TINY_SIZES.arrivals),
        TINY_SIZES.shared_tokens,
        *TINY_SIZES.single_tokens,
        *([TINY_SIZES.user_tokens] * TINY_SIZES.users),
        *TINY_SIZES.single_tokens,  # of the warm-up
    ]
    assert prepared == sum(prompts) // BLOCK_TOKENS
    rig.traffic.play("fs", "restart", ["D"])
    assert rig.stored() >= prepared
    assert not rig.records("missing")


def test_a_new_run_of_a_backend_begins_with_an_empty_volume(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.traffic.play("fs", "traffic", ["prepare"])
    rig.traffic.play("fs", "traffic", ["A"])
    assert rig.stored() == 0


def test_blocks_that_a_backend_did_not_store_are_counted(tmp_path: Path) -> None:
    rig = Rig(tmp_path, block_bytes=BLOCK_BYTES + 1)
    rig.traffic.play("fs", "traffic", ["prepare"])
    missing, again = rig.records("missing")  # what the volume left out is asked for once more
    assert again == missing
    assert missing["found"] == 0
    assert missing["expected"] > 0


@pytest.mark.parametrize(("stage", "size"), [("traffic", (2304 + 16) * 4), ("restart", 0)])
def test_the_gpu_holds_what_the_stage_says(tmp_path: Path, stage: str, size: int) -> None:
    rig = Rig(tmp_path)
    rig.traffic.play("none", stage, ["C"])
    assert rig.records("engine")[0]["gpu_bytes"] == size


def test_engines_of_a_group_start_together_and_play_in_turns(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.traffic.play_together([("none", "traffic", ["C"]), ("fs", "traffic", ["C"]), ("none", "traffic", ["E"])])
    played = [(record["backend"], record["cell"]) for record in rig.records("cell")]
    assert played[:4] == [("none", "C first"), ("none", "C"), ("fs", "C first"), ("fs", "C")]
    assert {backend for backend, _ in played[4:]} == {"none"}
    assert [engine.is_closed for engine in rig.engines] == [True, True]


def test_every_replica_of_a_stage_is_warm_and_has_requests_of_its_own(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.traffic.play("none", "router", [])
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
    rig.traffic.play_together([("fs", "traffic", ["C"]), ("none", "traffic", ["C"])])
    assert [record["backend"] for record in rig.records("failed")] == ["fs"]
    assert {record["backend"] for record in rig.records("cell")} == {"none"}


@pytest.mark.parametrize(("backend", "disk"), [("kvtier", {}), ("kvtier-whole", {"splitHits": "Off"})])
def test_an_engine_has_the_scheduler_that_the_operator_gives_a_tier(
    tmp_path: Path, backend: str, disk: dict[str, str]
) -> None:
    model = {"name": "meta-llama/Llama-3.1-8B-Instruct"}
    tier = {"model": model, "cpu": {"size": "1Gi"}, "volume": {"existingClaim": "blocks"}, "disk": disk}
    container, _ = rendering.engine_of(rendering.body_of("bench", tier))
    rig = Rig(tmp_path)
    rig.traffic.play(backend, "restart", ["D"])
    given = rig.engines[0].arguments.get("scheduler_cls")
    flags = [word for word in container["args"] if word.startswith("--scheduler-cls")]
    assert flags == ([f"--scheduler-cls={given}"] if given else [])


def test_rounds_play_other_prompts_each_time(tmp_path: Path) -> None:
    rig = Rig(tmp_path, rounds=2)
    rig.traffic.play("none", "all-in-gpu", [])
    seeds = [{request["parts"][0][0] for request in record["requests"]} for record in rig.records("cell")]
    assert len(seeds) == 6
    assert not seeds[0] & seeds[1]
    assert seeds[2] == seeds[3]
    assert not seeds[3] & seeds[4]


def test_users_come_again_with_gpu_and_cpu_tier_emptied_in_between(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.traffic.play("fs", "restart", ["users"])
    assert rig.engines[0].calls[1:] == ["forget all"] * 3


def test_those_who_share_a_prefix_come_again_with_parts_that_nobody_has_seen(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.traffic.play("none", "restart", ["E"])
    parts = [request["parts"] for record in rig.records("cell") for request in record["requests"]]
    assert len({str(prefix) for prefix, _ in parts}) == 1
    assert len({str(own) for _, own in parts}) == len(parts) == 6 * TINY_SIZES.sharers
    assert rig.engines[0].calls.count("forget all") == 0
