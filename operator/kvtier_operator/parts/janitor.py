# SPDX-License-Identifier: Apache-2.0
"""The janitor of a tier: its objects, its health, and the conditions of the volume that it reports on. Pure.

It is one small pod that may see the volume and renew one Lease. Conditions are judged by the last reports of janitor
and engines: without a report they are Unknown, and no problem of the tier.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Final

from kvtier_connector.contract import janitor as contract_janitor
from kvtier_connector.contract.engine import REPLACED_WEIGHTS
from kvtier_connector.contract.usage import Usage
from kvtier_operator import names, quantity
from kvtier_operator.api.reasons import Reason
from kvtier_operator.api.routing_spec import EVENTS_PORT
from kvtier_operator.conditions import (
    ConditionRule,
    PlannedStage,
    Problem,
    ReadStage,
    Status,
    as_before,
    checked,
    listed,
    met,
    unknown,
)
from kvtier_operator.names import Manifest
from kvtier_operator.parts import pods
from kvtier_operator.parts.part import Component, component_problem
from kvtier_operator.parts.releases import generation_role, releases_agree
from kvtier_operator.plan import TierPlan, releases_claim
from kvtier_operator.plan.janitor_config import JanitorPlan
from kvtier_operator.snapshot import LiveJanitor, Snapshot

_COMPONENT: Final = names.COMPONENT_JANITOR


def janitor(plan: TierPlan) -> tuple[Manifest, ...]:
    """Return the objects of the janitor in apply order; none where the tier has none."""
    if plan.janitor is None:
        return ()
    return (
        _config(plan, plan.janitor),
        # Its holder writes the rest of the Lease.
        {"apiVersion": names.COORDINATION, "kind": names.LEASE_KIND, "metadata": _metadata(plan)},
        # No right to create a Lease: a rule cannot name an object that does not exist yet, so the operator makes it.
        *pods.account(
            plan.tier,
            names.janitor(plan.tier),
            _COMPONENT,
            {
                "apiGroups": ["coordination.k8s.io"],
                "resources": ["leases"],
                "resourceNames": [names.janitor(plan.tier)],
                "verbs": ["get", "update"],
            },
        ),
        _service(plan),
        _deployment(plan, plan.janitor),
    )


def _metadata(plan: TierPlan) -> Manifest:
    return names.metadata(plan.tier, names.janitor(plan.tier), component=_COMPONENT)


def _config(plan: TierPlan, janitor_plan: JanitorPlan) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(plan),
        "data": {contract_janitor.JANITOR_CONFIG_FILE: janitor_plan.config_text},
    }


def _service(plan: TierPlan) -> Manifest:
    ports = [pods.port(name, port, name) for name, port in _ports(plan).items()]
    return pods.service(plan.tier, names.janitor(plan.tier), _COMPONENT, ports)


def _ports(plan: TierPlan) -> dict[str, int]:
    events = {} if plan.spec.kv_events is None else {"kv-events": EVENTS_PORT}
    return {"metrics": contract_janitor.JANITOR_PORT, **events}


def _deployment(plan: TierPlan, janitor_plan: JanitorPlan) -> Manifest:
    # The Lease keeps two from acting at a time; a second one would only wait for the first to go.
    return pods.deployment(
        plan.tier,
        names.janitor(plan.tier),
        _COMPONENT,
        _pod(plan, janitor_plan),
        # An engine that was moved waits for the volume; the janitor comes back beside it.
        replicas=0 if plan.is_janitor_in_the_way else 1,
        annotations={names.ANNOTATION_CONFIG_DIGEST: janitor_plan.config_digest},
    )


def _pod(plan: TierPlan, janitor_plan: JanitorPlan) -> Manifest:
    template = plan.spec.engine.pod_template
    # Elsewhere, it has no business on nodes with devices; a volume of one node may be nowhere else.
    tolerated = pods.tolerations(plan) if plan.is_on_one_node else template.tolerations
    return {
        "serviceAccountName": names.janitor(plan.tier),
        # For the Lease alone, see the Role.
        "automountServiceAccountToken": True,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": 30,
        # The user and group of the engines: it removes what they wrote.
        "securityContext": pods.security_context(template),
        # A node under disk pressure is where it is needed most. A cluster may have no nodes but those of the engines.
        "tolerations": [{"key": "node.kubernetes.io/disk-pressure", "operator": "Exists"}, *tolerated],
        # Elsewhere, it would take a volume of one node from the engines, or wait for it for ever.
        **({"affinity": pods.beside_engines(plan)} if plan.is_on_one_node else {}),
        **pods.pull_secrets(template),
        "containers": [_container(plan, janitor_plan)],
        "volumes": [
            {"name": "blocks", "persistentVolumeClaim": {"claimName": plan.claim_name}},
            {"name": "config", "configMap": {"name": names.janitor(plan.tier)}},
            {"name": "scratch", "emptyDir": {"sizeLimit": "16Mi"}},
        ],
    }


def _container(plan: TierPlan, janitor_plan: JanitorPlan) -> Manifest:
    resources = plan.spec.janitor.resources
    config_file = f"{names.JANITOR_CONFIG_MOUNT}/{contract_janitor.JANITOR_CONFIG_FILE}"
    return {
        "name": names.JANITOR_CONTAINER,
        "image": janitor_plan.image,
        "command": ["python3", "-m", "kvtier_connector.janitor"],
        "args": ["--config", config_file, f"--host={plan.listen_host}"],
        "ports": [{"name": name, "containerPort": port, "protocol": "TCP"} for name, port in _ports(plan).items()],
        "resources": {
            "requests": {"cpu": resources.cpu, "memory": resources.memory, "ephemeral-storage": "16Mi"},
            "limits": {"memory": resources.memory},
        },
        "readinessProbe": {**_health(), "failureThreshold": 3},
        # A volume that hangs is no reason to restart it; only a process that does not answer is.
        "livenessProbe": {**_health(), "failureThreshold": 12},
        "securityContext": pods.hardened(),
        "volumeMounts": [
            {"name": "blocks", "mountPath": names.VOLUME_MOUNT},
            {"name": "config", "mountPath": names.JANITOR_CONFIG_MOUNT, "readOnly": True},
            {"name": "scratch", "mountPath": names.SCRATCH_MOUNT},
        ],
    }


def _health() -> Manifest:
    return {"httpGet": {"path": "/healthz", "port": "metrics"}, "periodSeconds": 10, "timeoutSeconds": 5}


_HEALTHY: Final = "JanitorHealthy"
_DISABLED: Final = unknown(
    Reason.JANITOR_DISABLED, "spec.janitor.enabled is false: the volume is not measured, and nothing is ever removed"
)
_OF_MESSAGES: Final = Component(
    name="janitor",
    effect=", so the volume is not cleared",
    image_fields="spec.janitor.image or janitorImage of the operator's chart",
    resources_field="spec.janitor.resources",
)


def _judge_janitor(stage: ReadStage, previous: Status) -> Problem:
    """The janitor runs, answers, and can do its work."""
    if not stage.spec.janitor.enabled:
        return _DISABLED
    found, name = stage.snapshot.janitor, names.janitor(stage.tier)
    if releases_claim(stage.spec, stage.snapshot):
        return unknown(Reason.JANITOR_STARTING, "the claim was deleted; the janitor starts again when there is one")
    live = stage.snapshot.live.get(names.deployment_key(names.janitor(stage.tier)))
    dead = component_problem(_OF_MESSAGES, found.pods, None if live is None else live.content)
    if dead is not None:
        return dead
    if found.is_overdue:
        return Problem(
            Reason.JANITOR_FAILING,
            "no pod of the janitor is ready for minutes now, so the volume is not cleared: `kubectl describe "
            f"deployment/{name}` and `kubectl logs deployment/{name}` say why",
        )
    if found.usage is None and found.is_awaited and (last := as_before(_HEALTHY, previous)) is not None:
        return last  # a new operator has not asked yet
    if found.usage is None and found.silence and any(pod.is_ready for pod in found.pods):
        return unknown(
            Reason.JANITOR_UNREACHABLE,
            f"the janitor runs, and the operator cannot reach it ({found.silence}): let the operator's pods "
            f"reach port {contract_janitor.JANITOR_PORT} of Service/{name} (NetworkPolicy, service mesh)",
        )
    if found.usage is None:
        why = f"the janitor does not answer ({found.silence})" if found.silence else "the janitor has not reported yet"
        return unknown(Reason.JANITOR_STARTING, f"{why}: `kubectl logs deployment/{name}` says what it does")
    if not found.usage.is_active:
        return unknown(Reason.JANITOR_WAITING, f"the janitor waits for Lease/{name}, which another one holds")
    if found.usage.problems:
        return Problem(
            Reason.JANITOR_HINDERED,
            f"the janitor cannot do its work: {'; '.join(found.usage.problems)}; `kubectl logs "
            f"deployment/{name}` says more",
        )
    return met(Reason.JANITOR_RUNS, "the janitor runs, and keeps the volume within its budget")


JANITOR_HEALTHY: Final = ConditionRule(kind=_HEALTHY, needs=ReadStage, judge=_judge_janitor)

_TOLERANCE: Final = 1.02
"""Engines stop at the limit with what they had begun to write; sizes are reported with less than a percent off."""


def janitor_reports(stage: PlannedStage) -> Problem | None:
    """The janitor runs and says what it found."""
    janitor = stage.snapshot.janitor
    if not stage.spec.janitor.enabled:
        return _DISABLED
    if janitor.usage is None:
        return unknown(Reason.JANITOR_STARTING, "the janitor has not reported: see JanitorHealthy")
    if not janitor.usage.is_active:
        return unknown(
            Reason.JANITOR_WAITING,
            f"the janitor waits for Lease/{names.janitor(stage.snapshot.tier)}, which another one holds or "
            f"which it may not write: `kubectl logs deployment/{names.janitor(stage.snapshot.tier)}` says why",
        )
    return None


def volume_is_counted(stage: PlannedStage) -> Problem | None:
    """The janitor has seen every file once."""
    usage = stage.snapshot.janitor.usage
    if usage is None or usage.is_counted:
        return None
    return unknown(
        Reason.COUNTING,
        f"the janitor still counts what lies on the volume: {quantity.show_bytes(usage.used_bytes)} so far",
    )


def budget_holds(stage: PlannedStage) -> Problem | None:
    """The blocks take no more than they may."""
    usage, limit = stage.snapshot.janitor.usage, stage.spec.disk.budget.max_bytes
    if usage is None or limit is None or usage.used_bytes <= limit * _TOLERANCE:
        return None
    return Problem(
        Reason.OVER_BUDGET,
        f"blocks take {quantity.show_bytes(usage.used_bytes)} of spec.disk.budget.maxBytes "
        f"({stage.spec.disk.budget.max_size}) and the janitor is evicting; if this stays, "
        f"`kubectl logs deployment/{names.janitor(stage.snapshot.tier)}` says what holds it up",
    )


def engines_may_store(stage: PlannedStage) -> Problem | None:
    """Engines may store."""
    usage = stage.snapshot.janitor.usage
    if usage is None or not usage.store_pause:
        return None
    what = f"engines may not store, loads go on: {usage.store_pause}; it ends by itself when there is room again: "
    remedy = "remove files that are not of the tier, raise spec.volume.claim.size, or lower spec.disk.budget.maxBytes"
    if "max_bytes" in usage.store_pause:
        remedy = "wait while the janitor evicts, or raise spec.disk.budget.maxBytes"
    return Problem(Reason.STORES_PAUSED, what + remedy)


def volume_has_room(stage: PlannedStage) -> Problem | None:
    """As much of the volume is free as was asked for."""
    usage, budget = stage.snapshot.janitor.usage, stage.spec.disk.budget
    if usage is None or not usage.volume_bytes:
        return None
    wanted = max(budget.min_free_bytes, usage.volume_bytes * budget.min_free_fraction)
    if usage.volume_free_bytes * _TOLERANCE >= wanted:
        return None
    return Problem(
        Reason.VOLUME_FULL,
        f"{quantity.show_bytes(usage.volume_free_bytes)} of {quantity.show_bytes(usage.volume_bytes)} are free "
        f"on the volume, less than spec.disk.budget.minFree ({budget.min_free}), and blocks of this "
        f"tier take {quantity.show_bytes(usage.used_bytes)}. Remove other files from it, raise spec.volume.claim.size, "
        "or lower minFree",
    )


def engines_own_the_directory(stage: PlannedStage) -> Problem | None:
    """No engine found the directory to belong to another model or layout."""
    refused = {pod.name: pod.report.refused for pod in stage.snapshot.pods if pod.report and pod.report.refused}
    if not refused:
        return None
    fields = sorted({field for found in refused.values() for field in found})
    why = (
        f"tier.json of its generation says another {', '.join(fields)}. Blocks of one model are never served to "
        "another. Name a commit in spec.model.revision and a digest in spec.engine.image, which starts a generation of "
        "its own. Or remove this generation with `kvtier purge --generation`"
    )
    if fields == ["generation"]:
        why = (
            "its container was restarted after the spec had changed, with settings that it was not made for. The "
            "rollout replaces it; if it stays, delete the pod"
        )
    if fields == [REPLACED_WEIGHTS]:
        why = (
            "its weights were replaced while it ran. Delete the pod to have an engine of the model's own weights, or "
            "set spec.disk.mode: Bypass while weights are replaced again and again"
        )
    return Problem(Reason.STRANGER, f"pod {listed([*refused])} serves without the volume: {why}")


def volume_answers(stage: PlannedStage) -> Problem | None:
    """Every engine has a vLLM that can use the volume, and is answered."""
    unsupported = {pod.name: pod.report.unsupported for pod in stage.snapshot.pods if pod.report}
    if pods := [name for name, why in unsupported.items() if why]:
        what = f"pod {listed(pods)} serves without the volume and without the CPU tier"
        return Problem(Reason.DETACHED, f"{what}: {unsupported[pods[0]]}")
    without = [pod.name for pod in stage.snapshot.pods if pod.report is not None and pod.report.is_detached]
    if not without:
        return None
    return Problem(
        Reason.DETACHED,
        f"pod {listed(without)} serves without the volume, which did not answer or refused it, and goes on "
        f"trying: `kubectl logs {without[0]} -c {names.ENGINE_CONTAINER}` says why. See that the volume is mounted, "
        "reachable and writable for the user and group of the pods",
    )


def active_key_is_there(stage: PlannedStage) -> Problem | None:
    """Every engine has the key that blocks are to be encrypted with."""
    without = [pod.name for pod in stage.snapshot.pods if pod.report is not None and pod.report.is_key_missing]
    encryption = stage.spec.disk.encryption
    if encryption is None or not without:
        return None
    return Problem(
        Reason.KEY_MISSING,
        f"pod {listed(without)} stores nothing: Secret {encryption.secret_name} has no entry "
        f"{encryption.active_key} (spec.disk.encryption.activeKey), or it is no key. A key is 32 bytes: raw, as 64 "
        "hexadecimal digits or in base64, such as `openssl rand -base64 32` prints. The kubelet brings a change of the "
        "Secret within a minute or two",
    )


def janitor_is_not_hindered(stage: PlannedStage) -> Problem | None:
    """The janitor can do its work."""
    usage = stage.snapshot.janitor.usage
    if usage is None or not usage.problems:
        return None
    return Problem(
        Reason.JANITOR_HINDERED,
        f"the janitor cannot do its work: {'; '.join(usage.problems)}; blocks must be writable for the user "
        "and group of the pods (spec.engine.podTemplate.securityContext)",
    )


def _unless_awaited(
    rule: ConditionRule[PlannedStage], is_awaited: Callable[[Snapshot], bool]
) -> ConditionRule[PlannedStage]:
    """Keep the last judgement while a first answer is awaited: a new operator knows nothing yet."""

    def judge(stage: PlannedStage, previous: Status) -> Problem:
        found = rule.judge(stage, previous)
        is_judged = previous.get("observedGeneration") == stage.generation
        if not is_judged or not is_awaited(stage.snapshot) or (found.is_known and not found.is_met):
            return found
        return as_before(rule.kind, previous) or found

    return replace(rule, judge=judge)


WITHIN_BUDGET: Final = _unless_awaited(
    checked(
        "DiskWithinBudget",
        (janitor_reports, volume_is_counted, budget_holds, engines_may_store, volume_has_room),
        ok=Reason.WITHIN_BUDGET,
        text="the blocks take no more than they may",
    ),
    lambda snapshot: snapshot.janitor.is_awaited,
)
DISK_HEALTHY: Final = _unless_awaited(
    checked(
        "DiskHealthy",
        (
            engines_own_the_directory,
            volume_answers,
            active_key_is_there,
            janitor_reports,
            janitor_is_not_hindered,
            releases_agree,
        ),
        ok=Reason.HEALTHY,
        text="engines and janitor work on the volume",
    ),
    lambda snapshot: snapshot.janitor.is_awaited or any(pod.is_awaited for pod in snapshot.pods),
)


def tiers(stage: PlannedStage) -> list[dict[str, Any]]:
    """Return ``status.tiers``: the capacity of each tier and, where it was counted, its use."""
    usage, limit = _counted(stage.snapshot.janitor), stage.spec.disk.budget.max_bytes
    memory: dict[str, Any] = {"name": "cpu", "capacityBytes": stage.sizing.cpu_bytes}
    if not stage.spec.connector.uses_volume:
        return [memory]
    capacity = limit or (usage.volume_bytes if usage is not None else 0)
    disk: dict[str, Any] = {"name": "disk", **({"capacityBytes": capacity} if capacity else {})}
    if usage is not None:
        disk |= {"usedBytes": usage.used_bytes, "blocks": usage.blocks}
        if capacity:
            disk["used"] = f"{round(100 * usage.used_bytes / capacity)}%"
    return [memory, disk]


def generations(stage: PlannedStage, *, current: str) -> list[dict[str, Any]] | None:
    """Return ``status.generations``, the current one first and the others as they were last used; None if unknown."""
    usage = _counted(stage.snapshot.janitor)
    if usage is None:
        return None
    ordered = sorted(usage.generations, key=lambda each: (each.digest != current, -each.last_used, each.digest))
    return [
        {
            "digest": each.digest,
            "role": generation_role(each.digest, current),
            "usedBytes": each.used_bytes,
            "blocks": each.blocks,
            **_time("created", each.created),
            **_time("lastUsed", each.last_used),
        }
        for each in ordered[:MOST_GENERATIONS]
    ]


def with_roles(counted: Iterable[Mapping[str, Any]], *, current: str) -> list[dict[str, Any]]:
    """Return generations of an earlier count, with their roles beside the current one."""
    found = [{**each, "role": generation_role(each["digest"], current)} for each in counted]
    return sorted(found, key=lambda each: each["digest"] != current)


MOST_GENERATIONS: Final = 64
"""Entries of ``status.generations``; more than users keep."""


def _counted(janitor: LiveJanitor) -> Usage | None:
    """Return the report of a janitor that has counted."""
    usage = janitor.usage
    return usage if usage is not None and usage.is_active and usage.is_counted else None


def _time(field: str, seconds: float) -> Mapping[str, str]:
    if not 0 < seconds < datetime(9999, 1, 1, tzinfo=UTC).timestamp():
        return {}
    return {field: datetime.fromtimestamp(int(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")}
