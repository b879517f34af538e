# SPDX-License-Identifier: Apache-2.0
"""The sizes of a pod agree with each other, whatever the size of the CPU tier."""

from __future__ import annotations

import pytest
from tiers import tier

from kvtier_operator.api import parse
from kvtier_operator.api.status_schema import PodSizing
from kvtier_operator.plan import Decisions, engine_args, report
from kvtier_operator.plan.chunks import Chunking
from kvtier_operator.plan.sizing import GIB, make_sizing


def sized(cpu: int, memory: int = GIB, engines: int = 1, *, ranks: int = 1) -> PodSizing:
    engine = {"memory": str(memory), "tensorParallel": ranks, "args": [f"--data-parallel-size={engines}"]}
    decisions = Decisions(cpu_bytes=cpu, node_bytes=None, cpu_for="", chunking=Chunking(), weight_bytes=0, model_for="")
    return make_sizing(parse(tier(engine=engine)), decisions)


@pytest.mark.parametrize(
    ("args", "engines"),
    [
        ([], 1),
        (["--data-parallel-size", "4"], 4),
        (["--data_parallel_size=4"], 4),
        (["-dp", "8", "-dpl", "2"], 2),
        (["--data-parallel-size", "many"], 1),
        (["--data-parallel-size", "9" * 30], 1),
    ],
)
def test_data_parallel_engines_are_counted_in_every_spelling(args: list[str], engines: int) -> None:
    assert engine_args.read(args).engines_per_pod == engines


@pytest.mark.parametrize(
    ("args", "found"),
    [
        (["--dtype", "bfloat16"], {"dtype": ("bfloat16",)}),
        (["--kv_cache_dtype=fp8"], {"kv-cache-dtype": ("fp8",)}),
        (["--hf-overrides.rope_theta", "5e5"], {"hf-overrides": (".rope_theta", "5e5")}),
        (["--enforce-eager", "--seed", "-1"], {"enforce-eager": (), "seed": ("-1",)}),
        (["-q", "awq"], {"quantization": ("awq",)}),
    ],
)
def test_a_flag_is_read_alike_in_every_spelling(args: list[str], found: dict[str, tuple[str, ...]]) -> None:
    assert engine_args.read(args).words == found


def test_no_term_is_larger_than_a_status_can_hold() -> None:
    sizing = sized(1 << 62, 1 << 62, 9999)
    found = report.terms(sizing, None, node_bytes=None)
    assert found["shmBytes"] == found["memoryBytes"] == 2**63 - 1


def test_page_tables_of_a_cpu_tier_of_a_tebibyte_are_counted_for_each_process_that_maps_it() -> None:
    one, eight = (sized(1 << 40, ranks=ranks) for ranks in (1, 8))
    assert eight.io_worker_bytes - one.io_worker_bytes == 7 * 2 * GIB
    assert eight.io_worker_bytes >= 9 * 2 * GIB
