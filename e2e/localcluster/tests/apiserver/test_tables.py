# SPDX-License-Identifier: Apache-2.0
"""What `kubectl get` prints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from objects import pod, widget

from kvtier_localcluster.apiserver import tables
from kvtier_localcluster.apiserver.store import objects

Http = Callable[..., tuple[int, Any]]
MERGE = "application/merge-patch+json"
TABLE = "application/json;as=Table;v=v1;g=meta.k8s.io,application/json"


def _cells(table: dict[str, Any]) -> list[dict[str, Any]]:
    names = [column["name"] for column in table["columnDefinitions"]]
    return [dict(zip(names, row["cells"], strict=True)) for row in table["rows"]]


@pytest.mark.parametrize(
    ("path", "found"),
    [
        (".spec.a", 1),
        ('.spec.list[?(@.n=="y")].v', 2),
        (".spec.list[?(@.n=='z')].v", None),
        (".spec.gone.deeper", None),
    ],
)
def test_a_column_finds_its_value(path: str, found: Any) -> None:
    document = {"spec": {"a": 1, "list": [{"n": "x", "v": 1}, {"n": "y", "v": 2}]}}
    assert tables.first_match(document, path) == found


@pytest.mark.parametrize(
    ("seconds", "shown"), [(5, "5s"), (119, "119s"), (150, "2m"), (3 * 3600 + 5, "3h"), (3 * 86400 + 5, "3d")]
)
def test_ages_are_short(seconds: int, shown: str) -> None:
    assert tables.elapsed(objects.timestamp(-seconds)) in (shown, {"5s": "6s", "119s": "2m"}.get(shown, shown))


CRASHES = [{"state": {"waiting": {"reason": "CrashLoopBackOff"}}}]


@pytest.mark.parametrize(
    ("status", "shown"),
    [
        ({"phase": "Pending"}, "Pending"),
        ({"phase": "Running", "containerStatuses": [{"state": {"running": {}}}]}, "Running"),
        ({"phase": "Running", "containerStatuses": CRASHES}, "CrashLoopBackOff"),
        ({"phase": "Failed", "containerStatuses": [{"state": {"terminated": {"exitCode": 3}}}]}, "ExitCode:3"),
        ({"phase": "Pending", "initContainerStatuses": [{"state": {"running": {}}}]}, "Init:0/1"),
        ({"phase": "Failed", "reason": "Evicted"}, "Evicted"),
    ],
)
def test_a_pod_shows_why_it_does_not_run(http: Http, status: dict[str, Any], shown: str) -> None:
    path = "/api/v1/namespaces/default/pods"
    http("POST", path, pod(nodeName="n"))
    for field in ("containerStatuses", "initContainerStatuses"):
        for each in status.get(field, []):
            each |= {"name": "main", "ready": False, "restartCount": 0, "image": "x", "imageID": ""}
    code, answer = http("PATCH", f"{path}/p/status", {"status": status}, media_type=MERGE)
    assert code == 200, answer
    [cells] = _cells(http("GET", path, accept=TABLE)[1])
    assert (cells["Ready"], cells["Status"], cells["Restarts"]) == ("0/1", shown, "0")
    if status["phase"] != "Failed":
        http("DELETE", f"{path}/p")
        [cells] = _cells(http("GET", path, accept=TABLE)[1])
        assert cells["Status"] == "Terminating"


def test_one_object_is_a_table_of_one_row(http: Http, widgets: str) -> None:
    http("POST", widgets, widget())
    _, table = http("GET", f"{widgets}/a", accept=TABLE, includeObject="Object")
    assert table["rows"][0]["object"]["spec"]["size"] == 1
