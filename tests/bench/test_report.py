# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import lzma
from pathlib import Path

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


@pytest.mark.parametrize(
    ("values", "text"),
    [([3.0, 1.0, 10.0], "3.00 (1.00-10.0)"), ([254.4], "254"), ([44.14], "44.1"), ([2.5], "2.50"), ([], "-")],
)
def test_repetitions_are_written_as_median_and_extremes_with_three_digits(values: list[float], text: str) -> None:
    assert plain(values) == text
    assert milliseconds([value / 1000 for value in values]) == text
