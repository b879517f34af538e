# SPDX-License-Identifier: Apache-2.0
"""The life of a tier with real watches and a real HTTP API server, who owns which field, and which operator acts."""

from __future__ import annotations

import functools
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from live import APPS, CORE, NAMESPACE, TIERS, Client, Controllers, agents, body, operator_process, running
from tiers import claim, merge
from waiting import until

from kvtier_localcluster.apiserver import ApiError, ApiServerThread
from kvtier_operator import names
from kvtier_operator.apply import is_applied
from kvtier_operator.kube import idle
from kvtier_operator.kube.client import connect
from kvtier_operator.kube.http_server import Health
from kvtier_operator.metrics import OperatorMetrics

POLICY = "/apis/policy/v1"
RBAC = "/apis/rbac.authorization.k8s.io/v1"
TABLES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
CHILDREN = [tuple(each) for each in TABLES["children"]]
CLAIM = (CORE, "persistentvolumeclaims", "llama-blocks")


@contextmanager
def ready(kubectl: Client, **settings: Any) -> Iterator[OperatorMetrics]:
    with running(**settings) as metrics:
        kubectl.apply_tier(body())
        until(kubectl.is_ready)
        yield metrics


def engines(kubectl: Client) -> list[dict[str, Any]]:
    pods = kubectl.items(CORE, "pods")
    return [pod for pod in pods if pod["metadata"]["labels"]["app.kubernetes.io/component"] == "engine"]


def is_unchanged(metrics: Any, state: Callable[[], object], *, passes: int = 5) -> bool:
    """Tell whether so many passes have left a state as it was."""
    before, done = state(), ok_passes(metrics)
    until(lambda: ok_passes(metrics) > done + passes)
    return state() == before


def outcome(metrics: Any, result: str) -> float:
    """Return how many reconciles have ended with a result."""
    return float(metrics.registry.get_sample_value("kvtier_operator_reconcile_total", {"outcome": result}) or 0)


def ok_passes(metrics: Any) -> float:
    return outcome(metrics, "ok")


LEASE = ("/apis/coordination.k8s.io/v1", "leases", "llama-janitor")
OWN = (TIERS, "kvcachetiers", "llama")
CHANGES: dict[str, tuple[Callable[[Client], object], Callable[[Client], object]]] = {
    "an object is deleted": (
        lambda kubectl: kubectl.delete(CORE, "configmaps", "llama-janitor"),
        lambda kubectl: kubectl.get(CORE, "configmaps", "llama-janitor"),
    ),
    "an object that is not watched is deleted": (
        lambda kubectl: kubectl.delete(*LEASE),
        lambda kubectl: kubectl.get(*LEASE),
    ),
    "an object is changed": (
        lambda kubectl: kubectl.merge(APPS, "deployments", "llama-janitor", {"spec": {"paused": True, "replicas": 3}}),
        lambda kubectl: (kubectl.get(APPS, "deployments", "llama-janitor") or {})["spec"]["replicas"] != 3,
    ),
    "the status is changed": (
        lambda kubectl: kubectl.merge(*OWN, {"status": {"replicas": 7}}, sub="/status"),
        lambda kubectl: (kubectl.get(*OWN) or {})["status"]["replicas"] == 2,
    ),
    "the spec is changed": (
        lambda kubectl: kubectl.merge(*OWN, {"spec": {"replicas": 1}}),
        lambda kubectl: kubectl.is_ready() and len(engines(kubectl)) == 1,
    ),
}


