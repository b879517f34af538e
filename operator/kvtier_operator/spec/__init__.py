# SPDX-License-Identifier: Apache-2.0
"""The KVCacheTier API: `parse` turns a raw body into a `TierSpec`, the only form that the operator works on. Pure."""

from __future__ import annotations

from kvtier_operator.spec.parse import parse
from kvtier_operator.spec.tier import TierSpec

__all__ = ["TierSpec", "parse"]
