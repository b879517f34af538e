# SPDX-License-Identifier: Apache-2.0
"""``kvtier plan --trace``: shares of recorded traffic that tiers would serve, counted by hand here."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from command import Command

TABLES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())

TOKEN_BYTES = 131_072
"""KV of a token of this model."""
CHUNK_TOKENS = 64
"""Of one file; 8 MiB and a header of 4 KiB."""


def tier(folder: Path, **spec: Any) -> str:
    """Write a tier whose host memory holds 1,024 tokens and its accelerators none."""
    spec = {**TABLES["spec"], **spec}
    body = {"apiVersion": "kvtier.dev/v1beta1", "kind": "KVCacheTier", "metadata": {"name": "llama"}, "spec": spec}
    (folder / "tier.yaml").write_text(yaml.safe_dump(body))
    return str(folder / "tier.yaml")


def trace(folder: Path, rows: Sequence[Any]) -> str:
    (folder / "trace.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / "trace.jsonl")


def asked(milliseconds: int, *names: int) -> dict[str, Any]:
    """Return a request of Mooncake's format with whole blocks of 512 tokens and one token behind them."""
    tokens = {"input_length": 512 * len(names) + 1, "output_length": 1}
    return {"timestamp": milliseconds, **tokens, "hash_ids": [*names, 0]}


Plan = Callable[..., dict[str, Any]]


@pytest.fixture
def plan(tmp_path: Path, kvtier: Command) -> Plan:
    """`plan(rows, *options, **spec)` returns what ``kvtier plan --trace`` tells of one tier."""

    def run(rows: Sequence[Any], *options: str, **spec: Any) -> dict[str, Any]:
        (found,) = kvtier.json("plan", tier(tmp_path, **spec), "--trace", trace(tmp_path, rows), *options)
        return dict(found)

    return run


def shares(found: dict[str, Any]) -> dict[tuple[str, int | None], float]:
    return {(each["tier"], each["bytes"]): each["share"] for each in found["served"]}


ROUND = [asked(0, 1, 2), asked(1000, 3, 4), asked(60_000, 1, 2), asked(61_000, 3, 4, 5)]
"""4 prompts of 4,612 tokens; host memory holds two blocks, so it never has one again: 2,048 tokens are elsewhere."""


def test_a_volume_serves_what_host_memory_has_evicted_and_replicas_share_it(plan: Plan) -> None:
    found = plan(ROUND)
    served = shares(found)
    assert served["host memory", 128 << 20] == 0
    assert served["volume", 10 << 30] == served["any size", None] == round(2048 / 4612, 4)
    assert (found["requests"], found["promptTokens"], found["seconds"]) == (4, 4612, 61)
    # The second minute reads 2,048 tokens of 128 KiB.
    assert found["busiestMinuteGBs"] == round(2048 * TOKEN_BYTES / 60 / 1e9, 3)
    rows = [asked(number, 1, 2) for number in range(3)]
    alone, two = (shares(plan(rows, replicas=replicas)) for replicas in (1, 2))
    assert alone["host memory", 128 << 20] == alone["any size", None] == round(2048 / 3075, 4)
    assert two["host memory", 128 << 20] == round(1024 / 3075, 4)
    assert two["volume", 10 << 30] == round(2048 / 3075, 4)


@pytest.mark.parametrize(("admission", "expected"), TABLES["admission"])
def test_admission_decides_what_is_on_the_volume(admission: dict[str, int], expected: int, plan: Plan) -> None:
    rows = [asked(0, 1, 2), asked(1, 3, 4), asked(2, 1, 2), asked(3, 3, 4), asked(4, 1, 2)]
    if "minTokens" in admission:
        rows = rows[:4]
    served = shares(plan(rows, disk={"admission": admission}))
    assert served["volume", 10 << 30] == round(expected / sum(row["input_length"] for row in rows), 4)


def test_a_volume_that_is_too_small_keeps_beginnings(plan: Plan) -> None:
    # 768 MiB hold 95 files of 64 tokens: 11 blocks of the trace.
    prompt = asked(0, *range(100, 116))
    served = shares(plan([prompt, {**prompt, "timestamp": 1}], volume={"claim": {"size": "768Mi"}}))
    assert served["volume", 768 << 20] == round(11 * 512 / (2 * 8193), 4)


