# SPDX-License-Identifier: Apache-2.0
"""Label and field selectors."""

from __future__ import annotations

from typing import Any

import pytest

from kvtier_localcluster.apiserver import ApiError
from kvtier_localcluster.apiserver.store import selectors


@pytest.mark.parametrize(
    ("selector", "is_match"),
    [
        ("", True),
        ("app=web", True),
        ("app==web,tier=front", True),
        ("app=other", False),
        ("app!=web", False),
        ("gone!=x", True),
        ("app", True),
        ("!app", False),
        ("!gone", True),
        ("app in (web, api),tier notin (back)", True),
        ("app notin (web)", False),
        ("app in (api)", False),
        ("example.com/x=1", True),
        ("empty=", True),
    ],
)
def test_a_label_selector_matches_what_it_says(selector: str, *, is_match: bool) -> None:
    labels = {"app": "web", "tier": "front", "example.com/x": "1", "empty": ""}
    assert all(test(labels) for test in selectors.label_tests(selector)) is is_match


def test_a_selector_that_cannot_be_read_is_refused() -> None:
    with pytest.raises(ApiError) as refused:
        selectors.label_tests("a=b=c=d,(")
    assert refused.value.code == 400


@pytest.mark.parametrize(
    ("selector", "is_match"),
    [
        ("metadata.name=a", True),
        ("metadata.name!=a", False),
        ("status.phase=Running,spec.nodeName=", True),
        ("status.phase=Pending", False),
    ],
)
def test_a_field_selector_matches_what_it_says(selector: str, *, is_match: bool) -> None:
    manifest: dict[str, Any] = {"metadata": {"name": "a"}, "status": {"phase": "Running"}}
    selectable = ("metadata.name", "status.phase", "spec.nodeName")
    selection = selectors.Selection.parse(None, None, {"fieldSelector": selector}, selectable)
    assert selection.matches(manifest) is is_match


@pytest.mark.parametrize(
    ("selector", "is_match"),
    [
        (None, False),
        ({}, True),
        ({"matchLabels": {"a": "1"}}, True),
        ({"matchLabels": {"a": "2"}}, False),
        ({"matchExpressions": [{"key": "a", "operator": "In", "values": ["1"]}]}, True),
        ({"matchExpressions": [{"key": "a", "operator": "NotIn", "values": ["1"]}]}, False),
        ({"matchExpressions": [{"key": "a", "operator": "Exists"}]}, True),
        ({"matchExpressions": [{"key": "a", "operator": "DoesNotExist"}]}, False),
    ],
)
def test_a_selector_object_matches_what_it_says(selector: dict[str, Any] | None, *, is_match: bool) -> None:
    assert selectors.labels_match(selector, {"a": "1"}) is is_match
