# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from pathlib import Path

import pytest
from e2e.bench.journal import Record
from e2e.bench.timeline import make_timeline
from e2e.bench.traffic_numbers import AIMS, later_turns, measure, percentile, served
from e2e.bench.traffic_report import write


def request(first: float, **changes: object) -> Record:
    record: Record = {
        "label": "user",
        "parts": [[7, 1024]],
        "tokens": 1025,
        "cached": 1024,
        "at": first,
        "first": first,
        "seconds": first + 0.3,
        "output": [1, 2, 3, 4],
    }
    return {**record, **changes}


def cell(name: str, backend: str, seconds: float, *requests: Record, **changes: object) -> Record:
    record: Record = {
        "kind": "cell",
        "cell": name,
        "backend": backend,
        "stage": "traffic",
        "variant": "",
        "seconds": seconds,
        "began": 50.0,
        "requests": list(requests) or [request(0.1), request(0.3)],
    }
    return {**record, **changes}


def aim(records: list[Record], what: str) -> float | None:
    (found,) = [aim.found(measure(records)) for aim in AIMS if aim.what.startswith(what)]
    return found


def table_row(text: str, start: str) -> list[str]:
    row = next(line for line in text.splitlines() if line.startswith(f"| {start}"))
    return [part.strip() for part in row.strip("|").split("|")]