@pytest.mark.usefixtures("controllers")
def test_a_tier_that_stands_as_it_was_left_is_put_off_at_a_start_and_no_other_one(
    kubectl: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_noted() -> bool:
        return bool((kubectl.get(*OWN) or {})["status"].get("idleDigest"))

    # What is put off is not reconciled before the test ends: what is mended was noticed.
    monkeypatch.setattr(idle, "RECONCILES_A_SECOND", 1e-3)
    with ready(kubectl, resync_seconds=0.5):
        until(is_noted)
    for name, (change, is_mended) in CHANGES.items():
        with running(resync_seconds=3600) as metrics:
            until(lambda: outcome(metrics, "unchanged"))
            assert ok_passes(metrics) == 0
        change(kubectl)
        with running(resync_seconds=3600) as metrics:
            until(functools.partial(is_mended, kubectl), name)
            assert outcome(metrics, "unchanged") == 0, name
        kubectl.merge(*OWN, {"status": {"idleDigest": None}}, sub="/status")
        with running(resync_seconds=0.5):
            until(is_noted)
    with running(resync_seconds=3600) as metrics:
        until(lambda: outcome(metrics, "unchanged"))
        # A change is acted upon at once all the same.
        kubectl.delete(CORE, "configmaps", "llama-janitor")
        until(lambda: kubectl.get(CORE, "configmaps", "llama-janitor"))
    monkeypatch.setattr(idle, "_sources", lambda: "of another release")
    with running(resync_seconds=3600) as metrics:
        until(lambda: ok_passes(metrics))
        assert outcome(metrics, "unchanged") == 0


@pytest.mark.usefixtures("controllers")
def test_an_object_of_somebody_else_is_refused_until_it_is_gone(kubectl: Client) -> None:
    theirs = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "llama-connector"}, "data": {"a": "b"}}
    kubectl.call("POST", kubectl.path(CORE, "configmaps"), theirs)
    with running(resync_seconds=3600):
        kubectl.apply_tier(body())
        until(lambda: kubectl.condition("Ready").get("reason") == "ObjectNotOurs")
        assert (kubectl.get(CORE, "configmaps", "llama-connector") or {})["data"] == {"a": "b"}
        assert kubectl.get(APPS, "deployments", "llama-engine") is None
        kubectl.delete(CORE, "configmaps", "llama-connector")
        until(kubectl.is_ready)
    warnings = [event["reason"] for event in kubectl.items(CORE, "events") if event["type"] == "Warning"]
    assert warnings == ["ObjectNotOurs"]


@pytest.mark.usefixtures("controllers")
def test_dropped_watches_expired_versions_and_ends_of_kopf_are_outlived(api: ApiServerThread, kubectl: Client) -> None:
    ended: list[str] = []

    def end_kopf(request: Any) -> ApiError | None:
        # kopf takes no list that fails in this way, and ends.
        is_meant = request.headers.get("User-Agent", "").startswith("kopf") and "watch" not in request.query
        if not is_meant or ended:
            return None
        ended.append(request.path)
        return ApiError(409, "Conflict", "injected")

    with ready(kubectl, resync_seconds=3600):
        api.server.faults.append(end_kopf)
        # After an event between the two, kopf would go on from there, and list nothing.
        until(lambda: api.compact() or api.drop_watches() or ended, pause_seconds=0.5)
        kubectl.merge(TIERS, "kvcachetiers", "llama", {"spec": {"replicas": 1}})
        until(lambda: kubectl.is_ready() and len(engines(kubectl)) == 1)
        kubectl.merge(TIERS, "kvcachetiers", "llama", {"spec": {"replicas": 2}})
        until(lambda: kubectl.is_ready() and len(engines(kubectl)) == 2)


def test_tiers_whose_watch_fails_are_found_and_missed_by_their_list(api: ApiServerThread, kubectl: Client) -> None:
    health = Health()

    def deaf(request: Any) -> ApiError | None:
        is_watch = "watch" in request.query and request.path.endswith("/kvcachetiers")
        return ApiError(503, "ServiceUnavailable", "injected") if is_watch else None

    def watching() -> set[str]:
        found = (call for call in list(api.server.audit) if call.verb == "watch")
        return {call.user_agent.partition("/")[0] for call in found if call.path.endswith("/kvcachetiers")}

    with running(health=health, resync_seconds=0.3) as metrics:
        until(lambda: "kopf" in watching())
        api.server.faults.append(deaf)
        api.drop_watches()
        kubectl.apply_tier(body())
        until(lambda: kubectl.get(APPS, "deployments", "llama-engine"))
        kubectl.delete(TIERS, "kvcachetiers", "llama")
        until(lambda: metrics.registry.get_sample_value("kvtier_operator_reconcile_total", {"outcome": "gone"}))
        assert health.problems("/healthz") == {}
        api.server.faults.clear()
    assert watching() == {"kopf"}


