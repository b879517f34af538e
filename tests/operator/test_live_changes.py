# SPDX-License-Identifier: Apache-2.0
"""What engines and janitor follow while they run, and what of them comes and goes with a field."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fake_cluster import FakeCluster, condition, edited, reconciled, run
from tiers import (
    CONFIG,
    DEPLOYMENT,
    JANITOR,
    JANITOR_CONFIG,
    LEASE,
    TIER_KEY,
    merge,
    ready_deployment,
    tier,
)

from kvtier_connector.contract import engine, janitor
from kvtier_operator import names


def live(cluster: FakeCluster) -> dict[str, Any]:
    return dict(json.loads(cluster.look(CONFIG)["data"]["live.json"]))


def janitors(cluster: FakeCluster) -> janitor.JanitorConfig:
    return janitor.decode(cluster.look(JANITOR_CONFIG)["data"]["janitor.json"])


KEYS = {"encryption": {"secretName": "keys", "activeKey": "2026-10"}}
BUDGET = {"budget": {"maxBytes": "1Ti", "ttl": "1h", "lowWatermark": "50%"}}
QUOTAS = {"quotas": [{"tenant": "acme", "maxBytes": "1Ti"}], "defaultMaxBytes": "1Gi"}


@pytest.mark.parametrize(
    ("disk", "edit", "told"),
    [
        ({}, {"disk": {"mode": "Bypass"}}, {"mode": "Bypass", "needs_permit": True}),
        (KEYS, {"disk": {"encryption": {"activeKey": "2026-11"}}}, {"active_key": "2026-11"}),
    ],
    ids=["mode", "key"],
)
def test_an_edit_reaches_the_engines_without_a_new_pod(
    disk: dict[str, Any], edit: dict[str, Any], told: dict[str, Any]
) -> None:
    cluster = reconciled(disk=disk)
    assert edited(cluster, **edit).written == (CONFIG,)
    assert live(cluster).items() >= told.items()


@pytest.mark.parametrize(
    ("edit", "told"),
    [
        (
            {"disk": BUDGET, "generations": {"keepPrevious": 0}},
            {"max_bytes": 1 << 40, "ttl_seconds": 3600, "low_watermark": 0.5, "keep_previous": 0},
        ),
        ({"disk": {"tenants": QUOTAS}}, {"quotas": {"acme": 1 << 40}, "default_quota_bytes": 1 << 30}),
    ],
    ids=["budget", "quotas"],
)
def test_an_edit_reaches_the_janitor_without_a_new_pod(edit: dict[str, Any], told: dict[str, Any]) -> None:
    cluster = reconciled(disk={"tenants": {"from": "Parameter"}})
    assert edited(cluster, **edit).written == (JANITOR_CONFIG,)
    assert vars(janitors(cluster)).items() >= told.items()
    assert engine.decode(cluster.look(CONFIG)["data"]["connector.json"]).tenant_from == "Parameter"


@pytest.mark.parametrize(
    ("free", "fraction", "count"),
    [("0%", 0.0, 0), ("7%", 0.07, 0), ("50Gi", 0.0, 50 << 30), ("1.5e9", 0.0, 1_500_000_000)],
)
def test_free_space_reaches_the_janitor_as_a_share_or_as_an_amount(free: str, fraction: float, count: int) -> None:
    cluster = reconciled(disk={"budget": {"minFree": free}})
    told = janitors(cluster)
    assert (told.min_free_fraction, told.min_free_bytes) == (fraction, count)


def test_the_lease_is_left_to_its_holder() -> None:
    cluster = reconciled()
    cluster.edit(LEASE, {"spec": {"holderIdentity": "llama-janitor-0_1"}})
    assert run(cluster).written == ()
    assert cluster.look(LEASE)["spec"] == {"holderIdentity": "llama-janitor-0_1"}
    cluster.remove(LEASE)
    assert run(cluster).written == (LEASE,)


def test_a_new_generation_is_told_to_the_janitor_that_runs() -> None:
    cluster = reconciled()
    before = janitors(cluster)
    assert JANITOR not in edited(cluster, hash={"seed": "7"}).written
    after = janitors(cluster)
    assert (before.tier_dir, before.current != after.current) == (after.tier_dir, True)


def make_stricter(cluster: FakeCluster, refused: dict[str, Any]) -> None:
    """Store fields in a tier that today's release refuses, and that its engines were made from."""
    cluster.edit(TIER_KEY, {"spec": refused})
    note = json.loads(cluster.look(DEPLOYMENT)["metadata"]["annotations"][names.ANNOTATION_RENDERED])
    note = json.dumps({**note, "spec": merge(note["spec"], refused)})
    cluster.edit(DEPLOYMENT, {"metadata": {"annotations": {names.ANNOTATION_RENDERED: note}}})


