# SPDX-License-Identifier: Apache-2.0
"""Read everything that one reconcile needs into a snapshot. Writes nothing, decides nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, Final

from kvtier_connector.contract.janitor import JANITOR_PORT
from kvtier_connector.contract.usage import USAGE_PATH, Usage
from kvtier_operator import names, parts, quantity
from kvtier_operator.api import parse
from kvtier_operator.errors import ClusterError, ClusterForbidden, KindMissing, SpecInvalid
from kvtier_operator.kube.cluster import Cluster
from kvtier_operator.names import Manifest, ObjectKey, TierName, TierRef
from kvtier_operator.observe.http_client import Address
from kvtier_operator.observe.pod_reports import read_metrics, read_usage
from kvtier_operator.observe.poller import Poller, PollTarget
from kvtier_operator.parts import engine_config
from kvtier_operator.parts.external.attach import find_engine
from kvtier_operator.parts.external.pods import PodClaims, count_engines, external_of, made_by_others
from kvtier_operator.plan import engine_args
from kvtier_operator.snapshot import (
    ContainerStatus,
    EngineReport,
    Engines,
    Live,
    LiveClaim,
    LiveJanitor,
    Neighbour,
    Pod,
    SeenJob,
    Snapshot,
)

MOUNT_PATIENCE: Final = timedelta(seconds=30)
"""A pod whose volumes are not mounted for this long after it was made is asked about."""

_MOUNT_REASONS: Final = frozenset({"FailedMount", "FailedAttachVolume", "FailedCreatePodSandBox"})


def mount_problem(cluster: Cluster, pod: Manifest, now: datetime) -> str:
    """Return why the kubelet starts no container of a pod; only Events tell, so they are read only for such a pod.

    The status of such a pod says nothing but ContainerCreating, for ever.
    """
    metadata = pod["metadata"]
    born = metadata.get("creationTimestamp")
    if not is_held_up(pod) or born is None or now - datetime.fromisoformat(born) < MOUNT_PATIENCE:
        return ""
    found = [
        event
        for event in cluster.events(metadata["namespace"], uid=metadata["uid"])
        if event.get("reason") in _MOUNT_REASONS
    ]
    latest = max(found, key=lambda event: event.get("lastTimestamp") or event.get("eventTime") or "", default=None)
    return "" if latest is None else f"{latest['reason']}: {latest.get('message', '')}"


def is_held_up(pod: Manifest) -> bool:
    """Tell whether the kubelet starts nothing of a pod yet."""
    status = pod.get("status", {})
    waiting = [
        (each.get("state") or {}).get("waiting") or {}
        for each in (*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ()))
    ]
    is_waiting = all(each.get("reason") in {"ContainerCreating", "PodInitializing"} for each in waiting)
    return bool(waiting) and is_waiting and "deletionTimestamp" not in pod["metadata"]


_NO_ADDRESS: Final = frozenset({"", "None"})
"""Cluster IP of a Service that has none yet, or none at all."""

JANITOR_PATIENCE: Final = timedelta(minutes=5)
"""A janitor that is not ready for this long is dead; one that starts, or is moved to another node, takes less."""


def gather(
    cluster: Cluster,
    body: Mapping[str, Any],
    *,
    now: datetime,
    poller: Poller[TierName] | None = None,
    claims: PodClaims | None = None,
) -> Snapshot:
    """Return everything that the cluster holds for a tier with any spec, and the last answers of its pods.

    The snapshot notes the kinds that may not be read; the parts that need them report that.

    Raises:
        ClusterError: something else could not be read; a partial snapshot would be mistaken for the truth.
    """
    tier, existing_claim = names.tier_ref(body), names.existing_claim_of(body)
    reader = _Reader(cluster, tier)
    ours: dict[ObjectKey, Manifest] = {}
    foreign = set()
    for key in parts.keys(body, tier):
        found = reader.one(key)
        if found is not None and names.is_ours(found, tier):
            ours[key] = found
        elif found is not None:
            foreign.add(key)
    claim_key = names.claim_key(names.claim_of(body))
    claim = ours.get(claim_key)
    if claim is None and existing_claim is not None:
        claim = reader.one(claim_key)
    tiers = [] if claim is None else cluster.tiers_on(claim_key.name, tier.namespace)
    deployment = ours.get(names.deployment_key(names.engine(tier)))
    pods = reader.pods({names.LABEL_TIER: tier.name})
    # Other pods with our labels are not ours, nor are those of a foreign Deployment under one of our names.
    components = (names.engine, names.janitor, names.router, names.redis, names.mooncake_master)
    engines, janitors, routers, *stores = (
        [found for found in pods if names.is_pod_of(found, key.name) and key not in foreign]
        for key in (names.deployment_key(name(tier)) for name in components)
    )
    preflight_key = names.preflight_key(tier)
    external = external_of(body)
    attached = [] if external is None else made_by_others(reader.pods(external["selector"]["matchLabels"]))
    claimed = {} if claims is None else claims.note(tier, (each["metadata"]["uid"] for each in attached))
    container = None if external is None else external.get("container")
    read = [
        *(_pod(found, mount_problem(cluster, found, now)) for found in engines),
        *(
            replace(
                _pod(found, mount_problem(cluster, found, now), find_engine(found["spec"], container)),
                content=found,
                claimed_by=claimed.get(found["metadata"]["uid"], ""),
            )
            for found in attached
        ),
    ]
    port = names.HTTP_PORT if external is None else external.get("port", names.HTTP_PORT)
    return Snapshot(
        tier=tier,
        claim=None if claim is None else read_claim(claim),
        engines=_engines(deployment)
        if deployment is not None and (external is None or names.is_controlled(deployment, tier))
        else Engines()
        if external is None
        else count_engines(read, ours.get(engine_config.key_of(tier))),
        pods=tuple(_with_report(pod, tier, poller, port=port) for pod in read),
        janitor=_with_availability(
            _janitor(janitors, ours, tier, poller), ours.get(names.deployment_key(names.janitor(tier))), now
        ),
        routers=tuple(map(_pod, routers)),
        stores=tuple(_pod(found) for each in stores for found in each),
        preflight=SeenJob(uid="?", is_foreign=True)
        if preflight_key in foreign
        else _preflight(ours.get(preflight_key), pods, tier),
        neighbours=read_neighbours(tiers, tier),
        live={key: _live(found) for key, found in ours.items()},
        unreadable=reader.unreadable,
        foreign=frozenset(foreign),
    )


class _Reader:
    """Reads the objects of a tier, and notes which kinds may not be read."""

    def __init__(self, cluster: Cluster, tier: TierRef) -> None:
        self._cluster = cluster
        self._tier = tier
        self.unreadable: dict[str, ClusterError] = {}

    def pods(self, labels: Mapping[str, str]) -> list[Manifest]:
        selector = ",".join(f"{key}={value}" for key, value in sorted(labels.items()))
        try:
            found = self._cluster.list("v1", "Pod", namespace=self._tier.namespace, selector=selector)
            return sorted(found, key=lambda each: str(each["metadata"]["name"]))
        except (ClusterForbidden, KindMissing) as error:
            self.unreadable["Pod"] = error
            return []

    def one(self, key: ObjectKey) -> Manifest | None:
        try:
            return None if key.kind in self.unreadable else self._cluster.get(key, self._tier.namespace)
        except ClusterError as error:
            # An InferencePool is of another project: whatever its API does, everything else goes on.
            if key.kind != names.POOL_KIND and not isinstance(error, (ClusterForbidden, KindMissing)):
                raise
            self.unreadable[key.kind] = error
            return None


def _preflight(job: Manifest | None, pods: Iterable[Manifest], tier: TierRef) -> SeenJob:
    """Read how far the Job is that tries the claim."""
    if job is None:
        return SeenJob()
    uid, container = job["metadata"]["uid"], names.PREFLIGHT_CONTAINER
    if not names.is_controlled(job, tier):
        return SeenJob(uid=uid, is_foreign=True)
    own = [pod for pod in pods if any(each.get("uid") == uid for each in pod["metadata"].get("ownerReferences", ()))]
    states = [_state(pod, container) for pod in own]
    ended = [state["terminated"] for state in states if state.get("terminated")]
    # A pod that succeeded counts, whatever failed before it.
    best: Mapping[str, Any] | None = min(ended, key=lambda each: int(each.get("exitCode", 1) != 0), default=None)
    conditions = _by_type(each for each in job.get("status", {}).get("conditions", ()) if each["status"] == "True")
    return SeenJob(
        key=(job["metadata"].get("annotations") or {}).get(names.ANNOTATION_PREFLIGHT, "?"),
        uid=uid,
        failure=str(conditions.get("Failed", {}).get("message", "")),
        waiting=next(filter(None, map(_waiting, own, states)), ""),
        # Where pods may not be read, the Job itself says how it ended.
        exit_code=(0 if "Complete" in conditions else None) if best is None else best.get("exitCode"),
        message="" if best is None else str(best.get("message", "")),
    )


def _state(pod: Manifest, container: str) -> Mapping[str, Any]:
    statuses = pod.get("status", {}).get("containerStatuses", ())
    return next((each.get("state") or {} for each in statuses if each["name"] == container), {})


def _waiting(pod: Manifest, state: Mapping[str, Any]) -> str:
    name, scheduled = pod["metadata"]["name"], _by_type(pod.get("status", {}).get("conditions", ())).get("PodScheduled")
    if scheduled is not None and scheduled["status"] == "False":
        return f"no node takes pod {name}: {scheduled.get('message', '')}"
    waiting = state.get("waiting") or {}
    if waiting.get("reason", "") in {"", "ContainerCreating", "PodInitializing"}:
        return ""
    return f"pod {name} waits: {waiting['reason']}: {waiting.get('message', '')}"


def _live(found: Manifest) -> Live:
    metadata = found["metadata"]
    return Live(uid=metadata["uid"], resource_version=metadata["resourceVersion"], content=found)


def read_neighbours(tiers: Iterable[Manifest], tier: TierRef) -> tuple[Neighbour, ...]:
    """Read the tiers on a claim, but for this one; of one that cannot be read as a whole, no limit is known."""
    found = []
    for body in tiers:
        if (name := body["metadata"]["name"]) == tier.name or "deletionTimestamp" in body["metadata"]:
            continue
        try:
            spec = parse(body)
        except SpecInvalid:
            found.append(Neighbour(name=name, max_bytes=None))
            continue
        has_janitor = spec.janitor.enabled and spec.connector.has_janitor
        found.append(Neighbour(name=name, max_bytes=spec.disk.budget.max_bytes, has_janitor=has_janitor))
    return tuple(sorted(found, key=lambda each: each.name))


def read_claim(found: Manifest) -> LiveClaim:
    """Read a claim."""
    spec = found.get("spec", {})
    requests = spec.get("resources", {}).get("requests", {})
    status = found.get("status", {})
    return LiveClaim(
        name=found["metadata"]["name"],
        access_modes=tuple(spec.get("accessModes", ())),
        storage_class_name=spec.get("storageClassName"),
        requested_bytes=quantity.parse_bytes(str(requests.get("storage", "0"))),
        phase=status.get("phase", "Pending"),
        is_terminating="deletionTimestamp" in found["metadata"],
        uid=found["metadata"]["uid"],
        capacity_bytes=quantity.parse_bytes(str(status.get("capacity", {}).get("storage", "0"))),
        resizing=_resizing(status.get("conditions", ())),
    )


def _resizing(conditions: Iterable[Mapping[str, Any]]) -> str:
    found = [each for each in conditions if each["type"] in _RESIZING and each.get("status") == "True"]
    texts = (f"{each['type']}{': ' if each.get('message') else ''}{each.get('message', '')}" for each in found)
    return "; ".join(sorted(texts))


_RESIZING = frozenset({"Resizing", "FileSystemResizePending", "ControllerResizeError", "NodeResizeError"})


def _engines(found: Manifest) -> Engines:
    status = found.get("status", {})
    conditions = _by_type(status.get("conditions", ()))
    progressing = conditions.get("Progressing", {})
    failure = conditions.get("ReplicaFailure", {})
    return Engines(
        generation=found["metadata"].get("generation", 0),
        observed_generation=status.get("observedGeneration", 0),
        replicas=status.get("replicas", 0),
        updated=status.get("updatedReplicas", 0),
        ready=status.get("readyReplicas", 0),
        is_stalled=progressing.get("reason") == "ProgressDeadlineExceeded",
        decisions=(found["metadata"].get("annotations") or {}).get(names.ANNOTATION_DECISIONS, ""),
        problem=failure.get("message", "") if failure.get("status") == "True" else "",
        rendered=(found["metadata"].get("annotations") or {}).get(names.ANNOTATION_RENDERED, ""),
    )


def _with_report(pod: Pod, tier: TierRef, poller: Poller[TierName] | None, *, port: int) -> Pod:
    """Return an engine pod with its report; a pod that does not serve is not asked."""
    if poller is None or not pod.address or not pod.is_ready or pod.is_terminating:
        return pod
    target = PollTarget(address=Address(host=pod.address, port=port, path="/metrics"), uid=pod.uid)
    answer = poller.answer(
        target, owner=_owner(tier), parse=read_metrics, since=pod.ready_since, is_passing=_is_without_volume
    )
    report = None if answer is None else answer.value
    return replace(pod, report=report if isinstance(report, EngineReport) else None, is_awaited=answer is None)


def _janitor(
    pods: Iterable[Manifest], ours: Mapping[ObjectKey, Manifest], tier: TierRef, poller: Poller[TierName] | None
) -> LiveJanitor:
    found = LiveJanitor(pods=tuple(_pod(each) for each in pods))
    service = ours.get(ObjectKey(api_version="v1", kind="Service", name=names.janitor(tier)))
    host = "" if service is None else service.get("spec", {}).get("clusterIP", "")
    if poller is None or service is None or host in _NO_ADDRESS:
        return found
    address = Address(host=host, port=JANITOR_PORT, path=USAGE_PATH)
    target = PollTarget(address=address, uid=service["metadata"].get("uid", ""))
    since = max((pod.ready_since for pod in found.pods if pod.is_ready), default="")
    answer = poller.answer(target, owner=_owner(tier), parse=read_usage, since=since, is_passing=_is_passing)
    if answer is None:
        return replace(found, is_awaited=True)
    return replace(found, usage=(answer.value if isinstance(answer.value, Usage) else None), silence=answer.problem)


def _with_availability(janitor: LiveJanitor, deployment: Manifest | None, now: datetime) -> LiveJanitor:
    """Return a janitor with its Deployment's availability: whether no pod of it is ready, and for how long."""
    available = _by_type((deployment or {}).get("status", {}).get("conditions", ())).get("Available", {})
    since = available.get("lastTransitionTime")
    is_overdue = since is not None and now - datetime.fromisoformat(since) > JANITOR_PATIENCE
    is_missing = available.get("status") == "False"
    return replace(janitor, is_missing=is_missing, is_overdue=is_missing and is_overdue)