def test_a_namespace_that_may_not_be_read_holds_up_no_other(api: ApiServerThread, kubectl: Client) -> None:
    def forbid(request: Any) -> ApiError | None:
        is_ours = request.headers.get("User-Agent") != "test" and "/namespaces/other/kvcachetiers" in request.path
        return ApiError(403, "Forbidden", "kvcachetiers is forbidden") if is_ours else None

    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "other"}}
    kubectl.call("POST", f"{CORE}/namespaces", namespace)
    there = body()
    there["metadata"]["namespace"] = "other"
    kubectl.call("POST", f"{TIERS}/namespaces/other/kvcachetiers", there)
    api.server.faults.append(forbid)
    with running(namespaces=(NAMESPACE, "other"), resync_seconds=0.5):
        kubectl.apply_tier(body())
        until(lambda: kubectl.get(APPS, "deployments", "llama-engine"))
        api.server.faults.clear()
        until(lambda: kubectl.call("GET", f"{APPS}/namespaces/other/deployments")["items"])


@pytest.mark.usefixtures("controllers")
def test_a_claim_of_the_users_own_is_noticed_as_soon_as_it_is_there(kubectl: Client) -> None:
    mine = {**claim("mine", "ReadWriteMany"), "metadata": {"name": "mine"}}
    with running(resync_seconds=3600):
        kubectl.apply_tier(body(volume={"claim": None, "existingClaim": "mine"}))
        until(lambda: kubectl.condition("Ready").get("reason") == "ClaimMissing")
        assert kubectl.condition("Stalled")["status"] == "False"
        kubectl.call("POST", kubectl.path(CORE, "persistentvolumeclaims"), mine)
        until(kubectl.is_ready)


@pytest.mark.usefixtures("controllers")
def test_a_tier_that_is_made_anew_at_once_becomes_ready_without_a_resync(kubectl: Client) -> None:
    with running(resync_seconds=3600):
        for _ in range(2):
            kubectl.apply_tier(body())
            until(kubectl.is_ready)
            kubectl.delete(TIERS, "kvcachetiers", "llama")
        kubectl.apply_tier(body())
        until(kubectl.is_ready)


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
    plurals = {plural for _, plural, _ in (*CHILDREN, CLAIM)} | {"pods", "jobs", "networkpolicies"}
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
        # What was on its way when the tier became Ready may still come; an operator that writes for ever never rests.
        until(lambda: is_unchanged(metrics, lambda: sent("get", "list"), passes=10))
    writes = sent()
    found = kubectl.get(TIERS, "kvcachetiers", "llama")
    assert not {"finalizers", "annotations"} & found["metadata"].keys()
    assert all("finalizers" not in (kubectl.get(*child) or {})["metadata"] for child in CHILDREN)
    # Neither has an operator anything to write that finds everything as it is to be.
    with running(resync_seconds=0.2) as metrics:
        until(lambda: ok_passes(metrics) > 5)
        assert sent() == writes


MANIFEST, ROLE = TABLES["deployment"], TABLES["role"]
MORE_RULES = [*ROLE["rules"], {"apiGroups": [""], "resources": ["secrets"], "verbs": ["get"]}]


def changed(**containers: Any) -> dict[str, Any]:
    found = json.loads(json.dumps(MANIFEST))
    found["spec"]["template"]["spec"]["containers"][0] |= containers
    return dict(found)


@pytest.mark.parametrize(
    ("before", "wanted"),
    [
        (MANIFEST, merge(MANIFEST, {"spec": {"replicas": 2}})),
        (MANIFEST, merge(MANIFEST, {"metadata": {"annotations": None}})),
        (MANIFEST, merge(MANIFEST, {"metadata": {"annotations": {"c": "d"}}})),
        (MANIFEST, changed(args=["--b", "--a"])),
        (MANIFEST, changed(env=[{"name": "A", "value": "1"}])),
        (MANIFEST, changed(env=[{"name": "A", "value": "1"}, {"name": "B", "value": "3"}])),
        (MANIFEST, changed(resources={"requests": {"memory": "2Gi"}})),
        # Lists that are one value: a field less in an item, and an item less.
        (MANIFEST, merge(MANIFEST, {"spec": {"template": {"spec": {"tolerations": [{"key": "gpu"}]}}}})),
        ({**ROLE, "rules": MORE_RULES}, ROLE),
    ],
)
@pytest.mark.usefixtures("api")
def test_whatever_an_apply_would_change_is_applied(before: dict[str, Any], wanted: dict[str, Any]) -> None:
    live = connect().apply(before, over=None)
    assert is_applied(before, live)
    assert not is_applied(wanted, live)
    after = connect().apply(wanted, over=live["metadata"]["uid"])
    assert is_applied(wanted, after)
    assert after.get("rules") == wanted.get("rules")