@pytest.mark.parametrize(
    ("refused", "field"),
    [
        ({"hash": {"algorithm": "md5"}}, "spec.hash.algorithm"),
        ({"engine": {"gone": True}}, "spec.engine.gone"),
        ({"engine": {"args": ["--max-num-seqs=8", "--kv-transfer-config={}"]}}, "spec.engine.args"),
        ({"janitor": {"image": "a b"}}, "spec.janitor.image"),
        ({"disk": {"blockTokens": 96}, "engine": {"args": ["--block-size=64"]}}, "spec.disk.blockTokens"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_stored_spec_that_a_stricter_release_refuses_is_followed_as_far_as_no_pod_changes(
    refused: dict[str, Any], field: str
) -> None:
    cluster = reconciled()
    make_stricter(cluster, refused)
    template = cluster.look(DEPLOYMENT)["spec"]["template"]
    edit = {
        "replicas": 5,
        "disk": {"mode": "Bypass", "budget": {"maxBytes": "1Ti"}},
        "generations": {"keepPrevious": 0},
    }
    assert set(edited(cluster, **edit).written) == {CONFIG, DEPLOYMENT, JANITOR_CONFIG}
    assert live(cluster)["mode"] == "Bypass"
    assert cluster.look(DEPLOYMENT)["spec"]["replicas"] == 5
    assert cluster.look(DEPLOYMENT)["spec"]["template"] == template
    told = janitors(cluster)
    assert (told.max_bytes, told.keep_previous) == (1 << 40, 0)
    assert condition(cluster, "Ready")["status"] == "False"
    assert condition(cluster, "Ready")["message"].startswith(field)


def test_an_edit_that_the_api_server_refuses_for_the_engines_moves_nothing_that_they_run_with() -> None:
    cluster = reconciled()
    cluster.edit(DEPLOYMENT, {"status": ready_deployment()})
    run(cluster)
    before = {key: cluster.look(key) for key in (DEPLOYMENT, CONFIG, JANITOR_CONFIG)}
    generation = cluster.look(TIER_KEY)["status"]["generation"]
    cluster.refuse = lambda manifest: "422 invalid label" if "--served-model-name=x" in json.dumps(manifest) else ""
    refused = {"args": ["--served-model-name=x"]}
    cluster.edit(
        TIER_KEY, {"spec": {"model": {"name": "another/model"}, "engine": refused, "disk": {"mode": "ReadOnly"}}}
    )
    outcome = run(cluster)
    assert outcome.written == (CONFIG,)
    assert cluster.look(DEPLOYMENT) == before[DEPLOYMENT]
    assert cluster.look(JANITOR_CONFIG) == before[JANITOR_CONFIG]
    for file in ("connector.json", "live.json"):
        assert (cluster.look(CONFIG)["data"][file] == before[CONFIG]["data"][file]) is (file == "connector.json")
    assert cluster.look(TIER_KEY)["status"]["generation"] == generation
    ready = condition(cluster, "Ready")
    assert (ready["reason"], "422 invalid label" in ready["message"]) == ("ApplyFailed", True)
    cluster.refuse = None
    assert {DEPLOYMENT, CONFIG, JANITOR_CONFIG} <= set(run(cluster).written)


def test_a_new_tier_that_the_api_server_refuses_makes_nothing() -> None:
    cluster = FakeCluster(tier())
    cluster.refuse = lambda manifest: "422 invalid" if manifest["kind"] == "Deployment" else ""
    assert run(cluster).written == ()
    assert cluster.existing() == {TIER_KEY}