def test_rates_are_told_in_tokens_and_seconds(plan: Plan) -> None:
    (rate,) = plan(ROUND, "--rate", "1.31072", "--prefill-rate", "30000")["rates"]
    assert rate == TABLES["rate"] | {"busyShare": round(2048 / 10_000 / 61, 3)}


def test_prompts_share_what_their_texts_share(plan: Plan) -> None:
    common = "x" * (4 * CHUNK_TOKENS * 10)
    found = plan([{"prompt": common + "a" * 400}, "other", {"prompt": common + "b" * 400}])
    assert (found["isEstimated"], found["seconds"]) == (True, None)
    assert shares(found)["any size", None] == round(10 * CHUNK_TOKENS / found["promptTokens"], 4)
    other_model = [{"model": "one", "prompt": common}, {"model": "two", "prompt": common}]
    assert shares(plan(other_model))["any size", None] == 0


def test_the_page_names_each_tier_once_and_the_picture_is_drawn(tmp_path: Path, kvtier: Command) -> None:
    picture = tmp_path / "trace.png"
    lines = kvtier("plan", tier(tmp_path), "--trace", trace(tmp_path, ROUND), "--picture", str(picture)).splitlines()
    assert lines[0].endswith("trace.jsonl: 4 requests, 4,612 prompt tokens in 1.0 min")
    tiers = [line.split("  ")[0] for line in lines if line.endswith("%")]
    assert tiers == ["accelerators", "host memory", *5 * ["volume"], "any size"]
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("rows", "message"), TABLES["refused"])
def test_what_is_no_trace_is_refused_by_line(rows: list[Any], message: str, tmp_path: Path, kvtier: Command) -> None:
    error = kvtier.fails("plan", tier(tmp_path), "--trace", trace(tmp_path, rows), code=2)
    assert message in error
    assert "text" not in error.replace("quoted text", "")


@pytest.mark.parametrize("prompt", [[1 << 80, -1], "\ud800 half a character"])
def test_odd_prompts_are_taken_as_they_are(prompt: Any, plan: Plan) -> None:
    assert plan([{"prompt": prompt}])["requests"] == 1


def test_a_line_that_is_no_text_is_refused_wherever_it_is(tmp_path: Path, kvtier: Command) -> None:
    file = Path(trace(tmp_path, [asked(0, 1)] * 500))
    file.write_bytes(file.read_bytes() + b"\xff\xfe\n" + b'{"hash_ids":' + b"[" * 100_000)
    assert "line 501: must be text in UTF-8" in kvtier.fails("plan", tier(tmp_path), "--trace", str(file), code=2)


def test_a_trace_may_be_packed_or_come_through_a_pipe(
    tmp_path: Path, kvtier: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, packed = Path(trace(tmp_path, ROUND)), tmp_path / "trace.jsonl.gz"
    packed.write_bytes(gzip.compress(file.read_bytes()))
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(file.read_bytes())))
    both = Path(tier(tmp_path))
    both.write_text(f"{both.read_text()}---\n{both.read_text()}")
    found = [each for way in (file, packed, "-") for each in kvtier.json("plan", both, "--trace", way)]
    assert [each["served"] for each in found] == 6 * [found[0]["served"]]


def test_a_picture_that_cannot_be_written_says_where(tmp_path: Path, kvtier: Command) -> None:
    words = ["plan", tier(tmp_path), "--trace", trace(tmp_path, ROUND), "--picture", str(tmp_path / "no/trace.png")]
    assert "no/trace.png: cannot be written (No such file or directory); name" in kvtier.fails(*words, code=2)


@pytest.mark.parametrize("option", [["--rate", "4"], ["--prefill-rate", "9"], ["--picture", "a.svg"]])
def test_options_of_a_trace_need_one(option: list[str], tmp_path: Path, kvtier: Command) -> None:
    assert "go with --trace FILE" in kvtier.fails("plan", tier(tmp_path), *option, code=2)


@pytest.mark.parametrize("option", ["--rate", "--prefill-rate"])
@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "0", "1e999"])
def test_a_rate_that_is_not_finite_names_its_option(option: str, value: str, tmp_path: Path, kvtier: Command) -> None:
    error = kvtier.fails("plan", tier(tmp_path), "--trace", trace(tmp_path, ROUND), option, value, code=2)
    assert f"Invalid value for '{option}': {value}" in error.replace("-inf is", f"{value} is")
