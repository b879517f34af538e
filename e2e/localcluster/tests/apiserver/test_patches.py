# SPDX-License-Identifier: Apache-2.0
"""The three patch formats."""

from __future__ import annotations

from typing import Any

import pytest

from kvtier_localcluster.apiserver.registry import patches
from kvtier_localcluster.apiserver.store import schemas

DEPLOYMENT = schemas.builtin_schema("apps", "v1", "Deployment")


def _containers(*containers: dict[str, Any]) -> dict[str, Any]:
    return {"spec": {"template": {"spec": {"containers": list(containers)}}}}


def test_a_merge_patch_merges_objects_replaces_lists_and_deletes_by_null() -> None:
    target = {"a": {"x": 1, "y": 2}, "b": [1, 2], "c": 3}
    assert patches.merge_patch(target, {"a": {"y": None}, "b": [9]}) == {"a": {"x": 1}, "b": [9], "c": 3}
    assert target == {"a": {"x": 1, "y": 2}, "b": [1, 2], "c": 3}


@pytest.mark.parametrize(
    ("before", "change", "after"),
    [
        ({"image": "1"}, [{"name": "a", "$patch": "delete"}, {"name": "c"}], [{"name": "c"}]),
        ({"image": "1"}, [{"$patch": "replace"}, {"name": "b"}], [{"name": "b"}]),
        ({"args": ["x"]}, [{"name": "a", "args": ["y"]}], [{"name": "a", "args": ["y"]}]),
    ],
    ids=["items by their key", "the whole list", "a list without a key"],
)
def test_a_strategic_patch_changes_lists(before: dict[str, Any], change: list[Any], after: list[Any]) -> None:
    target = _containers({"name": "a", **before})
    assert patches.strategic_merge_patch(target, _containers(*change), DEPLOYMENT) == _containers(*after)


def test_a_strategic_patch_keeps_only_the_named_keys() -> None:
    target = {"spec": {"strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1}}}}
    change = {"spec": {"strategy": {"$retainKeys": ["type"], "type": "Recreate"}}}
    patched = patches.strategic_merge_patch(target, change, DEPLOYMENT)
    assert patched == {"spec": {"strategy": {"type": "Recreate"}}}


def test_a_strategic_patch_deletes_from_a_list_of_scalars() -> None:
    schema = schemas.builtin_schema("", "v1", "ConfigMap")
    target = {"metadata": {"finalizers": ["a/b", "c/d"]}}
    change = {"metadata": {"$deleteFromPrimitiveList/finalizers": ["a/b"], "finalizers": ["e/f"]}}
    patched = patches.strategic_merge_patch(target, change, schema)
    assert patched["metadata"]["finalizers"] == ["c/d", "e/f"]
