# SPDX-License-Identifier: Apache-2.0
"""What the connector reads: the ConfigMap. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvtier_connector import contract
from kvtier_operator import names
from kvtier_operator.api import TierSpec
from kvtier_operator.names import Manifest, TierRef
from kvtier_operator.parts import backends
from kvtier_operator.plan import TierPlan, live_text


def config(plan: TierPlan) -> Manifest:
    """Return the ConfigMap with the connector's settings."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": names.metadata(plan.tier, names.config(plan.tier), component=names.COMPONENT_ENGINE),
        "data": {
            contract.CONFIG_FILE: plan.config_text,
            contract.LIVE_FILE: plan.live_text,
            **backends.render(plan).files,
        },
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
