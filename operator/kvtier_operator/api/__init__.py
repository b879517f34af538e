# SPDX-License-Identifier: Apache-2.0
"""The KVCacheTier API: `parse` turns a raw body into a `TierSpec`, the only form that the operator works on. Pure."""

from __future__ import annotations

from kvtier_operator.api.parse import parse
from kvtier_operator.api.tier_spec import TierSpec

__all__ = ["TierSpec", "parse"]
