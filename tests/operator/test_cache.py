# SPDX-License-Identifier: Apache-2.0
"""What is remembered of the cluster is the newest that was said; every key is worked on, once at a time."""

from __future__ import annotations

import json
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from live import CORE, Client, body
from tiers import NAMESPACE, TIER_KEY, tier
from waiting import Clock, until

from kvtier_localcluster.apiserver import ApiError, ApiServerThread
from kvtier_operator import errors, names
from kvtier_operator.errors import ClusterConflict, ClusterExpired, ClusterForbidden, ClusterUnavailable
from kvtier_operator.kube import work_queue
from kvtier_operator.kube.cache import NODES, TIERS, Cache
from kvtier_operator.kube.cached_cluster import CachedCluster
from kvtier_operator.kube.client import KubernetesCluster, connect
from kvtier_operator.kube.informer import Informer
from kvtier_operator.kube.object_store import ObjectStore, Scope, WatchedKind, read_json
from kvtier_operator.kube.work_queue import Priority, Requeue, WorkQueue
from kvtier_operator.names import TierName, TierRef

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
    with informed(Lists([RecursionError("too deep")] * 99, []), store) as informer:
        until(lambda: "cannot read" in informer.trouble()[1], "it is told")


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
    with informed(Lists([[], *[[config(4)]] * 99], [ClusterUnavailable("503")] * 99), store) as informer:
        until(lambda: data(store) == {})
        assert informer.trouble()[1] == "503"


def test_a_kind_that_is_forbidden_is_known_to_be_and_told_when_it_may_be_read(store: ObjectStore, told: Told) -> None:
    lists: list[Any] = [ClusterForbidden("403")] * 99
    with informed(Lists(lists, [[]] * 99), store) as informer:
        assert informer.wait(60)
        assert isinstance(informer.refusal(), ClusterForbidden)
        assert informer.trouble() == (0.0, "")
        lists[:] = [[config(4)]]
        until(lambda: informer.refusal() is None)
    assert told.names == ["c", ""]


@contextmanager
def cached() -> Iterator[tuple[CachedCluster, Cache]]:
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


def test_nothing_is_written_for_a_tier_that_was_edited_or_deleted_since(kubectl: Client) -> None:
    kubectl.apply_tier(body())
    with cached() as (cluster, cache):
        cluster.get(TIER_KEY, "default")
        kubectl.delete("/apis/kvtier.dev/v1beta1", "kvcachetiers", "llama")
        with pytest.raises(ClusterConflict, match="was changed or deleted"):
            cluster.apply(MINE, over=None)
        assert kubectl.get(CORE, "configmaps", "llama-connector") is None
        assert cache.tiers.places() == []


def test_what_was_made_meanwhile_is_not_written_over(kubectl: Client) -> None:
    kubectl.apply_tier(body())
    with cached() as (cluster, _cache):
        cluster.get(TIER_KEY, "default")
        theirs = {**MINE, "metadata": {"name": "llama-connector"}, "data": {"their": "own"}}
        kubectl.call("POST", kubectl.path(CORE, "configmaps"), theirs)
        with pytest.raises(ClusterConflict, match="meanwhile there is one"):
            cluster.apply(MINE, over=None)
        assert (cluster.get(names.key_of(MINE), "default") or {})["data"] == {"their": "own"}
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


KEY = names.key_of(MINE)
TIER = TierRef(namespace="default", name="llama", uid="u1")


def config_map(**data: str) -> dict[str, Any]:
    return {**MINE, "data": data}


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
    found = cluster.list("v1", "ConfigMap", namespace="default", selector=f"{names.LABEL_TIER}=llama")
    assert [(each["kind"], each["metadata"]["name"]) for each in found] == [("ConfigMap", KEY.name)]
    assert cluster.list("v1", "ConfigMap", namespace="default", selector=f"{names.LABEL_TIER}=x") == []
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
        with pytest.raises(error, match=rf"^cannot read {KEY}: {code} because$"):
            cluster.get(KEY, "default")
    api.close()
    with pytest.raises(errors.ClusterUnavailable, match=f"cannot read {KEY}"):
        cluster.get(KEY, "default")


