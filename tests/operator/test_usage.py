# SPDX-License-Identifier: Apache-2.0
"""What pods report is reduced so that a tier on which nothing much happens has one and the same status."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier_connector.contract.usage import GenerationUsage, TenantUsage, Usage, encode
from kvtier_operator.observe import pod_reports
from kvtier_operator.snapshot import EngineReport

HOUR = 3600.0


def read(**changes: Any) -> Usage:
    return pod_reports.read_usage(encode(Usage(**{"tier": "ns/llama", **changes})).encode())


@given(st.integers(min_value=0, max_value=2**63))
def test_a_rounded_number_is_less_than_a_percent_off_and_stays_as_it_is(number: int) -> None:
    found = pod_reports.rounded(number)
    assert 0 <= number - found <= number / 100
    assert pod_reports.rounded(found) == found


def test_small_changes_are_not_told() -> None:
    def told(extra: int) -> Usage:
        generation = GenerationUsage(digest="a", used_bytes=(1 << 40) + extra, blocks=1000, last_used=10 * HOUR + extra)
        return read(
            used_bytes=(1 << 40) + extra, oldest=9 * HOUR + extra, evicted_blocks=extra, generations=[generation]
        )

    assert told(0) == told(1000)
    assert told(0) != told(1 << 34)


def test_generations_are_told_in_one_order_and_tenants_are_not() -> None:
    pair = [GenerationUsage(digest="b"), GenerationUsage(digest="a")]
    found = read(generations=pair, tenants=[TenantUsage(tenant="customer")])
    assert [each.digest for each in found.generations] == ["a", "b"]
    assert found.tenants == ()


def test_problems_are_few_and_short() -> None:
    found = read(problems=[f"{number}" + "x" * 5000 for number in range(9)])
    assert len(found.problems) == 3
    assert {len(problem) for problem in found.problems} == {200}


@pytest.mark.parametrize("body", [b"", b"<html>", b"{}", b"\xff"])
def test_what_is_no_report_is_refused(body: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  of whatever the reader stumbles over
        pod_reports.read_usage(body)


METRICS = b"""\
# HELP vllm:kvtier_disk_refused Fields by which the directory belongs to somebody else.
# TYPE vllm:kvtier_disk_refused gauge
vllm:kvtier_disk_refused{engine="0",field="dtype",model_name="m"} 1.0
vllm:kvtier_disk_refused{engine="1",field="dtype",model_name="m"} 1.0
vllm:kvtier_disk_refused{field="model_name",engine="0"} 1.0
vllm:kvtier_disk_refused{field="hash_seed",engine="0"} 0.0
vllm:kvtier_disk_refused_total{field="no",engine="0"} 1.0
vllm:kvtier_disk_mode{engine="0",model_name="m"} 0.0
"""


def test_the_fields_that_an_engine_was_refused_for_are_found_among_its_metrics() -> None:
    assert pod_reports.read_metrics(METRICS) == EngineReport(refused=("dtype", "model_name"))


@pytest.mark.parametrize(("value", "is_missing"), [(b"1.0", True), (b"1", True), (b"0.0", False), (b"10.0", False)])
def test_an_engine_without_its_key_says_so(value: bytes, is_missing: bool) -> None:
    body = METRICS + b'vllm:kvtier_disk_key_missing{engine="0",model_name="m"} ' + value + b"\n"
    assert pod_reports.read_metrics(body).is_key_missing is is_missing


ACTIVE = b'vllm:kvtier_disk_active{engine="0",model_name="m"} %d.0\n'
MODE = b'vllm:kvtier_disk_mode{engine="0",model_name="m"} %d.0\n'


@pytest.mark.parametrize(
    ("body", "is_detached"),
    [
        (ACTIVE % 1 + MODE % 0, False),
        (ACTIVE % 0 + MODE % 0, True),
        (ACTIVE % 0 + MODE % 1, True),
        (ACTIVE % 1 + (ACTIVE % 0).replace(b'"0"', b'"1"') + MODE % 0, True),
        (ACTIVE % 0 + MODE % 2, False),
        (ACTIVE % 0 + METRICS, False),
    ],
    ids=["attached", "detached", "detached and read-only", "one of two", "told to bypass", "refused"],
)
def test_an_engine_that_serves_without_the_volume_says_so(body: bytes, is_detached: bool) -> None:
    assert pod_reports.read_metrics(body).is_detached is is_detached


@pytest.mark.parametrize("body", [b"", b"\xff\xfe", b"vllm:kvtier_disk_refused{} 1.0\n", b"vllm:other 1\n"])
def test_metrics_without_a_refusal_tell_of_none(body: bytes) -> None:
    assert pod_reports.read_metrics(body) == EngineReport()
