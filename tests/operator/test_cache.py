# SPDX-License-Identifier: Apache-2.0
"""The real client, and what is remembered of the cluster: the newest that was said, and nothing that is gone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from live import CORE, Client, body
from tiers import NAMESPACE, TIER_KEY, tier
from waiting import until

from kvtier_localcluster.apiserver import ApiError, ApiServerThread
from kvtier_operator import errors, names
from kvtier_operator.errors import ClusterConflict, ClusterExpired, ClusterForbidden, ClusterUnavailable
from kvtier_operator.kube.cache import NODES, TIERS, Cache
from kvtier_operator.kube.cached_cluster import CachedCluster
from kvtier_operator.kube.client import KubernetesCluster, connect
from kvtier_operator.kube.informer import Informer
from kvtier_operator.kube.object_store import ObjectStore, Scope, WatchedKind, read_json
from kvtier_operator.names import ObjectKey, TierName, TierRef

CONFIGS = WatchedKind(api_version="v1", kind="ConfigMap")
SCOPE = Scope("v1", "ConfigMap")


def config(version: int, *, name: str = "c", uid: str = "u", label: str = "llama", **data: str) -> dict[str, Any]:
    labels = {names.LABEL_TIER: label}
    metadata = {"name": name, "namespace": NAMESPACE, "uid": uid, "resourceVersion": str(version), "labels": labels}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}


class Told:
    def __init__(self) -> None:
        self.names: list[str] = []

    def __call__(self, _namespace: str, name: str, _groups: set[str]) -> None:
        self.names.append(name)


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def store(told: Told) -> ObjectStore:
    return ObjectStore(CONFIGS, told)


def data(store: ObjectStore, name: str = "c") -> dict[str, str] | None:
    found = store.get(NAMESPACE, name)
    return None if found is None else found["data"]


def test_what_a_write_returned_is_not_undone_by_an_event_from_before_it(store: ObjectStore, told: Told) -> None:
    store.on_update(config(8, a="first"))
    store.enter(config(10, a="ours"))
    # Versions are compared as numbers.
    store.on_update(config(9, a="before"))
    # It lost its label, and has it back.
    store.on_delete(config(9))
    assert data(store) == {"a": "ours"}
    # An update without a change reports no tier.
    for version in (10, 11):
        store.on_update(config(version, a="ours"))
    assert told.names == ["c"]
    assert (store.get(NAMESPACE, "c") or {})["metadata"]["resourceVersion"] == "11"
    store.on_update(config(12, a="theirs"))
    assert (data(store), told.names) == ({"a": "theirs"}, ["c", "c"])


@pytest.mark.parametrize("depth", [150, 230, 400])
def test_a_deeply_nested_object_is_read_and_kept(store: ObjectStore, depth: int) -> None:
    nested = '{"a": ' * depth + "1" + "}" * depth
    text = json.dumps(config(1)).replace('"data": {}', f'"data": {nested}')
    found = read_json(text.encode())
    assert found == json.loads(text)
    store.on_update(found)
    assert data(store) == json.loads(nested)


def test_a_watch_whose_answer_cannot_be_read_is_told(store: ObjectStore) -> None:
    class Unreadable:
        def read_all(self, *_: Any, **__: Any) -> Iterator[Any]:
            raise RecursionError("too deep")
            yield

    informer = Informer(Unreadable(), SCOPE, store, is_followed=False, list_seconds=600)
    informer.start()
    until(lambda: "cannot read" in informer.trouble()[1], "it is told")
    informer.stop()


def test_an_object_made_anew_under_its_name_is_not_lost_with_the_one_before(store: ObjectStore) -> None:
    store.on_update(config(1, uid="before"))
    store.enter(config(5, uid="after", a="b"))
    store.on_update(config(3, uid="before"))
    store.forget(NAMESPACE, "c", uid="before")
    store.on_delete(config(4, uid="before"))
    assert data(store) == {"a": "b"}
    store.forget(NAMESPACE, "c", uid="after")
    assert data(store) is None


def test_the_answer_to_a_write_that_comes_after_the_deletion_brings_nothing_back(store: ObjectStore) -> None:
    store.on_update(config(1, name="listed", uid="listed"))
    store.on_delete(config(7))
    store.on_list(SCOPE, frozenset(), "8")
    store.enter(config(5))
    store.enter(config(6, name="listed", uid="listed"))
    assert (data(store), data(store, "listed")) == (None, None)
    store.enter(config(9, a="labelled again"))
    assert data(store) == {"a": "labelled again"}


def test_what_vanished_between_two_lists_is_told_and_what_was_written_stays(store: ObjectStore, told: Told) -> None:
    for number, name in enumerate(("stays", "goes")):
        store.on_update(config(number, name=name, uid=name))
    store.enter(config(9, name="made", uid="made"))
    store.on_list(SCOPE, frozenset({"stays"}), "8")
    assert store.names_of(NAMESPACE, "llama") == ("stays", "made")
    assert told.names == ["stays", "goes", "goes"]


def test_an_object_is_found_by_its_label_of_now_and_a_list_speaks_of_one_namespace(store: ObjectStore) -> None:
    store.on_update(config(1))
    store.on_list(Scope("v1", "ConfigMap", "elsewhere"), frozenset(), "8")
    assert data(store) == {}
    store.on_update(config(1))
    store.on_update(config(2, label="other"))
    assert (store.names_of(NAMESPACE, "llama"), store.names_of(NAMESPACE, "other")) == ((), ("c",))
    store.on_delete(config(3, label="other"))
    assert store.of(NAMESPACE, "other") == []


def test_objects_read_as_they_were_entered_however_many_kinds_of_them_there_are(store: ObjectStore) -> None:
    entered = {}
    for number in range(40):
        body = config(1, name=f"c{number}", uid=f"u{number}", text=f"{number} " * number)
        body["metadata"]["labels"][names.LABEL_COMPONENT] = f"part-{number % 20}"
        store.on_update(body)
        entered[f"c{number}"] = body
    assert {name: store.get(NAMESPACE, name) for name in entered} == entered
    store.on_update(config(2, name="c0", uid="u0"))
    assert data(store, "c0") == {}


def test_of_a_node_only_what_decides_whether_a_pod_fits_is_kept(told: Told) -> None:
    nodes = ObjectStore(NODES, told)
    node: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": "n", "uid": "n", "resourceVersion": "1", "annotations": {"a": "b"}, "labels": {"l": "1"}},
        "spec": {"podCIDR": "10.0.0.0/24", "taints": [{"key": "k", "effect": "NoSchedule"}]},
        "status": {
            "allocatable": {"memory": "1Gi"},
            "images": [{"names": ["x" * 500]}] * 20,
            "conditions": [{"type": "Ready", "status": "True", "lastHeartbeatTime": "now"}, {"type": "DiskPressure"}],
        },
    }
    nodes.on_update(node)
    stamp = nodes.stamp
    node["metadata"]["resourceVersion"], node["status"]["conditions"][0]["lastHeartbeatTime"] = "2", "later"
    nodes.on_update(node)
    assert (nodes.stamp, told.names) == (stamp, ["n"])
    assert len(json.dumps(nodes.get("", "n"))) < 400
    node["metadata"]["resourceVersion"], node["spec"]["unschedulable"] = "3", True
    nodes.on_update(node)
    assert (nodes.stamp != stamp, told.names) == (True, ["n", "n"])


class Events(list[dict[str, Any]]):
    def stop(self) -> None: ...


class Lists:
    """A source that answers each list and each watch with what it was told to."""

    def __init__(self, lists: list[Any], watches: list[Any]) -> None:
        self._lists, self._watches = lists, watches
        self.asked: list[str] = []

    def _next(self, answers: list[Any]) -> Any:
        found = answers.pop(0) if answers else ClusterUnavailable("no more")
        if isinstance(found, Exception):
            raise found
        return found

    def read_all(self, _scope: Scope, *, page: int) -> Iterator[tuple[list[dict[str, Any]], str]]:
        self.asked.append(f"list {page}")
        yield self._next(self._lists), "5"

    @contextmanager
    def watch(self, _scope: Scope, *, version: str, seconds: int) -> Iterator[Any]:
        self.asked.append(f"watch {version}")
        yield Events(self._next(self._watches))


@contextmanager
def informed(source: Lists, store: ObjectStore) -> Iterator[Informer]:
    informer = Informer(source, SCOPE, store)
    informer.start()
    try:
        yield informer
    finally:
        informer.stop()
        informer.join(60)


def test_a_watch_goes_on_where_the_last_one_ended_and_a_forgotten_version_is_listed_anew(store: ObjectStore) -> None:
    changed = {"type": "MODIFIED", "object": config(7, a="b")}
    source = Lists([[config(4)], [config(8, a="again")]], [[changed], ClusterExpired("410")])
    with informed(source, store):
        until(lambda: data(store) == {"a": "again"})
    assert source.asked[:4] == ["list 250", "watch 5", "watch 7", "list 250"]


def test_a_version_that_is_forgotten_while_it_is_watched_is_listed_anew(store: ObjectStore) -> None:
    source = Lists([[config(4)], []], [[{"type": "ERROR", "object": {"code": 410, "message": "too old"}}]])
    with informed(source, store):
        until(lambda: data(store) is None and len(source.asked) > 2)
    assert source.asked[:3] == ["list 250", "watch 5", "list 250"]


def test_what_no_watch_tells_a_list_does(store: ObjectStore) -> None:
    with informed(Lists([[], [config(4)]], [ClusterUnavailable("503")] * 9), store) as informer:
        until(lambda: data(store) == {})
        assert until(informer.trouble)[1] == "503"


def test_a_kind_that_is_forbidden_is_known_to_be_and_told_when_it_may_be_read(store: ObjectStore, told: Told) -> None:
    source = Lists([ClusterForbidden("403"), ClusterForbidden("403"), [config(4)]], [[]] * 99)
    with informed(source, store) as informer:
        assert informer.wait(60)
        assert isinstance(informer.refusal(), ClusterForbidden)
        assert informer.trouble() == (0.0, "")
        until(lambda: informer.refusal() is None)
    assert told.names == ["c", ""]


@contextmanager
def cached(api: ApiServerThread) -> Iterator[tuple[CachedCluster, Cache]]:
    cluster = connect()
    cache = Cache(cluster, lambda _kind, _tiers: None, namespaces=("default",))
    cache.start()
    try:
        assert cache.wait(lambda: False)
        yield CachedCluster(cluster, cache, TierName(namespace="default", name="llama")), cache
    finally:
        cache.close()


MINE: dict[str, Any] = {
    "apiVersion": "v1",
    "kind": "ConfigMap",
    "metadata": {"name": "llama-connector", "namespace": "default", "labels": {names.LABEL_TIER: "llama"}},
    "data": {"a": "b"},
}


def test_nothing_is_written_for_a_tier_that_was_edited_or_deleted_since(api: ApiServerThread) -> None:
    kubectl = Client(api.url)
    kubectl.apply_tier(body())
    with cached(api) as (cluster, cache):
        cluster.get(TIER_KEY, "default")
        kubectl.delete("/apis/kvtier.dev/v1beta1", "kvcachetiers", "llama")
        with pytest.raises(ClusterConflict, match="was changed or deleted"):
            cluster.apply(MINE, over=None)
        assert kubectl.get(CORE, "configmaps", "llama-connector") is None
        assert cache.tiers.places() == []


def test_what_was_made_meanwhile_is_not_written_over(api: ApiServerThread) -> None:
    kubectl = Client(api.url)
    kubectl.apply_tier(body())
    with cached(api) as (cluster, _cache):
        cluster.get(TIER_KEY, "default")
        theirs = {**MINE, "metadata": {"name": "llama-connector"}, "data": {"their": "own"}}
        kubectl.call("POST", kubectl.path(CORE, "configmaps"), theirs)
        with pytest.raises(ClusterConflict, match="meanwhile there is one"):
            cluster.apply(MINE, over=None)
        found = cluster.get(names.key_of(MINE), "default")
        assert (found or {})["data"] == {"their": "own"}
        kubectl.delete(CORE, "configmaps", "llama-connector")
        until(lambda: cluster.get(names.key_of(MINE), "default") is None)
        assert cluster.apply(MINE, over=None)["data"] == {"a": "b"}
        assert (cluster.get(names.key_of(MINE), "default") or {})["data"] == {"a": "b"}


def test_a_tier_is_found_by_the_claim_that_it_uses(told: Told) -> None:
    tiers = ObjectStore(TIERS, told)
    body = tier(volume={"claim": None, "existingClaim": "mine"})
    body["metadata"] |= {"uid": "t", "resourceVersion": "1"}
    tiers.on_update(body)
    assert tiers.names_of(NAMESPACE, "mine") == ("llama",)


KEY = ObjectKey(api_version="v1", kind="ConfigMap", name="a")
TIER = TierRef(namespace="default", name="llama", uid="u1")


def config_map(**data: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "a", "namespace": "default", "labels": {"x": "y"}},
        "data": data,
    }


@pytest.fixture
def cluster(api: ApiServerThread) -> KubernetesCluster:
    del api
    return connect()


def test_an_object_that_was_replaced_meanwhile_is_not_written(cluster: KubernetesCluster) -> None:
    cluster.apply(config_map(a="1"), over=None)
    with pytest.raises(errors.ClusterConflict):
        cluster.apply(config_map(a="2"), over="another")
    assert (cluster.get(KEY, "default") or {})["data"] == {"a": "1"}
    with pytest.raises(errors.ClusterConflict):
        cluster.delete(KEY, "default", uid="another")


def test_a_field_of_others_is_not_taken_when_creating_and_lists_are_of_the_selected(
    api: ApiServerThread, cluster: KubernetesCluster
) -> None:
    cluster.apply(config_map(a="1"), over=None)
    found = cluster.list("v1", "ConfigMap", namespace="default", selector="x=y")
    assert [(each["kind"], each["metadata"]["name"]) for each in found] == [("ConfigMap", "a")]
    assert cluster.list("v1", "ConfigMap", namespace="default", selector="x=z") == []
    api.create(theirs := {**config_map(a="theirs"), "metadata": {**config_map()["metadata"], "name": "b"}})
    with pytest.raises(errors.ClusterConflict, match="conflict"):
        cluster.apply({**theirs, "data": {"a": "ours"}}, over=None)


@pytest.mark.parametrize(("count", "pages"), [(0, [0]), (2, [2]), (5, [2, 2, 1])])
def test_long_lists_are_read_in_pages_that_leave_nothing_out(
    cluster: KubernetesCluster, monkeypatch: pytest.MonkeyPatch, count: int, pages: list[int]
) -> None:
    monkeypatch.setattr("kvtier_operator.kube.client.PAGE", 2)
    for number in range(count):
        body = config_map()
        cluster.apply({**body, "metadata": {**body["metadata"], "name": f"c{number}"}}, over=None)
    found = list(cluster.pages("v1", "ConfigMap", namespace="default"))
    assert [len(page) for page in found] == pages
    assert [each["metadata"]["name"] for page in found for each in page] == [f"c{number}" for number in range(count)]
    assert {each["kind"] for page in found for each in page} <= {"ConfigMap"}


def test_what_is_not_there_is_none_to_get_delete_or_have_a_status(cluster: KubernetesCluster) -> None:
    assert cluster.get(KEY, "default") is None
    cluster.delete(KEY, "default", uid="any")
    cluster.patch_status(TIER, {"replicas": 1}, resource_version="1")


@pytest.mark.parametrize(
    ("error", "codes"),
    [
        (errors.ClusterRejected, (400, 422)),
        (errors.ClusterForbidden, (401, 403)),
        (errors.ClusterConflict, (409,)),
        (errors.ClusterUnavailable, (429, 500, 503)),
    ],
)
def test_every_answer_has_its_exception_and_a_server_that_is_gone_is_unavailable(
    api: ApiServerThread, cluster: KubernetesCluster, error: type[errors.ClusterError], codes: tuple[int, ...]
) -> None:
    for code in codes:
        api.server.faults[:] = [lambda request, code=code: ApiError(code, "Reason", "because")]
        with pytest.raises(error, match=rf"^cannot read ConfigMap/a: {code} because$"):
            cluster.get(KEY, "default")
    api.close()
    with pytest.raises(errors.ClusterUnavailable, match="cannot read ConfigMap/a"):
        cluster.get(KEY, "default")
