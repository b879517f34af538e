# SPDX-License-Identifier: Apache-2.0
"""Whose claim it is and which tiers are on it; a new claim is tried once, before the first engine starts on it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import fake_cluster
import kubernetes_schemas
import pytest
import yaml
from fake_cluster import FakeCluster, condition, edited, reconciled, run, serving
from healthy_tier import LATER, NOON, USAGE, VIEW, check_verdict, conditions, varied
from live import TIERS, Client, body, pod_of_job, running
from test_golden import VERSIONS
from test_reconcile import CHILDREN, of_somebody
from tiers import CLAIM, CONFIG, DEPLOYMENT, JANITOR, RUNNING, SERVICE, TIER_KEY, claim, pod, tier, waiting
from waiting import until

from kvtier_localcluster.apiserver import ApiServerThread
from kvtier_operator import names, status
from kvtier_operator.api import parse
from kvtier_operator.conditions import Progress
from kvtier_operator.errors import ClusterError, ClusterForbidden, ClusterRejected, ClusterUnavailable, SpecInvalid
from kvtier_operator.kube.cache import TIERS as WATCHED_TIERS
from kvtier_operator.kube.object_store import ObjectStore
from kvtier_operator.names import ObjectKey, key_of
from kvtier_operator.reconcile import PATIENCE
from kvtier_operator.snapshot import LiveJanitor, Neighbour

TABLES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())


def test_a_retained_claim_is_taken_up_again_and_goes_with_its_tier_only_under_delete() -> None:
    cluster = reconciled()
    cluster.remove(TIER_KEY)
    assert cluster.existing() == {CLAIM}
    before = cluster.look(CLAIM)
    cluster.put(tier())
    run(cluster)
    assert cluster.look(CLAIM)["metadata"]["uid"] == before["metadata"]["uid"]
    assert cluster.existing() == CHILDREN | {TIER_KEY}
    cluster = reconciled(volume={"deletionPolicy": "Delete"})
    edited(cluster, volume={"deletionPolicy": "Retain"})
    assert "ownerReferences" not in cluster.look(CLAIM)["metadata"]
    edited(cluster, volume={"deletionPolicy": "Delete"})
    cluster.remove(TIER_KEY)
    assert cluster.existing() == set()


def test_a_claim_that_another_writer_ties_to_the_tier_is_told_with_the_command_that_unties_it() -> None:
    cluster = reconciled()
    cluster.edit(CLAIM, {"metadata": {"ownerReferences": cluster.look(CONFIG)["metadata"]["ownerReferences"]}})
    assert run(cluster).written == ()
    message = condition(cluster, "Ready")["message"]
    assert f"`kubectl patch pvc {CLAIM.name} -n serving --type=json -p '[" in message
    assert '"/metadata/ownerReferences/0"' in message


@pytest.mark.parametrize("case", TABLES["held up"], ids=lambda case: case["id"])
def test_a_claim_is_retained_as_soon_as_its_tier_says_so_whatever_else_waits_or_is_refused(
    case: dict[str, Any],
) -> None:
    cluster = reconciled(volume={"deletionPolicy": "Delete"})
    cluster.refuse = lambda each: "cannot grow" if each["kind"] == names.CLAIM_KIND and "3Ti" in str(each) else ""
    cluster.edit(TIER_KEY, case.get("tier", {}))
    cluster.edit(CLAIM, case.get("claim", {}))
    run(cluster)
    before = cluster.look(CLAIM)["spec"]
    assert CLAIM in edited(cluster, volume={"deletionPolicy": "Retain"}).written
    assert (run(cluster).written, cluster.look(CLAIM)["spec"]) == ((), before)
    cluster.remove(TIER_KEY)
    assert CLAIM in cluster.existing()


def test_an_existing_claim_is_never_written() -> None:
    cluster = FakeCluster(tier(volume={"claim": None, "existingClaim": "mine"}), claim("mine", "ReadWriteMany"))
    key = ObjectKey(api_version="v1", kind="PersistentVolumeClaim", name="mine")
    before = cluster.look(key)
    run(cluster)
    assert cluster.look(key) == before
    assert not [call for call in cluster.writes() if "PersistentVolumeClaim" in call[1]]
    assert condition(cluster, "VolumeBound")["status"] == "True"
    cluster.remove(TIER_KEY)
    assert cluster.existing() == {key}


@pytest.mark.parametrize(
    ("existing", "reason", "words"),
    [
        ([], "ClaimMissing", "no PersistentVolumeClaim 'mine'"),
        ([claim("mine", "ReadWriteOncePod")], "ClaimNotShared", "set spec.replicas to 1"),
    ],
    ids=["it does not exist", "one pod can mount it"],
)
def test_an_existing_claim_that_cannot_serve_is_refused_with_a_remedy(
    existing: list[dict[str, Any]], reason: str, words: str
) -> None:
    cluster = FakeCluster(tier(volume={"claim": None, "existingClaim": "mine"}), *existing)
    run(cluster)
    assert DEPLOYMENT not in cluster.existing()
    assert condition(cluster, "Ready")["reason"] == reason
    assert words in condition(cluster, "Ready")["message"]


@pytest.mark.parametrize(("change", "reason", "words"), TABLES["impossible"])
def test_a_change_that_a_claim_cannot_make_is_refused_and_holds_up_nothing_else(
    change: dict[str, Any], reason: str, words: str
) -> None:
    cluster = reconciled()
    before = cluster.look(CLAIM)
    assert edited(cluster, replicas=1, volume={"claim": change}).written == (DEPLOYMENT,)
    assert cluster.look(CLAIM) == before
    assert condition(cluster, "Ready")["reason"] == reason
    assert words in condition(cluster, "Ready")["message"]


@pytest.mark.parametrize("error", [ClusterForbidden("cannot grow"), ClusterRejected("cannot grow")], ids=str)
def test_a_claim_that_cannot_grow_is_told_and_holds_up_nothing_else(error: ClusterError) -> None:
    cluster = reconciled()
    edited(cluster, replicas=5, volume={"claim": {"size": "3Ti"}})
    first = cluster.calls.index(("apply", str(CLAIM))) + 1
    cluster.edit(TIER_KEY, {"spec": {"replicas": 6, "volume": {"claim": {"size": "4Ti"}}}})
    cluster.fail = (first, error)
    outcome = run(cluster)
    assert (outcome.written, outcome.failure) == ((DEPLOYMENT,), error)
    assert condition(cluster, "Ready")["message"] == "cannot grow"


def grown_by_hand(size: str = "4Ti") -> FakeCluster:
    """Return a tier whose claim somebody has made larger than the spec says."""
    cluster = reconciled()
    cluster.edit(CLAIM, {"spec": {"resources": {"requests": {"storage": size}}}, "status": {"phase": "Bound"}})
    return cluster


def test_a_tier_whose_claim_was_grown_by_hand_goes_on_and_one_made_anew_gets_its_engines() -> None:
    cluster = grown_by_hand()
    assert set(edited(cluster, replicas=3, disk={"mode": "Bypass"}).written) == {CONFIG, DEPLOYMENT}
    assert json.loads(cluster.look(CONFIG)["data"]["live.json"])["mode"] == "Bypass"
    assert cluster.look(DEPLOYMENT)["spec"]["replicas"] == 3
    assert cluster.look(CLAIM)["spec"]["resources"]["requests"]["storage"] == "4Ti"
    assert condition(cluster, "Ready")["reason"] == "ClaimCannotShrink"
    assert "2Ti is less than the 4Ti that claim 'llama-blocks' has" in condition(cluster, "Ready")["message"]
    cluster = grown_by_hand()
    cluster.remove(TIER_KEY)
    assert cluster.existing() == {CLAIM}
    cluster.put(tier())
    run(cluster)
    assert cluster.existing() == CHILDREN | {TIER_KEY}


@pytest.mark.parametrize(("mode", "is_beside"), [("ReadWriteOnce", True), ("ReadWriteMany", False)])
def test_janitor_and_replicas_run_on_one_node_where_the_users_claim_is_of_one(mode: str, is_beside: bool) -> None:
    cluster = FakeCluster(tier(replicas=2, volume={"claim": None, "existingClaim": "mine"}), claim("mine", mode))
    assert run(cluster).failure is None
    found, engine = (cluster.look(key)["spec"]["template"]["spec"] for key in (JANITOR, DEPLOYMENT))
    assert ("affinity" in found, "nvidia.com/gpu" in str(found["tolerations"])) == (is_beside, is_beside)
    assert engine.get("affinity") == found.get("affinity")


def test_an_affinity_of_the_users_stays_beside_the_one_to_replicas_on_a_volume_of_one_node() -> None:
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    own = {"labelSelector": {"matchLabels": {"app": "cache"}}, "topologyKey": "zone"}
    affinity = {"podAffinity": {required: [own]}, "podAntiAffinity": {required: []}}
    volume = {"claim": {"size": "1Ti", "accessModes": ["ReadWriteOnce"]}}
    cluster = FakeCluster(tier(replicas=2, volume=volume, engine={"podTemplate": {"affinity": affinity}}))
    run(cluster)
    pod_spec = cluster.look(DEPLOYMENT)["spec"]["template"]["spec"]
    first, ours = pod_spec["affinity"]["podAffinity"][required]
    assert first == own
    assert ours["labelSelector"] == cluster.look(DEPLOYMENT)["spec"]["selector"]
    assert ours["topologyKey"] == "kubernetes.io/hostname"
    assert pod_spec["affinity"]["podAntiAffinity"] == {required: []}


def test_the_janitor_lets_go_of_a_volume_of_one_node_that_an_engine_elsewhere_waits_for() -> None:
    volume = {"claim": None, "existingClaim": "mine"}
    cluster = FakeCluster(tier(replicas=1, volume=volume), claim("mine", "ReadWriteOnce"))
    run(cluster)
    stuck = pod("moved", cluster.look(DEPLOYMENT)["spec"]["template"], **waiting("ContainerCreating"))
    stuck["metadata"] |= {"uid": "pod-moved", "creationTimestamp": "2026-01-01T11:00:00Z"}
    key = key_of(cluster.put(stuck))
    cluster.events_about("pod-moved", {"reason": "FailedAttachVolume", "message": "Multi-Attach error for volume"})
    for found, replicas in ({}, 0), (RUNNING, 1), (stuck["status"], 1):
        cluster.edit(key, {"status": found})
        run(cluster)
        assert cluster.look(JANITOR)["spec"]["replicas"] == replicas
        # The janitor stays while any engine serves, though another one waits for its volume.
        cluster.put(pod("serves", cluster.look(DEPLOYMENT)["spec"]["template"])) if replicas else None


def test_a_deleted_claim_is_let_go_by_every_pod_of_the_tier_once_no_engine_is_wanted() -> None:
    cluster = reconciled(proof={"preflight": "Always"})
    run(cluster)
    assert JOB in cluster.existing()
    cluster.edit(CLAIM, {"metadata": {"deletionTimestamp": "2026-01-01T11:00:00Z"}, "status": {"phase": "Bound"}})
    run(cluster)
    assert JOB not in cluster.existing()
    assert cluster.look(JANITOR)["spec"]["replicas"] == 1
    assert "set spec.replicas to 0, which stops the janitor" in condition(cluster, "VolumeBound")["message"]
    edited(cluster, replicas=0)
    assert cluster.look(JANITOR)["spec"]["replicas"] == 0
    assert "names others that use it" in condition(cluster, "VolumeBound")["message"]
    assert run(cluster).written == ()
    cluster.remove(CLAIM)
    run(cluster)
    run(cluster)
    assert cluster.look(JANITOR)["spec"]["replicas"] == 1
    assert {CLAIM, JOB} <= cluster.existing()


LITTLE = LiveJanitor(usage=replace(USAGE, used_bytes=1 << 30))


def of_budget(most: str | None = "900Gi", **others: int | None) -> Progress:
    """Return a tier on its claim of 2Ti, with this budget, beside others with theirs."""
    neighbours = tuple(Neighbour(name=name, max_bytes=budget) for name, budget in others.items())
    spec = parse(tier(disk={"budget": {} if most is None else {"maxBytes": most}}))
    return varied(VIEW, spec=spec, snapshot=replace(VIEW.stage.snapshot, neighbours=neighbours, janitor=LITTLE))


@pytest.mark.parametrize(("most", "others", "verdict", "reason", "words"), TABLES["budgets"])
def test_a_tier_says_whether_the_budgets_of_all_tiers_on_its_claim_fit_it(
    most: str | None, others: dict[str, int | None], verdict: str, reason: str, words: str
) -> None:
    assert check_verdict(of_budget(most, **others), "ClaimShared", verdict, reason, words)["Ready"]["status"] == "True"


def test_overlapping_budgets_are_a_warning_their_end_is_not_and_an_unread_spec_keeps_what_was_told() -> None:
    fits = status.report(of_budget(qwen=1 << 30), {}, now=NOON)
    overlaps = status.report(of_budget(qwen=2 << 40), fits, now=LATER)
    assert [(each.level, each.reason) for each in status.transitions(fits, overlaps)] == [("Warning", "BudgetsOverlap")]
    assert [(each.level, each.reason) for each in status.transitions(overlaps, fits)] == [("Normal", "BudgetsFit")]
    assert status.transitions(fits, status.report(of_budget(), fits, now=LATER)) == []
    before = status.report(of_budget(qwen=2 << 40), {}, now=NOON)
    wrong = Progress(generation=4, tier=VIEW.tier, invalid=SpecInvalid("spec", "is wrong"))
    assert conditions(wrong, before)["ClaimShared"]["reason"] == "BudgetsOverlap"
    assert conditions(wrong)["ClaimShared"]["status"] == "Unknown"


def test_the_others_are_those_of_the_same_claim_whatever_is_wrong_with_them() -> None:
    def on(name: str, claim: str, **spec: Any) -> dict[str, Any]:
        body = tier(volume={"claim": None, "existingClaim": claim}, **spec)
        body["metadata"]["name"] = name
        return body

    mine = tier(disk={"budget": {"maxBytes": "1Ti"}})
    elsewhere = on("elsewhere", "other")
    beside = on("beside", "llama-blocks", disk={"budget": {"maxBytes": "512Gi"}})
    broken = on("broken", "llama-blocks", engine={"args": ["--port=1"]})
    for others, reason, words in (
        ((elsewhere,), "ClaimAlone", "no other"),
        ((elsewhere, beside), "BudgetsFit", "1536Gi together, of 2Ti"),
        ((broken, beside), "BudgetsOverlap", "shared with beside (512Gi), broken (no limit)"),
    ):
        cluster = FakeCluster(mine, *others)
        run(cluster)
        run(cluster)
        assert condition(cluster, "ClaimShared")["reason"] == reason
        assert words in condition(cluster, "ClaimShared")["message"]


def test_only_what_matters_to_the_others_of_a_claim_is_told_to_them() -> None:
    told: list[set[str]] = []
    store = ObjectStore(WATCHED_TIERS, lambda _namespace, _name, groups: told.append(groups))

    def seen(version: int, **changes: Any) -> None:
        body = {**tier(**changes.pop("spec", {})), **changes}
        store.on_update({**body, "metadata": {**body["metadata"], "uid": "u", "resourceVersion": str(version)}})

    seen(1)
    seen(2, status={"replicas": 1})
    seen(3, spec={"replicas": 3})
    seen(4, spec={"disk": {"budget": {"maxBytes": "1Ti"}}})
    store.on_delete(store.get("serving", "llama") or {})
    assert told == [{"llama-blocks"}, set(), set(), {"llama-blocks"}, {"llama-blocks"}]


def test_two_tiers_whose_budgets_do_not_fit_their_claim_say_so_until_one_is_lower(api: ApiServerThread) -> None:
    kubectl = Client(api.url)
    shared = {**claim("shared", "ReadWriteMany"), "metadata": {"name": "shared"}}
    kubectl.call("POST", kubectl.path("/api/v1", "persistentvolumeclaims"), shared)
    for name in ("one", "two"):
        volume = {"claim": None, "existingClaim": "shared"}
        kubectl.apply_tier(body(name, volume=volume, disk={"budget": {"maxBytes": "900Gi"}}))

    def reasons() -> list[str | None]:
        return [kubectl.condition("ClaimShared", name).get("reason") for name in ("one", "two")]

    with running():
        until(lambda: reasons() == ["BudgetsOverlap"] * 2)

        def overlaps() -> list[dict[str, Any]]:
            return [each for each in kubectl.items("/api/v1", "events") if each["reason"] == "BudgetsOverlap"]

        # An event follows the condition that it tells of.
        until(lambda: {each["involvedObject"]["name"] for each in overlaps()} == {"one", "two"})
        assert {each["type"] for each in overlaps()} == {"Warning"}
        kubectl.merge(TIERS, "kvcachetiers", "two", {"spec": {"disk": {"budget": {"maxBytes": "100Gi"}}}})
        until(lambda: reasons() == ["BudgetsFit"] * 2)
        kubectl.delete(TIERS, "kvcachetiers", "two")
        until(lambda: kubectl.condition("ClaimShared", "one").get("reason") == "ClaimAlone")
    assert names.claim_of({"metadata": {"name": "one"}, "spec": "nonsense"}) == "one-blocks"


JOB = ObjectKey(api_version="batch/v1", kind="Job", name="llama-preflight")
GOOD: dict[str, Any] = TABLES["good"]
ALWAYS = {"proof": {"preflight": "Always"}}


def started() -> FakeCluster:
    """Return a cluster in which the Job of a new tier runs."""
    cluster = reconciled(**ALWAYS)
    run(cluster)
    return cluster


def ends(cluster: FakeCluster, code: int, message: str, name: str = "llama-preflight-1") -> None:
    ended = {"name": "preflight", "state": {"terminated": {"exitCode": code, "message": message}}}
    cluster.put({**pod_of_job(cluster.look(JOB), name), "status": {"containerStatuses": [ended]}})


def ended(code: int, message: str | dict[str, Any]) -> FakeCluster:
    """Return a cluster in which the Job of a new tier has ended like this, and was looked at."""
    cluster = started()
    ends(cluster, code, message if isinstance(message, str) else json.dumps(message))
    run(cluster)
    return cluster


def test_engines_wait_until_the_volume_was_tried_and_everything_else_does_not() -> None:
    cluster = started()
    assert JOB in cluster.existing()
    assert SERVICE in cluster.existing()
    assert DEPLOYMENT not in cluster.existing()
    assert condition(cluster, "StorageChecked")["reason"] == "PreflightRunning"
    assert condition(cluster, "Reconciling")["status"] == "True"
    ends(cluster, 0, json.dumps(GOOD))
    assert DEPLOYMENT in run(cluster).written
    told = condition(cluster, "StorageChecked")
    assert told["status"] == "True"
    assert told["message"].startswith("NFS: engines can use the volume")
    for words in ("read 2 GiB/s", "reads go past the page cache", "mount with nconnect=8"):
        assert words in told["message"]
    storage = fake_cluster.status(cluster)["storage"]
    assert (storage["fileSystem"], storage["roundTripMicroseconds"]) == ("NFS", 900)
    assert (storage["readBytesPerSecond"], storage["directIo"], storage["statMicroseconds"]) == (2 << 30, True, 400)


def test_a_volume_that_cannot_be_used_is_told_and_one_found_good_is_not_looked_at_again() -> None:
    cluster = ended(0, GOOD)
    cluster.remove(JOB)
    before = fake_cluster.status(cluster)
    for _ in range(2):
        assert run(cluster).written == ()
    assert fake_cluster.status(cluster)["storage"] == before["storage"]
    assert JOB not in cluster.existing()
    cluster = ended(1, {**GOOD, "problem": "user 10001 may not write in /var/lib/kvtier: set fsGroup"})
    assert DEPLOYMENT not in cluster.existing()
    told = condition(cluster, "StorageChecked")
    assert (told["status"], told["reason"]) == ("False", "PreflightFailed")
    assert "set fsGroup" in told["message"]
    assert condition(cluster, "Ready")["reason"] == "PreflightFailed"
    assert condition(cluster, "Stalled")["status"] == "True"


@pytest.mark.parametrize("has_a_new_job", [True, False])
def test_a_failure_is_told_until_the_next_try_has_ended_and_then_engines_start(*, has_a_new_job: bool) -> None:
    cluster = ended(1, "Traceback: boom")
    if has_a_new_job:
        cluster.remove(JOB)
    run(cluster)
    assert JOB in cluster.existing()
    run(cluster)
    assert condition(cluster, "StorageChecked")["reason"] == "PreflightFailed"
    assert "boom" in condition(cluster, "StorageChecked")["message"]
    ends(cluster, 0, json.dumps(GOOD), name="llama-preflight-2")
    run(cluster)
    assert DEPLOYMENT in cluster.existing()
    assert "problem" not in fake_cluster.status(cluster)["storage"]


SOME_NUMBERS = '{"problem": "", "read_bytes_per_second": 1048576, "free_bytes": true}'


@pytest.mark.parametrize("message", ["", "nonsense", "[1]", '{"total_bytes": "many"}', SOME_NUMBERS])
def test_a_result_is_taken_as_far_as_it_goes_and_lets_engines_start(message: str) -> None:
    cluster = ended(0, message)
    assert DEPLOYMENT in cluster.existing()
    assert fake_cluster.status(cluster)["storage"].keys() == {
        "key",
        *(["readBytesPerSecond"] if message is SOME_NUMBERS else []),
    }
    assert ("read 1 MiB/s" in condition(cluster, "StorageChecked")["message"]) is (message is SOME_NUMBERS)


def test_a_job_that_gave_up_is_told_and_another_claim_or_user_is_tried_anew() -> None:
    cluster = started()
    failed = {"type": "Failed", "status": "True", "message": "Job was active longer than specified deadline"}
    cluster.edit(JOB, {"status": {"conditions": [failed]}})
    run(cluster)
    assert "longer than specified deadline" in condition(cluster, "StorageChecked")["message"]
    cluster = started()
    first = cluster.look(JOB)
    edited(cluster, engine={"podTemplate": {"securityContext": {"fsGroup": 7}}})
    run(cluster)
    second = cluster.look(JOB)
    assert first["metadata"]["annotations"] != second["metadata"]["annotations"]
    assert second["spec"]["template"]["spec"]["securityContext"]["fsGroup"] == 7


def test_where_pods_may_not_be_read_the_job_itself_tells_how_it_ended() -> None:
    cluster = FakeCluster(tier(**ALWAYS))
    cluster.broken["Pod"] = ({"list"}, ClusterForbidden("pods is forbidden"))
    for _ in range(2):
        run(cluster)
    assert (JOB in cluster.existing(), DEPLOYMENT in cluster.existing()) == (True, False)
    cluster.edit(JOB, {"status": {"conditions": [{"type": "Complete", "status": "True"}]}})
    run(cluster)
    assert DEPLOYMENT in cluster.existing()
    assert condition(cluster, "StorageChecked")["status"] == "True"
    assert "pods is forbidden" in condition(cluster, "Ready")["message"]


def test_engines_that_run_are_not_held_up_by_a_preflight() -> None:
    cluster = reconciled()
    serving(cluster)
    assert DEPLOYMENT in edited(cluster, proof={"preflight": "Always"}, replicas=3).written
    ends(cluster, 1, json.dumps({**GOOD, "problem": "only 3 MiB are free"}))
    run(cluster)
    assert condition(cluster, "StorageChecked")["status"] == "False"
    assert condition(cluster, "Ready")["reason"] == "EnginesStarting"


@pytest.mark.parametrize("change", [{"proof": {"preflight": "Never"}}, {"disk": {"mode": "Bypass"}}])
def test_a_job_that_nobody_waits_for_is_deleted_once_and_never_made_without_need(change: dict[str, Any]) -> None:
    for cluster in (started(), reconciled(**{**ALWAYS, **change})):
        edited(cluster, **change)
        assert JOB not in cluster.existing()
        assert DEPLOYMENT in cluster.existing()
        assert condition(cluster, "StorageChecked")["reason"] == "PreflightOff"
        assert run(cluster).deleted == ()


def test_a_paused_tier_keeps_its_job_until_it_goes_on() -> None:
    cluster = started()
    cluster.edit(TIER_KEY, {"spec": {"paused": True, "proof": {"preflight": "Never"}}})
    for _ in range(2):
        run(cluster)
        assert JOB in cluster.existing()
    edited(cluster, paused=False)
    assert JOB not in cluster.existing()


def test_a_failure_at_any_call_is_repaired_by_the_next_pass() -> None:
    healthy = started()
    for number in range(1, 40):
        making, deleting = FakeCluster(tier(**ALWAYS)), started()
        deleting.edit(TIER_KEY, {"spec": {"proof": {"preflight": "Never"}}})
        for cluster, attempt in ((making, 1), (deleting, PATIENCE)):
            cluster.fail = (number, ClusterUnavailable("500"))
            run(cluster, attempt=attempt)
            cluster.fail = None
            run(cluster)
        assert JOB not in deleting.existing()
        run(making)
        assert making.existing() == healthy.existing()


@pytest.mark.parametrize(
    ("spec", "told"), [({}, "spec.proof.preflight"), (ALWAYS, "does not belong to this tier")], ids=["never", "always"]
)
def test_a_job_of_somebody_else_is_left(spec: dict[str, Any], told: str) -> None:
    cluster = FakeCluster(tier(**spec), of_somebody(JOB))
    before = cluster.look(JOB)
    for _ in range(2):
        run(cluster)
    assert cluster.look(JOB) == before
    assert told in condition(cluster, "StorageChecked")["message"]


@pytest.mark.parametrize("version", VERSIONS)
def test_the_job_is_what_kubernetes_knows_and_goes_where_engines_may_go_without_a_device(version: str) -> None:
    placed: dict[str, Any] = {
        "nodeSelector": {"zone": "b"},
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "affinity": {"nodeAffinity": {"x": {}}, "podAntiAffinity": {"y": {}}},
    }
    plain, cluster = started().look(JOB), reconciled(engine={"podTemplate": placed}, **ALWAYS)
    kubernetes_schemas.validate({field: plain[field] for field in plain if field != "status"}, version, strict=False)
    assert names.selector(names.tier_ref(tier())).items() - plain["spec"]["template"]["metadata"]["labels"].items()
    run(cluster)
    pod = cluster.look(JOB)["spec"]["template"]["spec"]
    # As the restricted standard allows.
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["containers"][0]["securityContext"]["readOnlyRootFilesystem"] is True
    of_devices = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    assert pod["nodeSelector"] == placed["nodeSelector"]
    assert pod["tolerations"] == [*placed["tolerations"], of_devices]
    assert pod["affinity"] == {"nodeAffinity": {"x": {}}}
    assert "nvidia.com/gpu" not in str(pod["containers"][0]["resources"])


@pytest.mark.parametrize(("phase", "asks"), [("Pending", True), ("Bound", False)])
def test_a_volume_of_one_node_is_made_where_an_engine_has_room(phase: str, asks: bool) -> None:
    cluster = reconciled(replicas=1, volume={"claim": {"accessModes": ["ReadWriteOnce"], "size": "10Gi"}}, **ALWAYS)
    cluster.edit(CLAIM, {"status": {"phase": phase}})
    run(cluster)
    requests = cluster.look(JOB)["spec"]["template"]["spec"]["containers"][0]["resources"]["requests"]
    assert ("nvidia.com/gpu" in requests, requests["memory"] == "84736Mi") == (asks, asks)


@pytest.mark.parametrize("mode", ["ReadOnly", "Bypass"])
def test_a_volume_that_is_not_written_is_not_tried_and_holds_up_no_engine(mode: str) -> None:
    cluster = reconciled(disk={"mode": mode}, **ALWAYS)
    run(cluster)
    assert JOB not in cluster.existing()
    assert DEPLOYMENT in cluster.existing()
    assert f"spec.disk.mode is {mode}" in condition(cluster, "StorageChecked")["message"]
    edited(cluster, disk={"mode": "ReadWrite"})
    assert JOB in cluster.existing()