NEVER = 3600.0


@contextmanager
def queue(work: Callable[[str, int], Requeue], *, workers: int = 2, **seconds: float) -> Iterator[WorkQueue[str]]:
    found: WorkQueue[str] = WorkQueue(work, workers=workers, **{"resync_seconds": NEVER, **seconds})
    found.start()
    try:
        yield found
    finally:
        assert found.close(timeout=60)


class Held:
    """Work that begins, and ends once the test lets it go on."""

    def __init__(self) -> None:
        self.entered, self.release = threading.Event(), threading.Event()
        self.ended: list[Any] = []

    def __call__(self, key: Any, attempt: int) -> Requeue:
        self.entered.set()
        self.release.wait(60)
        self.ended.append(key)
        return Requeue(is_gone=True)


class Seen(Counter[str]):
    """Work that counts its keys, and says of each when it is to run again."""

    def __init__(self, again: Callable[[str], Requeue] = lambda _key: Requeue()) -> None:
        super().__init__()
        self.attempts: list[int] = []
        self._again = again

    def __call__(self, key: str, attempt: int) -> Requeue:
        self.attempts.append(attempt)
        self[key] += 1
        return self._again(key)


def test_a_burst_of_events_makes_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(work_queue, "time", SimpleNamespace(monotonic=clock))
    with queue(seen := Seen(), debounce_seconds=0.2) as found:
        for _ in range(100):
            found.add("a")
            # A worker that did not wait for the end of the burst would begin.
            threading.Event().wait(0.001)
        clock.seconds += 1
        until(lambda: seen["a"])
        found.add("b")
        clock.seconds += 1
        until(lambda: seen["b"])
    assert seen["a"] == 1


def test_a_key_never_runs_twice_at_a_time_and_what_is_added_meanwhile_is_not_lost() -> None:
    entered, release = threading.Semaphore(0), threading.Semaphore(0)
    busy = threading.Lock()
    overlaps: list[str] = []

    def work(key: str, attempt: int) -> Requeue:
        if not busy.acquire(blocking=False):
            overlaps.append(key)
            return Requeue()
        entered.release()
        release.acquire()
        busy.release()
        return Requeue()

    with queue(work, workers=4) as found:
        found.add("a")
        assert entered.acquire(timeout=60)
        for _ in range(10):
            found.add("a")
        release.release()
        assert entered.acquire(timeout=60)  # the additions made one more pass
        release.release()
        assert not entered.acquire(timeout=0.1)  # and only one
    assert overlaps == []


def test_a_failure_is_counted_until_it_succeeds_whatever_else_was_looked_at_before() -> None:
    seen = Seen(lambda _key: Requeue(retry_after=0.01) if len(seen.attempts) < 4 else Requeue())
    with queue(seen) as found:
        found.add("a")
        until(lambda: len(seen.attempts) == 4)
        found.add("a")
        until(lambda: len(seen.attempts) == 5)
    assert seen.attempts == [1, 2, 3, 4, 1]

    def again(_key: str) -> Requeue:
        # Only the resync lets it run again so soon: the tenth look in a row is put off for minutes.
        return Requeue(retry_after=0.001) if 10 < len(seen.attempts) <= 13 else Requeue(poll_after=1.0)

    with queue(seen := Seen(again), resync_seconds=0.001) as found:
        found.add("a")
        until(lambda: len(seen.attempts) >= 16)
    assert seen.attempts[:16] == [*[1] * 11, 2, 3, 4, 1, 1]


def test_what_nothing_waits_for_is_looked_at_less_and_less_often_until_it_has_passed() -> None:
    def again(key: str) -> Requeue:
        is_polled = key == "lasts" or (key == "passes" and seen[key] % 2)
        return Requeue(poll_after=0.001) if is_polled else Requeue(requeue_after=0.001)

    with queue(seen := Seen(again)) as found:
        for key in ("steady", "lasts", "passes"):
            found.add(key)
        until(lambda: seen["steady"] > 300 and seen["passes"] > 100)
    # Each wait is twice as long as the one before, up to a minute: the thirtieth ends after a quarter of an hour.
    assert 1 < seen["lasts"] < 30


