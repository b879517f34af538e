# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
from e2e.bench.journal import Summary, group, ratio, summarise
from e2e.bench.report import milliseconds, percent, plain, table, times


def test_a_summary_is_the_median_and_the_extremes() -> None:
    assert summarise([3.0, 1.0, 10.0]) == Summary(median=3.0, low=1.0, high=10.0, count=3)


def test_the_median_of_an_even_number_lies_between_the_two_in_the_middle() -> None:
    summary = summarise([1.0, 2.0, 4.0, 9.0])
    assert summary is not None
    assert summary.median == 3.0


def test_nothing_measured_has_no_summary_and_is_written_as_a_dash() -> None:
    assert summarise([]) is None
    assert [milliseconds(None), plain(None), times(None), percent(None)] == ["-"] * 4


@pytest.mark.parametrize(
    ("numerator", "denominator", "expected"),
    [
        (Summary(6.0, 6.0, 6.0, 1), Summary(2.0, 1.0, 9.0, 3), 3.0),
        (None, Summary(2.0, 2.0, 2.0, 1), None),
        (Summary(2.0, 2.0, 2.0, 1), None, None),
        (Summary(2.0, 2.0, 2.0, 1), Summary(0.0, 0.0, 0.0, 1), None),
    ],
)
def test_a_ratio_is_that_of_the_medians_or_missing(
    numerator: Summary | None, denominator: Summary | None, expected: float | None
) -> None:
    assert ratio(numerator, denominator) == expected


def test_items_are_grouped_by_key_in_the_order_of_their_first_appearance() -> None:
    groups = group([("b", 1), ("a", 2), ("b", 3)])
    assert list(groups.items()) == [("b", [1, 3]), ("a", [2])]


def test_seconds_are_written_as_milliseconds_with_three_digits() -> None:
    assert milliseconds(Summary(1.3404, 1.2, 1.5, 3)) == "1340 (1200-1500)"
    assert milliseconds(Summary(0.0441, 0.0441, 0.0441, 1)) == "44.1"
    assert milliseconds(Summary(0.0025, 0.0025, 0.0025, 1)) == "2.50"


def test_ratios_and_shares_are_written_with_their_units() -> None:
    assert times(5.277) == "5.28x"
    assert percent(0.957) == "95.7 %"


def test_a_table_is_aligned_markdown() -> None:
    assert table(["case", "ms"], [["disk hit", "254"], ["cold", "1230"]]) == (
        "| case     |   ms |\n|----------|-----:|\n| disk hit |  254 |\n| cold     | 1230 |\n"
    )


def test_a_row_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="does not have 2 cells"):
        table(["case", "ms"], [["cold"]])
