# SPDX-License-Identifier: Apache-2.0
"""What the operator asks of the API server with real watches, the real client and a real HTTP API server."""

from __future__ import annotations

from typing import Any

import pytest
from live import Client, agents, running
from test_lifecycle import CHILDREN, CLAIM, is_unchanged, ok_passes, ready
from waiting import until

from kvtier_localcluster.apiserver import ApiServerThread


@pytest.mark.usefixtures("controllers")
def test_every_kind_is_listed_once_in_pages_and_then_only_watched(api: ApiServerThread, kubectl: Client) -> None:
    listed: list[tuple[str, str]] = []

    def note(request: Any) -> None:
        plural, query = request.path.rpartition("/")[2], request.query
        if request.headers.get("User-Agent") != "test" and "limit" in query:
            listed.append((plural, query["limit"]))

    api.server.faults.append(note)
    with ready(kubectl, resync_seconds=0.5) as metrics:
        passes = ok_passes(metrics)
        until(lambda: ok_passes(metrics) > passes + 3)
    plurals = {plural for _, plural, _ in (*CHILDREN, CLAIM)} | {"pods", "jobs"}
    once = [each for each in listed if each[0] != "kvcachetiers"]
    assert sorted(once) == sorted((plural, "250") for plural in plurals)
    # These are listed again and again, in case their watch has missed one.
    assert set(listed) - set(once) == {("kvcachetiers", "250")}


@pytest.mark.usefixtures("controllers")
def test_a_pass_in_which_nothing_changed_sends_no_request(api: ApiServerThread, kubectl: Client) -> None:
    def sent(*reads: str) -> int:
        # No pass lists all tiers.
        found = agents(api, *reads, "create", "patch", "update", "delete")
        return len([call for call in found if "/kvcachetiers?" not in call])

    with ready(kubectl, resync_seconds=0.2) as metrics:
        until(lambda: is_unchanged(metrics, lambda: sent("get", "list"), passes=10))
    writes = sent()
    # Neither has an operator anything to write that finds everything as it is to be.
    with running(resync_seconds=0.2) as metrics:
        until(lambda: ok_passes(metrics) > 5)
        assert sent() == writes
