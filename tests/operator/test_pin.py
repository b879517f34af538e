# SPDX-License-Identifier: Apache-2.0
"""Engines stay as they are until their spec changes: another version of the operator restarts none."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fake_cluster import FakeCluster, edited, run
from tiers import CONFIG, DEPLOYMENT, TIER_KEY, tier

from kvtier_operator import names

OLD, NEW = "ghcr.io/kvtier/connector:1", "ghcr.io/kvtier/connector:2"


def template(cluster: FakeCluster) -> dict[str, Any]:
    return dict(cluster.look(DEPLOYMENT)["spec"]["template"])


def image(cluster: FakeCluster) -> str:
    return str(template(cluster)["spec"]["initContainers"][0]["image"])


def made(by: str = OLD, **spec: Any) -> FakeCluster:
    """Return a cluster in which an operator with this connector has made a tier."""
    cluster = FakeCluster(tier(**spec))
    assert run(cluster, image=by).failure is None
    return cluster


def age(cluster: FakeCluster, change: Any) -> None:
    """Make the Deployment one of an older operator, whose document `change` edits."""
    document = json.loads(cluster.look(DEPLOYMENT)["metadata"]["annotations"][names.ANNOTATION_RENDERED])
    change(document)
    annotations = {names.ANNOTATION_RENDERED: json.dumps(document)}
    made = {"metadata": {"annotations": annotations}, "spec": {"template": document["template"]}}
    cluster.edit(DEPLOYMENT, made)


def test_another_version_of_the_operator_restarts_no_engine() -> None:
    cluster = made()
    before, config = template(cluster), cluster.look(CONFIG)
    assert run(cluster, image=NEW).written == ()
    assert (template(cluster), cluster.look(CONFIG)) == (before, config)


def test_what_an_older_version_rendered_otherwise_stays_with_its_document_and_its_generation() -> None:
    cluster = made()

    def change(document: dict[str, Any]) -> None:
        document["template"]["spec"]["terminationGracePeriodSeconds"] = 7
        document["spec"]["engine"].pop("rollout", None)
        document["spec"]["engine"].pop("cpu")  # a field that it did not know, at its default
        document["spec"]["gone"] = {"since": "a release"}
        document["config"] = json.dumps({**json.loads(document["config"]), "digest": "feed", "root": "/x/feed"})

    age(cluster, change)
    run(cluster, image=NEW)
    assert template(cluster)["spec"]["terminationGracePeriodSeconds"] == 7
    assert image(cluster) == OLD
    body, config = cluster.look(TIER_KEY), cluster.look(CONFIG)
    assert body["status"]["generation"] == {"current": "feed", "root": "/x/feed"}
    assert json.loads(config["data"]["connector.json"])["digest"] == "feed"


@pytest.mark.parametrize(
    "change",
    [
        {"spec": {"cpu": {"size": "32Gi"}}},
        {"spec": {"model": {"tokenSecretRef": {"name": "hf"}}}},
        {"spec": {"engine": {"podTemplate": {"nodeSelector": {"zone": "b"}}}}},
        {"spec": {"engine": {"podTemplate": {"nodeSelector": None}}}},
        {"metadata": {"annotations": {names.ANNOTATION_RESTART: "now"}}},
    ],
    ids=str,
)
def test_an_edit_or_a_restart_takes_up_what_this_version_renders(change: dict[str, Any]) -> None:
    cluster = made(engine={"podTemplate": {"nodeSelector": {"zone": "a"}}})
    cluster.edit(TIER_KEY, change)
    assert DEPLOYMENT in run(cluster, image=NEW).written
    assert image(cluster) == NEW
    assert run(cluster, image=NEW).written == ()


def test_each_value_of_the_restart_annotation_rolls_the_engines_once() -> None:
    cluster = made()
    for value in ("1", "2"):
        cluster.edit(TIER_KEY, {"metadata": {"annotations": {names.ANNOTATION_RESTART: value}}})
        assert run(cluster, image=OLD).written == (DEPLOYMENT,)
        assert template(cluster)["metadata"]["annotations"][names.ANNOTATION_RESTART] == value
        assert run(cluster, image=OLD).written == ()


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"spec": {}, "restart": "", "config": 1, "template": {}}'])
def test_a_note_that_nobody_can_read_is_rendered_anew(text: str) -> None:
    cluster = made()
    cluster.edit(DEPLOYMENT, {"metadata": {"annotations": {names.ANNOTATION_RENDERED: text}}})
    run(cluster, image=NEW)
    assert image(cluster) == NEW


LLAMA = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
CHANGES: dict[tuple[str, ...], Any] = {
    ("replicas",): 7,
    ("paused",): True,
    ("disk", "mode"): "Bypass",
    ("disk", "budget"): {"maxBytes": "1Ti", "ttl": "1h"},
    ("disk", "encryption", "activeKey"): "another",
    ("generations",): {"keepPrevious": 5},
    ("janitor",): {"image": "mine:1"},
    ("proof",): {"canary": {"enabled": False}},
    ("routing",): {"type": "Router", "router": {"policy": "cache_aware"}},
    ("engine", "rollout"): {"maxSurge": 3},
    ("engine", "service"): {"type": "LoadBalancer", "annotations": {"a": "b"}},
    ("engine", "disruptionBudget"): {"minAvailable": "50%"},
    ("volume", "claim"): {"size": "9Ti"},
    ("volume", "deletionPolicy"): "Delete",
    ("engine", "accelerator", "memory"): "80Gi",
    ("model", "maxLoraRank"): 32,
    ("model", "config"): {**LLAMA, "vocab_size": 1},
}


@pytest.mark.parametrize("path", CHANGES, ids=".".join)
def test_an_edit_from_which_no_pod_is_made_rolls_nothing_under_another_version(path: tuple[str, ...]) -> None:
    change: Any = CHANGES[path]
    for part in reversed(path):
        change = {part: change}
    cluster = made(disk={"encryption": {"secretName": "keys", "activeKey": "one"}}, model={"config": LLAMA})
    before = template(cluster)
    cluster.edit(TIER_KEY, {"spec": change})
    run(cluster, image=NEW)
    assert template(cluster) == before


def test_a_spec_too_long_for_a_note_is_carried_out_without_one() -> None:
    cluster = made(model={"config": {"x": "y" * (200 << 10)}})
    found = cluster.look(DEPLOYMENT)
    assert found["metadata"]["annotations"].keys() == {names.ANNOTATION_DECISIONS}
    assert run(cluster, image=OLD).written == ()


def test_a_second_replica_on_a_volume_of_one_node_is_not_made_from_a_template_that_leaves_the_node_open() -> None:
    cluster = made("connector:test", replicas=1, volume={"claim": {"accessModes": ["ReadWriteOnce"]}})
    age(cluster, lambda document: document["template"]["spec"].pop("affinity"))
    cluster.edit(DEPLOYMENT, {"spec": {"template": {"spec": {"affinity": None}}}})
    run(cluster, image=NEW)
    assert "affinity" not in template(cluster)["spec"]
    edited(cluster, replicas=2)
    assert names.LABEL_COMPONENT in str(template(cluster)["spec"]["affinity"])
