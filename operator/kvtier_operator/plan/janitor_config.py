# SPDX-License-Identifier: Apache-2.0
"""The janitor's document: the budget, the generations to keep, and the place of the blocks. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final

from kvtier_connector.contract import janitor
from kvtier_operator import __version__, names
from kvtier_operator.api import TierSpec
from kvtier_operator.api.routing_spec import EVENTS_PORT
from kvtier_operator.names import TierRef
from kvtier_operator.plan import digest

JANITOR_IMAGE: Final = f"ghcr.io/kvtier/janitor:{__version__}"
"""The default."""


@dataclass(frozen=True, kw_only=True)
class JanitorPlan:
    """Everything the janitor's manifests need besides the tier."""

    image: str
    config_text: str
    """Its document; a janitor that runs follows most of it."""
    config_digest: str
    """Digest of what needs a new process."""


def make_janitor(
    spec: TierSpec, tier: TierRef, *, root: str, image: str, chunk_tokens: int | None = None
) -> JanitorPlan | None:
    """Return the plan of the janitor, or None where the tier has none.

    The root is the directory of the current generation, as pods see it. Only the engine may know the tokens of a file.
    """
    if not spec.janitor.enabled or not spec.connector.has_janitor:
        return None
    budget = spec.disk.budget
    tier_dir, _, current = root.rpartition("/")
    text = janitor.encode(
        janitor.JanitorConfig(
            tier=str(tier),
            tier_dir=tier_dir,
            current=current,
            max_bytes=budget.max_bytes or 0,
            high_watermark=budget.high_fraction,
            low_watermark=budget.low_fraction,
            min_free_fraction=budget.min_free_fraction,
            min_free_bytes=budget.min_free_bytes,
            min_bytes=budget.min_bytes or 0,
            ttl_seconds=float(budget.ttl_seconds),
            keep_previous=spec.generations.keep_previous,
            quotas=spec.disk.tenants.quota_bytes,
            default_quota_bytes=spec.disk.tenants.default_bytes or 0,
            **_events(spec, tier, chunk_tokens),
            layout=spec.connector.layout,
            lease_name=names.janitor(tier),
            lease_namespace=tier.namespace,
        )
    )
    document = json.loads(text)
    fixed = {field: document[field] for field in ("version", *janitor.FIXED_FIELDS) if field in document}
    return JanitorPlan(image=spec.janitor.image or image, config_text=text, config_digest=digest.digest(fixed))


def _events(spec: TierSpec, tier: TierRef, chunk_tokens: int | None) -> dict[str, Any]:
    """Return the settings of KV events; empty where none are published."""
    if spec.kv_events is None or not spec.connector.is_ours:
        return {}
    return {
        "events_port": EVENTS_PORT,
        # Who reads it takes what stands between the signs for the place of the blocks, and the rest for the model.
        "events_topic": f"kv@{tier.name}-volume@{spec.model.name}",
        "events_integer_hashes": spec.kv_events.block_hashes == "Integers",
        "block_tokens": chunk_tokens or 0,
    }
