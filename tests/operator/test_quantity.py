# SPDX-License-Identifier: Apache-2.0
"""Quantities mean what they mean to the API server (the cases are those of apimachinery's own documentation)."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier_operator import quantity

VALUES = [
    ("0", 0),
    ("64", 64),
    ("+5", 5),
    ("-5", -5),
    ("0.5", Fraction(1, 2)),
    (".5", Fraction(1, 2)),
    ("1.", 1),
    ("007", 7),
    ("100m", Fraction(1, 10)),
    ("1500m", Fraction(3, 2)),
    ("5u", Fraction(5, 10**6)),
    ("5n", Fraction(5, 10**9)),
    *((f"1{unit}", 1000**power) for power, unit in enumerate("kMGTPE", 1)),
    *((f"1{unit}i", 1024**power) for power, unit in enumerate("KMGTPE", 1)),
    ("1.5Gi", 3 << 29),
    *((text, 1000) for text in ("1e3", "1E3", "1e+3")),
    ("12e-1", Fraction(12, 10)),
    # Finer than nano is rounded away from zero.
    *((text, Fraction(1, 10**9)) for text in ("0.1n", "1e-400")),
    ("-0.1n", Fraction(-1, 10**9)),
    # Larger than the API server keeps is capped.
    *((text, 2**63 - 1) for text in ("8Ei", "1e400", "1e99999999999999999999")),
    ("-9Ei", -(2**63 - 1)),
]
NONE = (
    "",
    " ",
    "Gi",
    ".",
    "lots",
    "64GB",
    "64gi",
    "64ki",
    "1K",
    "1 Gi",
    " 1Gi",
    "1Gi\n",
    "1,5",
    "1e",
    "1e3Ki",
    "--1",
    "٣",
)


@pytest.mark.parametrize(("text", "value"), VALUES)
def test_a_quantity_has_the_value_that_the_api_server_gives_it(text: str, value: Fraction | int) -> None:
    assert quantity.is_quantity(text)
    assert quantity.parse_quantity(text) == value


@pytest.mark.parametrize("text", NONE)
def test_what_is_no_quantity_is_refused(text: str) -> None:
    assert not quantity.is_quantity(text)
    with pytest.raises(ValueError, match="is not a quantity"):
        quantity.parse_quantity(text)


@pytest.mark.parametrize(("text", "count"), [("100m", 1), ("1.0001Ki", 1025), ("64Gi", 64 << 30), ("1e3", 1000)])
def test_bytes_are_rounded_up(text: str, count: int) -> None:
    assert quantity.parse_bytes(text) == count


@pytest.mark.parametrize(("text", "count"), [("4", 4000), ("500m", 500), ("1.5", 1500), ("1u", 1)])
def test_processors_are_counted_in_thousandths(text: str, count: int) -> None:
    assert quantity.parse_millis(text) == count


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0"), (1, "1"), (1000, "1000"), (1024, "1Ki"), (64 << 30, "64Gi"), (3 << 29, "1536Mi")]
)
def test_bytes_are_written_in_the_largest_exact_unit(count: int, text: str) -> None:
    assert quantity.format_bytes(count) == text


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("168h", 604800), ("7d", 604800), ("90m", 5400), ("1h30m", 5400), ("36h30m15s", 131415), ("0s", 0)],
)
def test_durations_are_counted_in_seconds(text: str, seconds: int) -> None:
    assert quantity.parse_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "7d12h", "1.5h", "30m1h", "h", "-1h", "1 h", "60"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a duration"):
        quantity.parse_seconds(text)


@given(st.integers(min_value=0, max_value=quantity.LARGEST))
def test_bytes_survive_a_round_trip(count: int) -> None:
    assert quantity.parse_bytes(quantity.format_bytes(count)) == count


@given(st.text(alphabet="0123456789.+-eEinumkKMGTP", max_size=12))
def test_every_text_is_a_quantity_or_refused(text: str) -> None:
    if quantity.is_quantity(text):
        assert abs(quantity.parse_quantity(text)) <= quantity.LARGEST
    else:
        with pytest.raises(ValueError, match="is not a quantity"):
            quantity.parse_quantity(text)
