# SPDX-License-Identifier: Apache-2.0
"""The decisions that need no cluster."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier_localcluster.apiserver.registry.patches import merge_patch
from kvtier_localcluster.controllers import deployments, scheduler
from kvtier_localcluster.controllers.deployments import Bounds, Generation
from kvtier_localcluster.controllers.service_proxy import Balancer, Endpoint
from kvtier_localcluster.kinds import Json, merge_difference
from kvtier_localcluster.node.container import read_log
from kvtier_localcluster.node.environment import PathMap, expand, with_address
from kvtier_localcluster.node.probes import Tally, Verdict
from kvtier_localcluster.node.services import Restarts

PATHS = PathMap({"/tmp": "/real/tmp", "/data": "/real/claim", "/data/deep": "/real/deep", "/etc/app/": "/real/app"})


@pytest.mark.parametrize(
    ("text", "rewritten"),
    [
        ("/data", "/real/claim"),
        ("--root=/data/x", "--root=/real/claim/x"),
        ('{"root":"/data/x","d":"/data/deep/y"}', '{"root":"/real/claim/x","d":"/real/deep/y"}'),
        ("/opt:/data:/tmp", "/opt:/real/claim:/real/tmp"),
        ("file:///data/x", "file:///real/claim/x"),
        ("open('/tmp/a')", "open('/real/tmp/a')"),
        ("In /data.", "In /real/claim."),
        ("/etc/app/c.json", "/real/app/c.json"),
        ("/srv/data/x", "/srv/data/x"),
        ("/database", "/database"),
        ("/data-2", "/data-2"),
        ("/data.bak", "/data.bak"),
        ("http://host/data", "http://host/data"),
        ("../data", "../data"),
        ("/real/tmp", "/real/tmp"),
    ],
)
def test_mount_paths_are_rewritten_where_they_are_paths(text: str, rewritten: str) -> None:
    assert PATHS.rewrite(text) == rewritten


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0.0.0.0", "127.64.0.1"),
        ("--host=0.0.0.0:80", "--host=127.64.0.1:80"),
        ("10.0.0.0.0", "10.0.0.0.0"),
        ("0.0.0.0.1", "0.0.0.0.1"),
        ("10.0.0.01", "10.0.0.01"),
    ],
)
def test_the_wildcard_address_becomes_the_pods(text: str, expected: str) -> None:
    assert with_address(text, "127.64.0.1") == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [("$(A)-$(A)", "1-1"), ("$$(A)", "$(A)"), ("$$$(A)", "$1"), ("$(B)", "$(B)"), ("$A", "$A"), ("$$", "$")],
)
def test_variables_expand_as_kubernetes_does(text: str, expected: str) -> None:
    assert expand(text, {"A": "1"}) == expected


def available_all(sizes: dict[str, int]) -> list[Generation]:
    return [Generation(name=name, replicas=size, available=size) for name, size in sizes.items()]


@given(
    replicas=st.integers(0, 12),
    surge=st.integers(0, 4),
    unavailable=st.integers(0, 4),
    old=st.lists(st.integers(0, 12), max_size=3),
)
def test_a_rollout_ends_at_the_wanted_size_and_stays_within_its_bounds(
    replicas: int, surge: int, unavailable: int, old: Sequence[int]
) -> None:
    limits = deployments.rolling_bounds({"rollingUpdate": {"maxSurge": surge, "maxUnavailable": unavailable}}, replicas)
    sizes = {"new": 0, **{f"old{index}": size for index, size in enumerate(old)}}
    start = sum(sizes.values())
    for _ in range(100):
        new, *others = available_all(sizes)
        step = deployments.rolling_step(replicas, limits, new=new, old=others)
        assert sum(step.values()) <= max(start, replicas + limits.surge)
        still_available = sum(min(sizes[name], step[name]) for name in sizes)
        assert still_available >= min(replicas - limits.unavailable, sum(sizes.values()))
        if step == sizes:
            break
        sizes = step
    assert sizes == {name: replicas if name == "new" else 0 for name in sizes}


def test_a_rollout_removes_old_pods_that_serve_nobody_first() -> None:
    new = Generation(name="new", replicas=1, available=0)
    old = [Generation(name="broken", replicas=2, available=0), Generation(name="good", replicas=2, available=2)]
    step = deployments.rolling_step(3, Bounds(surge=1, unavailable=1), new=new, old=old)
    assert step == {"new": 1, "broken": 0, "good": 2}


def pod_with(**requests: str) -> Json:
    return {"spec": {"containers": [{"resources": {"requests": requests}}]}, "metadata": {}}


def test_a_pod_fits_until_the_node_is_full() -> None:
    small = pod_with(cpu="500m", memory="1Gi")
    amounts = {"cpu": 1, "memory": 4 * 2**30, "pods": 10}
    assert scheduler.shortages(small, allocatable=amounts, placed=[small]) == []
    assert scheduler.shortages(small, allocatable=amounts, placed=[small, small]) == ["cpu"]


def test_the_largest_init_container_counts_where_it_is_more() -> None:
    pod = {
        "spec": {
            "containers": [{"resources": {"requests": {"cpu": "1"}}}, {"resources": {"limits": {"cpu": "1"}}}],
            "initContainers": [{"resources": {"requests": {"cpu": "3"}}}],
        }
    }
    assert scheduler.requests_of(pod)["cpu"] == 3


@pytest.mark.parametrize(("zone", "reasons"), [("a", []), ("b", ["1 node(s) didn't match Pod's node selector"])])
def test_a_node_selector_is_honoured(zone: str, reasons: list[str]) -> None:
    node = {"metadata": {"labels": {"zone": "a"}}, "spec": {}, "status": {"allocatable": {"pods": "9", "cpu": "9"}}}
    pod = pod_with(cpu="1")
    pod["spec"]["nodeSelector"] = {"zone": zone}
    assert scheduler.placement_problems(pod, node=node, placed=[], claims={}) == reasons


def test_connections_go_round_and_affinity_ends_with_its_endpoint_or_its_time() -> None:
    one, two = Endpoint("127.64.0.1", 80), Endpoint("127.64.0.2", 80)
    balancer = Balancer()
    assert [balancer.order("client", [one, two], 0)[0] for _ in range(4)] == [one, two, one, two]
    sticky = Balancer(affinity_seconds=10)
    sticky.settle("client", two, 0)
    assert [sticky.order("client", [one, two], now)[0] for now in (1, 2, 3)] == [two, two, two]
    assert sticky.order("client", [one], 4) == [one]
    assert {sticky.order("client", [one, two], 60)[0] for _ in range(2)} == {one, two}


def test_a_probe_needs_its_thresholds_in_a_row() -> None:
    tally = Tally(success_threshold=2, failure_threshold=2)
    looks = [True, False, True, True, False, True, False, False]
    verdicts = [tally.add(is_success=each) for each in looks]
    assert [verdict is Verdict.SUCCESS for verdict in verdicts] == [False, False, False, True] + [False] * 4
    assert [verdict is Verdict.FAILURE for verdict in verdicts] == [False] * 7 + [True]


def test_restart_delays_double_up_to_their_limit() -> None:
    restarts = Restarts()
    assert [restarts.delay_seconds(failures) for failures in (1, 2, 3, 7, 500)] == [1, 2, 4, 60, 60]


JSON = st.recursive(
    st.integers() | st.text() | st.booleans(),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=12,
)


@given(
    old=st.dictionaries(st.text(max_size=3), JSON, max_size=3),
    new=st.dictionaries(st.text(max_size=3), JSON, max_size=3),
)
def test_a_difference_turns_the_old_into_the_new(old: Json, new: Json) -> None:
    assert merge_patch(old, merge_difference(old, new)) == new
    assert merge_difference(new, new) == {}


@pytest.mark.parametrize("tail", [None, 0, 1, 3, 100_000])
def test_the_tail_of_a_log_is_its_last_lines(tmp_path: Path, tail: int | None) -> None:
    log = tmp_path / "log"
    lines = [f"line {number}\n".encode() for number in range(20_000)]
    log.write_bytes(b"".join(lines))
    expected = lines if tail is None else lines[len(lines) - tail :] if tail < len(lines) else lines
    assert read_log(log, tail) == b"".join(expected)
    assert read_log(tmp_path / "absent", tail) == b""
