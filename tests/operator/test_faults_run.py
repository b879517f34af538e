# SPDX-License-Identifier: Apache-2.0
"""Calls fail, watches end, operators are killed: in the end everything is as the specs ask for."""

from __future__ import annotations

import random
from contextlib import suppress
from pathlib import Path
from urllib.error import URLError

import pytest
from e2e.bench.operator_scale import NAMESPACE, tier
from e2e.bench.processes import until
from operator_faults import TIERS, BenchCluster, Trouble, faults, is_final, operator
from test_health import ask

from kvtier_localcluster.ports import free_port


@pytest.mark.timeout(600)
def test_after_faults_and_killed_operators_everything_is_as_asked(tmp_path: Path) -> None:
    result = faults(tmp_path, tiers=6, seconds=18, kill_seconds=7, kinds=("poddisruptionbudgets", "services"))
    assert result["wrong"] == []
    assert result["tiers_that_name"]["services"] > 0
    assert result["killed"] > 0
    assert result["failed"] > 0


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("plural", "code", "made"),
    [
        ("kvcachetiers", 503, set()),
        ("poddisruptionbudgets", 200, {"new-engine", "new-janitor"}),
        ("roles", 200, {"new-engine"}),
    ],
)
def test_an_operator_without_a_right_is_alive_does_what_it_can_and_goes_on_once_it_has_it(
    plural: str, code: int, made: set[str], tmp_path: Path
) -> None:
    with BenchCluster() as cluster:
        trouble = Trouble(cluster, random.Random(1), forbidden=plural)
        cluster.api.server.faults.append(trouble.fault)
        cluster.call("POST", TIERS, tier("new"))
        port = free_port()

        def deployments() -> set[str]:
            return {each["metadata"]["name"] for each in cluster.api.list("deployments.apps", NAMESPACE)}

        def is_named() -> bool:
            with suppress(URLError):  # it does not listen yet
                found, said = ask(port, "/readyz")
                told = f"{plural} is forbidden" in f"{said} {cluster.tiers()}"
                return found == code and told and deployments() >= made
            return False

        with operator(cluster, tmp_path, f"--liveness=http://127.0.0.1:{port}") as process:
            until(is_named, seconds=120)
            assert ask(port, "/healthz")[0] == 200
            assert process.process.poll() is None
            assert bool(deployments()) is bool(made)
            trouble.forbidden = ""
            until(lambda: all(map(is_final, cluster.tiers())), seconds=200)
            until(lambda: ask(port, "/readyz")[0] == 200, seconds=60)