def report(directory: Path, *records: Record) -> str:
    (directory / "traffic.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records), "utf-8")
    return write(directory)


@pytest.mark.parametrize(("share", "expected"), [(0.99, 99.0), (0.991, 100.0), (0.5, 50.0), (0.01, 1.0), (0.0, 1.0)])
def test_a_percentile_is_a_value_that_was_measured(share: float, expected: float) -> None:
    assert percentile([float(value) for value in range(100, 0, -1)], share) == expected


def test_the_time_per_token_leaves_the_first_token_out() -> None:
    found = served([request(0.1), request(0.3, seconds=0.9)])
    assert found.first_mean == pytest.approx(0.2)
    assert found.first_p99 == 0.3
    assert found.token_mean == pytest.approx((0.1 + 0.2) / 2)


def test_a_request_of_one_token_has_no_time_per_token() -> None:
    assert served([request(0.1, output=[1], seconds=0.1)]).token_mean == 0.0


def test_hits_are_weighed_by_the_length_of_the_prompts() -> None:
    assert served([request(0.1, tokens=100, cached=0), request(0.1, tokens=300, cached=300)]).hit_share == 0.75


def test_first_turns_find_nothing_and_are_left_out() -> None:
    requests = [request(0.1, label=label) for label in ("turn 0", "turn 1", "short")]
    assert [each["label"] for each in later_turns(requests)] == ["turn 1", "short"]


def test_an_engine_whose_gpu_holds_everything_has_a_column_of_its_own_except_where_nothing_is_found() -> None:
    records = [
        cell("A", "none", 20.0, stage="all-in-gpu"),
        cell("A", "none", 50.0),
        cell("A", "kvtier", 22.0),
        cell("never", "none", 10.0, stage="all-in-gpu"),
        cell("never", "kvtier", 10.1),
    ]
    assert aim(records, "A: seconds, of everything in GPU") == pytest.approx(1.1)
    assert aim(records, "never hits, CUDA graphs") == pytest.approx(1.01)


def test_an_aim_without_both_measurements_is_not_judged() -> None:
    assert aim([cell("A", "kvtier", 22.0)], "A: seconds, of vLLM fs") is None
    assert aim([cell("B", "cpu", 22.0)], "B: seconds") is None


def test_aims_are_judged_by_the_medians_of_the_repetitions(tmp_path: Path) -> None:
    text = report(
        tmp_path,
        *(cell("B", "cpu", seconds) for seconds in (10.0, 10.1, 99.0)),
        *(cell("B", "kvtier", seconds) for seconds in (10.3, 10.4, 10.5)),
    )
    assert table_row(text, "B: seconds")[1:] == ["1.03", "1.03", "yes"]
    assert table_row(text, "B, fewer conversations: kvtier")[1] == "10.4 (10.3-10.5)"


def test_a_hit_on_the_volume_is_compared_with_the_own_cpu_tier_and_with_the_rival() -> None:
    def single(name: str, backend: str, first: float) -> Record:
        return cell(name, backend, 1.0, request(first, label="32768"))

    records = [
        single("single first", "kvtier", 0.13),
        single("single again", "kvtier", 0.10),
        single("single first", "fs", 1.04),
    ]
    assert aim(records, "one prompt of 32k") == pytest.approx(1.3)
    assert aim(records, "the same, of vLLM fs") == pytest.approx(1 / 8)


def test_users_wait_for_the_last_first_token() -> None:
    assert aim([cell("users", "kvtier", 2.0, request(0.2), request(0.9))], "8 users") == 0.9


def test_an_answer_that_differs_from_the_one_of_the_same_engines_hit_in_the_gpu_is_shown(tmp_path: Path) -> None:
    text = report(
        tmp_path,
        cell("single first", "fs", 1.0, request(0.2, label="2048", output=[9, 9, 9, 9])),
        cell("single in GPU", "fs", 1.0, request(0.1, label="2048")),
        cell("single first", "kvtier", 1.0, request(0.1, label="2048", output=[7, 7, 7, 7])),
        cell("single in GPU", "kvtier", 1.0, request(0.1, label="2048", output=[7, 7, 7, 7])),
        cell("single first", "none", 1.0, request(0.1, label="2048", cached=0, output=[8])),
    )
    assert table_row(text, "vLLM fs, from the volume")[1] == "0 / 1"
    assert table_row(text, "kvtier, from the volume")[1] == "1 / 1"
    assert "no offload, from the volume" not in text.partition("## Answers")[2]


def test_what_failed_or_was_left_out_is_in_the_report(tmp_path: Path) -> None:
    text = report(
        tmp_path,
        {"kind": "failed", "backend": "fs", "stage": "traffic", "variant": "", "error": "fs: ended\nlog"},
        {"kind": "skipped", "backend": "cpu", "stage": "fits", "variant": ""},
        {"kind": "missing", "backend": "fs", "stage": "traffic", "variant": "", "found": 3, "expected": 4},
    )
    assert "- fs traffic: failed: fs: ended\n" in text
    assert "- cpu fits: not measured, the time was up" in text
    assert "- fs traffic: 3 of 4 blocks were on the volume" in text


def test_a_profile_is_shown_by_share_of_the_time_and_kept_out_of_the_comparison(tmp_path: Path) -> None:
    profile = {
        "seconds": 10.0,
        "calls": {"Scheduler.schedule": {"calls": 4, "seconds": 2.5, "longest": 1.0}},
        "cpu_seconds": {"other processes": 20.0},
        "trace": [],
    }
    text = report(tmp_path, cell("A", "kvtier", 9.0, profile=profile))
    assert table_row(text, "Scheduler.schedule")[1:] == ["4", "2.50", "25.0 %"]
    assert table_row(text, "CPU: other processes")[3] == "2.00x"
    assert "A, conversations: kvtier" not in text


def test_a_timeline_counts_from_the_request_and_ends_with_its_first_token(tmp_path: Path) -> None:
    trace = [
        ["KVTierScheduler.get_num_new_matched_tokens", 50.001, 50.003, []],
        ["Movers.collect", 50.010, 50.011, [[0.005, 1.0], [0.006, 1.0]]],
        ["SingleDirectionOffloadingHandler.get_finished", 50.02, 50.03, [[0.010, 4096.0]]],
        ["Worker.execute_model", 51.0, 51.1, []],
    ]
    record = cell("single first", "kvtier", 1.0, request(0.1, label="32768"), profile={"trace": trace, "seconds": 1.0})
    found = make_timeline(record)
    assert found.first_token == pytest.approx(100.0)
    assert found.spans["look-up"] == [pytest.approx((1.0, 2.0))]
    assert found.verified == pytest.approx([11.0, 11.0])
    assert found.copied == [pytest.approx((20.0, 30.0, 4096.0))]
    assert found.spans["model"] == []
    report(tmp_path, record)
    assert (tmp_path / "timeline.png").stat().st_size > 0
