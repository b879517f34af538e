# SPDX-License-Identifier: Apache-2.0
"""The janitor of a tier: one small pod that may see the volume, renew one Lease, and nothing else; and how it fares.

Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from kvtier_connector.contract import janitor as contract_janitor
from kvtier_operator import names
from kvtier_operator.api.reasons import Reason
from kvtier_operator.conditions import ConditionRule, Problem, View, as_before, met, not_checked, quoted, unknown
from kvtier_operator.names import Manifest
from kvtier_operator.parts import engine_config, pods
from kvtier_operator.plan import TierPlan, releases_claim
from kvtier_operator.plan.janitor_config import JanitorPlan
from kvtier_operator.snapshot import ContainerStatus, Pod, Snapshot

_COMPONENT: Final = names.COMPONENT_JANITOR


def janitor(plan: TierPlan) -> tuple[Manifest, ...]:
    """Return the objects of the janitor in apply order; none where the tier has none."""
    if plan.janitor is None:
        return ()
    return (
        _config(plan, plan.janitor),
        _lease(plan),
        _service_account(plan),
        _role(plan),
        _role_binding(plan),
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


def _lease(plan: TierPlan) -> Manifest:
    """Return the Lease as it is made: whoever holds it writes the rest."""
    return {"apiVersion": names.COORDINATION, "kind": names.LEASE_KIND, "metadata": _metadata(plan)}


def _service_account(plan: TierPlan) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": _metadata(plan),
        # The pod asks for the token by itself, so that nothing else that uses the account gets one.
        "automountServiceAccountToken": False,
    }


def _role(plan: TierPlan) -> Manifest:
    return {
        "apiVersion": names.RBAC,
        "kind": "Role",
        "metadata": _metadata(plan),
        # No right to create one: a rule cannot name what does not exist yet, so the operator makes it.
        "rules": [
            {
                "apiGroups": ["coordination.k8s.io"],
                "resources": ["leases"],
                "resourceNames": [names.janitor(plan.tier)],
                "verbs": ["get", "update"],
            }
        ],
    }


def _role_binding(plan: TierPlan) -> Manifest:
    name = names.janitor(plan.tier)
    return {
        "apiVersion": names.RBAC,
        "kind": "RoleBinding",
        "metadata": _metadata(plan),
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name},
        "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": plan.tier.namespace}],
    }


def _service(plan: TierPlan) -> Manifest:
    port = contract_janitor.JANITOR_PORT
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(plan),
        "spec": {
            "type": "ClusterIP",
            "selector": names.selector(plan.tier, _COMPONENT),
            "ports": [
                {"name": "metrics", "port": port, "targetPort": "metrics", "protocol": "TCP"},
                *engine_config.events_service_ports(plan.spec),
            ],
        },
    }


def _deployment(plan: TierPlan, janitor_plan: JanitorPlan) -> Manifest:
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": _metadata(plan),
        "spec": {
            # An engine that was moved waits for the volume; the janitor comes back beside it.
            "replicas": 0 if plan.is_janitor_in_the_way else 1,
            "selector": {"matchLabels": names.selector(plan.tier, _COMPONENT)},
            # The Lease keeps two from acting at a time; a second one would only wait for the first to go.
            "strategy": {"type": "Recreate"},
            "revisionHistoryLimit": 3,
            "template": {
                "metadata": {
                    "labels": names.labels(plan.tier, _COMPONENT),
                    "annotations": {names.ANNOTATION_CONFIG_DIGEST: janitor_plan.config_digest},
                },
                "spec": _pod(plan, janitor_plan),
            },
        },
    }


def _pod(plan: TierPlan, janitor_plan: JanitorPlan) -> Manifest:
    template = plan.spec.engine.pod_template
    pull_secrets = list(template.image_pull_secrets)
    return {
        "serviceAccountName": names.janitor(plan.tier),
        # For the Lease alone, see the Role.
        "automountServiceAccountToken": True,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": 30,
        # The user and group of the engines: it removes what they wrote.
        "securityContext": pods.security_context(template),
        # A node under disk pressure is where it is needed most. A cluster may have no nodes but those of the engines.
        "tolerations": [{"key": "node.kubernetes.io/disk-pressure", "operator": "Exists"}, *_tolerations(plan)],
        **({"affinity": _beside_the_engine(plan)} if plan.is_on_one_node else {}),
        **({"imagePullSecrets": pull_secrets} if pull_secrets else {}),
        "containers": [_container(plan, janitor_plan)],
        "volumes": [
            {"name": "blocks", "persistentVolumeClaim": {"claimName": plan.claim_name}},
            {"name": "config", "configMap": {"name": names.janitor(plan.tier)}},
            {"name": "scratch", "emptyDir": {"sizeLimit": "16Mi"}},
        ],
    }


def _tolerations(plan: TierPlan) -> list[Manifest]:
    # Elsewhere, it has no business on nodes with devices; a volume of one node may be nowhere else.
    return pods.tolerations(plan) if plan.is_on_one_node else list(plan.spec.engine.pod_template.tolerations)


def _beside_the_engine(plan: TierPlan) -> Manifest:
    """Keep it off other nodes, where it would take the volume from the engine or wait for it for ever."""
    term = {"labelSelector": {"matchLabels": names.selector(plan.tier)}, "topologyKey": "kubernetes.io/hostname"}
    return {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}


def _container(plan: TierPlan, janitor_plan: JanitorPlan) -> Manifest:
    resources = plan.spec.janitor.resources
    config_file = f"{names.JANITOR_CONFIG_MOUNT}/{contract_janitor.JANITOR_CONFIG_FILE}"
    return {
        "name": names.JANITOR_CONTAINER,
        "image": janitor_plan.image,
        "command": ["python3", "-m", "kvtier_connector.janitor"],
        "args": ["--config", config_file, f"--host={plan.listen_host}"],
        "ports": [
            {"name": "metrics", "containerPort": contract_janitor.JANITOR_PORT, "protocol": "TCP"},
            *engine_config.events_ports(plan.spec),
        ],
        "resources": {
            "requests": {"cpu": resources.cpu, "memory": resources.memory, "ephemeral-storage": "16Mi"},
            "limits": {"memory": resources.memory},
        },
        "readinessProbe": {**_health(), "failureThreshold": 3},
        # A volume that hangs is no reason to restart it; only a process that answers nobody is.
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


_PULL: Final = frozenset({"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"})
_BROKEN: Final = frozenset(
    {"CrashLoopBackOff", "CreateContainerConfigError", "CreateContainerError", "RunContainerError"}
)


def _judge(view: View, previous: Mapping[str, Any]) -> Problem:
    """The janitor runs, is heard, and can do its work."""
    if view.spec is None or view.snapshot is None:
        return as_before(_HEALTHY, previous) or not_checked()
    if not view.spec.janitor.enabled:
        return unknown(
            Reason.JANITOR_DISABLED, "spec.janitor.enabled is false: nobody measures the volume, and nothing is removed"
        )
    found, name = view.snapshot.janitor, names.janitor(view.snapshot.tier)
    if releases_claim(view.spec, view.snapshot):
        return unknown(Reason.JANITOR_STARTING, "the claim was deleted; the janitor starts again when there is one")
    dead = _dead_janitor(view.snapshot)
    if dead is not None:
        return dead
    if found.usage is None and found.is_awaited and (told := as_before(_HEALTHY, previous)) is not None:
        return told  # an operator that has just started has not asked yet
    if found.usage is None:
        why = f"the janitor does not answer ({found.silence})" if found.silence else "the janitor has not reported yet"
        return unknown(Reason.JANITOR_STARTING, f"{why}: `kubectl logs deployment/{name}` says what it does")
    if not found.usage.is_active:
        return unknown(Reason.JANITOR_WAITING, f"the janitor waits for Lease/{name}, which another one holds")
    if found.usage.problems:
        return Problem(
            reason=Reason.JANITOR_HINDERED,
            message=f"the janitor cannot do its work: {'; '.join(found.usage.problems)}; `kubectl logs "
            f"deployment/{name}` says more",
        )
    return met(Reason.JANITOR_RUNS, "the janitor runs, and keeps the volume within its budget")


def _dead_janitor(snapshot: Snapshot) -> Problem | None:
    """Return what keeps any janitor from running."""
    found, name = snapshot.janitor, names.janitor(snapshot.tier)
    for pod in found.pods:
        problem = None if pod.is_ready or pod.is_terminating else _of_pod(pod)
        if problem is not None:
            return problem
    refused = _refused(snapshot)
    if refused:
        return Problem(
            reason=Reason.JANITOR_REFUSED,
            message=f"the janitor's pod cannot be created: {refused}; raise the quota, or change what was refused",
        )
    if not found.is_overdue:
        return None
    return Problem(
        reason=Reason.JANITOR_FAILING,
        message=f"no pod of the janitor is ready for minutes now, so nobody clears the volume: `kubectl describe "
        f"deployment/{name}` and `kubectl logs deployment/{name}` say why",
    )


def _of_pod(pod: Pod) -> Problem | None:
    """Return what keeps a pod of the janitor from running."""
    for container in pod.containers:
        if container.waiting_reason in _PULL:
            return Problem(
                reason=Reason.JANITOR_IMAGE_PULL_FAILED,
                message=f"pod {pod.name} of the janitor cannot pull {container.image} ({container.waiting_reason}"
                f"{quoted(container.waiting_message)}), so nobody clears the volume: correct spec.janitor.image or "
                "janitorImage of the operator's chart, or give a pull secret in "
                "spec.engine.podTemplate.imagePullSecrets",
            )
        if container.waiting_reason in _BROKEN:
            return _failing(pod, container)
    if pod.is_scheduled is False:
        return Problem(
            reason=Reason.JANITOR_NOT_SCHEDULED,
            message=f"no node takes pod {pod.name} of the janitor, so nobody clears the volume"
            f"{quoted(pod.scheduling_message)}: make room on a node, or lower spec.janitor.resources",
        )
    return None


def _failing(pod: Pod, container: ContainerStatus) -> Problem:
    if container.exit_reason == "OOMKilled":
        return Problem(
            reason=Reason.JANITOR_FAILING,
            message=f"the janitor in pod {pod.name} was killed at its limit of memory, {container.restarts} times, so "
            "nobody clears the volume: raise spec.janitor.resources.memory",
        )
    ended = (
        container.waiting_message or container.waiting_reason
        if container.exit_code is None
        else f"it ended with exit code {container.exit_code}{quoted(container.exit_message[-_QUOTED:].strip())}"
    )
    return Problem(
        reason=Reason.JANITOR_FAILING,
        message=f"the janitor in pod {pod.name} does not stay up, so nobody clears the volume: {ended}; `kubectl logs "
        f"{pod.name} --previous` says more",
    )


_QUOTED: Final = 200


def _refused(snapshot: Snapshot) -> str:
    """Return why the janitor's pod cannot be created, in the API server's words."""
    live = snapshot.live.get(names.janitor_key(snapshot.tier))
    conditions = () if live is None else live.content.get("status", {}).get("conditions", ())
    failure: Mapping[str, Any] = next((each for each in conditions if each["type"] == "ReplicaFailure"), {})
    return str(failure.get("message", "")) if failure.get("status") == "True" else ""


_HEALTHY: Final = "JanitorHealthy"
HEALTHY: Final = ConditionRule(_HEALTHY, _judge)