def _is_without_volume(report: object) -> bool:
    return isinstance(report, EngineReport) and (report.is_detached or report.is_key_missing)


def _is_passing(usage: object) -> bool:
    """Tell of a janitor that is still to find out how things stand, or is hindered: both may pass within seconds."""
    return not isinstance(usage, Usage) or not (usage.is_active and usage.is_counted) or bool(usage.problems)


def _owner(tier: TierRef) -> TierName:
    return TierName(namespace=tier.namespace, name=tier.name)


def _pod(found: Manifest, mount_problem: str = "", engine: Mapping[str, Any] | None = None) -> Pod:
    status, metadata = found.get("status", {}), found["metadata"]
    conditions = _by_type(status.get("conditions", ()))
    scheduled = conditions.get("PodScheduled", {})
    engine = engine or next(
        (each for each in found["spec"]["containers"] if each["name"] == names.ENGINE_CONTAINER), {}
    )
    env = {entry["name"]: entry.get("value") for entry in engine.get("env", ())}
    algorithm = engine_args.read(engine.get("args") or ()).words.get("prefix-caching-hash-algo")
    annotations = metadata.get("annotations") or {}
    return Pod(
        name=metadata["name"],
        phase=status.get("phase", "Pending"),
        is_ready=conditions.get("Ready", {}).get("status") == "True",
        ready_since=conditions.get("Ready", {}).get("lastTransitionTime") or "",
        is_terminating="deletionTimestamp" in metadata,
        is_scheduled={"True": True, "False": False}.get(scheduled.get("status", "")),
        scheduling_message=scheduled.get("message", ""),
        config_digest=annotations.get(names.ANNOTATION_CONFIG_DIGEST) or env.get(names.CONFIG_VARIABLE, ""),
        hash_seed=env.get("PYTHONHASHSEED"),
        hash_algorithm=algorithm[-1] if algorithm else None,
        containers=tuple(
            _container(each)
            for each in (*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ()))
        ),
        uid=metadata.get("uid", ""),
        address=status.get("podIP", ""),
        template_hash=(metadata.get("labels") or {}).get(names.LABEL_TEMPLATE_HASH, ""),
        is_held_up=is_held_up(found),
        mount_problem=mount_problem,
    )


def _container(found: Mapping[str, Any]) -> ContainerStatus:
    state = found.get("state") or {}
    waiting = state.get("waiting") or {}
    ended = state.get("terminated") or (found.get("lastState") or {}).get("terminated") or {}
    return ContainerStatus(
        name=found["name"],
        image=found.get("image", ""),
        restarts=found.get("restartCount", 0),
        is_started=found.get("started") is not False,
        waiting_reason=waiting.get("reason", ""),
        waiting_message=waiting.get("message", ""),
        exit_code=ended.get("exitCode"),
        exit_reason=ended.get("reason", ""),
        exit_message=ended.get("message", ""),
    )


def _by_type(conditions: Iterable[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    return {condition["type"]: condition for condition in conditions}