def test_an_unexpected_error_is_logged_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    def again(_key: str) -> Requeue:
        if len(seen.attempts) == 1:
            raise ZeroDivisionError
        return Requeue()

    with caplog.at_level(logging.ERROR), queue(seen := Seen(again)) as found:
        found.add("a")
        until(lambda: seen.attempts == [1, 2])
    assert "ZeroDivisionError" in caplog.text


def test_a_key_comes_back_by_itself_until_it_is_gone() -> None:
    with queue(seen := Seen(lambda key: Requeue(is_gone=key == "gone")), resync_seconds=0.01) as found:
        found.add("gone")
        found.add("here")
        until(lambda: seen["here"] > 5)
    assert seen["gone"] == 1


def test_closing_lets_a_running_pass_end_and_starts_no_other() -> None:
    found: WorkQueue[str] = WorkQueue(work := Held(), workers=1, resync_seconds=NEVER)
    found.start()
    found.add("a")
    found.add("b")
    assert work.entered.wait(60)
    assert found.close(timeout=0) is False
    work.release.set()
    assert found.close(timeout=60) is True
    assert work.ended == ["a"]


def test_a_queue_that_does_not_move_shows_it() -> None:
    with queue(work := Held(), workers=1) as found:
        assert found.seconds_overdue() == 0
        found.add("stuck")
        assert work.entered.wait(60)
        found.add("waits")
        until(lambda: found.seconds_overdue() > 0)
        work.release.set()
        until(lambda: found.seconds_overdue() == 0)


def test_being_added_again_does_not_make_a_failing_key_wait_longer_nor_does_its_failure_put_off_a_look() -> None:
    with queue(seen := Seen(lambda _key: Requeue(retry_after=NEVER))) as found:
        for number in range(1, 6):
            found.add("a")
            until(lambda number=number: len(seen.attempts) == number)  # type: ignore[misc]  # mypy sees no default
    assert seen.attempts == [1, 2, 2, 2, 2]
    with queue(seen := Seen(lambda _key: Requeue(retry_after=NEVER, requeue_after=0.01))) as found:
        found.add("a")
        until(lambda: seen.attempts[:3] == [1, 2, 3])


def order_of(add: Callable[[WorkQueue[int]], None], count: int) -> list[int]:
    """Return in which order one worker, busy at first, takes the keys that were added meanwhile."""
    queue: WorkQueue[int] = WorkQueue(work := Held(), workers=1, resync_seconds=60)
    queue.start()
    queue.add(-1)
    assert work.entered.wait(60)
    add(queue)
    work.release.set()
    until(lambda: len(work.ended) >= count + 1 and queue.depth() == 0)
    assert queue.close(timeout=60)
    return work.ended[1:]


def test_what_somebody_changed_goes_before_what_can_wait_and_an_edit_before_creations() -> None:
    def add(queue: WorkQueue[int]) -> None:
        for key in range(20):
            queue.add_routine(key)
        for key in (100, 5, 101):
            queue.add(key)

    order = order_of(add, 22)
    assert max(order.index(key) for key in (100, 5, 101)) <= 3
    assert sorted(order) == [*range(20), 100, 101]

    def add(queue: WorkQueue[int]) -> None:
        for key in range(1000):
            queue.add(key)
        for key in (2000, 500, 2001):
            queue.add(key, priority=Priority.EDIT_OF_SERVING)

    assert order_of(add, 1002)[:3] == [2000, 500, 2001]

    def add(queue: WorkQueue[int]) -> None:
        for key in (1, 2, 1):
            queue.add_routine(key)
            queue.add(key)
            queue.add_routine(key)

    assert order_of(add, 2) == [1, 2]
