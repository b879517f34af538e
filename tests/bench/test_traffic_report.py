# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import lzma
from pathlib import Path

import ci_tools
import pytest
from e2e.bench.report import (
    IN_GPU,
    Journal,
    Numbers,
    Record,
    measure,
    milliseconds,
    percentile,
    plain,
    read,
    store_report,
    write,
)


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
    (found,) = measure([cell("D", "kvtier", 2.0, *requests)]).values()
    return found


def test_the_time_per_token_leaves_the_first_one_out_and_hits_are_weighed_by_their_prompts() -> None:
    found = numbers(request(0.1), request(0.3, seconds=0.9), request(0.5, output=[1], seconds=0.5))
    assert found.first == pytest.approx((0.3,))
    assert found.first_p99 == found.all_first == (0.5,)
    assert found.token == pytest.approx(((0.1 + 0.2) / 2,))
    assert numbers(request(0.1, output=[1])).token == (0.0,)
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
        cell("single first", "lmcache", 1.0, request(0.2, label="2048", cached=0)),
        cell("single again", "lmcache", 1.0, request(0.1, label="2048", output=[6, 2, 3, 4])),
        cell("single in GPU", "lmcache", 1.0, request(0.1, label="2048", output=[6, 2, 3, 4])),
    )
    assert table_row(text, "vLLM fs, from the volume")[1] == "0 / 1"
    # A hit that loads nothing leaves the GPU what it computes from then on.
    assert table_row(text, "LMCache, host memory, from the CPU tier")[1] == "0 / 1"
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


def run() -> Record:
    return {
        "kind": "run",
        "date": "2026-11-21 05:00:00 UTC",
        "command": "python bench.py",
        "versions": {"vllm": "0.32.0"},
        "machine": {"cpus": 16, "cpu": "a processor", "memory_gib": 128, "gpu": "NVIDIA H200"},
        "settings": {"repetitions": 3, "job_mib": 512},
    }


def put(path: Path, records: list[Record]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def test_a_journal_cut_off_in_the_middle_of_a_line_is_read_up_to_there(tmp_path: Path) -> None:
    log = Journal(tmp_path / "engine.jsonl")
    log.write({"kind": "skipped"})
    with log.path.open("a", encoding="utf-8") as file:
        file.write('{"kind": "sing')
    assert read(log.path) == [{"kind": "skipped"}]


def test_the_store_report_compares_ours_with_the_plain_reader_and_with_one_job_of_vllm(tmp_path: Path) -> None:
    def load(contestant: str, threads: int, rate: float) -> Record:
        return {
            "kind": "store",
            "volume": "tmpfs",
            "way": "load",
            "contestant": contestant,
            "chunk_mib": 8.0,
            "threads": threads,
            "gb_per_second": rate,
        }

    records = [
        run(),
        load("plain parallel reader", 16, 20.0),
        load("kvtier movers", 16, 19.0),
        load("vLLM fs, one job", 0, 3.8),
    ]
    put(tmp_path / "store.jsonl", records)
    row = next(line for line in store_report(tmp_path).splitlines() if line.startswith("| 8 MiB, 16 threads"))
    assert [cell.strip() for cell in row.strip("|").split("|")][1:] == ["20.0", "19.0", "3.80", "95.0 %", "5.00x"]


def test_records_that_were_packed_to_be_kept_are_read_as_well(tmp_path: Path) -> None:
    path = tmp_path / "store.jsonl"
    put(path, [run()])
    path.with_name("store.jsonl.xz").write_bytes(lzma.compress(path.read_bytes()))
    path.unlink()
    assert read(path) == [run()]


def test_figures_of_parts_that_a_run_played_are_from_it_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = ci_tools.load("figures")
    numbers = tmp_path / "numbers.json"
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    monkeypatch.setattr(figures, "NUMBERS", numbers)
    old = cell("D", "kvtier", 9.0, request(0.1, label="8"), stage="")
    put(tmp_path / "old.jsonl", [old])
    for number, (variant, backend) in enumerate([("disk", "kvtier-whole"), ("agents", "none"), ("agents", "fs")]):
        (tmp_path / str(number)).mkdir()
        record = {**old, "seconds": number + 1.0, "variant": variant, "backend": backend}
        put(tmp_path / str(number) / "traffic.jsonl", [run(), record])
    runs = {
        "whole": {"journal": "old.jsonl", "backend": "kvtier", "part": "disk", "as": "kvtier-whole"},
        "agents": {"part": "agents"},
        "ram": {"journal": "old.jsonl", "backend": "kvtier", "part": "ram"},
        "nfs": {"part": "nfs", "backend": "kvtier"},
    }
    figure = {"cell": "D", "what": "seconds"}
    of = {"whole": {}, "agents": {"backend": "fs"}, "ram": {}, "nfs": {}}
    named = json.dumps({name: {"run": name, **figure, **more} for name, more in of.items()})
    rows = [[name, f"={name}", "@"] for name in of]
    tables = json.dumps({"all": {"head": ["", "seconds", "run"], "rows": rows, "notes": []}})
    lines = ",\n".join(f'  "{name}": {json.dumps(each)}' for name, each in runs.items())
    numbers.write_text(f'{{"runs": {{\n{lines}\n}}, "figures": {named}, "tables": {tables}}}')
    figures.adopt("2026-12-01-one-run", [tmp_path / str(number) for number in range(3)])
    found = figures.measured()
    assert {name: each["value"] for name, each in found["figures"].items()} == {
        "whole": 1.0,
        "agents": 3.0,
        "ram": 9.0,
        "nfs": None,
    }
    assert found["runs"]["whole"]["backend"] == "kvtier-whole"
    assert [line.split(" | ")[0] for line in figures.table("all", found, numbers).strip().splitlines()[2:]] == [
        "| whole",
        "| agents",
        "| ram",
    ]
    assert "Traffic benchmark" in (tmp_path / "2026-12-01-one-run" / "traffic.md").read_text()


@pytest.mark.parametrize(
    ("values", "text"),
    [([3.0, 1.0, 10.0], "3.00 (1.00-10.0)"), ([254.4], "254"), ([44.14], "44.1"), ([2.5], "2.50"), ([], "-")],
)
def test_repetitions_are_written_as_median_and_extremes_with_three_digits(values: list[float], text: str) -> None:
    assert plain(values) == text
    assert milliseconds([value / 1000 for value in values]) == text