@pytest.mark.usefixtures("api")
def test_what_others_add_is_no_reason_to_apply_again(api: ApiServerThread) -> None:
    connect().apply(MANIFEST, over=None)
    patch = {"metadata": {"annotations": {"theirs": "1"}}, "status": {"replicas": 3}}
    Client(api.url).merge("/apis/apps/v1", "deployments", "d", patch)
    assert is_applied(MANIFEST, connect().get(names.key_of(MANIFEST), "default"))


STRATEGIC = "application/strategic-merge-patch+json"


def test_an_item_more_in_a_list_that_is_one_value_is_applied_over(api: ApiServerThread) -> None:
    connect().apply(ROLE, over=None)
    Client(api.url).merge(RBAC, "roles", "r", {"rules": MORE_RULES})
    live = connect().get(names.key_of(ROLE), "default")
    assert not is_applied(ROLE, live)
    assert connect().apply(ROLE, over=live["metadata"]["uid"])["rules"] == ROLE["rules"]


@pytest.mark.usefixtures("api")
def test_what_says_nothing_stands_where_the_api_server_leaves_it_out() -> None:
    wanted = changed(env=[{"name": "A", "value": ""}], stdin=False)
    live = connect().apply(wanted, over=None)
    container = live["spec"]["template"]["spec"]["containers"][0]
    container["env"][0].pop("value", None)
    container.pop("stdin", None)
    assert is_applied(wanted, live)
    assert not is_applied(changed(env=[{"name": "A", "value": "1"}], stdin=False), live)


@pytest.fixture
def served(api: ApiServerThread) -> Iterator[Client]:
    client = Client(api.url)
    with Controllers(client, api), running(resync_seconds=3600):
        client.apply_tier(body())
        until(client.is_ready)
        yield client


