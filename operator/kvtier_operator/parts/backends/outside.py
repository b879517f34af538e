# SPDX-License-Identifier: Apache-2.0
"""FlexKV and Mooncake, whose programs and configuration are the user's: their files, variables and services. Pure."""

from __future__ import annotations

import json
from typing import Any, Final

from kvtier_operator import names
from kvtier_operator.names import Manifest
from kvtier_operator.parts import pods
from kvtier_operator.parts.backends.rendered import Rendered, alone, connector, own_files, variable
from kvtier_operator.plan import TierPlan

FLEXKV_FILE: Final = "flexkv.json"
MOONCAKE_FILE: Final = "mooncake.json"


def flexkv(plan: TierPlan) -> Rendered:
    """Return FlexKV with the user's configuration; its reader takes JSON, which is YAML too."""
    settings = plan.spec.connector.flex_kv
    assert settings is not None
    volume, mount = own_files(plan)
    return Rendered(
        transfer=alone(connector("FlexKVConnectorV1")),
        env=(variable("FLEXKV_CONFIG_PATH", f"{names.CONFIG_MOUNT}/{FLEXKV_FILE}"),),
        volumes=(volume,),
        mounts=(mount,),
        files={FLEXKV_FILE: _json(settings.config)},
    )


def mooncake(plan: TierPlan) -> Rendered:
    """Return Mooncake's store with the user's configuration."""
    settings = plan.spec.connector.mooncake
    assert settings is not None
    volume, mount = own_files(plan)
    return Rendered(
        transfer=alone(connector("MooncakeStoreConnector", {"load_async": settings.load_async})),
        env=(
            variable("MOONCAKE_CONFIG_PATH", f"{names.CONFIG_MOUNT}/{MOONCAKE_FILE}"),
            {"name": "MOONCAKE_REQUESTER_LOCAL_HOSTNAME", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        ),
        volumes=(volume,),
        mounts=(mount,),
        files={MOONCAKE_FILE: _json(_store_config(plan))},
    )


def _store_config(plan: TierPlan) -> dict[str, Any]:
    settings = plan.spec.connector.mooncake
    assert settings is not None
    config = {"metadata_server": "P2PHANDSHAKE", **settings.config}
    if settings.master is not None:
        host = f"{names.mooncake_master(plan.tier)}.{plan.tier.namespace}.svc"
        config["master_server_address"] = f"{host}:{settings.master.port}"
    if config.get("mode", "embedded") == "embedded" and "global_segment_size" not in config:
        # Each rank gives this much of its memory to the pool.
        config["global_segment_size"] = plan.decisions.cpu_bytes // plan.spec.engine.tensor_parallel
    return config


def mooncake_master(plan: TierPlan) -> tuple[Manifest, ...]:
    """Return the Service and the Deployment of Mooncake's master; nothing where the user runs one."""
    settings = plan.spec.connector.mooncake
    if settings is None or settings.master is None:
        return ()
    master, component, name = settings.master, names.COMPONENT_STORE, names.mooncake_master(plan.tier)
    metadata = names.metadata(plan.tier, name, component=component)
    port = {"name": "rpc", "port": master.port, "targetPort": "rpc", "protocol": "TCP"}
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata,
        "spec": {"type": "ClusterIP", "selector": names.selector(plan.tier, component), "ports": [port]},
    }
    container = {
        "name": "mooncake-master",
        "image": master.image or plan.spec.engine.image,
        "command": ["mooncake_master"],
        "args": [f"--port={master.port}", *master.args],
        "ports": [{"name": "rpc", "containerPort": master.port, "protocol": "TCP"}],
        "resources": {"requests": {"cpu": "500m", "memory": "1Gi"}, "limits": {"memory": "2Gi"}},
        "readinessProbe": {"tcpSocket": {"port": "rpc"}, "periodSeconds": 5},
        "securityContext": pods.hardened(),
        "volumeMounts": [{"name": "scratch", "mountPath": names.SCRATCH_MOUNT}],
    }
    return (service, single_pod(plan, name, component, container))


def single_pod(plan: TierPlan, name: str, component: str, container: Manifest, **annotations: str) -> Manifest:
    """Return a Deployment of one pod without a volume that outlives it."""
    template = plan.spec.engine.pod_template
    pull_secrets = list(template.image_pull_secrets)
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": names.metadata(plan.tier, name, component=component),
        "spec": {
            "replicas": 1,
            "selector": {"matchLabels": names.selector(plan.tier, component)},
            "strategy": {"type": "Recreate"},
            "revisionHistoryLimit": 3,
            "template": {
                "metadata": {
                    "labels": names.labels(plan.tier, component),
                    **({"annotations": annotations} if annotations else {}),
                },
                "spec": {
                    "automountServiceAccountToken": False,
                    "enableServiceLinks": False,
                    "securityContext": pods.security_context(template),
                    **({"imagePullSecrets": pull_secrets} if pull_secrets else {}),
                    "containers": [container],
                    "volumes": [{"name": "scratch", "emptyDir": {}}],
                },
            },
        },
    }


def _json(document: Any) -> str:
    return json.dumps(document, indent=2, sort_keys=True, default=dict) + "\n"
