# SPDX-License-Identifier: Apache-2.0
"""The three patch formats."""

from __future__ import annotations

from typing import Any

from kvtier_localcluster.apiserver.registry import patches
from kvtier_localcluster.apiserver.store import schemas

DEPLOYMENT = schemas.builtin_schema("apps", "v1", "Deployment")


def _containers(*containers: dict[str, Any]) -> dict[str, Any]:
    return {"spec": {"template": {"spec": {"containers": list(containers)}}}}


def test_a_merge_patch_merges_objects_replaces_lists_and_deletes_by_null() -> None:
    target = {"a": {"x": 1, "y": 2}, "b": [1, 2], "c": 3}
    assert patches.merge_patch(target, {"a": {"y": None}, "b": [9]}) == {"a": {"x": 1}, "b": [9], "c": 3}
    assert target == {"a": {"x": 1, "y": 2}, "b": [1, 2], "c": 3}


def test_a_strategic_patch_adds_and_deletes_list_items() -> None:
    target = _containers({"name": "a", "image": "1"})
    change = _containers({"name": "a", "$patch": "delete"}, {"name": "c", "image": "3"})
    patched = patches.strategic_merge_patch(target, change, DEPLOYMENT)
    assert patched == _containers({"name": "c", "image": "3"})


def test_a_strategic_patch_can_replace_a_whole_list() -> None:
    target = _containers({"name": "a", "image": "1"})
    change = _containers({"$patch": "replace"}, {"name": "b", "image": "2"})
    assert patches.strategic_merge_patch(target, change, DEPLOYMENT) == _containers({"name": "b", "image": "2"})


def test_a_strategic_patch_replaces_lists_without_a_merge_key() -> None:
    target = _containers({"name": "a", "args": ["x"]})
    patched = patches.strategic_merge_patch(target, _containers({"name": "a", "args": ["y"]}), DEPLOYMENT)
    assert patched == _containers({"name": "a", "args": ["y"]})


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
