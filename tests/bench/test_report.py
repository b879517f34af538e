# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import lzma
from pathlib import Path

from e2e.bench import journal, outputs
from e2e.bench.journal import Journal, Record
from e2e.bench.report import engine_report
from e2e.bench.store_report import store_report


def run() -> Record:
    return {
        "kind": "run",
        "date": "2026-11-21 05:00:00 UTC",
        "command": "python bench.py",
        "versions": {"vllm": "0.32.0"},
        "machine": {"cpus": 16, "cpu": "a processor", "memory_gib": 128, "gpu": "NVIDIA H200"},
        "settings": {"repetitions": 3, "job_mib": 512},
    }


def single(backend: str, case: str, first: float, **changes: object) -> Record:
    record: Record = {
        "kind": "single",
        "phase": "single-tmpfs",
        "backend": backend,
        "case": case,
        "tokens": 32768,
        "repetition": 0,
        "seed": 7,
        "first": first,
        "cached": 0 if case == "cold" else 32768,
        "output": [1, 2, 3],
    }
    return {**record, **changes}


def wave(backend: str, all_first: float, served: int) -> Record:
    return {
        "kind": "wave",
        "phase": "users-8",
        "backend": backend,
        "case": "return",
        "users": 8,
        "tokens": 32768,
        "repetition": 0,
        "all_first": all_first,
        "served": served,
        "first": [all_first],
        "cached": [32768] * served + [0] * (8 - served),
        "seeds": list(range(8)),
        "outputs": [[1, 2, 3]] * 8,
    }


def never(backend: str, repetition: int, rate: float) -> Record:
    return {
        "kind": "never",
        "phase": "never",
        "backend": backend,
        "repetition": repetition,
        "output_tokens_per_second": rate,
        "tpot": [0.01, 0.02],
        "first": [0.1, 0.2, 0.3],
        "hits": 0,
        "seeds": [9],
        "outputs": [[1]],
    }


def write(path: Path, records: list[Record]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def test_the_report_compares_the_disk_hit_with_the_rival_the_own_cpu_tier_and_computing(tmp_path: Path) -> None:
    records = [
        run(),
        single("none", "cold", 1.2),
        single("fs", "disk_hit", 1.0),
        single("kvtier", "disk_hit", 0.2),
        single("kvtier", "cpu_hit", 0.1),
    ]
    write(tmp_path / "engine.jsonl", records)
    text = engine_report(tmp_path)
    row = next(line for line in text.splitlines() if line.startswith("| 32768"))
    assert [cell.strip() for cell in row.strip("|").split("|")] == [
        "32768",
        "5.00x faster",
        "2.00x its time",
        "6.00x faster",
    ]


def test_the_report_shows_the_median_of_the_repetitions_and_is_written_beside_its_chart(tmp_path: Path) -> None:
    firsts = [0.3, 0.1, 0.2]
    write(tmp_path / "engine.jsonl", [run(), *(single("fs", "disk_hit", first) for first in firsts)])
    assert "200 (100-300)" in engine_report(tmp_path)
    assert (tmp_path / "engine.md").read_text(encoding="utf-8") == engine_report(tmp_path)
    assert (tmp_path / "single-tmpfs.png").stat().st_size > 0


def test_the_report_says_how_many_users_were_served_whole(tmp_path: Path) -> None:
    write(tmp_path / "engine.jsonl", [run(), wave("fs", 4.0, 6), wave("kvtier", 1.5, 8), wave("kvtier", 1.7, 8)])
    text = engine_report(tmp_path)
    assert "4.00 [6; 75.0 %]" in text
    assert "1.60 (1.50-1.70) [8/8; 100.0 %]" in text
    assert "vLLM fs 0.40x" in text


def test_overhead_is_also_compared_round_by_round(tmp_path: Path) -> None:
    rates = [("none", 0, 100.0), ("kvtier", 0, 99.0), ("none", 1, 200.0), ("kvtier", 1, 198.0)]
    write(tmp_path / "engine.jsonl", [run(), *(never(*rate) for rate in rates)])
    row = next(line for line in engine_report(tmp_path).splitlines() if line.startswith("| kvtier"))
    assert row.count("-1.0 %") == 2


def test_what_failed_or_was_left_out_is_told(tmp_path: Path) -> None:
    records = [
        run(),
        {"kind": "failed", "phase": "users-8", "backend": "fs", "error": "fs: ended with 1\na log"},
        {"kind": "skipped", "phase": "users-8", "backend": "lifeboat"},
        {"kind": "missing", "backend": "fs", "found": 90, "expected": 100},
    ]
    write(tmp_path / "engine.jsonl", records)
    text = engine_report(tmp_path)
    assert "users-8, fs: failed: fs: ended with 1" in text
    assert "users-8, lifeboat: not measured" in text
    assert "fs: 10.0 % of the blocks were not stored" in text


def test_a_wrong_answer_shows_against_the_hit_of_the_same_arithmetic() -> None:
    records = [
        single("none", "cold", 1.0, output=[1, 2, 4]),
        single("none", "gpu_hit", 0.1),
        single("fs", "disk_hit", 0.1),
        single("kvtier", "disk_hit", 0.1, output=[1, 9, 9]),
    ]
    text = outputs.section(records)
    equal = {
        cells[0].strip(): [cell.strip() for cell in cells[1:]]
        for cells in (line.strip("|").split("|") for line in text.splitlines() if "hit" in line and "|" in line)
    }
    assert equal["fs, disk_hit"] == ["0 / 1", "1 / 1"]
    assert equal["kvtier, disk_hit"] == ["0 / 1", "0 / 1"]


def test_a_hit_of_another_length_is_not_compared_with_a_gpu_hit() -> None:
    records = [single("none", "gpu_hit", 0.1), single("kvtier", "disk_hit", 0.1, cached=64, output=[5])]
    row = next(line for line in outputs.section(records).splitlines() if line.startswith("| kvtier, disk_hit"))
    assert row.rstrip("| ").endswith("-")


def test_a_journal_cut_off_in_the_middle_of_a_line_is_read_up_to_there(tmp_path: Path) -> None:
    log = Journal(tmp_path / "engine.jsonl")
    log.write({"kind": "skipped"})
    with log.path.open("a", encoding="utf-8") as file:
        file.write('{"kind": "sing')
    assert journal.read(log.path) == [{"kind": "skipped"}]


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
    assert (tmp_path / "store-tmpfs-load.png").stat().st_size > 0


def test_records_that_were_packed_to_be_kept_give_the_same_report(tmp_path: Path) -> None:
    path = tmp_path / "engine.jsonl"
    write(path, [run(), single("fs", "disk_hit", 1.0), single("kvtier", "disk_hit", 0.2)])
    assert not journal.exists(tmp_path / "store.jsonl")
    plain = engine_report(tmp_path)
    path.with_name("engine.jsonl.xz").write_bytes(lzma.compress(path.read_bytes()))
    path.unlink()
    assert journal.exists(path)
    assert engine_report(tmp_path) == plain
