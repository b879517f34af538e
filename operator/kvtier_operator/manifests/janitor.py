# SPDX-License-Identifier: Apache-2.0
"""The janitor of a tier: one small pod that may see the volume, renew one Lease, and nothing else. Pure."""

from __future__ import annotations

from typing import Final

from kvtier_connector import contract_janitor
from kvtier_operator import names
from kvtier_operator.manifests import pods
from kvtier_operator.names import Manifest
from kvtier_operator.plan import TierPlan
from kvtier_operator.plan.janitor import JanitorPlan

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
            "ports": [{"name": "metrics", "port": port, "targetPort": "metrics", "protocol": "TCP"}],
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
        "ports": [{"name": "metrics", "containerPort": contract_janitor.JANITOR_PORT, "protocol": "TCP"}],
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
