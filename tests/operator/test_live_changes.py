# SPDX-License-Identifier: Apache-2.0
"""What engines and janitor follow while they run, and that nothing but an edit of their spec replaces them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from fake_cluster import FakeCluster, condition, edited, reconciled, run
from tiers import CONFIG, DEPLOYMENT, JANITOR, JANITOR_CONFIG, LEASE, TIER_KEY, merge, ready_deployment, tier

from kvtier_connector.contract import janitor
from kvtier_operator import names

TABLES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())

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
    cluster.edit(DEPLOYMENT, {"metadata": {"annotations": annotations}, "spec": {"template": document["template"]}})


def test_another_version_of_the_operator_restarts_no_engine_and_each_value_of_the_annotation_once() -> None:
    cluster = made()
    before, config = template(cluster), cluster.look(CONFIG)
    assert run(cluster, image=NEW).written == ()
    assert (template(cluster), cluster.look(CONFIG)) == (before, config)
    cluster = made()
    for value in ("1", "2"):
        cluster.edit(TIER_KEY, {"metadata": {"annotations": {names.ANNOTATION_RESTART: value}}})
        assert run(cluster, image=OLD).written == (DEPLOYMENT,)
        assert template(cluster)["metadata"]["annotations"][names.ANNOTATION_RESTART] == value
        assert run(cluster, image=OLD).written == ()


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


@pytest.mark.parametrize("change", TABLES["takes_up"], ids=str)
def test_an_edit_or_a_restart_takes_up_what_this_version_renders(change: dict[str, Any]) -> None:
    cluster = made(engine={"podTemplate": {"nodeSelector": {"zone": "a"}}})
    cluster.edit(TIER_KEY, change)
    assert DEPLOYMENT in run(cluster, image=NEW).written
    assert image(cluster) == NEW
    assert run(cluster, image=NEW).written == ()


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"spec": {}, "restart": "", "config": 1, "template": {}}'])
def test_a_note_that_nobody_can_read_is_rendered_anew(text: str) -> None:
    cluster = made()
    cluster.edit(DEPLOYMENT, {"metadata": {"annotations": {names.ANNOTATION_RENDERED: text}}})
    run(cluster, image=NEW)
    assert image(cluster) == NEW


LLAMA = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}


@pytest.mark.parametrize(
    ("path", "change"), TABLES["of_no_pod"].items(), ids=lambda value: value if isinstance(value, str) else ""
)
def test_an_edit_from_which_no_pod_is_made_rolls_nothing_under_another_version(path: str, change: Any) -> None:
    for part in reversed(path.split(".")):
        change = {part: change}
    cluster = made(disk={"encryption": {"secretName": "keys", "activeKey": "one"}}, model={"config": LLAMA})
    before = template(cluster)
    cluster.edit(TIER_KEY, {"spec": change})
    run(cluster, image=NEW)
    assert template(cluster) == before


def test_a_new_tier_that_is_refused_makes_nothing_and_a_spec_too_long_for_a_note_does_without() -> None:
    cluster = made(model={"config": {"x": "y" * (200 << 10)}})
    assert cluster.look(DEPLOYMENT)["metadata"]["annotations"].keys() == {names.ANNOTATION_DECISIONS}
    assert run(cluster, image=OLD).written == ()
    cluster = FakeCluster(tier())
    cluster.refuse = lambda manifest: "422 invalid" if manifest["kind"] == "Deployment" else ""
    assert run(cluster).written == ()
    assert cluster.existing() == {TIER_KEY}


def test_a_second_replica_on_a_volume_of_one_node_is_not_made_from_a_template_that_leaves_the_node_open() -> None:
    cluster = made("connector:test", replicas=1, volume={"claim": {"accessModes": ["ReadWriteOnce"]}})
    age(cluster, lambda document: document["template"]["spec"].pop("affinity"))
    cluster.edit(DEPLOYMENT, {"spec": {"template": {"spec": {"affinity": None}}}})
    run(cluster, image=NEW)
    assert "affinity" not in template(cluster)["spec"]
    edited(cluster, replicas=2)
    assert names.LABEL_COMPONENT in str(template(cluster)["spec"]["affinity"])


def live(cluster: FakeCluster) -> dict[str, Any]:
    return dict(json.loads(cluster.look(CONFIG)["data"]["live.json"]))


def janitors(cluster: FakeCluster) -> janitor.JanitorConfig:
    return janitor.decode(cluster.look(JANITOR_CONFIG)["data"]["janitor.json"])


@pytest.mark.parametrize(("disk", "edit", "told"), TABLES["told_to_engines"], ids=["mode", "key"])
def test_an_edit_reaches_running_engines(disk: dict[str, Any], edit: dict[str, Any], told: dict[str, Any]) -> None:
    cluster = reconciled(disk=disk)
    assert edited(cluster, disk=edit).written == (CONFIG,)
    assert live(cluster).items() >= told.items()


@pytest.mark.parametrize(("edit", "told"), TABLES["told_to_the_janitor"], ids=str)
def test_an_edit_reaches_the_janitor_without_a_new_pod(edit: dict[str, Any], told: dict[str, Any]) -> None:
    cluster = reconciled(disk={"tenants": {"from": "Parameter"}})
    assert edited(cluster, **edit).written == (JANITOR_CONFIG,)
    assert vars(janitors(cluster)).items() >= told.items()


def test_the_lease_is_left_to_its_holder_and_the_janitor_is_told_of_a_generation() -> None:
    cluster = reconciled()
    cluster.edit(LEASE, {"spec": {"holderIdentity": "llama-janitor-0_1"}})
    assert run(cluster).written == ()
    assert cluster.look(LEASE)["spec"] == {"holderIdentity": "llama-janitor-0_1"}
    cluster.remove(LEASE)
    assert run(cluster).written == (LEASE,)
    cluster = reconciled()
    before = janitors(cluster)
    assert JANITOR not in edited(cluster, hash={"seed": "7"}).written
    after = janitors(cluster)
    assert (before.tier_dir, before.current != after.current) == (after.tier_dir, True)


def make_stricter(cluster: FakeCluster, refused: dict[str, Any]) -> None:
    """Store fields in a tier that today's release refuses, and that its engines were made from."""
    cluster.edit(TIER_KEY, {"spec": refused})
    age(cluster, lambda document: document.update(spec=merge(document["spec"], refused)))


@pytest.mark.parametrize(("refused", "field"), TABLES["refused"], ids=str)
def test_a_stored_spec_that_a_stricter_release_refuses_is_followed_as_far_as_no_pod_changes(
    refused: dict[str, Any], field: str
) -> None:
    cluster = reconciled()
    make_stricter(cluster, refused)
    template = cluster.look(DEPLOYMENT)["spec"]["template"]
    disk = {"mode": "Bypass", "budget": {"maxBytes": "1Ti"}}
    outcome = edited(cluster, replicas=5, disk=disk, generations={"keepPrevious": 0})
    assert set(outcome.written) == {CONFIG, DEPLOYMENT, JANITOR_CONFIG}
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
    outcome = edited(cluster, model={"name": "another/model"}, engine=refused, disk={"mode": "ReadOnly"})
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
