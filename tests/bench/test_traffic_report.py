# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from pathlib import Path

import pytest
from e2e.bench.report import IN_GPU, Numbers, Record, measure, percentile, write


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
        "counts": {"preemptions": 0, "scheduled_tokens": 0},
        "began": 50.0,
        "requests": list(requests) or [request(0.1), request(0.3)],
    }
    return {**record, **changes}


def table_row(text: str, start: str) -> list[str]:
    row = next(line for line in text.splitlines() if line.startswith(f"| {start}"))
    return [part.strip() for part in row.strip("|").split("|")]


def report(directory: Path, *records: Record) -> str:
    (directory / "traffic.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records), "utf-8")
    return write(directory)


@pytest.mark.parametrize(("share", "expected"), [(0.99, 99.0), (0.991, 100.0), (0.5, 50.0), (0.01, 1.0), (0.0, 1.0)])
def test_a_percentile_is_a_value_that_was_measured(share: float, expected: float) -> None:
    assert percentile([float(value) for value in range(100, 0, -1)], share) == expected


def numbers(*requests: Record) -> Numbers:
    (found,) = measure([cell("users", "kvtier", 2.0, *requests)]).values()
    return found


def test_the_time_per_token_leaves_the_first_token_out() -> None:
    found = numbers(request(0.1), request(0.3, seconds=0.9), request(0.5, output=[1], seconds=0.5))
    assert found.first == pytest.approx((0.3,))
    assert found.first_p99 == found.all_first == (0.5,)
    assert found.token == pytest.approx(((0.1 + 0.2) / 2,))
    assert numbers(request(0.1, output=[1])).token == (0.0,)


def test_hits_are_weighed_by_the_length_of_the_prompts_and_first_turns_find_nothing() -> None:
    first = request(0.1, label="turn 0", tokens=100, cached=0)
    assert numbers(first, request(0.1, tokens=100, cached=0), request(0.1, tokens=300, cached=300)).hits == (0.75,)


def test_an_engine_whose_gpu_holds_everything_has_a_column_of_its_own_except_where_nothing_is_found() -> None:
    records = [
        cell("A", "none", 20.0, stage="all-in-gpu"),
        cell("A", "none", 50.0),
        cell("A", "kvtier", 22.0),
        cell("never", "none", 10.0, stage="all-in-gpu"),
        cell("never", "kvtier", 10.1),
    ]
    found = measure(records)
    assert {name: found["A", "", name].seconds for name in (IN_GPU, "none", "kvtier")} == {
        IN_GPU: (20.0,),
        "none": (50.0,),
        "kvtier": (22.0,),
    }
    assert found["never", "", "none"].seconds == (10.0,)


def test_repetitions_are_shown_as_median_and_extremes(tmp_path: Path) -> None:
    text = report(tmp_path, *(cell("B", "kvtier", seconds) for seconds in (10.3, 10.4, 10.5)))
    assert table_row(text, "B, fewer conversations: kvtier")[1] == "10.4 (10.3-10.5)"


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


def test_a_cell_after_a_kill_tells_when_the_hits_are_back_and_what_was_lost(tmp_path: Path) -> None:
    text = report(
        tmp_path,
        cell("killed", "kvtier", 2.0, back_seconds=2.0, lost_blocks=0),
        cell("killed", "none", 4.0, back_seconds=None),
    )
    assert table_row(text, "after the kill: kvtier")[-3:-1] == ["2", "0"]
    assert table_row(text, "after the kill: no offload")[-3:-1] == ["never", "-"]


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
