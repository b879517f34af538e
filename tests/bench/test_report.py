# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import lzma
from pathlib import Path

import ci_tools
import pytest
from e2e.bench.report import Journal, Record, milliseconds, plain, read, store_report


def run() -> Record:
    return {
        "kind": "run",
        "date": "2026-11-21 05:00:00 UTC",
        "command": "python bench.py",
        "versions": {"vllm": "0.32.0"},
        "machine": {"cpus": 16, "cpu": "a processor", "memory_gib": 128, "gpu": "NVIDIA H200"},
        "settings": {"repetitions": 3, "job_mib": 512},
    }


def write(path: Path, records: list[Record]) -> None:
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
    write(tmp_path / "store.jsonl", records)
    row = next(line for line in store_report(tmp_path).splitlines() if line.startswith("| 8 MiB, 16 threads"))
    assert [cell.strip() for cell in row.strip("|").split("|")][1:] == ["20.0", "19.0", "3.80", "95.0 %", "5.00x"]


def test_records_that_were_packed_to_be_kept_are_read_as_well(tmp_path: Path) -> None:
    path = tmp_path / "store.jsonl"
    write(path, [run()])
    path.with_name("store.jsonl.xz").write_bytes(lzma.compress(path.read_bytes()))
    path.unlink()
    assert read(path) == [run()]


def test_figures_of_the_parts_that_a_run_played_are_from_it_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = ci_tools.load("figures")
    numbers = tmp_path / "numbers.json"
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    monkeypatch.setattr(figures, "NUMBERS", numbers)
    cell = {"tokens": 100, "cached": 75, "at": 0.1, "first": 0.1, "seconds": 0.2, "output": [1, 2], "label": "8"}
    old = {
        "kind": "cell",
        "stage": "",
        "variant": "",
        "backend": "kvtier",
        "cell": "D",
        "requests": [cell],
        "counts": {},
    }
    write(tmp_path / "old.jsonl", [{**old, "seconds": 9.0}])
    for number, (variant, backend) in enumerate([("disk", "kvtier-whole"), ("agents", "none"), ("agents", "fs")]):
        (tmp_path / str(number)).mkdir()
        record = {
            **old,
            "seconds": number + 1.0,
            "variant": variant,
            "backend": backend,
            "counts": {"scheduled_tokens": 0},
        }
        write(tmp_path / str(number) / "traffic.jsonl", [run(), record])
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
