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


ONE = _containers({"name": "a", "image": "1"})
ROLLING = {"spec": {"strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1}}}}
RETAINED = {"spec": {"strategy": {"$retainKeys": ["type"], "type": "Recreate"}}}
WITHOUT = {"metadata": {"$deleteFromPrimitiveList/finalizers": ["a/b"], "finalizers": ["e/f"]}}


@pytest.mark.parametrize(
    ("before", "change", "after"),
    [
        (ONE, _containers({"name": "a", "$patch": "delete"}, {"name": "c"}), _containers({"name": "c"})),
        (ONE, _containers({"$patch": "replace"}, {"name": "b"}), _containers({"name": "b"})),
        (
            _containers({"name": "a", "args": ["x"]}),
            _containers({"name": "a", "args": ["y"]}),
            _containers({"name": "a", "args": ["y"]}),
        ),
        (ROLLING, RETAINED, {"spec": {"strategy": {"type": "Recreate"}}}),
        ({"metadata": {"finalizers": ["a/b", "c/d"]}}, WITHOUT, {"metadata": {"finalizers": ["c/d", "e/f"]}}),
    ],
    ids=["items by their key", "the whole list", "a list without a key", "named keys", "a list of scalars"],
)
def test_a_strategic_patch_changes_what_it_says(
    before: dict[str, Any], change: dict[str, Any], after: dict[str, Any]
) -> None:
    assert patches.strategic_merge_patch(before, change, DEPLOYMENT) == after
