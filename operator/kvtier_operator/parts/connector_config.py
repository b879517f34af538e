# SPDX-License-Identifier: Apache-2.0
"""What the connector reads: the ConfigMap, and the JSON on the engine's command line that points at it. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from kvtier_connector import contract
from kvtier_operator import names
from kvtier_operator.api import TierSpec
from kvtier_operator.names import Manifest, TierRef
from kvtier_operator.plan import TierPlan, live_text


def config(plan: TierPlan) -> Manifest:
    """Return the ConfigMap with the connector's settings."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": names.metadata(plan.tier, names.config(plan.tier), component=names.COMPONENT_ENGINE),
        "data": {contract.CONFIG_FILE: plan.config_text, contract.LIVE_FILE: plan.live_text},
    }


def with_live_settings(standing: Mapping[str, Any], spec: TierSpec, tier: TierRef) -> Manifest:
    """Return the ConfigMap that stands with the live settings of a spec that cannot be carried out in full.

    Pods that run were made for the rest, and read it again when they are restarted.
    """
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": names.metadata(tier, names.config(tier), component=names.COMPONENT_ENGINE),
        "data": {**standing.get("data", {}), contract.LIVE_FILE: live_text(spec)},
    }


def kv_transfer_config(plan: TierPlan) -> str:
    """Return the value of --kv-transfer-config: our connector, with our spec and our tier."""
    cpu = plan.spec.cpu
    document = {
        "kv_connector": "KVTierConnector",
        "kv_connector_module_path": "kvtier_connector.tier.connector",
        # A chunk that cannot be read costs its computing; vLLM's default ends the request.
        "kv_load_failure_policy": "recompute",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "KVTierSpec",
            "spec_module_path": "kvtier_connector.tier.spec",
            "cpu_bytes_to_use": plan.decisions.cpu_bytes,
            **plan.decisions.chunking.settings(),
            **({"canonical_layout": True} if plan.spec.disk.canonical_layout else {}),
            "eviction_policy": cpu.eviction_policy,
            "offload_prompt_only": cpu.offload_prompt_only,
            "secondary_tiers": [
                {
                    "type": "SharedVolumeTier",
                    "module_path": "kvtier_connector.tier.tier",
                    "config_file": f"{names.CONFIG_MOUNT}/{contract.CONFIG_FILE}",
                    # The file follows the spec while a pod of before it may still be restarted.
                    "generation": plan.generation.digest,
                }
            ],
        },
    }
    return json.dumps(document, sort_keys=True, separators=(",", ":"))