DRIFT: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    (RBAC, "roles", "llama-janitor", {"rules": [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get"]}]}),
    (CORE, "configmaps", "llama-connector", {"data": {"connector.json": "{}"}}),
    (CORE, "services", "llama-engine", {"spec": {"selector": {"blue": "green"}}}),
    (POLICY, "poddisruptionbudgets", "llama-engine", {"spec": {"selector": {"matchLabels": {"a": "b"}}}}),
    (APPS, "deployments", "llama-engine", {"spec": {"replicas": 9}}),
)


def test_what_others_change_in_a_field_of_ours_is_applied_anew_at_once(served: Client) -> None:
    def ours() -> list[dict[str, Any]]:
        found = [served.get(group, plural, name) or {} for group, plural, name, _ in DRIFT]
        return [{field: each.get(field) for field in ("spec", "data", "rules")} for each in found]

    before = ours()
    for group, plural, name, patch in DRIFT:
        served.merge(group, plural, name, patch)
    until(lambda: ours() == before)


def set_env(kubectl: Client, deployment: str) -> None:
    container = (kubectl.get(APPS, "deployments", deployment) or {})["spec"]["template"]["spec"]["containers"][0]
    more = {"name": container["name"], "env": [{"name": "EXTRA", "value": "1"}]}
    path = kubectl.path(APPS, "deployments", deployment) + "?fieldManager=kubectl-set"
    kubectl.call("PATCH", path, {"spec": {"template": {"spec": {"containers": [more]}}}}, STRATEGIC)


def test_a_field_that_another_manager_adds_stays_theirs_and_is_not_fought_over(served: Client) -> None:
    set_env(served, "llama-engine")
    until(served.is_ready)
    served.merge(TIERS, "kvcachetiers", "llama", {"spec": {"replicas": 3}})
    until(
        lambda: served.is_ready() and (served.get(APPS, "deployments", "llama-engine") or {})["spec"]["replicas"] == 3
    )
    assert "EXTRA" in json.dumps(served.get(APPS, "deployments", "llama-engine"))


LEASES = "/apis/coordination.k8s.io/v1"
SLOW = 120.0
Spawn = Callable[[], "subprocess.Popen[bytes]"]


@pytest.fixture
def spawn(api: ApiServerThread, tmp_path: Path) -> Iterator[Spawn]:
    """Start operators that wait for the lead; their logs are files, so that nobody blocks on a pipe."""
    del api
    with ExitStack() as stack:

        def start() -> subprocess.Popen[bytes]:
            started = operator_process(tmp_path / "kubeconfig", "--leader-elect", KVTIER_LEASE_SECONDS="15")
            return stack.enter_context(started).process

        yield start


def holder(kubectl: Client) -> str:
    return str((kubectl.get(LEASES, "leases", "kvtier-operator") or {}).get("spec", {}).get("holderIdentity") or "")


def has_engine(kubectl: Client, name: str) -> Callable[[], bool]:
    return lambda: kubectl.get(APPS, "deployments", f"{name}-engine") is not None


def test_when_the_leader_is_killed_the_one_that_waited_goes_on(api: ApiServerThread, spawn: Spawn) -> None:
    kubectl = Client(api.url)
    first = spawn()
    leader = until(lambda: holder(kubectl), seconds=SLOW)
    kubectl.apply_tier(body("one"))
    until(has_engine(kubectl, "one"), seconds=SLOW)

    def watches(since: int = 0) -> int:
        audit = list(api.server.audit)[since:]
        return sum(call.verb == "watch" and call.path.endswith("/kvcachetiers") for call in audit)

    until(lambda: watches() == 1, seconds=SLOW)
    before = len(api.server.audit)
    second = spawn()
    until(lambda: waits(api, before), seconds=SLOW)
    # One that waits listed the tiers once, to see whether it may, and since then looks at the Lease alone.
    assert watches(before) == 0
    first.send_signal(signal.SIGKILL)
    kubectl.apply_tier(body("two"))
    until(has_engine(kubectl, "two"), seconds=SLOW)
    assert holder(kubectl) not in {"", leader}
    assert second.poll() is None


def waits(api: ApiServerThread, since: int) -> bool:
    return len([call for call in list(api.server.audit)[since:] if call.verb == "get" and "/leases/" in call.path]) > 3


def test_a_leader_that_is_told_to_go_hands_over_without_a_wait(api: ApiServerThread, spawn: Spawn) -> None:
    kubectl = Client(api.url)
    first = spawn()
    leader = until(lambda: holder(kubectl), seconds=SLOW)
    first.send_signal(signal.SIGTERM)
    assert first.wait(SLOW) == 0
    assert holder(kubectl) == ""
    spawn()
    assert until(lambda: holder(kubectl), seconds=SLOW) != leader


def test_one_that_waits_goes_at_once_when_told_to(api: ApiServerThread, spawn: Spawn) -> None:
    kubectl = Client(api.url)
    spawn()
    leader = until(lambda: holder(kubectl), seconds=SLOW)
    before = len(api.server.audit)
    second = spawn()
    until(lambda: waits(api, before), seconds=SLOW)
    second.send_signal(signal.SIGTERM)
    assert second.wait(SLOW) == 0
    assert holder(kubectl) == leader


def test_a_leader_that_cannot_renew_ends_and_writes_nothing_more(api: ApiServerThread, spawn: Spawn) -> None:
    kubectl, is_cut = Client(api.url), threading.Event()

    def cut(request: Any) -> ApiError | None:
        is_theirs = request.headers.get("User-Agent") != "test" and "/leases/" in request.path
        return ApiError(503, "ServiceUnavailable", "injected") if is_theirs and is_cut.is_set() else None

    api.server.faults.append(cut)
    first = spawn()
    until(lambda: holder(kubectl), seconds=SLOW)
    is_cut.set()
    assert first.wait(SLOW) == 1


def test_an_operator_is_not_run_beside_one_that_is_installed_for_the_same_tiers(api: ApiServerThread) -> None:
    labels = {"app.kubernetes.io/component": "operator", "app.kubernetes.io/part-of": "kvtier"}
    template = {
        "metadata": {"labels": labels},
        "spec": {"containers": [{"name": "operator", "image": "o", "args": []}]},
    }
    spec = {"replicas": 1, "selector": {"matchLabels": labels}, "template": template}
    metadata = {"name": "kvtier-operator", "namespace": NAMESPACE, "labels": labels}
    api.create({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": spec})
    command = [sys.executable, "-m", "kvtier_cli", "run", "-n", NAMESPACE]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=SLOW, check=False)
    assert refused.returncode != 0
    assert f"the operator {NAMESPACE}/kvtier-operator works on these tiers: scale its Deployment to 0" in refused.stderr
    with pytest.raises(subprocess.TimeoutExpired):
        subprocess.run([*command, "--operator-class=mine"], capture_output=True, timeout=10, check=False)
