# SPDX-License-Identifier: Apache-2.0
"""Lists of the last moments say what the API server would, or nothing."""

from __future__ import annotations

from typing import Any

import pytest
from clocks import Clock

from kvtier_operator.recent import Recent, Which, which_of

WHICH = Which("ConfigMap", "serving", "llama")
LABEL = "kvtier.dev/tier"


def config(version: int, *, name: str = "llama-connector", uid: str = "u", **fields: Any) -> dict[str, Any]:
    labels = {LABEL: "llama"}
    metadata = {"name": name, "namespace": "serving", "uid": uid, "resourceVersion": str(version), "labels": labels}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, **fields}


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def recent(clock: Clock) -> Recent:
    """With one list of one object that was just read."""
    made = Recent(frozenset({"ConfigMap"}), seconds=60, clock=clock)
    made.begin(WHICH)
    made.end(WHICH, [config(5)])
    return made


def test_a_list_that_was_never_read_must_be_read() -> None:
    assert Recent(frozenset({"ConfigMap"}), seconds=60).get(WHICH) is None


def test_a_list_is_good_for_a_while(recent: Recent, clock: Clock) -> None:
    clock.seconds = 59
    assert recent.get(WHICH) == [config(5)]
    clock.seconds = 60
    assert recent.get(WHICH) is None


def test_what_watches_tell_is_entered(recent: Recent) -> None:
    recent.heard(config(6, data={"a": "b"}), is_deleted=False)
    recent.heard(config(7, name="llama-janitor"), is_deleted=False)
    assert recent.get(WHICH) == [config(6, data={"a": "b"}), config(7, name="llama-janitor")]
    recent.heard(config(8), is_deleted=True)
    assert recent.get(WHICH) == [config(7, name="llama-janitor")]


def test_what_comes_late_changes_nothing(recent: Recent) -> None:
    recent.heard(config(10, data={}), is_deleted=False)
    recent.heard(config(9), is_deleted=False)
    assert recent.get(WHICH) == [config(10, data={})]


def test_the_deletion_of_what_was_made_anew_since_changes_nothing(recent: Recent) -> None:
    recent.heard(config(12, uid="new"), is_deleted=False)
    recent.heard(config(11, uid="u"), is_deleted=True)
    assert recent.get(WHICH) == [config(12, uid="new")]


def test_a_list_during_which_something_changed_is_not_kept(recent: Recent) -> None:
    recent.begin(WHICH)
    recent.heard(config(6), is_deleted=False)
    recent.end(WHICH, [config(5)])
    assert recent.get(WHICH) is None


def test_an_object_that_lost_its_label_makes_everything_be_read_anew(recent: Recent) -> None:
    body = config(6)
    del body["metadata"]["labels"]
    recent.heard(body, is_deleted=True)
    assert recent.get(WHICH) is None


def test_what_is_to_be_forgotten_is_read_anew(recent: Recent) -> None:
    other = Which("ConfigMap", "serving", "other")
    recent.begin(other)
    recent.end(other, [])
    recent.forget("serving", "llama")
    assert recent.get(WHICH) is None
    assert recent.get(other) == []
    recent.forget_all()
    assert recent.get(other) is None


def test_a_list_that_is_read_while_a_watch_begins_is_not_kept(recent: Recent) -> None:
    recent.begin(WHICH)
    recent.forget_all()
    recent.end(WHICH, [config(5)])
    assert recent.get(WHICH) is None


def test_readers_cannot_change_what_others_read(recent: Recent) -> None:
    for found in recent.get(WHICH) or []:
        found["metadata"].clear()
    assert recent.get(WHICH) == [config(5)]


def test_kinds_that_nobody_watches_are_read_each_time(recent: Recent) -> None:
    jobs = Which("Job", "serving", "llama")
    recent.begin(jobs)
    recent.end(jobs, [])
    assert recent.get(jobs) is None


@pytest.mark.parametrize(
    ("selector", "tier"),
    [
        (f"{LABEL}=llama", "llama"),
        ("", None),
        (LABEL, None),
        (f"a=b,{LABEL}=llama", None),
        (f"{LABEL}=llama,a=b", None),
    ],
)
def test_only_the_lists_of_one_tier_are_kept(selector: str, tier: str | None) -> None:
    found = which_of("Pod", namespace="serving", selector=selector)
    assert (None if found is None else found.tier) == tier
